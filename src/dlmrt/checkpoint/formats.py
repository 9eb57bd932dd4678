"""Quantised weights in files: which tensors belong to one matrix, in which of the public formats, and their values.

The format is told by tensor names and types, since files of both NVFP4 dialects exist whose metadata says less or
something else; the metadata of config.json and hf_quant_config.json is then held against it. ModelOpt stores the
matrix's NVFP4 scale as a multiplier, compressed-tensors its reciprocal: reading one as the other is off by a factor of
up to 1e9, so what fits neither, or both, is refused by name. Nothing is ever guessed from values.

    format  tensors beside or instead of `weight`                           dialect
    nvfp4   uint8 weight, weight_scale (e4m3), weight_scale_2, input_scale  ModelOpt
    nvfp4   weight_packed, weight_scale, weight_global_scale, input_global_scale   compressed-tensors
    fp8     e4m3 weight, weight_scale or weight_scale_inv, input_scale      both; a row, a 128 x 128 block, a matrix
    int8    int8 weight, weight_scale                                       compressed-tensors
    int4    weight_packed (int32), weight_scale, weight_shape, weight_zero_point   compressed-tensors

Left out: GPTQ, AWQ, MXFP4/6/8 and sparse formats; scales of fp8 key/value caches are skipped, since caches here keep
the activations' type.

Source: nvidia-modelopt 0.47.0, compressed-tensors 0.20.0; DeepSeek's `weight_scale_inv`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.tensorfile import StoredTensor, to_float32
from dlmrt.errors import CheckpointError, UnsupportedModelError, nearest
from dlmrt.ops import formats

Float32 = npt.NDArray[np.float32]
Format = Literal["float", "nvfp4", "fp8", "int8", "int4"]
Dialect = Literal["modelopt", "compressed-tensors", "fp8"]
InputQuantizer = Callable[[Float32], Float32]

FLOATS = ("float32", "bfloat16", "float16")
_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale",
    "weight_zero_point", "weight_shape", "input_scale", "input_global_scale",
)  # fmt: skip
_CACHE_SCALES = ("k_scale", "v_scale")
# (format, dialect, tensors it needs, tensors it may have). A name's type tells formats of equal names apart.
_KINDS: tuple[tuple[Format, Dialect | None, dict[str, str], tuple[str, ...]], ...] = (
    ("nvfp4", "modelopt", {"weight": "uint8", "weight_scale": "float8_e4m3", "weight_scale_2": "float32"},
     ("input_scale",)),
    ("nvfp4", "compressed-tensors",
     {"weight_packed": "uint8", "weight_scale": "float8_e4m3", "weight_global_scale": "float32"},
     ("input_global_scale",)),
    ("fp8", None, {"weight": "float8_e4m3", "weight_scale": "float"}, ("input_scale",)),
    ("fp8", None, {"weight": "float8_e4m3", "weight_scale_inv": "float"}, ()),
    ("int8", "compressed-tensors", {"weight": "int8", "weight_scale": "float"}, ()),
    ("int4", "compressed-tensors", {"weight_packed": "int32", "weight_scale": "float", "weight_shape": "int64"},
     ("weight_zero_point",)),
)  # fmt: skip
_METHODS: dict[str, tuple[str, ...]] = {  # quant_method -> its formats or algorithms that are read
    "compressed-tensors": (
        "nvfp4-pack-quantized", "float-quantized", "int-quantized", "pack-quantized", "dense", "mixed-precision",
    ),
    "modelopt": ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION"),
    "fp8": ("fp8",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One tensor of values as a file holds it. Example: an NVFP4 matrix [512, 2048] with its three or four tensors."""

    name: str  # as an unquantised file calls it, e.g. "model.layers.1.mlp.gate_proj.weight"
    format: Format
    shape: tuple[int, ...]  # of the values
    parts: Mapping[str, StoredTensor] = field(repr=False)  # by the last part of their names
    dialect: Dialect | None = None

    def float32(self) -> Float32:
        """The values, dequantised."""
        raw = {key: tensor.raw() for key, tensor in self.parts.items()}
        match self.format:
            case "float":
                return to_float32(self.parts["weight"])
            case "nvfp4":
                is_divisor = self.dialect == "compressed-tensors"
                packed, shared = (
                    ("weight_packed", "weight_global_scale") if is_divisor else ("weight", "weight_scale_2")
                )
                scale = np.float32(raw[shared].reshape(()))
                return formats.dequantize_nvfp4(raw[packed], raw["weight_scale"], scale, is_divisor=is_divisor)
            case "fp8":
                return formats.dequantize_fp8(raw["weight"], self._scale())
            case "int8":
                return formats.dequantize_int8(raw["weight"], self._scale())
            case "int4":
                return formats.dequantize_int4(
                    raw["weight_packed"], self._scale(), self.shape[1], raw.get("weight_zero_point")
                )

    @property
    def layout(self) -> str:
        """`format` with what else a kernel has to know. Example: ``int4_g128``, groups of 128 without zero points."""
        if self.format != "int4":
            return self.format
        group = self.shape[1] // self.parts["weight_scale"].shape[1]
        return f"int4_g{group}{'_zero_points' if 'weight_zero_point' in self.parts else ''}"

    def nvfp4_multiplier(self) -> np.float32:
        """The float32 scale of an NVFP4 matrix as a multiplier, whatever its dialect stores."""
        if self.dialect == "compressed-tensors":
            return np.float32(1) / np.float32(self.parts["weight_global_scale"].raw().reshape(()))
        return np.float32(self.parts["weight_scale_2"].raw().reshape(()))

    def input_quantizer(self) -> InputQuantizer | None:
        """How the format rounds what the matrix is multiplied with; None: not at all."""
        match self.format:
            case "nvfp4" if "input_global_scale" in self.parts:
                divisor = np.float32(self.parts["input_global_scale"].raw().reshape(()))
                return lambda x: formats.quantize_nvfp4_input(x, divisor)
            case "nvfp4" if "input_scale" in self.parts:
                divisor = np.float32(1) / np.float32(self.parts["input_scale"].raw().reshape(()))
                return lambda x: formats.quantize_nvfp4_input(x, divisor)
            case "fp8":
                return self._fp8_input_quantizer()
            case "int8":
                return formats.quantize_int8_input
            case _:
                return None

    def _fp8_input_quantizer(self) -> InputQuantizer:
        if "input_scale" in self.parts:
            static = to_float32(self.parts["input_scale"]).reshape(())
            return lambda x: formats.e4m3_to_float32(formats.quantize_fp8(x, static)[0]) * static
        scale = self._scale()
        if scale.size > 1 and scale.shape[1] > 1:
            return _quantize_fp8_groups
        return formats.quantize_fp8_input

    def _scale(self) -> Float32:
        return to_float32(self.parts.get("weight_scale") or self.parts["weight_scale_inv"])


