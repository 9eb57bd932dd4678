"""Mixture of experts without a host count: every expert has its own list of rows, made on the device.

Programs of the products cover all experts and as many rows as one expert can have; those beyond an expert's count leave
at once, so time follows the experts that are hit. Order is fixed throughout: lists are in the order of rows, the sum
over a row's experts in the order of their ranks, and nothing is atomic.

Legend: M rows at most, E experts (EP the power of two from E on), K experts of a row, F width of one expert, D width.

Source: ours; routing as in dlmrt.ops.eager.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmrt.cuda.kernels.matmul import products
from dlmrt.cuda.kernels.rows import load_sum

NO_EXPERT = tl.constexpr(2147483647)


@triton.jit
def best_of(scores, ids):
    """Highest score and its id; the lower id on equal scores."""
    top = tl.max(scores, 0)
    return top, tl.min(tl.where(scores == top, ids, NO_EXPERT), 0)


@triton.jit
def sigmoid_scores(part, bias, row, e, M: tl.constexpr, E: tl.constexpr, S: tl.constexpr):
    """Scores of one row and what ranks them; experts beyond E rank last."""
    logits = load_sum(part, part, row * E + e, e < E, M * E, S, HAS_X=False)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores + tl.load(bias + e, mask=e < E, other=0.0)
    return scores, tl.where(e < E, ranked, -float("inf"))


@triton.jit
def admit_experts(
    part, bias, admitted, rows, M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """admitted uint8 [blocks, E]: the CAPACITY experts whose best row of the block ranks highest. Grid: blocks."""
    block, num_rows = tl.program_id(0), tl.load(rows)
    e = tl.arange(0, EP)
    peak = tl.full((EP,), -float("inf"), tl.float32)
    for row in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, num_rows)):
        _, ranked = sigmoid_scores(part, bias, row, e, M, E, S)
        peak = tl.maximum(peak, ranked)
    chosen = tl.zeros((EP,), tl.int32)
    for _ in range(CAPACITY):
        _, expert = best_of(peak, e)
        chosen = tl.where(e == expert, 1, chosen)
        peak = tl.where(e == expert, -float("inf"), peak)
    tl.store(admitted + block * E + e, chosen.to(tl.uint8), mask=e < E)


@triton.jit
def route_sigmoid(
    part, bias, admitted, experts, weights, rows, scaling, M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The K best experts of a row among those of its KEPT best groups, or (BLOCK > 0) among those admitted."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    e = tl.arange(0, EP)
    scores, ranked = sigmoid_scores(part, bias, row, e, M, E, S)
    if BLOCK > 0:
        is_admitted = tl.load(admitted + row // BLOCK * E + e, mask=e < E, other=0) != 0
        ranked = tl.where(is_admitted, ranked, -float("inf"))
    elif GROUPS > 1:
        SIZE: tl.constexpr = E // GROUPS
        g = tl.arange(0, GP)
        strength = tl.full((GP,), -float("inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            inside = tl.where(e // SIZE == group, ranked, -float("inf"))
            first, expert = best_of(inside, e)
            second = tl.max(tl.where(e == expert, -float("inf"), inside), 0)
            strength = tl.where(g == group, first + (second if SIZE > 1 else 0.0), strength)
        is_kept = tl.zeros((EP,), tl.int32)
        for _ in tl.static_range(KEPT):
            _, group = best_of(strength, g)
            strength = tl.where(g == group, -float("inf"), strength)
            is_kept = tl.where(e // SIZE == group, 1, is_kept)
        ranked = tl.where(is_kept != 0, ranked, -float("inf"))
    total = 1e-20
    left = ranked
    for _ in tl.static_range(K):
        _, expert = best_of(left, e)
        left = tl.where(e == expert, -float("inf"), left)
        total += tl.sum(tl.where(e == expert, scores, 0.0), 0)
    if K == 1:
        total = 1.0
    for k in tl.static_range(K):
        _, expert = best_of(ranked, e)
        ranked = tl.where(e == expert, -float("inf"), ranked)
        weight = tl.sum(tl.where(e == expert, scores, 0.0), 0)
        tl.store(experts + row * K + k, expert)
        tl.store(weights + row * K + k, weight / total * scaling)


@triton.jit
def route_softmax(
    part, expert_scale, experts, weights, rows, factor, M: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The K most probable experts of a row, their probabilities over their sum, times each expert's scale."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    e = tl.arange(0, EP)
    logits = load_sum(part, part, row.to(tl.int64) * E + e, e < E, M * E, S, HAS_X=False) * factor
    logits = tl.where(e < E, logits, -float("inf"))
    peak = tl.max(logits, 0)
    total = 0.0
    left = logits
    for _ in tl.static_range(K):
        top, expert = best_of(left, e)
        left = tl.where(e == expert, -float("inf"), left)
        total += tl.exp(top - peak)
    for k in tl.static_range(K):
        top, expert = best_of(logits, e)
        logits = tl.where(e == expert, -float("inf"), logits)
        tl.store(experts + row * K + k, expert)
        tl.store(weights + row * K + k, tl.exp(top - peak) / total * tl.load(expert_scale + expert))


@triton.jit
def list_rows(experts, lists, counts, rows, first, M: tl.constexpr, K: tl.constexpr, BE: tl.constexpr):
    """lists int32 [E, M]: the entries row * K + k that chose expert `first` + e, in order; counts [E]. Grid: E."""
    expert, num_entries = tl.program_id(0), tl.load(rows) * K
    count = tl.zeros((1,), tl.int32)
    for begin in range(0, num_entries, BE):
        entry = begin + tl.arange(0, BE)
        is_mine = tl.load(experts + entry, mask=entry < num_entries, other=-1) == first + expert
        rank = count + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(lists + expert * M + rank, entry, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(counts + expert + tl.arange(0, 1), count)


@triton.jit
def matmul_experts(
    x, weight, scales, shared, out, lists, counts, M: tl.constexpr, N: tl.constexpr, KD: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IS_ROW: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    """out[entry, n] = sum over KD inputs of x[source, k] weight[expert, n, k] for the entries of each expert.

    The source of an entry is its row (IS_ROW: entry // K) or itself. Formats as in `matmul`, scales of each expert
    behind those of the one before it. Grid: N tiles, tiles of M, E.
    """
    expert = tl.program_id(2)
    count = tl.load(counts + expert)
    if tl.program_id(1) * BM >= count:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    entry = tl.load(lists + expert * M + m, mask=m < count, other=0)
    source = entry // K if IS_ROW else entry
    before = expert.to(tl.int64) * N
    if FORMAT == "nvfp4":
        matrix, matrix_scales = weight + before * (KD // 2), scales + before * (KD // 16)
    elif FORMAT == "fp8" and BLOCK > 0:
        num_blocks: tl.constexpr = (N + BLOCK - 1) // BLOCK * ((KD + BLOCK - 1) // BLOCK)
        matrix, matrix_scales = weight + before * KD, scales + expert * num_blocks
    else:
        matrix, matrix_scales = weight + before * KD, scales + before
    acc = products(
        x, source, m < count, matrix, matrix_scales, shared + before, n, 0, N, KD, KD, BM, BN, BK, FORMAT, BLOCK, CDT
    )
    at = entry[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, acc, mask=(n[:, None] < N) & (m[None, :] < count))


@triton.jit
def sum_experts(
    part, weights, experts, y, rows, first, E: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, K: tl.constexpr
):
    """y[m] = sum over k of weights[m, k] part[m * K + k], in this order. Grid: rows, tiles of D.

    Only over those whose expert is one of `first` .. `first` + E - 1.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(experts + row * K + k) - first
        is_mine = (expert >= 0) & (expert < E)
        values = tl.load(part + (row * K + k).to(tl.int64) * D + d, mask=is_mine & (d < D), other=0.0)
        total += tl.load(weights + row * K + k) * values
    tl.store(y + row.to(tl.int64) * D + d, total, mask=d < D)
