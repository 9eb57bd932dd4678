"""Sums over GPUs through symmetric memory: every rank reads all ranks' terms itself (one-shot), in their order.

A rank writes its terms into its own buffer, tells the others by a number in their signal pads (`announce`), waits until
all have told it, and adds the terms up (`sum_terms`), with the skip stream and an RMSNorm behind them if wanted: what
`dlmrt.cuda.kernels.rows.norm` does with the partial sums of one GPU. Numbers only grow, and two buffers take turns: a
rank that writes the next but one term has been told by all others that they are past this one.

Waiting is bounded in polls. A rank that waited in vain leaves the others' number plus one in `status` and writes no
result; the host looks there before it uses anything.

Legend: P ranks, M rows at most, D width (DP the power of two from D on).

Source: ours; PTX ISA 8.x, memory consistency model, for release and acquire at system scope.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def announce(pads, number, rank, P: tl.constexpr, IS_DEVICE: tl.constexpr):
    """Write `number` into place `rank` of every rank's pad, behind all that this GPU has written. Grid: P.

    `pads` int64 [P]: addresses of the pads.
    """
    place = (tl.load(pads + tl.program_id(0)) + 4 * rank).to(tl.int64)
    if IS_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [place, number.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(place.to(tl.pointer_type(tl.int32)), number.to(tl.int32))


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
    buffers, pads, x, weight, total, y, status, number, rank, limit, eps, D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, HAS_X: tl.constexpr, HAS_NORM: tl.constexpr, IS_DEVICE: tl.constexpr,
):  # fmt: skip
    """total = x + terms of ranks 0, 1, ...; y = RMSNorm(total) * weight, each if wanted. Grid: M.

    `buffers` int64 [P]: addresses of the ranks' terms [M, D], of the type of `total`. Sums and statistics are float32.
    """
    row = tl.program_id(0)
    pad = tl.load(pads + rank)
    late = 0
    for other in tl.static_range(P):
        polls = 0
        seen = _read((pad + 4 * other).to(tl.int64), IS_DEVICE)
        while (seen < number) & (polls < limit):
            seen = _read((pad + 4 * other).to(tl.int64), IS_DEVICE)
            polls += 1
        if seen < number:
            late = other + 1
    if late > 0:
        tl.store(status, late)
    else:
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
