"""One safetensors file: a reader that trusts nothing it reads and a writer that streams.

Layout: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data, which
the tensors cover without gap or overlap. The header is parsed here rather than by the safetensors package because that
package has no numpy type for bfloat16 and its errors name neither file nor tensor. A tensor's bytes are read when they
are asked for, so a checkpoint takes the memory of its largest tensor beyond what the caller keeps. They are read, not
mapped: a file that is cut short or rewritten while it is used is then an error with its name, where touching a mapped
page that is gone ends the process (SIGBUS).

Left out on purpose: types below one byte and pickled formats of any kind.

Source: format description in huggingface/safetensors README.md; limits as in safetensors 0.8.0.
"""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.cut import Cut
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
_PIECE_BYTES = 1 << 24  # of two tensors that are compared


class OpenFile:
    """An open tensor file that notices when it is changed; closed when no tensor refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._opened = os.fstat(self._descriptor)

    @property
    def size(self) -> int:
        """Bytes when it was opened."""
        return self._opened.st_size

    def read(self, begin: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A copy of bytes of the file.

        Raises:
            CheckpointError: the file is not what it was when it was opened, or the disk failed.
        """
        values = np.empty(num_bytes, dtype=np.uint8)
        remaining = values.data
        try:
            while remaining and (count := os.preadv(self._descriptor, [remaining], begin + num_bytes - len(remaining))):
                remaining = remaining[count:]
            now = os.fstat(self._descriptor)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.path} ({error.strerror}); download the checkpoint again"
            ) from error
        if remaining or (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise CheckpointError(
                f"{self.path} was changed while it was read ({self.size} bytes then, {now.st_size} now); load it again "
                "when nothing writes to it"
            )
        return values


@dataclass(frozen=True, kw_only=True)
class FileBytes:
    """A run of bytes in a file, not read yet."""

    file: OpenFile
    begin: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor as it lies in its file. Example: ``StoredTensor(name="model.norm.weight", dtype="bfloat16", ...)``."""

    name: str
    dtype: str  # "float32", "bfloat16", ... (the names of `DTYPES`)
    shape: tuple[int, ...]
    data: FileBytes | memoryview  # bytes in C order: in the file, or, of values made from a file's, in memory
    path: Path  # the file, for messages

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return self.data.num_bytes if isinstance(self.data, FileBytes) else self.data.nbytes

    def raw(self) -> npt.NDArray[Any]:
        """The values, bfloat16 as uint16 and fp8 as uint8 bits: read from the file by each call, or a read-only view.

        Raises:
            CheckpointError: the file is not what it was when it was opened.
        """
        if isinstance(self.data, FileBytes):
            return self.data.file.read(self.data.begin, self.data.num_bytes).view(self.bits).reshape(self.shape)
        return np.frombuffer(self.data, dtype=self.bits).reshape(self.shape)

    def item(self, index: int) -> StoredTensor:
        """One index of the first axis, not read either."""
        data = self._bytes(index, index + 1)
        return StoredTensor(name=self.name, dtype=self.dtype, shape=self.shape[1:], data=data, path=self.path)

    def cut(self, cut: Cut) -> StoredTensor:
        """A part of the values; nothing else is read, and a single run of the first axis is not read either."""
        if cut.axis == 0 and len(cut.runs) == 1:
            data = self._bytes(*cut.runs[0])
            return StoredTensor(
                name=self.name, dtype=self.dtype, shape=cut.shape_of(self.shape), data=data, path=self.path
            )
        values = np.empty(cut.shape_of(self.shape), dtype=self.bits)
        at = 0
        for begin, end in cut.runs:
            here = slice(at, at + end - begin)
            if cut.axis == 0:
                values[here] = self.cut(Cut(axis=0, runs=((begin, end),))).raw()
            else:
                for row in range(self.shape[0]):
                    values[row, here] = self.item(row).cut(Cut(axis=0, runs=((begin, end),))).raw()
            at = here.stop
        return in_memory(self.name, self.dtype, values, self.path)

    def _bytes(self, first: int, end: int) -> FileBytes | memoryview:
        """Those of some indices of the first axis."""
        size = self.num_bytes // self.shape[0]
        if isinstance(self.data, FileBytes):
            return FileBytes(file=self.data.file, begin=self.data.begin + first * size, num_bytes=(end - first) * size)
        return self.data[first * size : end * size]

    @property
    def bits(self) -> type[np.generic]:
        """Type of what `raw` returns."""
        return DTYPES[_TAGS[self.dtype]][1]


def in_memory(name: str, dtype: str, values: npt.NDArray[Any], path: Path) -> StoredTensor:
    """A tensor of `values` (bits of `dtype`, as `raw` gives them) that were made from those of `path`."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data.toreadonly()
    return StoredTensor(name=name, dtype=dtype, shape=values.shape, data=data, path=path)


def is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether both have the same type, shape and bytes; compared in pieces, so that neither is in memory whole."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    starts = range(0, one.num_bytes, _PIECE_BYTES)
    return all(np.array_equal(_piece(one.data, start), _piece(other.data, start)) for start in starts)


def _piece(data: FileBytes | memoryview, start: int) -> npt.NDArray[np.uint8]:
    if isinstance(data, FileBytes):
        return data.file.read(data.begin + start, min(_PIECE_BYTES, data.num_bytes - start))
    return np.frombuffer(data, dtype=np.uint8)[start : start + _PIECE_BYTES]


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
    bits = tensor.raw() if isinstance(tensor.data, FileBytes) else tensor.raw().copy()  # the caller's own
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
    """Read the header of `path` and return its tensors by name, in file order.

    Raises:
        CheckpointError: the file is absent, cut short, or its header is not consistent with its size.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"cannot read {path} (it is not a file); download the checkpoint again")
        file = OpenFile(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except CheckpointError:
        raise
    except ValueError as error:  # an index can name what no file system can
        raise CheckpointError(f"{str(path)!r} is not a file name; download the checkpoint again") from error
    if file.size < 8:
        raise _damaged(path, f"it has {file.size} bytes")
    (header_length,) = struct.unpack("<Q", file.read(0, 8).tobytes())
    if header_length > min(file.size - 8, _MAX_HEADER_BYTES):
        raise _damaged(path, f"its header claims {header_length} bytes and the file has {file.size}")
    header = _parse_header(path, file.read(8, header_length).tobytes())
    body = FileBytes(file=file, begin=8 + header_length, num_bytes=file.size - 8 - header_length)
    tensors = {name: _parse_entry(path, name, entry, body) for name, entry in header.items()}
    _check_cover(path, header, body.num_bytes)
    return tensors


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path} ({error.strerror}); download the checkpoint again")


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


def _parse_entry(path: Path, name: str, entry: Any, body: FileBytes) -> StoredTensor:
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
    if not begin <= end <= body.num_bytes:
        raise _damaged(path, f"{name!r} lies at {begin}..{end} of {body.num_bytes} data bytes")
    if end - begin != num_bytes:
        needed = f"{num_bytes} bytes" if num_bytes < 1 << 63 else "more bytes than there can be"
        raise _damaged(path, f"{name!r} needs {needed} for {dtype} {shape[:8]} and has {end - begin}")
    data = FileBytes(file=body.file, begin=body.begin + begin, num_bytes=num_bytes)
    return StoredTensor(name=name, dtype=DTYPES[dtype][0], shape=tuple(shape), data=data, path=path)


def _check_cover(path: Path, header: Mapping[str, Any], num_bytes: int) -> None:
    """Tensors must follow each other from 0 to the end: a gap or an overlap is damage, or data hidden in the file."""
    position = 0
    for (begin, end), name in sorted((tuple(entry["data_offsets"]), name) for name, entry in header.items()):
        if begin != position:
            raise _damaged(path, f"{name!r} begins at data byte {begin}, expected {position}")
        position = end
    if position != num_bytes:
        raise _damaged(path, f"its tensors end at data byte {position} of {num_bytes}")


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; `dtype` is a name of `DTYPES`."""
    return math.prod(shape) * np.dtype(DTYPES[_TAGS[dtype]][1]).itemsize


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """One tensor to be written. Example: ``FileTensor(dtype="bfloat16", shape=(512, 64), bits=lambda: ...)``."""

    dtype: str  # a name of `DTYPES`
    shape: tuple[int, ...]
    bits: Callable[[], npt.NDArray[Any]]  # raw bits in that type, as `StoredTensor.raw` gives them

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return size_of(self.dtype, self.shape)


def write_tensors(path: Path, tensors: Mapping[str, FileTensor], written: Callable[[int], None] | None = None) -> None:
    """Write `tensors` in their order, asking each for its bits in turn; synced to the disk.

    `written` is called with the bytes of each tensor behind their writing.
    """
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
            if written is not None:
                written(tensor.num_bytes)
        file.flush()
        os.fsync(file.fileno())
