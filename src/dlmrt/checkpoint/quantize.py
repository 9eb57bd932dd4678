"""Write a checkpoint with quantised matrices, in formats that the public libraries open.

Weights only: activations are quantised by whoever runs the file, dynamically (FP8, INT8) or not at all (NVFP4, INT4).
Matrices that engines fuse (gate and up; q, k and v) share their NVFP4 scale, so that no reader has to rescale them. One
matrix is in memory at a time.

    policy    what is quantised
    experts   routed experts; everything else keeps its type
    linears   also every other matrix but embedding, head, routers and residual adapter

Left out: calibrated activation scales, GPTQ-like error feedback, fp8 key/value scales.

Source: files and configuration as written by compressed-tensors 0.20.0 and nvidia-modelopt 0.47.0 (opened in tests).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

import dlmrt
from dlmrt.checkpoint.assemble import ModelWeight
from dlmrt.checkpoint.folder import MAX_SHARD_BYTES, write_folder
from dlmrt.checkpoint.load import Checkpoint
from dlmrt.checkpoint.tensorfile import FileTensor, StoredTensor, to_float32
from dlmrt.errors import UnknownOptionError, UsageError, nearest
from dlmrt.models.config import read_json
from dlmrt.models.families import Family, family_of
from dlmrt.models.layers import FileName, file_names
from dlmrt.ops import formats

QuantFormat = Literal["nvfp4", "fp8", "int8", "int4"]
Policy = Literal["experts", "linears"]
WriteDialect = Literal["compressed-tensors", "modelopt"]
Arrays = dict[str, npt.NDArray[Any]]

INT4_GROUP = 128
_FUSED = (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"))
_CT_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized", "fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized",
}  # fmt: skip
_TOKEN = {"dynamic": True, "symmetric": True, "strategy": "token"}
_CT_SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # weights, input activations
    "nvfp4": ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": formats.FP4_GROUP,
               "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}, None),
    "fp8": ({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            {"num_bits": 8, "type": "float", **_TOKEN}),
    "int8": ({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
             {"num_bits": 8, "type": "int", **_TOKEN}),
    "int4": ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP, "symmetric": True,
              "dynamic": False}, None),
}  # fmt: skip


def save_quantized(
    folder: Path, checkpoint: Checkpoint, *, format: QuantFormat, dialect: WriteDialect = "compressed-tensors",
    policy: Policy = "experts", ignore: Sequence[str] = (), max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:  # fmt: skip
    """Write `checkpoint` to `folder` with quantised matrices; configuration and tokenizer come along.

    Args:
        dialect: how NVFP4 is spelled; the other formats are compressed-tensors'.
        ignore: modules to leave as they are: names, globs, or regular expressions behind "re:".

    Returns:
        Names of the quantised modules.

    Raises:
        UnknownOptionError: format, dialect or policy has no such name.
        UsageError: nothing would be quantised, a pattern matches nothing, or a matrix does not fit the format.
    """
    for name, value, known in (
        ("format", format, QuantFormat), ("dialect", dialect, WriteDialect), ("policy", policy, Policy),
    ):  # fmt: skip
        if value not in get_args(known):
            raise UnknownOptionError(f"unknown {name} {value!r}{nearest(str(value), get_args(known))}")
    if dialect == "modelopt" and format != "nvfp4":
        raise UsageError(f"dialect 'modelopt' is written for nvfp4 only, not {format}; leave the dialect out")
    family = family_of(checkpoint.config)
    weights = checkpoint.weights()
    files = file_names({name: weight.shape for name, weight in weights.items()}, joins=False)
    targets = _targets(files, weights, family, policy, ignore)
    for file in targets.values():
        _check_columns(file, weights, format)
    matrices = _Matrices(weights, targets, format, dialect)
    tensors: dict[str, FileTensor] = {}
    for file in files:
        module = file.name.removesuffix(".weight")
        tensors |= matrices.tensors(module) if module in targets else {file.name: _unchanged(file, weights)}
    kept = [
        file.name.removesuffix(".weight")
        for file in files
        if file.name.endswith(".weight") and file.name != family.EMBEDDING and len(_shape(file, weights)) == 2
    ]
    excluded = [module for module in kept if module not in targets]
    source = checkpoint.folder
    write_folder(
        folder, _documents(checkpoint, format, dialect, excluded), tensors, max_shard_bytes=max_shard_bytes,
        tokenizer_files=source if (source / "tokenizer.json").exists() else None,
    )  # fmt: skip
    return list(targets)


def _targets(
    files: Sequence[FileName], weights: Mapping[str, ModelWeight], family: Family, policy: Policy, ignore: Sequence[str]
) -> dict[str, FileName]:
    """Module -> matrix to quantise."""
    never = (family.EMBEDDING, family.HEAD)
    candidates = {
        file.name.removesuffix(".weight"): file
        for file in files
        if file.index is not None
        or (
            policy == "linears" and file.name not in never and len(_shape(file, weights)) == 2
            and file.name.endswith(".weight") and not re.search(family.UNQUANTIZED, file.name)
        )
    }  # fmt: skip
    for pattern in ignore:
        matched = [module for module in candidates if _matches(module, pattern)]
        if not matched:
            raise UsageError(f"ignore pattern {pattern!r} matches no module that would be quantised; correct it")
        for module in matched:
            del candidates[module]
    if not candidates:
        raise UsageError(f"policy {policy!r} leaves nothing to quantise in this model; use policy 'linears'")
    return candidates


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def _shape(file: FileName, weights: Mapping[str, ModelWeight]) -> tuple[int, ...]:
    shape = weights[file.sources[0]].shape
    return shape if file.index is None else shape[1:]


def _stored(file: FileName, weights: Mapping[str, ModelWeight]) -> StoredTensor:
    weight = weights[file.sources[0]]
    if file.index is None:
        return weight.stored()
    return weight.item(file.index)


def _check_columns(file: FileName, weights: Mapping[str, ModelWeight], format: QuantFormat) -> None:
    columns = _shape(file, weights)[1]
    group = {"nvfp4": formats.FP4_GROUP, "int4": INT4_GROUP}.get(format, 1)
    if columns % group:
        raise UsageError(
            f"{file.name} has {columns} columns, {format} needs a multiple of {group}; name it in ignore, or choose "
            "another format"
        )


def _unchanged(file: FileName, weights: Mapping[str, ModelWeight]) -> FileTensor:
    dtype = weights[file.sources[0]].dtype
    return FileTensor(dtype=dtype, shape=_shape(file, weights), bits=lambda: _stored(file, weights).raw())


class _Matrices:
    """Quantised matrices of one file, each computed once for its tensors, which are written one after another."""

    def __init__(
        self, weights: Mapping[str, ModelWeight], targets: Mapping[str, FileName], format: QuantFormat,
        dialect: WriteDialect,
    ) -> None:  # fmt: skip
        self._weights, self._targets, self._format, self._dialect = weights, targets, format, dialect
        self._arrays = lru_cache(maxsize=1)(self._quantize)
        self._largest = lru_cache(maxsize=None)(lambda module: float(np.abs(self._values(module)).max()))

    def tensors(self, module: str) -> dict[str, FileTensor]:
        """The tensors of one matrix by their names in the file."""
        rows, columns = _shape(self._targets[module], self._weights)
        scales: dict[str, tuple[str, tuple[int, ...]]] = {"weight_scale": ("float32", (rows, 1))}
        match self._format, self._dialect:
            case "nvfp4", "modelopt":
                parts = {"weight": ("uint8", (rows, columns // 2)), "weight_scale_2": ("float32", ())}
                scales = {"weight_scale": ("float8_e4m3", (rows, columns // formats.FP4_GROUP))}
            case "nvfp4", _:
                parts = {"weight_packed": ("uint8", (rows, columns // 2)), "weight_global_scale": ("float32", (1,))}
                scales = {"weight_scale": ("float8_e4m3", (rows, columns // formats.FP4_GROUP))}
            case "int4", _:
                words = -(-columns // formats.INT4_PER_WORD)
                parts = {"weight_packed": ("int32", (rows, words)), "weight_shape": ("int64", (2,))}
                scales = {"weight_scale": ("float32", (rows, columns // INT4_GROUP))}
            case _:
                parts = {"weight": ("float8_e4m3" if self._format == "fp8" else "int8", (rows, columns))}
        return {
            f"{module}.{part}": FileTensor(dtype=dtype, shape=shape, bits=self._part(module, part))
            for part, (dtype, shape) in {**parts, **scales}.items()
        }

    def _part(self, module: str, part: str) -> Callable[[], npt.NDArray[Any]]:
        return lambda: self._arrays(module)[part]

    def _values(self, module: str) -> npt.NDArray[np.float32]:
        return to_float32(_stored(self._targets[module], self._weights))

    def _quantize(self, module: str) -> Arrays:
        values = self._values(module)
        match self._format:
            case "nvfp4":
                packed, scale, shared = formats.quantize_nvfp4(values, self._shared_scale(module))
                if self._dialect == "modelopt":
                    return {"weight": packed, "weight_scale": scale, "weight_scale_2": np.array(shared)}
                divisor = np.array([np.float32(1) / shared], dtype=np.float32)
                return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
            case "fp8":
                bits, scale_rows = formats.quantize_fp8(values)
                return {"weight": bits, "weight_scale": scale_rows}
            case "int8":
                whole, scale_rows = formats.quantize_int8(values)
                return {"weight": whole, "weight_scale": scale_rows}
            case "int4":
                words, scale_groups = formats.quantize_int4(values, INT4_GROUP)
                shape = np.array(values.shape, dtype=np.int64)
                return {"weight_packed": words, "weight_scale": scale_groups, "weight_shape": shape}

    def _shared_scale(self, module: str) -> np.float32:
        """NVFP4 scale of this matrix and of those that engines fuse with it."""
        prefix, _, last = module.rpartition(".")
        group = next((names for names in _FUSED if last in names), (last,))
        modules = [f"{prefix}.{name}" for name in group if f"{prefix}.{name}" in self._targets]
        return formats.nvfp4_multiplier(max(self._largest(name) for name in modules))


def _documents(
    checkpoint: Checkpoint, format: QuantFormat, dialect: WriteDialect, excluded: list[str]
) -> dict[str, Mapping[str, Any]]:
    """config.json of the source with its quantisation declared, and the files that go with it."""
    config = read_json(checkpoint.folder / "config.json")
    documents: dict[str, Mapping[str, Any]] = {}
    weights, inputs = _CT_SCHEMES[format]
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    if dialect == "modelopt":
        algorithm = "W4A16_NVFP4"
        producer = {"name": "dlmrt", "version": dlmrt.__version__}
        plain = {"num_bits": 4, "type": "float", "group_size": formats.FP4_GROUP, "dynamic": False}
        section: dict[str, Any] = {
            "quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": excluded,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": plain}},
        }  # fmt: skip
        documents["hf_quant_config.json"] = {
            "producer": producer,
            "quantization": {
                "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": formats.FP4_GROUP,
                "exclude_modules": excluded,
            },
        }  # fmt: skip
    else:
        name = _CT_FORMATS[format]
        group |= {"output_activations": None, "format": name}
        section = {
            "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": excluded, "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }  # fmt: skip
    documents = {"config.json": {**config, "quantization_config": section}, **documents}
    if checkpoint.generation:
        documents["generation_config.json"] = checkpoint.generation
    return documents
