// Row-wise kernels: norm, quantise, gated product, scaled add, embedding rows, q/k norm with rotary phases, KV store.
//
// A row is the unit, and its sums run over sixteen virtual lanes in ascending order, so no row sees another one.
// Operands are written as cells directly: a product never waits for a separate packing pass.
//
// Source: ours; the operations are those of dlmrt/ops/eager.py.
#pragma once

namespace dlmrt::cpu {
namespace {

// Writes value(k) for k = 0, 16, ... as row `row` of o, lanes past the width as zeros. Called twice per k for int8.
template <class Value>
inline void write_operand_row(const Operand& o, int64_t row, Value value) {
  CellWriter w = writer(o, row);
  if (o.dtype == DType::kInt8) {
    MagnitudeMax top;
    for (int64_t k = 0; k < o.width; k += 16) top.see(value(k));
    o.scales[row] = top.scale();
    w.inverse_scale = splat(1.f / o.scales[row]);
  }
  for (int64_t k = 0; k < o.width; k += 16) w.write(k, value(k));
}

void quantize_rows(const QuantizeArgs& t, Range rows) {
  for (int64_t m = rows.begin; m < rows.end; m++) {
    const float* x = t.x + m * t.ld;
    write_operand_row(t.out, m, [&](int64_t k) { return load_upto16(x + k, t.out.width - k); });
  }
}

void gate_rows(const GateArgs& t, Range rows) {
  const int64_t n = t.out.width;
  for (int64_t m = rows.begin; m < rows.end; m++) {
    float* gate = t.gate + m * t.ld;
    const float* up = t.up + m * t.ld;
    for (int64_t k = 0; k < n; k += 16)
      store_upto16(gate + k, gated(t.is_gelu, load_upto16(gate + k, n - k), load_upto16(up + k, n - k)), n - k);
    write_operand_row(t.out, m, [&](int64_t k) { return load_upto16(gate + k, n - k); });
  }
}

inline float inverse_rms(F32 sum_of_squares, int64_t n, float eps) {
  return 1.f / __builtin_sqrtf(reduce_add(sum_of_squares) / static_cast<float>(n) + eps);
}

void rms_norm(const RmsNormArgs& t, Range rows) {
  const int64_t n = t.width;
  for (int64_t m = rows.begin; m < rows.end; m++) {
    const float* x = t.x + m * n;
    F32 squares = splat(0.f);
    for (int64_t k = 0; k < n; k += 16) {
      const F32 v = load_upto16(x + k, n - k);
      squares = fma(v, v, squares);
    }
    const F32 r = splat(inverse_rms(squares, n, t.eps));
    const auto value = [&](int64_t k) {
      const F32 v = mul(load_upto16(x + k, n - k), r);
      return t.weight ? mul(v, load_upto16(t.weight + k, n - k)) : v;
    };
    if (t.out_rows)
      for (int64_t k = 0; k < n; k += 16) store_upto16(t.out_rows + m * n + k, value(k), n - k);
    if (t.out.cells) write_operand_row(t.out, m, value);
  }
}

void scaled_add(const ScaledAddArgs& t, Range rows) {
  const F32 alpha = splat(t.alpha);
  for (int64_t m = rows.begin; m < rows.end; m++) {
    if (t.where && !t.where[m]) continue;
    for (int64_t k = 0; k < t.width; k += 16) {
      float* x = t.x + m * t.width + k;
      const F32 d = load_upto16(t.delta + m * t.width + k, t.width - k);
      store_upto16(x, fma(alpha, d, load_upto16(x, t.width - k)), t.width - k);
    }
  }
}

// One row of a table that is packed for the head, in panels: a pair of numbers a cache line.
void embed_from_panels(const EmbedArgs& t, int64_t id, float* out) {
  const uint8_t* panel = static_cast<const uint8_t*>(t.table) + id / kPanel * t.panel_bytes;
  const int64_t column = id % kPanel;
  const float scale = t.scale == 0.f ? 1.f : t.scale;
  for (int64_t k = 0; k < t.width; k++) {
    float value;
    if (t.dtype == DType::kInt8) {
      value = static_cast<float>(reinterpret_cast<const int8_t*>(panel)[(k / 4 * kPanel + column) * 4 + k % 4]) *
              t.row_scale[id];
    } else if (t.dtype == DType::kF32) {
      value = reinterpret_cast<const float*>(panel)[k * kPanel + column];
    } else {
      const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(panel)[(k / 2 * kPanel + column) * 2 + k % 2]} << 16;
      __builtin_memcpy(&value, &bits, sizeof value);
    }
    out[k] = value * scale;
  }
}

void embed(const EmbedArgs& t, Range rows) {
  for (int64_t m = rows.begin; m < rows.end; m++) {
    float* out = t.out + m * t.width;
    if (t.panel_bytes) {
      embed_from_panels(t, t.ids[m], out);
      continue;
    }
    const int64_t first = t.ids[m] * t.width;
    if (t.dtype == DType::kF32 && t.scale == 0.f) {
      __builtin_memcpy(out, static_cast<const float*>(t.table) + first, static_cast<size_t>(t.width) * sizeof(float));
      continue;
    }
    const F32 scale = splat(t.scale == 0.f ? 1.f : t.scale);
    for (int64_t k = 0; k < t.width; k += 16) {
      const int64_t left = t.width - k;
      const uint16_t* bits = static_cast<const uint16_t*>(t.table) + first + k;
      const F32 v = t.dtype == DType::kF32 ? load_upto16(static_cast<const float*>(t.table) + first + k, left)
                    : left >= 16           ? load_bf16(bits)
                                           : load_bf16_n(bits, tail16(left));
      store_upto16(out + k, mul(v, scale), left);
    }
  }
}

// ---- KV cache addressing
inline uint8_t* kv_plane(const KvCache& c, int64_t position, int64_t head, bool values) {
  return static_cast<uint8_t*>(c.pages) + position / c.page_size * kv_page_bytes(c) +
         (2 * head + values) * kv_plane_bytes(c);
}
struct HeadRow {  // one head of one row, padded to 16 with zeros
  alignas(64) float v[kMaxHeadDim];

