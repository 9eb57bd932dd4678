// Nodes of the forward pass: each fills a kernel's arguments once and divides its units over the pool at every run.
//
// Left out: any decision. Shapes, layouts and order were decided by lower.py. Source: ours.
#include <algorithm>
#include <cstring>

#include "op.hpp"

namespace dlmrt::cpu {
namespace {

class Embed : public RowKernel<EmbedArgs, &KernelTable::embed> {
 public:
  explicit Embed(const Fields& f) : RowKernel(f) {
    args_.dtype = f.dtype("table_dtype");
    f.require(args_.dtype != DType::kInt8 || !f.bytes("table"), "a table in rows has no int8 form");
    args_.width = f.size("width");
    args_.out = f.get<float>("x", product(rows_.max(), args_.width));
    args_.scale = f.has("scale") ? f.real("scale") : 0.f;
    args_.table = f.find<void>("table");
    int64_t vocab = f.bytes("table") / (args_.width * kCellBytes / values_per_cell(args_.dtype));
    if (!args_.table) {
      packed_ = f.weight("table");
      const Weight& w = packed_->view();
      f.require(w.dtype == args_.dtype && w.k == args_.width, "weight 'table' has another type or width");
      args_.table = w.panels;
      args_.panel_bytes = panel_bytes(w.dtype, w.group, w.k);
      args_.row_scale = w.column_scale;
      vocab = w.n;
    }
    f.require(vocab > 0, "operand 'table' holds no row");
    args_.ids = f.get<int32_t>("ids", rows_.max(), rows_, 0, vocab - 1);
  }

 private:
  std::shared_ptr<const PackedWeight> packed_;  // the table, if it is in panels
};

class RmsNorm : public RowKernel<RmsNormArgs, &KernelTable::rms_norm> {
 public:
  explicit RmsNorm(const Fields& f) : RowKernel(f) {
    args_.width = f.size("width");
    args_.x = f.get<float>("x", product(rows_.max(), args_.width));
    args_.weight = f.find<float>("weight", args_.width);
    args_.eps = f.real("eps");
    args_.out_rows = f.find<float>("y", product(rows_.max(), args_.width));
    if (f.bytes("cells")) args_.out = f.operand(rows_.max(), args_.width);
  }
};

class QuantizeRows : public RowKernel<QuantizeArgs, &KernelTable::quantize_rows> {
 public:
  explicit QuantizeRows(const Fields& f) : RowKernel(f) {
    args_.ld = f.size("width");
    args_.x = f.get<float>("x", product(rows_.max(), args_.ld));
    args_.out = f.operand(rows_.max(), args_.ld);
  }
};

// Some rows of a product, from the beginning of a row group on.
LinearArgs rows_of(LinearArgs args, Range rows) {
  const Operand& in = args.input;
  const int64_t group_bytes = operand_bytes(in.dtype, kRowGroup, in.width);
  args.input.cells = static_cast<uint8_t*>(in.cells) + rows.begin / kRowGroup * group_bytes;
  if (in.scales) args.input.scales += rows.begin;
  args.out += rows.begin * args.ld_out;
  args.rows = rows.end - rows.begin;
  return args;
}
void multiply_rows(const Context& c, const LinearArgs& args, Range rows, int worker) {
  c.kernels.linear(rows_of(args, rows), {0, num_panels(args.weight.n)}, c.worker_scratch(worker));
}

class Linear : public RowOp {
 public:
  explicit Linear(const Fields& f) : weight_(f.weight("weight")), rows_(f) {
    const Weight& w = weight_->view();
    require_operand_of(f, w);
    args_ = {w, f.operand(rows_.max(), w.k), 0, f.get<float>("y", product(rows_.max(), w.n)), w.n,
             static_cast<int32_t>(f.integer("accumulate", 0, 1))};
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    // Equal numbers of panels: whole register tiles for each worker would leave one of them a tile more.
    c.pool.split(num_panels(args_.weight.n), 1,
                 [&](Range r, int worker) { c.kernels.linear(args_, r, c.worker_scratch(worker)); });
  }
  const Count& rows() const override { return rows_; }
  void run_rows(const Context& c, Range r, int worker) const override { multiply_rows(c, args_, r, worker); }
  int64_t worker_bytes() const override { return weight_scratch_bytes(args_.weight); }

