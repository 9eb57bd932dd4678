// Which experts a row goes to, and where its copies stand. Plain C++ on a few numbers a row, the same for all
// instruction sets. The exponentials are those of the C library: machines agree to the bit if they have the same one.
//
// Choices of a row are written by ascending expert: that is the order in which their results are added.
//
// Legend: M rows, E experts, K choices of a row. Source: ours; rules as dlmrt/ops/eager.py.
#pragma once
#include "args.hpp"

namespace dlmrt::cpu {

// s = sigmoid(logits); s + bias selects, s weighs: s / sum(s) * factor over the K chosen (K = 1: s * factor).
// Without capacity, the K best of the `kept_groups` groups whose two best sum highest; with it, the K best of the
// `capacity` experts whose best row over a block is highest. Ties go to the lower expert. Units: blocks of rows.
struct RouteSigmoidArgs {
  const float* logits;  // [M, E]
  const float* bias;    // [E]
  int64_t rows, experts, top_k;  // top_k: K
  int32_t groups, kept_groups;
  int32_t capacity;      // 0: none
  int32_t block_length;  // rows of a block; 1 without capacity
  float factor;
  int32_t* chosen;  // [M, K]
  float* weights;   // [M, K]
};
constexpr int64_t route_scratch_bytes(int64_t experts, int64_t block_length) {
  return experts * (block_length + 3) * int64_t{sizeof(float)};
}
void route_sigmoid(const RouteSigmoidArgs& t, Range blocks, void* scratch);

// p = softmax(logits * factor); the K best, each p / sum(p) times its expert's scale. Units: rows.
struct RouteSoftmaxArgs {
  const float* logits;  // [M, E]
  const float* expert_scale;
  int64_t rows, experts, top_k;
  float factor;
  int32_t* chosen;
  float* weights;
};
void route_softmax(const RouteSoftmaxArgs& t, Range rows, void* scratch);

// Runs of the chosen experts, and the row of each choice among them.
struct GroupArgs {
  const int32_t* chosen;  // [M, K] ascending in a row
  int64_t rows, experts, top_k;
  ExpertRuns* runs;
  int32_t* place;  // [M, K]
};
void group_choices(const GroupArgs& t);

// Copies each row of an operand to the places of its choices. Units: choices of all rows.
struct GatherArgs {
  Operand from, to;
  int64_t top_k;
  const int32_t* place;
};
void gather_rows(const GatherArgs& t, Range units);

}  // namespace dlmrt::cpu
