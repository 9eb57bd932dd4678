// Arguments and table of the CPU kernels: plain structs over caller-owned memory.
//
// Every kernel is a pure function of (arguments, Range of its units, scratch). A unit is the smallest piece of work
// whose result does not depend on how the rest was divided, so a thread pool may split [0, units) anywhere and in any
// order; the bytes written are the same. No kernel allocates, locks or keeps state. Row counts and lengths are run-time
// numbers.
//
// This header is included by files compiled for one instruction set each. It must not include C++ library headers: an
// inline function compiled with AVX-512 flags may be the copy the linker keeps for every caller.
//
// Legend: M rows, N output columns, K inner width, H head width, V vocabulary, D model width.
// Source: ours; layouts and numeric rules are stated at each struct.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace dlmrt::cpu {

// Element formats of weights, operands and caches.
enum class DType : int32_t {
  kF32 = 0,
  kBF16 = 1,
  kInt8 = 2,   // s8 code, one fp32 scale per output column (weights, -128..127) or row (operands, -127..127)
  kNVFP4 = 3,  // weights only: e2m1 nibbles, one e4m3 scale per 16 k, one fp32 scale per column
  kInt4 = 4,   // weights only: two's complement nibbles, one fp32 scale per group of 32 or 128 k
};

// Half-open interval of units.
struct Range {
  int64_t begin, end;
};

constexpr int kPanel = 16;            // output columns that share a panel; also the virtual lanes of every vector loop
constexpr int kRowGroup = 8;          // rows that share an operand group
constexpr int kCellBytes = 4;         // bytes of one row in one step: 4 int8, 2 bf16 or 1 fp32 values of k
constexpr int kStepBytes = 64;        // bytes of one panel in one step
constexpr int kBlockRows = 32;        // rows that meet a panel of 4-bit weights together
constexpr int kHeadTile = 128;        // vocabulary entries of one head tile
constexpr int kMaxHeadDim = 512;      // widest attention head
constexpr int kMaxInt8Width = 65000;  // 128 * 255 * K must stay below 2^31
constexpr float kBannedLogit = -1e30f;  // logit of a banned id; finite, so that statistics stay finite

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t padded_width(int64_t k) { return round_up(k, kPanel); }
// Values of k in one cell of an operand (kF32, kBF16, kInt8).
constexpr int64_t values_per_cell(DType t) { return t == DType::kF32 ? 1 : t == DType::kBF16 ? 2 : 4; }
constexpr int64_t steps_of(DType t, int64_t k) { return padded_width(k) / values_per_cell(t); }

// Rows in the order the matrix kernels read them: [M/8][steps][8 rows][cell], K padded to 16 with zeros.
// kInt8 cells hold code + 128 as u8; `scales` [M] is the row's scale max(max|x|, 1e-8) / 127.
struct Operand {
  DType dtype;
  int32_t reserved;
  int64_t width;  // K, unpadded
  void* cells;    // 64-byte aligned
  float* scales;  // kInt8 only
};
constexpr int64_t operand_bytes(DType t, int64_t rows, int64_t width) {
  return ceil_div(rows, kRowGroup) * steps_of(t, width) * kRowGroup * kCellBytes;
}

// Weight [N, K] in panels of 16 columns, N and K padded to 16 with zeros:
//   kF32, kBF16, kInt8  [N/16][steps][16][cell]
//   kNVFP4              [N/16][K/16] blocks of 128 nibble bytes + 16 e4m3 bytes
//   kInt4               [N/16][K/group] blocks of group * 8 nibble bytes + 64 bytes of fp32 scales
// A 64-byte vector of nibbles holds [16 columns][4 k] twice: low halves the first four k, high halves the next four.
struct Weight {
  DType dtype;
  int32_t group;        // k that share a block scale: 16 (kNVFP4), 32 or 128 (kInt4), else 0
  int64_t n, k;         // unpadded
  void* panels;         // 64-byte aligned, num_panels(n) * panel_bytes(dtype, group, k)
  float* column_scale;  // [N padded]; kInt8, kNVFP4, kInt4
  int32_t* column_sum;  // [N padded] 128 * sum of codes; kInt8
};
constexpr int64_t num_panels(int64_t n) { return ceil_div(n, kPanel); }
constexpr int64_t block_bytes(DType t, int64_t group) {
  return t == DType::kNVFP4 ? 144 : group * kPanel / 2 + kPanel * int64_t{sizeof(float)};
}
constexpr int64_t padded_k(DType t, int64_t group, int64_t k) {
  return t == DType::kInt4 ? round_up(k, group) : padded_width(k);
}
constexpr int64_t panel_bytes(DType t, int64_t group, int64_t k) {
  return t == DType::kNVFP4 || t == DType::kInt4 ? padded_k(t, group, k) / group * block_bytes(t, group)
                                                 : steps_of(t, k) * kStepBytes;
}

