// C interface of the kernels for the Python tests: every kernel by instruction set name, split over a pool of threads.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "dispatch.hpp"
#include "pack.hpp"
#include "pool.hpp"
#include "route.hpp"

using namespace dlmrt::cpu;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

Pool& pool(int threads) {
  static std::map<int, std::unique_ptr<Pool>> pools;
  std::unique_ptr<Pool>& p = pools[threads];
  if (!p) p = std::make_unique<Pool>(threads);
  return *p;
}

// Scratch of each worker, allocated to the byte so that a sanitizer sees overruns.
struct Scratch {
  std::vector<void*> blocks;
  Scratch(int threads, int64_t bytes) {
    for (int i = 0; i < threads; i++)
      blocks.push_back(bytes ? aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64))) : nullptr);
  }
  ~Scratch() {
    for (void* b : blocks) free(b);
  }
};

template <class F>
void spread(int threads, int64_t units, int64_t scratch_bytes, F f) {
  Scratch scratch(threads, scratch_bytes);
  pool(threads).split(units, 1, [&](Range r, int worker) { f(r, scratch.blocks[static_cast<size_t>(worker)]); });
}

}  // namespace

// Names that run here, separated by spaces.
EXPORT void dlmrt_runnable(char* out, int size) {
  std::string names;
  for (const KernelTable* t : runnable_kernels()) names += (names.empty() ? "" : " ") + std::string(t->name);
  strncpy(out, names.c_str(), static_cast<size_t>(size));
}
// Name that was selected, or the error message; returns whether it was an error.
EXPORT int dlmrt_select(const char* name, char* out, int size) {
  try {
    strncpy(out, select_kernels(name).name, static_cast<size_t>(size));
    return 0;
  } catch (const std::invalid_argument& e) {
    strncpy(out, e.what(), static_cast<size_t>(size));
    return 1;
  }
}
EXPORT int dlmrt_default_num_threads() { return default_num_threads(); }
EXPORT int64_t dlmrt_operand_bytes(int dtype, int64_t rows, int64_t width) {
  return operand_bytes(static_cast<DType>(dtype), rows, width);
}
EXPORT int64_t dlmrt_panel_bytes(int dtype, int64_t group, int64_t k) {
  return panel_bytes(static_cast<DType>(dtype), group, k);
}
EXPORT int64_t dlmrt_kv_page_bytes(const KvCache* c) { return kv_page_bytes(*c); }
EXPORT void dlmrt_pack(const Source* sources, int count, const Weight* into, int threads) {
  std::vector<int8_t> codes(static_cast<size_t>(threads * into->k));
  pool(threads).split(num_panels(into->n), 1,
                      [&](Range r, int worker) { pack(sources, count, *into, r, codes.data() + worker * into->k); });
}
// Workers that ran in a child of this process, after the pool was used here: -1 on failure.
EXPORT int dlmrt_count_workers(int threads) {
  std::atomic<int> count{0};
  pool(threads).run([&](int) { count++; });
  return count;
}

EXPORT void dlmrt_linear(const char* isa, const LinearArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, num_panels(t->weight.n), weight_scratch_bytes(t->weight),
         [&](Range r, void* s) { k.linear(*t, r, s); });
}
#define ROWS(name, Args)                                                  \
  EXPORT void dlmrt_##name(const char* isa, const Args* t, int threads) { \
    const KernelTable& k = select_kernels(isa);                           \
    spread(threads, t->rows, 0, [&](Range r, void*) { k.name(*t, r); });  \
  }
ROWS(rms_norm, RmsNormArgs)
ROWS(quantize_rows, QuantizeArgs)
ROWS(gate_rows, GateArgs)
// Both passes, each part of the columns with numbers of its own for the first.
EXPORT void dlmrt_gate_columns(const char* isa, const GateArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  const int64_t panels = ceil_div(t->out.width, kPanel);
  std::vector<std::vector<int32_t>> tops(threads, std::vector<int32_t>(t->rows));
  pool(threads).split(panels, 1, [&](Range r, int worker) { k.gate_columns(*t, r, tops[worker].data()); });
  for (const auto& part : tops)
    for (int64_t m = 0; m < t->rows; m++) tops[0][m] = std::max(tops[0][m], part[m]);
  pool(threads).split(panels, 1, [&](Range r, int) { k.pack_columns(*t, r, tops[0].data()); });
}
ROWS(scale, ScaleArgs)
ROWS(soft_cap, SoftCapArgs)
ROWS(combine, CombineArgs)
ROWS(scaled_add, ScaledAddArgs)
EXPORT void dlmrt_qk_norm_rope_store(const char* isa, const QkvArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, t->rows, 0, [&](Range rows, void*) {
    for (int64_t h = 0; h < t->cache.num_kv_heads; h++) k.qk_norm_rope_store(*t, rows, {h, h + 1});
  });
}
ROWS(embed, EmbedArgs)
EXPORT void dlmrt_expert_linear(const char* isa, const ExpertLinearArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, t->runs->count * num_panels(t->weight.n), weight_scratch_bytes(t->weight),
         [&](Range r, void* s) { k.expert_linear(*t, r, s); });
}
// Routing is the same code on every machine; the name is not read.
EXPORT void dlmrt_route_sigmoid(const char*, const RouteSigmoidArgs* t, int threads) {
  spread(threads, ceil_div(t->rows, t->block_length), route_scratch_bytes(t->experts, t->block_length),
         [&](Range r, void* s) { route_sigmoid(*t, r, s); });
}
EXPORT void dlmrt_route_softmax(const char*, const RouteSoftmaxArgs* t, int threads) {
  spread(threads, t->rows, route_scratch_bytes(t->experts, 1), [&](Range r, void* s) { route_softmax(*t, r, s); });
}
EXPORT void dlmrt_group_choices(const char*, const GroupArgs* t, int) { group_choices(*t); }
EXPORT void dlmrt_gather_rows(const GatherArgs* t, int64_t rows, int threads) {
  spread(threads, rows * t->top_k, 0, [&](Range r, void*) { gather_rows(*t, r); });
}
EXPORT int64_t dlmrt_expert_rows(int64_t copies, int64_t experts) { return expert_rows(copies, experts); }
EXPORT void dlmrt_attention(const char* isa, const AttentionArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, attention_units(*t), attention_scratch_bytes(*t), [&](Range r, void* s) { k.attention(*t, r, s); });
}
EXPORT void dlmrt_head_stats(const char* isa, const HeadArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, head_tiles(t->weight.n), head_scratch_bytes(*t), [&](Range r, void* s) { k.head_stats(*t, r, s); });
}
EXPORT void dlmrt_head_merge(const char* isa, const HeadMergeArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, ceil_div(t->rows, 16), 0, [&](Range r, void*) { k.head_merge(*t, r); });
}
EXPORT void dlmrt_probabilities(const char* isa, const ProbabilitiesArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, head_tiles(t->out.width), 0, [&](Range r, void*) { k.probabilities(*t, r); });
}
EXPORT void dlmrt_soft_embedding(const char* isa, const SoftEmbeddingArgs* t, int threads) {
  const KernelTable& k = select_kernels(isa);
  spread(threads, num_panels(t->width), 0, [&](Range r, void*) { k.soft_embedding(*t, r); });
}
