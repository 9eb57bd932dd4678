// Rule joint_threshold_indel: a step's writes, with deletions and splits that move text within the block.
//
// These must equal indel_step of dlmrt/decode/rules.py slot for slot. The rule has two parts, since some steps look for
// the best id outside a set that the first part decides: what each slot wants, then what becomes of the block.
//
// Source: ours.
#include "loop.hpp"

namespace dlmrt::cpu {
namespace {

void insert(uint32_t* bits, int32_t id) { bits[id / 32] |= 1u << (id % 32); }

// The ids with a meaning of their own.
struct EditIds {
  explicit EditIds(const Fields& f)
      : mask(id_of(f, "mask_token_id")), remove(id_of(f, "delete_token_id")), split(id_of(f, "split_token_id")) {}
  static int32_t id_of(const Fields& f, const char* name) {
    return static_cast<int32_t>(f.integer(name, 0, f.size("vocab_size") - 1));
  }
  bool contain(int32_t id) const { return id == mask || id == remove || id == split; }
  int32_t mask, remove, split;
};

class ProposeEdits : public Op {
 public:
  explicit ProposeEdits(const Fields& f)
      : ids_(f),
        length_(f.size("length")),
        vocab_(f.size("vocab_size")),
        words_(ceil_div(vocab_, int64_t{32})),
        argmax_(slots_of(f, "argmax")),
        token_(slots_of(f, "token")),
        argmax_confidence_(slots_of<float>(f, "argmax_confidence")),
        confidence_(slots_of<float>(f, "confidence")),
        is_open_(flags_of(f, "was_open")),
        is_free_(flags_of(f, "is_free")),
        banned_(f.get<uint32_t>("banned", words_)),
        threshold_(f.get<float>("threshold")),
        edit_threshold_(f.get<float>("edit_threshold")),
        budget_(f.get<int32_t>("max_post_edit_steps")),
        max_steps_(max_steps_of(f)),
        canvas_(slots_of(f, "canvas")),
        step_(f.scalar("step", 0, f.count<int32_t>("seen") / length_ - 1)),
        num_full_steps_(counter_of(f, "num_full_steps")),
        is_original_(flags_of(f, "is_original")),
        seen_(f.get<int32_t>("seen", length_)),
        tried_(f.get<uint32_t>("tried", product(length_, words_))),
        wanted_(slots_of(f, "wanted")),
        committed_(slots_of<uint8_t>(f, "committed")),
        is_other_(slots_of<uint8_t>(f, "is_other")),
        other_banned_(f.get<uint32_t>("other_banned", words_)),
        needs_other_(f.get<int32_t>("needs_other")),
        num_edits_(f.get<int32_t>("num_edits")),
        is_done_(f.get<int32_t>("is_done")) {}

  void run(const Context&) override {
    if (*step_ == 0) {
      std::copy_n(is_open_, length_, is_original_);
      std::fill_n(tried_, length_ * words_, 0u);
    }
    const bool is_final = choose();
    *num_edits_ = 0;
    bool any_written = false;
    for (int64_t i = 0; i < length_; i++) {
      const bool is_edited =
          !is_open_[i] && is_free_[i] && argmax_[i] != canvas_[i] && argmax_confidence_[i] > *edit_threshold_;
      wanted_[i] = committed_[i] ? token_[i] : is_edited ? argmax_[i] : canvas_[i];
      committed_[i] |= is_edited;
      *num_edits_ += is_edited;
      any_written |= committed_[i] != 0;
    }
    *is_done_ = is_final || !any_written;
    if (is_final) avoid_edit_ids();
    else avoid_repeats();
    std::copy_n(canvas_, length_, seen_ + *step_ * length_);
  }

 private:
  // Which open slots are written; whether this step is the last one, which writes no id of EditIds.
  bool choose() const {
    int64_t num_open = 0, num_original = 0;
    for (int64_t i = 0; i < length_; i++) {
      committed_[i] = is_open_[i];
      num_open += is_open_[i];
      num_original += is_open_[i] && is_original_[i];
    }
    *num_full_steps_ += num_original == 0;
    const bool is_final = *num_full_steps_ >= std::max(*budget_, 1) || *step_ + 1 >= *max_steps_;
    if (!num_original || is_final) return is_final;
    // At least one original mask is among them: only so many others are open.
    choose_above(is_open_, length_, confidence_, *threshold_, 1 + num_open - num_original, committed_);
    if (*budget_ != 0) return false;
    for (int64_t i = 0; i < length_; i++)
      if (is_open_[i] && is_original_[i] && !committed_[i]) return false;
    std::copy_n(is_open_, length_, committed_);
    return true;
  }

