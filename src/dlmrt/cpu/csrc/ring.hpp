// The ring: fixed-size records from the loop to the host, in order, none lost.
//
// One writer, one reader. A writer that finds the ring full waits, so a slow reader slows the loop instead of losing
// records; `abandon` ends the waiting for good and lets the loop run out unseen. The reader is woken when a record is
// marked urgent or the ring is half full: on a machine whose every core computes, waking it at each step would cost more
// than it tells.
//
// Source: ours.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace dlmrt::cpu {

class Ring {
 public:
  Ring(int slots, int64_t slot_bytes)
      : slots_(slots), slot_bytes_(slot_bytes), bytes_(static_cast<size_t>(slots * slot_bytes)) {}

  int64_t slot_bytes() const { return slot_bytes_; }

  // Forgets all records and a previous abandon.
  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    written_ = read_ = 0;
    is_urgent_ = is_abandoned_ = false;
  }

  // fill(slot) writes the next record.
  template <class F>
  void write(bool is_urgent, F&& fill) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (written_ - read_ == slots_) {
      readable_.notify_one();
      writable_.wait(lock, [&] { return written_ - read_ < slots_ || is_abandoned_; });
    }
    if (is_abandoned_) return;
    uint8_t* slot = at(written_);
    lock.unlock();
    fill(slot);  // the slot is the writer's alone
    lock.lock();
    written_++;
    is_urgent_ |= is_urgent;
    if (is_urgent_ || written_ - read_ >= slots_ / 2) readable_.notify_one();
  }

  // Waits until something urgent is there, the ring is half full, or `seconds` have passed; then take(record) for each.
  template <class F>
  void read(double seconds, F&& take) {
    std::unique_lock<std::mutex> lock(mutex_);
    readable_.wait_for(lock, std::chrono::duration<double>(seconds),
                       [&] { return is_urgent_ || written_ - read_ >= slots_ / 2; });
    const int64_t end = written_;
    is_urgent_ = false;
    for (int64_t i = read_; i < end; i++) {
      lock.unlock();
      take(at(i));
      lock.lock();
      read_ = i + 1;
    }
    writable_.notify_one();
  }

  void abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_abandoned_ = true;
    writable_.notify_one();
  }

 private:
  uint8_t* at(int64_t index) { return bytes_.data() + index % slots_ * slot_bytes_; }

  const int64_t slots_, slot_bytes_;
  std::vector<uint8_t> bytes_;
  std::mutex mutex_;
  std::condition_variable readable_, writable_;
  int64_t written_ = 0, read_ = 0;
  bool is_urgent_ = false, is_abandoned_ = false;
};

}  // namespace dlmrt::cpu
