// The floating-point mode that kernels are written for, whatever the caller of the library has set.
//
// A mode belongs to a thread: a caller that flushes denormals to zero (others' fast-math start-up code does) would
// otherwise compute other numbers than the workers of its pool.
//
// Source: ours; registers as in the manuals of Intel and Arm.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dlmrt::cpu {

// Denormals kept, nearest even, no traps: on this thread until the object ends.
class PlainFloats {
 public:
  PlainFloats() : before_(read()) { write(kPlain); }
  ~PlainFloats() { write(before_); }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kPlain = 0x1f80;  // all exceptions masked
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kPlain = 0;
  static uint64_t read() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kPlain = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  uint64_t before_;
};

}  // namespace dlmrt::cpu
