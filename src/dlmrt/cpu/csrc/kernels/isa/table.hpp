// The kernels of one instruction set as a table. Included last; DLMRT_ISA is the name.
#pragma once

#include "math.hpp"
#include "gemm.hpp"
#include "block4.hpp"
#include "rows.hpp"
#include "attention.hpp"
#include "head.hpp"
#include "soft.hpp"
#include "experts.hpp"

#define DLMRT_TEXT2(x) #x
#define DLMRT_TEXT(x) DLMRT_TEXT2(x)
#define DLMRT_JOIN2(a, b) a##b
#define DLMRT_JOIN(a, b) DLMRT_JOIN2(a, b)

namespace dlmrt::cpu {
extern const KernelTable DLMRT_JOIN(table_, DLMRT_ISA);
const KernelTable DLMRT_JOIN(table_, DLMRT_ISA) = {
    DLMRT_TEXT(DLMRT_ISA),
    linear,
    rms_norm,
    quantize_rows,
    gate_rows,
    gate_columns,
    pack_columns,
    scaled_add,
    qk_norm_rope_store,
    attention,
    head_stats,
    head_merge,
    embed,
    probabilities,
    soft_embedding,
    scale,
    soft_cap,
    expert_linear,
    combine,
};
}  // namespace dlmrt::cpu
