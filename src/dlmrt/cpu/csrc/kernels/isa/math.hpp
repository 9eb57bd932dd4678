// Functions of sixteen lanes built on a vec_*.hpp: exp, log, conversions, cells of operands.
//
// NaN must come out as NaN everywhere: the loop's check for non-finite statistics is the only guard of a poisoned row.
// Hence the operand order of min and max (see vec_avx512.hpp).
//
// Source: ours; polynomials are minimax fits (Lawson iteration), error 3e-9 (exp) and 6e-9 (log) before fp32 rounding.
#pragma once

namespace dlmrt::cpu {
namespace {

constexpr float kLowestExponent = -87.f;  // exp of -87.34 is the least normal number: polynomials end before it

// exp(x), x clamped to [kLowestExponent, 88]; exactly 1 at 0.
inline F32 exp(F32 x) {
  x = max(splat(kLowestExponent), min(splat(88.f), x));
  const I32 n = to_int(mul(x, splat(1.44269504f)));
  const F32 nf = to_float(n);
  F32 r = fnma(nf, splat(0.693359375f), x);
  r = fnma(nf, splat(-2.12194440e-4f), r);
  F32 p = splat(1.381431857e-3f);
  p = fma(p, r, splat(8.368851501e-3f));
  p = fma(p, r, splat(4.1668401143e-2f));
  p = fma(p, r, splat(1.666651952e-1f));
  p = fma(p, r, splat(4.99999933728e-1f));
  p = fma(mul(p, r), r, r);
  p = add(p, splat(1.f));
  return mul(p, from_bits(shift_left<23>(add(n, splat(127)))));
}

// e ln 2 + log(1 + t), t in [sqrt(1/2) - 1, sqrt(2) - 1)
inline F32 log_of_parts(F32 e, F32 t) {
  const F32 t2 = mul(t, t);
  F32 p = splat(-7.6344379769e-2f);
  p = fma(p, t, splat(1.27615629119e-1f));
  p = fma(p, t, splat(-1.31601980032e-1f));
  p = fma(p, t, splat(1.42017610027e-1f));
  p = fma(p, t, splat(-1.66233560495e-1f));
  p = fma(p, t, splat(2.00012267137e-1f));
  p = fma(p, t, splat(-2.50008210684e-1f));
  p = fma(p, t, splat(3.33333317093e-1f));
  F32 y = mul(mul(p, t), t2);
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fnma(splat(.5f), t2, y);
  y = add(t, y);
  return fma(e, splat(0.693359375f), y);
}
// log(x) of positive normal x; NaN stays NaN.
inline F32 log(F32 x) {
  const I32 u = bits(x);  // exponent such that the mantissa lies in [sqrt(1/2), sqrt(2))
  const I32 e = sub(shift_right<23>(add(sub(u, splat(0x3f3504f3)), splat(0x40000000))), splat(128));
  const F32 y = log_of_parts(to_float(e), sub(from_bits(sub(u, shift_left<23>(e))), splat(1.f)));
  return add(y, sub(x, x));  // the bits of a NaN look like a number
}
// log(1 + x) of x > -1. The sum would round off the digits of a small x: within what log_of_parts takes, which begins
// at sqrt(1/2) - 1 = -.2929, x is used as it is.
inline F32 log1p(F32 x) {
  const unsigned is_small = greater_mask(splat(.29f), from_bits(bit_and(bits(x), splat(0x7fffffff))));
  return select(is_small, log_of_parts(splat(0.f), x), log(add(splat(1.f), x)));
}
// Standard Gumbel noise -log(-log(1 - u)) of u within (0, 1); small u keep their precision.
inline F32 gumbel(F32 u) {
  const F32 zero = splat(0.f);
  return sub(zero, log(sub(zero, log1p(sub(zero, u)))));
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1)
inline F32 tanh(F32 x) { return sub(splat(1.f), div(splat(2.f), add(exp(add(x, x)), splat(1.f)))); }
// cap * tanh(x / cap), the cap given with its reciprocal
inline F32 soft_capped(F32 x, F32 cap, F32 inverse_cap) { return mul(cap, tanh(mul(x, inverse_cap))); }
// x / (1 + exp(-x))
inline F32 silu(F32 x) { return div(x, add(splat(1.f), exp(sub(splat(0.f), x)))); }
// gelu_tanh(x) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline F32 gelu_tanh(F32 x) {
  const F32 twice_u = mul(mul(x, splat(1.5957691216f)), fma(mul(x, x), splat(0.044715f), splat(1.f)));
  return div(x, add(splat(1.f), exp(sub(splat(0.f), twice_u))));
}
inline F32 gated(bool is_gelu, F32 gate, F32 up) { return mul(is_gelu ? gelu_tanh(gate) : silu(gate), up); }

// fp32 -> bf16, nearest even; NaN becomes a quiet NaN.
inline void store_bf16(uint16_t* p, F32 x) {
#ifdef DLMRT_AVX512BF16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));  // denormals become 0
#else
  const I32 u = bits(x), odd = bit_and(shift_right<16>(u), splat(1));
  const I32 rounded = shift_right<16>(add(add(u, splat(0x7fff)), odd));
  const I32 magnitude = bit_and(u, splat(0x7fffffff));
  store_low16(p, select_greater(magnitude, splat(0x7f800000), bit_or(shift_right<16>(u), splat(0x40)), rounded));
#endif
}
inline F32 load_bf16(const uint16_t* p) { return from_bits(shift_left<16>(load_u16(p))); }
inline F32 load_bf16_n(const uint16_t* p, int n) {
  uint16_t tail[16] = {};
  __builtin_memcpy(tail, p, static_cast<size_t>(n) * 2);
  return load_bf16(tail);
}
inline int tail16(int64_t left) { return left < 16 ? static_cast<int>(left) : 16; }
inline F32 load_upto16(const float* p, int64_t left) {
  return left >= 16 ? load(p) : load_n(p, static_cast<int>(left));
}
inline void store_upto16(float* p, F32 v, int64_t left) {
  left >= 16 ? store(p, v) : store_n(p, v, static_cast<int>(left));
}

// Sixteen values of one row, k .. k + 15, as cells of its operand group (k multiple of 16).
struct CellWriter {
  uint8_t* row;  // first cell of the row
  DType dtype;
  F32 inverse_scale;

