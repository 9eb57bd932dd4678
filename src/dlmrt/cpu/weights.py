"""Weights of a checkpoint as the native packer takes them: read when it asks for one, quantised ones as stored.

A matrix that the file holds in NVFP4, INT8 or INT4 keeps its codes and scales: nothing is dequantised and quantised
again. Formats without a kernel (FP8, INT4 with zero points or other groups than 32 and 128), and matrices that are to
be fused with one of another format, are dequantised. The NVFP4 scale of a whole matrix is handed over as a multiplier,
whatever the dialect stores. Experts are read one at a time.

Source: ours; formats as in dlmrt.checkpoint.formats, layouts in csrc/kernels/pack.hpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.assemble import ModelWeight, kept
from dlmrt.checkpoint.formats import StoredWeight
from dlmrt.checkpoint.tensorfile import StoredTensor, to_float32
from dlmrt.errors import CheckpointError
from dlmrt.ops.formats import unpack_int4

KEPT = ("nvfp4", "int8", "int4_g32", "int4_g128")  # layouts whose codes the kernels multiply


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A matrix in codes. Example: NVFP4 of shape [512, 2048] has codes [512, 1024] and block scales [512, 128]."""

    format: str  # of `KEPT`
    shape: tuple[int, int]
    codes: npt.NDArray[np.generic]  # int8, of INT4 too, or two e2m1 in each uint8
    scales: npt.NDArray[np.float32] | None = None  # int8: one a row; int4: one a group [rows, groups]
    block_scales: npt.NDArray[np.uint8] | None = None  # nvfp4: e4m3 bits, one for 16 values
    multiplier: float = 1.0  # nvfp4: scale of the whole matrix


Matrix = npt.NDArray[np.generic] | Quantized  # an array is float32, or uint16 with the bits of bfloat16


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """The matrices of all experts, each read when it is asked for."""

    weight: ModelWeight
    is_kept: bool  # in codes

    def __getitem__(self, index: int) -> Matrix:
        return _quantized(self.weight.pieces[index].weight) if self.is_kept else _floats(self.weight.item(index))


Param = Matrix | Stacked
Params = Mapping[str, Param]


def kept_formats(weights: Mapping[str, ModelWeight]) -> dict[str, str]:
    """Name -> layout of the matrices that can stay as they are stored."""
    return kept(weights, KEPT)


class FileParams(Mapping[str, Param]):
    """Every tensor of a checkpoint, those of `kept` in codes; read anew at each access and held by nobody.

    An access raises CheckpointError when a block scale is NaN or negative, or the file was changed.
    """

    def __init__(self, weights: Mapping[str, ModelWeight], kept: Mapping[str, str]) -> None:
        self._weights, self._kept = weights, kept

    def __getitem__(self, name: str) -> Param:
        weight, is_kept = self._weights[name], name in self._kept
        if len(weight.shape) > 2:
            return Stacked(weight=weight, is_kept=is_kept)
        return _quantized(weight.pieces[0].weight) if is_kept else _floats(weight.stored())

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _floats(tensor: StoredTensor) -> npt.NDArray[np.generic]:
    return to_float32(tensor) if tensor.dtype == "float16" else tensor.raw()


def _quantized(stored: StoredWeight) -> Quantized:
    rows, columns = stored.shape
    parts = {name: tensor.raw() for name, tensor in stored.parts.items()}
    if stored.format == "int8":
        scales = np.broadcast_to(to_float32(stored.parts["weight_scale"]).reshape(-1, 1), (rows, 1))
        return Quantized(
            format="int8", shape=(rows, columns), codes=parts["weight"], scales=np.ascontiguousarray(scales[:, 0])
        )
    if stored.format == "int4":
        codes = np.ascontiguousarray(unpack_int4(parts["weight_packed"], columns).astype(np.int8))
        scales = np.ascontiguousarray(to_float32(stored.parts["weight_scale"]))
        return Quantized(format=stored.layout, shape=(rows, columns), codes=codes, scales=scales)
    block_scales = np.ascontiguousarray(parts["weight_scale"])
    if (block_scales > 0x7E).any():
        path = stored.parts["weight_scale"].path
        raise CheckpointError(f"{path}: {stored.name} has a block scale that is NaN or negative; download it again")
    codes = parts["weight_packed" if "weight_packed" in parts else "weight"]
    return Quantized(
        format="nvfp4", shape=(rows, columns), codes=np.ascontiguousarray(codes), block_scales=block_scales,
        multiplier=float(stored.nvfp4_multiplier()),
    )  # fmt: skip
