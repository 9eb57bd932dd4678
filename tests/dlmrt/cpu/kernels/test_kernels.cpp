// C++ checks: one small transformer layer and a head, computed with every instruction set, thread count and division of
// work, must give the same bytes; the pool keeps its promises. Buffers are exact in size, so sanitizers see overruns
// and races.
//
// Numbers themselves are compared with numpy in the Python tests. Source: ours.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.hpp"
#include "pack.hpp"
#include "pool.hpp"

using namespace dlmrt::cpu;

namespace {

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

template <class T>
struct Buffer {
  std::unique_ptr<T, void (*)(void*)> memory;
  size_t count;
  explicit Buffer(int64_t n)
      : memory(static_cast<T*>(aligned_alloc(64, static_cast<size_t>(round_up(n * int64_t{sizeof(T)}, 64)))), free),
        count(static_cast<size_t>(n)) {
    std::memset(static_cast<void*>(memory.get()), 0, count * sizeof(T));
  }
  T* get() const { return memory.get(); }
};

struct Random {
  uint64_t state = 88172645463325252ull;
  float next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<float>(static_cast<int32_t>(state >> 40) - (1 << 23)) / (1 << 23);
  }
  Buffer<float> floats(int64_t n) {
    Buffer<float> b(n);
    for (int64_t i = 0; i < n; i++) b.get()[i] = next();
    return b;
  }
};

struct PackedWeight {
  Buffer<uint8_t> panels;
  Buffer<float> scale;
  Buffer<int32_t> sum;
  Weight view;
  PackedWeight(Random& random, DType dtype, int64_t n, int64_t k, int group = 0)
      : panels(num_panels(n) * panel_bytes(dtype, group, k)),
        scale(round_up(n, 16)),
        sum(round_up(n, 16)),
        view{dtype, group, n, k, panels.get(), scale.get(), sum.get()} {
    Buffer<float> w = random.floats(n * k);
    Buffer<uint8_t> nibbles(n * k / 2), block_scales(n * ceil_div(k, 16));
    for (size_t i = 0; i < nibbles.count; i++) nibbles.get()[i] = static_cast<uint8_t>(i * 37);
    for (size_t i = 0; i < block_scales.count; i++) block_scales.get()[i] = static_cast<uint8_t>(i % 60);
    const bool is_nvfp4 = dtype == DType::kNVFP4;
    const Source source{is_nvfp4 ? DType::kNVFP4 : DType::kF32,
                        0,
                        is_nvfp4 ? static_cast<void*>(nibbles.get()) : w.get(),
                        n,
                        k,
                        nullptr,
                        block_scales.get(),
                        .01f};
    std::vector<int8_t> codes(static_cast<size_t>(k));
    pack(&source, 1, view, {0, num_panels(n)}, codes.data());
  }
};

constexpr int64_t kM = 11, kD = 80, kF = 72, kVocab = 300, kHeads = 4, kKvHeads = 2, kHeadDim = 24, kContext = 70;

struct Model {
  DType weights, activations, cache_type;
  PackedWeight qkv, o, gate_up, down, head;
  Model(Random& r, DType weights, int group)
      : weights(weights),
        activations(weights == DType::kF32 || weights == DType::kBF16 ? weights : DType::kInt8),
        cache_type(weights == DType::kF32 ? DType::kF32 : DType::kBF16),
        qkv(r, weights, (kHeads + 2 * kKvHeads) * kHeadDim, kD, group),
        o(r, weights, kD, kHeads * kHeadDim, group),
        gate_up(r, weights, 2 * kF, kD, group),
        down(r, weights, kD, kF, group),
        head(r, weights, kVocab, kD, group) {}
};

enum class Division { kSplit, kPieces };

// f(Range, worker): pieces of `grain` units, each to whoever is free.
template <class F>
void hand_out(Pool& pool, int64_t units, int64_t grain, F f) {
  std::atomic<int64_t> next{0};
  pool.run([&](int worker) {
    for (int64_t begin; (begin = next.fetch_add(grain)) < units;)
      f(Range{begin, begin + grain < units ? begin + grain : units}, worker);
  });
}

// Everything a forward computes, as bytes that must not depend on the division of work.
struct Forward {
  const KernelTable& k;
  Pool& pool;
  Division division;
  std::vector<Buffer<uint8_t>> scratch;