def _quantize_fp8_groups(x: Float32) -> Float32:
    """Activations rounded to fp8 with a scale of each 128 neighbours; a last group may be shorter."""
    starts = range(0, x.shape[-1], formats.FP8_BLOCK)
    groups = (x[..., start : start + formats.FP8_BLOCK] for start in starts)
    return np.concatenate([formats.quantize_fp8_input(group) for group in groups], axis=-1)


def collect(stored: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """Group a checkpoint's tensors into weights by name.

    Args:
        metadata: what `quantization_metadata` returned.

    Raises:
        CheckpointError: the tensors of a matrix fit no format, contradict each other or the metadata.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    weights: dict[str, StoredWeight] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in _PARTS:
            modules.setdefault(module, {})[part] = tensor
        elif not (part in _CACHE_SCALES and metadata):
            weights[name] = StoredWeight(name=name, format="float", shape=tensor.shape, parts={"weight": tensor})
    for module, parts in modules.items():
        weight = _weight(f"{module}.weight", parts)
        _check_dialect(weight, metadata)
        weights[weight.name] = weight
    return weights


def _weight(name: str, parts: Mapping[str, StoredTensor]) -> StoredWeight:
    if set(parts) == {"weight"}:
        return StoredWeight(name=name, format="float", shape=parts["weight"].shape, parts=parts)
    for kind, dialect, needed, optional in _KINDS:
        if set(needed) <= set(parts) <= set(needed) | set(optional) and all(
            parts[part].dtype in (FLOATS if wanted == "float" else (wanted,)) for part, wanted in needed.items()
        ):
            weight = StoredWeight(name=name, format=kind, shape=_shape(kind, parts), parts=parts, dialect=dialect)
            _check_parts(weight)
            return weight
    path = next(iter(parts.values())).path
    found = ", ".join(f"{part} ({tensor.dtype})" for part, tensor in sorted(parts.items()))
    raise CheckpointError(
        f"{path}: {name} is stored as {found}, which is none of the known weight formats (NVFP4 of ModelOpt or "
        "compressed-tensors, FP8, INT8, INT4); convert the checkpoint"
    )


def _shape(kind: Format, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    if kind == "int4":
        return tuple(int(size) for size in parts["weight_shape"].raw().reshape(-1))
    shape = (parts.get("weight") or parts["weight_packed"]).shape
    return (*shape[:-1], 2 * shape[-1]) if kind == "nvfp4" and shape else shape


def _check_parts(weight: StoredWeight) -> None:
    """Shapes of scales that fit the matrix; a transposed or cut matrix shows here, not in a kernel."""
    parts, shape = weight.parts, weight.shape
    scale = parts.get("weight_scale") or parts["weight_scale_inv"]
    rows, columns = shape if len(shape) == 2 else (0, 0)
    block = formats.FP8_BLOCK
    wanted: dict[Format, tuple[tuple[int, ...], ...]] = {
        "nvfp4": ((rows, columns // formats.FP4_GROUP),),
        "fp8": ((), (1,), (rows, 1), (-(-rows // block), -(-columns // block))),
        "int8": ((), (1,), (rows, 1)),
        "int4": ((rows, scale.shape[-1] if scale.shape else 0),),
    }
    fits = len(shape) == 2 and scale.shape in wanted[weight.format]
    if weight.format == "nvfp4":
        fits &= columns % formats.FP4_GROUP == 0
    if weight.format == "int4" and fits:
        groups = scale.shape[1]
        fits = parts["weight_packed"].shape == (rows, -(-columns // formats.INT4_PER_WORD)) and columns % groups == 0
        if "weight_zero_point" in parts:
            fits &= parts["weight_zero_point"].shape == (-(-rows // formats.INT4_PER_WORD), groups)
    singles = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
    fits &= all(int(np.prod(parts[part].shape)) == 1 for part in singles if part in parts)
    if not fits:
        found = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise CheckpointError(
            f"{scale.path}: the tensors of {weight.name} ({weight.format}) do not fit together: {found}; is the matrix "
            "transposed? Convert the checkpoint again"
        )
    for part in singles:
        if part in parts and not float(parts[part].raw().reshape(())) > 0:
            value = float(parts[part].raw().reshape(()))
            raise CheckpointError(f"{scale.path}: {part} of {weight.name} is {value}; it must be a positive number")


def _check_dialect(weight: StoredWeight, metadata: Mapping[str, Any]) -> None:
    method = metadata.get("quant_method")
    if method and weight.dialect and weight.dialect != method:
        path = next(iter(weight.parts.values())).path
        raise CheckpointError(
            f"{path}: {weight.name} has the tensors of {weight.dialect}, the configuration says {method}; the two "
            "store reciprocal scales, so correct quant_method or convert the checkpoint again"
        )


def quantization_metadata(config: Mapping[str, Any], hf_quant: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The declared quantisation, empty when there is none; what is not read is refused by name.

    Args:
        config: parsed config.json.
        hf_quant: parsed hf_quant_config.json, or an empty mapping.
        source: the folder, for errors.
    """
    section = config.get("quantization_config") or {}
    algorithm = (hf_quant.get("quantization") or {}).get("quant_algo")
    if not section and algorithm is None:
        return {}
    method = section.get("quant_method") or ("modelopt" if algorithm or section.get("quant_algo") else None)
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{source}: quant_method {method!r} is not read{nearest(str(method), _METHODS)}; use a bfloat16 checkpoint"
        )
    declared = {
        "compressed-tensors": section.get("format"),
        "modelopt": section.get("quant_algo") or algorithm,
        "fp8": "fp8",
    }[method]
    if declared is not None and declared not in _METHODS[method]:
        raise UnsupportedModelError(
            f"{source}: {method} format {declared!r} is not read{nearest(str(declared), _METHODS[method])}; "
            "use a bfloat16 checkpoint"
        )
    if section.get("sparsity_config") and section["sparsity_config"].get("format", "dense") != "dense":
        raise UnsupportedModelError(f"{source}: sparse weights are not read; use a dense checkpoint")
    if section.get("weight_block_size", [formats.FP8_BLOCK] * 2) != [formats.FP8_BLOCK] * 2:
        raise UnsupportedModelError(
            f"{source}: weight_block_size {section['weight_block_size']} is not read (128 x 128 is)"
        )
    return {**section, "quant_method": method, "format": declared}