  // x, or its RMSNorm when there is a weight
  void take(const float* x, const float* weight, int64_t n, float eps) {
    if (!weight) {
      for (int64_t k = 0; k < n; k += 16) store(v + k, load_upto16(x + k, n - k));
      return;
    }
    F32 squares = splat(0.f);
    for (int64_t k = 0; k < n; k += 16) {
      const F32 a = load_upto16(x + k, n - k);
      squares = fma(a, a, squares);
    }
    const F32 r = splat(inverse_rms(squares, n, eps));
    for (int64_t k = 0; k < n; k += 16)
      store(v + k, mul(mul(load_upto16(x + k, n - k), r), load_upto16(weight + k, n - k)));
  }
  // RMSNorm without weight of what was taken
  void normalize(int64_t n, float eps) {
    F32 squares = splat(0.f);
    for (int64_t k = 0; k < n; k += 16) squares = fma(load(v + k), load(v + k), squares);
    const F32 r = splat(inverse_rms(squares, n, eps));
    for (int64_t k = 0; k < n; k += 16) store(v + k, mul(load(v + k), r));
  }
  // pairs (i, i + half)
  void rotate(const float* cos, const float* sin, int64_t half) {
    for (int64_t k = 0; k < half; k += 16) {
      const int64_t left = half - k;
      const F32 a = load_upto16(v + k, left), b = load_upto16(v + half + k, left), c = load_upto16(cos + k, left),
                s = load_upto16(sin + k, left);
      store_upto16(v + k, sub(mul(a, c), mul(b, s)), left);
      store_upto16(v + half + k, add(mul(b, c), mul(a, s)), left);
    }
  }
  // As keys: position `slot` is a column of a panel, the head's width its k.
  void store_keys(uint8_t* plane, DType t, int64_t n, int64_t slot) const {
    const int64_t group = padded_width(n) / values_per_cell(t) * kStepBytes;
    copy_pieces(t, n, plane + slot / kPanel * group + slot % kPanel * kCellBytes, 16 / values_per_cell(t) * kStepBytes,
                kStepBytes, kCellBytes);
  }
  // As values: the head's width runs over columns, `slot` is a k.
  void store_values(uint8_t* plane, DType t, int64_t n, int64_t slot, int64_t page_size) const {
    const int64_t g = values_per_cell(t), size = kCellBytes / g;
    copy_pieces(t, n, plane + slot / g * kStepBytes + slot % g * size, page_size / g * kStepBytes, kCellBytes, size);
  }

 private:
  // Encodes 16 values at a time and copies their pieces of `size` bytes to out, `stride` apart; the next 16 go to out +
  // block.
  void copy_pieces(DType t, int64_t n, uint8_t* out, int64_t block, int64_t stride, int64_t size) const {
    for (int64_t k = 0; k < n; k += 16, out += block) {
      alignas(64) uint8_t bytes[64];
      if (t == DType::kF32) store(reinterpret_cast<float*>(bytes), load(v + k));
      else store_bf16(reinterpret_cast<uint16_t*>(bytes), load(v + k));
      if (t == DType::kF32) copy<16, 4>(bytes, out, stride);
      else if (size == 4) copy<8, 4>(bytes, out, stride);
      else copy<16, 2>(bytes, out, stride);
    }
  }
  template <int kPieces, int kSize>
  static void copy(const uint8_t* from, uint8_t* to, int64_t stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kPieces; i++) __builtin_memcpy(to + i * stride, from + i * kSize, kSize);
  }
};

void qk_norm_rope_store(const QkvArgs& t, Range rows, Range kv_heads) {
  const KvCache& c = t.cache;
  const int64_t n = c.head_dim, half = t.rotary_dim / 2, group = t.num_heads / c.num_kv_heads;
  const int64_t group_bytes = operand_bytes(c.dtype, t.rows * group, n);
  const F32 scale = splat(t.scale > 0 ? t.scale : 1.f / __builtin_sqrtf(static_cast<float>(n)));
  HeadRow head;
  for (int64_t m = rows.begin; m < rows.end; m++) {
    const float *queries = t.qkv + m * t.ld, *keys = queries + t.num_heads * n,
                *values = t.is_v_from_k ? keys : keys + c.num_kv_heads * n;
    const int64_t position = t.positions[m], slot = position % c.page_size;
    const float *cos = t.cos + position * half, *sin = t.sin + position * half;
    for (int64_t h = kv_heads.begin * group; h < kv_heads.end * group; h++) {
      head.take(queries + h * n, t.q_norm, n, t.eps);
      head.rotate(cos, sin, half);
      const Operand q{c.dtype, 0, n, static_cast<uint8_t*>(t.q) + h / group * group_bytes, nullptr};
      write_operand_row(q, m * group + h % group, [&](int64_t k) { return mul(load(head.v + k), scale); });
    }
    for (int64_t h = kv_heads.begin; h < kv_heads.end; h++) {
      head.take(keys + h * n, t.k_norm, n, t.eps);
      head.rotate(cos, sin, half);
      head.store_keys(kv_plane(c, position, h, false), c.dtype, n, slot);
      head.take(values + h * n, nullptr, n, t.eps);
      if (t.is_v_normed) head.normalize(n, t.eps);
      head.store_values(kv_plane(c, position, h, true), c.dtype, n, slot, c.page_size);
    }
  }
}

}  // namespace
}  // namespace dlmrt::cpu
