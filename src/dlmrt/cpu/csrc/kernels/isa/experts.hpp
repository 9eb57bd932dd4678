// Grouped products of a mixture of experts, gates in parts of columns, and small row-wise kernels.
//
// Rows that chose an expert stand side by side, so an expert is a product like any other and its weights are read once
// for all of them. An output row depends neither on the other rows of its run nor on the division into units.
//
// Source: ours; the operations are those of dlmrt/ops/eager.py.
#pragma once

namespace dlmrt::cpu {
namespace {

void gate_columns(const GateArgs& t, Range panels, int32_t* top) {
  const int64_t n = t.out.width, end = panels.end * kPanel < n ? panels.end * kPanel : n;
  for (int64_t m = 0; m < t.rows; m++) {
    float* gate = t.gate + m * t.ld;
    const float* up = t.up + m * t.ld;
    MagnitudeMax most;
    for (int64_t k = panels.begin * kPanel; k < end; k += 16) {
      const F32 y = gated(t.is_gelu, load_upto16(gate + k, n - k), load_upto16(up + k, n - k));
      most.see(y);
      store_upto16(gate + k, y, n - k);
    }
    top[m] = reduce_max(most.top);
  }
}
void pack_columns(const GateArgs& t, Range panels, const int32_t* top) {
  const int64_t n = t.out.width, end = panels.end * kPanel < n ? panels.end * kPanel : n;
  for (int64_t m = 0; m < t.rows; m++) {
    CellWriter w = writer(t.out, m);
    if (t.out.dtype == DType::kInt8) {
      const float scale = MagnitudeMax::scale_of(top[m]);
      if (panels.begin == 0) t.out.scales[m] = scale;
      w.inverse_scale = splat(1.f / scale);
    }
    for (int64_t k = panels.begin * kPanel; k < end; k += 16) w.write(k, load_upto16(t.gate + m * t.ld + k, n - k));
  }
}

void scale(const ScaleArgs& t, Range rows) {
  const F32 factor = splat(*t.factor);
  for (int64_t m = rows.begin; m < rows.end; m++)
    for (int64_t k = 0; k < t.width; k += 16) {
      float* x = t.x + m * t.width + k;
      store_upto16(x, mul(load_upto16(x, t.width - k), factor), t.width - k);
    }
}

void soft_cap(const SoftCapArgs& t, Range rows) {
  const F32 cap = splat(t.cap), inverse = splat(1.f / t.cap);
  for (int64_t m = rows.begin; m < rows.end; m++)
    for (int64_t k = 0; k < t.width; k += 16) {
      float* x = t.x + m * t.width + k;
      store_upto16(x, soft_capped(load_upto16(x, t.width - k), cap, inverse), t.width - k);
    }
}

void expert_linear(const ExpertLinearArgs& t, Range units, void* scratch) {
  const int64_t panels = num_panels(t.weight.n);
  for (int64_t u = units.begin; u < units.end;) {
    const ExpertRun& run = t.runs->run[u / panels];
    const int64_t first = u % panels, left = units.end - u, end = panels - first < left ? panels : first + left;
    LinearArgs product{t.weight, t.input, run.rows, t.out + run.begin * t.ld_out, t.ld_out, 0};
    Weight& w = product.weight;
    w.panels = static_cast<uint8_t*>(w.panels) + run.expert * t.panel_stride;
    if (w.column_scale) w.column_scale += run.expert * t.scale_stride;
    if (w.column_sum) w.column_sum += run.expert * t.sum_stride;
    product.input.cells = operand_row(t.input.cells, t.input.dtype, t.input.width, run.begin);
    if (t.input.scales) product.input.scales += run.begin;
    linear(product, {first, end}, scratch);
    u += end - first;
  }
}

void combine(const CombineArgs& t, Range rows) {
  for (int64_t m = rows.begin; m < rows.end; m++)
    for (int64_t n = 0; n < t.width; n += 16) {
      const int64_t left = t.width - n;
      F32 sum = splat(0.f);
      for (int64_t k = m * t.top_k; k < (m + 1) * t.top_k; k++)
        sum = add(sum, mul(splat(t.weights[k]), load_upto16(t.x + t.place[k] * t.width + n, left)));
      store_upto16(t.y + m * t.width + n, sum, left);
    }
}

}  // namespace
}  // namespace dlmrt::cpu
