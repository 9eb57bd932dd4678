// The loop's own operations: commit rules, settling, noise, records. Plain C++ on the numbers of one block.
//
// Numbered steps are those of dlmrt/decode/loop.py, rules those of dlmrt/decode/rules.py, which these must equal slot for
// slot: comparisons in the same precision, ties to the lower slot. Run by the caller's thread alone.
//
// Source: ours.
#include "loop.hpp"
#include "random.hpp"

namespace dlmrt::cpu {
namespace {

// Positions that a committed row at `position` sees, when `end` positions exist and blocks start at `grid`.
int32_t committed_visible(int32_t position, int64_t block, int64_t grid, int32_t end) {
  if (block == 0) return position + 1;
  if (position < grid) return static_cast<int32_t>(std::min<int64_t>(end, grid));
  return static_cast<int32_t>(std::min<int64_t>(end, ((position - grid) / block + 1) * block + grid));
}
// Where the first whole block starts: the prefill ends where a block does.
int64_t grid_of(int32_t num_prefill, int64_t block) { return block ? num_prefill % block : 0; }

// What open slots hold: the mask, or fresh ids of the noise stream.
class Noise {
 public:
  explicit Noise(const Fields& f)
      : mask_(static_cast<int32_t>(f.integer("mask_token_id", -1))),
        allowed_(f.find<int32_t>("allowed")),
        num_allowed_(f.find<int32_t>("num_allowed")),
        key_(f.find<uint64_t>("noise_key")) {
    f.require(mask_ >= 0 || (allowed_ && num_allowed_ && key_), "without a mask it needs ids to draw and a key");
    const int64_t vocab = f.count<int32_t>("allowed");
    f.expect("num_allowed", num_allowed_, 1, 1, vocab);
    f.expect("allowed", allowed_, [n = num_allowed_] { return *n; }, 0, vocab - 1);
  }
  int32_t operator()(int64_t slot, int32_t step, int32_t block) const {
    if (mask_ >= 0) return mask_;
    const uint64_t word = random_word(*key_, static_cast<uint32_t>(slot), static_cast<uint32_t>(step),
                                      static_cast<uint32_t>(block), kNoiseStream);
    return allowed_[word * static_cast<uint64_t>(*num_allowed_) >> 32];
  }

