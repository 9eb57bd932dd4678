"""Write a checkpoint in another format: quantised, back in floats, in the other dialect, in shards of another size.

One implementation for all of them, since they differ in what is written for a matrix and nowhere else. Memory is that
of one matrix (of those that share a scale: of one at a time), whatever the size of the checkpoint; the target appears
complete or not at all (`dlmrt.checkpoint.folder`).

Left out: GPTQ-like error feedback; the rounding is to nearest.

Source: ours; formats in dlmrt.checkpoint.scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.assemble import ModelWeight
from dlmrt.checkpoint.folder import MAX_SHARD_BYTES, Progress, write_folder
from dlmrt.checkpoint.formats import FLOATS, StoredWeight
from dlmrt.checkpoint.load import Checkpoint
from dlmrt.checkpoint.policy import Policy, module_of, quantized_files, shape_of
from dlmrt.checkpoint.save import plain_tensor
from dlmrt.checkpoint.scheme import Arrays, QuantFormat, Scheme, WriteDialect
from dlmrt.checkpoint.tensorfile import FileTensor, StoredTensor, encode, to_float32
from dlmrt.errors import UnknownOptionError, UsageError, nearest
from dlmrt.models.config import read_json
from dlmrt.models.families import family_of
from dlmrt.models.layers import FileName, file_names

FloatFormat = Literal["bfloat16", "float16", "float32"]
TargetFormat = Literal["keep"] | FloatFormat | QuantFormat
TARGET_FORMATS: tuple[str, ...] = ("keep", *FLOATS, *get_args(QuantFormat))

DEFAULT_DIALECT: WriteDialect = "compressed-tensors"
_FUSED = (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"))


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was written."""

    modules: tuple[str, ...]  # whose matrices are quantised in the new files, in their order
    dialect: WriteDialect | None  # of a quantised format
    num_carried: int  # of them, those that were stored in the format already and kept their codes
    num_bytes: int  # of all tensors


def convert_checkpoint(
    folder: Path, checkpoint: Checkpoint, *, format: TargetFormat, dialect: WriteDialect | None = None,
    policy: Policy | None = None, ignore: Sequence[str] = (), input_maxima: Mapping[str, float] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES, progress: Progress | None = None,
) -> Conversion:  # fmt: skip
    """Write `checkpoint` to `folder` in `format`; configuration and tokenizer come along.

    Args:
        format: "keep" writes every tensor as it is stored, in new shards; a floating type holds every tensor, quantised
            ones dequantised; the others hold the chosen matrices quantised and everything else as it is.
        dialect: of quantised formats, whose names and configuration are written; None: compressed-tensors.
        policy: of quantised formats, which matrices; None: experts where the model has them, else linears.
        ignore: of quantised formats, modules to leave as they are: names, globs, or expressions behind "re:".
        input_maxima: module -> largest magnitude that entered it, for static scales of activations; None: those that
            the files hold, where every matrix keeps its codes, else none are written.
        progress: called behind the writing of each tensor with its bytes and those of all tensors.

    Raises:
        UnknownOptionError: format, dialect or policy has no such name.
        UsageError: nothing would be quantised, a pattern matches nothing, or a matrix does not fit the format.
        CheckpointError: the checkpoint is not whole, or the disk is full.
    """
    options = {"dialect": dialect, "policy": policy, "ignore": ignore or None, "calibration": input_maxima}
    check_format(format, [name for name, value in options.items() if value is not None])
    weights = checkpoint.weights()  # checks that the checkpoint is whole
    if format in get_args(QuantFormat):
        shapes = {name: weight.shape for name, weight in weights.items()}
        targets = quantized_files(checkpoint.config, shapes, policy, ignore)
        matrices = _Matrices(weights, targets, format, dialect or DEFAULT_DIALECT, input_maxima)
        tensors = matrices.files(checkpoint.config.dtype)
        section, documents = matrices.scheme.documents(_unquantized(checkpoint, weights, targets))
        changes: dict[str, Any] = {"quantization_config": section}
        conversion = Conversion(
            modules=tuple(targets), dialect=matrices.scheme.dialect, num_carried=len(matrices.carried),
            num_bytes=_total(tensors),
        )  # fmt: skip
    else:
        tensors = _as_stored(checkpoint) if format == "keep" else _floats(checkpoint, weights, format)
        documents, changes = ({}, {}) if format == "keep" else ({}, {"dtype": format, "torch_dtype": format})
        modules = tuple(_quantized_modules(checkpoint)) if format == "keep" else ()
        conversion = Conversion(modules=modules, dialect=None, num_carried=len(modules), num_bytes=_total(tensors))
    write_folder(
        folder, _documents(checkpoint, changes, documents, is_kept=format == "keep"), tensors,
        tokenizer_files=checkpoint.folder if (checkpoint.folder / "tokenizer.json").exists() else None,
        max_shard_bytes=max_shard_bytes, progress=progress,
    )  # fmt: skip
    return conversion


