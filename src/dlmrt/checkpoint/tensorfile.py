"""One safetensors file: a reader that trusts nothing it reads and a writer that streams.

Layout: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data, which
the tensors cover without gap or overlap. The header is parsed here rather than by the safetensors package because that
package has no numpy type for bfloat16 and its errors name neither file nor tensor. Data is memory-mapped and copied by
the conversions only, so reading a checkpoint takes the memory of its largest tensor beyond what the caller keeps.

Left out on purpose: types below one byte and pickled formats of any kind.

Source: format description in huggingface/safetensors README.md; limits as in safetensors 0.8.0.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlmrt.errors import CheckpointError
from dlmrt.models.config import without_duplicates

if TYPE_CHECKING:
    import torch

# Type in the file -> (our name, numpy type of the raw bits). bfloat16 and fp8 have no numpy type: their bits are kept.
DTYPES: dict[str, tuple[str, type[np.generic]]] = {
    "F64": ("float64", np.float64),
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", np.uint16),
    "F8_E4M3": ("float8_e4m3", np.uint8),
    "F8_E5M2": ("float8_e5m2", np.uint8),
    "I64": ("int64", np.int64),
    "I32": ("int32", np.int32),
    "I16": ("int16", np.int16),
    "I8": ("int8", np.int8),
    "U64": ("uint64", np.uint64),
    "U32": ("uint32", np.uint32),
    "U16": ("uint16", np.uint16),
    "U8": ("uint8", np.uint8),
    "BOOL": ("bool", np.bool_),
}
_TAGS = {name: tag for tag, (name, _) in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor as it lies in its file. Example: ``StoredTensor(name="model.norm.weight", dtype="bfloat16", ...)``."""

    name: str
    dtype: str  # "float32", "bfloat16", ... (the names of `DTYPES`)
    shape: tuple[int, ...]
    data: memoryview  # bytes in C order, mapped from the file
    path: Path  # the file, for messages

    def raw(self) -> npt.NDArray[Any]:
        """Read-only view without a copy; bfloat16 as uint16 and fp8 as uint8 bits."""
        return np.frombuffer(self.data, dtype=DTYPES[_TAGS[self.dtype]][1]).reshape(self.shape)


def release(tensor: StoredTensor) -> None:
    """Give the memory of a tensor's mapped pages back; reading it again maps them anew.

    Without this a loader holds the file twice, once mapped and once copied.
    """
    mapping = tensor.data.obj
    if not isinstance(mapping, mmap.mmap) or not len(tensor.data) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    base, start = (np.frombuffer(data, dtype=np.uint8).ctypes.data for data in (mapping, tensor.data))
    begin = (start - base) // mmap.PAGESIZE * mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, begin, start - base + len(tensor.data) - begin)


def to_float32(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """Copy a float32, float16 or bfloat16 tensor to float32; exact."""
    if tensor.dtype == "bfloat16":
        return (tensor.raw().astype(np.uint32) << 16).view(np.float32)
    assert tensor.dtype in ("float32", "float16"), tensor.dtype
    return tensor.raw().astype(np.float32)


def to_torch(tensor: StoredTensor) -> torch.Tensor:
    """Copy a float32, float16 or bfloat16 tensor to a torch tensor of the same type."""
    import torch

    assert tensor.dtype in ("float32", "float16", "bfloat16"), tensor.dtype
    bits = np.array(tensor.raw())
    return torch.from_numpy(bits).view(torch.bfloat16) if tensor.dtype == "bfloat16" else torch.from_numpy(bits)


def encode(values: StoredTensor | npt.NDArray[Any] | torch.Tensor, dtype: str) -> npt.NDArray[Any]:
    """Contiguous raw bits of `values` in `dtype` (float32, float16 or bfloat16), rounded to nearest even."""
    if isinstance(values, StoredTensor):
        if values.dtype == dtype:
            return values.raw()
        values = to_float32(values)
    if isinstance(values, np.ndarray):
        values = np.asarray(values, dtype=np.float32, order="C")
        return _bfloat16_bits(values) if dtype == "bfloat16" else values.astype(np.dtype(dtype), copy=False)
    import torch

    stored = values.detach().to(device="cpu", dtype=getattr(torch, dtype)).contiguous()
    return (stored.view(torch.uint16) if dtype == "bfloat16" else stored).numpy()


def _bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    # Rounding would carry a NaN's mantissa into the exponent: keep the NaN, made quiet.
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Map `path` and return its tensors by name, in file order.

    Raises:
        CheckpointError: the file is absent, cut short, or its header is not consistent with its size.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"cannot read {path} (it is not a file); download the checkpoint again")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _damaged(path, f"it has {size} bytes")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); download the checkpoint again") from error
    except CheckpointError:
        raise
    except ValueError as error:  # an index can name what no file system can
        raise CheckpointError(f"{str(path)!r} is not a file name; download the checkpoint again") from error
    (header_length,) = struct.unpack("<Q", data[:8])
    if header_length > min(size - 8, _MAX_HEADER_BYTES):
        raise _damaged(path, f"its header claims {header_length} bytes and the file has {size}")
    header = _parse_header(path, bytes(data[8 : 8 + header_length]))
    body = data[8 + header_length :]
    tensors = {name: _parse_entry(path, name, entry, body) for name, entry in header.items()}
    _check_cover(path, header, len(body))
    return tensors


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or cut short: {what}; download the checkpoint again")


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _damaged(path, "its __metadata__ is not an object")
    return header


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _parse_entry(path: Path, name: str, entry: Any, body: memoryview) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the entry of {name!r} does not have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(path, f"{name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _damaged(path, f"{name!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _damaged(path, f"{name!r} has the offsets {offsets!r}")
    begin, end = offsets
    num_bytes = math.prod(shape) * np.dtype(DTYPES[dtype][1]).itemsize
    if not begin <= end <= len(body):
        raise _damaged(path, f"{name!r} lies at {begin}..{end} of {len(body)} data bytes")
    if end - begin != num_bytes:
        needed = f"{num_bytes} bytes" if num_bytes < 1 << 63 else "more bytes than there can be"
        raise _damaged(path, f"{name!r} needs {needed} for {dtype} {shape[:8]} and has {end - begin}")
    return StoredTensor(name=name, dtype=DTYPES[dtype][0], shape=tuple(shape), data=body[begin:end], path=path)


def _check_cover(path: Path, header: Mapping[str, Any], num_bytes: int) -> None:
    """Tensors must follow each other from 0 to the end: a gap or an overlap is damage, or data hidden in the file."""
    position = 0
    for (begin, end), name in sorted((tuple(entry["data_offsets"]), name) for name, entry in header.items()):
        if begin != position:
            raise _damaged(path, f"{name!r} begins at data byte {begin}, expected {position}")
        position = end
    if position != num_bytes:
        raise _damaged(path, f"its tensors end at data byte {position} of {num_bytes}")


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """One tensor to be written. Example: ``FileTensor(dtype="bfloat16", shape=(512, 64), bits=lambda: ...)``."""

    dtype: str  # a name of `DTYPES`
    shape: tuple[int, ...]
    bits: Callable[[], npt.NDArray[Any]]  # raw bits in that type, as `StoredTensor.raw` gives them

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * np.dtype(DTYPES[_TAGS[self.dtype]][1]).itemsize


def write_tensors(path: Path, tensors: Mapping[str, FileTensor]) -> None:
    """Write `tensors` in their order, asking each for its bits in turn; synced to the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.num_bytes
        header[name] = {"dtype": _TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            values = tensor.bits()
            assert values.shape == tensor.shape and values.nbytes == tensor.num_bytes, name
            file.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file.fileno())
