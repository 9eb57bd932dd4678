"""The kernels' test library through ctypes: builds it once a session, mirrors its structs, owns aligned buffers.

The structs are those of csrc/kernels/args.hpp, field by field; a mismatch would show at once as wrong numbers.

Legend: M rows, N output columns, K inner width, H head width, V vocabulary.

Source: ours.
"""

from __future__ import annotations

import ctypes as C
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import nanobind
import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[3]

F32, BF16, INT8, NVFP4, INT4 = range(5)
HEAD_TILE = 128
BANNED_LOGIT = np.float32(-1e30)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


if not (shutil.which("cmake") and shutil.which("ninja") and (shutil.which("c++") or shutil.which("g++"))):
    pytest.skip("the kernel tests need cmake, ninja and a C++ compiler", allow_module_level=True)


@lru_cache
def build(sanitize: str = "") -> Path:
    """Folder of the test build, brought up to date. Concurrent callers wait for each other."""
    folder = REPOSITORY / "build" / f"cpu-kernels{'-' + sanitize.replace(',', '-') if sanitize else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = [f"-Dnanobind_DIR={nanobind.cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
        options = [f"-DDLMRT_SANITIZE={sanitize}", "-DDLMRT_WERROR=ON", *python]
        for command in (
            ["cmake", "-G", "Ninja", "-S", HERE, "-B", folder, *options],
            ["cmake", "--build", folder],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return folder


@lru_cache
def library() -> C.CDLL:
    """The shared library; DLMRT_TEST_SANITIZE picks the build (the sanitizer's runtime must then be preloaded)."""
    lib = C.CDLL(str(build(os.environ.get("DLMRT_TEST_SANITIZE", "")) / "libkernels_capi.so"))
    for name in ("operand_bytes", "panel_bytes", "kv_page_bytes"):
        getattr(lib, f"dlmrt_{name}").restype = C.c_int64
    return lib


@lru_cache
def runnable() -> tuple[str, ...]:
    """Names of the instruction sets this machine runs, best first."""
    out = C.create_string_buffer(256)
    library().dlmrt_runnable(out, 255)
    return tuple(out.value.decode().split())


def call(kernel: str, isa: str, args: C.Structure, threads: int = 1) -> None:
    """Run one kernel over all its units, split over `threads`."""
    getattr(library(), f"dlmrt_{kernel}")(isa.encode(), C.byref(args), threads)


def _fields(text: str, **structs: Any) -> list[tuple[str, Any]]:
    """Fields from words name:kind; kinds i int32, l int64, f float, p pointer, or a struct's name."""
    kinds = {"i": C.c_int32, "l": C.c_int64, "f": C.c_float, "p": C.c_void_p} | structs
    return [(name, kinds[kind]) for name, kind in (word.split(":") for word in text.split())]


class Operand(C.Structure):
    _fields_ = _fields("dtype:i reserved:i width:l cells:p scales:p")


class Weight(C.Structure):
    _fields_ = _fields("dtype:i group:i n:l k:l panels:p column_scale:p column_sum:p")


class Source(C.Structure):
    _fields_ = _fields("dtype:i reserved:i data:p rows:l ld:l scales:p block_scales:p global_scale:f")


class LinearArgs(C.Structure):
    _fields_ = _fields("weight:W input:O rows:l out:p ld_out:l accumulate:i", W=Weight, O=Operand)


class RmsNormArgs(C.Structure):
    _fields_ = _fields("x:p weight:p eps:f rows:l width:l out_rows:p out:O", O=Operand)


class QuantizeArgs(C.Structure):
    _fields_ = _fields("x:p ld:l rows:l out:O", O=Operand)


class GateArgs(C.Structure):
    _fields_ = _fields("gate:p up:p ld:l rows:l out:O is_gelu:i", O=Operand)


class ScaledAddArgs(C.Structure):
    _fields_ = _fields("x:p delta:p where:p alpha:f rows:l width:l")


class KvCache(C.Structure):
    _fields_ = _fields("dtype:i page_size:i num_kv_heads:i head_dim:i pages:p")


class QkvArgs(C.Structure):
    _fields_ = _fields(
        "qkv:p ld:l rows:l num_heads:i rotary_dim:i q_norm:p k_norm:p eps:f cos:p sin:p positions:p q:p cache:K "
        "scale:f is_v_normed:i is_v_from_k:i",
        K=KvCache,
    )


class AttentionArgs(C.Structure):
    _fields_ = _fields("q:p cache:K rows:l num_heads:i chunk:i visible:p out:p ld_out:l first:p", K=KvCache)


class HeadPartials(C.Structure):
    _fields_ = _fields("row_stride:l max:p sum:p weighted:p argmax:p sample_score:p sample_logit:p sample_id:p")


class GumbelKey(C.Structure):
    _fields_ = (("seed", C.c_uint32 * 2), ("step", C.c_uint32), ("block", C.c_uint32), ("last", C.c_uint32))


class HeadArgs(C.Structure):
    _fields_ = _fields(
        "weight:W input:O rows:l softcap:f temperature:p banned:p gumbel:p partials:P logits:p ld_logits:l",
        W=Weight, O=Operand, P=HeadPartials,
    )  # fmt: skip


class HeadMergeArgs(C.Structure):
    _fields_ = _fields(
        "partials:P rows:l vocab:l argmax:p max_logit:p log_sum_exp:p entropy:p sample_id:p sample_logit:p "
        "confidence:p",
        P=HeadPartials,
    )


class EmbedArgs(C.Structure):
    _fields_ = _fields("dtype:i table:p ids:p rows:l width:l out:p scale:f panel_bytes:l row_scale:p")


class ScaleArgs(C.Structure):
    _fields_ = _fields("x:p factor:p rows:l width:l")


class SoftCapArgs(C.Structure):
    _fields_ = _fields("x:p cap:f rows:l width:l")


class ExpertLinearArgs(C.Structure):
    _fields_ = _fields(
        "weight:W panel_stride:l scale_stride:l sum_stride:l input:O runs:p out:p ld_out:l", W=Weight, O=Operand
    )


class CombineArgs(C.Structure):
    _fields_ = _fields("x:p place:p weights:p rows:l top_k:l width:l y:p")


class RouteSigmoidArgs(C.Structure):
    _fields_ = _fields(
        "logits:p bias:p rows:l experts:l top_k:l groups:i kept_groups:i capacity:i block_length:i factor:f "
        "chosen:p weights:p"
    )


class RouteSoftmaxArgs(C.Structure):
    _fields_ = _fields("logits:p expert_scale:p rows:l experts:l top_k:l factor:f chosen:p weights:p")


class GroupArgs(C.Structure):
    _fields_ = _fields("chosen:p rows:l experts:l top_k:l runs:p place:p")


class GatherArgs(C.Structure):
    _fields_ = _fields("source:O target:O top_k:l place:p", O=Operand)


class ProbabilitiesArgs(C.Structure):
    _fields_ = _fields("logits:p ld:l rows:l log_sum_exp:p out:O", O=Operand)


class SoftEmbeddingArgs(C.Structure):
    _fields_ = _fields("probabilities:O table:p rows:l width:l scale:f out:p", O=Operand)


def ptr(a: Array | None) -> int | None:
    """Address of a contiguous array."""
    assert a is None or a.flags.c_contiguous
    return None if a is None else a.ctypes.data


def aligned(num_bytes: int, fill: int = 0xFF) -> Array:
    """uint8 buffer at a 64-byte boundary; 0xFF bytes are NaN in every float format, so forgotten cells show."""
    raw = np.full(num_bytes + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


def to_bf16(x: Array) -> Array:
    """fp32 -> bf16 bits, nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """bf16 bits -> fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(x: Array) -> Array:
    """fp32 rounded to bf16 values."""
    return from_bf16(to_bf16(x))


@dataclass
class Rows:
    """An operand of M rows with its memory."""

    dtype: int
    rows: int
    width: int

    def __post_init__(self) -> None:
        self.cells = aligned(
            int(library().dlmrt_operand_bytes(self.dtype, C.c_int64(self.rows), C.c_int64(self.width)))
        )
        self.scales = np.full(self.rows, np.nan, np.float32)
        self.operand = Operand(self.dtype, 0, self.width, ptr(self.cells), ptr(self.scales))

    def values(self) -> Array:
        """What the operand holds: fp32 [M, K], or codes int64 [M, K] of an int8 operand."""
        per_cell = {F32: 1, BF16: 2, INT8: 4}[self.dtype]
        kind = {F32: np.float32, BF16: np.uint16, INT8: np.uint8}[self.dtype]
        groups = -(-self.rows // 8)
        cells = self.cells.view(kind).reshape(groups, -1, 8, per_cell)
        plain = cells.transpose(0, 2, 1, 3).reshape(groups * 8, -1)[: self.rows]
        assert plain.shape[1] == -(-self.width // 16) * 16
        pad = plain[np.isfinite(self.scales) if self.dtype == INT8 else slice(None), self.width :]
        assert (pad == (128 if self.dtype == INT8 else 0)).all(), "padding of an operand must be zero"
        plain = plain[:, : self.width]
        if self.dtype == INT8:
            return plain.astype(np.int64) - 128
        return from_bf16(plain) if self.dtype == BF16 else plain.copy()


def operand(isa: str, dtype: int, x: Array, threads: int = 1) -> Rows:
    """Rows of x as an operand, by the kernel under test."""
    x = np.ascontiguousarray(x, np.float32)
    rows = Rows(dtype, *x.shape)
    call("quantize_rows", isa, QuantizeArgs(ptr(x), x.shape[1], x.shape[0], rows.operand), threads)
    return rows


@dataclass
class Packed:
    """A packed weight with its memory."""

    weight: Weight
    memory: tuple[Array, ...]


def pack(dtype: int, sources: Iterable[Source], k: int, group: int = 0, threads: int = 1) -> Packed:
    """Pack sources, whose rows add up to N."""
    sources = list(sources)
    n = sum(s.rows for s in sources)
    padded = -(-n // 16) * 16
    panels = aligned(padded // 16 * int(library().dlmrt_panel_bytes(dtype, C.c_int64(group), C.c_int64(k))))
    scale, total = aligned(padded * 4), aligned(padded * 4)
    quantised = dtype in (INT8, NVFP4, INT4)
    weight = Weight(
        dtype, group, n, k, ptr(panels), ptr(scale) if quantised else None, ptr(total) if dtype == INT8 else None
    )
    library().dlmrt_pack((Source * len(sources))(*sources), len(sources), C.byref(weight), threads)
    return Packed(weight, (panels, scale, total))


def float_source(w: Array) -> Source:
    """Source of fp32 [N, K] or of bf16 bits (uint16)."""
    source = Source(F32 if w.dtype == np.float32 else BF16, 0, ptr(w), w.shape[0], w.shape[1], None, None, 0.0)
    source.memory = w  # lives as long as the source
    return source


def linear(isa: str, packed: Packed, rows: Rows, threads: int = 1, add_to: Array | None = None) -> Array:
    """out [M, N] of one linear layer; rows lie N + 3 elements apart to show writes past a row."""
    n = packed.weight.n
    out = np.full((rows.rows, n + 3), 7.0, np.float32)
    if add_to is not None:
        out[:, :n] = add_to
    call(
        "linear", isa, LinearArgs(packed.weight, rows.operand, rows.rows, ptr(out), n + 3, add_to is not None), threads
    )
    assert (out[:, n:] == 7.0).all(), "wrote past a row"
    return out[:, :n].copy()
