// Step 5 of the loop: from the final hidden states to one predicted token a slot and the numbers that rules decide by.
//
// The head's statistics are taken tile by tile without writing logits; logits are written only where a soft embedding or
// a filter needs them. Numbers follow dlmrt/decode/sampling.py: confidence and entropy are of the tempered, unfiltered
// distribution, the filters are exact, the draw is Gumbel-max over what they leave.
//
// Source: ours.
#include <algorithm>
#include <cmath>

#include "op.hpp"
#include "random.hpp"

namespace dlmrt::cpu {
namespace {

HeadPartials partials_of(const Fields& f, int64_t rows, int64_t vocab) {
  HeadPartials p{};
  p.row_stride = f.integer("row_stride", round_up(rows, 16));
  f.require(p.row_stride % 16 == 0, "row_stride is no multiple of 16");
  const int64_t count = product(head_tiles(vocab), p.row_stride);
  p.max = f.get<float>("tile_max", count);
  p.sum = f.get<float>("tile_sum", count);
  p.weighted = f.get<float>("tile_weighted", count);
  p.argmax = f.get<int32_t>("tile_argmax", count);
  p.sample_score = f.find<float>("tile_score", count);
  p.sample_logit = f.find<float>("tile_sample_logit", count);
  p.sample_id = f.find<int32_t>("tile_sample", count);
  f.require(!p.sample_score == !p.sample_logit && !p.sample_score == !p.sample_id,
            "the three tables of a draw come together");
  return p;
}

// The noise of each slot at this step.
class GumbelKeys : public Op {
 public:
  explicit GumbelKeys(const Fields& f)
      : rows_(f),
        seed_(f.get<uint64_t>("seed")),
        step_(f.get<int32_t>("step")),
        block_(f.get<int32_t>("block_idx")),
        keys_(f.get<GumbelKey>("keys", rows_.max())) {}
  void run(const Context&) override {
    for (int64_t slot = 0; slot < rows_(); slot++)
      keys_[slot] = {{static_cast<uint32_t>(*seed_), static_cast<uint32_t>(*seed_ >> 32)},
                     static_cast<uint32_t>(*step_),
                     static_cast<uint32_t>(*block_),
                     kSampleStream | static_cast<uint32_t>(slot) << 8};
  }

 private:
  Count rows_;
  const uint64_t* seed_;
  const int32_t *step_, *block_;
  GumbelKey* keys_;
};

class HeadStats : public Op {
 public:
  explicit HeadStats(const Fields& f) : weight_(f.weight("weight")), rows_(f), args_{} {
    args_.weight = weight_->view();
    require_operand_of(f, args_.weight);
    const int64_t rows = rows_.max(), vocab = args_.weight.n;
    args_.input = f.operand(rows, args_.weight.k);
    args_.softcap = f.has("softcap") ? f.real("softcap") : 0.f;
    args_.temperature = f.get<float>("temperature");
    args_.banned = f.get<uint32_t>("banned", ceil_div(vocab, 32));
    args_.gumbel = f.find<GumbelKey>("keys", rows);
    args_.partials = partials_of(f, rows, vocab);
    f.require(!args_.gumbel == !args_.partials.sample_id, "a draw needs keys and its tables");
    args_.logits = f.find<float>("logits", product(rows, vocab));
    args_.ld_logits = vocab;
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(head_tiles(args_.weight.n), 1,
                 [&](Range r, int worker) { c.kernels.head_stats(args_, r, c.worker_scratch(worker)); });
  }
  int64_t worker_bytes() const override {
    HeadArgs largest = args_;
    largest.rows = rows_.max();
    return head_scratch_bytes(largest);
  }

