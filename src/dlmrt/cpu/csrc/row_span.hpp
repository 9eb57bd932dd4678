// Operations over the same rows that each thread runs for rows of its own, one after the other.
//
// A thread waits for the others only where an operation reads rows that are not its own: once a layer, before attention.
// Divided by columns, each operation would end with a join, and its results pass from core to core. The price is that
// every thread reads all weights, so lower.py makes spans where a layer fits the caches and the rows go round evenly.
//
// Memory: threads are apart by up to the next wait, see dlmrt.program.plan. Source: ours.
#pragma once
#include <vector>

#include "op.hpp"

namespace dlmrt::cpu {

class RowSpan : public Op {
 public:
  // `waits`: it reads what other threads wrote before it. Throws std::invalid_argument for rows other than the first's.
  void add(std::unique_ptr<RowOp> op, bool waits) {
    if (!steps_.empty() && !(op->rows() == steps_[0].op->rows()))
      throw std::invalid_argument("operations of a span have different rows");
    steps_.push_back({std::move(op), waits});
  }
  void run(const Context& c) override {
    const int64_t rows = steps_[0].op->rows()(), groups = ceil_div(rows, kRowGroup), threads = c.pool.size();
    Meeting meeting(c.pool.size());
    c.pool.run([&](int worker) {
      const int64_t end = groups * (worker + 1) / threads * kRowGroup;
      const Range own{groups * worker / threads * kRowGroup, end < rows ? end : rows};
      for (const Step& step : steps_) {
        if (step.waits) meeting.wait();
        if (own.begin < own.end) step.op->run_rows(c, own, worker);
      }
    });
  }

 private:
  struct Step {
    std::unique_ptr<RowOp> op;
    bool waits;
  };
  std::vector<Step> steps_;
};

}  // namespace dlmrt::cpu
