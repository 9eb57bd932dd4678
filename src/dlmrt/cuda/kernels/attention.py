"""Attention of a block's rows over a cache by position, each row over as many positions as the device says.

The grid is fixed: positions are cut into chunks of constant length, one program takes one chunk for the rows of one
key/value head, and chunks that no row of the tile sees leave at once. Chunks are merged in their order. Chunk length
does not depend on lengths, so a row's result depends on what it sees alone.

Rows of a tile are (token, head of the group) pairs: all heads of one group share the loaded keys. Softmax is float32 in
base 2. With WINDOW, a canvas counts as one position: a row sees its canvas and the last WINDOW - 1 positions before it.

Legend: M rows at most, N query heads, G key/value heads, H head width, J chunks, C positions.

Source: ours; the two-pass form is flash-decoding's (Dao et al., 2023), the windows are those of
dlmrt.eager.executor.canvas_visible and context_visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmrt.cuda.kernels.rows import store_operand


@triton.jit
def attention(
    q, cache, visible, first, acc_out, lse_out, rows, M: tl.constexpr, scale, N: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, CHUNK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    HAS_FIRST: tl.constexpr, CDT: tl.constexpr,
):  # fmt: skip
    """Row m over positions [first[m], visible[m]) of one chunk. Grid: tiles of rows x N / G heads, G, J.

    acc_out float32 [J, M, N, H] holds the chunk's weighted mean, lse_out [J, M, N] its log2 of the sum.
    """
    PER: tl.constexpr = N // G
    group, chunk = tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(rows)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    token, head = r // PER, group * PER + r % PER
    is_row = token < num_rows
    sees = tl.load(visible + token, mask=is_row, other=0)
    begins = tl.zeros((BR,), tl.int32)
    if HAS_FIRST:
        begins = tl.load(first + token, mask=is_row, other=2147483647)
    low = tl.maximum(chunk * CHUNK, tl.min(begins, 0) // BC * BC)
    high = tl.minimum(chunk * CHUNK + CHUNK, tl.max(sees, 0))
    h = tl.arange(0, HP)
    at = (token.to(tl.int64) * N + head)[:, None] * H + h[None, :]
    is_value = is_row[:, None] & (h[None, :] < H)
    query = tl.load(q + at, mask=is_value, other=0.0).to(CDT)
    peak = tl.full((BR,), -float("inf"), tl.float32)
    total = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, HP), tl.float32)
    for begin in range(low, high, BC):
        c = begin + tl.arange(0, BC)
        place = c.to(tl.int64) * 2 * G * H + group * H
        keys = tl.load(cache + place[None, :] + h[:, None], mask=(c[None, :] < high) & (h[:, None] < H), other=0.0).to(
            CDT
        )
        score = tl.dot(query, keys, input_precision="ieee") * (scale * 1.4426950408889634)
        is_seen = (c[None, :] < sees[:, None]) & (c[None, :] < high)
        if HAS_FIRST:
            is_seen = is_seen & (c[None, :] >= begins[:, None])
        score = tl.where(is_seen, score, -float("inf"))
        # A row that has seen nothing yet keeps peak -inf; 0 stands in for it so that no difference is NaN.
        new_peak = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        share = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        values = tl.load(
            cache + (place + G * H)[:, None] + h[None, :], mask=(c[:, None] < high) & (h[None, :] < H), other=0.0
        ).to(CDT)
        acc = tl.dot(share.to(CDT), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(share, 1)
        peak = new_peak
    has_any = total > 0
    safe = tl.where(has_any, total, 1.0)
    out = chunk.to(tl.int64) * M * N + token.to(tl.int64) * N + head
    tl.store(lse_out + out, tl.where(has_any, peak + tl.log2(safe), -float("inf")), mask=is_row)
    if high > low:
        tl.store(acc_out + out[:, None] * H + h[None, :], acc / safe[:, None], mask=is_value)


@triton.jit
def attention_merge(
    acc_in, lse_in, y, rows, M: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, J: tl.constexpr,
    JP: tl.constexpr, NVFP4: tl.constexpr,
):  # fmt: skip
    """y [M, N H] as operand: the chunks' means, weighted by their sums, in the order of chunks. Grid: rows, N."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(rows):
        return
    j = tl.arange(0, JP)
    at = row.to(tl.int64) * N + head
    stride = M * N
    lse = tl.load(lse_in + j * stride + at, mask=j < J, other=-float("inf"))
    peak = tl.max(lse, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lse - base), 0)
    h = tl.arange(0, HP)
    out = tl.zeros((HP,), tl.float32)
    for chunk in range(0, J):
        one = tl.load(lse_in + chunk * stride + at)
        share = tl.exp2(one - base)
        num_held = tl.where(share > 0, H, 0)  # chunks that nobody saw hold no numbers
        values = tl.load(acc_in + (chunk * stride + at) * H + h, mask=h < num_held, other=0.0)
        out += share * values
    out = out / tl.where(total > 0, total, 1.0)
    if NVFP4:
        store_operand(y, out, row, head * H, M, N * H, HP, NVFP4)  # H is a power of two
    else:
        tl.store(y + at * H + h, out.to(y.dtype.element_ty), mask=h < H)
