// Weights in the order of the matrix kernels, in memory of their own.
//
// Source: ours; layouts in kernels/args.hpp.
#pragma once
#include <vector>

#include "kernels/memory.hpp"
#include "kernels/pack.hpp"
#include "kernels/pool.hpp"

namespace dlmrt::cpu {

class PackedWeight {
 public:
  // Bytes of panels, scales and sums.
  static int64_t num_bytes(DType dtype, int32_t group, int64_t n, int64_t k) {
    return num_panels(n) * panel_bytes(dtype, group, k) + columns(n) * (scale_bytes(dtype) + sum_bytes(dtype));
  }

  // Packs `sources`, which hold n rows in all, on the threads of `pool`.
  PackedWeight(Pool& pool, const std::vector<Source>& sources, DType dtype, int32_t group, int64_t n, int64_t k)
      : panels_(num_panels(n) * panel_bytes(dtype, group, k)),
        scales_(columns(n) * scale_bytes(dtype)),
        sums_(columns(n) * sum_bytes(dtype)),
        view_{dtype, group, n, k, panels_.data(), nullptr, nullptr} {
    if (scale_bytes(dtype)) view_.column_scale = static_cast<float*>(scales_.data());
    if (sum_bytes(dtype)) view_.column_sum = static_cast<int32_t*>(sums_.data());
    assign(pool, sources);
  }

  // Packs other values of the same shape into the memory that programs already point to; none may be running.
  void assign(Pool& pool, const std::vector<Source>& sources) {
    const auto lock = pool.hold();
    pool.split(num_panels(view_.n), 1,
               [&](Range panels, int) { pack(sources.data(), static_cast<int>(sources.size()), view_, panels); });
  }

  const Weight& view() const { return view_; }

 private:
  static int64_t columns(int64_t n) { return round_up(n, kPanel); }
  static int64_t scale_bytes(DType t) { return t == DType::kF32 || t == DType::kBF16 ? 0 : int64_t{sizeof(float)}; }
  static int64_t sum_bytes(DType t) { return t == DType::kInt8 ? int64_t{sizeof(int32_t)} : 0; }

  AlignedBytes panels_, scales_, sums_;
  Weight view_;
};

}  // namespace dlmrt::cpu
