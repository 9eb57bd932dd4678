// 4-bit weights with block scales times int8 rows, exact up to one fused multiply-add per block.
//
// A table of 16 bytes turns nibbles into s8 without error (2 * e2m1 is an integer), a block's sum of products is an
// exact int32, and acc = fma(sum, scale, acc) over ascending blocks. A NVFP4 block sum has 15 bits and its scale 4, so
// even the product is exact and the result is the same with or without fused multiply-add. Few rows decode in
// registers; more rows share a panel that is unpacked once to scratch (it fits L1 up to K 1,024).
//
// Left out: zero points. Source: ours.
#pragma once

namespace dlmrt::cpu {
namespace {

constexpr int64_t kBlockPrefetchBytes = 512;  // how far ahead of the stream of blocks
constexpr int kSubSteps = 4;                  // steps that one Partial takes; a padded K is a multiple of them

struct FormatNVFP4 {
  static constexpr DType kType = DType::kNVFP4;
  static constexpr int64_t kGroup = 16;  // known here, so that a block's loop unrolls
  static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // 2 * e2m1
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
  static constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  static F32 scales(const uint8_t* p) { return from_bits(load(reinterpret_cast<const int32_t*>(p))); }
};

// A cell whose codes are 0; as u8 they are 128, so its products are the offset of the others.
inline DotNibble::A code_zero() {
  const uint8_t cell[kCellBytes] = {128, 128, 128, 128};
  return DotNibble::load_a(cell);
}

// Where a tile reads its blocks from: packed nibbles ...
template <class Format>
struct PackedBlocks {
  static constexpr bool kOwnOffset = DotNibble::kOffset;  // the tile sums up the offset itself
  const uint8_t* base;
  int64_t weight_group;
  Nibbles nibbles{Format::kValues};

  int64_t group() const { return Format::kGroup ? Format::kGroup : weight_group; }
  const uint8_t* block(int64_t b) const { return base + b * block_bytes(Format::kType, group()); }
  void pair(int64_t b, int64_t step, DotNibble::B& low, DotNibble::B& high) const {
    const uint8_t* p = block(b) + step / 2 * kStepBytes;
    prefetch(p + kBlockPrefetchBytes);
    nibbles.decode(p, low, high);
  }
  F32 scale(int64_t b) const { return Format::scales(block(b) + group() * kPanel / 2); }
  I32 start(int64_t) const { return splat(0); }
};
// ... or a panel unpacked to scratch.
template <class Format>
struct UnpackedBlocks {
  static constexpr bool kOwnOffset = false;
  uint8_t* values;  // [K/4][64]
  float* scales;    // [K/group][16]
  int32_t* starts;  // [K/group][16] minus the offset
  int64_t weight_group;

  UnpackedBlocks(void* scratch, int64_t k, int64_t group)
      : values(static_cast<uint8_t*>(scratch)),
        scales(reinterpret_cast<float*>(values + k * kPanel)),
        starts(reinterpret_cast<int32_t*>(scales + k / group * kPanel)),
        weight_group(group) {}
  int64_t group() const { return Format::kGroup ? Format::kGroup : weight_group; }
  void pair(int64_t b, int64_t step, DotNibble::B& low, DotNibble::B& high) const {
    const uint8_t* p = values + (b * (group() / 4) + step) * kStepBytes;
    low = DotNibble::load_b(p);
    high = DotNibble::load_b(p + kStepBytes);
  }
  F32 scale(int64_t b) const { return load(scales + b * kPanel); }
  I32 start(int64_t b) const { return load(starts + b * kPanel); }
};

// Sums of the first `steps` steps of block b for MR rows, without the offset.
template <int MR, class Blocks>
__attribute__((always_inline)) inline void block_sums(const Blocks& blocks, int64_t b, int64_t steps, const uint8_t* a,
                                                      I32 (&sum)[MR]) {
  const I32 start = blocks.start(b);
  I32 offset = splat(0);
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) sum[i] = start;
  for (int64_t s0 = 0; s0 < steps; s0 += kSubSteps) {
    typename DotNibble::Partial p[MR], po = DotNibble::begin(offset);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) p[i] = DotNibble::begin(sum[i]);
#pragma GCC unroll 2
    for (int s = 0; s < kSubSteps; s += 2) {
      DotNibble::B low, high;
      blocks.pair(b, s0 + s, low, high);
      const uint8_t* cells = a + (s0 + s) * (kRowGroup * kCellBytes);
      if constexpr (Blocks::kOwnOffset) po = DotNibble::dot(DotNibble::dot(po, code_zero(), low), code_zero(), high);
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        p[i] = DotNibble::dot(p[i], DotNibble::load_a(cells + i * kCellBytes), low);
        p[i] = DotNibble::dot(p[i], DotNibble::load_a(cells + (kRowGroup + i) * kCellBytes), high);
      }
    }
    if constexpr (Blocks::kOwnOffset) offset = DotNibble::end(offset, po);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) sum[i] = DotNibble::end(sum[i], p[i]);
  }
  if constexpr (Blocks::kOwnOffset) {
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) sum[i] = sub(sum[i], offset);
  }
}

