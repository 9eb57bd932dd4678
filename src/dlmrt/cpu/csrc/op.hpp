// One node of a native program, and the operands that it is made from.
//
// A node is refused where it is made if an operand is missing or smaller than what it will touch at the largest number
// of rows, or if an attribute makes no sense. What only the memory's contents tell (row counts, ids, positions, places,
// flags) is stated beside the operand by `expect` and verified before every run in builds with DLMRT_CHECKED.
//
// Source: ours.
#pragma once
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/args.hpp"
#include "kernels/pool.hpp"
#include "ring.hpp"
#include "weights.hpp"

namespace dlmrt::cpu {

#ifdef DLMRT_CHECKED
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

// What an operation may use while it runs.
struct Context {
  Pool& pool;
  const KernelTable& kernels;
  uint8_t* scratch;  // `scratch_stride` bytes for each worker
  int64_t scratch_stride;

  void* worker_scratch(int worker) const { return scratch + worker * scratch_stride; }
};

class Op {
 public:
  virtual ~Op() = default;
  virtual void run(const Context& context) = 0;
  // Scratch of one worker.
  virtual int64_t worker_bytes() const { return 0; }
};

class Count;

// An operation whose rows are computed apart from each other, so that a thread may do some of them through several
// operations (row_span.hpp).
class RowOp : public Op {
 public:
  virtual const Count& rows() const = 0;
  // Those in `rows`, which begin with a row group, on the calling thread.
  virtual void run_rows(const Context& context, Range rows, int worker) const = 0;
};

// Memory of an operand, which the caller keeps alive.
struct Memory {
  void* data;
  int64_t bytes;
};

// A number that is known, or that memory holds when the operation runs.
class Number {
 public:
  Number(int64_t value) : read_([value] { return value; }) {}
  template <class F, class = std::enable_if_t<std::is_invocable_v<F>>>
  Number(F read) : read_(std::move(read)) {}
  int64_t operator()() const { return read_(); }

 private:
  std::function<int64_t()> read_;
};

// The product of sizes, or a size that no memory has.
template <class... Sizes>
int64_t product(Sizes... sizes) {
  int64_t result = 1;
  bool is_over = false;
  ((is_over |= __builtin_mul_overflow(result, static_cast<int64_t>(sizes), &result)), ...);
  return is_over || result < 0 ? INT64_MAX : result;
}

// Operands and constants of a node by role, in the order of the listing.
class Fields {
 public:
  std::string op;
  std::vector<std::pair<std::string, Memory>> memory;
  std::vector<std::pair<std::string, std::shared_ptr<const PackedWeight>>> weights;
  std::vector<std::pair<std::string, double>> numbers;
  std::shared_ptr<Ring> ring;
  mutable std::vector<std::function<void()>> checks;  // each throws what it finds wrong

  [[noreturn]] void refuse(const std::string& what) const { throw std::invalid_argument(op + ": " + what); }
  void require(bool condition, const char* what) const {
    if (!condition) refuse(what);
  }

  // Bytes of an operand, 0 without it.
  int64_t bytes(const std::string& role) const {
    for (const auto& [name, at] : memory)
      if (name == role) return at.bytes;
    return 0;
  }
  // `count` elements, null if the node has no such operand.
  template <class T>
  T* find(const char* role, int64_t count = 1) const {
    constexpr size_t kSize = sizeof(std::conditional_t<std::is_void_v<T>, char, T>),
                     kAlign = std::is_void_v<T> ? kAlignment : alignof(std::conditional_t<std::is_void_v<T>, char, T>);
    for (const auto& [name, at] : memory) {
      if (name != role) continue;
      const int64_t needed = product(count, kSize);
      if (at.bytes < needed)
        refuse("operand '" + name + "' has " + std::to_string(at.bytes) + " bytes, " + std::to_string(needed) +
               " are needed");
      if (!at.data || reinterpret_cast<uintptr_t>(at.data) % kAlign)
        refuse("operand '" + name + "' does not begin on a multiple of " + std::to_string(kAlign) + " bytes");
      return static_cast<T*>(at.data);
    }
    return nullptr;
  }
  template <class T>
  T* get(const char* role, int64_t count = 1) const {
    if (T* pointer = find<T>(role, count)) return pointer;
    refuse("operand '" + std::string(role) + "' is missing");
  }
  // How many elements of T an operand holds.
  template <class T>
  int64_t count(const char* role) const {
    return bytes(role) / int64_t{sizeof(T)};
  }
  std::shared_ptr<const PackedWeight> weight(const char* role) const {
    for (const auto& [name, packed] : weights)
      if (name == role) return packed;
    refuse("weight '" + std::string(role) + "' is missing");
  }

