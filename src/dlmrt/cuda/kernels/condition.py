"""A kernel that computes a flag sets the condition of a CUDA graph to it, so that no kernel of its own does.

Such kernels take `handle` and `SETS`, and end in `hand_over`. They must be compiled with the option `LIBRARIES`. The
handle is a 64-bit number that Triton must neither guess the type of nor compile into the kernel: it is annotated, and
listed in `do_not_specialize`.

Source: ours; CUDA driver API, cudaGraphSetConditional.
"""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl
from triton.language import core

_PATH = str(Path(__file__).with_name("condition.ll"))
LIBRARIES = {"dlmrt_condition": _PATH}
_SIGNATURES = {(core.dtype("int64"), core.dtype("int32")): ("dlmrt_set_condition", core.dtype("int32"))}


@core.extern
def _set_condition(handle, value, _semantic=None):
    return core.extern_elementwise(
        "dlmrt_condition", _PATH, [handle, value], _SIGNATURES, is_pure=False, _semantic=_semantic
    )


@triton.jit
def hand_over(flag, value, handle, SETS: tl.constexpr):
    """flag = value, and with SETS the condition `handle` of the graph that runs this kernel too."""
    tl.store(flag, value)
    if SETS:
        _set_condition(handle, value)