 private:
  std::shared_ptr<const PackedWeight> weight_;
  Count rows_;
  HeadArgs args_;
};

class HeadMerge : public Op {
 public:
  explicit HeadMerge(const Fields& f) : rows_(f), args_{} {
    const int64_t rows = rows_.max();
    args_.vocab = f.size("vocab");
    args_.partials = partials_of(f, rows, args_.vocab);
    args_.argmax = f.get<int32_t>("argmax", rows);
    args_.max_logit = f.get<float>("max_logit", rows);
    args_.log_sum_exp = f.get<float>("log_sum_exp", rows);
    args_.entropy = f.get<float>("entropy", rows);
    args_.sample_id = f.find<int32_t>("sample", rows);
    args_.sample_logit = f.find<float>("sample_logit", rows);
    f.require(!args_.sample_id == !args_.sample_logit, "'sample' and 'sample_logit' come together");
    f.require(!args_.sample_id || args_.partials.sample_id, "a draw needs its tables");
    args_.confidence = f.get<float>("argmax_confidence", rows);
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(ceil_div(args_.rows, 16), 1, [&](Range r, int) { c.kernels.head_merge(args_, r); });
  }

 private:
  Count rows_;
  HeadMergeArgs args_;
};

// Gumbel-max over the ids that top-k, top-p and min-p leave, for the slots that need a draw.
class FilteredDraw : public Op {
 public:
  explicit FilteredDraw(const Fields& f)
      : rows_(f),
        vocab_(f.size("vocab")),
        logits_(f.get<float>("logits", product(rows_.max(), vocab_))),
        max_logit_(f.get<float>("max_logit", rows_.max())),
        is_drawn_(f.get<uint8_t>("is_drawn", rows_.max())),
        seed_(f.get<uint64_t>("seed")),
        step_(f.get<int32_t>("step")),
        block_(f.get<int32_t>("block_idx")),
        top_k_(f.get<int64_t>("top_k")),
        top_p_(f.get<double>("top_p")),
        min_p_(f.get<float>("min_p")),
        sample_(f.get<int32_t>("sample", rows_.max())),
        sample_logit_(f.get<float>("sample_logit", rows_.max())) {}
  void run(const Context& c) override {
    c.pool.split(rows_(), 1, [&](Range rows, int worker) {
      for (int64_t m = rows.begin; m < rows.end; m++)
        if (is_drawn_[m]) draw(m, static_cast<Candidate*>(c.worker_scratch(worker)));
    });
  }
  int64_t worker_bytes() const override { return vocab_ * int64_t{sizeof(Candidate)}; }

 private:
  struct Candidate {
    float weight;
    int32_t id;
    bool operator<(const Candidate& other) const {
      return weight > other.weight || (weight == other.weight && id < other.id);
    }
  };

  void draw(int64_t m, Candidate* const begin) const {
    const float *logits = logits_ + m * vocab_, top = max_logit_[m];
    Candidate* end = begin;
    for (int64_t id = 0; id < vocab_; id++) {
      const float weight = std::exp(logits[id] - top);
      if (weight > 0.f) *end++ = {weight, static_cast<int32_t>(id)};
    }
    end = keep_top_k(begin, end);
    end = keep_top_p(begin, end);
    double best = -HUGE_VAL;
    int32_t choice = -1;
    for (const Candidate* p = begin; p < end; p++) {
      if (*min_p_ > 0.f && p->weight < *min_p_) continue;  // the largest weight is 1
      const double score = static_cast<double>(logits[p->id] - top) +
                           gumbel_noise(*seed_, static_cast<uint32_t>(p->id), static_cast<uint32_t>(*step_),
                                        static_cast<uint32_t>(*block_), static_cast<uint32_t>(m));
      if (score > best || (score == best && p->id < choice)) best = score, choice = p->id;
    }
    sample_[m] = choice;
    sample_logit_[m] = choice < 0 ? std::nanf("") : logits[choice];  // none of a row that is not finite
  }
  // The k largest and all that tie with the k-th.
  Candidate* keep_top_k(Candidate* begin, Candidate* end) const {
    if (*top_k_ <= 0 || *top_k_ >= vocab_ || *top_k_ >= end - begin) return end;
    Candidate* kth = begin + *top_k_ - 1;
    std::nth_element(begin, kth, end);
    const float least = kth->weight;
    return std::partition(begin, end, [&](const Candidate& c) { return c.weight >= least; });
  }
  // The leading ids before which the share is still within top_p.
  Candidate* keep_top_p(Candidate* begin, Candidate* end) const {
    if (*top_p_ >= 1.) return end;
    std::sort(begin, end,
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });  // sums in the order of ids
    double total = 0, before = 0;
    for (const Candidate* p = begin; p < end; p++) total += static_cast<double>(p->weight);
    // Few ids hold most of the mass: order only as many as the sum needs.
    Candidate* ordered = begin;
    for (Candidate* p = begin; p < end; p++) {
      if (p == ordered) {
        ordered = std::min(end, begin + std::max<ptrdiff_t>(64, 8 * (p - begin)));
        std::partial_sort(p, ordered, end);
      }
      if (before > *top_p_ * total) return p;
      before += static_cast<double>(p->weight);
    }
    return end;
  }

