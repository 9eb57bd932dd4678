// Attention of query tiles over a paged cache: scores, softmax and weighted values of up to 8 query rows at a time.
//
// The online softmax runs over chunks at fixed positions, so a row's arithmetic depends on its own visible length
// alone. A position beyond that length is never multiplied (0 * NaN would poison a row that must not see it): the rows
// of a tile share the positions all of them see, the rest is done row by row, and the odd last position of a bf16 pair
// is masked.
//
// Left out: int8 caches. Source: ours.
#pragma once

namespace dlmrt::cpu {
namespace {

template <class D>
struct AttentionTile {
  const AttentionArgs& t;
  int64_t head;      // kv head
  const uint8_t* q;  // operand group of the tile
  int rows;
  int64_t visible[kRowGroup], begins[kRowGroup];  // a row sees [begins, visible)
  float* scores;                                  // [8][stride], then probabilities
  uint8_t* weights;                               // operand group of probabilities, chunk wide
  float* sums;                                    // [8][H padded]
  float top[kRowGroup], total[kRowGroup];
  int64_t stride;  // between rows of scores, see score_stride

  static constexpr DType kType = kSame<D, DotF32> ? DType::kF32 : DType::kBF16;
  static constexpr int64_t kCell = values_per_cell(kType);
  int64_t width() const { return padded_width(t.cache.head_dim); }

  // scores of positions [from, from + 16 NV) of one page
  template <int MR, int NV>
  void score_panels(int r, const uint8_t* keys, float* out) const {
    const int64_t steps = width() / kCell, panel = steps * kStepBytes;
    typename D::Acc acc[MR][NV];
    clear<D>(acc);
    multiply<D>(q + r * kCellBytes, steps, acc, [=](int j, int64_t s) {
      const uint8_t* p = keys + j * panel + s * kStepBytes;
      prefetch(p + NV * panel);  // each panel begins a page of memory, where no hardware looks ahead
      return D::load_b(p);
    });
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) store(out + (r + i) * stride + j * kPanel, acc[i][j]);
  }
  // ... of positions [from, end) of the chunk at `begin`; `from` begins a panel
  void score(int64_t begin, int64_t from, int64_t end) const {
    const int64_t panel = width() / kCell * kStepBytes;
    for (int64_t p = from; p < end;) {
      const uint8_t* keys = kv_plane(t.cache, p, head, false) + p % t.cache.page_size / kPanel * panel;
      const int64_t in_page = t.cache.page_size - p % t.cache.page_size, left = in_page < end - p ? in_page : end - p;
      const bool two = left > kPanel && max_panels(kMaxRows) >= 2;
      row_pieces(rows, [&](auto n, int r) {
        constexpr int MR = decltype(n)::value, NV = max_panels(MR) >= 2 ? 2 : 1;
        two ? score_panels<MR, NV>(r, keys, scores + (p - begin)) : score_panels<MR, 1>(r, keys, scores + (p - begin));
      });
      p += two ? 2 * kPanel : kPanel;
    }
  }

  // Scores [from, count) of row i become probabilities, zeros from `lead` on before them; rescales what earlier chunks
  // left.
  void softmax(int i, int64_t lead, int64_t from, int64_t count, bool is_first) {
    float* s = scores + i * stride;
    const int64_t begin = from / 16 * 16, last = (count - 1) / 16 * 16;
    const unsigned unseen = (1u << (from - begin)) - 1;  // lanes of the vector at `begin`
    const auto seen = [&](int64_t k, F32 v, float fill) {
      v = keep_first(v, tail16(count - k), fill);
      return k == begin ? select(unseen, splat(fill), v) : v;
    };
    F32 m = seen(begin, load(s + begin), -__builtin_inff());
    for (int64_t k = begin + 16; k < last; k += 16) m = max(m, load(s + k));
    m = max(m, seen(last, load(s + last), -__builtin_inff()));
    const float chunk_top = reduce_max(m), new_top = is_first || chunk_top > top[i] ? chunk_top : top[i];
    if (!is_first) {
      const F32 f = exp(splat(top[i] - new_top));
      alignas(64) float factor[16];
      store(factor, f);
      total[i] *= factor[0];
      for (int64_t k = 0; k < width(); k += 16) store(sums + i * width() + k, mul(load(sums + i * width() + k), f));
    }
    top[i] = new_top;
    const F32 shift = splat(new_top);
    F32 sum = splat(0.f);
    const auto put = [&](int64_t k, F32 e) {
      sum = add(sum, e);
      store(s + k, e);
    };
    for (int64_t k = lead; k < begin; k += 16) store(s + k, splat(0.f));
    put(begin, seen(begin, exp(sub(load(s + begin), shift)), 0.f));
    for (int64_t k = begin + 16; k < last; k += 16) put(k, exp(sub(load(s + k), shift)));
    if (last > begin) put(last, seen(last, exp(sub(load(s + last), shift)), 0.f));
    total[i] += reduce_add(sum);
  }

