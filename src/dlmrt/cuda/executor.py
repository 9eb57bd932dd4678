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
from dlmrt.program.loop import RECORD_KINDS, LoopOptions, record_loop
from dlmrt.types import Float32

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
    """

    name = "cuda"

    def __init__(
        self, params: Params, config: ModelConfig, *, dtype: str = "bfloat16", device: str = "cuda",
        mode: str = "loop", formats: Formats | None = None, has_nvfp4_operands: bool = False,
    ) -> None:  # fmt: skip
        self._store: ProgramStore
        super().__init__(
            config, ProgramStore(
                config, params, device=torch.device(device), mode=mode, has_nvfp4_operands=has_nvfp4_operands
            ),
            formats or FORMATS[dtype], dtype=dtype,
        )  # fmt: skip

    @property
    def uses_graphs(self) -> bool:
        """Whether captured graphs run the forwards."""
        return self._store.uses_graphs

    def start_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> LoopRun:  # fmt: skip
        """Run the whole loop for one request.

        Args:
            positions: length of the context that the request may fill.
            scalars, arrays: inputs of `dlmrt.program.loop` by name; those that the program does not have are left out.

        Raises:
            UsageError: an id of the prompt is outside the vocabulary, or shifted logits behind an empty context.
        """
        self._check_ids(arrays["prompt"])
        self._check_shift(int(scalars["num_prefill"]))
        self.reset()
        self._store.reserve(positions, 0)
        program = self._store.get(
            ("loop", options), lambda: record_loop(self.config, self._formats, options, capacity=self._store.capacity)
        )
        program.fill(**arrays)
        program.scalars.set(**{name: value for name, value in scalars.items() if name in program.scalars})
        return LoopRun(program, max_steps=int(scalars["max_steps"]))

    def _run(self, program: DeviceProgram, inputs: Mapping[str, npt.NDArray[np.generic]], **scalars: int) -> None:
        program.fill(**inputs)
        program.scalars.set(**scalars)
        program.scalars.upload()
        program.runner.run()

    def _result(self, program: DeviceProgram, name: str, length: int) -> Float32:
        return program.result(name, length)


class LoopRun:
    """A loop that is running on the device; a thread launches it, piece by piece where it does not fit the ring.

    Args:
        max_steps: most steps of one block, each of which writes a record.
    """

    def __init__(self, program: DeviceProgram, *, max_steps: int) -> None:
        self._program, self._ring = program, program.ring
        self._types = [np.dtype(program.record_types[kind]) for kind in RECORD_KINDS]
        # Records of one launch: prefill, those of its blocks, end.
        self._ring.reset(max(MIN_SLOTS, max_steps + 3), max(kind.itemsize for kind in self._types))
        self._blocks_a_launch = max(1, (self._ring.num_slots - 2) // (max_steps + 1))
        self._failure: BaseException | None = None
        self._is_abandoned = threading.Event()
        program.scalars.set(**{"launch.is_first": 1, "launch.ends": 0})
        # As start_request would leave it; the flag of a loop is read before its first turn.
        program.scalars.set(**{"launch.goes_on": 1, "launch.blocks_left": self._blocks_a_launch})
        program.scalars.upload()
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
        program = self._program
        try:
            while True:
                program.runner.run()
                if program.scalars.read("launch.ends") or self._is_abandoned.is_set():
                    return
                while self._ring.num_read < int(self._ring.control[3]) and not self._is_abandoned.is_set():
                    time.sleep(POLL_SECONDS)
                program.scalars.tensors["launch.is_first"].zero_()
                program.scalars.tensors["launch.goes_on"].fill_(1)
                program.scalars.tensors["launch.blocks_left"].fill_(self._blocks_a_launch)
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
    if dtype not in (*FORMATS, W4A4, "auto"):
        known = nearest(dtype, (*FORMATS, W4A4, "auto"))
        raise UnknownOptionError(f"dtype {dtype!r} is not a type of the cuda executor{known}")
    if num_threads is not None:
        raise UsageError("num_threads has no effect on the cuda executor; leave it out, or choose executor 'cpu'")
    diffusion_of(checkpoint.config)
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is there, or this torch was built without CUDA; use executor 'cpu'")
    weights, is_w4a4 = checkpoint.weights(), dtype == W4A4
    kept = kept_formats(weights, checkpoint.config) if dtype in ("auto", W4A4) else {}
    if is_w4a4:
        _check_w4a4(kept)
    if dtype not in FORMATS:
        dtype = "float32" if checkpoint.config.dtype == "float32" and not kept else "bfloat16"
    return CudaDenoiser(
        FileParams(weights, kept), checkpoint.config, dtype=W4A4 if is_w4a4 else next(iter(kept.values()), dtype),
        mode=Environment.read().cuda_graph, formats=replace(FORMATS[dtype], named=kept), has_nvfp4_operands=is_w4a4,
    )  # fmt: skip


def _check_w4a4(kept: Mapping[str, str]) -> None:
    if "nvfp4" not in kept.values():
        raise UsageError("dtype 'w4a4' needs a checkpoint with NVFP4 matrices; quantize it, or leave the dtype out")
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        raise DeviceError(
            f"dtype 'w4a4' needs a GPU that multiplies NVFP4 (compute capability 10.0 or later, this one has "
            f"{major}.{minor}); leave the dtype out: operands are bfloat16 then"
        )