  Count rows_;
  int64_t vocab_;
  const float *logits_, *max_logit_;
  const uint8_t* is_drawn_;
  const uint64_t* seed_;
  const int32_t *step_, *block_;
  const int64_t* top_k_;
  const double* top_p_;
  const float* min_p_;
  int32_t* sample_;
  float* sample_logit_;
};

// Token and confidence of each slot, and whether the model's numbers can be used at all.
class FinishPredict : public Op {
 public:
  explicit FinishPredict(const Fields& f)
      : rows_(f),
        argmax_(f.get<int32_t>("argmax", rows_.max())),
        max_logit_(f.get<float>("max_logit", rows_.max())),
        log_sum_exp_(f.get<float>("log_sum_exp", rows_.max())),
        argmax_confidence_(f.get<float>("argmax_confidence", rows_.max())),
        is_drawn_(f.find<uint8_t>("is_drawn", rows_.max())),
        sample_(f.find<int32_t>("sample", rows_.max())),
        sample_logit_(f.find<float>("sample_logit", rows_.max())),
        token_(f.get<int32_t>("token", rows_.max())),
        confidence_(f.get<float>("confidence", rows_.max())),
        is_finite_row_(f.get<uint8_t>("is_finite_row", rows_.max())),
        is_finite_(f.get<int32_t>("is_finite")) {
    f.require(!is_drawn_ || (sample_ && sample_logit_), "'is_drawn' needs 'sample' and 'sample_logit'");
  }
  void run(const Context&) override {
    *is_finite_ = 1;
    for (int64_t m = 0; m < rows_(); m++) {
      const bool drawn = is_drawn_ && is_drawn_[m];
      token_[m] = drawn ? sample_[m] : argmax_[m];
      confidence_[m] = argmax_confidence_[m] * (drawn ? std::exp(sample_logit_[m] - max_logit_[m]) : 1.f);
      is_finite_row_[m] = std::isfinite(log_sum_exp_[m]);
      *is_finite_ &= is_finite_row_[m];
    }
  }

 private:
  Count rows_;
  const int32_t* argmax_;
  const float *max_logit_, *log_sum_exp_, *argmax_confidence_;
  const uint8_t* is_drawn_;
  const int32_t* sample_;
  const float* sample_logit_;
  int32_t* token_;
  float* confidence_;
  uint8_t* is_finite_row_;
  int32_t* is_finite_;
};

class Probabilities : public Op {
 public:
  explicit Probabilities(const Fields& f) : rows_(f), args_{} {
    const int64_t vocab = f.size("vocab"), rows = rows_.max();
    args_ = {f.get<float>("logits", product(rows, vocab)), vocab, 0, f.get<float>("log_sum_exp", rows),
             f.operand(rows, vocab)};
    f.require(args_.out.dtype != DType::kInt8, "probabilities have no int8 form");
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(head_tiles(args_.out.width), 1, [&](Range r, int) { c.kernels.probabilities(args_, r); });
  }

 private:
  Count rows_;
  ProbabilitiesArgs args_;
};

}  // namespace

std::unique_ptr<Op> make_predict_op(const Fields& f) {
  if (f.op == "gumbel_keys") return std::make_unique<GumbelKeys>(f);
  if (f.op == "head_stats") return std::make_unique<HeadStats>(f);
  if (f.op == "head_merge") return std::make_unique<HeadMerge>(f);
  if (f.op == "filtered_draw") return std::make_unique<FilteredDraw>(f);
  if (f.op == "finish_predict") return std::make_unique<FinishPredict>(f);
  if (f.op == "probabilities") return std::make_unique<Probabilities>(f);
  return nullptr;
}

}  // namespace dlmrt::cpu
