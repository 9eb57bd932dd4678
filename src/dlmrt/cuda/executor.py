"""One model on an NVIDIA GPU, step by step or as a whole loop.

`CudaDenoiser` implements `dlmrt.types.Denoiser`: every call runs one program, and the readable loop of
`dlmrt.decode.loop` may drive it as it drives any other. `start_loop` runs the whole loop on the device; both use the
same kernels over the same weights and context, so they differ in who decides, not in what is computed.

On the device "cpu" everything runs in Triton's interpreter, which is how it is tested without a GPU.

Source: ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dlmrt.checkpoint.load import Checkpoint
from dlmrt.cuda.programs import MIN_SLOTS, DeviceProgram, ProgramStore
from dlmrt.cuda.weights import FileParams, Params, kept_formats
from dlmrt.env import Environment
from dlmrt.errors import DeviceError, UnknownOptionError, UsageError, nearest
from dlmrt.models.config import ModelConfig
from dlmrt.models.context import diffusion_of
from dlmrt.program.denoiser import ProgramDenoiser
from dlmrt.program.forwards import Formats
from dlmrt.program.loop import RECORD_KINDS, LoopOptions
from dlmrt.program.shard import Shard
from dlmrt.types import Float32

if TYPE_CHECKING:
    from dlmrt.checkpoint.cut import Cut
    from dlmrt.cuda.comm import Peers

POLL_SECONDS = 1e-4  # between two looks at the ring

FORMATS = {
    "float32": Formats(matrix="float32", table="float32", cache="float32"),
    "bfloat16": Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16"),
}
W4A4 = "w4a4"  # as the file holds matrices, and what NVFP4 ones are multiplied with in NVFP4 too


class CudaDenoiser(ProgramDenoiser[DeviceProgram]):
    """Implements `dlmrt.types.Denoiser`.

    Args:
        params: tensors by Hugging Face name, on any device.
        config: of the checkpoint; needs its `diffusion` section.
        dtype: what records call the model's type; a name of `FORMATS` unless `formats` is given.
        device: where everything lies.
        mode: how loops run, a name of `dlmrt.cuda.runners.MODES`.
        formats: types of weights and caches; None: those of `dtype`.
        has_nvfp4_operands: as in `dlmrt.cuda.lower.lower`.
        shard, peers: one rank's part of the model, to which `params` and the heads of `config` are cut, and its place
            among the others; every rank makes the same calls.
    """

    name = "cuda"

    def __init__(
        self, params: Params, config: ModelConfig, *, dtype: str = "bfloat16", device: str = "cuda",
        mode: str = "loop", formats: Formats | None = None, has_nvfp4_operands: bool = False,
        shard: Shard | None = None, peers: Peers | None = None,
    ) -> None:  # fmt: skip
        self._store: ProgramStore
        self._loop: DeviceProgram | None = None  # of the request that was prepared last
        super().__init__(
            config, ProgramStore(
                config, params, device=torch.device(device), mode=mode, has_nvfp4_operands=has_nvfp4_operands,
                peers=peers,
            ),
            formats or FORMATS[dtype], dtype=dtype, shard=shard,
        )  # fmt: skip

    @property
    def uses_graphs(self) -> bool:
        """Whether captured graphs run the forwards."""
        return self._store.uses_graphs

    def reset(self) -> None:
        """Forget the committed context."""
        super().reset()
        self._loop = None  # it may be of programs that are dropped

    def start_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> LoopRun:  # fmt: skip
        """Run the whole loop for one request; see `prepare_loop`."""
        program = self.prepare_loop(options, positions=positions, scalars=scalars, arrays=arrays)
        return LoopRun(program, self.launch_loop, max_steps=int(scalars["max_steps"]))

    def prepare_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> DeviceProgram:  # fmt: skip
        """The program of the whole loop, filled for one request; see `_loop_program`.

        Args:
            scalars, arrays: inputs of `dlmrt.program.loop` by name; those that the program does not have are left out.
        """
        program = self._loop_program(
            options, positions=positions, prompt=arrays["prompt"], num_prefill=int(scalars["num_prefill"])
        )
        program.fill(**arrays)
        program.scalars.set(**{name: value for name, value in scalars.items() if name in program.scalars})
        self._loop = program
        return program

    def launch_loop(self, *, is_first: bool, num_blocks: int) -> bool:
        """Launch the prepared loop for `num_blocks` blocks and wait for the end; whether the request has ended."""
        assert self._loop is not None, "a loop is prepared first"
        scalars = self._loop.scalars
        # As start_request would leave it; the flag of a loop is read before its first turn.
        bounds = {"launch.is_first": int(is_first), "launch.goes_on": 1, "launch.blocks_left": num_blocks}
        if is_first:
            scalars.set(**bounds, **{"launch.ends": 0})
            scalars.upload()
        else:
            for name, value in bounds.items():
                scalars.tensors[name].fill_(value)
        self._loop.runner.run()
        return bool(scalars.read("launch.ends"))

    def _run(self, program: DeviceProgram, inputs: Mapping[str, npt.NDArray[np.generic]], **scalars: int) -> None:
        program.fill(**inputs)
        program.scalars.set(**scalars)
        program.scalars.upload()
        program.runner.run()

    def _result(self, program: DeviceProgram, name: str, length: int) -> Float32:
        return program.result(name, length)


class Launcher(Protocol):
    """See `CudaDenoiser.launch_loop`."""

    def __call__(self, *, is_first: bool, num_blocks: int) -> bool:
        """Run some blocks; whether the request has ended."""


class LoopRun:
    """A loop that is running on the device; a thread launches it, piece by piece where it does not fit the ring.

    Args:
        launch: runs a piece of the loop, on all ranks if there are several.
        max_steps: most steps of one block, each of which writes a record.
    """

    def __init__(self, program: DeviceProgram, launch: Launcher, *, max_steps: int) -> None:
        self._program, self._launch, self._ring = program, launch, program.ring
        self._types = [np.dtype(program.record_types[kind]) for kind in RECORD_KINDS]
        # Records of one launch: prefill, those of its blocks, end.
        self._ring.reset(max(MIN_SLOTS, max_steps + 3), max(kind.itemsize for kind in self._types))
        self._blocks_a_launch = max(1, (self._ring.num_slots - 2) // (max_steps + 1))
        self._failure: BaseException | None = None
        self._is_abandoned = threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()

    def read(self, seconds: float) -> list[tuple[str, np.void]]:
        """Records (kind, values) that are ready; waits up to `seconds` for one."""
        until = time.monotonic() + seconds
        records: list[tuple[str, np.void]] = []
        while True:
            is_over = not self._thread.is_alive()  # asked first: what a finished loop wrote is all there
            while (raw := self._ring.take()) is not None:
                kind = int.from_bytes(raw[:4], "little")
                records.append((RECORD_KINDS[kind], np.frombuffer(bytearray(raw), self._types[kind], count=1)[0]))
            if self._failure is not None:
                raise DeviceError(f"the loop on the device failed: {self._failure}") from self._failure
            if records or is_over or time.monotonic() >= until:
                return records
            time.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        """End the loop before its next forward."""
        self._program.scalars.set(cancel=1)

    def close(self) -> None:
        """End the loop and wait for it; records not read yet are lost."""
        self.cancel()
        self._is_abandoned.set()
        self._thread.join()

    def _drive(self) -> None:
        """Launch until the request has ended; what a launch wrote is read before the next one may overwrite it."""
        is_first = True
        try:
            while True:
                has_ended = self._launch(is_first=is_first, num_blocks=self._blocks_a_launch)
                if has_ended or self._is_abandoned.is_set():
                    return
                while self._ring.num_read < int(self._ring.control[3]) and not self._is_abandoned.is_set():
                    time.sleep(POLL_SECONDS)
                is_first = False
        except BaseException as error:  # reported by `read`, whoever runs the thread cannot
            self._failure = error


def load_denoiser(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> CudaDenoiser:
    """Load the weights of `checkpoint` onto the first device.

    Args:
        dtype: "auto": as the file holds them, what has no kernel as bfloat16; "w4a4": also quantise what NVFP4 matrices
            are multiplied with; or a name of `FORMATS`, into which every matrix is brought.
        num_threads: of no use here.

    Raises:
        DeviceError: no CUDA device is there, or it has no products of NVFP4 (dtype "w4a4").
        UsageError: dtype "w4a4" for a file without NVFP4.
    """
    if num_threads is not None:
        raise UsageError("num_threads has no effect on the cuda executor; leave it out, or choose executor 'cpu'")
    diffusion_of(checkpoint.config)
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is there, or this torch was built without CUDA; use executor 'cpu'")
    weights = checkpoint.weights()
    kept = kept_formats(weights, checkpoint.config) if dtype in ("auto", W4A4) else {}
    if dtype == W4A4:
        _check_w4a4(kept)
    formats = _formats(checkpoint, dtype, kept)
    return CudaDenoiser(
        FileParams(weights, kept), checkpoint.config, dtype=_name(dtype, formats), mode=Environment.read().cuda_graph,
        formats=formats, has_nvfp4_operands=dtype == W4A4,
    )  # fmt: skip


def part_formats(checkpoint: Checkpoint, *, dtype: str, cuts: Mapping[str, Cut]) -> tuple[FileParams, Formats, str]:
    """One rank's tensors of `checkpoint`, their types, and what records call them.

    Stacked experts stay as the file holds them; other quantised matrices become bfloat16, since a cut through their
    blocks of scales is another matrix.

    Args:
        dtype: as in `load_denoiser`, "w4a4" excepted.
        cuts: what the rank holds of the tensors that it does not hold whole.

    Raises:
        UsageError: dtype "w4a4".
    """
    if dtype == W4A4:
        raise UsageError("dtype 'w4a4' needs whole matrices, and several processes divide them; leave the dtype out")
    weights = checkpoint.weights()
    kept = kept_formats(weights, checkpoint.config) if dtype == "auto" else {}
    kept = {name: held for name, held in kept.items() if len(weights[name].shape) == 3}
    formats = _formats(checkpoint, dtype, kept)
    return FileParams(weights, kept, cuts), formats, _name(dtype, formats)


def _formats(checkpoint: Checkpoint, dtype: str, kept: Mapping[str, str]) -> Formats:
    """Types of weights and caches; `kept` names the matrices that stay as the file holds them."""
    if dtype not in (*FORMATS, W4A4, "auto"):
        known = nearest(dtype, (*FORMATS, W4A4, "auto"))
        raise UnknownOptionError(f"dtype {dtype!r} is not a type of the cuda executor{known}")
    if dtype not in FORMATS:
        dtype = "float32" if checkpoint.config.dtype == "float32" and not kept else "bfloat16"
    return replace(FORMATS[dtype], named=kept)


def _name(dtype: str, formats: Formats) -> str:
    """What records call the model's type."""
    return dtype if dtype == W4A4 else next(iter(formats.named.values()), formats.matrix)


def _check_w4a4(kept: Mapping[str, str]) -> None:
    if "nvfp4" not in kept.values():
        raise UsageError("dtype 'w4a4' needs a checkpoint with NVFP4 matrices; quantize it, or leave the dtype out")
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        raise DeviceError(
            f"dtype 'w4a4' needs a GPU that multiplies NVFP4 (compute capability 10.0 or later, this one has "
            f"{major}.{minor}); leave the dtype out: operands are bfloat16 then"
        )