  void avoid_edit_ids() const {
    bool is_needed = false;
    for (int64_t i = 0; i < length_; i++) is_needed |= is_other_[i] = committed_[i] && ids_.contain(wanted_[i]);
    *needs_other_ = is_needed;
    if (!is_needed) return;
    std::copy_n(banned_, words_, other_banned_);
    for (int32_t id : {ids_.mask, ids_.remove, ids_.split}) insert(other_banned_, id);
    drop_if_none_is_left();
  }
  // A canvas that was seen before would go round for ever: the least certain slot tries an id that it has not had.
  void avoid_repeats() const {
    std::fill_n(is_other_, length_, uint8_t{0});
    *needs_other_ = 0;
    int64_t slot = -1;
    float least = 0;
    for (int64_t i = 0; i < length_; i++) {
      if (!committed_[i] || wanted_[i] == canvas_[i]) continue;
      const float score = is_open_[i] ? confidence_[i] : argmax_confidence_[i];
      if (slot < 0 || score < least) slot = i, least = score;
    }
    if (slot < 0 || !was_seen()) return;
    is_other_[slot] = 1;
    *needs_other_ = 1;
    for (int64_t word = 0; word < words_; word++) other_banned_[word] = banned_[word] | tried_[slot * words_ + word];
    drop_if_none_is_left();
  }
  bool was_seen() const {
    for (int64_t i = 0; i < *step_; i++)
      if (std::equal(canvas_, canvas_ + length_, seen_ + i * length_)) return true;
    return false;
  }
  void drop_if_none_is_left() const {
    for (int32_t id = 0; id < vocab_; id++)
      if (!contains(other_banned_, id)) return;
    std::fill_n(is_other_, length_, uint8_t{0});
    *needs_other_ = 0;
  }

  EditIds ids_;
  int64_t length_, vocab_, words_;
  const int32_t *argmax_, *token_;
  const float *argmax_confidence_, *confidence_;
  const uint8_t *is_open_, *is_free_;
  const uint32_t* banned_;
  const float *threshold_, *edit_threshold_;
  const int32_t *budget_, *max_steps_, *canvas_, *step_;
  int32_t* num_full_steps_;
  uint8_t* is_original_;
  int32_t* seen_;
  uint32_t* tried_;
  int32_t* wanted_;
  uint8_t *committed_, *is_other_;
  uint32_t* other_banned_;
  int32_t *needs_other_, *num_edits_, *is_done_;
};

class ApplyEdits : public Op {
 public:
  explicit ApplyEdits(const Fields& f)
      : ids_(f),
        length_(f.size("length")),
        vocab_(f.size("vocab_size")),
        words_(ceil_div(vocab_, int64_t{32})),
        wanted_(f.get<int32_t>("wanted", length_, length_, 0, vocab_ - 1)),
        other_(f.get<int32_t>("other", length_, length_, 0, vocab_ - 1)),
        committed_(flags_of(f, "committed")),
        is_other_(flags_of(f, "is_other")),
        is_free_(flags_of(f, "is_free")),
        canvas_(slots_of(f, "canvas")),
        is_original_(flags_of(f, "is_original")),
        tried_(f.get<uint32_t>("tried", product(length_, words_))),
        step_(counter_of(f, "step")),
        answer_(slots_of(f, "answer")),
        is_open_(slots_of<uint8_t>(f, "is_open")),
        changed_(slots_of<uint8_t>(f, "changed")),
        next_(static_cast<size_t>(length_)),
        next_original_(static_cast<size_t>(length_)) {}

  void run(const Context&) override {
    size_t end = 0;
    const auto put = [&](int32_t id, uint8_t is_original) {
      if (end == next_.size()) return;
      next_[end] = id;
      next_original_[end++] = is_original;
    };
    for (int64_t i = 0; i < length_; i++) {
      const int32_t id = is_other_[i] ? other_[i] : wanted_[i];
      if (committed_[i]) insert(tried_ + i * words_, id);
      if (!is_free_[i]) {
        put(canvas_[i], is_original_[i]);
      } else if (id == ids_.split) {
        put(ids_.mask, 0);
        put(canvas_[i], is_original_[i]);
      } else if (id != ids_.remove) {
        put(id, is_original_[i]);
      }
    }
    while (end < next_.size()) put(ids_.mask, 0);
    for (int64_t i = 0; i < length_; i++) {
      const int32_t id = next_[static_cast<size_t>(i)];
      changed_[i] = id != canvas_[i];
      canvas_[i] = answer_[i] = id;
      is_original_[i] = next_original_[static_cast<size_t>(i)];
      is_open_[i] = is_free_[i] && id == ids_.mask;
    }
    ++*step_;
  }

 private:
  EditIds ids_;
  int64_t length_, vocab_, words_;
  const int32_t *wanted_, *other_;
  const uint8_t *committed_, *is_other_, *is_free_;
  int32_t* canvas_;
  uint8_t* is_original_;
  uint32_t* tried_;
  int32_t *step_, *answer_;
  uint8_t *is_open_, *changed_;
  std::vector<int32_t> next_;
  std::vector<uint8_t> next_original_;
};

}  // namespace

std::unique_ptr<Op> make_edit_op(const Fields& f) {
  if (f.op == "propose_edits") return std::make_unique<ProposeEdits>(f);
  if (f.op == "apply_edits") return std::make_unique<ApplyEdits>(f);
  return nullptr;
}

}  // namespace dlmrt::cpu