def check_format(format: str, given: Sequence[str]) -> None:
    """Refuse an unknown format, and options `given` for a format that has no use for them.

    Raises:
        UnknownOptionError, UsageError: as said.
    """
    if format not in TARGET_FORMATS:
        raise UnknownOptionError(f"unknown format {format!r}{nearest(format, TARGET_FORMATS)}")
    if given and format not in get_args(QuantFormat):
        names = ", ".join(given)
        raise UsageError(f"{names}: for quantised formats only, and the format is {format!r}; leave it out")


def _total(tensors: Mapping[str, FileTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())


def _documents(
    checkpoint: Checkpoint, changes: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]], *, is_kept: bool
) -> dict[str, Mapping[str, Any]]:
    """config.json of the source with `changes`, and the files that go with it; config.json is written last."""
    source = checkpoint.folder
    config = read_json(source / "config.json")
    result = dict(documents)
    if is_kept and (source / "hf_quant_config.json").exists():
        result["hf_quant_config.json"] = read_json(source / "hf_quant_config.json")
    if not is_kept:
        config.pop("quantization_config", None)
    text = config.get("text_config")
    if "dtype" in changes and isinstance(text, dict) and "dtype" in text:  # said twice by transformers
        config["text_config"] = {**text, "dtype": changes["dtype"]}
    if checkpoint.generation:
        result["generation_config.json"] = checkpoint.generation
    return {**result, "config.json": {**config, **changes}}


def _as_stored(checkpoint: Checkpoint) -> dict[str, FileTensor]:
    return {
        name: FileTensor(dtype=tensor.dtype, shape=tensor.shape, bits=tensor.raw)
        for name, tensor in checkpoint.stored.items()
    }


def _quantized_modules(checkpoint: Checkpoint) -> Iterator[str]:
    names = [name.rpartition(".") for name in checkpoint.stored]
    return (module for module, _, part in names if part in ("weight_scale", "weight_scale_inv"))


def _floats(checkpoint: Checkpoint, weights: Mapping[str, ModelWeight], dtype: str) -> dict[str, FileTensor]:
    """Every tensor in `dtype` but those that the family keeps in float32, named as its released files name them."""
    family = family_of(checkpoint.config)
    shapes = {name: weight.shape for name, weight in weights.items()}

    def values(name: str, index: int | None) -> StoredTensor:
        return weights[name].stored() if index is None else weights[name].item(index)

    return {
        file.name: plain_tensor(file, shapes, values, "float32" if file.name.endswith(family.FLOAT32) else dtype)
        for file in file_names(shapes, joins=family.JOINS_EXPERTS)
    }


def _unquantized(
    checkpoint: Checkpoint, weights: Mapping[str, ModelWeight], targets: Mapping[str, FileName]
) -> list[str]:
    """Modules with a matrix that is not quantised, as readers want them listed; a tied head is one."""
    family = family_of(checkpoint.config)
    shapes = {name: weight.shape for name, weight in weights.items()}
    plain = [
        module_of(file)
        for file in file_names(shapes, joins=False)
        if file.name.endswith(".weight") and file.name != family.EMBEDDING and len(shape_of(file, shapes)) == 2
        and module_of(file) not in targets
    ]  # fmt: skip
    return plain if family.HEAD in weights else [*plain, family.HEAD.removesuffix(".weight")]


