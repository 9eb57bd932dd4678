"""What GPUs tell each other through symmetric memory: every rank reads what all ranks have put there (one-shot).

A rank puts its part into its own buffer, tells the others and waits until all have told it (`meet`), then reads all
parts in the order of the ranks: sums with the skip stream and an RMSNorm behind them (`sum_terms`, what
`dlmrt.cuda.kernels.rows.norm` does with the partial sums of one GPU), statistics of the head
(`dlmrt.cuda.kernels.head.merge_ranks`), logits (`take_logits`). All ranks read the same bits in the same order, so what
they compute of them is the same to the bit, conditions of loops included.

Two buffers take turns, so that one meeting between two sums is enough. Who puts its part of meeting k + 2 where that of
meeting k was has been told of meeting k + 1 by all ranks, and each of them told so behind its reads of k: on one stream
a kernel begins when the one before it has ended. Nothing else may touch the buffers between two meetings.

A word of a meeting also carries one flag of the rank that tells (`agree` in programs): rank 0's is what all act on, as
it was read once. Words take turns like buffers; else a rank that is quick could write its next word over one that a
slow one has yet to see.

Waiting is bounded, by the GPU's clock. A rank that waited in vain leaves the other's number plus one in `STATUS`; from
then on it neither tells nor waits, sums are 0, flags say that all is cancelled, and its loop ends. The others, who wait
for it in turn, end the same way. The host looks at `STATUS` before it uses anything; records are not published. Waiting
is a kernel of one program because threads that wait may see different things: what the next kernel reads is the same
for all.

Control block, int64: meetings that are over, status, limit of a wait (ns; polls without a device), this rank; then P
addresses of pads, in whose words 0 .. 2 P - 1 rank q writes q and P + q; then P addresses of each of both buffers.

Legend: P ranks, M rows at most, D width (DP the power of two from D on), S splits, TDT type of terms.

Source: ours; PTX ISA 8.x, memory consistency model, for fence and acquire at system scope.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmrt.cuda.kernels.rows import load_sum, store_operand

NUMBER, STATUS, LIMIT, RANK, PADS = range(5)  # words of the control block; addresses follow
_NUMBER, _STATUS, _LIMIT, _RANK, _PADS = (tl.constexpr(word) for word in range(5))


@triton.jit
def part_of(ranks, other, meeting, P: tl.constexpr):
    """Address of what `other` has put, or puts, for a meeting: that of the number NUMBER before it is over."""
    turn = (tl.load(ranks + _NUMBER) + meeting) & 1
    return tl.load(ranks + _PADS + P + turn * P + other)


@triton.jit
def own_part(ranks, P: tl.constexpr):
    """Address at which this rank puts what the others read behind the next meeting."""
    return part_of(ranks, tl.load(ranks + _RANK), 0, P)


@triton.jit
def part_behind(ranks, other, P: tl.constexpr):
    """Address of what `other` had put before the last meeting."""
    return part_of(ranks, other, -1, P)


@triton.jit
def is_met(ranks):
    """Whether all ranks have come to all meetings."""
    return tl.load(ranks + _STATUS) == 0


@triton.jit
def _fence(IS_DEVICE: tl.constexpr):
    if IS_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _tell(place, word, IS_DEVICE: tl.constexpr):
    """Behind a fence: with it, the store releases what this GPU has written."""
    if IS_DEVICE:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.u64 [$1], $2; mov.u64 $0, $2;", "=l,l,l", [place, word], dtype=tl.int64,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(place.to(tl.pointer_type(tl.int64)), word)


@triton.jit
def _read(place, IS_DEVICE: tl.constexpr):
    if IS_DEVICE:
        word = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", [place], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        word = tl.load(place.to(tl.pointer_type(tl.int64)))
    return word


@triton.jit
def _clock(polls, IS_DEVICE: tl.constexpr):
    """Nanoseconds; without a device the polls."""
    if IS_DEVICE:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,l", [polls], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        now = polls
    return now


@triton.jit
def meet(
    ranks, flag, agreed, P: tl.constexpr, HAS_FLAG: tl.constexpr, IS_DEVICE: tl.constexpr, TELLS: tl.constexpr = True,
    WAITS: tl.constexpr = True,
):  # fmt: skip
    """Tell all ranks, behind all that this GPU has written, that it has come, and wait for them. Grid: 1.

    `flag`, read once, goes with the word; `agreed` becomes what rank 0 has sent, or 1 where a rank did not come. It is
    one warp. TELLS and WAITS: both halves, which only an emulation runs apart.
    """
    number = tl.load(ranks + _NUMBER) + 1
    status = tl.load(ranks + _STATUS)
    rank, limit = tl.load(ranks + _RANK), tl.load(ranks + _LIMIT)
    place = (number & 1) * P
    word = number * 2
    if HAS_FLAG:
        word += (tl.load(flag, volatile=True) != 0).to(tl.int64)
    if TELLS:
        _fence(IS_DEVICE)
        if status == 0:
            for other in tl.static_range(P):
                _tell(tl.load(ranks + _PADS + other) + 8 * (place + rank), word, IS_DEVICE)
    if WAITS:
        sent = number * 0
        polls = number * 0
        begin = _clock(polls, IS_DEVICE)
        now = begin
        for other in tl.static_range(P):
            here = tl.load(ranks + _PADS + rank) + 8 * (place + other)
            seen = number * 2
            if status == 0:
                seen = _read(here, IS_DEVICE)
                while (seen < number * 2) & (now - begin < limit):
                    seen = _read(here, IS_DEVICE)
                    polls += 1
                    now = _clock(polls, IS_DEVICE)
            if seen < number * 2:
                status = number * 0 + other + 1
            if other == 0:
                sent = seen & 1
        tl.store(ranks + _NUMBER, number)
        tl.store(ranks + _STATUS, status)
        if HAS_FLAG:
            tl.store(agreed, tl.where(status != 0, 1, sent).to(tl.int32))


@triton.jit
def put_terms(
    ranks, x, part, rows, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    HAS_X: tl.constexpr, TDT: tl.constexpr,
):  # fmt: skip
    """This rank's term x + sum of part [S, M, D] goes where the others read it, [M, D]. Grid: rows, tiles of D."""
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = row.to(tl.int64) * D + d
    own = own_part(ranks, P).to(tl.pointer_type(TDT))
    tl.store(own + at, load_sum(x, part, at, d < D, M * D, S, HAS_X).to(TDT), mask=d < D)