  Forward(const KernelTable& k, Pool& pool, Division division) : k(k), pool(pool), division(division) {
    for (int i = 0; i < pool.size(); i++) scratch.emplace_back(1 << 20);
  }
  template <class F>
  void nodes(int64_t units, F f) {
    const auto g = [&](Range r, int worker) { f(r, scratch[static_cast<size_t>(worker)].get()); };
    division == Division::kSplit ? pool.split(units, 1, g) : hand_out(pool, units, 2, g);
  }
  void linear(const PackedWeight& w, const Operand& in, float* out, bool accumulate) {
    const LinearArgs t{w.view, in, kM, out, w.view.n, accumulate};
    nodes(num_panels(w.view.n), [&](Range r, void* s) { k.linear(t, r, s); });
  }

  std::vector<uint8_t> run(const Model& m) {
    Random random;
    Buffer<float> x = random.floats(kM * kD), norm = random.floats(kD), head_norm = random.floats(kHeadDim);
    Buffer<float> cos = random.floats((kContext + kM) * kHeadDim / 2),
                  sin = random.floats((kContext + kM) * kHeadDim / 2);
    Buffer<float> qkv(kM * m.qkv.view.n), attended(kM * kHeads * kHeadDim), gate_up(kM * 2 * kF);
    Buffer<uint8_t> cells(operand_bytes(m.activations, kM, 2 * kD)),
        q(kKvHeads * operand_bytes(m.cache_type, kM * kHeads / kKvHeads, kHeadDim));
    Buffer<float> scales(kM);
    KvCache cache{m.cache_type, 64, kKvHeads, kHeadDim, nullptr};
    Buffer<uint8_t> pages(2 * kv_page_bytes(cache));
    std::memset(pages.get(), 0x3c, pages.count);  // small positive numbers as context
    cache.pages = pages.get();
    const auto operand = [&](int64_t width) { return Operand{m.activations, 0, width, cells.get(), scales.get()}; };

    const RmsNormArgs first{x.get(), norm.get(), 1e-6f, kM, kD, nullptr, operand(kD)};
    nodes(kM, [&](Range r, void*) { k.rms_norm(first, r); });
    linear(m.qkv, operand(kD), qkv.get(), false);
    Buffer<int32_t> positions(kM), visible(kM);
    for (int i = 0; i < kM; i++)
      positions.get()[i] = kContext + i, visible.get()[i] = i % 3 ? kContext + kM : kContext + i;
    const QkvArgs split{qkv.get(),       m.qkv.view.n,    kM,    kHeads,    kHeadDim,
                        head_norm.get(), head_norm.get(), 1e-6f, cos.get(), sin.get(),
                        positions.get(), q.get(),         cache, 0.f,       0,
                        0};
    nodes(kM, [&](Range r, void*) { k.qk_norm_rope_store(split, r, {0, cache.num_kv_heads}); });
    const AttentionArgs attention{q.get(), cache, kM, kHeads, 64, visible.get(), attended.get(), kHeads * kHeadDim,
                                  nullptr};
    CHECK(attention_scratch_bytes(attention) <= 1 << 20);
    nodes(attention_units(attention), [&](Range r, void* s) { k.attention(attention, r, s); });
    const QuantizeArgs quantize{attended.get(), kHeads * kHeadDim, kM, operand(kHeads * kHeadDim)};
    nodes(kM, [&](Range r, void*) { k.quantize_rows(quantize, r); });
    linear(m.o, quantize.out, x.get(), true);
    nodes(kM, [&](Range r, void*) { k.rms_norm(first, r); });
    linear(m.gate_up, operand(kD), gate_up.get(), false);
    const GateArgs silu{gate_up.get(), gate_up.get() + kF, 2 * kF, kM, operand(kF), 0};
    nodes(kM, [&](Range r, void*) { k.gate_rows(silu, r); });
    linear(m.down, operand(kF), x.get(), true);
    nodes(kM, [&](Range r, void*) { k.rms_norm(first, r); });
    std::vector<uint8_t> bytes = head(m, operand(kD));
    const auto* p = reinterpret_cast<const uint8_t*>(x.get());
    bytes.insert(bytes.end(), p, p + x.count * sizeof(float));
    return bytes;
  }

