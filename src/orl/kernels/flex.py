"""Staircase attention by FlexAttention: the intervals of a row as a mask function.

On a GPU torch compiles it into one kernel that skips invisible tiles; elsewhere it runs uncompiled, for comparison.

Source: torch.nn.attention.flex_attention; ours.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from orl.kernels.intervals import Intervals


class FlexStaircase:
    """Implements `dlmrt.ops.spec.Attend` over packed rows [T].

    Args:
        layers: intervals of every layer; equal objects share a mask.
    """

    def __init__(self, layers: list[Intervals], *, device: str) -> None:
        masks = {id(intervals): _block_mask(intervals, device) for intervals in layers}
        self._masks = [masks[id(intervals)] for intervals in layers]
        self._run = _compiled() if torch.device(device).type == "cuda" else flex_attention

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `dlmrt.ops.spec.Attend`."""
        found: Tensor = self._run(
            *(t.to(v.dtype).transpose(0, 1).unsqueeze(0) for t in (q, k, v)), block_mask=self._masks[layer_idx],
            scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return found.squeeze(0).transpose(0, 1).flatten(-2)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _block_mask(intervals: Intervals, device: str) -> Any:
    low, high = (torch.from_numpy(x).to(device) for x in (intervals.low_2T, intervals.high_2T))

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((k >= low[0, q]) & (k < high[0, q])) | ((k >= low[1, q]) & (k < high[1, q]))

    num_rows = low.shape[1]
    return create_block_mask(visible, None, None, num_rows, num_rows, device=device)