  // sums of rows [r, r + MR) += probabilities times values over positions [from, to) of the chunk at `begin`
  template <int MR, int NV>
  void weigh_panels(int r, int64_t panel, int64_t begin, int64_t from, int64_t to) const {
    const int64_t page = t.cache.page_size, column = page / kCell * kStepBytes;  // of one panel
    typename D::Acc acc[MR][NV];
    float* out = sums + r * width() + panel * kPanel;
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) acc[i][j] = load(out + i * width() + j * kPanel);
    for (int64_t p = from; p < to;) {
      const int64_t slot = (begin + p) % page, left = page - slot < to - p ? page - slot : to - p;
      const uint8_t* b = kv_plane(t.cache, begin + p, head, true) + panel * column + slot / kCell * kStepBytes;
      const uint8_t* a = weights + p / kCell * (kRowGroup * kCellBytes) + r * kCellBytes;
      const int64_t steps = left / kCell;
      multiply<D>(a, steps, acc, [=](int j, int64_t s) {
        const uint8_t* v = b + j * column + s * kStepBytes;
        prefetch(v + NV * column);
        return D::load_b(v);
      });
      if constexpr (kCell == 2)
        if (left % 2)
          multiply<D>(a + steps * (kRowGroup * kCellBytes), 1, acc,
                      [=](int j, int64_t) { return D::even_only(D::load_b(b + j * column + steps * kStepBytes)); });
      p += left;
    }
    for (int i = 0; i < MR; i++)
      for (int j = 0; j < NV; j++) store(out + i * width() + j * kPanel, acc[i][j]);
  }
  void weigh(int first_row, int num_rows, int64_t begin, int64_t from, int64_t to) const {
    if (from >= to) return;
    const int64_t panels = width() / kPanel;
    row_pieces(num_rows, [&](auto n, int r) {
      constexpr int MR = decltype(n)::value, NV = max_panels(MR) >= 2 ? 2 : 1;
      int64_t p = 0;
      for (; p + NV <= panels; p += NV) weigh_panels<MR, NV>(first_row + r, p, begin, from, to);
      for (; p < panels; p++) weigh_panels<MR, 1>(first_row + r, p, begin, from, to);
    });
  }

  void run() {
    int64_t longest = 0, earliest = begins[0];
    bool is_started[kRowGroup] = {};
    for (int i = 0; i < rows; i++) {
      longest = visible[i] > longest ? visible[i] : longest;
      earliest = begins[i] < earliest ? begins[i] : earliest;
      total[i] = 0.f;
      for (int64_t k = 0; k < width(); k += 16) store(sums + i * width() + k, splat(0.f));
    }
    stride = score_stride(longest < t.chunk ? longest : t.chunk);
    for (int64_t begin = earliest / t.chunk * t.chunk; begin < longest; begin += t.chunk) {
      const int64_t end = longest - begin < t.chunk ? longest : begin + t.chunk;
      const int64_t lead = earliest > begin ? (earliest - begin) / kPanel * kPanel : 0;  // seen by no row
      int64_t from[kRowGroup], count[kRowGroup], fewest = t.chunk, most = 0;
      for (int i = 0; i < rows; i++) {
        const int64_t left = visible[i] - begin;
        from[i] = begins[i] > begin ? begins[i] - begin : 0;
        count[i] = left < 0 ? 0 : left < end - begin ? left : end - begin;
        if (from[i] >= count[i]) count[i] = 0;
        fewest = count[i] < fewest ? count[i] : fewest;
        most = count[i] > most ? count[i] : most;
      }
      score(begin, begin + lead, end);
      for (int i = 0; i < rows; i++) {
        if (!count[i]) continue;
        softmax(i, lead, from[i], count[i], !is_started[i]);
        is_started[i] = true;
      }
      for (int64_t k = lead; k < most; k += 16) write_group(weights, kType, k, scores + k, stride, rows);
      const int64_t common = fewest == most ? most : fewest / kCell * kCell, shared = common > lead ? common : lead;
      weigh(0, rows, begin, lead, shared);
      for (int i = 0; i < rows; i++) weigh(i, 1, begin, shared, count[i]);
    }
  }
};

template <class D>
void attend(const AttentionArgs& t, Range units, void* scratch) {
  const KvCache& c = t.cache;
  const int64_t group = t.num_heads / c.num_kv_heads, q_rows = t.rows * group, tiles = ceil_div(q_rows, kRowGroup);
  const int64_t group_bytes = operand_bytes(c.dtype, q_rows, c.head_dim),
                tile_bytes = operand_bytes(c.dtype, kRowGroup, c.head_dim);
  float* scores = static_cast<float*>(scratch);
  float* sums = scores + kRowGroup * score_stride(t.chunk);
  uint8_t* weights = reinterpret_cast<uint8_t*>(sums + kRowGroup * padded_width(c.head_dim));
  for (int64_t u = units.begin; u < units.end; u++) {
    const int64_t head = u / tiles, row = u % tiles * kRowGroup;
    AttentionTile<D> tile{t,
                          head,
                          static_cast<const uint8_t*>(t.q) + head * group_bytes + u % tiles * tile_bytes,
                          rows_in_group(q_rows, row),
                          {},
                          {},
                          scores,
                          weights,
                          sums,
                          {},
                          {},
                          0};
    for (int i = 0; i < tile.rows; i++) {
      tile.visible[i] = t.visible[(row + i) / group];
      tile.begins[i] = t.first ? t.first[(row + i) / group] : 0;
    }
    tile.run();
    for (int i = 0; i < tile.rows; i++) {
      float* out = t.out + (row + i) / group * t.ld_out + (head * group + (row + i) % group) * c.head_dim;
      const F32 inverse = splat(tile.visible[i] > tile.begins[i] ? 1.f / tile.total[i] : 0.f);
      for (int64_t k = 0; k < c.head_dim; k += 16)
        store_upto16(out + k, mul(load(sums + i * tile.width() + k), inverse), c.head_dim - k);
    }
  }
}
void attention(const AttentionArgs& t, Range units, void* scratch) {
  t.cache.dtype == DType::kF32 ? attend<DotF32>(t, units, scratch) : attend<DotBF16>(t, units, scratch);
}

}  // namespace
}  // namespace dlmrt::cpu
