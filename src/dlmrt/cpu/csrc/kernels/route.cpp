// See route.hpp.
#include "route.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace dlmrt::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Marks the `count` highest of `n` values among those allowed (null: all); calls each(index) highest first. The lower
// index of equals comes first, NaN last: a poisoned row still chooses as many as any other.
template <class Each>
void choose(const float* values, int64_t n, const uint8_t* allowed, int64_t count, uint8_t* is_chosen, Each each) {
  for (int64_t i = 0; i < n; i++) is_chosen[i] = 0;
  for (; count > 0; count--) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++) {
      if (is_chosen[i] || (allowed && !allowed[i])) continue;
      if (best < 0 || values[i] > values[best] || (std::isnan(values[best]) && !std::isnan(values[i]))) best = i;
    }
    is_chosen[best] = 1;
    each(best);
  }
}

// The sum of the two highest of a group, or the only one.
float group_score(const float* values, int64_t size) {
  if (size == 1) return values[0];
  float first = kLowest, second = kLowest;
  for (int64_t i = 0; i < size; i++) {
    if (values[i] > first) second = first, first = values[i];
    else if (values[i] > second) second = values[i];
  }
  return first + second;
}

// Choices of one row by ascending expert, their weights beside them.
void sort_choices(int32_t* chosen, float* weights, int64_t count) {
  for (int64_t i = 1; i < count; i++)
    for (int64_t j = i; j > 0 && chosen[j] < chosen[j - 1]; j--) {
      std::swap(chosen[j], chosen[j - 1]);
      std::swap(weights[j], weights[j - 1]);
    }
}

// Routing of the rows of one block, in scratch.
class SigmoidBlock {
 public:
  SigmoidBlock(const RouteSigmoidArgs& t, int64_t block, void* scratch)
      : t_(t),
        first_(block * t.block_length),
        rows_(std::min<int64_t>(t.rows - first_, t.block_length)),
        scores_(static_cast<float*>(scratch)),
        ranked_(scores_ + t.block_length * t.experts),
        groups_(ranked_ + t.experts),
        admitted_(reinterpret_cast<uint8_t*>(groups_ + t.experts)),
        chosen_(admitted_ + t.experts) {}

  void run() {
    for (int64_t i = 0; i < rows_ * t_.experts; i++)
      scores_[i] = 1.f / (1.f + std::exp(-t_.logits[first_ * t_.experts + i]));
    if (t_.capacity) admit_by_block();
    for (int64_t r = 0; r < rows_; r++) {
      for (int64_t e = 0; e < t_.experts; e++) ranked_[e] = scores_[r * t_.experts + e] + t_.bias[e];
      if (!t_.capacity) admit_by_group();
      route(first_ + r, scores_ + r * t_.experts);
    }
  }

 private:
  void admit_by_block() {
    std::fill_n(ranked_, t_.experts, kLowest);
    for (int64_t r = 0; r < rows_; r++)
      for (int64_t e = 0; e < t_.experts; e++)
        ranked_[e] = std::max(ranked_[e], scores_[r * t_.experts + e] + t_.bias[e]);
    choose(ranked_, t_.experts, nullptr, t_.capacity, admitted_, [](int64_t) {});
  }
  void admit_by_group() {
    const int64_t size = t_.experts / t_.groups;
    for (int64_t g = 0; g < t_.groups; g++) groups_[g] = group_score(ranked_ + g * size, size);
    std::memset(admitted_, 0, static_cast<size_t>(t_.experts));
    choose(groups_, t_.groups, nullptr, t_.kept_groups, chosen_,
           [&](int64_t g) { std::memset(admitted_ + g * size, 1, static_cast<size_t>(size)); });
  }
  void route(int64_t row, const float* scores) {
    int32_t* chosen = t_.chosen + row * t_.top_k;
    float *weights = t_.weights + row * t_.top_k, sum = 0;
    int64_t count = 0;
    choose(ranked_, t_.experts, admitted_, t_.top_k, chosen_, [&](int64_t e) {
      chosen[count] = static_cast<int32_t>(e);
      sum += weights[count++] = scores[e];
    });
    for (int64_t k = 0; k < t_.top_k; k++)
      weights[k] = (t_.top_k > 1 ? weights[k] / (sum + 1e-20f) : weights[k]) * t_.factor;
    sort_choices(chosen, weights, t_.top_k);
  }

