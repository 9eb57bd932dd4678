"""Weights on the device: fused where projections are fused, packed ones as the file stores them.

NVFP4 keeps its codes and block scales, FP8 its bits and scales: nothing is dequantised and quantised again. Formats
without a kernel here (INT8, INT4), and matrices that would be fused with one of another format, become bfloat16.

Source: ours; formats as in dlmrt.checkpoint.formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One matrix or vector. Example: NVFP4 of shape [512, 2048] has values uint8 [512, 1024], scales [512, 128]."""

    values: Tensor  # plain numbers, e4m3 numbers, or two e2m1 codes a byte
    scales: Tensor | None = None  # nvfp4: e4m3 [.., O, I / 16]; fp8: float32, one a row or one a block
    shared: Tensor | None = None  # nvfp4: float32 [.., O], the matrix's factor at each of its rows
    scale_block: int = 0  # fp8: side of the squares that share a scale; 0: a scale a row


Params = Mapping[str, Packed]


def join(parts: Sequence[Packed], dtype: str, device: torch.device) -> Packed:
    """The rows of `parts`, which have the format `dtype`, as one weight on `device`."""
    values = [part.values.to(device) for part in parts]
    if dtype in ("float32", "bfloat16"):
        axis = max(values[0].ndim - 2, 0)  # rows; of stacked experts: of each one
        return Packed(values=torch.cat([value.to(getattr(torch, dtype)) for value in values], axis).contiguous())
    first = parts[0]
    scales = [part.scales.to(device) for part in parts if part.scales is not None]
    shared = [part.shared.to(device) for part in parts if part.shared is not None]
    assert len(scales) == len(parts) and len(shared) in (0, len(parts)), "parts of one format"
    return Packed(
        values=torch.cat(values).contiguous(), scales=torch.cat(scales).contiguous(),
        shared=torch.cat(shared).contiguous() if shared else None, scale_block=first.scale_block,
    )  # fmt: skip
