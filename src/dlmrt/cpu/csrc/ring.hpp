// The ring: fixed-size records from the loop to the host, in order, none lost.
//
// One writer, one reader. A writer that finds the ring full waits, so a slow reader slows the loop instead of losing
// records; `abandon` ends the waiting for good and lets the loop run out unseen. The reader is woken when a record is
// marked urgent or the ring is half full: on a machine whose every core computes, waking it at each step would cost more
// than it tells. A child of fork() has an empty ring and no writer.
//
// Source: ours.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kernels/fork.hpp"

namespace dlmrt::cpu {

class Ring {
 public:
  Ring(int slots, int64_t slot_bytes)
      : slots_(slots), slot_bytes_(slot_bytes), bytes_(static_cast<size_t>(slots * slot_bytes)) {}

  int64_t slot_bytes() const { return slot_bytes_; }

  // Forgets all records and a previous abandon.
  void reset() {
    Shared& s = *shared_;
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.written = s.read = 0;
    s.is_urgent = s.is_abandoned = false;
  }

  // fill(slot) writes the next record.
  template <class F>
  void write(bool is_urgent, F&& fill) {
    Shared& s = *shared_;
    std::unique_lock<std::mutex> lock(s.mutex);
    if (s.written - s.read == slots_) {
      s.readable.notify_one();
      s.writable.wait(lock, [&] { return s.written - s.read < slots_ || s.is_abandoned; });
    }
    if (s.is_abandoned) return;
    uint8_t* slot = at(s.written);
    lock.unlock();
    fill(slot);  // the slot is the writer's alone
    lock.lock();
    s.written++;
    s.is_urgent |= is_urgent;
    if (s.is_urgent || s.written - s.read >= slots_ / 2) s.readable.notify_one();
  }

  // Waits until something urgent is there, the ring is half full, or `seconds` have passed; then take(record) for each.
  template <class F>
  void read(double seconds, F&& take) {
    Shared& s = *shared_;
    std::unique_lock<std::mutex> lock(s.mutex);
    s.readable.wait_for(lock, std::chrono::duration<double>(seconds),
                         [&] { return s.is_urgent || s.written - s.read >= slots_ / 2; });
    const int64_t end = s.written;
    s.is_urgent = false;
    for (int64_t i = s.read; i < end; i++) {
      lock.unlock();
      take(at(i));
      lock.lock();
      s.read = i + 1;
    }
    s.writable.notify_one();
  }

  void abandon() {
    Shared& s = *shared_;
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.is_abandoned = true;
    s.writable.notify_one();
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable readable, writable;
    int64_t written = 0, read = 0;
    bool is_urgent = false, is_abandoned = false;
  };
  uint8_t* at(int64_t index) { return bytes_.data() + index % slots_ * slot_bytes_; }

  const int64_t slots_, slot_bytes_;
  std::vector<uint8_t> bytes_;
  Forkable<Shared> shared_;
};

}  // namespace dlmrt::cpu
