// Nodes of a mixture of experts: route, group rows by expert, the experts' products, and the sum of their results.
//
// Routing happens where the rows are: no number leaves the program, and an expert that no row chose is not read.
//
// Source: ours.
#include "op.hpp"
#include "kernels/route.hpp"

namespace dlmrt::cpu {
namespace {

Operand operand(const Fields& f, const char* cells, const char* scales, int64_t width) {
  return {f.dtype("operand"), 0, width, f.get<void>(cells), f.find<float>(scales)};
}

class RouteSigmoid : public Op {
 public:
  explicit RouteSigmoid(const Fields& f) : rows_(f), args_{} {
    args_.logits = f.get<float>("logits");
    args_.bias = f.get<float>("bias");
    args_.experts = f.integer("num_experts");
    args_.choices = f.integer("top_k");
    args_.groups = static_cast<int32_t>(f.integer("num_groups"));
    args_.kept_groups = static_cast<int32_t>(f.integer("num_kept_groups"));
    args_.capacity = static_cast<int32_t>(f.integer("capacity"));
    args_.block_length = args_.capacity ? static_cast<int32_t>(f.integer("block_length")) : 1;
    args_.factor = static_cast<float>(f.number("scaling_factor"));
    args_.chosen = f.get<int32_t>("experts");
    args_.weights = f.get<float>("weights");
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(ceil_div(args_.rows, args_.block_length), 1,
                 [&](Range r, int worker) { route_sigmoid(args_, r, c.worker_scratch(worker)); });
  }
  int64_t worker_bytes() const override { return route_scratch_bytes(args_.experts, args_.block_length); }

 private:
  Count rows_;
  RouteSigmoidArgs args_;
};

class RouteSoftmax : public Op {
 public:
  explicit RouteSoftmax(const Fields& f)
      : rows_(f), args_{f.get<float>("logits"),    f.get<float>("expert_scale"), 0,
                        f.integer("num_experts"),  f.integer("top_k"),           static_cast<float>(f.number("factor")),
                        f.get<int32_t>("experts"), f.get<float>("weights")} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, 1, [&](Range r, int worker) { route_softmax(args_, r, c.worker_scratch(worker)); });
  }
  int64_t worker_bytes() const override { return route_scratch_bytes(args_.experts, 1); }

 private:
  Count rows_;
  RouteSoftmaxArgs args_;
};

class GroupChoices : public Op {
 public:
  explicit GroupChoices(const Fields& f)
      : rows_(f),
        args_{f.get<int32_t>("experts"), 0, f.integer("num_experts"), f.integer("top_k"), f.get<ExpertRuns>("runs"),
              f.get<int32_t>("place")} {}
  void run(const Context&) override {
    args_.rows = rows_();
    group_choices(args_);
  }

 private:
  Count rows_;
  GroupArgs args_;
};

class GatherRows : public Op {
 public:
  explicit GatherRows(const Fields& f)
      : rows_(f),
        args_{operand(f, "cells", "scales", f.integer("width")),
              operand(f, "run_cells", "run_scales", f.integer("width")), f.integer("top_k"), f.get<int32_t>("place")} {}
  void run(const Context& c) override {
    c.pool.split(rows_() * args_.choices, 1, [&](Range r, int) { gather_rows(args_, r); });
  }

 private:
  Count rows_;
  GatherArgs args_;
};

class ExpertLinear : public Op {
 public:
  explicit ExpertLinear(const Fields& f) : weight_(f.weight("weight")), args_{} {
    const Weight& w = args_.weight = weight_->view();
    args_.panel_stride = weight_->panel_stride();
    args_.scale_stride = args_.sum_stride = weight_->column_stride();
    args_.input = operand(f, "run_cells", "run_scales", w.k);
    args_.runs = f.get<ExpertRuns>("runs");
    args_.out = f.get<float>("y");
    args_.ld_out = w.n;
  }
  void run(const Context& c) override {
    c.pool.split(args_.runs->count * num_panels(args_.weight.n), 1,
                 [&](Range r, int worker) { c.kernels.expert_linear(args_, r, c.worker_scratch(worker)); });
  }
  int64_t worker_bytes() const override { return weight_scratch_bytes(args_.weight); }

 private:
  std::shared_ptr<const PackedWeight> weight_;
  ExpertLinearArgs args_;
};

// The gate of every row of every run.
class ExpertGate : public Op {
 public:
  explicit ExpertGate(const Fields& f) : runs_(f.get<ExpertRuns>("runs")), is_gelu_(f.integer("is_gelu") != 0) {
    const int64_t width = f.integer("width");
    float* gate = f.get<float>("gate_up");
    args_ = {gate, gate + width, 2 * width, 0, operand(f, "run_cells", "run_scales", width)};
  }
  void run(const Context& c) override {
    const auto gate = is_gelu_ ? c.kernels.gelu_mul : c.kernels.silu_mul;
    c.pool.split(runs_->rows, kRowGroup, [&](Range r, int) {
      for (int32_t i = 0; i < runs_->count; i++) {
        const ExpertRun& run = runs_->run[i];
        const int64_t end = run.begin + run.rows;
        const Range own{run.begin > r.begin ? run.begin : r.begin, end < r.end ? end : r.end};
        if (own.begin < own.end) gate(args_, own);
      }
    });
  }

 private:
  const ExpertRuns* runs_;
  bool is_gelu_;
  SiluMulArgs args_;
};

class Combine : public Op {
 public:
  explicit Combine(const Fields& f)
      : rows_(f), args_{f.get<float>("x"),  f.get<int32_t>("place"), f.get<float>("weights"), 0,
                        f.integer("top_k"), f.integer("width"),      f.get<float>("y")} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, 1, [&](Range r, int) { c.kernels.combine(args_, r); });
  }

 private:
  Count rows_;
  CombineArgs args_;
};

}  // namespace

std::unique_ptr<Op> make_moe_op(const Fields& f) {
  if (f.op == "route_sigmoid") return std::make_unique<RouteSigmoid>(f);
  if (f.op == "route_softmax") return std::make_unique<RouteSoftmax>(f);
  if (f.op == "group_choices") return std::make_unique<GroupChoices>(f);
  if (f.op == "gather_rows") return std::make_unique<GatherRows>(f);
  if (f.op == "expert_linear") return std::make_unique<ExpertLinear>(f);
  if (f.op == "expert_gate") return std::make_unique<ExpertGate>(f);
  if (f.op == "combine") return std::make_unique<Combine>(f);
  return nullptr;
}

}  // namespace dlmrt::cpu
