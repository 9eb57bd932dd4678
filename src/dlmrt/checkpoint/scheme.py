"""How one quantised matrix is written: its tensors, their values, and the section of config.json that declares them.

Files are those that the public libraries write, so that both open ours. A matrix that is stored in the wanted format
already keeps its codes: only names and the shared scale's direction change, which loses nothing.

    format  dialect             weights                                activations
    nvfp4   both                e4m3 scale of 16, one float32 scale    none; calibrated: static scale, W4A4
    fp8     compressed-tensors  float32 scale of a row                 a scale of each token; calibrated: static
    fp8     ModelOpt            float32 scale of the matrix            calibrated static scale, always
    int8    compressed-tensors  float32 scale of a row                 a scale of each token
    int4    compressed-tensors  float32 scale of 128 in a row          none

Left out: asymmetric codes, block scales of fp8, scales of key/value caches.

Source: files and configuration as written by compressed-tensors 0.20.0 and nvidia-modelopt 0.47.0 (opened in tests).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

import dlmrt
from dlmrt.checkpoint.formats import StoredWeight
from dlmrt.checkpoint.tensorfile import to_float32
from dlmrt.errors import UnknownOptionError, UsageError, nearest
from dlmrt.ops import formats

QuantFormat = Literal["nvfp4", "fp8", "int8", "int4"]
WriteDialect = Literal["compressed-tensors", "modelopt"]
Arrays = dict[str, npt.NDArray[Any]]
Float32 = npt.NDArray[np.float32]

INT4_GROUP = 128
_DIALECTS: dict[str, tuple[WriteDialect, ...]] = {
    "nvfp4": ("compressed-tensors", "modelopt"), "fp8": ("compressed-tensors", "modelopt"),
    "int8": ("compressed-tensors",), "int4": ("compressed-tensors",),
}  # fmt: skip
_CT_FORMATS = {
    "nvfp4": "nvfp4-pack-quantized", "fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized",
}  # fmt: skip
_FIXED = {"symmetric": True, "dynamic": False}
_TOKEN = {"dynamic": True, "symmetric": True, "strategy": "token"}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": formats.FP4_GROUP}
_CT_WEIGHTS: dict[str, dict[str, Any]] = {
    "nvfp4": {**_FP4, **_FIXED, "scale_dtype": "torch.float8_e4m3fn"},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel", **_FIXED},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel", **_FIXED},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP, **_FIXED},
}
_CT_INPUTS: dict[tuple[str, bool], dict[str, Any] | None] = {  # (format, are scales static)
    ("nvfp4", False): None,
    ("nvfp4", True): {**_FP4, "symmetric": True, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"},
    ("fp8", False): {"num_bits": 8, "type": "float", **_TOKEN},
    ("fp8", True): {"num_bits": 8, "type": "float", "strategy": "tensor", **_FIXED},
    ("int8", False): {"num_bits": 8, "type": "int", **_TOKEN},
    ("int4", False): None,
}
_MODELOPT_ALGORITHMS = {("nvfp4", False): "W4A16_NVFP4", ("nvfp4", True): "NVFP4", ("fp8", True): "FP8"}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A format in a dialect. Example: ``Scheme(format="nvfp4", dialect="modelopt", has_static_inputs=False)``."""

    format: QuantFormat
    dialect: WriteDialect
    has_static_inputs: bool  # calibrated scales of activations are stored

    def __post_init__(self) -> None:
        if self.format not in get_args(QuantFormat):
            raise UnknownOptionError(f"unknown format {self.format!r}{nearest(self.format, get_args(QuantFormat))}")
        if self.dialect not in get_args(WriteDialect):
            raise UnknownOptionError(f"unknown dialect {self.dialect!r}{nearest(self.dialect, get_args(WriteDialect))}")
        if self.dialect not in _DIALECTS[self.format]:
            raise UsageError(f"dialect {self.dialect!r} does not write {self.format}; leave the dialect out")
        if self.has_static_inputs and (self.format, True) not in _CT_INPUTS:
            raise UsageError(f"{self.format} has no static scales of activations; leave the calibration out")
        if self.dialect == "modelopt" and (self.format, self.has_static_inputs) not in _MODELOPT_ALGORITHMS:
            raise UsageError(
                f"{self.format} of ModelOpt needs calibrated scales of activations; calibrate it, or use dialect "
                "'compressed-tensors'"
            )

    @property
    def column_multiple(self) -> int:
        """What the length of a row must be a multiple of."""
        return {"nvfp4": formats.FP4_GROUP, "int4": INT4_GROUP}.get(self.format, 1)

    @property
    def shares_scale(self) -> bool:
        """Whether the whole matrix has one scale, which matrices that engines fuse should share."""
        return self.format == "nvfp4" or (self.format, self.dialect) == ("fp8", "modelopt")

    def layout(self, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Last part of the name -> type and shape of each tensor of a matrix, in the order of the file."""
        is_modelopt = self.dialect == "modelopt"
        groups = ("float8_e4m3", (rows, columns // formats.FP4_GROUP))
        parts: dict[str, tuple[str, tuple[int, ...]]]
        match self.format:
            case "nvfp4" if is_modelopt:
                parts = {"weight": ("uint8", (rows, columns // 2)), "weight_scale_2": ("float32", ())}
                parts["weight_scale"] = groups
            case "nvfp4":
                parts = {"weight_packed": ("uint8", (rows, columns // 2)), "weight_global_scale": ("float32", (1,))}
                parts["weight_scale"] = groups
            case "int4":
                words = -(-columns // formats.INT4_PER_WORD)
                parts = {"weight_packed": ("int32", (rows, words)), "weight_shape": ("int64", (2,))}
                parts["weight_scale"] = ("float32", (rows, columns // INT4_GROUP))
            case _:
                parts = {"weight": ("float8_e4m3" if self.format == "fp8" else "int8", (rows, columns))}
                parts["weight_scale"] = ("float32", () if is_modelopt else (rows, 1))
        if self.has_static_inputs:
            is_divisor = self.format == "nvfp4" and not is_modelopt
            parts["input_global_scale" if is_divisor else "input_scale"] = ("float32", () if is_modelopt else (1,))
        return parts

    def encode(self, values: Float32, largest: float, input_scale: np.float32 | None) -> Arrays:
        """The tensors of a matrix.

        Args:
            largest: magnitude for the scale of the whole matrix, where there is one.
            input_scale: as `input_scale_of` gives it.
        """
        match self.format:
            case "nvfp4":
                packed, scale, shared = formats.quantize_nvfp4(values, formats.nvfp4_multiplier(largest))
                arrays = self._nvfp4(packed, scale, shared)
            case "fp8":
                one = np.asarray(largest / 448 if largest > 0 else 1, dtype=np.float32)
                bits, rows = formats.quantize_fp8(values, one if self.shares_scale else None)
                arrays = {"weight": bits, "weight_scale": rows}
            case "int8":
                whole, rows = formats.quantize_int8(values)
                arrays = {"weight": whole, "weight_scale": rows}
            case "int4":
                words, groups = formats.quantize_int4(values, INT4_GROUP)
                shape = np.array(values.shape, dtype=np.int64)
                arrays = {"weight_packed": words, "weight_scale": groups, "weight_shape": shape}
        return arrays | self._inputs(input_scale)

    def keeps(self, weight: StoredWeight) -> bool:
        """Whether a stored matrix is in this scheme but for names, so that `carry` can take its codes over."""
        if weight.format != self.format:
            return False
        scale = (weight.parts.get("weight_scale") or weight.parts["weight_scale_inv"]).shape
        match self.format:
            case "nvfp4":
                return True
            case "int4":
                return "weight_zero_point" not in weight.parts and scale[1] * INT4_GROUP == weight.shape[1]
            case _:
                return scale in ((), (1,)) if self.shares_scale else scale == (weight.shape[0], 1)

    def carry(self, weight: StoredWeight, input_scale: np.float32 | None) -> Arrays:
        """The tensors of a matrix that `keeps`, with its codes as they are."""
        parts = {part: tensor.raw() for part, tensor in weight.parts.items() if "scale" not in part}
        block = weight.parts.get("weight_scale") or weight.parts["weight_scale_inv"]
        if self.format == "nvfp4":
            codes = parts.get("weight", parts.get("weight_packed"))
            assert codes is not None, weight.name
            return self._nvfp4(codes, block.raw(), weight.nvfp4_multiplier()) | self._inputs(input_scale)
        scale = to_float32(block)
        return {**parts, "weight_scale": scale.reshape(()) if self.shares_scale else scale} | self._inputs(input_scale)

    def _nvfp4(self, packed: npt.NDArray[Any], scale: npt.NDArray[Any], multiplier: np.float32) -> Arrays:
        if self.dialect == "modelopt":
            return {"weight": packed, "weight_scale": scale, "weight_scale_2": np.array(multiplier)}
        divisor = np.array([np.float32(1) / multiplier], dtype=np.float32)
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}

    def _inputs(self, scale: np.float32 | None) -> Arrays:
        if not self.has_static_inputs:
            return {}
        assert scale is not None
        if self.dialect == "modelopt":
            return {"input_scale": np.array(scale)}
        if self.format == "nvfp4":
            return {"input_global_scale": np.array([np.float32(1) / scale], dtype=np.float32)}
        return {"input_scale": np.array([scale], dtype=np.float32)}

    def input_scale_of(self, largest: float) -> np.float32:
        """Static scale, a multiplier, of activations whose largest magnitude is `largest`."""
        if self.format == "nvfp4":
            return formats.nvfp4_multiplier(largest)
        return np.float32(largest / 448 if largest > 0 else 1)

    def documents(self, unquantized: Sequence[str]) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
        """`quantization_config` of config.json, and the files that go with it.

        Args:
            unquantized: modules with a matrix that stays as it is.
        """
        if self.dialect == "modelopt":
            return self._modelopt(list(unquantized))
        name = _CT_FORMATS[self.format]
        group = {
            "targets": ["Linear"], "weights": _CT_WEIGHTS[self.format], "output_activations": None, "format": name,
            "input_activations": _CT_INPUTS[self.format, self.has_static_inputs],
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(unquantized), "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }, {}  # fmt: skip

    def _modelopt(self, unquantized: list[str]) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
        algorithm = _MODELOPT_ALGORITHMS[self.format, self.has_static_inputs]
        producer = {"name": "dlmrt", "version": dlmrt.__version__}
        plain: dict[str, Any] = {"num_bits": 4 if self.format == "nvfp4" else 8, "type": "float", "dynamic": False}
        if self.format == "nvfp4":
            plain["group_size"] = formats.FP4_GROUP
        group = {"targets": ["Linear"], "weights": plain}
        if self.has_static_inputs:
            group["input_activations"] = plain
        section = {
            "quant_method": "modelopt", "quant_algo": algorithm, "producer": producer, "ignore": unquantized,
            "config_groups": {"group_0": group},
        }  # fmt: skip
        quantization: dict[str, Any] = {
            "quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": unquantized,
        }  # fmt: skip
        if self.format == "nvfp4":
            quantization["group_size"] = formats.FP4_GROUP
        return section, {"hf_quant_config.json": {"producer": producer, "quantization": quantization}}