@triton.jit
def sum_terms(
    ranks, x, weight, total, y, operand, rows, M: tl.constexpr, eps, D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, TDT: tl.constexpr, HAS_X: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_TOTAL: tl.constexpr,
    HAS_Y: tl.constexpr, HAS_OPERAND: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """total = x + terms of ranks 0, 1, ...; its RMSNorm as float32 (`y`) and as operand, each if wanted. Grid: rows.

    Sums and statistics are float32. Where a rank did not come all is 0, on which any kernel may go on.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    is_whole = is_met(ranks)
    d = tl.arange(0, DP)
    at = row.to(tl.int64) * D + d
    values = tl.zeros((DP,), tl.float32)
    if HAS_X:
        values = tl.load(x + at, mask=is_whole & (d < D), other=0.0).to(tl.float32)
    for other in tl.static_range(P):
        terms = part_behind(ranks, other, P).to(tl.pointer_type(TDT))
        values += tl.load(terms + at, mask=is_whole & (d < D), other=0.0).to(tl.float32)
    if HAS_TOTAL:
        tl.store(total + at, values.to(total.dtype.element_ty), mask=d < D)
    if HAS_Y or HAS_OPERAND:
        values = values * tl.rsqrt(tl.sum(values * values, 0) / D + eps)
        if HAS_WEIGHT:
            values *= tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    if HAS_Y:
        tl.store(y + at, values, mask=d < D)
    if HAS_OPERAND:
        store_operand(operand, values, row, 0, M, D, DP, NVFP4)


@triton.jit
def take_logits(ranks, firsts, logits, rows, V: tl.constexpr, BV: tl.constexpr, P: tl.constexpr):
    """logits [M, V] of what the ranks have put, rank p [M, ids of p] in float32. Grid: rows, tiles of V.

    `firsts` int64 [P + 1]: first id of each rank, and V.
    """
    row = tl.program_id(0)
    if row >= tl.load(rows):
        return
    is_whole = is_met(ranks)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    for other in tl.static_range(P):
        first, end = tl.load(firsts + other), tl.load(firsts + other + 1)
        is_there = (v >= first) & (v < end)
        source = part_behind(ranks, other, P).to(tl.pointer_type(tl.float32)) + row.to(tl.int64) * (end - first)
        values = tl.load(source + (v - first), mask=is_whole & is_there, other=0.0)
        tl.store(logits + row.to(tl.int64) * V + v, values, mask=is_there)
