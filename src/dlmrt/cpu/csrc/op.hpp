// One node of a native program, and the operands that it is made from.
//
// Source: ours.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/args.hpp"
#include "kernels/pool.hpp"
#include "ring.hpp"
#include "weights.hpp"

namespace dlmrt::cpu {

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

// Operands and constants of a node by role, in the order of the listing.
class Fields {
 public:
  std::string op;
  std::vector<std::pair<std::string, void*>> pointers;
  std::vector<std::pair<std::string, std::shared_ptr<const PackedWeight>>> weights;
  std::vector<std::pair<std::string, double>> numbers;
  std::shared_ptr<Ring> ring;

  template <class T>
  T* find(const char* role) const {
    for (const auto& [name, pointer] : pointers)
      if (name == role) return static_cast<T*>(pointer);
    return nullptr;
  }
  template <class T>
  T* get(const char* role) const {
    if (T* pointer = find<T>(role)) return pointer;
    throw std::invalid_argument(op + ": operand '" + role + "' is missing");
  }
  std::shared_ptr<const PackedWeight> weight(const char* role) const {
    for (const auto& [name, packed] : weights)
      if (name == role) return packed;
    throw std::invalid_argument(op + ": weight '" + role + "' is missing");
  }
  double number(const std::string& name) const {
    for (const auto& [known, value] : numbers)
      if (known == name) return value;
    throw std::invalid_argument(op + ": attribute '" + name + "' is missing");
  }
  int64_t integer(const std::string& name) const { return static_cast<int64_t>(number(name)); }
  bool has(const char* name) const {
    for (const auto& entry : numbers)
      if (entry.first == name) return true;
    return false;
  }
  DType dtype(const char* name) const { return static_cast<DType>(integer(name)); }
};

// A number of rows: constant, or read when the program runs.
class Count {
 public:
  explicit Count(const Fields& f) : at_(f.find<int32_t>("rows")), fixed_(at_ ? 0 : f.integer("rows")) {}
  int64_t operator()() const { return at_ ? *at_ : fixed_; }

 private:
  const int32_t* at_;
  int64_t fixed_;
};

// Null for a name that is not theirs.
std::unique_ptr<Op> make_tensor_op(const Fields& fields);
std::unique_ptr<Op> make_moe_op(const Fields& fields);
std::unique_ptr<Op> make_predict_op(const Fields& fields);
std::unique_ptr<Op> make_loop_op(const Fields& fields);
std::unique_ptr<Op> make_edit_op(const Fields& fields);

}  // namespace dlmrt::cpu
