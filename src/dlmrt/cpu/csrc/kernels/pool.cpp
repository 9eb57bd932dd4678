// See pool.hpp.
#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#include <pthread.h>

#include "floats.hpp"
#include "memory.hpp"

namespace dlmrt::cpu {
namespace {

constexpr int kSpins = 4000;  // pauses before yielding: about 0.1-0.3 ms
constexpr int kYields = 200;  // yields before sleeping

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class F>
void spin_until(F&& is_reached) {
  for (int spins = 0; !is_reached();) {
    if (++spins < kSpins) pause();
    else std::this_thread::yield();
  }
}

#if defined(__linux__)
long read_number(const std::string& path) {
  std::ifstream file(path);
  long v = -1;
  return file >> v ? v : -1;
}

// Whole CPUs that the control group allows, rounded up; `none` without a limit.
int cgroup_limit(int none) {
  std::string line, group;
  for (std::ifstream file("/proc/self/cgroup"); std::getline(file, line);)
    if (line.rfind("0::", 0) == 0) group = line.substr(3);
  int limit = none;
  const auto apply = [&](double quota, double period) {
    if (quota > 0 && period > 0) limit = std::min(limit, std::max(1, static_cast<int>((quota + period - 1) / period)));
  };
  for (std::string path = group; !path.empty();
       path = path == "/" ? "" : path.substr(0, std::max<size_t>(path.rfind('/'), 1))) {
    std::ifstream file("/sys/fs/cgroup" + (path == "/" ? "" : path) + "/cpu.max");
    std::string quota;
    double period = 0;
    if (file >> quota >> period && quota != "max") apply(std::stod(quota), period);
  }
  apply(static_cast<double>(read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")),
        static_cast<double>(read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")));
  return limit;
}
#endif

std::atomic<int> num_forks{0};

}  // namespace

int forks() {
  static const int failed = pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1); });
  if (failed) throw std::runtime_error("pthread_atfork failed: out of memory");
  return num_forks.load();
}

int default_num_threads() {
  const int logical = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cgroup_limit(logical);
  std::set<std::pair<long, long>> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const long core = read_number(topology + "core_id");
    cores.insert(
        {read_number(topology + "physical_package_id"), core < 0 ? cpu : core});  // no topology: each CPU is a core
  }
  return std::max(1, cgroup_limit(static_cast<int>(cores.size())));
#else
  return logical;
#endif
}

struct Pool::Shared {
  alignas(64) std::atomic<uint64_t> generation{0};
  alignas(64) std::atomic<int> pending{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> is_stopping{false};
  std::mutex holder, sleep;
  std::condition_variable wake;
  Function function = nullptr;
  void* arg = nullptr;
  std::vector<std::thread> workers;
  std::unique_ptr<AlignedBytes> scratch;
  std::atomic<int64_t> scratch_bytes{0};

  ~Shared() { stop(); }
  void publish() {
    generation.fetch_add(1);  // sequentially consistent: ordered against `sleepers`
    if (sleepers.load()) {
      std::lock_guard<std::mutex> lock(sleep);
      wake.notify_all();
    }
  }
  void start(int num_threads) {
    const uint64_t seen = generation.load();
    try {
      for (int i = 1; i < num_threads; i++) workers.emplace_back([this, i, seen] { work(i, seen); });
    } catch (...) {  // the system refuses a thread: leave none behind
      stop();
      throw;
    }
  }
  void work(int worker, uint64_t seen) {
    const PlainFloats plain;
    for (;; seen++) {  // one generation at a time: run waits for all
      for (int s = 0; generation.load(std::memory_order_acquire) == seen; s++) {
        if (s < kSpins) pause();
        else if (s < kSpins + kYields) std::this_thread::yield();
        else {
          std::unique_lock<std::mutex> lock(sleep);
          sleepers.fetch_add(1);
          wake.wait(lock, [&] { return generation.load() != seen; });
          sleepers.fetch_sub(1);
        }
      }
      if (is_stopping) return;
      function(arg, worker);
      pending.fetch_sub(1, std::memory_order_release);
    }
  }
  void stop() {
    if (workers.empty()) return;
    is_stopping = true;
    publish();
    for (std::thread& t : workers) t.join();
    workers.clear();
    is_stopping = false;
  }
};

void Meeting::wait() {
  const int64_t round = num_calls_.fetch_add(1, std::memory_order_acq_rel) / num_workers_;
  spin_until([&] { return num_calls_.load(std::memory_order_acquire) >= (round + 1) * num_workers_; });
}

Pool::Pool(int num_threads) : num_threads_(num_threads) {
  if (num_threads < 1)
    throw std::invalid_argument("a thread pool needs at least 1 thread, got " + std::to_string(num_threads));
  shared_ = std::make_unique<Forkable<Shared>>();
}

Pool::~Pool() = default;

std::unique_lock<std::mutex> Pool::hold() { return std::unique_lock<std::mutex>((*shared_)->holder); }

void* Pool::scratch(int64_t bytes) {
  Shared& s = **shared_;
  if (!s.scratch || bytes > s.scratch_bytes) {
    s.scratch.reset();  // the old one goes before the new one comes
    s.scratch_bytes = 0;
    s.scratch = std::make_unique<AlignedBytes>(bytes);
    s.scratch_bytes = bytes;
  }
  return s.scratch->data();
}

int64_t Pool::scratch_bytes() { return (*shared_)->scratch_bytes; }

void Pool::run_erased(Function f, void* arg) {
  if (num_threads_ == 1) return f(arg, 0);
  Shared& s = **shared_;
  if (s.workers.empty()) s.start(num_threads_);
  s.function = f;
  s.arg = arg;
  s.pending.store(num_threads_ - 1, std::memory_order_relaxed);
  s.publish();
  f(arg, 0);
  spin_until([&] { return !s.pending.load(std::memory_order_acquire); });
}

}  // namespace dlmrt::cpu
