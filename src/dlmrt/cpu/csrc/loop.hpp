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

// The block that a rule works on, and what all rules leave.
struct Block {
  explicit Block(const Fields& f)
      : length(f.integer("length")),
        canvas(f.get<int32_t>("canvas")),
        answer(f.get<int32_t>("answer")),
        is_open(f.get<uint8_t>("is_open")),
        committed(f.get<uint8_t>("committed")),
        changed(f.get<uint8_t>("changed")),
        step(f.get<int32_t>("step")),
        max_steps(f.get<int32_t>("max_steps")),
        num_edits(f.get<int32_t>("num_edits")),
        is_done(f.get<int32_t>("is_done")),
        token(f.get<int32_t>("token")) {}

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
