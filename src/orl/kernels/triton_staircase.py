# ruff: noqa: ANN001, ANN202 arguments of a kernel are whatever the launch passes
"""Staircase attention in Triton, forward and backward.

A program holds one tile of query rows of one head and walks the two runs of keys its rows can see (`orl.kernels
.intervals.Tiles`): the clean prefix, then the canvases it touches. Only what a row does not see within these tiles is
masked; no mask tensor exists, and invisible tiles are never visited. Backward recomputes probabilities from the saved
log of the softmax sum. Gradients of keys and values come from a kernel of their own, one program a tile of keys, that
adds up the query tiles and grouped heads in a fixed order: no atomics, so equal inputs give equal bits.

Products of float32 run in full precision, so that the interpreter (TRITON_INTERPRET=1) can be compared exactly; softmax
and sums are float32 whatever the inputs are.

Legend: T rows, N heads, G key/value heads, H head width (padded to a power of two), M rows of a query tile, K of a key
tile.

Source: ours; online softmax and its backward as in FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from orl.kernels.intervals import Intervals, Tiles

QUERY_TILE, KEY_TILE = 64, 64


@triton.jit
def _rows(pointer, rows, head, num_rows, heads, H: tl.constexpr, HP: tl.constexpr):
    """Tile [rows, HP] of one head of a contiguous [T, heads, H]; 0 outside."""
    dims = tl.arange(0, HP)
    inside = (rows < num_rows)[:, None] & (dims < H)[None, :]
    return tl.load(pointer + (rows[:, None] * heads + head) * H + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _store(pointer, value, rows, head, num_rows, heads, H: tl.constexpr, HP: tl.constexpr):
    dims = tl.arange(0, HP)
    inside = (rows < num_rows)[:, None] & (dims < H)[None, :]
    tl.store(pointer + (rows[:, None] * heads + head) * H + dims[None, :], value, mask=inside)


@triton.jit
def _interval(low, high, rows, keys, which, num_rows):
    """Bool [M, K]: key inside interval `which` of the row."""
    begin = tl.load(low + which * num_rows + rows, mask=rows < num_rows, other=0)
    end = tl.load(high + which * num_rows + rows, mask=rows < num_rows, other=0)
    return (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])


@triton.jit
def _forward(
    q, k, v, low, high, bounds, out, lse, scale, num_rows, N, G,
    H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = tile * M + tl.arange(0, M)
    kv_head = head // (N // G)
    q_MH = _rows(q, rows, head, num_rows, N, H, HP)
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    out_MH = tl.zeros([M, HP], tl.float32)
    for which in tl.static_range(2):
        for first in range(tl.load(bounds + 4 * tile + 2 * which), tl.load(bounds + 4 * tile + 2 * which + 1), K):
            keys = first + tl.arange(0, K)
            k_KH = _rows(k, keys, kv_head, num_rows, G, H, HP)
            v_KH = _rows(v, keys, kv_head, num_rows, G, H, HP)
            score_MK = tl.dot(q_MH, tl.trans(k_KH), input_precision="ieee") * scale
            score_MK = tl.where(_interval(low, high, rows, keys, which, num_rows), score_MK, float("-inf"))
            higher_M = tl.maximum(top_M, tl.max(score_MK, 1))
            base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # nothing seen yet: no inf - inf
            p_MK = tl.exp(score_MK - base_M[:, None])
            fade_M = tl.exp(top_M - base_M)
            sum_M = sum_M * fade_M + tl.sum(p_MK, 1)
            out_MH = out_MH * fade_M[:, None] + tl.dot(p_MK.to(v_KH.dtype), v_KH, input_precision="ieee")
            top_M = higher_M
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)  # rows past the end
    _store(out, (out_MH / sum_M[:, None]).to(out.dtype.element_ty), rows, head, num_rows, N, H, HP)
    top_M = tl.where(top_M == float("-inf"), 0.0, top_M)
    tl.store(lse + head * num_rows + rows, top_M + tl.log(sum_M), mask=rows < num_rows)


@triton.jit
def _backward_q(
    q, k, v, low, high, bounds, grad, lse, delta, grad_q, scale, num_rows, N, G,
    H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = tile * M + tl.arange(0, M)
    kv_head = head // (N // G)
    q_MH, grad_MH = _rows(q, rows, head, num_rows, N, H, HP), _rows(grad, rows, head, num_rows, N, H, HP)
    lse_M = tl.load(lse + head * num_rows + rows, mask=rows < num_rows, other=0.0)
    delta_M = tl.load(delta + head * num_rows + rows, mask=rows < num_rows, other=0.0)
    found_MH = tl.zeros([M, HP], tl.float32)
    for which in tl.static_range(2):
        for first in range(tl.load(bounds + 4 * tile + 2 * which), tl.load(bounds + 4 * tile + 2 * which + 1), K):
            keys = first + tl.arange(0, K)
            k_KH = _rows(k, keys, kv_head, num_rows, G, H, HP)
            v_KH = _rows(v, keys, kv_head, num_rows, G, H, HP)
            score_MK = tl.dot(q_MH, tl.trans(k_KH), input_precision="ieee") * scale
            is_seen = _interval(low, high, rows, keys, which, num_rows)
            p_MK = tl.where(is_seen, tl.exp(score_MK - lse_M[:, None]), 0.0)
            dp_MK = tl.dot(grad_MH, tl.trans(v_KH), input_precision="ieee")
            ds_MK = p_MK * (dp_MK - delta_M[:, None]) * scale
            found_MH += tl.dot(ds_MK.to(k_KH.dtype), k_KH, input_precision="ieee")
    _store(grad_q, found_MH.to(grad_q.dtype.element_ty), rows, head, num_rows, N, H, HP)


@triton.jit
def _backward_kv(
    q, k, v, low, high, offsets, queries, grad, lse, delta, grad_k, grad_v, scale, num_rows, N, G,
    H: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    keys = tile * K + tl.arange(0, K)
    k_KH, v_KH = _rows(k, keys, kv_head, num_rows, G, H, HP), _rows(v, keys, kv_head, num_rows, G, H, HP)
    dk_KH, dv_KH = tl.zeros([K, HP], tl.float32), tl.zeros([K, HP], tl.float32)
    for at in range(tl.load(offsets + tile), tl.load(offsets + tile + 1)):
        rows = tl.load(queries + at) * M + tl.arange(0, M)
        is_seen = _interval(low, high, rows, keys, 0, num_rows) | _interval(low, high, rows, keys, 1, num_rows)
        for head in range(kv_head * (N // G), (kv_head + 1) * (N // G)):
            q_MH, grad_MH = _rows(q, rows, head, num_rows, N, H, HP), _rows(grad, rows, head, num_rows, N, H, HP)
            lse_M = tl.load(lse + head * num_rows + rows, mask=rows < num_rows, other=0.0)
            delta_M = tl.load(delta + head * num_rows + rows, mask=rows < num_rows, other=0.0)
            score_MK = tl.dot(q_MH, tl.trans(k_KH), input_precision="ieee") * scale
            p_MK = tl.where(is_seen, tl.exp(score_MK - lse_M[:, None]), 0.0)
            dv_KH += tl.dot(tl.trans(p_MK.to(grad_MH.dtype)), grad_MH, input_precision="ieee")
            dp_MK = tl.dot(grad_MH, tl.trans(v_KH), input_precision="ieee")
            ds_MK = p_MK * (dp_MK - delta_M[:, None]) * scale
            dk_KH += tl.dot(tl.trans(ds_MK.to(q_MH.dtype)), q_MH, input_precision="ieee")
    _store(grad_k, dk_KH.to(grad_k.dtype.element_ty), keys, kv_head, num_rows, G, H, HP)
    _store(grad_v, dv_KH.to(grad_v.dtype.element_ty), keys, kv_head, num_rows, G, H, HP)


class _Plan:
    """Intervals and tiles of one layer kind, on the device."""

    def __init__(self, intervals: Intervals, device: str) -> None:
        tiles = Tiles.of(intervals, query_tile=QUERY_TILE, key_tile=KEY_TILE)

        def put(array: Any) -> Tensor:
            return torch.from_numpy(array).contiguous().to(device)

        self.low, self.high = put(intervals.low_2T), put(intervals.high_2T)
        self.bounds, self.offsets, self.queries = put(tiles.bounds_Q4), put(tiles.offsets_K), put(tiles.queries)


class _Staircase(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        num_rows, num_heads, width = q.shape
        lse = torch.empty(num_heads, num_rows, dtype=torch.float32, device=q.device)
        _forward[(triton.cdiv(num_rows, QUERY_TILE), num_heads)](
            q, k, v, plan.low, plan.high, plan.bounds, out, lse, scale, num_rows, num_heads, k.shape[1], **_sizes(width)
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        plan, grad = ctx.plan, grad.contiguous()
        num_rows, num_heads, width = q.shape
        delta = (grad.float() * out.float()).sum(-1).T.contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        rest = (ctx.scale, num_rows, num_heads, k.shape[1])
        _backward_q[(triton.cdiv(num_rows, QUERY_TILE), num_heads)](
            q, k, v, plan.low, plan.high, plan.bounds, grad, lse, delta, grad_q, *rest, **_sizes(width)
        )
        _backward_kv[(triton.cdiv(num_rows, KEY_TILE), k.shape[1])](
            q, k, v, plan.low, plan.high, plan.offsets, plan.queries, grad, lse, delta, grad_k, grad_v, *rest,
            **_sizes(width),
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None


def _sizes(width: int) -> dict[str, int]:
    return {"H": width, "HP": max(16, triton.next_power_of_2(width)), "M": QUERY_TILE, "K": KEY_TILE}


class TritonStaircase:
    """Implements `dlmrt.ops.spec.Attend` over packed rows [T].

    Args:
        layers: intervals of every layer; equal objects share their tiles.
    """

    def __init__(self, layers: list[Intervals], *, device: str) -> None:
        plans = {id(intervals): _Plan(intervals, device) for intervals in layers}
        self._plans = [plans[id(intervals)] for intervals in layers]

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `dlmrt.ops.spec.Attend`."""
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast norms leave them in float32
        found: Tensor = _Staircase.apply(q, k, v, self._plans[layer_idx], scale)  # type: ignore[no-untyped-call]
        return found.flatten(-2)