 private:
  int32_t mask_;
  const int32_t *allowed_, *num_allowed_;
  const uint64_t* key_;
};

// 1
std::unique_ptr<Op> start_request(const Fields& f) {
  int32_t* const num_prompt = f.scalar("num_prompt", 0, INT32_MAX);
  return make([num_prompt, num_prefill = f.scalar("num_prefill", 0, [=] { return *num_prompt; }),
               cancel = f.get<int32_t>("cancel"), context = f.get<int32_t>("context"),
               forwards = f.get<int32_t>("num_prefill_forwards"), more_prefill = f.get<int32_t>("more_prefill"),
               more_blocks = f.get<int32_t>("more_blocks"), block_idx = f.get<int32_t>("block_idx"),
               num_pinned = f.get<int32_t>("num_pinned"), num_answer = f.get<int64_t>("num_answer"),
               end_reason = f.get<int32_t>("end_reason")] {
    *context = *forwards = *block_idx = 0;
    *num_answer = 0;
    *end_reason = kGoesOn;
    *more_blocks = 1;
    *num_pinned = *num_prompt - *num_prefill;
    *more_prefill = *num_prefill > 0 && !is_set(cancel);
  });
}

std::unique_ptr<Op> prefill_chunk(const Fields& f) {
  const int64_t chunk = f.size("chunk");
  int32_t* const num_prefill = f.scalar("num_prefill", 0, f.count<int32_t>("prompt"));
  return make([chunk, num_prefill, prompt = f.get<int32_t>("prompt"),
               context = f.scalar("context", 0, [=] { return *num_prefill; }), rows = f.get<int32_t>("chunk_rows"),
               ids = f.get<int32_t>("ids", chunk), positions = f.get<int32_t>("positions", chunk),
               visible = f.get<int32_t>("visible", chunk), block = f.integer("block"),
               align = f.integer("align", 1, chunk)] {
    const int64_t first = *num_prefill % align, size = *context == 0 && first ? chunk - align + first : chunk;
    const int64_t grid = grid_of(*num_prefill, block);
    *rows = static_cast<int32_t>(std::min<int64_t>(size, *num_prefill - *context));
    for (int32_t i = 0; i < *rows; i++) {
      ids[i] = prompt[*context + i];
      positions[i] = *context + i;
      visible[i] = committed_visible(positions[i], block, grid, *context + *rows);
    }
  });
}

std::unique_ptr<Op> finish_chunk(const Fields& f) {
  int32_t* const num_prefill = f.scalar("num_prefill", 0, INT32_MAX);
  int32_t* const context = f.scalar("context", 0, [=] { return *num_prefill; });
  return make([num_prefill, context, rows = f.scalar("chunk_rows", 0, [=] { return *num_prefill - *context; }),
               cancel = f.get<int32_t>("cancel"), forwards = counter_of(f, "num_prefill_forwards"),
               more = f.get<int32_t>("more_prefill")] {
    *context += *rows;
    ++*forwards;
    *more = *context < *num_prefill && !is_set(cancel);
  });
}

// 2, 3
std::unique_ptr<Op> start_block(const Fields& f) {
  const auto get = [&](const char* role) { return f.get<int32_t>(role); };
  const int64_t slots = f.size("length");
  const int32_t* const num_prompt_at = f.scalar("num_prompt", 0, f.count<int32_t>("prompt"));
  return make([noise = Noise(f), length = slots, block = f.integer("block"), is_causal = f.flag("is_causal"),
               prompt = get("prompt"), num_prompt = num_prompt_at, num_prefill = f.scalar("num_prefill", 0, INT32_MAX),
               num_pinned = f.scalar("num_pinned", 0, [=] { return std::min<int64_t>(slots, *num_prompt_at); }),
               context = f.scalar("context", 0, INT32_MAX - slots), block_idx = counter_of(f, "block_idx"),
               cancel = get("cancel"), canvas = slots_of(f, "canvas"), answer = slots_of(f, "answer"),
               is_open = slots_of<uint8_t>(f, "is_open"), is_free = slots_of<uint8_t>(f, "is_free"),
               positions = slots_of(f, "positions"), visible = slots_of(f, "visible"),
               commit_visible = slots_of(f, "commit_visible"), step = get("step"),
               num_full_steps = get("num_full_steps"), num_repeats = get("num_repeats"),
               num_settled = get("num_settled"), has_residual = get("has_residual"), is_done = get("is_done"),
               more_steps = get("more_steps"), end_reason = get("end_reason")] {
    const int32_t end = *context + static_cast<int32_t>(length);
    for (int64_t i = 0; i < length; i++) {
      const bool is_pinned = i < *num_pinned;
      canvas[i] = answer[i] = is_pinned ? prompt[*num_prompt - *num_pinned + i] : noise(i, 0, *block_idx);
      is_open[i] = is_free[i] = !is_pinned;
      positions[i] = *context + static_cast<int32_t>(i);
      visible[i] = is_causal ? positions[i] + 1 : end;
      commit_visible[i] = committed_visible(positions[i], block, grid_of(*num_prefill, block), end);
    }
    *step = *num_full_steps = *num_repeats = *has_residual = *is_done = 0;
    *num_settled = *num_pinned;
    *more_steps = !is_set(cancel);
    if (!*more_steps) *end_reason = kCancelled;
  });
}

std::unique_ptr<Op> check_first(const Fields& f) {
  return make([num_pinned = f.scalar("num_pinned", 0, INT32_MAX), more_steps = flag_of(f, "more_steps"),
               is_first_open = f.get<int32_t>("is_first_open")] { *is_first_open = *num_pinned == 0 && *more_steps; });
}

std::unique_ptr<Op> decide_first(const Fields& f) {
  return make([length = f.size("length"), argmax = f.get<int32_t>("first_argmax"),
               is_finite = flag_of(f, "first_is_finite"), canvas = slots_of(f, "canvas"),
               is_open = slots_of<uint8_t>(f, "is_open"), is_finite_row = slots_of<uint8_t>(f, "is_finite_row"),
               more_steps = f.get<int32_t>("more_steps"), end_reason = f.get<int32_t>("end_reason")] {
    canvas[0] = *argmax;
    is_open[0] = 0;
    if (*is_finite) return;
    std::fill_n(is_finite_row, length, uint8_t{1});
    is_finite_row[0] = 0;
    *more_steps = 0;
    *end_reason = kNonFinite;
  });
}

std::unique_ptr<Op> start_step(const Fields& f) {
  f.require(!f.bytes("t_min") == !f.bytes("t_max"), "'t_min' and 't_max' come together");
  return make([canvas = slots_of(f, "canvas"), is_open = flags_of(f, "is_open"), step = counter_of(f, "step"),
               temperature = f.get<double>("temperature"), t_min = f.find<double>("t_min"),
               t_max = f.find<double>("t_max"), max_steps = max_steps_of(f), before = slots_of(f, "before"),
               was_open = slots_of<uint8_t>(f, "was_open"), step_temperature = f.get<float>("step_temperature"),
               length = f.size("length")] {
    std::memcpy(before, canvas, static_cast<size_t>(length) * sizeof(int32_t));
    std::memcpy(was_open, is_open, static_cast<size_t>(length));
    double value = *temperature != 0 ? *temperature : 1.;
    if (t_min) {
      const double remaining =
          static_cast<double>(*max_steps - *step) / *max_steps;  // 1 at the first step, 1 / max_steps at the last
      value = (*t_min + (*t_max - *t_min) * remaining) * value;
    }
    *step_temperature = static_cast<float>(value);
  });
}

// 4, 10: rows of slots that are not known yet, or stand behind one whose id has changed.
std::unique_ptr<Op> changed_rows(const Fields& f) {
  const int64_t length = f.size("length");
  return make([ids = slots_of(f, "ids"), positions = slots_of(f, "positions"), visible = slots_of(f, "visible"),
               step = f.get<int32_t>("step"), known = slots_of(f, "known_ids"), count = f.get<int32_t>("num_changed"),
               row_ids = slots_of(f, "row_ids"), row_positions = slots_of(f, "row_positions"),
               row_visible = slots_of(f, "row_visible"), num_rows = f.integer("num_rows", 1, length), length] {
    if (*step == 0) std::fill_n(known, length, -1);
    const int64_t first = std::mismatch(ids, ids + num_rows, known).first - ids;
    *count = static_cast<int32_t>(num_rows - first);
    std::copy(ids + first, ids + num_rows, known + first);
    std::copy(ids + first, ids + num_rows, row_ids);
    std::copy(positions + first, positions + num_rows, row_positions);
    std::copy(visible + first, visible + num_rows, row_visible);
  });
}

// 6
std::unique_ptr<Op> commit_threshold(const Fields& f) {
  f.require(!f.bytes("edit_threshold") == !f.bytes("max_post_edit_steps"), "the two limits of edits come together");
  return make([b = Block(f), argmax = slots_of(f, "argmax"), argmax_confidence = slots_of<float>(f, "argmax_confidence"),
               confidence = slots_of<float>(f, "confidence"), is_free = flags_of(f, "is_free"),
               threshold = f.get<float>("threshold"), min_commit = f.scalar("min_commit", 1, INT32_MAX),
               edit_threshold = f.find<float>("edit_threshold"),
               max_post_edit_steps = f.find<int32_t>("max_post_edit_steps"),
               num_full_steps = counter_of(f, "num_full_steps"), was_open = flags_of(f, "was_open")] {
    const bool is_last = b.is_last(), was_full = b.num_open() == 0;
    if (is_last) std::copy_n(b.is_open, b.length, b.committed);
    else choose_above(b.is_open, b.length, confidence, *threshold, *min_commit, b.committed);
    b.commit_chosen();
    *b.num_edits = 0;
    for (int64_t i = 0; edit_threshold && i < b.length; i++) {
      if (was_open[i] || !is_free[i] || argmax[i] == b.canvas[i] || !(argmax_confidence[i] > *edit_threshold)) continue;
      b.canvas[i] = argmax[i];
      b.committed[i] = 1;
      ++*b.num_edits;
    }
    *num_full_steps += was_full;
    const bool is_settled =
        !edit_threshold || *num_full_steps >= *max_post_edit_steps || (was_full && *b.num_edits == 0);
    b.finish(is_last || (b.num_open() == 0 && is_settled));
  });
}

std::unique_ptr<Op> commit_steps(const Fields& f) {
  return make([b = Block(f), confidence = slots_of<float>(f, "confidence")] {
    const int64_t quota = b.length / *b.max_steps + (*b.step < b.length % *b.max_steps);
    choose_best(b.is_open, b.length, confidence, b.is_last() ? b.length : quota, b.committed);
    b.commit_chosen();
    *b.num_edits = 0;
    b.finish(b.num_open() == 0);
  });
}

std::unique_ptr<Op> commit_sub_blocks(const Fields& f) {
  return make([b = Block(f), confidence = slots_of<float>(f, "confidence"), was_open = flags_of(f, "was_open"),
               is_free = flags_of(f, "is_free"), threshold = f.get<float>("threshold"),
               min_commit = f.scalar("min_commit", 1, INT32_MAX),
               run_length = f.scalar("sub_block_length", 1, INT32_MAX)] {
    const bool is_last = b.is_last(), is_first = *b.step == 0;
    // Slots behind the run of the first open one wait for their turn.
    const int64_t first =
        std::find_if(b.is_open, b.is_open + b.length, [](uint8_t open) { return open != 0; }) - b.is_open;
    const int64_t end = std::min<int64_t>(b.length, (first / *run_length + 1) * *run_length);
    std::copy_n(b.is_open, b.length, b.committed);
    if (!is_last) {
      choose_above(b.is_open, end, confidence, *threshold, *min_commit, b.committed);
      std::fill(b.committed + end, b.committed + b.length, uint8_t{0});
    }
    b.commit_chosen();
    // What was decided before the first step counts as this step's, whose row 0 says the same.
    for (int64_t i = 0; is_first && i < b.length; i++) b.committed[i] |= !was_open[i] && is_free[i];
    *b.num_edits = 0;
    b.finish(b.num_open() == 0);
  });
}

std::unique_ptr<Op> commit_entropy_bound(const Fields& f) {
  return make([b = Block(f), argmax = slots_of(f, "argmax"), entropy = slots_of<float>(f, "entropy"),
               is_free = flags_of(f, "is_free"), bound = f.get<double>("entropy_bound"),
               stop_entropy = f.get<double>("stop_entropy"), stability = f.get<int32_t>("stability_threshold"),
               num_repeats = counter_of(f, "num_repeats")] {
    const bool is_last = b.is_last(), is_first = *b.step == 0;
    bool any_changed = false;
    double total = 0;
    int64_t num_free = 0;
    for (int64_t i = 0; i < b.length; i++) {
      const int32_t id = is_free[i] ? argmax[i] : b.canvas[i];
      b.changed[i] = is_first ? is_free[i] : id != b.answer[i];
      b.answer[i] = id;
      any_changed |= b.changed[i] != 0;
      if (is_free[i]) total += entropy[i], num_free++;
    }
    // Lowest entropy first, while the sum of those before stays within the bound.
    std::fill_n(b.committed, b.length, uint8_t{0});
    double before = 0;
    for (int64_t n = 0; n < num_free && before <= *bound; n++) {
      int64_t next = -1;
      for (int64_t i = 0; i < b.length; i++)
        if (is_free[i] && !b.committed[i] && (next < 0 || entropy[i] < entropy[next])) next = i;
      b.committed[next] = 1;
      before += entropy[next];
    }
    *num_repeats = any_changed ? 0 : *num_repeats + 1;
    *b.num_edits = 0;
    ++*b.step;
    *b.is_done = is_last || (total / static_cast<double>(num_free) < *stop_entropy && *num_repeats >= *stability);
    for (int64_t i = 0; i < b.length; i++) {
      if (*b.is_done) b.canvas[i] = b.answer[i];
      else if (b.committed[i]) b.canvas[i] = b.token[i];
      b.is_open[i] = is_free[i] && !b.committed[i] && !*b.is_done;
    }
  });
}

// 7
std::unique_ptr<Op> settle(const Fields& f) {
  const int64_t slots = f.size("length"), vocab = 32 * std::min(f.count<uint32_t>("eos"), f.count<uint32_t>("stop"));
  return make([length = slots, is_sticky = f.flag("is_sticky"),
               answer = f.get<int32_t>("answer", slots, slots, 0, vocab - 1), is_open = flags_of(f, "is_open"),
               is_done = flag_of(f, "is_done"), eos = f.get<uint32_t>("eos"), stop = f.get<uint32_t>("stop"),
               max_tokens = f.get<int64_t>("max_tokens"), num_settled = f.scalar("num_settled", 0, slots),
               num_answer = f.scalar<int64_t>("num_answer", 0, INT64_MAX - 1),
               end_reason = f.scalar("end_reason", 0, kNonFinite), is_continued = f.get<int32_t>("is_continued"),
               wants_steps = f.get<int32_t>("wants_steps"), is_urgent = f.get<int32_t>("is_urgent")] {
    int64_t end = length;
    if (!*is_done) end = is_sticky ? std::find(is_open, is_open + length, 1) - is_open : *num_settled;
    for (; *num_settled < end && *end_reason == kGoesOn; ++*num_settled) {
      const int32_t id = answer[*num_settled];
      ++*num_answer;
      if (contains(eos, id)) *end_reason = kEos;
      else if (contains(stop, id)) *end_reason = kStopToken;
      else if (*num_answer >= *max_tokens) *end_reason = kMaxTokens;
    }
    *is_continued = !*is_done && *end_reason == kGoesOn;
    *is_urgent = *wants_steps || !*is_continued;
  });
}

// 8
std::unique_ptr<Op> renoise(const Fields& f) {
  return make([noise = Noise(f), length = f.size("length"), is_open = flags_of(f, "is_open"),
               step = f.get<int32_t>("step"), block_idx = f.get<int32_t>("block_idx"),
               canvas = slots_of(f, "canvas")] {
    for (int64_t i = 0; i < length; i++)
      if (is_open[i]) canvas[i] = noise(i, *step, *block_idx);
  });
}

// 5, 8: a request may ask for more than was recorded.
std::unique_ptr<Op> take_given(const Fields& f) {
  const int64_t length = f.size("length"), num_steps = f.size("num_steps"), block = product(num_steps, length);
  return make([given = f.get<int32_t>("given", block), num_blocks = f.count<int32_t>("given") / block,
               block_idx = counter_of(f, "block_idx"), step = counter_of(f, "step"), where = flags_of(f, "where"),
               values = slots_of(f, "values"), length, num_steps, block] {
    if (*block_idx >= num_blocks || *step >= num_steps)
      throw std::out_of_range("take_given: the given draws have no step " + std::to_string(*step) + " of block " +
                              std::to_string(*block_idx));
    const int32_t* row = given + *block_idx * block + *step * length;
    for (int64_t i = 0; i < length; i++)
      if (where[i]) values[i] = row[i];
  });
}

std::unique_ptr<Op> set_flag(const Fields& f) {
  return make([flag = f.get<int32_t>("flag"), value = static_cast<int32_t>(f.integer("value", 0, 1))] {
    *flag = value;
  });
}

// 3
std::unique_ptr<Op> finish_step(const Fields& f) {
  return make([is_done = flag_of(f, "is_done"), is_finite = flag_of(f, "is_finite"),
               cancel = f.get<int32_t>("cancel"), end_reason = f.scalar("end_reason", 0, kNonFinite),
               more_steps = f.get<int32_t>("more_steps")] {
    if (!*is_finite) *end_reason = kNonFinite;
    else if (*end_reason == kGoesOn && !*is_done && is_set(cancel)) *end_reason = kCancelled;
    *more_steps = !*is_done && *end_reason == kGoesOn;
  });
}

// 10
std::unique_ptr<Op> close_block(const Fields& f) {
  return make([end_reason = f.scalar("end_reason", 0, kNonFinite), needs_commit = f.get<int32_t>("needs_commit")] {
    *needs_commit = *end_reason == kGoesOn;
  });
}

std::unique_ptr<Op> commit_rows(const Fields& f) {
  const auto rows = static_cast<int32_t>(f.size("length"));
  return make([context = f.scalar("context", 0, INT32_MAX - rows), length = rows] {
    *context += length;
  });
}

std::unique_ptr<Op> next_block(const Fields& f) {
  return make([end_reason = f.scalar("end_reason", 0, kNonFinite), block_idx = counter_of(f, "block_idx"),
               num_pinned = f.get<int32_t>("num_pinned"), more_blocks = f.get<int32_t>("more_blocks")] {
    ++*block_idx;
    *num_pinned = 0;
    *more_blocks = *end_reason == kGoesOn;
  });
}

// One record: its kind, then the fields in the order of the listing.
class Publish : public Op {
 public:
  explicit Publish(const Fields& f)
      : kind_(static_cast<int32_t>(f.integer("kind"))), is_urgent_(f.find<int32_t>("is_urgent")), ring_(f.ring) {
    f.require(ring_ != nullptr, "the ring is missing");
    int64_t bytes = sizeof(kind_);
    for (const auto& [role, at] : f.memory) {
      if (role == "is_urgent") continue;
      fields_.push_back({f.get<uint8_t>(role.c_str(), at.bytes), static_cast<size_t>(at.bytes)});
      bytes += at.bytes;
    }
    if (bytes > ring_->slot_bytes()) f.refuse("a record of " + std::to_string(bytes) + " bytes does not fit the ring");
  }
  void run(const Context&) override {
    ring_->write(!is_urgent_ || *is_urgent_ != 0, [&](uint8_t* slot) {
      std::memcpy(slot, &kind_, sizeof(kind_));
      slot += sizeof(kind_);
      for (const auto& [pointer, bytes] : fields_) {
        std::memcpy(slot, pointer, bytes);
        slot += bytes;
      }
    });
  }

