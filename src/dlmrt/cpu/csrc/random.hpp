// Single draws of the counter contract in dlmrt/ops/numerics.py, for the few numbers that the loop itself needs.
//
// Source: ours; rounds in kernels/philox.hpp.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/philox.hpp"

namespace dlmrt::cpu {

enum Stream : uint32_t { kNoiseStream = 0, kSampleStream = 1 };

// Word `index % 4` of Philox-4x32-10 at the counter (index / 4, step, block, last).
inline uint32_t random_word(uint64_t key, uint32_t index, uint32_t step, uint32_t block, uint32_t last) {
  uint32_t c0[1] = {index / 4}, c1[1] = {step}, c2[1] = {block}, c3[1] = {last};
  philox_rounds(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), c0, c1, c2, c3);
  const uint32_t words[4] = {c0[0], c1[0], c2[0], c3[0]};
  return words[index % 4];
}

// Standard Gumbel noise of vocabulary id `id` in canvas slot `slot`.
inline double gumbel_noise(uint64_t seed, uint32_t id, uint32_t step, uint32_t block, uint32_t slot) {
  const double u = (random_word(seed, id, step, block, kSampleStream | slot << 8) + .5) * 0x1p-32;
  return -std::log(-std::log1p(-u));
}

}  // namespace dlmrt::cpu
