// Single draws of the counter contract in dlmrt/ops/numerics.py, for the few numbers that the loop itself needs.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include <cmath>
#include <cstdint>

namespace dlmrt::cpu {

enum Stream : uint32_t { kNoiseStream = 0, kSampleStream = 1 };

// Word `index % 4` of Philox-4x32-10 at the counter (index / 4, step, block, last).
inline uint32_t random_word(uint64_t key, uint32_t index, uint32_t step, uint32_t block, uint32_t last) {
  uint32_t c[4] = {index / 4, step, block, last};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(p0);
  }
  return c[index % 4];
}

// Standard Gumbel noise of vocabulary id `id` in canvas slot `slot`.
inline double gumbel_noise(uint64_t seed, uint32_t id, uint32_t step, uint32_t block, uint32_t slot) {
  const double u = (random_word(seed, id, step, block, kSampleStream | slot << 8) + .5) * 0x1p-32;
  return -std::log(-std::log1p(-u));
}

}  // namespace dlmrt::cpu
