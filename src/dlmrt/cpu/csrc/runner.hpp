// Runs a program: a flat list of operations with two kinds of jumps, over memory that was planned before.
//
// Nothing is allocated while it runs. Scratch of the workers is measured when the program is built and allocated once.
// One program runs at a time on a pool: a second caller waits.
//
// Source: ours.
#pragma once
#include <atomic>
#include <thread>

#include "op.hpp"

namespace dlmrt::cpu {

class Runner {
 public:
  Runner(std::shared_ptr<Pool> pool, const KernelTable& kernels) : pool_(std::move(pool)), kernels_(kernels) {}
  ~Runner() { join(); }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Building: nodes in listing order, bodies between begin and end. Throws std::invalid_argument for a node that does
  // not fit its operands.
  void add(Fields fields);
  void begin_while(const Memory& flag) { begin(flag, true); }
  void begin_if(const Memory& flag) { begin(flag, false); }
  void end();

  // Bytes of worker scratch so far.
  int64_t scratch_bytes() const { return worker_bytes_ * pool_->size(); }

  // From the first node to the last, on the calling thread and the pool. Where DLMRT_CHECKED is defined, throws
  // std::out_of_range before an operation that finds an operand out of its bounds.
  void run();
  // The same on a thread of its own, until `join`; one start at a time. `check` throws what ended that thread early.
  void start();
  void join();
  void check();

 private:
  struct Instruction {
    std::unique_ptr<Op> op;  // null: jump
    std::vector<std::function<void()>> checks;  // before op or jump
    const int32_t* flag;     // jump only if this is 0; null: always
    size_t target;
  };
  struct Open {
    size_t at;
    bool is_loop;
  };
  void begin(const Memory& flag, bool is_loop);

  std::shared_ptr<Pool> pool_;
  const KernelTable& kernels_;
  std::vector<Instruction> instructions_;
  std::vector<Open> open_;
  int64_t worker_bytes_ = 0;
  std::unique_ptr<AlignedBytes> scratch_;
  std::thread thread_;
  std::atomic<bool> has_failed_{false};
  std::string failure_;  // written before has_failed_ is set
};

}  // namespace dlmrt::cpu