 private:
  std::shared_ptr<const PackedWeight> weight_;
  Count rows_;
  LinearArgs args_;
};

// silu_mul or gelu_mul
class GatedProduct : public RowKernel<GateArgs, &KernelTable::gate_rows> {
 public:
  explicit GatedProduct(const Fields& f) : RowKernel(f) {
    const int64_t width = f.size("width");
    float* gate = f.get<float>("gate_up", product(rows_.max(), 2, width));
    args_ = {gate, gate + width, 2 * width, 0, f.operand(rows_.max(), width), f.op == "gelu_mul"};
  }
};

// Gate and up projection and the gated product. A thread has the same columns of both, so that only its cells and one
// number a row pass to the others.
class GatedLinear : public RowOp {
 public:
  explicit GatedLinear(const Fields& f) : weight_(f.weight("weight")), rows_(f) {
    const Weight& w = weight_->view();
    require_operand_of(f, w);
    f.require(w.n % (2 * kPanel) == 0, "gate and up are not whole panels");
    width_ = w.n / 2;
    float* out = f.get<float>("gate_up", product(rows_.max(), w.n));
    linear_ = {w, f.operand(rows_.max(), w.k), 0, out, w.n, 0};
    gate_ = {out, out + width_, w.n, 0,
             f.operand(rows_.max(), width_, "product_cells", "product_scales", "product_operand"), f.flag("is_gelu")};
  }
  void run(const Context& c) override {
    const int64_t rows = linear_.rows = gate_.rows = rows_(), panels = width_ / kPanel;
    for (int i = 0; i < c.pool.size(); i++) std::fill_n(top(c, i), rows, 0);
    c.pool.split(panels, 1, [&](Range r, int worker) {
      c.kernels.linear(linear_, r, c.worker_scratch(worker));
      c.kernels.linear(linear_, {panels + r.begin, panels + r.end}, c.worker_scratch(worker));
      c.kernels.gate_columns(gate_, r, top(c, worker));
    });
    int32_t* const most = top(c, 0);
    for (int i = 1; i < c.pool.size(); i++)
      for (int64_t m = 0; m < rows; m++) most[m] = std::max(most[m], top(c, i)[m]);
    c.pool.split(panels, 1, [&](Range r, int) { c.kernels.pack_columns(gate_, r, most); });
  }
  const Count& rows() const override { return rows_; }
  void run_rows(const Context& c, Range r, int worker) const override {
    multiply_rows(c, linear_, r, worker);
    GateArgs gate = gate_;
    gate.rows = rows_();
    c.kernels.gate_rows(gate, r);
  }
  int64_t worker_bytes() const override { return top_offset() + rows_.max() * int64_t{sizeof(int32_t)}; }

 private:
  int64_t top_offset() const { return round_up(weight_scratch_bytes(linear_.weight), int64_t{kAlignment}); }
  int32_t* top(const Context& c, int worker) const {  // of each row, over a worker's columns
    return reinterpret_cast<int32_t*>(static_cast<uint8_t*>(c.worker_scratch(worker)) + top_offset());
  }

  std::shared_ptr<const PackedWeight> weight_;
  Count rows_;
  int64_t width_;
  LinearArgs linear_;
  GateArgs gate_;
};

class Scale : public RowKernel<ScaleArgs, &KernelTable::scale> {
 public:
  explicit Scale(const Fields& f) : RowKernel(f) {
    args_.width = f.size("width");
    args_.x = f.get<float>("x", product(rows_.max(), args_.width));
    args_.factor = f.get<float>("factor");
  }
};

// Three runs of columns side by side, each with its own bias.
class AddBias : public RowOp {
 public:
  explicit AddBias(const Fields& f)
      : rows_(f),
        width_{f.size("width_bq"), f.size("width_bk"), f.size("width_bv")},
        x_(f.get<float>("x", product(rows_.max(), width_[0] + width_[1] + width_[2]))),
        bias_{f.get<float>("bq", width_[0]), f.get<float>("bk", width_[1]), f.get<float>("bv", width_[2])} {}
  void run(const Context& c) override {
    c.pool.split(rows_(), kRowGroup, [&](Range r, int worker) { run_rows(c, r, worker); });
  }
  const Count& rows() const override { return rows_; }
  void run_rows(const Context&, Range r, int) const override {
    for (int64_t m = r.begin; m < r.end; m++) {
      float* x = x_ + m * (width_[0] + width_[1] + width_[2]);
      for (int part = 0; part < 3; x += width_[part++])
        for (int64_t n = 0; n < width_[part]; n++) x[n] += bias_[part][n];
    }
  }