  void write(int64_t k, F32 v) const {
    alignas(64) uint8_t bytes[64];
    if (dtype == DType::kInt8) {
      // to_int gives INT_MIN for NaN; the clamp keeps every code in range, the scale carries the NaN
      const I32 q = max(splat(-127), min(splat(127), to_int(mul(v, inverse_scale))));
      store_low8(bytes, add(q, splat(128)));
      copy<4>(k / 4, bytes);
    } else if (dtype == DType::kBF16) {
      store_bf16(reinterpret_cast<uint16_t*>(bytes), v);
      copy<8>(k / 2, bytes);
    } else {
      store(reinterpret_cast<float*>(bytes), v);
      copy<16>(k, bytes);
    }
  }

 private:
  template <int kCells>
  void copy(int64_t step, const uint8_t* bytes) const {
    for (int i = 0; i < kCells; i++)
      __builtin_memcpy(row + (step + i) * (kRowGroup * kCellBytes), bytes + i * kCellBytes, kCellBytes);
  }
};
inline uint8_t* operand_row(void* cells, DType t, int64_t width, int64_t row) {
  return static_cast<uint8_t*>(cells) +
         (row / kRowGroup * steps_of(t, width) * kRowGroup + row % kRowGroup) * kCellBytes;
}
// Sixteen values k .. k + 15 of `rows` rows that lie `stride` apart, as cells of one operand group (kF32, kBF16). Rows up
// to kRowGroup are read, but what they hold need not be a number.
inline void write_group(uint8_t* cells, DType dtype, int64_t k, const float* x, int64_t stride, int rows) {
#ifdef DLMRT_AVX512BF16
  if (dtype == DType::kBF16 && rows > 2) {
    __m256i pairs[kRowGroup];  // row by row, eight steps each
    for (int i = 0; i < kRowGroup; i++) pairs[i] = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(x + i * stride)));
    transpose8(pairs);
    for (int s = 0; s < 8; s++)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(cells + (k / 2 + s) * (kRowGroup * kCellBytes)), pairs[s]);
    return;
  }
#endif
  for (int i = 0; i < rows; i++) CellWriter{cells + i * kCellBytes, dtype, splat(1.f)}.write(k, load(x + i * stride));
}
inline CellWriter writer(const Operand& o, int64_t row) {
  return {operand_row(o.cells, o.dtype, o.width, row), o.dtype, splat(1.f)};
}

// Running maximum of |x| over bit patterns: the order of the magnitudes, except that infinity and NaN win.
struct MagnitudeMax {
  I32 top = bits(splat(1e-8f));
  void see(F32 v) { top = max(top, bit_and(bits(v), splat(0x7fffffff))); }
  float scale() const { return scale_of(reduce_max(top)); }
  static float scale_of(int32_t bits_of_top) {
    float m;
    __builtin_memcpy(&m, &bits_of_top, 4);
    return m / 127;
  }
};

template <int N>
struct Int {
  static constexpr int value = N;
};
// f(Int<rows>) for rows = 1 .. kMaxRows.
template <class F>
inline void with_rows(int rows, F&& f) {
  switch (rows) {
    case 1: return f(Int<1>{});
    case 2: return f(Int<2>{});
    case 3: return f(Int<3>{});
    case 4: return f(Int<4>{});
  }
  if constexpr (kMaxRows > 4) {
    switch (rows) {
      case 5: return f(Int<5>{});
      case 6: return f(Int<6>{});
      case 7: return f(Int<7>{});
      case 8: return f(Int<8>{});
    }
  }
}
// f(Int<rows>, first row) over the rows of one operand group in pieces of at most kMaxRows.
template <class F>
inline void row_pieces(int rows, F&& f) {
  for (int r = 0; r < rows; r += kMaxRows)
    with_rows(rows - r < kMaxRows ? rows - r : kMaxRows, [&](auto n) { f(n, r); });
}
inline int rows_in_group(int64_t rows, int64_t first) {
  return rows - first < kRowGroup ? static_cast<int>(rows - first) : kRowGroup;
}

}  // namespace
}  // namespace dlmrt::cpu
