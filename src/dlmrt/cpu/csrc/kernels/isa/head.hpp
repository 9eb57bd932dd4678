// The head: logits of a tile of 128 ids stay in L1 while their statistics are taken, then the tiles are merged in
// order.
//
// Per (tile, row): maximum, first id that has it, sum of exp and of (x - max) exp. Sums of a tile are merged in tile
// order, so the numbers of a row depend neither on the threads nor on the other rows. Gumbel-max picks follow a total
// order (score down, id up): they may be gathered in any grouping.
//
// Source: ours; Gumbel-max: Gumbel, "Statistical theory of extreme values" (1954); noise: see ../philox.hpp.
#pragma once

#include "../philox.hpp"

namespace dlmrt::cpu {
namespace {

struct HeadTile {
  const HeadArgs& t;
  int64_t tile;
  float* logits;  // [rows][kHeadTile]

  int64_t first_id() const { return tile * kHeadTile; }
  int64_t width() const { return t.weight.n - first_id() < kHeadTile ? t.weight.n - first_id() : kHeadTile; }
  int64_t cell(int64_t m) const { return tile * t.partials.row_stride + m; }

  bool has_banned() const {
    for (int64_t word = 0; t.banned && word < ceil_div(width(), 32); word++)
      if (t.banned[first_id() / 32 + word]) return true;
    return false;
  }
  // Whether logits are what the product gave.
  bool is_plain() const {
    return t.softcap <= 0 && (!t.temperature || *t.temperature == 1.f) && width() == kHeadTile && !has_banned();
  }
  // soft cap, temperature, banned ids; lanes past the vocabulary read as banned
  void transform(float* x) const {
    const F32 cap = splat(t.softcap), inverse_cap = splat(t.softcap > 0 ? 1.f / t.softcap : 0.f);
    const F32 temperature = splat(t.temperature ? *t.temperature : 1.f);
    for (int64_t k = 0; k < kHeadTile; k += 16) {
      const int64_t left = width() - k;
      if (left <= 0) {
        store(x + k, splat(kBannedLogit));
        continue;
      }
      F32 v = load(x + k);
      if (t.softcap > 0) v = soft_capped(v, cap, inverse_cap);
      if (t.temperature) v = div(v, temperature);
      v = keep_first(v, tail16(left), kBannedLogit);
      if (t.banned) {
        const unsigned word = t.banned[(first_id() + k) / 32] >> ((first_id() + k) % 32) & 0xffff;
        if (word) v = select(word, splat(kBannedLogit), v);
      }
      store(x + k, v);
    }
  }

  void statistics(int64_t m, const float* x) const {
    const HeadPartials& p = t.partials;
    F32 top = load(x), low = top;
    for (int64_t k = 16; k < width(); k += 16) {
      const F32 v = load(x + k);
      top = max(top, v);
      low = min(low, v);
    }
    const float best = reduce_max(top);
    const F32 shift = splat(best), floor = splat(kLowestExponent);
    F32 sum = splat(0.f), weighted = splat(0.f);
    int32_t where = -1;
    for (int64_t k = 0; k < width(); k += 16) {
      const F32 v = load(x + k), d = max(floor, sub(v, shift));
      const F32 e = keep_first(exp(d), tail16(width() - k), 0.f);
      weighted = fma(d, e, weighted);
      const unsigned equal = equal_mask(v, shift);
      const bool is_first = where < 0 && equal;
      if (is_first) where = static_cast<int32_t>(first_id() + k) + __builtin_ctz(equal);
      sum = add(sum, is_first ? select(equal & -equal, splat(0.f), e) : e);
    }
    const int64_t at = cell(m);
    p.max[at] = best;
    // exp(-inf) is no wrong number, so a logit of -inf would not show; a NaN or +inf does by itself.
    const bool has_lowest = greater_mask(splat(-__FLT_MAX__), low) != 0;
    p.sum[at] = has_lowest ? __builtin_nanf("") : reduce_add(sum);
    p.weighted[at] = reduce_add(weighted);
    p.argmax[at] = where < 0 ? static_cast<int32_t>(first_id()) : where;
  }