 private:
  Count rows_;
  int64_t width_[3];
  float* x_;
  const float* bias_[3];
};

class SoftCap : public Op {
 public:
  explicit SoftCap(const Fields& f)
      : rows_(f), args_{} {
    args_.width = f.size("width");
    args_.x = f.get<float>("x", product(rows_.max(), args_.width));
    args_.cap = f.real("cap");
  }
  void run(const Context& c) override { over_rows(c, args_, rows_, c.kernels.soft_cap, 1); }

 private:
  Count rows_;
  SoftCapArgs args_;
};

class ScaledAdd : public RowKernel<ScaledAddArgs, &KernelTable::scaled_add> {
 public:
  explicit ScaledAdd(const Fields& f) : RowKernel(f) {
    args_.width = f.size("width");
    args_.x = f.get<float>("x", product(rows_.max(), args_.width));
    args_.delta = f.get<float>("delta", product(rows_.max(), args_.width));
    args_.where = f.find<uint8_t>("where", rows_.max());
    args_.alpha = f.real("alpha");
  }
};

KvCache cache_of(const Fields& f) {
  KvCache cache{f.dtype("cache_dtype", DType::kBF16),
                static_cast<int32_t>(f.size("page_size")),
                static_cast<int32_t>(f.integer("num_kv_heads", 1, 1 << 16)),
                static_cast<int32_t>(f.integer("head_dim", 1, kMaxHeadDim)),
                f.get<void>("cache")};
  f.require(cache.page_size % kPanel == 0, "pages are whole panels of 16 positions");
  return cache;
}
// Positions for which the cache has pages.
int64_t positions_of(const Fields& f, const KvCache& cache) {
  return f.bytes("cache") / kv_page_bytes(cache) * cache.page_size;
}
int32_t num_heads_of(const Fields& f, const KvCache& cache) {
  const auto heads = static_cast<int32_t>(f.integer("num_heads", 1, 1 << 16));
  f.require(heads % cache.num_kv_heads == 0, "num_heads is no multiple of num_kv_heads");
  return heads;
}
// Bytes of the queries: an operand per kv head.
int64_t query_bytes(const KvCache& cache, int64_t rows, int32_t num_heads) {
  return product(operand_bytes(cache.dtype, rows * (num_heads / cache.num_kv_heads), cache.head_dim),
                 cache.num_kv_heads);
}

QkvArgs qkv_args(const Fields& f, const Count& rows) {
  QkvArgs args{};
  args.cache = cache_of(f);
  args.num_heads = num_heads_of(f, args.cache);
  args.is_v_from_k = f.flag("is_v_from_k");
  args.is_v_normed = f.flag("is_v_normed");
  args.scale = f.has("scale") ? f.real("scale") : 0.f;
  const int32_t kv = args.is_v_from_k ? 1 : 2;
  args.ld = (args.num_heads + kv * args.cache.num_kv_heads) * int64_t{args.cache.head_dim};
  args.qkv = f.get<float>("qkv", product(rows.max(), args.ld));
  args.rotary_dim = static_cast<int32_t>(f.integer("rotary_dim", 2, args.cache.head_dim));
  f.require(args.rotary_dim % 2 == 0, "rotary_dim is odd");
  args.q_norm = f.find<float>("q_norm", args.cache.head_dim);
  args.k_norm = f.find<float>("k_norm", args.cache.head_dim);
  args.eps = f.real("eps");
  args.cos = f.get<float>("cos");
  args.sin = f.get<float>("sin");
  const int64_t turned = std::min(f.count<float>("cos"), f.count<float>("sin")) / (args.rotary_dim / 2);
  args.positions =
      f.get<int32_t>("positions", rows.max(), rows, 0, std::min(turned, positions_of(f, args.cache)) - 1);
  args.q = f.get<void>("q", query_bytes(args.cache, rows.max(), args.num_heads));
  return args;
}

AttentionArgs attention_args(const Fields& f, const Count& rows) {
  AttentionArgs args{};
  args.cache = cache_of(f);
  args.num_heads = num_heads_of(f, args.cache);
  args.q = f.get<void>("q", query_bytes(args.cache, rows.max(), args.num_heads));
  args.chunk = static_cast<int32_t>(f.integer("chunk", 1, 1 << 20));
  f.require(args.chunk % args.cache.page_size == 0, "chunks are whole pages");
  const int64_t capacity = positions_of(f, args.cache);
  args.visible = f.get<int32_t>("visible", rows.max(), rows, 0, capacity);
  args.first = f.find<int32_t>("first", rows.max());
  f.expect("first", args.first, rows, 0, capacity);
  args.ld_out = args.num_heads * int64_t{args.cache.head_dim};
  args.out = f.get<float>("y", product(rows.max(), args.ld_out));
  return args;
}

void store_qkv(const Context& c, const QkvArgs& args) {
  c.pool.split(args.rows, 1,
               [&](Range r, int) { c.kernels.qk_norm_rope_store(args, r, {0, args.cache.num_kv_heads}); });
}
void attend(const Context& c, const AttentionArgs& args) {
  c.pool.split(attention_units(args), 1,
               [&](Range r, int worker) { c.kernels.attention(args, r, c.worker_scratch(worker)); });
}

class QkNormRopeStore : public RowOp {
 public:
  explicit QkNormRopeStore(const Fields& f) : rows_(f), args_(qkv_args(f, rows_)) {}
  void run(const Context& c) override {
    args_.rows = rows_();
    store_qkv(c, args_);
  }
  const Count& rows() const override { return rows_; }
  void run_rows(const Context& c, Range r, int) const override {
    QkvArgs args = args_;
    args.rows = rows_();
    c.kernels.qk_norm_rope_store(args, r, {0, args.cache.num_kv_heads});
  }

