// Nodes of the forward pass: each fills a kernel's arguments once and divides its units over the pool at every run.
//
// Left out: any decision. Shapes, layouts and order were decided by lower.py. Source: ours.
#include <cstring>

#include "op.hpp"

namespace dlmrt::cpu {
namespace {

Operand operand(const Fields& f, int64_t width) {
  return {f.dtype("operand"), 0, width, f.get<void>("cells"), f.find<float>("scales")};
}

class Embed : public Op {
 public:
  explicit Embed(const Fields& f)
      : rows_(f),
        args_{f.dtype("table_dtype"),
              f.find<void>("table"),
              f.get<int32_t>("ids"),
              0,
              f.integer("width"),
              f.get<float>("x"),
              f.has("scale") ? static_cast<float>(f.number("scale")) : 0.f,
              0} {
    if (args_.table) return;
    packed_ = f.weight("table");
    const Weight& w = packed_->view();
    args_.table = w.panels;
    args_.panel_bytes = panel_bytes(w.dtype, w.group, w.k);
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, kRowGroup, [&](Range r, int) { c.kernels.embed(args_, r); });
  }

 private:
  std::shared_ptr<const PackedWeight> packed_;  // the table, if it is in panels
  Count rows_;
  EmbedArgs args_;
};

class RmsNorm : public Op {
 public:
  explicit RmsNorm(const Fields& f) : rows_(f), args_{} {
    args_.x = f.get<float>("x");
    args_.weight = f.find<float>("weight");
    args_.eps = static_cast<float>(f.number("eps"));
    args_.width = f.integer("width");
    args_.out_rows = f.find<float>("y");
    if (f.find<void>("cells")) args_.out = operand(f, args_.width);
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, kRowGroup, [&](Range r, int) { c.kernels.rms_norm(args_, r); });
  }

 private:
  Count rows_;
  RmsNormArgs args_;
};

class QuantizeRows : public Op {
 public:
  explicit QuantizeRows(const Fields& f)
      : rows_(f), args_{f.get<float>("x"), f.integer("width"), 0, operand(f, f.integer("width"))} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, kRowGroup, [&](Range r, int) { c.kernels.quantize_rows(args_, r); });
  }

 private:
  Count rows_;
  QuantizeArgs args_;
};

class Linear : public Op {
 public:
  explicit Linear(const Fields& f) : weight_(f.weight("weight")), rows_(f) {
    const Weight& w = weight_->view();
    args_ = {w, operand(f, w.k), 0, f.get<float>("y"), w.n, static_cast<int32_t>(f.integer("accumulate"))};
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    // Equal numbers of panels: whole register tiles for each worker would leave one of them a tile more.
    c.pool.split(num_panels(args_.weight.n), 1,
                 [&](Range r, int worker) { c.kernels.linear(args_, r, c.worker_scratch(worker)); });
  }
  int64_t worker_bytes() const override { return weight_scratch_bytes(args_.weight); }

 private:
  std::shared_ptr<const PackedWeight> weight_;
  Count rows_;
  LinearArgs args_;
};

// silu_mul or gelu_mul
class GatedProduct : public Op {
 public:
  explicit GatedProduct(const Fields& f) : rows_(f), is_gelu_(f.op == "gelu_mul") {
    const int64_t width = f.integer("width");
    float* gate = f.get<float>("gate_up");
    args_ = {gate, gate + width, 2 * width, 0, operand(f, width)};
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    const auto kernel = is_gelu_ ? c.kernels.gelu_mul : c.kernels.silu_mul;
    c.pool.split(args_.rows, kRowGroup, [&](Range r, int) { kernel(args_, r); });
  }

 private:
  Count rows_;
  bool is_gelu_;
  SiluMulArgs args_;
};

class Scale : public Op {
 public:
  explicit Scale(const Fields& f) : rows_(f), args_{f.get<float>("x"), f.get<float>("factor"), 0, f.integer("width")} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, kRowGroup, [&](Range r, int) { c.kernels.scale(args_, r); });
  }

 private:
  Count rows_;
  ScaleArgs args_;
};

