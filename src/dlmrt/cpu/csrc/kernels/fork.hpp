// State that threads share, in a process that may be forked.
//
// Source: ours; fork and threads as in POSIX.
#pragma once
#include <atomic>

namespace dlmrt::cpu {

// How often this process was forked off since the first call, which throws std::runtime_error without memory for it.
int forks();

// A T that begins anew in a child of fork(). The threads that shared the old one do not exist there and its locks may
// be held for ever, so it is left where it is and never destroyed.
template <class T>
class Forkable {
 public:
  Forkable() : state_(new State) {}
  ~Forkable() {
    State* state = state_.load();
    if (state->born_after == forks()) delete state;
  }
  Forkable(const Forkable&) = delete;
  Forkable& operator=(const Forkable&) = delete;

  T& operator*() {
    State* state = state_.load(std::memory_order_acquire);
    if (state->born_after == forks()) return state->value;
    State* fresh = new State;
    if (state_.compare_exchange_strong(state, fresh)) return fresh->value;
    delete fresh;  // another thread of the child was first
    return state->value;
  }
  T* operator->() { return &**this; }

 private:
  struct State {
    T value;
    int born_after = forks();
  };
  std::atomic<State*> state_;
};

}  // namespace dlmrt::cpu