 private:
  int32_t kind_;
  const int32_t* is_urgent_;  // null: always
  std::shared_ptr<Ring> ring_;
  std::vector<std::pair<const void*, size_t>> fields_;
};

}  // namespace

std::unique_ptr<Op> make_loop_op(const Fields& f) {
  if (f.op == "publish") return std::make_unique<Publish>(f);
  using Maker = std::unique_ptr<Op> (*)(const Fields&);
  static constexpr std::pair<const char*, Maker> makers[] = {
      {"start_request", start_request},
      {"prefill_chunk", prefill_chunk},
      {"finish_chunk", finish_chunk},
      {"start_block", start_block},
      {"check_first", check_first},
      {"decide_first", decide_first},
      {"start_step", start_step},
      {"changed_rows", changed_rows},
      {"commit_threshold", commit_threshold},
      {"commit_steps", commit_steps},
      {"commit_sub_blocks", commit_sub_blocks},
      {"commit_entropy_bound", commit_entropy_bound},
      {"settle", settle},
      {"renoise", renoise},
      {"take_given", take_given},
      {"set_flag", set_flag},
      {"finish_step", finish_step},
      {"close_block", close_block},
      {"commit_rows", commit_rows},
      {"next_block", next_block},
  };
  for (const auto& [name, maker] : makers)
    if (f.op == name) return maker(f);
  return nullptr;
}

}  // namespace dlmrt::cpu
