// 4-bit weights with block scales times int8 rows, exact up to one fused multiply-add per block.
//
// A table of 16 bytes turns nibbles into u8 without error (2 * e2m1 is an integer, shifted to be unsigned), a block's
// sum of products is an exact int32, and acc = fma(sum, scale, acc) over ascending blocks. A NVFP4 block sum has 15 bits
// and its scale 4, so even the product is exact and the result is the same with or without fused multiply-add.
//
// What the shift of the weights adds to a sum depends on the row alone: it is taken off where the sum begins, so that
// decoding costs no product. Every row group decodes for itself, in registers, on units that the products leave idle;
// unpacking a panel once for all rows took 10 % longer, as it has to go through memory.
//
// Left out: zero points. Source: ours.
#pragma once

namespace dlmrt::cpu {
namespace {

constexpr int64_t kBlockPrefetchBytes = 512;  // how far ahead of the one stream of blocks: 3 of kNVFP4
constexpr int kSubSteps = 4;                  // steps that one Partial takes; a padded K is a multiple of them

struct FormatNVFP4 {
  static constexpr DType kType = DType::kNVFP4;
  static constexpr int64_t kGroup = 16;  // known here, so that a block's loop unrolls
  static constexpr int kShift = 12;
  static constexpr uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // 2 e2m1 + kShift
  // e4m3 / 2. Built from the bits without fp32 denormals, so that a caller's flush-to-zero mode changes nothing.
  static F32 scales(const uint8_t* p) {
    const I32 code = load_u8(p), shifted = shift_left<20>(code);
    const I32 normal = add(shifted, splat(119 << 23));
    const F32 subnormal = sub(from_bits(add(shifted, splat(120 << 23))), splat(1.f / 128));
    return from_bits(select_greater(code, splat(7), normal, bits(subnormal)));
  }
};
struct FormatInt4 {
  static constexpr DType kType = DType::kInt4;
  static constexpr int64_t kGroup = 0;  // Weight::group
  static constexpr int kShift = 8;
  static constexpr uint8_t kValues[16] = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  static F32 scales(const uint8_t* p) { return from_bits(load(reinterpret_cast<const int32_t*>(p))); }
};

// Up to kBlockRows rows of an int8 operand as signed codes, and where the sum of each block begins.
struct SignedRows {
  int64_t steps, num_blocks;
  uint8_t* cells;   // [groups][steps][8 rows][cell]
  int32_t* starts;  // [groups][blocks][8 rows] minus kShift * (sum of the codes)

  const uint8_t* group_cells(int64_t g) const { return cells + g * steps * (kRowGroup * kCellBytes); }
  int32_t* group_starts(int64_t g) const { return starts + g * num_blocks * kRowGroup; }
};

template <class Format>
SignedRows signed_rows(const LinearArgs& t, int64_t first_row, int64_t rows, void* scratch) {
  const Weight& w = t.weight;
  const int64_t steps = steps_of(DType::kInt8, w.k), block_steps = w.group / 4, groups = ceil_div(rows, kRowGroup);
  const int64_t num_bytes = groups * steps * (kRowGroup * kCellBytes);
  uint8_t* cells = static_cast<uint8_t*>(scratch);
  const SignedRows out{steps, ceil_div(steps, block_steps), cells,
                       reinterpret_cast<int32_t*>(cells + kBlockRows * steps * kCellBytes)};
  const uint8_t* in = operand_row(t.input.cells, DType::kInt8, w.k, first_row);
  for (int64_t i = 0; i < num_bytes; i += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, in + i, 8);
    eight ^= 0x8080808080808080u;
    __builtin_memcpy(cells + i, &eight, 8);
  }
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* p = in + g * steps * (kRowGroup * kCellBytes);
    for (int64_t b = 0; b < out.num_blocks; b++) {
      const int64_t left = steps - b * block_steps, count = left < block_steps ? left : block_steps;
      I32 low = splat(0), high = splat(0);  // rows 0-3 and 4-7 by the four values of a cell
      for (int64_t s = 0; s < count; s++, p += kRowGroup * kCellBytes) {
        low = add(low, load_u8(p));
        high = add(high, load_u8(p + 16));
      }
      alignas(64) int32_t sums[32];
      store(sums, low), store(sums + 16, high);
      int32_t* start = out.group_starts(g) + b * kRowGroup;
      for (int i = 0; i < kRowGroup; i++)
        start[i] = -Format::kShift * (sums[4 * i] + sums[4 * i + 1] + sums[4 * i + 2] + sums[4 * i + 3] -
                                      static_cast<int32_t>(512 * count));
    }
  }
  return out;
}

