// Philox-4x32-10 for many counters at once, and uniforms from its words.
//
// The counter contract is that of dlmrt/ops/numerics.py: key = 64-bit seed, counter = (id / 4, step, block, stream |
// slot << 8); word id % 4 of the result belongs to vocabulary id `id`. Written over arrays so that each instruction
// set's compiler flags vectorise it; integers, so all agree bit for bit.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include "args.hpp"

namespace dlmrt::cpu {
namespace {

constexpr int kNoiseIds = 64;            // ids that one call covers
constexpr float kLargestGumbel = 22.9f;  // -log(-log1p(-2^-33)), rounded up

// Ten rounds on N counters (c0[i], c1[i], c2[i], c3[i]) in place.
template <int N>
inline void philox_rounds(uint32_t k0, uint32_t k1, uint32_t (&c0)[N], uint32_t (&c1)[N], uint32_t (&c2)[N],
                          uint32_t (&c3)[N]) {
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int i = 0; i < N; i++) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0[i], p1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(p1);
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(p0);
    }
}

// words[i] belongs to id first_id + i; first_id multiple of 4.
inline void noise_words(const GumbelKey& key, uint32_t first_id, uint32_t (&words)[kNoiseIds]) {
  constexpr int kCalls = kNoiseIds / 4;
  uint32_t c0[kCalls], c1[kCalls], c2[kCalls], c3[kCalls];
  for (int i = 0; i < kCalls; i++)
    c0[i] = first_id / 4 + static_cast<uint32_t>(i), c1[i] = key.step, c2[i] = key.block, c3[i] = key.last;
  philox_rounds(key.seed[0], key.seed[1], c0, c1, c2, c3);
  for (int i = 0; i < kCalls; i++)
    words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
}

// (word + 1/2) / 2^32 rounded to fp32, kept below 1.
inline float uniform_of(uint32_t word) {
  const float u = static_cast<float>((word + .5) * 0x1p-32);
  return u < 1.f ? u : 0x1.fffffep-1f;
}

}  // namespace
}  // namespace dlmrt::cpu