 private:
  Count rows_;
  QkvArgs args_;
};

class Attention : public RowOp {
 public:
  explicit Attention(const Fields& f) : rows_(f), args_(attention_args(f, rows_)) {}
  void run(const Context& c) override {
    args_.rows = rows_();
    attend(c, args_);
  }
  const Count& rows() const override { return rows_; }
  void run_rows(const Context& c, Range r, int worker) const override {
    AttentionArgs args = args_;
    args.rows = rows_();
    const int64_t heads = args.cache.num_kv_heads, group = args.num_heads / heads, units = attention_units(args) / heads;
    for (int64_t first = 0; first < heads * units; first += units)
      c.kernels.attention(args, {first + r.begin * group / kRowGroup, first + ceil_div(r.end * group, kRowGroup)},
                          c.worker_scratch(worker));
  }
  int64_t worker_bytes() const override { return attention_scratch_bytes(args_); }

 private:
  Count rows_;
  AttentionArgs args_;
};

// Projection, norm and rotation of q and k, store and attention. Where the kv heads can be shared out evenly, a thread
// does all of it for its own and waits for nobody; otherwise each part is divided in its own way.
class QkvAttention : public Op {
 public:
  explicit QkvAttention(const Fields& f)
      : weight_(f.weight("weight")), rows_(f), qkv_(qkv_args(f, rows_)), attention_(attention_args(f, rows_)) {
    const Weight& w = weight_->view();
    require_operand_of(f, w);
    f.require(w.n == qkv_.ld && w.n % kPanel == 0, "the weight does not have the columns of the heads");
    linear_ = {w, f.operand(rows_.max(), w.k), 0, f.get<float>("qkv", product(rows_.max(), w.n)), w.n, 0};
  }
  void run(const Context& c) override {
    linear_.rows = qkv_.rows = attention_.rows = rows_();
    const int64_t heads = qkv_.cache.num_kv_heads, threads = c.pool.size();
    // Uneven shares of heads leave threads idle for up to one head each: little when there are four or more of them.
    if (qkv_.cache.head_dim % kPanel || (heads % threads && heads < 4 * threads)) {
      c.pool.split(num_panels(linear_.weight.n), 1,
                   [&](Range r, int worker) { c.kernels.linear(linear_, r, c.worker_scratch(worker)); });
      store_qkv(c, qkv_);
      attend(c, attention_);
      return;
    }
    const int64_t units = attention_units(attention_) / heads;
    c.pool.split(heads, 1, [&](Range some, int worker) {
      project(c, some, worker);
      c.kernels.qk_norm_rope_store(qkv_, {0, qkv_.rows}, some);
      c.kernels.attention(attention_, {some.begin * units, some.end * units}, c.worker_scratch(worker));
    });
  }
  int64_t worker_bytes() const override {
    return std::max(weight_scratch_bytes(linear_.weight), attention_scratch_bytes(attention_));
  }

 private:
  // Columns of some kv heads and of the q heads that read them.
  void project(const Context& c, Range heads, int worker) const {
    const int64_t width = qkv_.cache.head_dim / kPanel, kv = qkv_.cache.num_kv_heads, group = qkv_.num_heads / kv;
    const auto panels = [&](int64_t first, int64_t each) {
      const Range r{(first + heads.begin * each) * width, (first + heads.end * each) * width};
      c.kernels.linear(linear_, r, c.worker_scratch(worker));
    };
    panels(0, group);
    panels(qkv_.num_heads, 1);
    if (!qkv_.is_v_from_k) panels(qkv_.num_heads + kv, 1);
  }