  const RouteSigmoidArgs& t_;
  int64_t first_, rows_;
  float *scores_, *ranked_, *groups_;
  uint8_t *admitted_, *chosen_;
};

}  // namespace

void route_sigmoid(const RouteSigmoidArgs& t, Range blocks, void* scratch) {
  for (int64_t b = blocks.begin; b < blocks.end; b++) SigmoidBlock(t, b, scratch).run();
}

void route_softmax(const RouteSoftmaxArgs& t, Range rows, void* scratch) {
  float* probabilities = static_cast<float*>(scratch);
  uint8_t* is_chosen = reinterpret_cast<uint8_t*>(probabilities + t.experts);
  for (int64_t m = rows.begin; m < rows.end; m++) {
    const float* logits = t.logits + m * t.experts;
    float top = kLowest, total = 0, sum = 0;
    for (int64_t e = 0; e < t.experts; e++) top = std::max(top, logits[e] * t.factor);
    for (int64_t e = 0; e < t.experts; e++) total += probabilities[e] = std::exp(logits[e] * t.factor - top);
    for (int64_t e = 0; e < t.experts; e++) probabilities[e] /= total;
    int32_t* chosen = t.chosen + m * t.top_k;
    float* weights = t.weights + m * t.top_k;
    int64_t count = 0;
    choose(probabilities, t.experts, nullptr, t.top_k, is_chosen, [&](int64_t e) {
      chosen[count] = static_cast<int32_t>(e);
      sum += weights[count++] = probabilities[e];
    });
    for (int64_t k = 0; k < t.top_k; k++) weights[k] = weights[k] / sum * t.expert_scale[chosen[k]];
    sort_choices(chosen, weights, t.top_k);
  }
}

void group_choices(const GroupArgs& t) {
  ExpertRun* run = t.runs->run;
  const int64_t copies = t.rows * t.top_k;
  for (int32_t e = 0; e < t.experts; e++) run[e] = {e, 0, 0};
  for (int64_t i = 0; i < copies; i++) run[t.chosen[i]].rows++;
  int32_t begin = 0;
  for (int64_t e = 0; e < t.experts; e++) {
    run[e].begin = begin;
    begin += static_cast<int32_t>(round_up(run[e].rows, kRowGroup));
    run[e].rows = 0;
  }
  for (int64_t i = 0; i < copies; i++) {
    ExpertRun& r = run[t.chosen[i]];
    t.place[i] = r.begin + r.rows++;
  }
  t.runs->count =
      static_cast<int32_t>(std::remove_if(run, run + t.experts, [](const ExpertRun& r) { return !r.rows; }) - run);
  t.runs->end = begin;
}

void gather_rows(const GatherArgs& t, Range units) {
  const int64_t steps = steps_of(t.from.dtype, t.from.width), group = steps * kRowGroup * kCellBytes;
  const auto row_of = [=](const Operand& o, int64_t row) {
    return static_cast<uint8_t*>(o.cells) + row / kRowGroup * group + row % kRowGroup * kCellBytes;
  };
  for (int64_t i = units.begin; i < units.end; i++) {
    const uint8_t* from = row_of(t.from, i / t.top_k);
    uint8_t* to = row_of(t.to, t.place[i]);
    for (int64_t s = 0; s < steps; s++)
      std::memcpy(to + s * kRowGroup * kCellBytes, from + s * kRowGroup * kCellBytes, kCellBytes);
    if (t.from.scales) t.to.scales[t.place[i]] = t.from.scales[i / t.top_k];
  }
}

}  // namespace dlmrt::cpu
