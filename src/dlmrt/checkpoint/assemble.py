"""From a file's tensors to the model's: renamed, stacked, split, each place filled exactly once.

A family's `RENAMES` say where each tensor goes; here every place of every tensor of the model gets its source before a
weight is read. Two files' tensors may claim one place (encoder and decoder of DiffusionGemma share weights, and some
files store both): then they must hold the same bytes.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.cut import Cut
from dlmrt.checkpoint.formats import FLOATS, InputQuantizer, StoredWeight
from dlmrt.checkpoint.tensorfile import StoredTensor, in_memory, is_equal, to_float32, to_torch
from dlmrt.errors import CheckpointError, nearest
from dlmrt.models.layers import Place, Rename, places

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # last parts of module names


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stored weight, or a part of it, and its index along the first axis of the tensor that it fills."""

    weight: StoredWeight
    index: int | None
    part: tuple[int, int] | None  # (i, n): the i-th of n equal runs along the last axis but one

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values that go to the place."""
        shape = self.weight.shape
        if self.part is None:
            return shape
        rows = shape[-2] // self.part[1] if len(shape) > 1 and shape[-2] % self.part[1] == 0 else -1
        return (*shape[:-2], rows, *shape[-1:])

    @property
    def dtype(self) -> str:
        """Type of `stored`."""
        return self.weight.parts["weight"].dtype if self.weight.format == "float" else "float32"

    def stored(self, item: int | None = None) -> StoredTensor:
        """The values that go to the place, or one item of their first axis: as in the file, or dequantised."""
        weight = self.weight
        if weight.format != "float":
            values = weight.float32()
            return in_memory(
                weight.name, "float32", self._split(values if item is None else values[item]), _path(weight)
            )
        tensor = weight.parts["weight"] if item is None else weight.parts["weight"].item(item)
        return (
            tensor if self.part is None else in_memory(weight.name, self.dtype, self._split(tensor.raw()), tensor.path)
        )

    def cut(self, cut: Cut) -> StoredTensor:
        """A part of `stored`; of values as they lie in the file nothing else is read."""
        weight, part = self.weight, self.part
        if weight.format != "float" or (part is not None and cut.axis > 0):
            stored = self.stored()
            return in_memory(weight.name, stored.dtype, cut.take(stored.raw()), _path(weight))
        tensor = weight.parts["weight"]
        if part is None:
            return tensor.cut(cut)
        rows = self.shape[-2]
        if len(self.shape) == 2:
            return tensor.cut(cut.moved(part[0] * rows))
        half = Cut(axis=0, runs=((part[0] * rows, (part[0] + 1) * rows),))
        values = np.empty(cut.shape_of(self.shape), dtype=tensor.bits)
        for at, index in enumerate(cut.indices()):
            values[at] = tensor.item(index).cut(half).raw()
        return in_memory(weight.name, self.dtype, values, tensor.path)

    def _split(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self.part is None else np.split(values, self.part[1], axis=-2)[self.part[0]]


@dataclass(frozen=True, kw_only=True)
class ModelWeight:
    """One tensor of the model and where its values lie. Example: 256 NVFP4 experts as ``[256, 512, 2048]``."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # one, or one for each index of the first axis in order

    @property
    def is_stacked(self) -> bool:
        """Whether each piece is one index of the first axis."""
        return self.pieces[0].index is not None

    @property
    def dtype(self) -> str:
        """Type of `stored`: the file's where it holds one floating type, else float32."""
        dtypes = {piece.dtype for piece in self.pieces}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def item(self, index: int) -> StoredTensor:
        """The values of one index of the first axis, in the type of `stored`."""
        if not self.is_stacked:
            return self.pieces[0].stored(index)
        tensor = self.pieces[index].stored()
        if tensor.dtype == self.dtype:
            return tensor
        return in_memory(tensor.name, "float32", to_float32(tensor), tensor.path)

    def stored(self) -> StoredTensor:
        """All values as one tensor: as it lies in the file where it does, else made of its pieces in memory."""
        first = self.pieces[0].stored()
        if not self.is_stacked:
            return first
        dtype = self.dtype
        values = np.empty(self.shape, dtype=first.raw().dtype if dtype == first.dtype else np.float32)
        for index, piece in enumerate(self.pieces):
            tensor = piece.stored()
            values[index] = tensor.raw() if tensor.dtype == dtype else to_float32(tensor)
        return in_memory(self.name, dtype, values, first.path)

    def to_torch(self, dtype: torch.dtype, cut: Cut | None = None) -> torch.Tensor:
        """All values, or a part, as a tensor of `dtype`; beyond it, one piece at a time is in memory."""
        import torch

        if not self.is_stacked:
            piece = self.pieces[0]
            return to_torch(piece.stored() if cut is None else piece.cut(cut)).to(dtype)
        assert cut is None or cut.axis == 0, "stacked weights are cut between pieces"
        pieces = self.pieces if cut is None else [self.pieces[index] for index in cut.indices()]
        values = torch.empty((len(pieces), *self.shape[1:]), dtype=dtype)
        for index, piece in enumerate(pieces):
            values[index] = to_torch(piece.stored())
        return values

    def input_quantizers(self) -> list[InputQuantizer | None]:
        """`StoredWeight.input_quantizer` of each piece."""
        return [piece.weight.input_quantizer() for piece in self.pieces]


