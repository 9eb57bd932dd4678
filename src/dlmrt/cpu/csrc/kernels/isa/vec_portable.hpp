// Sixteen virtual lanes in plain C++: the definition that the other vec_*.hpp files match, and the fallback everywhere.
//
// Fused multiply-add is computed in double with rounding to odd, which rounds the final float once: correct for every
// input on machines without the instruction (slow, but this path is for correctness).
//
// Source: ours; rounding to odd: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (IEEE TC 2008).
#pragma once
#include "../args.hpp"

namespace dlmrt::cpu {
namespace {

struct F32 {
  float v[16];
};
struct I32 {
  int32_t v[16];
};

// clang-format off: one operation a line reads as the table it is
#define DLMRT_LANES for (int i = 0; i < 16; i++)
template <class To, class From>
inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}
inline float fma1(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  const double p = double(a) * b, s = p + c, t = s - p;
  const double error = (p - (s - t)) + (c - t);  // exact: s + error = p + c
  const uint64_t u = bit_cast<uint64_t>(s);
  if (!(error < 0 || error > 0) || (u & 1)) return float(s);
  return float(bit_cast<double>((error > 0) == (s > 0) ? u + 1 : u - 1));
#endif
}

inline F32 load(const float* p) { F32 r; DLMRT_LANES r.v[i] = p[i]; return r; }
inline I32 load(const int32_t* p) { I32 r; DLMRT_LANES r.v[i] = p[i]; return r; }
inline void store(float* p, F32 v) { DLMRT_LANES p[i] = v.v[i]; }
inline void store(int32_t* p, I32 v) { DLMRT_LANES p[i] = v.v[i]; }
inline F32 load_n(const float* p, int n) { F32 r; DLMRT_LANES r.v[i] = i < n ? p[i] : 0.f; return r; }
inline void store_n(float* p, F32 v, int n) { for (int i = 0; i < n; i++) p[i] = v.v[i]; }
inline F32 keep_first(F32 v, int n, float fill) { DLMRT_LANES v.v[i] = i < n ? v.v[i] : fill; return v; }

inline F32 splat(float x) { F32 r; DLMRT_LANES r.v[i] = x; return r; }
inline I32 splat(int32_t x) { I32 r; DLMRT_LANES r.v[i] = x; return r; }
inline int32_t wrap(int64_t x) { return static_cast<int32_t>(static_cast<uint32_t>(x)); }
#define DLMRT_OP(type, name, expression) \
  inline type name(type a, type b) {         \
    DLMRT_LANES {                            \
      const auto x = a.v[i];                 \
      const auto y = b.v[i];                 \
      a.v[i] = (expression);                 \
    }                                        \
    return a;                                \
  }
DLMRT_OP(F32, add, x + y)
DLMRT_OP(F32, sub, x - y)
DLMRT_OP(F32, mul, x * y)
DLMRT_OP(F32, div, x / y)
DLMRT_OP(F32, max, x > y ? x : y)  // a NaN in b stays
DLMRT_OP(F32, min, x < y ? x : y)
DLMRT_OP(I32, add, wrap(int64_t{x} + y))
DLMRT_OP(I32, sub, wrap(int64_t{x} - y))
DLMRT_OP(I32, max, x > y ? x : y)
DLMRT_OP(I32, min, x < y ? x : y)
DLMRT_OP(I32, bit_and, x & y)
DLMRT_OP(I32, bit_or, x | y)
#undef DLMRT_OP
inline F32 fma(F32 a, F32 b, F32 c) { DLMRT_LANES c.v[i] = fma1(a.v[i], b.v[i], c.v[i]); return c; }
inline F32 fnma(F32 a, F32 b, F32 c) { DLMRT_LANES c.v[i] = fma1(-a.v[i], b.v[i], c.v[i]); return c; }
template <int kBits>
inline I32 shift_left(I32 v) { DLMRT_LANES v.v[i] = wrap(int64_t(static_cast<uint32_t>(v.v[i])) << kBits); return v; }
template <int kBits>
inline I32 shift_right(I32 v) { DLMRT_LANES v.v[i] = wrap(static_cast<uint32_t>(v.v[i]) >> kBits); return v; }
inline int32_t nearest_even(float x) {  // INT_MIN when out of range, as x86
  return x > -2147483648.f && x < 2147483648.f ? static_cast<int32_t>(__builtin_nearbyintf(x)) : INT32_MIN;
}
inline I32 to_int(F32 v) { I32 r; DLMRT_LANES r.v[i] = nearest_even(v.v[i]); return r; }
inline F32 to_float(I32 v) { F32 r; DLMRT_LANES r.v[i] = static_cast<float>(v.v[i]); return r; }
inline I32 bits(F32 v) { return bit_cast<I32>(v); }
inline F32 from_bits(I32 v) { return bit_cast<F32>(v); }
inline I32 select_greater(I32 a, I32 b, I32 x, I32 y) {
  DLMRT_LANES y.v[i] = a.v[i] > b.v[i] ? x.v[i] : y.v[i];
  return y;
}
#define DLMRT_OP(name, op)             \
  inline unsigned name(F32 a, F32 b) { \
    unsigned m = 0;                    \
    DLMRT_LANES m |= static_cast<unsigned>(a.v[i] op b.v[i]) << i; \
    return m;                          \
  }
DLMRT_OP(greater_mask, >)
DLMRT_OP(equal_mask, ==)
#undef DLMRT_OP
inline F32 select(unsigned mask, F32 x, F32 y) { DLMRT_LANES y.v[i] = mask >> i & 1 ? x.v[i] : y.v[i]; return y; }
inline I32 select(unsigned mask, I32 x, I32 y) { DLMRT_LANES y.v[i] = mask >> i & 1 ? x.v[i] : y.v[i]; return y; }

inline float reduce_add(F32 v) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) v.v[i] += v.v[i + half];
  return v.v[0];
}
inline float reduce_max(F32 v) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) v.v[i] = v.v[i] > v.v[i + half] ? v.v[i] : v.v[i + half];
  return v.v[0];
}
inline int32_t reduce_max(I32 v) {
  int32_t top = v.v[0];
  DLMRT_LANES top = v.v[i] > top ? v.v[i] : top;
  return top;
}