  double number(const std::string& name) const {
    for (const auto& [known, value] : numbers)
      if (known == name) return value;
    refuse("attribute '" + name + "' is missing");
  }
  bool has(const char* name) const {
    for (const auto& entry : numbers)
      if (entry.first == name) return true;
    return false;
  }
  // By default so small that the product of two cannot overflow.
  int64_t integer(const std::string& name, int64_t least = 0, int64_t most = int64_t{1} << 28) const {
    const double value = number(name);
    if (!(value >= static_cast<double>(least) && value <= static_cast<double>(most)) ||
        value != static_cast<double>(static_cast<int64_t>(value)))
      refuse("attribute '" + name + "' is " + std::to_string(value) + "; it must be a whole number in " +
             std::to_string(least) + ".." + std::to_string(most));
    return static_cast<int64_t>(value);
  }
  int64_t size(const char* name) const { return integer(name, 1); }
  bool flag(const char* name) const { return has(name) && integer(name, 0, 1) != 0; }
  float real(const char* name) const { return static_cast<float>(number(name)); }
  // Of operands: kF32, kBF16 or kInt8.
  DType dtype(const char* name, DType widest = DType::kInt8) const {
    return static_cast<DType>(integer(name, 0, static_cast<int64_t>(widest)));
  }

  // Rows [rows, width] as an operand of the matrix kernels.
  Operand operand(int64_t rows, int64_t width, const char* cells = "cells", const char* scales = "scales",
                  const char* dtype_name = "operand") const {
    const DType type = dtype(dtype_name);
    require(type != DType::kInt8 || width <= kMaxInt8Width, "int8 rows this wide would overflow their sums");
    return {type, 0, width, get<void>(cells, operand_bytes(type, rows, width)),
            type == DType::kInt8 ? get<float>(scales, rows) : nullptr};
  }

  // Before each run: every one of the leading `count` values at `at`, which is operand `role`, lies in low..high.
  template <class T>
  void expect(const char* role, const T* at, Number count, Number low, Number high) const {
    if constexpr (kChecked) {
      if (!at) return;
      checks.push_back([=, name = op + ": operand '" + role + "'"] {
        const int64_t n = count(), least = low(), most = high();
        for (int64_t i = 0; i < n; i++) {
          const auto value = static_cast<int64_t>(at[i]);
          if (value < least || value > most)
            throw std::out_of_range(name + " holds " + std::to_string(value) + " at " + std::to_string(i) +
                                    "; it must lie within " + std::to_string(least) + ".." + std::to_string(most));
        }
      });
    }
  }
  // As get, where the leading `count` of at most `most` values are expected to lie in low..high.
  template <class T>
  T* get(const char* role, int64_t most, Number count, Number low, Number high) const {
    T* at = get<T>(role, most);
    expect(role, at, std::move(count), std::move(low), std::move(high));
    return at;
  }
  template <class T = int32_t>
  T* scalar(const char* role, Number low, Number high) const {
    return get<T>(role, 1, 1, std::move(low), std::move(high));
  }
};

// A number of rows: constant, or read when the program runs.
class Count {
 public:
  explicit Count(const Fields& f)
      : at_(f.find<int32_t>("rows")), max_(at_ ? f.size("max_rows") : f.size("rows")) {
    f.expect("rows", at_, 1, 0, max_);
  }
  int64_t operator()() const { return at_ ? *at_ : max_; }
  int64_t max() const { return max_; }
  bool operator==(const Count& other) const { return at_ == other.at_ && max_ == other.max_; }

 private:
  const int32_t* at_;
  int64_t max_;
};

// A kernel whose units are rows, over the rows of this run in parts of a multiple of `grain`.
template <class Args>
void over_rows(const Context& c, Args& args, const Count& rows, void (*kernel)(const Args&, Range),
               int64_t grain = kRowGroup) {
  args.rows = rows();
  c.pool.split(args.rows, grain, [&](Range r, int) { kernel(args, r); });
}

// An operation that is one such kernel.
template <class Args, void (*KernelTable::*kernel)(const Args&, Range)>
class RowKernel : public RowOp {
 public:
  const Count& rows() const final { return rows_; }
  void run(const Context& c) final { over_rows(c, args_, rows_, c.kernels.*kernel); }
  void run_rows(const Context& c, Range rows, int) const final {
    Args args = args_;
    args.rows = rows_();
    (c.kernels.*kernel)(args, rows);
  }

 protected:
  explicit RowKernel(const Fields& f) : rows_(f), args_{} {}

  Count rows_;
  Args args_;
};

// Refuses a weight that cannot be multiplied with the node's operand.
inline void require_operand_of(const Fields& f, const Weight& w) {
  const DType wanted = w.dtype == DType::kF32 || w.dtype == DType::kBF16 ? w.dtype : DType::kInt8;
  f.require(f.dtype("operand") == wanted, "attribute 'operand' does not go with the type of the weight");
}

// Null for a name that is not theirs.
std::unique_ptr<Op> make_tensor_op(const Fields& fields);
std::unique_ptr<Op> make_moe_op(const Fields& fields);
std::unique_ptr<Op> make_predict_op(const Fields& fields);
std::unique_ptr<Op> make_loop_op(const Fields& fields);
std::unique_ptr<Op> make_edit_op(const Fields& fields);

}  // namespace dlmrt::cpu
