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
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.forwards import Formats, record_canvas, record_extend, record_soft_embedding
from dlmrt.program.loop import RECORD_KINDS, LoopOptions, record_loop
from dlmrt.types import Bool, Float32, Int32

MAX_ROWS = 512  # of one forward that extends the context

FORMATS = {
    "float32": Formats(matrix="float32", table="float32", cache="float32"),
    "bfloat16": Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16"),
    "int8": Formats(matrix="int8", table="bfloat16", cache="bfloat16"),
}


class CpuDenoiser:
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

    def __init__(
        self, params: Params, config: ModelConfig, *, dtype: str = "float32", num_threads: int | None = None,
        isa: str = "", formats: Formats | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.diffusion = _diffusion(config)
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.has_residual = family_of(config).has_residual(config)
        self._formats = formats or FORMATS[dtype]
        self._store = ProgramStore(config, params, num_threads=_num_threads(num_threads), isa=isa)
        self._length = 0
        self._grid = 0  # where a block starts, modulo its length
        # Every weight that any program reads is packed now.
        self._store.reserve(1, 0)
        self._canvas(self.diffusion.canvas_length)  # first: it reads the head, the largest matrix
        self._extension()
        if self.has_residual:
            self._soft(self.diffusion.canvas_length)
        self._store.release_params()

    def reset(self) -> None:
        """Forget the committed context."""
        self._length = self._grid = 0

    def assign(self, params: Mapping[str, Float32]) -> None:
        """Take other weights of the same shapes, in place, and forget the committed context."""
        self.reset()
        self._store.assign(params)

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
            _fill(program, ids=ids, positions=positions, visible=visible)
            program.set(rows=len(ids))
            program.runner.run()
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
        _fill(
            program,
            ids=canvas_L,
            positions=positions,
            visible=positions + 1 if is_causal else np.full(length, start + length),
        )
        program.set(rows=length)
        if self.diffusion.logit_shift:
            program.set(context=start)
        if self.has_residual:
            program.set(has_residual=residual_LD is not None)
        if residual_LD is not None:
            is_local = self.diffusion.residual.where == "masked"
            everywhere = canvas_L == self.diffusion.mask_token_id if is_local else np.ones(length, dtype=bool)
            _fill(program, residual=residual_LD, where=everywhere if where_L is None else where_L)
        program.runner.run()
        return _result(program, "logits", length)

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """The residual z float32 [L, D] that `forward` takes: probabilities times the input embedding."""
        program = self._soft(len(probs_LV))
        _fill(program, probs=probs_LV)
        program.set(rows=len(probs_LV))
        program.runner.run()
        return _result(program, "residual", len(probs_LV))

    def start_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> LoopRun:  # fmt: skip
        """Run the whole loop for one request on a thread of its own.

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
        key = ("loop", options)
        program = self._store.get(
            key,
            lambda: record_loop(self.config, self._formats, options, capacity=self._store.capacity, drops_rows=True),
        )
        program.set(**{name: value for name, value in scalars.items() if name in program.scalars})
        _fill(program, **arrays)
        return LoopRun(program)

    @property
    def _max_rows(self) -> int:
        """Rows of one forward that extends the context: whole blocks."""
        block = self.diffusion.canvas_length
        return max(MAX_ROWS // block * block, block)

    def _extension(self) -> NativeProgram:
        rows = self._max_rows
        return self._store.get(
            "extend", lambda: record_extend(self.config, self._formats, capacity=self._store.capacity, max_rows=rows)
        )

    def _canvas(self, length: int) -> NativeProgram:
        rows = max(self.diffusion.canvas_length, 1 << (length - 1).bit_length())
        return self._store.get(
            ("canvas", rows),
            lambda: record_canvas(self.config, self._formats, capacity=self._store.capacity, max_rows=rows),
        )

    def _soft(self, length: int) -> NativeProgram:
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
    """A native loop that is running; closed runs end before their next forward."""

    def __init__(self, program: NativeProgram) -> None:
        assert program.ring is not None
        self._program, self._ring = program, program.ring
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
        """End the loop and wait for it; records not read yet are lost."""
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
        dtype: "auto": as the file holds them, float16 as bfloat16; where it holds layers in NVFP4 or INT8, whose inputs
            are rounded to int8 in any case, the head is brought to int8 as well, and with it a tied embedding that no
            residual pathway reads. Else a name of `FORMATS`, into which every matrix is brought.

    Raises:
        DeviceError: the model does not fit the memory, or DLMRT_CPU_ISA names an instruction set that cannot run here.
    """
    if dtype not in (*FORMATS, "auto", "float16"):
        known = nearest(dtype, (*FORMATS, "auto"))
        raise UnknownOptionError(f"dtype {dtype!r} is not a type of the cpu executor{known}")
    if dtype == "float16":
        raise UnsupportedModelError("the cpu executor does not compute in float16; use bfloat16, or executor 'eager'")
    _diffusion(checkpoint.config)
    weights = checkpoint.weights()
    kept = kept_formats(weights) if dtype == "auto" else {}
    if dtype == "auto":
        dtype = "float32" if checkpoint.config.dtype == "float32" and not kept else "bfloat16"
    return CpuDenoiser(
        FileParams(weights, kept), checkpoint.config, dtype=next(iter(kept.values()), dtype), num_threads=num_threads,
        isa=Environment.read().cpu_isa, formats=_with_kept(FORMATS[dtype], kept, checkpoint.config),
    )  # fmt: skip


def _with_kept(formats: Formats, kept: Mapping[str, str], config: ModelConfig) -> Formats:
    """`formats` with matrices that stay in codes, and the head like them in int8."""
    if not kept:
        return formats
    family = family_of(config)
    is_shared = config.tie_word_embeddings and not family.has_residual(config)
    return replace(formats, table="int8" if is_shared else formats.table, named={family.HEAD: "int8", **kept})


def _diffusion(config: ModelConfig) -> DiffusionConfig:
    if config.diffusion is None:
        raise UsageError(
            f"{config.architecture} without a 'diffusion' section is an auto-regressive model; convert it, or add the "
            "section to config.json"
        )
    return config.diffusion


def _fill(program: NativeProgram, **inputs: npt.NDArray[np.generic]) -> None:
    """Write the leading rows of states; those that no node of the program reads are left out."""
    for name, values in inputs.items():
        if name in program.states:
            program.states[name][: len(values)] = values


def _result(program: NativeProgram, name: str, length: int) -> Float32:
    """A copy of the leading rows of a float32 state."""
    result: Float32 = program.states[name][:length].astype(np.float32)
    return result


def _num_threads(asked: int | None) -> int:
    if asked is None:
        asked = Environment.read().num_threads
    if asked is None:
        limit = os.environ.get("OMP_NUM_THREADS", "")
        return int(limit) if limit.isdigit() and int(limit) else _native.default_num_threads()
    if asked < 1:
        raise UsageError(f"num_threads is {asked}; it must be at least 1")
    return asked
