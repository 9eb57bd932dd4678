// Threads for one latency-bound caller: the caller works too, workers spin, then yield, then sleep.
//
// A denoising step is a few hundred fork/joins, each of microseconds, so workers spin for the length of a serial
// stretch (a join then costs well under a microsecond) and only then give the core away; idle threads use no CPU.
// Results may not depend on who ran what: kernels are pure functions of their units (args.hpp), so any division of work
// will do.
//
// Left out: work stealing, pinning, NUMA. Source: ours.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <type_traits>

#include "args.hpp"
#include "fork.hpp"

namespace dlmrt::cpu {

// min(affinity mask, cgroup quota, physical cores), at least 1.
int default_num_threads();

// Where the workers of one run wait for each other.
class Meeting {
 public:
  explicit Meeting(int num_workers) : num_workers_(num_workers) {}

  // Returns when every worker has called it as often as the caller has.
  void wait();

 private:
  const int num_workers_;
  std::atomic<int64_t> num_calls_{0};
};

class Pool {
 public:
  // Threads start at the first run; num_threads includes the caller. Throws std::invalid_argument below 1.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // The right to run, for as long as the lock lives; a second caller waits. One decode holds it from start to end.
  [[nodiscard]] std::unique_lock<std::mutex> hold();

  // Scratch of all workers, `bytes` or more; whoever holds the right to run has it, with whatever the last one left.
  // What was had before is gone where it was smaller.
  void* scratch(int64_t bytes);
  int64_t scratch_bytes();

  // f(worker) once for each worker 0 .. size() - 1; returns when all have returned. f must not throw and must not run
  // the pool. After fork() the first run of the child starts its own threads. Workers compute as PlainFloats.
  template <class F>
  void run(F&& f) {
    run_erased([](void* arg, int worker) { (*static_cast<std::remove_reference_t<F>*>(arg))(worker); },
               const_cast<void*>(static_cast<const void*>(&f)));
  }

  // f(Range, worker): [0, units) in equal parts, their bounds multiples of `grain`.
  template <class F>
  void split(int64_t units, int64_t grain, F&& f) {
    const int64_t pieces = ceil_div(units, grain);
    const int parts = pieces < num_threads_ ? static_cast<int>(pieces) : num_threads_;
    if (parts <= 1) {
      if (units > 0) f(Range{0, units}, 0);
      return;
    }
    run([&](int worker) {
      if (worker >= parts) return;
      const int64_t end = pieces * (worker + 1) / parts * grain;
      f(Range{pieces * worker / parts * grain, end < units ? end : units}, worker);
    });
  }

 private:
  struct Shared;
  using Function = void (*)(void*, int);
  void run_erased(Function f, void* arg);

  const int num_threads_;
  std::unique_ptr<Forkable<Shared>> shared_;
};

}  // namespace dlmrt::cpu