inline void store_low16(uint16_t* p, I32 v) { DLMRT_LANES p[i] = static_cast<uint16_t>(v.v[i]); }
inline I32 load_u16(const uint16_t* p) { I32 r; DLMRT_LANES r.v[i] = p[i]; return r; }
inline void store_low8(uint8_t* p, I32 v) { DLMRT_LANES p[i] = static_cast<uint8_t>(v.v[i]); }
inline I32 load_u8(const uint8_t* p) { I32 r; DLMRT_LANES r.v[i] = p[i]; return r; }
inline void prefetch(const void*) {}
// clang-format on

// ---- products of one step
constexpr int kMaxRows = 4;
constexpr int max_panels(int) { return 1; }

struct DotF32 {
  using Acc = F32;
  using A = float;
  using B = F32;
  static Acc zero() { return splat(0.f); }
  static A load_a(const uint8_t* p) {
    A a;
    __builtin_memcpy(&a, p, 4);
    return a;
  }
  static B load_b(const uint8_t* p) {
    B b;
    __builtin_memcpy(&b, p, 64);
    return b;
  }
  static Acc dot(Acc acc, A a, const B& b) {
    DLMRT_LANES acc.v[i] = fma1(a, b.v[i], acc.v[i]);
    return acc;
  }
};

// Products of two bf16 values are exact in fp32, so multiply and add round like the fused form.
struct DotBF16 {
  using Acc = F32;
  struct A {
    float k[2];
  };
  struct B {
    F32 k[2];
  };
  static float widen(uint32_t high_half) { return bit_cast<float>(high_half << 16); }
  static Acc zero() { return splat(0.f); }
  static A load_a(const uint8_t* p) {
    uint16_t k[2];
    __builtin_memcpy(k, p, 4);
    return {{widen(k[0]), widen(k[1])}};
  }
  static B load_b(const uint8_t* p) {
    uint16_t k[32];
    __builtin_memcpy(k, p, 64);
    B b;
    DLMRT_LANES b.k[0].v[i] = widen(k[2 * i]), b.k[1].v[i] = widen(k[2 * i + 1]);
    return b;
  }
  static B load_rows(const uint16_t* even, const uint16_t* odd) {
    B b;
    DLMRT_LANES b.k[0].v[i] = widen(even[i]), b.k[1].v[i] = widen(odd[i]);
    return b;
  }
  static B even_only(B b) {
    b.k[1] = splat(0.f);
    return b;
  }
  static Acc dot(Acc acc, A a, const B& b) {
    for (int j = 0; j < 2; j++) DLMRT_LANES acc.v[i] += a.k[j] * b.k[j].v[i];
    return acc;
  }
};

struct DotI8 {
  static constexpr bool kOffset = false;
  using Acc = I32;
  struct A {
    int16_t k[4];
  };
  struct B {
    int16_t k[4][16];
  };
  static Acc zero() { return splat(0); }
  static A load_a(const uint8_t* p) {
    return {{int16_t(p[0] - 128), int16_t(p[1] - 128), int16_t(p[2] - 128), int16_t(p[3] - 128)}};
  }
  static B load_b(const uint8_t* p) {
    B b;
    for (int j = 0; j < 4; j++) DLMRT_LANES b.k[j][i] = static_cast<int8_t>(p[i * 4 + j]);
    return b;
  }
  static Acc dot(Acc acc, A a, const B& b) {
    for (int j = 0; j < 4; j++) DLMRT_LANES acc.v[i] += a.k[j] * b.k[j][i];
    return acc;
  }
};

struct Nibbles {
  using B = DotI8::B;
  uint8_t table[16];
  explicit Nibbles(const uint8_t* values) { DLMRT_LANES table[i] = values[i]; }
  void decode(const uint8_t* p, B& low, B& high) const {
    for (int j = 0; j < 4; j++)
      DLMRT_LANES low.k[j][i] = table[p[i * 4 + j] & 15], high.k[j][i] = table[p[i * 4 + j] >> 4];
  }
};
struct DotNibble {
  using B = Nibbles::B;
  using Partial = I32;
  static Partial begin(I32 sum) { return sum; }
  static Partial dot(Partial acc, const uint8_t* cell, const B& b) {
    DotI8::A a;
    for (int j = 0; j < 4; j++) a.k[j] = static_cast<int8_t>(cell[j]);
    return DotI8::dot(acc, a, b);
  }
  static I32 end(I32, Partial p) { return p; }
};

}  // namespace
}  // namespace dlmrt::cpu
