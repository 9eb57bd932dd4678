// Sixteen virtual lanes on AVX2 and FMA: two registers. Contract: see vec_avx512.hpp.
//
// With DLMRT_AVXVNNI the int8 products use the 256-bit vpdpbusd; otherwise vpmaddubsw on |w| <= 128 and the activation,
// of at most 127, with the sign of w: exact because 2 * 128 * 127 fits int16.
//
// Source: ours.
#pragma once
#include <immintrin.h>

#include "../args.hpp"

namespace dlmrt::cpu {
namespace {

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline I32 load(const int32_t* p) { return {load256(p), load256(p + 8)}; }
inline void store(float* p, F32 v) { _mm256_storeu_ps(p, v.lo), _mm256_storeu_ps(p + 8, v.hi); }
inline void store(int32_t* p, I32 v) { store256(p, v.lo), store256(p + 8, v.hi); }
inline I32 first(int n) {  // all ones in the first n lanes
  const __m256i iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), count = _mm256_set1_epi32(n);
  return {_mm256_cmpgt_epi32(count, iota), _mm256_cmpgt_epi32(count, _mm256_add_epi32(iota, _mm256_set1_epi32(8)))};
}
inline F32 load_n(const float* p, int n) {
  const I32 m = first(n);
  return {_mm256_maskload_ps(p, m.lo), n > 8 ? _mm256_maskload_ps(p + 8, m.hi) : _mm256_setzero_ps()};
}
inline void store_n(float* p, F32 v, int n) {
  const I32 m = first(n);
  _mm256_maskstore_ps(p, m.lo, v.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, m.hi, v.hi);
}

inline F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I32 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
#define DLMRT_BOTH(type, name, op) \
  inline type name(type a, type b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
DLMRT_BOTH(F32, add, _mm256_add_ps)
DLMRT_BOTH(F32, sub, _mm256_sub_ps)
DLMRT_BOTH(F32, mul, _mm256_mul_ps)
DLMRT_BOTH(F32, div, _mm256_div_ps)
DLMRT_BOTH(F32, max, _mm256_max_ps)  // a > b ? a : b, so a NaN in b stays
DLMRT_BOTH(F32, min, _mm256_min_ps)
DLMRT_BOTH(I32, add, _mm256_add_epi32)
DLMRT_BOTH(I32, sub, _mm256_sub_epi32)
DLMRT_BOTH(I32, max, _mm256_max_epi32)
DLMRT_BOTH(I32, min, _mm256_min_epi32)
DLMRT_BOTH(I32, bit_and, _mm256_and_si256)
DLMRT_BOTH(I32, bit_or, _mm256_or_si256)
#undef DLMRT_BOTH
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F32 fnma(F32 a, F32 b, F32 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
template <int kBits>
inline I32 shift_left(I32 v) {
  return {_mm256_slli_epi32(v.lo, kBits), _mm256_slli_epi32(v.hi, kBits)};
}
template <int kBits>
inline I32 shift_right(I32 v) {
  return {_mm256_srli_epi32(v.lo, kBits), _mm256_srli_epi32(v.hi, kBits)};
}
inline I32 to_int(F32 v) { return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)}; }
inline F32 to_float(I32 v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
inline I32 bits(F32 v) { return {_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi)}; }
inline F32 from_bits(I32 v) { return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)}; }
inline F32 blend(I32 mask, F32 x, F32 y) {
  const F32 m = from_bits(mask);
  return {_mm256_blendv_ps(y.lo, x.lo, m.lo), _mm256_blendv_ps(y.hi, x.hi, m.hi)};
}
inline F32 keep_first(F32 v, int n, float fill) { return blend(first(n), v, splat(fill)); }
inline I32 select_greater(I32 a, I32 b, I32 x, I32 y) {
  const I32 m{_mm256_cmpgt_epi32(a.lo, b.lo), _mm256_cmpgt_epi32(a.hi, b.hi)};
  return bits(blend(m, from_bits(x), from_bits(y)));
}
inline unsigned to_mask(__m256 lo, __m256 hi) {
  return static_cast<unsigned>(_mm256_movemask_ps(lo)) | static_cast<unsigned>(_mm256_movemask_ps(hi)) << 8;
}
inline unsigned greater_mask(F32 a, F32 b) {
  return to_mask(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
inline unsigned equal_mask(F32 a, F32 b) {
  return to_mask(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
inline I32 lanes_of(unsigned mask) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128),
                lo = _mm256_set1_epi32(static_cast<int>(mask & 255)),
                hi = _mm256_set1_epi32(static_cast<int>(mask >> 8));
  return {_mm256_cmpeq_epi32(_mm256_and_si256(lo, bit), bit), _mm256_cmpeq_epi32(_mm256_and_si256(hi, bit), bit)};
}
inline F32 select(unsigned mask, F32 x, F32 y) { return blend(lanes_of(mask), x, y); }
inline I32 select(unsigned mask, I32 x, I32 y) { return bits(blend(lanes_of(mask), from_bits(x), from_bits(y))); }

inline float reduce_add(F32 v) {
  __m256 a = _mm256_add_ps(v.lo, v.hi);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline float reduce_max(F32 v) {
  __m256 a = _mm256_max_ps(v.lo, v.hi);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
inline int32_t reduce_max(I32 v) {
  const __m256i a = _mm256_max_epi32(v.lo, v.hi);
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 1)));
}

inline void store_low16(uint16_t* p, I32 v) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  store256(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(v.lo, mask), _mm256_and_si256(v.hi, mask)),
                                       0xd8));
}
inline I32 load_u16(const uint16_t* p) {
  const __m256i v = load256(p);
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}
inline void store_low8(uint8_t* p, I32 v) {
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i words =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(v.lo, mask), _mm256_and_si256(v.hi, mask)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline I32 load_u8(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// ---- products of one step. Register tiles within 16 registers.
constexpr int kMaxRows = 4;
constexpr int max_panels(int rows) { return rows == 1 ? 2 : 1; }

struct DotF32 {
  using Acc = F32;
  using A = __m256;
  using B = F32;
  static Acc zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static A load_a(const uint8_t* p) {
    float cell;
    __builtin_memcpy(&cell, p, 4);
    return _mm256_set1_ps(cell);
  }
  static B load_b(const uint8_t* p) { return {_mm256_castsi256_ps(load256(p)), _mm256_castsi256_ps(load256(p + 32))}; }
  static Acc dot(Acc acc, A a, B b) { return {_mm256_fmadd_ps(a, b.lo, acc.lo), _mm256_fmadd_ps(a, b.hi, acc.hi)}; }
};

inline __m256i splat_cell(const uint8_t* p) {
  int32_t cell;
  __builtin_memcpy(&cell, p, 4);
  return _mm256_set1_epi32(cell);
}
#ifdef DLMRT_AVXVNNI
struct DotI8 {
  static constexpr bool kOffset = true;
  using Acc = I32;
  using A = __m256i;
  using B = I32;
  static Acc zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static A load_a(const uint8_t* p) { return splat_cell(p); }
  static B load_b(const uint8_t* p) { return {load256(p), load256(p + 32)}; }
  static Acc dot(Acc acc, A a, B b) {  // see vec_avx512.hpp for why this is not the intrinsic
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.lo) : "x"(a), "x"(b.lo));
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.hi) : "x"(a), "x"(b.hi));
    return acc;
  }
};
#else
struct DotI8 {
  static constexpr bool kOffset = false;
  using Acc = I32;
  using A = __m256i;
  struct B {
    __m256i lo, hi, abs_lo, abs_hi;
  };
  static Acc zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static A load_a(const uint8_t* p) {
    return _mm256_xor_si256(splat_cell(p), _mm256_set1_epi8(static_cast<char>(0x80)));
  }
  static B load_b(const uint8_t* p) {
    const __m256i lo = load256(p), hi = load256(p + 32);
    return {lo, hi, _mm256_abs_epi8(lo), _mm256_abs_epi8(hi)};
  }
  static __m256i product(__m256i abs_w, __m256i w, __m256i a) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(abs_w, _mm256_sign_epi8(a, w)), _mm256_set1_epi16(1));
  }
  static Acc dot(Acc acc, A a, B b) {
    return {_mm256_add_epi32(acc.lo, product(b.abs_lo, b.lo, a)), _mm256_add_epi32(acc.hi, product(b.abs_hi, b.hi, a))};
  }
};
#endif

