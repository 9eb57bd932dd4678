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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlmrt.checkpoint.load import Checkpoint, load_params
from dlmrt.cuda.programs import MIN_SLOTS, DeviceProgram, ProgramStore
from dlmrt.cuda.runners import MODES
from dlmrt.cuda.weights import Packed
from dlmrt.env import Environment
from dlmrt.errors import DeviceError, UnknownOptionError, UsageError, nearest
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.forwards import Formats, record_canvas, record_extend, record_soft_embedding
from dlmrt.program.loop import RECORD_KINDS, LoopOptions, record_loop
from dlmrt.types import Bool, Float32, Int32

MAX_ROWS = 512  # of one forward that extends the context
POLL_SECONDS = 1e-4  # between two looks at the ring

FORMATS = {
    "float32": Formats(matrix="float32", table="float32", cache="float32"),
    "bfloat16": Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16"),
}


class CudaDenoiser:
    """Implements `dlmrt.types.Denoiser`.

    Args:
        params: tensors by Hugging Face name, on any device.
        config: of the checkpoint; needs its `diffusion` section.
        dtype: a name of `FORMATS`.
        device: where everything lies.
        mode: how loops run, a name of `dlmrt.cuda.runners.MODES`.
    """

    name = "cuda"

    def __init__(
        self, params: Mapping[str, Tensor], config: ModelConfig, *, dtype: str = "bfloat16", device: str = "cuda",
        mode: str = "loop",
    ) -> None:  # fmt: skip
        self.config = config
        self.diffusion = _diffusion(config)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.has_residual = family_of(config).has_residual(config)
        self._formats = FORMATS[dtype]
        packed = {name: Packed(values=values) for name, values in params.items()}
        self._store = ProgramStore(config, packed, device=torch.device(device), mode=mode)
        self._length = 0
        self._grid = 0  # where a block starts, modulo its length
        # Every weight that any program reads is on the device after this.
        self._store.reserve(1, 0)
        self._extension()
        self._canvas(self.diffusion.canvas_length)
        if self.has_residual:
            self._soft(self.diffusion.canvas_length)
        self._store.release_params()

    @property
    def uses_graphs(self) -> bool:
        """Whether captured graphs run the forwards."""
        return self._store.uses_graphs

    def reset(self) -> None:
        """Forget the committed context."""
        self._length = self._grid = 0

    @property
    def context_length(self) -> int:
        """Committed tokens whose keys and values are final."""
        return self._length

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens.

        Raises:
            UsageError: `length` is outside the context, or cuts a block whose tokens have seen each other.
        """
        if not 0 <= length <= self._length:
            raise UsageError(f"cannot truncate a context of {self._length} tokens to {length}")
        if length < self._length:
            self._check_boundary(length)
        self._length = length

    def extend(self, ids_S: Int32) -> None:
        """Append final ids to the committed context, visible to each other as the config says.

        Raises:
            UsageError: an id outside the vocabulary, too many positions, or a context that ends inside a block of a
                block-causal model: its tokens would have to see these.
        """
        if not len(ids_S):
            return
        block = self.diffusion.canvas_length
        if not self._length and self.diffusion.block_anchor == "prompt_end":
            self._grid = len(ids_S) % block
        self._check_boundary(self._length)
        self._reserve(ids_S)
        chunk, program = self._max_rows, self._extension()
        is_causal = self.diffusion.context_attention == "causal" or self.diffusion.in_block_attention == "causal"
        # The first chunk ends where a block does, as all later ones then do.
        first = chunk - block + self._grid if self._grid and not self._length and not is_causal else chunk
        for ids in np.split(ids_S, list(range(first, len(ids_S), chunk))):
            end = self._length + len(ids)
            positions = np.arange(self._length, end, dtype=np.int32)
            blocks = (positions - self._grid) // block + 1
            visible = positions + 1 if is_causal else np.minimum(blocks * block + self._grid, end)
            program.fill(ids=ids, positions=positions, visible=visible)
            _run(program, rows=len(ids))
            self._length += len(ids)

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """Logits float32 [L, V] of a canvas behind the context; row i predicts canvas position i.

        Args:
            canvas_L: ids of the canvas, slot 0 at position `context_length`.
            residual_LD: z as `soft_embedding` gives it; None stands for 0.
            where_L: rows that receive z; None: as the config says (all, or those that hold the mask token).

        Raises:
            UsageError: a residual for a model without the pathway, or shifted logits behind an empty context, unless
                the grid starts at position 0: then a short prompt stands in the first block.
        """
        start, length = self._length, len(canvas_L)
        self._check_shift(start)
        if residual_LD is not None and not self.has_residual:
            raise UsageError("this checkpoint has no residual pathway (diffusion.residual.kind is 'none'); pass None")
        self._reserve(canvas_L)
        program = self._canvas(length)
        positions = np.arange(start, start + length, dtype=np.int32)
        is_causal = self.diffusion.in_block_attention == "causal"
        visible = positions + 1 if is_causal else np.full(length, start + length, dtype=np.int32)
        program.fill(ids=canvas_L, positions=positions, visible=visible)
        scalars = {"rows": length}
        if self.diffusion.logit_shift:
            scalars["context"] = start
        if self.has_residual:
            scalars["has_residual"] = residual_LD is not None
        if residual_LD is not None:
            is_local = self.diffusion.residual.where == "masked"
            everywhere = canvas_L == self.diffusion.mask_token_id if is_local else np.ones(length, dtype=bool)
            program.fill(residual=residual_LD, where=everywhere if where_L is None else where_L)
        _run(program, **scalars)
        return program.result("logits", length)

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """The residual z float32 [L, D] that `forward` takes: probabilities times the input embedding."""
        program = self._soft(len(probs_LV))
        program.fill(probs=probs_LV)
        _run(program, rows=len(probs_LV))
        return program.result("residual", len(probs_LV))

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

    @property
    def _max_rows(self) -> int:
        """Rows of one forward that extends the context: whole blocks."""
        block = self.diffusion.canvas_length
        return max(MAX_ROWS // block * block, block)

    def _extension(self) -> DeviceProgram:
        rows = self._max_rows
        return self._store.get(
            "extend", lambda: record_extend(self.config, self._formats, capacity=self._store.capacity, max_rows=rows)
        )

    def _canvas(self, length: int) -> DeviceProgram:
        rows = max(self.diffusion.canvas_length, 1 << (length - 1).bit_length())
        return self._store.get(
            ("canvas", rows),
            lambda: record_canvas(self.config, self._formats, capacity=self._store.capacity, max_rows=rows),
        )

    def _soft(self, length: int) -> DeviceProgram:
        rows = max(self.diffusion.canvas_length, 1 << (length - 1).bit_length())
        return self._store.get(
            ("soft_embedding", rows), lambda: record_soft_embedding(self.config, self._formats, max_rows=rows)
        )

    def _reserve(self, ids: Int32) -> None:
        self._check_ids(ids)
        self._store.reserve(self._length + len(ids), self._length)

    def _check_ids(self, ids: npt.NDArray[np.generic]) -> None:
        if len(ids) and (np.min(ids) < 0 or np.max(ids) >= self.vocab_size):
            raise UsageError(f"token ids must lie within 0..{self.vocab_size - 1}; got {np.min(ids)}..{np.max(ids)}")

    def _check_shift(self, num_committed: int) -> None:
        if self.diffusion.logit_shift and not num_committed and self.diffusion.block_anchor == "prompt_end":
            raise UsageError(
                "a model with logit_shift 1 predicts slot 0 from the token before it; commit one token first"
            )

    def _check_boundary(self, length: int) -> None:
        block = self.diffusion.canvas_length
        if self.diffusion.context_attention == "block_causal" and length and (length - self._grid) % block:
            raise UsageError(
                f"the committed context would end at {length}, inside a block of {block} positions that see each "
                "other; commit and truncate whole blocks"
            )


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
        dtype: "auto": float32 for files that hold float32, else bfloat16; or a name of `FORMATS`.
        num_threads: of no use here.

    Raises:
        DeviceError: no CUDA device is there.
    """
    if dtype not in (*FORMATS, "auto"):
        known = nearest(dtype, (*FORMATS, "auto"))
        raise UnknownOptionError(f"dtype {dtype!r} is not a type of the cuda executor{known}")
    if num_threads is not None:
        raise UsageError("num_threads has no effect on the cuda executor; leave it out, or choose executor 'cpu'")
    mode = Environment.read().cuda_graph
    if mode not in MODES:
        raise UnknownOptionError(f"DLMRT_CUDA_GRAPH={mode!r} is not a mode{nearest(mode, MODES)}")
    _diffusion(checkpoint.config)
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is there, or this torch was built without CUDA; use executor 'cpu'")
    if dtype == "auto":
        dtype = "float32" if checkpoint.config.dtype == "float32" else "bfloat16"
    return CudaDenoiser(load_params(checkpoint, dtype=dtype), checkpoint.config, dtype=dtype, mode=mode)


def _diffusion(config: ModelConfig) -> DiffusionConfig:
    if config.diffusion is None:
        raise UsageError(
            f"{config.architecture} without a 'diffusion' section is an auto-regressive model; convert it, or add the "
            "section to config.json"
        )
    return config.diffusion


def _run(program: DeviceProgram, **scalars: int) -> None:
    program.scalars.set(**scalars)
    program.scalars.upload()
    program.runner.run()