// Sums of the first `steps` steps of a block for MR rows.
template <int MR>
__attribute__((always_inline)) inline void block_sums(const Nibbles& nibbles, const uint8_t* block, int64_t steps,
                                                      const uint8_t* a, const int32_t* start, I32 (&sum)[MR]) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) sum[i] = splat(start[i]);
  for (int64_t s0 = 0; s0 < steps; s0 += kSubSteps) {
    typename DotNibble::Partial p[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) p[i] = DotNibble::begin(sum[i]);
#pragma GCC unroll 2
    for (int s = 0; s < kSubSteps; s += 2) {
      DotNibble::B low, high;
      nibbles.decode(block + (s0 + s) / 2 * kStepBytes, low, high);
      const uint8_t* cells = a + (s0 + s) * (kRowGroup * kCellBytes);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) p[i] = DotNibble::dot(p[i], cells + i * kCellBytes, low);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) p[i] = DotNibble::dot(p[i], cells + (kRowGroup + i) * kCellBytes, high);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) sum[i] = DotNibble::end(sum[i], p[i]);
  }
}

struct BlockTile {  // one row piece of group `group` by one panel
  const SignedRows& rows;
  int64_t row, group, piece;  // row of the call's arguments; place among `rows`: group and first row within it
  const uint8_t* panel;
  int64_t fetch_ahead, fetch_offset;  // what the tile fetches while it works on a block, relative to that block
};

template <class Format, int MR>
__attribute__((noinline)) void block_tile(const LinearArgs& t, const BlockTile& at, int64_t n, float* out) {
  const Weight& w = t.weight;
  const int64_t group = Format::kGroup ? Format::kGroup : w.group, block_steps = group / 4,
                stride = block_bytes(Format::kType, group);
  const Nibbles nibbles(Format::kValues);
  const uint8_t* a = at.rows.group_cells(at.group) + at.piece * kCellBytes;
  const int32_t* start = at.rows.group_starts(at.group) + at.piece;
  const uint8_t* block = at.panel;
  F32 acc[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) acc[i] = splat(0.f);
  for (int64_t b = 0; b < at.rows.num_blocks; b++) {
    I32 sum[MR];
    const int64_t left = at.rows.steps - b * block_steps;  // rows end where the last block of kInt4 may go on
    prefetch(block + at.fetch_ahead);
    prefetch(block + at.fetch_ahead + at.fetch_offset);
    block_sums(nibbles, block, Format::kGroup || left > block_steps ? block_steps : left, a, start, sum);
    const F32 scale = Format::scales(block + group * kPanel / 2);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) acc[i] = fma(to_float(sum[i]), scale, acc[i]);
    a += block_steps * (kRowGroup * kCellBytes);
    start += kRowGroup;
    block += stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
    emit(out + i * t.ld_out, mul(acc[i], mul(load(w.column_scale + n), splat(t.input.scales[at.row + i]))), w.n - n,
         t.accumulate);
}

template <class Format>
void block4(const LinearArgs& t, Range panels, float* out, void* scratch) {
  const int64_t stride = panel_bytes(t.weight.dtype, t.weight.group, t.weight.k),
                bytes = block_bytes(Format::kType, t.weight.group);
  for (int64_t first = 0; first < t.rows; first += kBlockRows) {
    const int64_t rows = t.rows - first < kBlockRows ? t.rows - first : kBlockRows, groups = ceil_div(rows, kRowGroup);
    const SignedRows prepared = signed_rows<Format>(t, first, rows, scratch);
    for (int64_t p = panels.begin; p < panels.end; p++) {
      const uint8_t* panel = static_cast<const uint8_t*>(t.weight.panels) + p * stride;
      for (int64_t g = 0; g < groups; g++)
        row_pieces(rows_in_group(rows, g * kRowGroup), [&](auto n, int r) {
          // one group streams; of several, each fetches its part of the next panel
          const int64_t row = first + g * kRowGroup + r, share = bytes / groups;
          const BlockTile tile{prepared, row,   g,
                               r,        panel, groups == 1 ? kBlockPrefetchBytes : stride + g * share,
                               groups == 1 ? bytes / 2 : share / 2};
          block_tile<Format, decltype(n)::value>(t, tile, p * kPanel,
                                                 out + row * t.ld_out + (p - panels.begin) * kPanel);
        });
    }
  }
}

// Panels `panels` of the product into out, whose column 0 is column 16 * panels.begin.
inline void multiply_panels(const LinearArgs& t, Range panels, float* out, void* scratch) {
  switch (t.weight.dtype) {
    case DType::kF32: return dense<DotF32>(t, panels, out);
    case DType::kBF16: return dense<DotBF16>(t, panels, out);
    case DType::kInt8: return dense<DotI8>(t, panels, out);
    case DType::kNVFP4: return block4<FormatNVFP4>(t, panels, out, scratch);
    case DType::kInt4: return block4<FormatInt4>(t, panels, out, scratch);
  }
}
void linear(const LinearArgs& t, Range panels, void* scratch) {
  multiply_panels(t, panels, t.out + panels.begin * kPanel, scratch);
}

}  // namespace
}  // namespace dlmrt::cpu
