// See runner.hpp.
#include "runner.hpp"

#include "kernels/floats.hpp"

namespace dlmrt::cpu {

void Runner::add(Fields fields, int span, bool waits) {
  std::unique_ptr<Op> op = make_tensor_op(fields);
  if (!op) op = make_moe_op(fields);
  if (!op) op = make_predict_op(fields);
  if (!op) op = make_loop_op(fields);
  if (!op) op = make_edit_op(fields);
  if (!op) throw std::invalid_argument("the native runner has no operation '" + fields.op + "'");
  const int64_t bytes = round_up(op->worker_bytes(), int64_t{kAlignment});
  worker_bytes_ = bytes > worker_bytes_ ? bytes : worker_bytes_;
  if (span < 0) {
    fields.require(!waits, "only operations of a span wait");
    last_span_ = nullptr;
    instructions_.push_back({std::move(op), std::move(fields.checks), nullptr, 0});
    return;
  }
  fields.require(dynamic_cast<RowOp*>(op.get()), "its rows are not computed apart from each other, so it is of no span");
  if (!last_span_ || span != last_span_number_) {
    auto made = std::make_unique<RowSpan>();
    last_span_ = made.get();
    last_span_number_ = span;
    instructions_.push_back({std::move(made), {}, nullptr, 0});
  }
  last_span_->add(std::unique_ptr<RowOp>(static_cast<RowOp*>(op.release())), waits);
  for (auto& check : fields.checks) instructions_.back().checks.push_back(std::move(check));
}

void Runner::begin(const Memory& flag, bool is_loop) {
  Fields fields;
  fields.op = is_loop ? "while" : "if";
  fields.memory = {{"flag", flag}};
  const int32_t* at = fields.scalar("flag", 0, 1);
  last_span_ = nullptr;
  open_.push_back({instructions_.size(), is_loop});
  instructions_.push_back({nullptr, std::move(fields.checks), at, 0});
}

void Runner::end() {
  if (open_.empty()) throw std::logic_error("end without begin");
  last_span_ = nullptr;
  const Open body = open_.back();
  open_.pop_back();
  if (body.is_loop) instructions_.push_back({nullptr, {}, nullptr, body.at});
  instructions_[body.at].target = instructions_.size();
}

void Runner::run() {
  if (!open_.empty()) throw std::logic_error("a body is not ended");
  const auto lock = pool_->hold();
  const PlainFloats plain;
  const Context context{*pool_, kernels_, static_cast<uint8_t*>(pool_->scratch(scratch_bytes())), worker_bytes_};
  for (size_t at = 0; at < instructions_.size();) {
    const Instruction& i = instructions_[at];
    if constexpr (kChecked)
      for (const auto& check : i.checks) check();
    if (i.op) {
      i.op->run(context);
      at++;
    } else {
      at = i.flag && *i.flag ? at + 1 : i.target;
    }
  }
}

void Runner::start() {
  Started& own = *started_;
  const std::lock_guard<std::mutex> lock(own.handle);
  if (own.thread.joinable()) own.thread.join();
  own.has_failed = false;
  started_after_ = forks();
  own.thread = std::thread([this, &own] {
    try {
      run();
    } catch (const std::exception& error) {  // no memory, no thread for the pool, or an operand out of bounds
      own.failure = error.what();
      own.has_failed = true;
    }
  });
}

void Runner::check() {
  if (started_after_ >= 0 && started_after_ != forks())
    throw std::runtime_error("the native loop belongs to the process that this one was forked off; start one here");
  if (started_->has_failed) throw std::runtime_error("the native loop ended early: " + started_->failure);
}

void Runner::join() { started_->join(); }

}  // namespace dlmrt::cpu