  std::shared_ptr<const PackedWeight> weight_;
  Count rows_;
  QkvArgs qkv_;
  AttentionArgs attention_;
  LinearArgs linear_;
};

// First position that a row sees through a window: it counts itself, or with is_shared the whole canvas, as one.
class WindowStart : public Op {
 public:
  explicit WindowStart(const Fields& f)
      : rows_(f),
        positions_(f.get<int32_t>("positions", rows_.max(), rows_, 0, INT32_MAX)),
        first_(f.get<int32_t>("first", rows_.max())),
        window_(static_cast<int32_t>(f.size("window"))),
        is_shared_(f.flag("is_shared")) {}
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
        width_(f.size("width")),
        hidden_(f.get<float>("hidden", product(rows_.max(), width_))),
        cache_(f.get<float>("cache")),
        positions_(f.get<int32_t>("positions", rows_.max(), rows_, 0, f.count<float>("cache") / width_ - 1)) {}
  void run(const Context&) override {
    for (int64_t m = 0; m < rows_(); m++)
      std::memcpy(cache_ + positions_[m] * width_, hidden_ + m * width_, static_cast<size_t>(width_) * sizeof(float));
  }

 private:
  Count rows_;
  int64_t width_;
  const float* hidden_;
  float* cache_;
  const int32_t* positions_;
};

// Row i of y is row i - 1 of hidden, or without it of the rows kept behind the context; row 0 is the last committed one.
class Shift : public Op {
 public:
  explicit Shift(const Fields& f)
      : rows_(f),
        width_(f.size("width")),
        hidden_(f.find<float>("hidden", product(rows_.max(), width_))),
        cache_(f.get<float>("cache")),
        context_(f.scalar("context", 0, f.count<float>("cache") / width_ - (hidden_ ? 0 : rows_.max() - 1))),
        y_(f.get<float>("y", product(rows_.max(), width_))) {}
  void run(const Context&) override {
    const size_t row = static_cast<size_t>(width_) * sizeof(float);
    const float* rest = hidden_ ? hidden_ : cache_ + *context_ * width_;
    // Slot 0 of the whole sequence has no row before it: it is the prompt's, so what it reads is not used.
    std::memcpy(y_, *context_ ? cache_ + (*context_ - 1) * width_ : rest, row);
    if (rows_() > 1) std::memcpy(y_ + width_, rest, row * static_cast<size_t>(rows_() - 1));
  }

 private:
  Count rows_;
  int64_t width_;
  const float *hidden_, *cache_;
  const int32_t* context_;
  float* y_;
};

class SoftEmbedding : public Op {
 public:
  explicit SoftEmbedding(const Fields& f) : rows_(f), args_{} {
    const int64_t vocab = f.size("vocab");
    args_.width = f.size("width");
    args_.probabilities = f.operand(rows_.max(), vocab);
    f.require(args_.probabilities.dtype != DType::kInt8, "probabilities have no int8 form");
    args_.table = f.get<void>("table", product(vocab, args_.width, kCellBytes / values_per_cell(f.dtype("operand"))));
    args_.scale = f.real("scale");
    args_.out = f.get<float>("z", product(rows_.max(), args_.width));
  }
  void run(const Context& c) override {
    args_.rows = rows_();
    // In pairs: 32 columns of a row in bf16 are one cache line, which two threads would both read.
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
  if (f.op == "gated_linear") return std::make_unique<GatedLinear>(f);
  if (f.op == "silu_mul" || f.op == "gelu_mul") return std::make_unique<GatedProduct>(f);
  if (f.op == "add_bias") return std::make_unique<AddBias>(f);
  if (f.op == "scale") return std::make_unique<Scale>(f);
  if (f.op == "soft_cap") return std::make_unique<SoftCap>(f);
  if (f.op == "window_start") return std::make_unique<WindowStart>(f);
  if (f.op == "scaled_add") return std::make_unique<ScaledAdd>(f);
  if (f.op == "qk_norm_rope_store") return std::make_unique<QkNormRopeStore>(f);
  if (f.op == "attention") return std::make_unique<Attention>(f);
  if (f.op == "qkv_attention") return std::make_unique<QkvAttention>(f);
  if (f.op == "hidden_store") return std::make_unique<HiddenStore>(f);
  if (f.op == "shift") return std::make_unique<Shift>(f);
  if (f.op == "soft_embedding") return std::make_unique<SoftEmbedding>(f);
  return nullptr;
}

}  // namespace dlmrt::cpu