  std::vector<uint8_t> head(const Model& m, const Operand& in) {
    const int64_t tiles = head_tiles(kVocab), stride = round_up(kM, 16), cells = tiles * stride;
    Buffer<float> a(cells), b(cells), c(cells), d(cells), e(cells), logits(kM * kVocab);
    Buffer<int32_t> ia(cells), ib(cells);
    std::vector<GumbelKey> keys;
    for (uint32_t i = 0; i < kM; i++) keys.push_back({{7, 8}, 1, 2, 1 | i << 8});
    const HeadPartials partials{stride, a.get(), b.get(), c.get(), ia.get(), d.get(), e.get(), ib.get()};
    const HeadArgs stats{m.head.view, in, kM, 0.f, nullptr, nullptr, keys.data(), partials, logits.get(), kVocab};
    CHECK(head_scratch_bytes(stats) <= 1 << 20);
    nodes(tiles, [&](Range r, void* s) { k.head_stats(stats, r, s); });
    Buffer<int32_t> out_ids(2 * kM);
    Buffer<float> out(5 * kM), z(kM * kD), table(kVocab * kD);
    float* f = out.get();
    const HeadMergeArgs merge{partials,   kM,         kVocab,     out_ids.get(), f,
                              f + kM,     f + 2 * kM, out_ids.get() + kM, f + 3 * kM, f + 4 * kM};
    nodes(ceil_div(kM, 16), [&](Range r, void*) { k.head_merge(merge, r); });
    const DType kind = m.cache_type;
    Buffer<uint8_t> probs(operand_bytes(kind, kM, kVocab));
    const ProbabilitiesArgs probabilities{logits.get(), kVocab, kM, f + kM, {kind, 0, kVocab, probs.get(), nullptr}};
    nodes(tiles, [&](Range r, void*) { k.probabilities(probabilities, r); });
    const SoftEmbeddingArgs soft{probabilities.out, table.get(), kM, kind == DType::kF32 ? kD : kD / 2, 1.f, z.get()};
    nodes(num_panels(soft.width), [&](Range r, void*) { k.soft_embedding(soft, r); });
    std::vector<uint8_t> bytes(out_ids.count * 4 + out.count * 4);
    std::memcpy(bytes.data(), out_ids.get(), out_ids.count * 4);
    std::memcpy(bytes.data() + out_ids.count * 4, out.get(), out.count * 4);
    return bytes;
  }
};

void check_forward() {
  const std::pair<DType, int> kinds[] = {
      {DType::kF32, 0}, {DType::kBF16, 0}, {DType::kInt8, 0}, {DType::kNVFP4, 16}, {DType::kInt4, 32}};
  std::map<int, std::unique_ptr<Pool>> pools;
  for (int threads : {1, 2, 3, 5}) pools[threads] = std::make_unique<Pool>(threads);
  for (const auto& [dtype, group] : kinds) {
    Random random;
    const Model model(random, dtype, group);
    std::vector<uint8_t> portable = Forward(select_kernels("portable"), *pools[1], Division::kSplit).run(model);
    for (const KernelTable* k : runnable_kernels()) {
      const std::vector<uint8_t> expected = Forward(*k, *pools[1], Division::kSplit).run(model);
      for (const auto& [threads, pool] : pools)
        for (Division d : {Division::kSplit, Division::kPieces}) CHECK(Forward(*k, *pool, d).run(model) == expected);
      if (dtype == DType::kF32 || std::string(k->name) != "avx512bf16")
        CHECK(portable == expected);  // all of it, not only the products
    }
  }
}

void check_pool() {
  for (int threads : {1, 2, 5}) {
    Pool pool(threads);
    CHECK(pool.size() == threads);
    std::vector<int> seen(1000);
    pool.split(1000, 7, [&](Range r, int) {
      for (int64_t i = r.begin; i < r.end; i++) seen[static_cast<size_t>(i)]++;
    });
    pool.split(0, 1, [&](Range, int) { CHECK(false); });
    for (int s : seen) CHECK(s == 1);
    // Nobody leaves a meeting before all have come, each time.
    Meeting meeting(threads);
    std::atomic<int> count{0};
    pool.run([&](int) {
      for (int i = 1; i <= 200; i++) {
        count++;
        meeting.wait();
        const int now = count;
        CHECK(now >= i * threads && now < (i + 1) * threads);
        meeting.wait();
      }
    });
    pool.split(1000, 7, [&](Range r, int) { CHECK(r.begin % 7 == 0 && (r.end % 7 == 0 || r.end == 1000)); });
  }
  bool refused = false;
  try {
    Pool none(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

// Two callers: each holds the pool for a whole run, the other waits.
void check_hold() {
  Pool pool(3);
  int inside = 0, total = 0;
  const auto caller = [&] {
    for (int i = 0; i < 20; i++) {
      const auto lock = pool.hold();
      CHECK(++inside == 1);
      std::atomic<int> count{0};
      pool.run([&](int) { count++; });
      total += count;
      inside--;
    }
  };
  std::thread other(caller);
  caller();
  other.join();
  CHECK(total == 2 * 20 * 3);
}

}  // namespace

int main() {
  check_pool();
  check_hold();
  check_forward();
  std::puts("ok");
}