// out[m][n] (+)= sum_k input[m][k] weight[n][k]. Units: panels of 16 columns; ranges of a multiple of 12 panels fill
// every register tile. A kInt8 operand goes with kInt8, kNVFP4 and kInt4 weights, kBF16 with kBF16, kF32 with kF32.
//   kInt8    float(exact int32 sum) * (column_scale * row scale)
//   kNVFP4   acc = fma(float(exact sum of a block), block scale, acc) over ascending blocks;
//            acc * (column_scale * row scale)
//   kInt4    as kNVFP4 with fp32 group scales
//   kF32     one fma per k, ascending
//   kBF16    fp32 sums of exact products, ascending pairs of k (the instruction's own rounding with avx512bf16)
struct LinearArgs {
  Weight weight;
  Operand input;
  int64_t rows;
  float* out;
  int64_t ld_out;      // elements between rows of out, >= N
  int32_t accumulate;  // 1: add to out
};
// Scratch of one worker: kBlockRows rows in the form that 4-bit weights are multiplied with, and a number per row and
// block.
constexpr int64_t weight_scratch_bytes(const Weight& w) {
  return w.dtype == DType::kNVFP4 || w.dtype == DType::kInt4
             ? kBlockRows * (padded_width(w.k) + ceil_div(padded_width(w.k), w.group) * int64_t{sizeof(int32_t)})
             : 0;
}

// y = weight * x / sqrt(mean(x^2) + eps), written as fp32 rows and / or operand. Units: rows.
struct RmsNormArgs {
  const float* x;       // [M, width] the skip stream
  const float* weight;  // [width], null: 1
  float eps;
  int64_t rows, width;
  float* out_rows;  // [M, width] or null
  Operand out;      // cells null: none
};

// Rows of x as an operand; width is out.width. Units: rows.
struct QuantizeArgs {
  const float* x;
  int64_t ld;
  int64_t rows;
  Operand out;
};

// silu(gate) * up or gelu_tanh(gate) * up as an operand; `gate` is overwritten with the product. width is out.width.
// Units: rows.
struct GateArgs {
  float* gate;
  const float* up;
  int64_t ld;  // elements between rows of gate and of up
  int64_t rows;
  Operand out;
  int32_t is_gelu;
};

// The same product over columns that are divided between threads, in two passes whose units are panels of 16 columns: what
// a thread multiplied stays with it. gate_columns leaves the products in place of gate and in top[m] the bits of the
// greatest magnitude of its part of row m; pack_columns writes cells, `top` being the greatest of all parts.
using GateColumns = void (*)(const GateArgs&, Range panels, int32_t* top);
using PackColumns = void (*)(const GateArgs&, Range panels, const int32_t* top);

// x[m] += alpha * delta[m] for the rows with where[m] != 0 (null: all). Units: rows.
struct ScaledAddArgs {
  float* x;
  const float* delta;
  const uint8_t* where;
  float alpha;
  int64_t rows, width;
};

// Keys and values of one layer in pages, page i with positions [i * page_size, ...). Inside a page, per kv head, both are
// panels of the matrix kernels:
//   keys [page/16][H steps][16 positions][cell], values [H/16][page steps][16 columns][cell].
struct KvCache {
  DType dtype;        // kBF16 or kF32
  int32_t page_size;  // positions, multiple of 16
  int32_t num_kv_heads, head_dim;
  void* pages;
};
constexpr int64_t kv_plane_bytes(const KvCache& c) {  // keys or values of one kv head in one page
  return c.page_size * padded_width(c.head_dim) * (kCellBytes / values_per_cell(c.dtype));
}
constexpr int64_t kv_page_bytes(const KvCache& c) { return 2 * c.num_kv_heads * kv_plane_bytes(c); }

