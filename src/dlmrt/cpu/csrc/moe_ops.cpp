// Nodes of a mixture of experts: route, group rows by expert, the experts' products, and the sum of their results.
//
// Routing happens where the rows are: no number leaves the program, and an expert that no row chose is not read.
//
// Source: ours.
#include <algorithm>

#include "op.hpp"
#include "kernels/route.hpp"

namespace dlmrt::cpu {
namespace {

// Rows for which the runs' operand of `width` has room.
int64_t run_rows(const Fields& f, int64_t width) {
  return f.bytes("run_cells") / operand_bytes(f.dtype("operand"), kRowGroup, width) * kRowGroup;
}
Operand run_operand(const Fields& f, int64_t width) {
  return f.operand(run_rows(f, width), width, "run_cells", "run_scales");
}

// What group_choices left: runs of distinct experts one behind the other, all within `rows` rows.
const ExpertRuns* runs_of(const Fields& f, int64_t experts, int64_t rows) {
  const auto* runs = reinterpret_cast<const ExpertRuns*>(f.get<int32_t>("runs", ceil_div(expert_runs_bytes(0), 4)));
  if constexpr (kChecked)
    f.checks.push_back([=, room = (f.bytes("runs") - expert_runs_bytes(0)) / int64_t{sizeof(ExpertRun)},
                        name = f.op + ": operand 'runs'"] {
      bool is_good = runs->count >= 0 && runs->count <= std::min(room, experts) && runs->end >= 0;
      int64_t expert = -1, end = 0;
      for (int32_t i = 0; is_good && i < runs->count; i++) {
        const ExpertRun& run = runs->run[i];
        is_good = run.expert > expert && run.expert < experts && run.begin >= end && run.begin % kRowGroup == 0 &&
                  run.rows >= 0;
        expert = run.expert, end = int64_t{run.begin} + run.rows;
      }
      if (!is_good || end > rows || runs->end > rows)
        throw std::out_of_range(name + " holds runs that are out of order, of unknown experts or past " +
                                std::to_string(rows) + " rows");
    });
  return runs;
}

// Operand `role` [rows, top_k], whose values lie in 0..last.
int32_t* choices_of(const Fields& f, const char* role, const Count& rows, int64_t top_k, int64_t last) {
  return f.get<int32_t>(role, product(rows.max(), top_k), [=] { return rows() * top_k; }, 0, last);
}

class RouteSigmoid : public Op {
 public:
  explicit RouteSigmoid(const Fields& f) : rows_(f), args_{} {
    args_.experts = f.size("num_experts");
    args_.top_k = f.integer("top_k", 1, args_.experts);
    args_.logits = f.get<float>("logits", product(rows_.max(), args_.experts));
    args_.bias = f.get<float>("bias", args_.experts);
    args_.groups = static_cast<int32_t>(f.integer("num_groups", 1, args_.experts));
    args_.kept_groups = static_cast<int32_t>(f.integer("num_kept_groups", 1, args_.groups));
    args_.capacity = static_cast<int32_t>(f.integer("capacity", 0, args_.experts));
    args_.block_length = args_.capacity ? static_cast<int32_t>(f.integer("block_length", 1, 1 << 16)) : 1;
    f.require(args_.experts % args_.groups == 0, "num_experts is no multiple of num_groups");
    f.require(args_.top_k <= (args_.capacity ? args_.capacity : args_.experts / args_.groups * args_.kept_groups),
              "top_k is more than the experts that may be chosen");
    args_.factor = f.real("scaling_factor");
    args_.chosen = f.get<int32_t>("experts", product(rows_.max(), args_.top_k));
    args_.weights = f.get<float>("weights", product(rows_.max(), args_.top_k));
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
      : rows_(f), args_{} {
    args_.experts = f.size("num_experts");
    args_.top_k = f.integer("top_k", 1, args_.experts);
    args_.logits = f.get<float>("logits", product(rows_.max(), args_.experts));
    args_.expert_scale = f.get<float>("expert_scale", args_.experts);
    args_.factor = f.real("factor");
    args_.chosen = f.get<int32_t>("experts", product(rows_.max(), args_.top_k));
    args_.weights = f.get<float>("weights", product(rows_.max(), args_.top_k));
  }
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
      : rows_(f), args_{} {
    args_.experts = f.size("num_experts");
    args_.top_k = f.integer("top_k", 1, args_.experts);
    args_.chosen = choices_of(f, "experts", rows_, args_.top_k, args_.experts - 1);
    args_.runs = reinterpret_cast<ExpertRuns*>(f.get<int32_t>("runs", ceil_div(expert_runs_bytes(args_.experts), 4)));
    args_.place = f.get<int32_t>("place", product(rows_.max(), args_.top_k));
  }
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
      : rows_(f), args_{} {
    const int64_t width = f.size("width");
    args_.top_k = f.size("top_k");
    args_.from = f.operand(rows_.max(), width);
    args_.to = run_operand(f, width);
    args_.place = choices_of(f, "place", rows_, args_.top_k, run_rows(f, width) - 1);
  }
  void run(const Context& c) override {
    c.pool.split(rows_() * args_.top_k, 1, [&](Range r, int) { gather_rows(args_, r); });
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
    require_operand_of(f, w);
    args_.input = run_operand(f, w.k);
    args_.runs = runs_of(f, weight_->count(), std::min(run_rows(f, w.k), f.count<float>("y") / w.n));
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
  explicit ExpertGate(const Fields& f) {
    const int64_t width = f.size("width");
    float* gate = f.get<float>("gate_up");
    args_ = {gate, gate + width, 2 * width, 0, run_operand(f, width), f.flag("is_gelu")};
    runs_ = runs_of(f, INT32_MAX, std::min(run_rows(f, width), f.count<float>("gate_up") / (2 * width)));
  }
  void run(const Context& c) override {
    c.pool.split(runs_->end, kRowGroup, [&](Range r, int) {
      for (int32_t i = 0; i < runs_->count; i++) {
        const ExpertRun& run = runs_->run[i];
        const int64_t end = run.begin + run.rows;
        const Range own{run.begin > r.begin ? run.begin : r.begin, end < r.end ? end : r.end};
        if (own.begin < own.end) c.kernels.gate_rows(args_, own);
      }
    });
  }

 private:
  GateArgs args_;
  const ExpertRuns* runs_;
};

class Combine : public Op {
 public:
  explicit Combine(const Fields& f)
      : rows_(f), args_{} {
    args_.top_k = f.size("top_k");
    args_.width = f.size("width");
    args_.x = f.get<float>("x");
    args_.place = choices_of(f, "place", rows_, args_.top_k, f.count<float>("x") / args_.width - 1);
    args_.weights = f.get<float>("weights", product(rows_.max(), args_.top_k));
    args_.y = f.get<float>("y", product(rows_.max(), args_.width));
  }
  void run(const Context& c) override { over_rows(c, args_, rows_, c.kernels.combine, 1); }

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