  // `reach` is the best score of the row so far in this call; noise that cannot beat it is not computed
  void sample(int64_t m, const float* x, float& reach) const {
    const HeadPartials& p = t.partials;
    float best = -__builtin_inff(), logit = 0.f;
    int32_t id = static_cast<int32_t>(first_id());
    for (int64_t k0 = 0; k0 < width(); k0 += kNoiseIds) {
      const float bar = reach > best ? reach : best;
      F32 top = load(x + k0);
      for (int64_t k = k0 + 16; k < k0 + kNoiseIds; k += 16) top = max(top, load(x + k));
      if (!(reduce_max(top) + kLargestGumbel >= bar)) continue;
      uint32_t words[kNoiseIds];
      noise_words(t.gumbel[m], static_cast<uint32_t>(first_id() + k0), words);
      for (int64_t k = k0; k < k0 + kNoiseIds; k += 16) {
        alignas(64) float uniform[16], score[16];
        for (int i = 0; i < 16; i++) uniform[i] = uniform_of(words[k - k0 + i]);
        store(score, add(load(x + k), gumbel(load(uniform))));
        for (int i = 0; i < 16; i++)
          if (score[i] > best && k + i < width())
            best = score[i], logit = x[k + i], id = static_cast<int32_t>(first_id() + k + i);
      }
    }
    p.sample_score[cell(m)] = best;
    p.sample_logit[cell(m)] = logit;
    p.sample_id[cell(m)] = id;
    if (best > reach) reach = best;
  }
};

void head_stats(const HeadArgs& t, Range tiles, void* scratch) {
  float* logits = static_cast<float*>(scratch);
  uint8_t* rest = static_cast<uint8_t*>(scratch) + round_up(t.rows * kHeadTile * int64_t{sizeof(float)}, 64);
  float* reach = reinterpret_cast<float*>(rest + weight_scratch_bytes(t.weight));
  for (int64_t m = 0; m < t.rows; m++) reach[m] = -__builtin_inff();
  const LinearArgs product{t.weight, t.input, t.rows, nullptr, kHeadTile, 0};
  const int64_t panels = num_panels(t.weight.n), per_tile = kHeadTile / kPanel;
  for (int64_t i = tiles.begin; i < tiles.end; i++) {
    const HeadTile tile{t, i, logits};
    const int64_t end = (i + 1) * per_tile < panels ? (i + 1) * per_tile : panels;
    multiply_panels(product, {i * per_tile, end}, logits, rest);
    const bool is_plain = tile.is_plain();
    for (int64_t m = 0; m < t.rows; m++) {
      float* x = logits + m * kHeadTile;
      if (!is_plain) tile.transform(x);
      if (t.logits)
        __builtin_memcpy(t.logits + m * t.ld_logits + tile.first_id(), x,
                         static_cast<size_t>(tile.width()) * sizeof(float));
      tile.statistics(m, x);
      if (t.gumbel) tile.sample(m, x, reach[m]);
    }
  }
}

// Sixteen rows: the largest value and its id over all tiles, first tile among equals.
struct Best {
  F32 value;
  I32 id;
};
inline Best best_of_tiles(const float* values, const int32_t* ids, int64_t tiles, int64_t stride) {
  Best b{load(values), load(ids)};
  for (int64_t i = 1; i < tiles; i++) {
    const F32 v = load(values + i * stride);
    const unsigned up = greater_mask(v, b.value);
    b.value = select(up, v, b.value);
    b.id = select(up, load(ids + i * stride), b.id);
  }
  return b;
}

void merge_group(const HeadMergeArgs& t, int64_t m0) {
  const HeadPartials& p = t.partials;
  const int64_t tiles = head_tiles(t.vocab), n = p.row_stride;
  const int left = tail16(t.rows - m0);
  const Best top = best_of_tiles(p.max + m0, p.argmax + m0, tiles, n);
  const F32 one = splat(1.f);
  F32 others = splat(0.f), weighted = splat(0.f);  // others: all ids but the best one
  for (int64_t i = 0; i < tiles; i++) {
    const F32 d = max(splat(kLowestExponent), sub(load(p.max + i * n + m0), top.value)), f = exp(d),
              s = load(p.sum + i * n + m0);
    const I32 id = load(p.argmax + i * n + m0);  // the best id of the row belongs to one tile
    const F32 own = from_bits(select_greater(id, top.id, bits(f), select_greater(top.id, id, bits(f), splat(0))));
    others = add(others, fma(f, s, own));
    weighted = fma(f, fma(d, add(s, one), load(p.weighted + i * n + m0)), weighted);
  }
  const F32 z = add(one, others), log_z = log1p(others);
  store_n(t.max_logit + m0, top.value, left);
  store_n(t.log_sum_exp + m0, add(top.value, log_z), left);
  store_n(t.entropy + m0, max(splat(0.f), sub(log_z, div(weighted, z))), left);
  if (t.confidence) store_n(t.confidence + m0, div(one, z), left);
  store_n(reinterpret_cast<float*>(t.argmax) + m0, from_bits(top.id), left);
  if (t.sample_id) {
    const Best pick = best_of_tiles(p.sample_score + m0, p.sample_id + m0, tiles, n);
    const Best logit =
        best_of_tiles(p.sample_score + m0, reinterpret_cast<const int32_t*>(p.sample_logit) + m0, tiles, n);
    store_n(reinterpret_cast<float*>(t.sample_id) + m0, from_bits(pick.id), left);
    store_n(t.sample_logit + m0, from_bits(logit.id), left);
  }
}
void head_merge(const HeadMergeArgs& t, Range row_groups) {
  for (int64_t g = row_groups.begin; g < row_groups.end; g++) merge_group(t, g * 16);
}

}  // namespace
}  // namespace dlmrt::cpu