// Splits rows of [q heads | k heads | v heads] of a projection: RMSNorm of q and k per head, rotate-half by position,
// scale into q, k and v into the cache. Units: rows by kv heads, each with the q heads that read it.
// q is one operand per kv head of M * group rows, row m * group + h, each operand_bytes(dtype, M * group, H) long.
struct QkvArgs {
  const float* qkv;
  int64_t ld;
  int64_t rows;
  int32_t num_heads;
  int32_t rotary_dim;            // even, <= H; pairs are (i, i + rotary_dim / 2)
  const float *q_norm, *k_norm;  // [H], null: no norm
  float eps;
  const float *cos, *sin;    // [positions][rotary_dim / 2]
  const int32_t* positions;  // [M] position in the sequence: row of the tables and slot in the cache
  void* q;
  KvCache cache;        // q has its dtype
  float scale;          // of q; 0: 1 / sqrt(H)
  int32_t is_v_normed;  // RMSNorm without weight of v
  int32_t is_v_from_k;  // no v heads: v is k before its norm
};

// softmax(q k^T) v over cache positions [first[m], visible[m]); a row that sees nothing gets zeros. Units: kv head by
// row tile of 8. Up to `chunk` positions the softmax is exact in one piece, beyond it is carried from chunk to chunk in
// ascending order. A position behind those that a row sees is never multiplied, so its non-finite values cannot reach
// the row; those just before `first` are multiplied by 0.
struct AttentionArgs {
  const void* q;  // as written by qk_norm_rope_store
  KvCache cache;
  int64_t rows;
  int32_t num_heads;
  int32_t chunk;           // multiple of page_size
  const int32_t* visible;  // [M]
  float* out;              // [M, num_heads * H]
  int64_t ld_out;
  const int32_t* first;  // [M] null: 0
};
constexpr int64_t attention_units(const AttentionArgs& t) {
  return t.cache.num_kv_heads * ceil_div(t.rows * (t.num_heads / t.cache.num_kv_heads), kRowGroup);
}
// Elements between rows of scores: no more than `positions` need, but not a multiple of 4 KiB, since the same column of
// eight such rows would lie in one set of the first cache.
constexpr int64_t score_stride(int64_t positions) {
  const int64_t stride = round_up(positions, kPanel);
  return stride % 1024 ? stride : stride + kPanel;
}
constexpr int64_t attention_scratch_bytes(const AttentionArgs& t) {  // scores, probabilities, sums of one tile
  return kRowGroup * (score_stride(t.chunk) + int64_t{t.chunk} + padded_width(t.cache.head_dim)) * 4;
}

// Partial statistics of (tile, row), all [tiles][row_stride]; row_stride is M rounded up to 16.
struct HeadPartials {
  int64_t row_stride;
  // max; sum exp(x - max) without the 1 of argmax, so that what a sure row leaves to others keeps its digits;
  // sum (x - max) exp(x - max)
  float *max, *sum, *weighted;
  int32_t* argmax;
  // Best of logit + Gumbel noise; null when nothing is sampled.
  float *sample_score, *sample_logit;
  int32_t* sample_id;
};
constexpr int64_t head_tiles(int64_t vocab) { return ceil_div(vocab, kHeadTile); }

// Which Gumbel noise a row gets: the counter contract of philox.hpp.
struct GumbelKey {
  uint32_t seed[2];  // low word first
  uint32_t step, block;
  uint32_t last;  // 1 | slot << 8: the sampling stream of canvas slot `slot`
};

// Logits of the head and their statistics, a tile of 128 ids at a time. Units: tiles.
// logit = softcap * tanh(raw / softcap) (softcap > 0), divided by the temperature, banned ids at kBannedLogit.
struct HeadArgs {
  Weight weight;  // [V, D]
  Operand input;
  int64_t rows;
  float softcap;             // 0: none
  const float* temperature;  // null: 1
  const uint32_t* banned;    // bit i % 32 of word i / 32, ceil(V / 32) words; null: none
  const GumbelKey* gumbel;   // [M] one per row; null: no sampling
  HeadPartials partials;
  float* logits;  // [M, ld_logits] or null
  int64_t ld_logits;
};
constexpr int64_t head_scratch_bytes(const HeadArgs& t) {
  return round_up(t.rows * kHeadTile * int64_t{sizeof(float)}, 64) + weight_scratch_bytes(t.weight) +
         t.rows * int64_t{sizeof(float)};
}

// Statistics per row from the partials of all tiles, merged in tile order. Units: groups of 16 rows.
// A row with a logit that is NaN or infinite, of an id that is not banned, gets a NaN as log_sum_exp.
struct HeadMergeArgs {
  HeadPartials partials;
  int64_t rows, vocab;
  int32_t* argmax;                           // lowest id among equals
  float *max_logit, *log_sum_exp, *entropy;  // nats
  int32_t* sample_id;  // null: none
  float* sample_logit;
  float* confidence;  // probability of argmax, exact to fp32 also next to 1; null: none
};

