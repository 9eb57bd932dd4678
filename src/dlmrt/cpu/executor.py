"""One model on the cpu executor, step by step or as a whole loop.

`CpuDenoiser` implements `dlmrt.types.Denoiser`: every call runs one program, and the readable loop of
`dlmrt.decode.loop` may drive it as it drives any other. `start_loop` runs the whole loop natively; both use the same
pieces over the same weights and context, so they differ in who decides, not in what is computed.

Left out on purpose: batches; a request has the machine to itself.

Source: ours.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.load import Checkpoint
from dlmrt.cpu import _native
from dlmrt.cpu.programs import NativeProgram, ProgramStore
from dlmrt.cpu.weights import FileParams, Params, kept_formats
from dlmrt.env import Environment
from dlmrt.errors import UnknownOptionError, UnsupportedModelError, UsageError, nearest
from dlmrt.models.config import ModelConfig
from dlmrt.models.context import diffusion_of
from dlmrt.models.families import family_of
from dlmrt.program.denoiser import ProgramDenoiser
from dlmrt.program.forwards import Formats
from dlmrt.program.loop import RECORD_KINDS, LoopOptions
from dlmrt.types import Float32

FORMATS = {
    "float32": Formats(matrix="float32", table="float32", cache="float32"),
    "bfloat16": Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16"),
    "int8": Formats(matrix="int8", table="bfloat16", cache="bfloat16"),
}


class CpuDenoiser(ProgramDenoiser[NativeProgram]):
    """Implements `dlmrt.types.Denoiser`.

    Args:
        params: tensors by Hugging Face name.
        config: of the checkpoint; needs its `diffusion` section.
        dtype: what records call the model's type; a name of `FORMATS` unless `formats` is given.
        num_threads: None for one a physical core.
        isa: instruction set of the kernels; "" for the best one that runs here.
        formats: types of weights and caches; None: those of `dtype`.
    """

    name = "cpu"
    drops_rows = True

    def __init__(
        self, params: Params, config: ModelConfig, *, dtype: str = "float32", num_threads: int | None = None,
        isa: str = "", formats: Formats | None = None,
    ) -> None:  # fmt: skip
        self._store: ProgramStore
        store = ProgramStore(config, params, num_threads=_num_threads(num_threads), isa=isa)
        super().__init__(config, store, formats or FORMATS[dtype], dtype=dtype)

    @property
    def num_threads(self) -> int:
        """CPU threads of forwards."""
        return self._store.num_threads

    def assign(self, params: Mapping[str, Float32]) -> None:
        """Take other weights of the same shapes, in place, and forget the committed context."""
        self.reset()
        self._store.assign(params)

    def start_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> LoopRun:  # fmt: skip
        """Run the whole loop for one request on a thread of its own; see `_loop_program`.

        Args:
            scalars, arrays: inputs of `dlmrt.program.loop` by name; those that the program does not have are left out.
        """
        program = self._loop_program(
            options, positions=positions, prompt=arrays["prompt"], num_prefill=int(scalars["num_prefill"])
        )
        program.set(**{name: value for name, value in scalars.items() if name in program.scalars})
        _fill(program, **arrays)
        return LoopRun(program)

    def _run(self, program: NativeProgram, inputs: Mapping[str, npt.NDArray[np.generic]], **scalars: int) -> None:
        _fill(program, **inputs)
        program.set(**scalars)
        program.runner.run()

    def _result(self, program: NativeProgram, name: str, length: int) -> Float32:
        result: Float32 = program.states[name][:length].astype(np.float32)
        return result


class LoopRun:
    """A native loop that is running; closed runs end before their next forward.

    It belongs to the process that started it: in a fork of it, reading is an error and closing does nothing.
    """

    def __init__(self, program: NativeProgram) -> None:
        assert program.ring is not None
        self._program, self._ring, self._process = program, program.ring, os.getpid()
        self._types = [np.dtype(program.record_types[kind]) for kind in RECORD_KINDS]
        self._ring.reset()
        program.runner.start()
        _running.add(self)

    def read(self, seconds: float) -> list[tuple[str, np.void]]:
        """Records (kind, values) that are ready; waits up to `seconds` for one that the loop marks as urgent."""
        self._program.runner.check()
        records = []
        for raw in self._ring.read(seconds):
            kind = int.from_bytes(raw[:4], "little")
            records.append((RECORD_KINDS[kind], np.frombuffer(bytearray(raw), dtype=self._types[kind], count=1)[0]))
        return records

    def cancel(self) -> None:
        """End the loop before its next forward."""
        self._program.set(cancel=1)

    def close(self) -> None:
        """End the loop and wait for it; records not read yet are lost. Any thread may, also several."""
        if os.getpid() != self._process:
            return
        self.cancel()
        self._ring.abandon()
        self._program.runner.join()
        _running.discard(self)


_running: weakref.WeakSet[LoopRun] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for run in list(_running):
        run.close()


def load_denoiser(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> CpuDenoiser:
    """Load the weights of `checkpoint`.

    Args:
        dtype: "auto": as the file holds them, float16 as bfloat16; where it holds layers in NVFP4, INT8 or INT4, whose
            inputs are rounded to int8 in any case, the head is brought to int8 as well, and with it a tied embedding
            that no residual pathway reads. Else a name of `FORMATS`, into which every matrix is brought.

    Raises:
        DeviceError: the model does not fit the memory, or DLMRT_CPU_ISA names an instruction set that cannot run here.
    """
    if dtype not in (*FORMATS, "auto", "float16"):
        known = nearest(dtype, (*FORMATS, "auto"))
        raise UnknownOptionError(f"dtype {dtype!r} is not a type of the cpu executor{known}")
    if dtype == "float16":
        raise UnsupportedModelError("the cpu executor does not compute in float16; use bfloat16, or executor 'eager'")
    diffusion_of(checkpoint.config)
    weights = checkpoint.weights()
    kept = kept_formats(weights) if dtype == "auto" else {}
    if dtype == "auto":
        dtype = "float32" if checkpoint.config.dtype == "float32" and not kept else "bfloat16"
    shown = next(iter(kept.values()), dtype).partition("_")[0]
    return CpuDenoiser(
        FileParams(weights, kept), checkpoint.config, dtype=shown, num_threads=num_threads,
        isa=Environment.read().cpu_isa, formats=_with_kept(FORMATS[dtype], kept, checkpoint.config),
    )  # fmt: skip


def _with_kept(formats: Formats, kept: Mapping[str, str], config: ModelConfig) -> Formats:
    """`formats` with matrices that stay in codes, and the head like them in int8."""
    if not kept:
        return formats
    family = family_of(config)
    is_shared = config.tie_word_embeddings and not family.has_residual(config)
    return replace(formats, table="int8" if is_shared else formats.table, named={family.HEAD: "int8", **kept})


def _fill(program: NativeProgram, **inputs: npt.NDArray[np.generic]) -> None:
    """Write the leading rows of states; those that no node of the program reads are left out."""
    for name, values in inputs.items():
        if name in program.states:
            program.states[name][: len(values)] = values


def _num_threads(asked: int | None) -> int:
    if asked is None:
        asked = Environment.read().num_threads
    if asked is None:
        limit = os.environ.get("OMP_NUM_THREADS", "")
        return int(limit) if limit.isdigit() and int(limit) else _native.default_num_threads()
    if asked < 1:
        raise UsageError(f"num_threads is {asked}; it must be at least 1")
    return asked
