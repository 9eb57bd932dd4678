// bf16 products widened to fp32 fused multiply-adds, for instruction sets without a bf16 dot product.
//
// The order is that of the operand: both k of a pair, ascending. Source: ours.
#pragma once

namespace dlmrt::cpu {
namespace {

struct DotBF16 {
  using Acc = F32;
  struct A {
    F32 even, odd;
  };
  using B = A;
  static Acc zero() { return splat(0.f); }
  static A load_a(const uint8_t* p) {
    uint32_t cell;
    __builtin_memcpy(&cell, p, 4);
    const uint32_t half[2] = {cell << 16, cell & 0xffff0000u};
    float k[2];
    __builtin_memcpy(k, half, 8);
    return {splat(k[0]), splat(k[1])};
  }
  static B load_b(const uint8_t* p) {
    const I32 pairs = load(reinterpret_cast<const int32_t*>(p));
    return {from_bits(shift_left<16>(pairs)), from_bits(bit_and(pairs, splat(static_cast<int32_t>(0xffff0000u))))};
  }
  // Rows k and k + 1 of a row-major table, 16 columns.
  static B load_rows(const uint16_t* even, const uint16_t* odd) {
    return {from_bits(shift_left<16>(load_u16(even))), from_bits(shift_left<16>(load_u16(odd)))};
  }
  static B even_only(B b) { return {b.even, splat(0.f)}; }  // second k of each pair becomes 0
  static Acc dot(Acc acc, A a, B b) { return fma(a.odd, b.odd, fma(a.even, b.even, acc)); }
};

}  // namespace
}  // namespace dlmrt::cpu