// out[m] = scale * table[ids[m]]. Units: rows.
struct EmbedArgs {
  DType dtype;  // kF32, kBF16; from panels also kInt8
  const void* table;
  const int32_t* ids;
  int64_t rows, width;
  float* out;
  float scale;          // 0: none
  int64_t panel_bytes;  // of kPanel rows where the table is a packed weight, 0: rows
  const float* row_scale;  // [V] kInt8
};

// x *= *factor. Units: rows.
struct ScaleArgs {
  float* x;  // [M, width]
  const float* factor;
  int64_t rows, width;
};

// x = cap * tanh(x / cap). Units: rows.
struct SoftCapArgs {
  float* x;  // [M, width]
  float cap;
  int64_t rows, width;
};

// One expert that some row chose, and where the copies of its rows stand among those of all experts.
struct ExpertRun {
  int32_t expert;
  int32_t begin;  // first row, a multiple of kRowGroup
  int32_t rows;
};
// Runs of ascending experts; those that no row chose have none.
struct ExpertRuns {
  int32_t count;
  int32_t end;       // row behind the last run
  ExpertRun run[1];  // `count` of them
};
constexpr int64_t expert_runs_bytes(int64_t experts) {
  return 2 * int64_t{sizeof(int32_t)} + experts * int64_t{sizeof(ExpertRun)};
}
// Rows that the runs of `copies` rows can take, since each begins a row group.
constexpr int64_t expert_rows(int64_t copies, int64_t experts) {
  return round_up(copies + (kRowGroup - 1) * (copies < experts ? copies : experts), kRowGroup);
}

// As LinearArgs for each run with the weight of its expert. Units: runs * panels of one expert.
struct ExpertLinearArgs {
  Weight weight;                                   // of expert 0
  int64_t panel_stride, scale_stride, sum_stride;  // from one expert to the next: bytes, columns, columns
  Operand input;
  const ExpertRuns* runs;
  float* out;
  int64_t ld_out;
};

// y[m] = sum over the row's choices, in the order of `place`, of weights[m][k] * x[place[m][k]]. Units: rows.
struct CombineArgs {
  const float* x;        // rows of all runs
  const int32_t* place;  // [M, top_k] ascending
  const float* weights;  // [M, top_k]
  int64_t rows, top_k, width;
  float* y;  // [M, width]
};

// exp(logits - log_sum_exp) as an operand of width V. Units: groups of kHeadTile ids.
struct ProbabilitiesArgs {
  const float* logits;
  int64_t ld;
  int64_t rows;
  const float* log_sum_exp;
  Operand out;  // kF32 or kBF16
};

// out[m] = scale * sum_v probabilities[m][v] table[v], ascending v. Units: panels of 16 columns of the table.
struct SoftEmbeddingArgs {
  Operand probabilities;  // dtype of the table
  const void* table;      // [V, width] row-major
  int64_t rows, width;
  float scale;
  float* out;  // [M, width]
};

// One entry per instruction set; see dispatch.hpp for the choice.
struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&, Range panels, void* scratch);
  void (*rms_norm)(const RmsNormArgs&, Range rows);
  void (*quantize_rows)(const QuantizeArgs&, Range rows);
  void (*gate_rows)(const GateArgs&, Range rows);
  GateColumns gate_columns;
  PackColumns pack_columns;
  void (*scaled_add)(const ScaledAddArgs&, Range rows);
  void (*qk_norm_rope_store)(const QkvArgs&, Range rows, Range kv_heads);
  void (*attention)(const AttentionArgs&, Range units, void* scratch);
  void (*head_stats)(const HeadArgs&, Range tiles, void* scratch);
  void (*head_merge)(const HeadMergeArgs&, Range row_groups);
  void (*embed)(const EmbedArgs&, Range rows);
  void (*probabilities)(const ProbabilitiesArgs&, Range tiles);
  void (*soft_embedding)(const SoftEmbeddingArgs&, Range panels);
  void (*scale)(const ScaleArgs&, Range rows);
  void (*soft_cap)(const SoftCapArgs&, Range rows);
  void (*expert_linear)(const ExpertLinearArgs&, Range units, void* scratch);
  void (*combine)(const CombineArgs&, Range rows);
};

}  // namespace dlmrt::cpu