struct Nibbles {
  using B = I32;
  __m256i table;
  explicit Nibbles(const uint8_t* values)
      : table(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)))) {}
  void decode(const uint8_t* p, B& low, B& high) const {
    const __m256i mask = _mm256_set1_epi8(15), v0 = load256(p), v1 = load256(p + 32);
    low = {_mm256_shuffle_epi8(table, _mm256_and_si256(v0, mask)),
           _mm256_shuffle_epi8(table, _mm256_and_si256(v1, mask))};
    high = {_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v0, 4), mask)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v1, 4), mask))};
  }
};
// s8 activations times 4-bit values cannot saturate vpmaddubsw: 16 k add up in int16 lanes (8 * 127 * 24 < 32,768).
struct DotNibble {
  using B = I32;
  using Partial = I32;
#ifdef DLMRT_AVXVNNI
  static Partial begin(I32 sum) { return sum; }
  static Partial dot(Partial acc, const uint8_t* cell, B b) {  // see vec_avx512.hpp for why this is not the intrinsic
    const __m256i a = splat_cell(cell);
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.lo) : "x"(b.lo), "x"(a));
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.hi) : "x"(b.hi), "x"(a));
    return acc;
  }
  static I32 end(I32, Partial p) { return p; }
#else
  static Partial begin(I32) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Partial dot(Partial acc, const uint8_t* cell, B b) {
    const __m256i a = splat_cell(cell);
    return {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(b.lo, a)),
            _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(b.hi, a))};
  }
  static I32 end(I32 sum, Partial p) {
    const __m256i one = _mm256_set1_epi16(1);
    return add(sum, {_mm256_madd_epi16(p.lo, one), _mm256_madd_epi16(p.hi, one)});
  }
#endif
};

}  // namespace
}  // namespace dlmrt::cpu