class _Matrices:
    """The tensors of a quantised file; each matrix is computed once for its tensors, which are written in a row."""

    def __init__(
        self, weights: Mapping[str, ModelWeight], targets: Mapping[str, FileName], format: Any, dialect: WriteDialect,
        input_maxima: Mapping[str, float] | None,
    ) -> None:  # fmt: skip
        self._weights, self._targets = weights, targets
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        stored = {module: weight for module in targets if (weight := self._stored(module)) is not None}
        calibrated = (
            Scheme(format=format, dialect=dialect, has_static_inputs=True) if input_maxima is not None else None
        )
        self.scheme = calibrated or _scheme_of_files(format, dialect, stored, len(targets))
        self.carried = {module: weight for module, weight in stored.items() if self.scheme.keeps(weight)}
        self._input_scales = self._scales(input_maxima)
        for file in targets.values():
            self._check_columns(file)
        self._arrays = lru_cache(maxsize=1)(self._encode)
        self._largest = lru_cache(maxsize=None)(lambda module: float(np.abs(self._values(module)).max()))

    def files(self, dtype: str) -> dict[str, FileTensor]:
        """All tensors by name; what is not chosen and not a float in the source comes in `dtype`."""
        tensors: dict[str, FileTensor] = {}
        for file in file_names(self._shapes, joins=False):
            module = module_of(file)
            tensors |= self._quantized(module) if module in self._targets else {file.name: self._plain(file, dtype)}
        return tensors

    def _quantized(self, module: str) -> dict[str, FileTensor]:
        rows, columns = shape_of(self._targets[module], self._shapes)
        return {
            f"{module}.{part}": FileTensor(dtype=dtype, shape=shape, bits=self._part(module, part))
            for part, (dtype, shape) in self.scheme.layout(rows, columns).items()
        }

    def _part(self, module: str, part: str) -> Callable[[], npt.NDArray[Any]]:
        return lambda: self._arrays(module)[part]

    def _plain(self, file: FileName, dtype: str) -> FileTensor:
        weight = self._weights[file.sources[0]]
        kept = weight.dtype if all(piece.weight.format == "float" for piece in weight.pieces) else dtype
        shape = shape_of(file, self._shapes)
        return FileTensor(dtype=kept, shape=shape, bits=lambda: encode(self._tensor(file), kept))

    def _tensor(self, file: FileName) -> StoredTensor:
        weight = self._weights[file.sources[0]]
        return weight.stored() if file.index is None else weight.item(file.index)

    def _values(self, module: str) -> npt.NDArray[np.float32]:
        return to_float32(self._tensor(self._targets[module]))

    def _stored(self, module: str) -> StoredWeight | None:
        """The matrix as the source's files hold it, if they hold it as one."""
        file = self._targets[module]
        weight = self._weights[file.sources[0]]
        if weight.is_stacked != (file.index is not None):
            return None
        piece = weight.pieces[file.index or 0]
        return piece.weight if piece.part is None else None

    def _check_columns(self, file: FileName) -> None:
        columns, multiple = shape_of(file, self._shapes)[1], self.scheme.column_multiple
        if columns % multiple:
            raise UsageError(
                f"{file.name} has {columns} columns, {self.scheme.format} needs a multiple of {multiple}; name it in "
                "ignore, or choose another format"
            )

    def _scales(self, maxima: Mapping[str, float] | None) -> dict[str, np.float32]:
        if not self.scheme.has_static_inputs:
            return {}
        if maxima is None:
            return {module: _input_scale(weight) for module, weight in self.carried.items()}
        missing = [module for module in self._targets if module not in maxima]
        if missing:
            raise UsageError(f"the calibration lacks {len(missing)} modules, first {missing[0]}; calibrate this model")
        return {module: self.scheme.input_scale_of(maxima[module]) for module in self._targets}

    def _encode(self, module: str) -> Arrays:
        scale = self._input_scales.get(module)
        if module in self.carried:
            return self.scheme.carry(self.carried[module], scale)
        largest = self._shared_largest(module) if self.scheme.shares_scale else 0.0
        return self.scheme.encode(self._values(module), largest, scale)

    def _shared_largest(self, module: str) -> float:
        """Largest magnitude of this matrix and of those that engines fuse with it, so that no reader rescales them."""
        prefix, _, last = module.rpartition(".")
        group = next((names for names in _FUSED if last in names), (last,))
        return max(self._largest(f"{prefix}.{name}") for name in group if f"{prefix}.{name}" in self._targets)


def _scheme_of_files(
    format: QuantFormat, dialect: WriteDialect, stored: Mapping[str, StoredWeight], num_targets: int
) -> Scheme:
    """Static scales of activations where every matrix has one in the source and keeps its codes; else none."""
    if len(stored) == num_targets and all(map(_has_input_scale, stored.values())):
        scheme = Scheme(format=format, dialect=dialect, has_static_inputs=True)
        if all(map(scheme.keeps, stored.values())):
            return scheme
    return Scheme(format=format, dialect=dialect, has_static_inputs=False)


def _has_input_scale(weight: StoredWeight) -> bool:
    return weight.format in ("nvfp4", "fp8") and not {"input_scale", "input_global_scale"}.isdisjoint(weight.parts)


def _input_scale(weight: StoredWeight) -> np.float32:
    """The stored scale of activations as a multiplier."""
    if "input_global_scale" in weight.parts:
        return np.float32(1) / np.float32(weight.parts["input_global_scale"].raw().reshape(()))
    return np.float32(weight.parts["input_scale"].raw().reshape(()))
