"""Sums over GPUs through symmetric memory: every rank reads all ranks' terms itself (one-shot), in their order.

A rank writes its terms into its own buffer, tells the others by a number in their signal pads and waits until all have
told it (`meet`), then adds the terms up (`sum_terms`), with the skip stream and an RMSNorm behind them if wanted: what
`dlmrt.cuda.kernels.rows.norm` does with the partial sums of one GPU. Numbers only grow, and two buffers take turns: a
rank that writes the next but one term has been told by all others that they are past this one.

Waiting is bounded in polls. A rank that waited in vain leaves the other's number plus one in `status`, and no sum is
written from then on; the host looks there before it uses anything. Waiting is a kernel of its own because its threads
may see different things: what the next kernel reads is the same for all.

Legend: P ranks, M rows at most, D width (DP the power of two from D on).

Source: ours; PTX ISA 8.x, memory consistency model, for release and acquire at system scope.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def meet(pads, status, number, rank, limit, IS_DEVICE: tl.constexpr):
    """Tell rank p `number`, behind all that this GPU has written, and wait for it to say the same. Grid: P.

    `pads` int64 [P]: addresses of the ranks' pads, in which place q is written by rank q.
    """
    other = tl.program_id(0)
    there = (tl.load(pads + other) + 4 * rank).to(tl.int64)
    here = (tl.load(pads + rank) + 4 * other).to(tl.int64)
    if IS_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [there, number.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(there.to(tl.pointer_type(tl.int32)), number.to(tl.int32))
    seen, polls = _read(here, IS_DEVICE), 0
    while (seen < number) & (polls < limit):
        seen = _read(here, IS_DEVICE)
        polls += 1
    if seen < number:
        tl.store(status, other + 1)


@triton.jit
def _read(place, IS_DEVICE: tl.constexpr):
    if IS_DEVICE:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        seen = tl.load(place.to(tl.pointer_type(tl.int32)))
    return seen


@triton.jit
def sum_terms(
    buffers, x, weight, total, y, status, eps, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    HAS_X: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """total = x + terms of ranks 0, 1, ...; y = RMSNorm(total) * weight, each if wanted. Grid: M.

    `buffers` int64 [P]: addresses of the ranks' terms [M, D], of the type of `total`. Sums and statistics are float32.
    """
    row = tl.program_id(0)
    if tl.load(status) != 0:
        return
    d = tl.arange(0, DP)
    at = row.to(tl.int64) * D + d
    values = tl.zeros((DP,), tl.float32)
    if HAS_X:
        values += tl.load(x + at, mask=d < D, other=0.0).to(tl.float32)
    for other in tl.static_range(P):
        terms = tl.load(buffers + other).to(tl.pointer_type(total.dtype.element_ty))
        values += tl.load(terms + at, mask=d < D, other=0.0).to(tl.float32)
    tl.store(total + at, values.to(total.dtype.element_ty), mask=d < D)
    if HAS_NORM:
        normed = values * tl.rsqrt(tl.sum(values * values, 0) / D + eps)
        normed *= tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=d < D)