def assemble(
    weights: Mapping[str, StoredWeight], shapes: Shapes, renames: Sequence[Rename], *, folder: Path, architecture: str
) -> dict[str, ModelWeight]:
    """Every tensor of `shapes` with its pieces.

    Raises:
        CheckpointError: a tensor is missing, left over, has another shape, or two tensors of one place differ.
    """
    found: dict[str, dict[int | None, Piece]] = {name: {} for name in shapes}
    for name, weight in weights.items():
        for place in places(name, renames):
            if place.target not in shapes:
                raise CheckpointError(
                    f"{_path(weight)}: {name} is not a tensor of {architecture}{nearest(place.target, shapes)}; "
                    "remove it or correct config.json"
                )
            _fill(found[place.target], Piece(weight=weight, index=place.index, part=place.part), place, shapes)
    missing = [name for name, pieces in found.items() if not pieces]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shapes)} tensors, first {missing[0]}; "
            "the download is incomplete or config.json is of another model"
        )
    return {name: _complete(name, shapes[name], pieces, folder) for name, pieces in found.items()}


def _fill(pieces: dict[int | None, Piece], piece: Piece, place: Place, shapes: Shapes) -> None:
    shape = shapes[place.target]
    wanted = shape if place.index is None else shape[1:]
    if piece.shape != wanted or (place.index is not None and place.index >= shape[0]):
        # A part is named by what the whole must be.
        whole = (*wanted[:-2], wanted[-2] * piece.part[1], wanted[-1]) if piece.part else wanted
        raise CheckpointError(
            f"{_path(piece.weight)}: {piece.weight.name} has shape {list(piece.weight.shape)}, config.json asks for "
            f"{list(whole)}; config.json and weights are not of one model"
        )
    if piece.dtype not in FLOATS:
        raise CheckpointError(
            f"{_path(piece.weight)}: {piece.weight.name} has dtype {piece.dtype}, supported: {', '.join(FLOATS)}; "
            "convert the checkpoint to one of them"
        )
    other = pieces.setdefault(place.index, piece)
    if other is not piece and not is_same(other.weight, piece.weight):
        raise CheckpointError(
            f"{_path(piece.weight)}: {piece.weight.name} differs from {other.weight.name}, and the model has one "
            "tensor for both; remove one of them"
        )


def _complete(name: str, shape: tuple[int, ...], pieces: Mapping[int | None, Piece], folder: Path) -> ModelWeight:
    if None in pieces:
        if len(pieces) > 1:
            raise CheckpointError(f"{folder} holds {name} both as a whole and one by one; remove one of them")
        return ModelWeight(name=name, shape=shape, pieces=(pieces[None],))
    missing = [index for index in range(shape[0]) if index not in pieces]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {shape[0]} parts of {name}, first {missing[0]}; the download is "
            "incomplete or config.json is of another model"
        )
    return ModelWeight(name=name, shape=shape, pieces=tuple(pieces[index] for index in range(shape[0])))


def kept(weights: Mapping[str, ModelWeight], layouts: Collection[str]) -> dict[str, str]:
    """Name -> layout of the matrices that an executor with kernels for `layouts` can keep as they are stored.

    Matrices that are multiplied together stay only if all of them have the same layout.
    """
    found = {name: kind for name, weight in weights.items() if (kind := _layout(weight)) and kind in layouts}
    return {
        name: kind for name, kind in found.items()
        if all(found.get(other) == kind for other in _fused_with(name) if other in weights)
    }  # fmt: skip


def _layout(weight: ModelWeight) -> str | None:
    """`StoredWeight.layout` of the matrices that make the tensor, if it is one and each is a whole matrix of it."""
    pieces = weight.pieces
    layouts = {piece.weight.layout for piece in pieces}
    is_whole = all(piece.part is None for piece in pieces) and (weight.is_stacked or len(weight.shape) == 2)
    return layouts.pop() if is_whole and len(layouts) == 1 else None


def _fused_with(name: str) -> list[str]:
    """Names of the matrices that are multiplied together with `name`, itself included."""
    stem = name.removesuffix(".weight")
    module, _, last = stem.rpartition(".")
    return [f"{module}.{other}{name[len(stem) :]}" for group in _FUSED if last in group for other in group]


def is_same(one: StoredWeight, other: StoredWeight) -> bool:
    """Whether both hold the same bytes."""
    return one.format == other.format and all(
        part in other.parts and is_equal(tensor, other.parts[part]) for part, tensor in one.parts.items()
    )


def _path(weight: StoredWeight) -> Path:
    return next(iter(weight.parts.values())).path
