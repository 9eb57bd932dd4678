// Runs a program: a flat list of operations with two kinds of jumps, over memory that was planned before.
//
// Nothing is allocated while it runs. Scratch of the workers is measured when the program is built; it is the pool's,
// since one program runs at a time on a pool: a second caller waits.
//
// Source: ours.
#pragma once
#include <atomic>
#include <mutex>
#include <thread>

#include "row_span.hpp"

namespace dlmrt::cpu {

class Runner {
 public:
  Runner(std::shared_ptr<Pool> pool, const KernelTable& kernels) : pool_(std::move(pool)), kernels_(kernels) {}
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Building: nodes in listing order, bodies between begin and end. Neighbours with the same `span` (from 0 on, -1: none)
  // become one. Throws std::invalid_argument for a node that does not fit its operands, or its span.
  void add(Fields fields, int span = -1, bool waits = false);
  void begin_while(const Memory& flag) { begin(flag, true); }
  void begin_if(const Memory& flag) { begin(flag, false); }
  void end();

  // Bytes of worker scratch that this program needs, and the pool does not have yet.
  int64_t missing_scratch_bytes() const {
    return scratch_bytes() > pool_->scratch_bytes() ? scratch_bytes() - pool_->scratch_bytes() : 0;
  }

  // From the first node to the last, on the calling thread and the pool. Where DLMRT_CHECKED is defined, throws
  // std::out_of_range before an operation that finds an operand out of its bounds.
  void run();
  // The same on a thread of its own, until `join`, which any thread may call. `check` throws what ended that thread
  // early. A thread that was started before a fork is not the child's: nothing waits for it there, `check` says so.
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
  struct Started {
    ~Started() { join(); }
    void join() {
      const std::lock_guard<std::mutex> lock(handle);
      if (thread.joinable()) thread.join();
    }

    std::mutex handle;  // of the thread
    std::thread thread;
    std::atomic<bool> has_failed{false};
    std::string failure;  // written before has_failed is set
  };
  void begin(const Memory& flag, bool is_loop);
  int64_t scratch_bytes() const { return worker_bytes_ * pool_->size(); }

  std::shared_ptr<Pool> pool_;
  const KernelTable& kernels_;
  std::vector<Instruction> instructions_;
  std::vector<Open> open_;
  RowSpan* last_span_ = nullptr;  // which the next node may join
  int last_span_number_ = -1;
  int64_t worker_bytes_ = 0;
  int started_after_ = -1;  // forks, -1: never
  Forkable<Started> started_;  // last: its end waits for the thread, which uses all the others
};

}  // namespace dlmrt::cpu
