// What the loop's operations share: flags of the host, ends, operations written as functions, the block of a rule.
//
// Source: ours.
#pragma once
#include <algorithm>
#include <cstring>

#include "op.hpp"

namespace dlmrt::cpu {

enum EndReason : int32_t {
  kGoesOn = 0,
  kEos,
  kStopToken,
  kMaxTokens,
  kCancelled,
  kNonFinite
};  // END_REASONS of program/loop.py

// The host sets the flag from another thread.
inline bool is_set(const int32_t* flag) { return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0; }

// An operation written as a function that owns its operands.
template <class F>
class Function : public Op {
 public:
  explicit Function(F f) : f_(std::move(f)) {}
  void run(const Context&) override { f_(); }

 private:
  F f_;
};
template <class F>
std::unique_ptr<Op> make(F f) {
  return std::make_unique<Function<F>>(std::move(f));
}

inline bool contains(const uint32_t* bits, int32_t id) { return bits[id / 32] >> (id % 32) & 1; }

// chosen = the `count` open slots of highest score among the first `length`; ties go to the lower slot
inline void choose_best(const uint8_t* is_open, int64_t length, const float* score, int64_t count, uint8_t* chosen) {
  std::fill_n(chosen, length, uint8_t{0});
  for (int64_t left = count; left > 0; left--) {
    int64_t best = -1;
    for (int64_t i = 0; i < length; i++)
      if (is_open[i] && !chosen[i] && (best < 0 || score[i] > score[best])) best = i;
    if (best < 0) return;
    chosen[best] = 1;
  }
}

// chosen = the open slots among the first `length` whose score is above the threshold; the `count` best if fewer are
inline void choose_above(const uint8_t* is_open, int64_t length, const float* score, float threshold, int64_t count,
                         uint8_t* chosen) {
  int64_t passed = 0;
  for (int64_t i = 0; i < length; i++) passed += chosen[i] = is_open[i] && score[i] > threshold;
  if (passed < count) choose_best(is_open, length, score, count, chosen);
}

// Operands of a block's slots, of which `length` there are.
inline uint8_t* flags_of(const Fields& f, const char* role) {
  const int64_t length = f.size("length");
  return f.get<uint8_t>(role, length, length, 0, 1);
}
template <class T = int32_t>
T* slots_of(const Fields& f, const char* role) {
  return f.get<T>(role, f.size("length"));
}
inline int32_t* flag_of(const Fields& f, const char* role) { return f.scalar(role, 0, 1); }
// A count that only grows by one at a time, so that it cannot overflow.
inline int32_t* counter_of(const Fields& f, const char* role) { return f.scalar(role, 0, INT32_MAX - 1); }
inline int32_t* max_steps_of(const Fields& f) { return f.scalar("max_steps", 1, INT32_MAX); }

// The block that a rule works on, and what all rules leave.
struct Block {
  explicit Block(const Fields& f)
      : length(f.size("length")),
        canvas(slots_of(f, "canvas")),
        answer(slots_of(f, "answer")),
        is_open(flags_of(f, "is_open")),
        committed(slots_of<uint8_t>(f, "committed")),
        changed(slots_of<uint8_t>(f, "changed")),
        step(counter_of(f, "step")),
        max_steps(max_steps_of(f)),
        num_edits(f.get<int32_t>("num_edits")),
        is_done(f.get<int32_t>("is_done")),
        token(slots_of(f, "token")) {}

  bool is_last() const { return *step + 1 >= *max_steps; }
  int64_t num_open() const {
    return std::count_if(is_open, is_open + length, [](uint8_t open) { return open != 0; });
  }

  // Chosen slots take the predicted token and close.
  void commit_chosen() const {
    for (int64_t i = 0; i < length; i++) {
      if (!committed[i]) continue;
      canvas[i] = token[i];
      is_open[i] = 0;
    }
  }
  void finish(bool done) const {
    std::memcpy(answer, canvas, static_cast<size_t>(length) * sizeof(int32_t));
    std::memcpy(changed, committed, static_cast<size_t>(length));
    ++*step;
    *is_done = done;
  }

  int64_t length;
  int32_t *canvas, *answer;
  uint8_t *is_open, *committed, *changed;
  int32_t* step;
  const int32_t* max_steps;
  int32_t *num_edits, *is_done;
  const int32_t* token;
};

}  // namespace dlmrt::cpu
