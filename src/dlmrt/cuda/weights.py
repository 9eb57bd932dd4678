"""Weights on the device: fused where projections are fused, packed ones as the file stores them.

NVFP4 keeps its codes and block scales, FP8 its numbers and scales: nothing is dequantised and quantised again. Formats
without a kernel here (INT8, INT4), the head, and matrices that are fused with one of another format become floats.

Source: ours; formats as in dlmrt.checkpoint.formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlmrt.checkpoint.assemble import ModelWeight, kept
from dlmrt.checkpoint.cut import Cut
from dlmrt.checkpoint.formats import StoredWeight
from dlmrt.checkpoint.tensorfile import StoredTensor, to_float32
from dlmrt.errors import CheckpointError
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.ops.formats import FP4_GROUP, FP8_BLOCK
from dlmrt.program.nodes import Buffer, maximum

PACKED = ("nvfp4", "fp8")  # formats whose codes the kernels multiply


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One tensor, or a stack of matrices. Example: NVFP4 [512, 2048]: values uint8 [512, 1024], scales [512, 128]."""

    values: Tensor  # plain numbers, e4m3 numbers, or two e2m1 codes a byte
    scales: Tensor | None = None  # nvfp4: e4m3 [.., O, I / 16]; fp8: float32 [.., O], or one a block
    shared: Tensor | None = None  # nvfp4: float32 [.., O], the matrix's factor at each of its rows
    scale_block: int = 0  # fp8: side of the squares that share a scale; 0: a scale a row


Params = Mapping[str, Tensor | Packed]


def kept_formats(weights: Mapping[str, ModelWeight], config: ModelConfig) -> dict[str, str]:
    """Name -> format of the matrices that can stay as they are stored."""
    family = family_of(config)
    found = {
        name: weight for name, weight in weights.items()
        if name not in (family.HEAD, family.EMBEDDING) and not _is_cut(weight)
    }  # fmt: skip
    return kept(found, PACKED)


class FileParams(Mapping[str, Tensor | Packed]):
    """Every tensor of a checkpoint, those of `kept` in codes; read anew at each access and held by nobody.

    Args:
        cuts: what is read of tensors that are not wanted whole; of those of `kept` some matrices of a stack.

    An access raises CheckpointError when a block scale is NaN or negative, or the file was changed.
    """

    def __init__(
        self, weights: Mapping[str, ModelWeight], kept: Mapping[str, str], cuts: Mapping[str, Cut] | None = None
    ) -> None:
        self._weights, self._kept, self._cuts = weights, kept, cuts or {}

    def __getitem__(self, name: str) -> Tensor | Packed:
        weight, cut = self._weights[name], self._cuts.get(name)
        if name not in self._kept:
            return weight.to_torch(torch.bfloat16 if weight.dtype == "bfloat16" else torch.float32, cut)
        pieces = weight.pieces if cut is None else [weight.pieces[index] for index in cut.indices()]
        parts = [_packed(piece.weight) for piece in pieces]
        return stack(parts) if weight.is_stacked else parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def stack(parts: Sequence[Packed]) -> Packed:
    """Matrices of one shape and format as one tensor of them."""

    def stacked(name: str) -> Tensor | None:
        return None if getattr(parts[0], name) is None else torch.stack([getattr(part, name) for part in parts])

    values = stacked("values")
    assert values is not None
    return Packed(values=values, scales=stacked("scales"), shared=stacked("shared"), scale_block=parts[0].scale_block)


def join(parts: Sequence[Packed], dtype: str, device: torch.device) -> Packed:
    """The rows of `parts`, which have the format `dtype`, as one weight on `device`; of stacks: of each matrix."""

    def joined(tensors: Sequence[Tensor | None], per_row: int) -> Tensor | None:
        """Side by side along the rows, behind which `per_row` axes stand."""
        found = [tensor.to(device) for tensor in tensors if tensor is not None]
        assert len(found) in (0, len(parts)), "parts of one format"
        return torch.cat(found, max(found[0].ndim - 1 - per_row, 0)).contiguous() if found else None

    values = [part.values for part in parts]
    if dtype not in PACKED:
        values = [value.to(device, getattr(torch, dtype)) for value in values]
    matrix = joined(values, 1)
    assert matrix is not None
    is_row = parts[0].scales is not None and parts[0].scales.ndim < matrix.ndim
    return Packed(
        values=matrix, scales=joined([part.scales for part in parts], 0 if is_row else 1),
        shared=joined([part.shared for part in parts], 0), scale_block=parts[0].scale_block,
    )  # fmt: skip


def weight_bytes(buffer: Buffer) -> int:
    """Size of a weight, in packed formats with a scale a row or block."""
    if buffer.dtype not in PACKED:
        return buffer.num_bytes
    *rows, width = map(maximum, buffer.shape)
    bytes_per_row = width // 2 + width // FP4_GROUP if buffer.dtype == "nvfp4" else width
    return math.prod(rows) * (bytes_per_row + 4)


def _is_cut(weight: ModelWeight) -> bool:
    """Whether a block of FP8 scales ends with the matrix's rows: what is fused below it would begin inside a block."""
    return any(
        piece.weight.format == "fp8" and _is_blocked(piece.weight) and piece.weight.shape[0] % FP8_BLOCK != 0
        for piece in weight.pieces
    )


def _is_blocked(stored: StoredWeight) -> bool:
    shape = _scale_of(stored).shape
    return len(shape) == 2 and shape[1] > 1


def _scale_of(stored: StoredWeight) -> StoredTensor:
    return stored.parts.get("weight_scale") or stored.parts["weight_scale_inv"]


def _packed(stored: StoredWeight) -> Packed:
    rows = stored.shape[0]
    if stored.format == "fp8":
        values = torch.from_numpy(stored.parts["weight"].raw().copy()).view(torch.float8_e4m3fn)
        scales = to_float32(_scale_of(stored))
        if _is_blocked(stored):
            return Packed(values=values, scales=torch.from_numpy(scales.copy()), scale_block=FP8_BLOCK)
        spread = np.broadcast_to(scales.reshape(-1), (rows,)).copy()
        return Packed(values=values, scales=torch.from_numpy(spread))
    codes = stored.parts["weight_packed" if "weight_packed" in stored.parts else "weight"]
    block_scales = stored.parts["weight_scale"].raw()
    if (block_scales > 0x7E).any():
        path = stored.parts["weight_scale"].path
        raise CheckpointError(f"{path}: {stored.name} has a block scale that is NaN or negative; download it again")
    return Packed(
        values=torch.from_numpy(codes.raw().copy()),
        scales=torch.from_numpy(block_scales.copy()).view(torch.float8_e4m3fn),
        shared=torch.full((rows,), float(stored.nvfp4_multiplier())),
    )