template <class Format, int MR, class Blocks>
__attribute__((noinline)) void block_tile(const LinearArgs& t, const Blocks& blocks, int64_t row, int64_t panel,
                                          float* out) {
  const Weight& w = t.weight;
  const int64_t steps = padded_width(w.k) / 4, block_steps = blocks.group() / 4,
                num_blocks = ceil_div(steps, block_steps);
  const uint8_t* a = operand_row(t.input.cells, DType::kInt8, t.input.width, row);
  F32 acc[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) acc[i] = splat(0.f);
  for (int64_t b = 0; b < num_blocks; b++, a += block_steps * (kRowGroup * kCellBytes)) {
    I32 sum[MR];
    const int64_t left = steps - b * block_steps;  // the operand ends where the last block of kInt4 may go on
    block_sums(blocks, b, Format::kGroup || left > block_steps ? block_steps : left, a, sum);
    const F32 scale = blocks.scale(b);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) acc[i] = fma(to_float(sum[i]), scale, acc[i]);
  }
  const int64_t n = panel * kPanel;
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
    emit(out + i * t.ld_out, mul(acc[i], mul(load(w.column_scale + n), splat(t.input.scales[row + i]))), w.n - n,
         t.accumulate);
}

template <class Format>
void unpack(const PackedBlocks<Format>& from, int64_t num_blocks, const UnpackedBlocks<Format>& to) {
  const int64_t steps = from.group() / 4;
  for (int64_t b = 0; b < num_blocks; b++) {
    I32 offset = splat(0);
    for (int64_t s = 0; s < steps; s += 2) {
      DotNibble::B low, high;
      from.pair(b, s, low, high);
      uint8_t* p = to.values + (b * steps + s) * kStepBytes;
      DotNibble::store_b(p, low);
      DotNibble::store_b(p + kStepBytes, high);
      if constexpr (DotNibble::kOffset) {
        const auto cell = code_zero();
        offset =
            DotNibble::end(offset, DotNibble::dot(DotNibble::dot(DotNibble::begin(offset), cell, low), cell, high));
      }
    }
    store(to.starts + b * kPanel, sub(splat(0), offset));
    store(to.scales + b * kPanel, from.scale(b));
  }
}

template <class Format>
void block4(const LinearArgs& t, Range panels, float* out, void* scratch) {
  const Weight& w = t.weight;
  const int64_t k = padded_k(w.dtype, w.group, w.k), stride = panel_bytes(w.dtype, w.group, w.k);
  const UnpackedBlocks<Format> unpacked(scratch, k, w.group);
  for (int64_t p = panels.begin; p < panels.end; p++, out += kPanel) {
    const PackedBlocks<Format> packed{static_cast<const uint8_t*>(w.panels) + p * stride, w.group};
    if (t.rows <= kMaxRows) {
      with_rows(static_cast<int>(t.rows),
                [&](auto rows) { block_tile<Format, decltype(rows)::value>(t, packed, 0, p, out); });
      continue;
    }
    unpack(packed, k / w.group, unpacked);
    for (int64_t m = 0; m < t.rows; m += kRowGroup)
      row_pieces(rows_in_group(t.rows, m), [&](auto rows, int r) {
        block_tile<Format, decltype(rows)::value>(t, unpacked, m + r, p, out + (m + r) * t.ld_out);
      });
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
