// Weights in the order of the matrix kernels, in memory of their own: one matrix, or one of each expert side by side.
//
// Source: ours; layouts in kernels/args.hpp.
#pragma once
#include <vector>

#include "kernels/floats.hpp"
#include "kernels/memory.hpp"
#include "kernels/pack.hpp"
#include "kernels/pool.hpp"

namespace dlmrt::cpu {

class PackedWeight {
 public:
  // Bytes of panels, scales and sums.
  static int64_t num_bytes(DType dtype, int32_t group, int64_t n, int64_t k, int64_t count) {
    return count *
           (num_panels(n) * panel_bytes(dtype, group, k) + columns(n) * (scale_bytes(dtype) + sum_bytes(dtype)));
  }

  // Room for `count` matrices [n, k].
  PackedWeight(DType dtype, int32_t group, int64_t n, int64_t k, int64_t count)
      : panels_(count * num_panels(n) * panel_bytes(dtype, group, k)),
        scales_(count * columns(n) * scale_bytes(dtype)),
        sums_(count * columns(n) * sum_bytes(dtype)),
        view_{dtype, group, n, k, panels_.data(), nullptr, nullptr},
        count_(count) {
    if (scale_bytes(dtype)) view_.column_scale = static_cast<float*>(scales_.data());
    if (sum_bytes(dtype)) view_.column_sum = static_cast<int32_t*>(sums_.data());
  }

  // Packs `sources`, which hold n rows in all, as matrix `index` on the threads of `pool`.
  void fill(Pool& pool, int64_t index, const std::vector<Source>& sources) {
    Weight into = view_;
    into.panels = static_cast<uint8_t*>(into.panels) + index * panel_stride();
    if (into.column_scale) into.column_scale += index * column_stride();
    if (into.column_sum) into.column_sum += index * column_stride();
    std::vector<int8_t> codes(static_cast<size_t>(pool.size() * into.k));  // of each worker
    const auto lock = pool.hold();
    const PlainFloats plain;
    pool.split(num_panels(into.n), 1, [&](Range panels, int worker) {
      pack(sources.data(), static_cast<int>(sources.size()), into, panels, codes.data() + worker * into.k);
    });
  }

  // The first matrix, and what lies between it and the next: bytes of panels, columns of scales and sums.
  const Weight& view() const { return view_; }
  int64_t count() const { return count_; }
  int64_t panel_stride() const { return num_panels(view_.n) * panel_bytes(view_.dtype, view_.group, view_.k); }
  int64_t column_stride() const { return columns(view_.n); }

 private:
  static int64_t columns(int64_t n) { return round_up(n, kPanel); }
  static int64_t scale_bytes(DType t) { return t == DType::kF32 || t == DType::kBF16 ? 0 : int64_t{sizeof(float)}; }
  static int64_t sum_bytes(DType t) { return t == DType::kInt8 ? int64_t{sizeof(int32_t)} : 0; }

  AlignedBytes panels_, scales_, sums_;
  Weight view_;
  int64_t count_;
};

}  // namespace dlmrt::cpu
