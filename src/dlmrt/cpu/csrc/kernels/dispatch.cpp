// See dispatch.hpp.
#include "dispatch.hpp"

#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace dlmrt::cpu {

extern const KernelTable table_portable;
#if defined(__x86_64__)
extern const KernelTable table_avx2, table_avxvnni, table_avx512, table_avx512bf16;
#elif defined(__aarch64__)
extern const KernelTable table_neon, table_neondot;
#endif

namespace {

struct Candidate {
  const KernelTable* table;
  bool runs;
};

std::vector<Candidate> candidates() {  // best first
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512vnni");
  return {{&table_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16")},
          {&table_avx512, avx512},
          {&table_avxvnni, avx2 && __builtin_cpu_supports("avxvnni")},
          {&table_avx2, avx2},
          {&table_portable, true}};
#elif defined(__aarch64__)
#if defined(__linux__)
  const bool dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  const bool dot = true;  // every 64-bit Mac has it
#endif
  return {{&table_neondot, dot}, {&table_neon, true}, {&table_portable, true}};
#else
  return {{&table_portable, true}};
#endif
}

}  // namespace

const std::vector<const KernelTable*>& runnable_kernels() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> v;
    for (const Candidate& c : candidates())
      if (c.runs) v.push_back(c.table);
    return v;
  }();
  return tables;
}

const KernelTable& select_kernels(const std::string& name) {
  if (name.empty()) return *runnable_kernels().front();
  std::string possible;
  for (const KernelTable* t : runnable_kernels()) {
    if (t->name == name) return *t;
    possible += (possible.empty() ? "" : ", ") + std::string(t->name);
  }
  for (const Candidate& c : candidates())
    if (c.table->name == name)
      throw std::invalid_argument("instruction set '" + name +
                                  "' does not run on this machine; possible here: " + possible);
  throw std::invalid_argument("unknown instruction set '" + name + "'; possible here: " + possible);
}

}  // namespace dlmrt::cpu
