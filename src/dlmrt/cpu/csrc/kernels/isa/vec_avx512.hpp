// Sixteen virtual lanes on AVX-512: one register.
//
// The four vec_*.hpp files offer the same functions with the same rounding: fused multiply-add where it is written,
// one addition tree, comparisons that decide alike for NaN. Every vector loop is written once on top of them, so fp32
// results are equal bit for bit on all instruction sets.
//
// Source: ours.
#pragma once
#include <immintrin.h>

#include "../args.hpp"

namespace dlmrt::cpu {
namespace {

using F32 = __m512;
using I32 = __m512i;

inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline I32 load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline void store(int32_t* p, I32 v) { _mm512_storeu_si512(p, v); }
inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
// The first n (0..16) elements, zeros behind them.
inline F32 load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store_n(float* p, F32 v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
inline F32 keep_first(F32 v, int n, float fill) { return _mm512_mask_mov_ps(_mm512_set1_ps(fill), first(n), v); }

inline F32 splat(float x) { return _mm512_set1_ps(x); }
inline I32 splat(int32_t x) { return _mm512_set1_epi32(x); }
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline F32 fnma(F32 a, F32 b, F32 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }                // a > b ? a : b, so a NaN in b stays
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }                // a < b ? a : b
inline I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
inline I32 max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
inline I32 min(I32 a, I32 b) { return _mm512_min_epi32(a, b); }
inline I32 bit_and(I32 a, I32 b) { return _mm512_and_si512(a, b); }
inline I32 bit_or(I32 a, I32 b) { return _mm512_or_si512(a, b); }
template <int kBits>
inline I32 shift_left(I32 v) {
  return _mm512_slli_epi32(v, kBits);
}
template <int kBits>
inline I32 shift_right(I32 v) {
  return _mm512_srli_epi32(v, kBits);
}                                                           // logical
inline I32 to_int(F32 v) { return _mm512_cvtps_epi32(v); }  // nearest even
inline F32 to_float(I32 v) { return _mm512_cvtepi32_ps(v); }
inline I32 bits(F32 v) { return _mm512_castps_si512(v); }
inline F32 from_bits(I32 v) { return _mm512_castsi512_ps(v); }
inline I32 select_greater(I32 a, I32 b, I32 x, I32 y) {
  return _mm512_mask_mov_epi32(y, _mm512_cmpgt_epi32_mask(a, b), x);
}
inline unsigned greater_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline unsigned equal_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline F32 select(unsigned mask, F32 x, F32 y) { return _mm512_mask_mov_ps(y, static_cast<__mmask16>(mask), x); }
inline I32 select(unsigned mask, I32 x, I32 y) { return _mm512_mask_mov_epi32(y, static_cast<__mmask16>(mask), x); }

// lanes i + (i + 8), then + 4, + 2, + 1
inline float reduce_add(F32 v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline float reduce_max(F32 v) {
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline int32_t reduce_max(I32 v) { return _mm512_reduce_max_epi32(v); }

inline void store_low16(uint16_t* p, I32 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
inline I32 load_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_low8(uint8_t* p, I32 v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
inline I32 load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// ---- products of one step: 16 columns by one cell. Register tiles: rows x panels within 32 registers.
constexpr int kMaxRows = 8;
constexpr int max_panels(int rows) { return rows <= 6 ? 4 : 3; }

struct DotF32 {
  using Acc = F32;
  using A = F32;
  using B = F32;
  static Acc zero() { return _mm512_setzero_ps(); }
  static A load_a(const uint8_t* p) {
    float cell;
    __builtin_memcpy(&cell, p, 4);
    return _mm512_set1_ps(cell);
  }
  static B load_b(const uint8_t* p) { return _mm512_loadu_ps(p); }
  static Acc dot(Acc acc, A a, B b) { return _mm512_fmadd_ps(a, b, acc); }
};

// u8 activations times s8 weights: sums carry 128 * (sum of weights).
struct DotI8 {
  static constexpr bool kOffset = true;
  using Acc = I32;
  using A = __m512i;
  using B = __m512i;
  static Acc zero() { return _mm512_setzero_si512(); }
  static A load_a(const uint8_t* p) {
    int32_t cell;
    __builtin_memcpy(&cell, p, 4);
    return _mm512_set1_epi32(cell);
  }
  static B load_b(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // g++ 12 keeps a copy of each accumulator in memory around the intrinsic: half the speed
  static Acc dot(Acc acc, A a, B b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
};

// Nibbles of eight k by 16 columns -> two vectors of u8 by a table of 16 values below 128.
struct Nibbles {
  using B = __m512i;
  __m512i table;
  explicit Nibbles(const uint8_t* values)
      : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)))) {}
  void decode(const uint8_t* p, B& low, B& high) const {
    const __m512i mask = _mm512_set1_epi8(15), v = _mm512_loadu_si512(p);
    low = _mm512_shuffle_epi8(table, _mm512_and_si512(v, mask));
    high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), mask));
  }
};
// Products of decoded nibbles with a signed cell; a Partial takes 16 k between begin and end.
struct DotNibble {
  using B = Nibbles::B;
  using Partial = I32;
  static Partial begin(I32 sum) { return sum; }
  static Partial dot(Partial acc, const uint8_t* cell, B b) {  // see DotI8 for why this is not the intrinsic
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(acc)
        : "v"(b), "m"(*reinterpret_cast<const uint8_t(*)[kCellBytes]>(cell)));
    return acc;
  }
  static I32 end(I32, Partial p) { return p; }
};

#ifdef DLMRT_AVX512BF16
inline void transpose8(__m256i (&v)[8]) {  // 8 x 8 of 32 bits
  __m256i w[8];
  for (int i = 0; i < 8; i += 2) {
    w[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      v[i + 2 * j] = _mm256_unpacklo_epi64(w[i + j], w[i + j + 2]);
      v[i + 2 * j + 1] = _mm256_unpackhi_epi64(w[i + j], w[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    w[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
    w[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
  }
  for (int i = 0; i < 8; i++) v[i] = w[i];
}

struct DotBF16 {
  using Acc = F32;
  using A = __m512bh;
  using B = __m512bh;
  static Acc zero() { return _mm512_setzero_ps(); }
  static A load_a(const uint8_t* p) {
    int32_t cell;
    __builtin_memcpy(&cell, p, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(cell));
  }
  static B load_b(const uint8_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  // Rows k and k + 1 of a row-major table, 16 columns.
  static B load_rows(const uint16_t* even, const uint16_t* odd) {
    return reinterpret_cast<__m512bh>(bit_or(load_u16(even), shift_left<16>(load_u16(odd))));
  }
  static B even_only(B b) {  // second k of each pair becomes 0
    return reinterpret_cast<__m512bh>(_mm512_and_si512(reinterpret_cast<__m512i>(b), _mm512_set1_epi32(0xffff)));
  }
  static Acc dot(Acc acc, A a, B b) { return _mm512_dpbf16_ps(acc, a, b); }
};
#endif

}  // namespace
}  // namespace dlmrt::cpu
