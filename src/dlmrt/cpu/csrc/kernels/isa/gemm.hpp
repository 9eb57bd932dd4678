// Matrix products: register tiles of rows by panels, one ascending chain per output.
//
// K is never split and every tile adds in the same order, so an output does not depend on the number of rows, on the
// tile it fell into or on the thread. Weights stream once per row group of 8; from the second group on they come from
// cache.
//
// Source: ours; tile shapes from measurements (8 rows x 3 panels reach 0.77-0.90 of the int8 peak on AVX-512).
#pragma once

namespace dlmrt::cpu {
namespace {

constexpr int64_t kPrefetchBytes = 256;  // how far ahead of each stream of weights; measured in docs/log.md
template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// acc[i][j] += sum over steps of cell (row i) * load_b(panel j, step)
template <class D, int MR, int NV, class LoadB>
__attribute__((always_inline)) inline void multiply(const uint8_t* a, int64_t steps, typename D::Acc (&acc)[MR][NV],
                                                    LoadB load_b) {
  for (int64_t s = 0; s < steps; s++, a += kRowGroup * kCellBytes) {
    typename D::B b[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) b[j] = load_b(j, s);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      const typename D::A cell = D::load_a(a + i * kCellBytes);
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) acc[i][j] = D::dot(acc[i][j], cell, b[j]);
    }
  }
}
template <class D, int MR, int NV>
__attribute__((always_inline)) inline void clear(typename D::Acc (&acc)[MR][NV]) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[i][j] = D::zero();
}

struct Tile {  // one row piece by NV panels of a LinearArgs
  int64_t row, panel;
  float* out;           // out[0][0] of the tile
  const uint8_t* next;  // bytes that this tile fetches for the panels after it
};
// What a tile fetches: nothing; its own panels shortly before use; or 1, 2 lines of `next` per step.
enum Fetch { kNothing = 0, kOneLine = 1, kTwoLines = 2, kOwnPanels };

// y -> out for 16 columns of one row, of which `left` exist
inline void emit(float* out, F32 y, int64_t left, bool accumulate) {
  if (accumulate) y = add(load_upto16(out, left), y);
  store_upto16(out, y, left);
}

template <class D, int MR, int NV, Fetch kFetch>
__attribute__((noinline)) void dense_tile(const LinearArgs& t, const Tile& at) {
  const Weight& w = t.weight;
  const int64_t steps = steps_of(w.dtype, w.k), stride = steps * kStepBytes;
  const uint8_t* a = operand_row(t.input.cells, t.input.dtype, w.k, at.row);
  const uint8_t *b = static_cast<const uint8_t*>(w.panels) + at.panel * stride, *next = at.next;
  typename D::Acc acc[MR][NV];
  clear<D>(acc);
  if constexpr (kFetch == kOwnPanels) {
    // towards the end of the panels, the beginnings of the ones after them
    const int64_t tail = steps * kStepBytes < kPrefetchBytes ? steps : kPrefetchBytes / kStepBytes, body = steps - tail;
    multiply<D>(a, body, acc, [=](int j, int64_t s) {
      const uint8_t* p = b + j * stride + s * kStepBytes;
      prefetch(p + kPrefetchBytes);
      return D::load_b(p);
    });
    multiply<D>(a + body * (kRowGroup * kCellBytes), tail, acc, [=](int j, int64_t s) {
      prefetch(next + j * stride + s * kStepBytes);
      return D::load_b(b + j * stride + (body + s) * kStepBytes);
    });
  } else {
    multiply<D>(a, steps, acc, [=](int j, int64_t s) {
      if (j < kFetch) prefetch(next + (s * kFetch + j) * kStepBytes);
      return D::load_b(b + j * stride + s * kStepBytes);
    });
  }
#pragma GCC unroll 4
  for (int j = 0; j < NV; j++) {
    const int64_t n = (at.panel + j) * kPanel;
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
      F32 y;
      if constexpr (kSame<typename D::Acc, I32>) {
        I32 sum = acc[i][j];
        if constexpr (D::kOffset) sum = sub(sum, load(w.column_sum + n));
        y = mul(to_float(sum), mul(load(w.column_scale + n), splat(t.input.scales[at.row + i])));
      } else {
        y = acc[i][j];
      }
      emit(at.out + i * t.ld_out + j * kPanel, y, w.n - n, t.accumulate);
    }
  }
}

// All rows by NV panels. With several row groups, each fetches its part of the panels after these: the first group
// would otherwise wait for memory and the others leave it idle.
template <class D, int NV>
void dense_panels(const LinearArgs& t, int64_t panel, float* out) {
  const int64_t groups = ceil_div(t.rows, kRowGroup), stride = panel_bytes(t.weight.dtype, 0, t.weight.k);
  const int64_t lines = groups == 2 ? 2 : 1;
  const uint8_t* next = static_cast<const uint8_t*>(t.weight.panels) + (panel + NV) * stride;
  for (int64_t g = 0; g < groups; g++)
    row_pieces(rows_in_group(t.rows, g * kRowGroup), [&](auto rows, int r) {
      constexpr int MR = decltype(rows)::value;
      if constexpr (NV <= max_panels(MR)) {
        const int64_t m = g * kRowGroup + r;
        const Tile at{m, panel, out + m * t.ld_out, next + g * lines * stride};
        if (r > 0 || g * lines >= NV) dense_tile<D, MR, NV, kNothing>(t, at);
        else if (groups == 1) dense_tile<D, MR, NV, kOwnPanels>(t, at);
        else if (groups == 2) dense_tile<D, MR, NV, kTwoLines>(t, at);
        else dense_tile<D, MR, NV, kOneLine>(t, at);
      }
    });
}
template <class D>
void dense(const LinearArgs& t, Range panels, float* out) {
  const int widest = max_panels(t.rows < kMaxRows ? static_cast<int>(t.rows) : kMaxRows);
  for (int64_t p = panels.begin, n = 0; p < panels.end; p += n, out += n * kPanel) {
    const int64_t left = panels.end - p;
    n = left < widest ? left : left == 4 && widest == 3 ? 2 : widest;  // 2 + 2 rather than 3 + 1
    if constexpr (max_panels(1) >= 4)
      if (n == 4) dense_panels<D, 4>(t, p, out);
    if constexpr (max_panels(1) >= 3)
      if (n == 3) dense_panels<D, 3>(t, p, out);
    if constexpr (max_panels(1) >= 2)
      if (n == 2) dense_panels<D, 2>(t, p, out);
    if (n == 1) dense_panels<D, 1>(t, p, out);
  }
}

}  // namespace
}  // namespace dlmrt::cpu
