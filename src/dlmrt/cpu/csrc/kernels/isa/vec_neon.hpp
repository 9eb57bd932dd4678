// Sixteen virtual lanes on NEON (64-bit ARM): four registers. Contract: see vec_avx512.hpp.
//
// With DLMRT_NEONDOT int8 products use sdot (s8 x s8, no offset); otherwise widening multiplies and pairwise adds.
//
// Left out: i8mm, which wants pairs of rows and columns. Source: ours.
#pragma once
#include <arm_neon.h>

#include "../args.hpp"

namespace dlmrt::cpu {
namespace {

struct F32 {
  float32x4_t v[4];
};
struct I32 {
  int32x4_t v[4];
};

// clang-format off: one operation a line reads as the table it is
#define DLMRT_QUADS for (int q = 0; q < 4; q++)
inline F32 load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
inline I32 load(const int32_t* p) { return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}}; }
inline void store(float* p, F32 x) { DLMRT_QUADS vst1q_f32(p + 4 * q, x.v[q]); }
inline void store(int32_t* p, I32 x) { DLMRT_QUADS vst1q_s32(p + 4 * q, x.v[q]); }
inline F32 load_n(const float* p, int n) {
  float tail[16] = {};
  __builtin_memcpy(tail, p, static_cast<size_t>(n) * sizeof(float));
  return load(tail);
}
inline void store_n(float* p, F32 x, int n) {
  float tail[16];
  store(tail, x);
  __builtin_memcpy(p, tail, static_cast<size_t>(n) * sizeof(float));
}

inline F32 splat(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
inline I32 splat(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}}; }
#define DLMRT_OP(type, name, op) \
  inline type name(type a, type b) { DLMRT_QUADS a.v[q] = op(a.v[q], b.v[q]); return a; }
DLMRT_OP(F32, add, vaddq_f32)
DLMRT_OP(F32, sub, vsubq_f32)
DLMRT_OP(F32, mul, vmulq_f32)
DLMRT_OP(F32, div, vdivq_f32)
DLMRT_OP(I32, add, vaddq_s32)
DLMRT_OP(I32, sub, vsubq_s32)
DLMRT_OP(I32, max, vmaxq_s32)
DLMRT_OP(I32, min, vminq_s32)
DLMRT_OP(I32, bit_and, vandq_s32)
DLMRT_OP(I32, bit_or, vorrq_s32)
#undef DLMRT_OP
inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // a NaN in b stays
inline float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline F32 max(F32 a, F32 b) { DLMRT_QUADS a.v[q] = max4(a.v[q], b.v[q]); return a; }
inline F32 min(F32 a, F32 b) { DLMRT_QUADS a.v[q] = min4(a.v[q], b.v[q]); return a; }
inline F32 fma(F32 a, F32 b, F32 c) { DLMRT_QUADS c.v[q] = vfmaq_f32(c.v[q], a.v[q], b.v[q]); return c; }
inline F32 fnma(F32 a, F32 b, F32 c) { DLMRT_QUADS c.v[q] = vfmsq_f32(c.v[q], a.v[q], b.v[q]); return c; }
inline int32x4_t as_int(float32x4_t x) { return vreinterpretq_s32_f32(x); }
inline float32x4_t as_float(int32x4_t x) { return vreinterpretq_f32_s32(x); }
template <int kBits>
inline I32 shift_left(I32 x) { DLMRT_QUADS x.v[q] = vshlq_n_s32(x.v[q], kBits); return x; }
template <int kBits>
inline I32 shift_right(I32 x) {
  DLMRT_QUADS x.v[q] = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.v[q]), kBits));
  return x;
}
inline I32 to_int(F32 x) { I32 r; DLMRT_QUADS r.v[q] = vcvtnq_s32_f32(x.v[q]); return r; }
inline F32 to_float(I32 x) { F32 r; DLMRT_QUADS r.v[q] = vcvtq_f32_s32(x.v[q]); return r; }
inline I32 bits(F32 x) { I32 r; DLMRT_QUADS r.v[q] = as_int(x.v[q]); return r; }
inline F32 from_bits(I32 x) { F32 r; DLMRT_QUADS r.v[q] = as_float(x.v[q]); return r; }
inline I32 blend(const uint32x4_t (&mask)[4], I32 x, I32 y) {
  DLMRT_QUADS y.v[q] = vbslq_s32(mask[q], x.v[q], y.v[q]);
  return y;
}
inline I32 select_greater(I32 a, I32 b, I32 x, I32 y) {
  uint32x4_t m[4];
  DLMRT_QUADS m[q] = vcgtq_s32(a.v[q], b.v[q]);
  return blend(m, x, y);
}
inline I32 select(unsigned mask, I32 x, I32 y) {
  const uint32_t bit[4] = {1, 2, 4, 8};
  uint32x4_t m[4];
  DLMRT_QUADS m[q] = vtstq_u32(vdupq_n_u32(mask >> (4 * q)), vld1q_u32(bit));
  return blend(m, x, y);
}
inline F32 select(unsigned mask, F32 x, F32 y) { return from_bits(select(mask, bits(x), bits(y))); }
inline F32 keep_first(F32 x, int n, float fill) { return select((1u << n) - 1u, x, splat(fill)); }
inline unsigned mask4(uint32x4_t m) {
  const uint32_t bit[4] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m, vld1q_u32(bit)));
}
#define DLMRT_OP(name, op) \
  inline unsigned name(F32 a, F32 b) { \
    unsigned m = 0;                    \
    DLMRT_QUADS m |= mask4(op(a.v[q], b.v[q])) << (4 * q); \
    return m;                          \
  }