// Three runs of columns side by side, each with its own bias.
class AddBias : public Op {
 public:
  explicit AddBias(const Fields& f)
      : rows_(f),
        x_(f.get<float>("x")),
        bias_{f.get<float>("bq"), f.get<float>("bk"), f.get<float>("bv")},
        width_{f.integer("width_bq"), f.integer("width_bk"), f.integer("width_bv")} {}
  void run(const Context& c) override {
    c.pool.split(rows_(), kRowGroup, [&](Range r, int) {
      for (int64_t m = r.begin; m < r.end; m++) {
        float* x = x_ + m * (width_[0] + width_[1] + width_[2]);
        for (int part = 0; part < 3; x += width_[part++])
          for (int64_t n = 0; n < width_[part]; n++) x[n] += bias_[part][n];
      }
    });
  }

 private:
  Count rows_;
  float* x_;
  const float* bias_[3];
  int64_t width_[3];
};

class SoftCap : public Op {
 public:
  explicit SoftCap(const Fields& f)
      : rows_(f), args_{f.get<float>("x"), static_cast<float>(f.number("cap")), 0, f.integer("width")} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, 1, [&](Range r, int) { c.kernels.soft_cap(args_, r); });
  }

 private:
  Count rows_;
  SoftCapArgs args_;
};

class ScaledAdd : public Op {
 public:
  explicit ScaledAdd(const Fields& f)
      : rows_(f), args_{f.get<float>("x"),
                        f.get<float>("delta"),
                        f.find<uint8_t>("where"),
                        static_cast<float>(f.number("alpha")),
                        0,
                        f.integer("width")} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, kRowGroup, [&](Range r, int) { c.kernels.scaled_add(args_, r); });
  }

 private:
  Count rows_;
  ScaledAddArgs args_;
};

KvCache cache_of(const Fields& f) {
  return {f.dtype("cache_dtype"),
          static_cast<int32_t>(f.integer("page_size")),
          static_cast<int32_t>(f.integer("num_kv_heads")),
          static_cast<int32_t>(f.integer("head_dim")),
          f.get<void>("cache"),
          nullptr};
}

class QkNormRopeStore : public Op {
 public:
  explicit QkNormRopeStore(const Fields& f) : rows_(f), args_{} {
    args_.cache = cache_of(f);
    args_.qkv = f.get<float>("qkv");
    args_.num_heads = static_cast<int32_t>(f.integer("num_heads"));
    args_.is_v_from_k = f.has("is_v_from_k") && f.integer("is_v_from_k");
    args_.is_v_normed = f.has("is_v_normed") && f.integer("is_v_normed");
    args_.scale = f.has("scale") ? static_cast<float>(f.number("scale")) : 0.f;
    const int32_t kv = args_.is_v_from_k ? 1 : 2;
    args_.ld = (args_.num_heads + kv * args_.cache.num_kv_heads) * int64_t{args_.cache.head_dim};
    args_.rotary_dim = static_cast<int32_t>(f.integer("rotary_dim"));
    args_.q_norm = f.find<float>("q_norm");
    args_.k_norm = f.find<float>("k_norm");
    args_.eps = static_cast<float>(f.number("eps"));
    args_.cos = f.get<float>("cos");
    args_.sin = f.get<float>("sin");
    args_.positions = f.get<int32_t>("positions");
    args_.q = f.get<void>("q");
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(args_.rows, 1, [&](Range r, int) { c.kernels.qk_norm_rope_store(args_, r); });
  }

 private:
  Count rows_;
  QkvArgs args_;
};

class Attention : public Op {
 public:
  explicit Attention(const Fields& f) : rows_(f), args_{} {
    args_.cache = cache_of(f);
    args_.q = f.get<void>("q");
    args_.num_heads = static_cast<int32_t>(f.integer("num_heads"));
    args_.chunk = static_cast<int32_t>(f.integer("chunk"));
    args_.visible = f.get<int32_t>("visible");
    args_.first = f.find<int32_t>("first");
    args_.out = f.get<float>("y");
    args_.ld_out = args_.num_heads * int64_t{args_.cache.head_dim};
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(attention_units(args_), 1,
                 [&](Range r, int worker) { c.kernels.attention(args_, r, c.worker_scratch(worker)); });
  }
  int64_t worker_bytes() const override { return attention_scratch_bytes(args_); }

 private:
  Count rows_;
  AttentionArgs args_;
};

