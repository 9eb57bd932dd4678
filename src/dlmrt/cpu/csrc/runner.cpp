// See runner.hpp.
#include "runner.hpp"

namespace dlmrt::cpu {

void Runner::add(Fields fields) {
  std::unique_ptr<Op> op = make_tensor_op(fields);
  if (!op) op = make_moe_op(fields);
  if (!op) op = make_predict_op(fields);
  if (!op) op = make_loop_op(fields);
  if (!op) op = make_edit_op(fields);
  if (!op) throw std::invalid_argument("the native runner has no operation '" + fields.op + "'");
  const int64_t bytes = round_up(op->worker_bytes(), int64_t{kAlignment});
  worker_bytes_ = bytes > worker_bytes_ ? bytes : worker_bytes_;
  instructions_.push_back({std::move(op), std::move(fields.checks), nullptr, 0});
}

void Runner::begin(const Memory& flag, bool is_loop) {
  Fields fields;
  fields.op = is_loop ? "while" : "if";
  fields.memory = {{"flag", flag}};
  const int32_t* at = fields.scalar("flag", 0, 1);
  open_.push_back({instructions_.size(), is_loop});
  instructions_.push_back({nullptr, std::move(fields.checks), at, 0});
}

void Runner::end() {
  if (open_.empty()) throw std::logic_error("end without begin");
  const Open body = open_.back();
  open_.pop_back();
  if (body.is_loop) instructions_.push_back({nullptr, {}, nullptr, body.at});
  instructions_[body.at].target = instructions_.size();
}

void Runner::run() {
  if (!open_.empty()) throw std::logic_error("a body is not ended");
  const auto lock = pool_->hold();
  if (!scratch_) scratch_ = std::make_unique<AlignedBytes>(scratch_bytes());
  const Context context{*pool_, kernels_, static_cast<uint8_t*>(scratch_->data()), worker_bytes_};
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
  join();
  has_failed_ = false;
  thread_ = std::thread([this] {
    try {
      run();
    } catch (const std::exception& error) {  // no memory, no thread for the pool, or an operand out of bounds
      failure_ = error.what();
      has_failed_ = true;
    }
  });
}

void Runner::check() {
  if (has_failed_) throw std::runtime_error("the native loop ended early: " + failure_);
}

void Runner::join() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace dlmrt::cpu