DLMRT_OP(greater_mask, vcgtq_f32)
DLMRT_OP(equal_mask, vceqq_f32)
#undef DLMRT_OP

inline float reduce_add(F32 x) {  // lanes i + (i + 8), then + 4, + 2, + 1
  const float32x4_t s = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t p = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(p, 0) + vget_lane_f32(p, 1);
}
inline float reduce_max(F32 x) {
  float s[4];
  vst1q_f32(s, max4(max4(x.v[0], x.v[2]), max4(x.v[1], x.v[3])));
  const float a = s[0] > s[2] ? s[0] : s[2], b = s[1] > s[3] ? s[1] : s[3];
  return a > b ? a : b;
}
inline int32_t reduce_max(I32 x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3]))); }

inline void store_low16(uint16_t* p, I32 x) {
  DLMRT_QUADS vst1_u16(p + 4 * q, vmovn_u32(vreinterpretq_u32_s32(x.v[q])));
}
inline I32 load_u16(const uint16_t* p) {
  I32 r;
  DLMRT_QUADS r.v[q] = vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p + 4 * q)));
  return r;
}
inline void store_low8(uint8_t* p, I32 x) {
  uint16x4_t half[4];
  DLMRT_QUADS half[q] = vmovn_u32(vreinterpretq_u32_s32(x.v[q]));
  vst1q_u8(p, vcombine_u8(vmovn_u16(vcombine_u16(half[0], half[1])), vmovn_u16(vcombine_u16(half[2], half[3]))));
}
inline I32 load_u8(const uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(x)), hi = vmovl_u8(vget_high_u8(x));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
// clang-format on

// ---- products of one step. Register tiles within 32 registers.
constexpr int kMaxRows = 4;
constexpr int max_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

struct DotF32 {
  using Acc = F32;
  using A = float32x4_t;
  using B = F32;
  static Acc zero() { return splat(0.f); }
  static A load_a(const uint8_t* p) {
    float cell;
    __builtin_memcpy(&cell, p, 4);
    return vdupq_n_f32(cell);
  }
  static B load_b(const uint8_t* p) {
    B b;
    DLMRT_QUADS b.v[q] = vreinterpretq_f32_u8(vld1q_u8(p + 16 * q));
    return b;
  }
  static Acc dot(Acc acc, A a, const B& b) {
    DLMRT_QUADS acc.v[q] = vfmaq_f32(acc.v[q], a, b.v[q]);
    return acc;
  }
};

inline int32x4_t dot4(int32x4_t acc, int8x16_t a, int8x16_t b) {
#ifdef DLMRT_NEONDOT
  return vdotq_s32(acc, a, b);
#else
  // 2 * 127 * 128 fits the int16 lanes of the first pairwise sum
  const int16x8_t lo = vmull_s8(vget_low_s8(a), vget_low_s8(b)), hi = vmull_s8(vget_high_s8(a), vget_high_s8(b));
  return vpadalq_s16(acc, vpaddq_s16(lo, hi));
#endif
}
struct DotI8 {
  static constexpr bool kOffset = false;
  using Acc = I32;
  using A = int8x16_t;
  struct B {
    int8x16_t v[4];
  };
  static Acc zero() { return splat(0); }
  static A load_a(const uint8_t* p) {
    uint32_t cell;
    __builtin_memcpy(&cell, p, 4);
    return vreinterpretq_s8_u32(vdupq_n_u32(cell ^ 0x80808080u));
  }
  static B load_b(const uint8_t* p) {
    B b;
    DLMRT_QUADS b.v[q] = vreinterpretq_s8_u8(vld1q_u8(p + 16 * q));
    return b;
  }
  static Acc dot(Acc acc, A a, const B& b) {
    DLMRT_QUADS acc.v[q] = dot4(acc.v[q], a, b.v[q]);
    return acc;
  }
};

struct Nibbles {
  using B = DotI8::B;
  int8x16_t table;
  explicit Nibbles(const uint8_t* values) : table(vreinterpretq_s8_u8(vld1q_u8(values))) {}
  void decode(const uint8_t* p, B& low, B& high) const {
    DLMRT_QUADS {
      const uint8x16_t x = vld1q_u8(p + 16 * q);
      low.v[q] = vqtbl1q_s8(table, vandq_u8(x, vdupq_n_u8(15)));
      high.v[q] = vqtbl1q_s8(table, vshrq_n_u8(x, 4));
    }
  }
};
struct DotNibble {
  using B = Nibbles::B;
  using Partial = I32;
  static Partial begin(I32 sum) { return sum; }
  static Partial dot(Partial acc, const uint8_t* cell, const B& b) {
    uint32_t four;
    __builtin_memcpy(&four, cell, 4);
    return DotI8::dot(acc, vreinterpretq_s8_u32(vdupq_n_u32(four)), b);
  }
  static I32 end(I32, Partial p) { return p; }
};

}  // namespace
}  // namespace dlmrt::cpu
