// Kernel efficiency as ratios of what this machine can do, all measured in turn in one run. The last line is JSON.
//
// Compute: the instruction peak (independent chains in registers) and the kernel alternate, on the same threads.
// Bandwidth: the kernel against the best of plain reads of the same memory. Weights are cycled through more than 190 MB,
// as they come from memory in a real forward. One thread is timed by its CPU time, so that other processes cost accuracy
// but do not fake slowness; several are timed by the wall, the divided work of a node of the runner included.
//
// Usage: bench_kernels [--threads N] [--isa NAME] [--pairs N] [--only TEXT]
// Left out: AMX, NUMA. Source: ours; method from docs/benchmarks.md. benchmarks/cpu_kernels.py builds and runs it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "memory.hpp"
#include "pack.hpp"
#include "pool.hpp"

using namespace dlmrt::cpu;

namespace {

double clock_s(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
double cpu_s(const std::function<void()>& f) {
  const double begin = clock_s(CLOCK_THREAD_CPUTIME_ID);
  f();
  return clock_s(CLOCK_THREAD_CPUTIME_ID) - begin;
}
// On several threads: f runs them.
double spent_s(const Pool& pool, const std::function<void()>& f) {
  if (pool.size() == 1) return cpu_s(f);
  const double begin = clock_s(CLOCK_MONOTONIC);
  f();
  return clock_s(CLOCK_MONOTONIC) - begin;
}
double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

std::string list(const std::vector<double>& values) {
  std::string text;
  for (double v : values) text += (text.empty() ? "" : ", ") + std::to_string(v);
  return "[" + text + "]";
}

template <class T>
struct Buffer {
  AlignedBytes memory;
  explicit Buffer(int64_t n) : memory(n * int64_t{sizeof(T)}) {
    std::memset(memory.data(), 1, static_cast<size_t>(n) * sizeof(T));
  }
  T* get() const { return static_cast<T*>(memory.data()); }
};

// ---- peaks: twelve independent chains of one instruction
#if defined(__x86_64__)
#define CHAIN(I, REG, INS) INS " %%" REG "14,%%" REG "15,%%" REG #I "\n\t"
#define CHAINS(REG, INS)                                                                                              \
  [](int64_t n) {                                                                                                     \
    for (int64_t i = 0; i < n; i++)                                                                                   \
      asm volatile(CHAIN(0, REG, INS) CHAIN(1, REG, INS) CHAIN(2, REG, INS) CHAIN(3, REG, INS) CHAIN(4, REG, INS)     \
                       CHAIN(5, REG, INS) CHAIN(6, REG, INS) CHAIN(7, REG, INS) CHAIN(8, REG, INS) CHAIN(9, REG, INS) \
                           CHAIN(10, REG, INS) CHAIN(11, REG, INS)::                                                  \
                               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",      \
                                 "xmm10", "xmm11");                                                                   \
  }
#endif

struct Peak {  // ops of one call of 12 instructions; run may be null: no peak known
  double ops = 0;
  void (*run)(int64_t) = nullptr;
};
Peak peak_of([[maybe_unused]] const std::string& isa, [[maybe_unused]] DType dtype) {
#if defined(__x86_64__)
  const bool wide = isa.rfind("avx512", 0) == 0;
  if (dtype == DType::kF32 || (dtype == DType::kBF16 && isa != "avx512bf16")) {
    if (wide) return {12. * 32, CHAINS("zmm", "vfmadd231ps")};
    if (isa != "portable") return {12. * 16, CHAINS("ymm", "vfmadd231ps")};
  } else if (dtype == DType::kBF16) {
    return {12. * 64, CHAINS("zmm", "vdpbf16ps")};
  } else if (wide) {
    return {12. * 128, CHAINS("zmm", "vpdpbusd")};
  } else if (isa == "avxvnni") {
    return {12. * 64, CHAINS("ymm", "%{vex%} vpdpbusd")};
  }
#endif
  return {};
}

struct Layer {  // copies of one weight, enough to leave the caches, and rows to multiply
  DType dtype;
  int64_t m, n, k, group, copies, next = 0;
  Buffer<uint8_t> panels;
  Buffer<float> scale, scales, out;
  Buffer<int32_t> sum;
  Buffer<uint8_t> cells;
  std::vector<Buffer<uint8_t>> scratch;  // of each worker

  Layer(DType dtype, int64_t m, int64_t n, int64_t k)
      : dtype(dtype),
        m(m),
        n(n),
        k(k),
        group(dtype == DType::kNVFP4  ? 16
              : dtype == DType::kInt4 ? 128
                                      : 0),
        copies(std::max<int64_t>(2, 192'000'000 / bytes_of(dtype, n, k, group))),
        panels(copies * bytes_of(dtype, n, k, group)),
        scale(n),
        scales(m),
        out(m * n),
        sum(n),
        cells(operand_bytes(input(), m, k)) {}
  static int64_t bytes_of(DType t, int64_t n, int64_t k, int64_t group) {
    return num_panels(n) * panel_bytes(t, group, k);
  }
  int64_t bytes() const { return bytes_of(dtype, n, k, group); }
  double ops() const { return 2. * static_cast<double>(m * n) * static_cast<double>(k); }
  DType input() const { return dtype == DType::kF32 || dtype == DType::kBF16 ? dtype : DType::kInt8; }
  void run(const KernelTable& t, Pool& pool) {
    const Weight w{dtype,    static_cast<int32_t>(group), n, k, panels.get() + next++ % copies * bytes(), scale.get(),
                   sum.get()};
    while (scratch.size() < static_cast<size_t>(pool.size())) scratch.emplace_back(weight_scratch_bytes(w) + 64);
    const LinearArgs args{w, {input(), 0, k, cells.get(), scales.get()}, m, out.get(), n, 0};
    pool.split(num_panels(n), 1,
               [&](Range r, int worker) { t.linear(args, r, scratch[static_cast<size_t>(worker)].get()); });
  }
};

struct Bench {
  const KernelTable& table;
  Pool& pool;
  int pairs;
  std::string only, json;

  bool wanted(const std::string& name) const { return only.empty() || name.find(only) != std::string::npos; }
  // What each pair gave: a ratio, and a value in a unit.
  void report(const std::string& name, const std::vector<double>& ratios, const char* unit,
              const std::vector<double>& values) {
    std::printf("%-40s %6.3f  %8.1f %s\n", name.c_str(), median(ratios), median(values), unit);
    std::fflush(stdout);
    json += (json.empty() ? "{\"name\": \"" : ", {\"name\": \"") + name + "\", \"unit\": \"" + unit + "\", ";
    json += "\"ratios\": " + list(ratios) + ", \"values\": " + list(values) + "}";
  }

  void share_of_peak(const std::string& name, DType dtype, int64_t m, int64_t n, int64_t k) {
    const Peak peak = peak_of(table.name, dtype);
    if (!wanted(name) || !peak.run) return;
    Layer layer(dtype, m, n, k);
    const int64_t calls = std::max<int64_t>(1, static_cast<int64_t>(8e9 * pool.size() / layer.ops()));
    const int64_t chains = 400'000;
    std::vector<double> ratios, rates;
    for (int i = 0; i < pairs; i++) {
      const double top = static_cast<double>(chains * pool.size()) * peak.ops /
                         spent_s(pool, [&] { pool.run([&](int) { peak.run(chains); }); });
      const double rate = static_cast<double>(calls) * layer.ops() / spent_s(pool, [&] {
                            for (int64_t c = 0; c < calls; c++) layer.run(table, pool);
                          });
      ratios.push_back(rate / top);
      rates.push_back(rate * 1e-9);
    }
    report(name, ratios, "GOP/s", rates);
  }

  void share_of_bandwidth(const std::string& name, DType dtype, int64_t m, int64_t n, int64_t k) {
    if (!wanted(name)) return;
    Layer layer(dtype, m, n, k);
    std::vector<double> ratios, rates;
    const int64_t calls = layer.copies, bytes = calls * layer.bytes();
    const auto read = [&](Range part, int) {  // eight streams of a line
      const auto* p = reinterpret_cast<const uint64_t*>(layer.panels.get());
      uint64_t sums[8] = {};
      for (int64_t i = part.begin / 8; i + 8 <= part.end / 8; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += p[i + j];
      volatile uint64_t sink = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
      static_cast<void>(sink);
    };
    double best_read = 0;
    for (int i = 0; i < pairs; i++) {
      best_read = std::max(best_read, static_cast<double>(bytes) / spent_s(pool, [&] { pool.split(bytes, 4096, read); }));
      rates.push_back(static_cast<double>(bytes) * 1e-9 / spent_s(pool, [&] {
                        for (int64_t c = 0; c < calls; c++) layer.run(table, pool);
                      }));
    }
    for (double r : rates) ratios.push_back(r * 1e9 / best_read);
    report(name, ratios, "GB/s", rates);
  }

  void time_ratio(const std::string& name, DType a, DType b, int64_t m, int64_t n, int64_t k) {
    if (!wanted(name)) return;
    Layer first(a, m, n, k), second(b, m, n, k);
    const int64_t calls = std::max(first.copies, static_cast<int64_t>(4e9 / first.ops()));
    std::vector<double> ratios, times;
    for (int i = 0; i < pairs; i++) {
      const double x = spent_s(pool, [&] {
        for (int64_t c = 0; c < calls; c++) first.run(table, pool);
      });
      const double y = spent_s(pool, [&] {
        for (int64_t c = 0; c < calls; c++) second.run(table, pool);
      });
      ratios.push_back(x / y);
      times.push_back(x / static_cast<double>(calls) * 1e6);
    }
    report(name, ratios, "us", times);
  }

  // statistics of a head against its products alone
  void head(const std::string& name, int64_t m, int64_t vocab, int64_t k) {
    if (!wanted(name)) return;
    Layer layer(DType::kInt8, m, vocab, k);
    const int64_t tiles = head_tiles(vocab), stride = round_up(m, 16);
    Buffer<float> x(tiles * stride), s(tiles * stride), w(tiles * stride), f(8 * m);
    Buffer<int32_t> id(tiles * stride), ids(8 * m);
    const HeadPartials partials{stride, x.get(), s.get(), w.get(), id.get(), nullptr, nullptr, nullptr};
    const Weight weight{DType::kInt8, 0, vocab, k, layer.panels.get(), layer.scale.get(), layer.sum.get()};
    const HeadArgs args{weight,  {DType::kInt8, 0, k, layer.cells.get(), layer.scales.get()},
                        m,       0.f,
                        nullptr, nullptr,
                        nullptr, partials,
                        nullptr, 0};
    const HeadMergeArgs merge{partials,    m,               vocab,   ids.get(), f.get(),
                              f.get() + m, f.get() + 2 * m, nullptr, nullptr,   f.get() + 3 * m};
    Buffer<uint8_t> scratch(head_scratch_bytes(args));
    std::vector<double> ratios, times;
    for (int i = 0; i < pairs; i++) {
      const double product = cpu_s([&] { layer.run(table, pool); });
      const double all = cpu_s([&] {
        table.head_stats(args, {0, tiles}, scratch.get());
        table.head_merge(merge, {0, ceil_div(m, 16)});
      });
      ratios.push_back(all / product);
      times.push_back(all * 1e6);
    }
    report(name, ratios, "us", times);
  }

  // one layer's attention and row-wise work against its int8 products, 28 x 1024 shape
  void rest_of_layer(const std::string& name, int64_t m, int64_t context) {
    if (!wanted(name)) return;
    const int64_t d = 1024, f = 3072, heads = 16, kv = 8, hd = 128;
    Layer qkv(DType::kInt8, m, (heads + 2 * kv) * hd, d), o(DType::kInt8, m, d, heads * hd),
        up(DType::kInt8, m, 2 * f, d), down(DType::kInt8, m, d, f);
    KvCache cache{DType::kBF16, 64, static_cast<int32_t>(kv), static_cast<int32_t>(hd), nullptr};
    const int64_t positions = context + m;
    Buffer<uint8_t> pages(ceil_div(positions, 64) * kv_page_bytes(cache)),
        q(kv * operand_bytes(DType::kBF16, m * heads / kv, hd)), cells(operand_bytes(DType::kInt8, m, f));
    cache.pages = pages.get();
    Buffer<float> cos(positions * hd / 2), sin(positions * hd / 2), x(m * d), weight(f), attended(m * heads * hd),
        gate(m * 2 * f), scales(m), qkv_out(m * qkv.n);
    Buffer<int32_t> at(m), visible(m);
    for (int64_t i = 0; i < m; i++)
      at.get()[i] = static_cast<int32_t>(context + i), visible.get()[i] = static_cast<int32_t>(positions);
    const QkvArgs split{qkv_out.get(),
                        qkv.n,
                        m,
                        static_cast<int32_t>(heads),
                        static_cast<int32_t>(hd),
                        weight.get(),
                        weight.get(),
                        1e-6f,
                        cos.get(),
                        sin.get(),
                        at.get(),
                        q.get(),
                        cache,
                        0.f,
                        0,
                        0};
    const AttentionArgs attention{q.get(),       cache,          m,         static_cast<int32_t>(heads), 2048,
                                  visible.get(), attended.get(), heads * hd,     nullptr};
    const RmsNormArgs norm{x.get(), weight.get(), 1e-6f,
                           m,       d,       nullptr,      {DType::kInt8, 0, d, cells.get(), scales.get()}};
    const QuantizeArgs quantize{
        attended.get(), heads * hd, m, {DType::kInt8, 0, heads * hd, cells.get(), scales.get()}};
    const GateArgs silu{gate.get(), gate.get() + f, 2 * f, m, {DType::kInt8, 0, f, cells.get(), scales.get()}, 0};
    Buffer<uint8_t> scratch(attention_scratch_bytes(attention));
    const std::pair<const char*, std::function<void()>> parts[] = {
        {"qk_norm_rope_store", [&] { table.qk_norm_rope_store(split, {0, m}, {0, cache.num_kv_heads}); }},
        {"attention", [&] { table.attention(attention, {0, attention_units(attention)}, scratch.get()); }},
        {"norm, quantise, silu", [&] {
           table.rms_norm(norm, {0, m});
           table.rms_norm(norm, {0, m});
           table.quantize_rows(quantize, {0, m});
           table.gate_rows(silu, {0, m});
         }}};
    for (const auto& [part, run] : parts) {
      std::vector<double> ratios, times;
      for (int i = 0; i < pairs; i++) {
        double products = 0, rest = 0;
        for (int c = 0; c < 6; c++) {
          products += cpu_s([&] { qkv.run(table, pool), o.run(table, pool), up.run(table, pool), down.run(table, pool); });
          rest += cpu_s(run);
        }
        ratios.push_back(rest / products);
        times.push_back(rest / 6 * 1e6);
      }
      report(name + ": " + part, ratios, "us", times);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::string isa, only;
  int pairs = 7, threads = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--isa")) isa = argv[i + 1];
    else if (!std::strcmp(argv[i], "--pairs")) pairs = std::max(1, std::atoi(argv[i + 1]));
    else if (!std::strcmp(argv[i], "--threads")) threads = std::max(1, std::atoi(argv[i + 1]));
    else if (!std::strcmp(argv[i], "--only")) only = argv[i + 1];
    else return std::fprintf(stderr, "usage: bench_kernels [--threads N] [--isa NAME] [--pairs N] [--only TEXT]\n"), 2;
  }
  Pool pool(threads);
  Bench b{select_kernels(isa), pool, pairs, only, ""};
  std::printf("%s, %d threads, median of %d pairs\n", b.table.name, threads, pairs);
  b.share_of_peak("int8 M=32 K=1024 of peak", DType::kInt8, 32, 6144, 1024);
  b.share_of_peak("int8 M=32 K=2048 of peak", DType::kInt8, 32, 1024, 2048);
  b.share_of_peak("int8 M=32 K=3072 of peak", DType::kInt8, 32, 1024, 3072);
  b.share_of_peak("bf16 M=32 K=1024 of peak", DType::kBF16, 32, 6144, 1024);
  b.share_of_bandwidth("int8 M=1 K=1024 of bandwidth", DType::kInt8, 1, 6144, 1024);
  b.share_of_bandwidth("bf16 M=1 K=1024 of bandwidth", DType::kBF16, 1, 6144, 1024);
  for (int64_t m : {1, 4, 8, 32})
    b.time_ratio("nvfp4 / int8 time M=" + std::to_string(m), DType::kNVFP4, DType::kInt8, m, 6144, 1024);
  b.time_ratio("bf16 / int8 time M=32", DType::kBF16, DType::kInt8, 32, 6144, 1024);
  if (threads == 1) {  // parts that no division of work is written for here
    b.share_of_peak("int8 M=8 K=1024 of peak", DType::kInt8, 8, 6144, 1024);
    b.share_of_peak("fp32 M=32 K=1024 of peak", DType::kF32, 32, 2048, 1024);
    b.time_ratio("int4 / int8 time M=1", DType::kInt4, DType::kInt8, 1, 6144, 1024);
    b.head("head with statistics / product", 32, 151936, 1024);
    b.rest_of_layer("M=32, context 256", 32, 256);
  }
  std::printf("{\"isa\": \"%s\", \"num_threads\": %d, \"results\": [%s]}\n", b.table.name, threads, b.json.c_str());
}
