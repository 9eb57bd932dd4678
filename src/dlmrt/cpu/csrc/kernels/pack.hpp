// Weights of a checkpoint -> panels of the matrix kernels, panel by panel.
//
// Quantisation, per output column: s = max|w| / 127 and q = rint(w / s), ties to even (kInt8); per group of a column s
// = max|w| / 7 (kInt4). A column of zeros gets scale 0. A non-finite weight makes its column's scale NaN: the
// statistics of the first forward then show it. NVFP4 scales are per column, so that fused projections keep their own
// global scales.
//
// Left out: zero points, transposed files (refused by the loader). Source: ours; rules in args.hpp.
#pragma once
#include "args.hpp"

namespace dlmrt::cpu {

// Rows [N, K] of one checkpoint tensor; several in a row make one fused weight.
struct Source {
  DType dtype;  // kF32, kBF16, kInt8 (codes with scales), kNVFP4
  int32_t reserved;
  const void* data;             // kNVFP4: [rows][K/2] bytes, low half first
  int64_t rows, ld;             // ld in elements
  const float* scales;          // kInt8: [rows] for a kInt8 weight, [rows][K/group] for a kInt4 weight
  const uint8_t* block_scales;  // kNVFP4: e4m3 [rows][K/16], none of them NaN or negative
  float global_scale;           // kNVFP4, as a multiplier
};

// Fills panels `panels` of `into` (memory, dtype, group, n, k set by the caller) from `count` sources of into.n rows in
// all.
//   kF32, kBF16 from kF32, kBF16;  kInt8 and kInt4 from kF32, kBF16 or kInt8;  kNVFP4 from kNVFP4.
// `codes` has room for into.k of them, the caller's: nothing is allocated here, where no exception may leave a pool.
void pack(const Source* sources, int count, const Weight& into, Range panels, int8_t* codes);

}  // namespace dlmrt::cpu