// First position that a row sees through a window: it counts itself, or with is_shared the whole canvas, as one.
class WindowStart : public Op {
 public:
  explicit WindowStart(const Fields& f)
      : rows_(f),
        positions_(f.get<int32_t>("positions")),
        first_(f.get<int32_t>("first")),
        window_(static_cast<int32_t>(f.integer("window"))),
        is_shared_(f.integer("is_shared") != 0) {}
  void run(const Context&) override {
    for (int64_t m = 0; m < rows_(); m++) {
      const int32_t last = positions_[is_shared_ ? 0 : m] - window_ + 1;
      first_[m] = last > 0 ? last : 0;
    }
  }

 private:
  Count rows_;
  const int32_t* positions_;
  int32_t* first_;
  int32_t window_;
  bool is_shared_;
};

// Final hidden states of committed rows, by position.
class HiddenStore : public Op {
 public:
  explicit HiddenStore(const Fields& f)
      : rows_(f),
        hidden_(f.get<float>("hidden")),
        cache_(f.get<float>("cache")),
        positions_(f.get<int32_t>("positions")),
        width_(f.integer("width")) {}
  void run(const Context&) override {
    for (int64_t m = 0; m < rows_(); m++)
      std::memcpy(cache_ + positions_[m] * width_, hidden_ + m * width_, static_cast<size_t>(width_) * sizeof(float));
  }

 private:
  Count rows_;
  const float* hidden_;
  float* cache_;
  const int32_t* positions_;
  int64_t width_;
};

// Row i of y is row i - 1 of hidden; row 0 is the last committed one, and a single row needs no hidden.
class Shift : public Op {
 public:
  explicit Shift(const Fields& f)
      : rows_(f),
        hidden_(f.find<float>("hidden")),
        cache_(f.get<float>("cache")),
        context_(f.get<int32_t>("context")),
        y_(f.get<float>("y")),
        width_(f.integer("width")) {}
  void run(const Context&) override {
    const size_t row = static_cast<size_t>(width_) * sizeof(float);
    // Slot 0 of the whole sequence has no row before it: it is the prompt's, so what it reads is not used.
    std::memcpy(y_, *context_ ? cache_ + (*context_ - 1) * width_ : hidden_, row);
    if (rows_() > 1) std::memcpy(y_ + width_, hidden_, row * static_cast<size_t>(rows_() - 1));
  }

 private:
  Count rows_;
  const float *hidden_, *cache_;
  const int32_t* context_;
  float* y_;
  int64_t width_;
};

class SoftEmbedding : public Op {
 public:
  explicit SoftEmbedding(const Fields& f)
      : rows_(f), args_{operand(f, f.integer("vocab")),        f.get<void>("table"), 0, f.integer("width"),
                        static_cast<float>(f.number("scale")), f.get<float>("z")} {}
  void run(const Context& c) override {
    args_.rows = rows_();
    c.pool.split(num_panels(args_.width), 2, [&](Range r, int) { c.kernels.soft_embedding(args_, r); });
  }

 private:
  Count rows_;
  SoftEmbeddingArgs args_;
};

}  // namespace

std::unique_ptr<Op> make_tensor_op(const Fields& f) {
  if (f.op == "embed") return std::make_unique<Embed>(f);
  if (f.op == "rms_norm") return std::make_unique<RmsNorm>(f);
  if (f.op == "quantize_rows") return std::make_unique<QuantizeRows>(f);
  if (f.op == "linear") return std::make_unique<Linear>(f);
  if (f.op == "silu_mul" || f.op == "gelu_mul") return std::make_unique<GatedProduct>(f);
  if (f.op == "add_bias") return std::make_unique<AddBias>(f);
  if (f.op == "scale") return std::make_unique<Scale>(f);
  if (f.op == "soft_cap") return std::make_unique<SoftCap>(f);
  if (f.op == "window_start") return std::make_unique<WindowStart>(f);
  if (f.op == "scaled_add") return std::make_unique<ScaledAdd>(f);
  if (f.op == "qk_norm_rope_store") return std::make_unique<QkNormRopeStore>(f);
  if (f.op == "attention") return std::make_unique<Attention>(f);
  if (f.op == "hidden_store") return std::make_unique<HiddenStore>(f);
  if (f.op == "shift") return std::make_unique<Shift>(f);
  if (f.op == "soft_embedding") return std::make_unique<SoftEmbedding>(f);
  return nullptr;
}

}  // namespace dlmrt::cpu
