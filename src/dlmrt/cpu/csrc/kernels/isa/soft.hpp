// Soft embedding: probabilities of the head's logits, then their product with the embedding table as it lies in memory.
//
// The table is the one that ids are looked up in, row-major, so no second copy in panels is kept: K is the vocabulary,
// and a step reads one row (fp32) or two (bf16) of it. One ascending chain per output, as in every product.
//
// Source: ours.
#pragma once

namespace dlmrt::cpu {
namespace {

void probabilities(const ProbabilitiesArgs& t, Range tiles) {
  const int64_t vocab = t.out.width,
                end = tiles.end * kHeadTile < padded_width(vocab) ? tiles.end * kHeadTile : padded_width(vocab);
  for (int64_t m = 0; m < t.rows; m++) {
    const CellWriter out = writer(t.out, m);
    const F32 shift = splat(t.log_sum_exp[m]);
    for (int64_t k = tiles.begin * kHeadTile; k < end; k += 16)
      out.write(k,
                keep_first(exp(sub(load_upto16(t.logits + m * t.ld + k, vocab - k), shift)), tail16(vocab - k), 0.f));
  }
}

// Columns [n, n + 16) of step `step` of a row-major table.
template <class D>
inline typename D::B load_whole(const SoftEmbeddingArgs& t, int64_t step, int64_t n) {
  if constexpr (kSame<D, DotF32>) {
    return D::load_b(reinterpret_cast<const uint8_t*>(static_cast<const float*>(t.table) + step * t.width + n));
  } else {
    const uint16_t* even = static_cast<const uint16_t*>(t.table) + 2 * step * t.width + n;
    return D::load_rows(even, even + t.width);
  }
}
// The same where fewer than 16 columns are left, or the last pair has one row: what does not exist reads as 0.
template <class D>
inline typename D::B load_part(const SoftEmbeddingArgs& t, int64_t step, int64_t n) {
  const size_t count = static_cast<size_t>(tail16(t.width - n));
  if constexpr (kSame<D, DotF32>) {
    alignas(64) float row[16] = {};
    __builtin_memcpy(row, static_cast<const float*>(t.table) + step * t.width + n, count * sizeof(float));
    return D::load_b(reinterpret_cast<const uint8_t*>(row));
  } else {
    alignas(64) uint16_t rows[32] = {};
    const uint16_t* even = static_cast<const uint16_t*>(t.table) + 2 * step * t.width + n;
    __builtin_memcpy(rows, even, count * 2);
    if (2 * step + 1 < t.probabilities.width) __builtin_memcpy(rows + 16, even + t.width, count * 2);
    return D::load_rows(rows, rows + 16);
  }
}
template <class D, int MR, int NV>
__attribute__((noinline)) void soft_tile(const SoftEmbeddingArgs& t, int64_t row, int64_t panel) {
  const int64_t vocab = t.probabilities.width, g = values_per_cell(t.probabilities.dtype), n = panel * kPanel;
  const int64_t steps = ceil_div(vocab, g), whole = n + NV * kPanel <= t.width ? vocab / g : 0;
  typename D::Acc acc[MR][NV];
  clear<D>(acc);
  const uint8_t* a = operand_row(t.probabilities.cells, t.probabilities.dtype, vocab, row);
  multiply<D>(a, whole, acc, [&](int j, int64_t s) { return load_whole<D>(t, s, n + j * kPanel); });
  multiply<D>(a + whole * (kRowGroup * kCellBytes), steps - whole, acc,
              [&](int j, int64_t s) { return load_part<D>(t, whole + s, n + j * kPanel); });
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < NV; j++)
      emit(t.out + (row + i) * t.width + n + j * kPanel, mul(acc[i][j], splat(t.scale)), t.width - n - j * kPanel,
           false);
}
template <class D>
void soft_panels(const SoftEmbeddingArgs& t, Range panels) {
  for (int64_t m = 0; m < t.rows; m += kRowGroup)
    row_pieces(rows_in_group(t.rows, m), [&](auto rows, int r) {
      constexpr int MR = decltype(rows)::value, NV = max_panels(MR) < 3 ? max_panels(MR) : 3;
      int64_t p = panels.begin;
      for (; p + NV <= panels.end; p += NV) soft_tile<D, MR, NV>(t, m + r, p);
      for (; p < panels.end; p++) soft_tile<D, MR, 1>(t, m + r, p);
    });
}
void soft_embedding(const SoftEmbeddingArgs& t, Range panels) {
  t.probabilities.dtype == DType::kF32 ? soft_panels<DotF32>(t, panels) : soft_panels<DotBF16>(t, panels);
}

}  // namespace
}  // namespace dlmrt::cpu
