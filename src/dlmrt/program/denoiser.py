"""A denoiser whose forwards are recorded programs: the context, which program runs, its inputs.

Executors that run programs differ in how one is bound, filled and run; that is a store of programs and two methods.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from dlmrt.models.config import ModelConfig
from dlmrt.models.context import ContextChecks
from dlmrt.program.forwards import Formats, record_canvas, record_extend, record_soft_embedding
from dlmrt.program.loop import LoopOptions, record_loop
from dlmrt.program.shard import Shard
from dlmrt.program.store import Bound, Store
from dlmrt.types import Bool, Float32, Int32

MAX_ROWS = 512  # of one forward that extends the context


class ProgramDenoiser(ContextChecks, Generic[Bound]):
    """What `dlmrt.types.Denoiser` asks for, but for `_run` and `_result`.

    Args:
        config: of the checkpoint; needs its `diffusion` section.
        store: holds the weights once this has returned.
        formats: types of weights and caches.
        dtype: what records call the model's type.
        shard: one rank's part, of whose heads `config` is; logits and probabilities are then of its ids.
    """

    drops_rows = False  # loops leave out rows whose results are known

    def __init__(
        self, config: ModelConfig, store: Store[Bound, Any], formats: Formats, *, dtype: str, shard: Shard | None = None
    ) -> None:
        super().__init__(config)
        self._shard = shard
        self.dtype = dtype
        self._formats = formats
        self._store: Store[Bound, Any] = store
        self._length = 0
        # Every weight that any program reads is brought to its place now.
        self._store.reserve(1, 0)
        self._canvas(self.diffusion.canvas_length)  # first: it reads the head, the largest matrix
        self._extension()
        if self.has_residual:
            self._soft(self.diffusion.canvas_length)
        self._store.release_params()

    def _run(self, program: Bound, inputs: Mapping[str, npt.NDArray[np.generic]], **scalars: int) -> None:
        """Write the leading rows of states and scalars, run, and wait for the end."""
        raise NotImplementedError

    def _result(self, program: Bound, name: str, length: int) -> Float32:
        """A copy of the leading rows of a state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget the committed context."""
        self._length = self._grid = 0

    @property
    def context_length(self) -> int:
        """Committed tokens whose keys and values are final."""
        return self._length

    def truncate(self, length: int) -> None:
        """See `Denoiser.truncate`."""
        self._check_truncation(length)
        self._length = length

    def extend(self, ids_S: Int32) -> None:
        """See `Denoiser.extend`."""
        if not len(ids_S):
            return
        block = self.diffusion.canvas_length
        self._check_extension(ids_S)
        self._store.reserve(self._length + len(ids_S), self._length)
        chunk, program = self._max_rows, self._extension()
        is_causal = self.diffusion.context_attention == "causal" or self.diffusion.in_block_attention == "causal"
        # The first chunk ends where a block does, as all later ones then do.
        first = chunk - block + self._grid if self._grid and not self._length and not is_causal else chunk
        for ids in np.split(ids_S, list(range(first, len(ids_S), chunk))):
            end = self._length + len(ids)
            positions = np.arange(self._length, end, dtype=np.int32)
            blocks = (positions - self._grid) // block + 1
            visible = positions + 1 if is_causal else np.minimum(blocks * block + self._grid, end)
            self._run(program, {"ids": ids, "positions": positions, "visible": visible}, rows=len(ids))
            self._length += len(ids)

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """See `Denoiser.forward`."""
        start, length = self._length, len(canvas_L)
        self._check_canvas(canvas_L, residual_LD)
        self._store.reserve(start + length, start)
        program = self._canvas(length)
        positions = np.arange(start, start + length, dtype=np.int32)
        is_causal = self.diffusion.in_block_attention == "causal"
        visible = positions + 1 if is_causal else np.full(length, start + length, dtype=np.int32)
        inputs: dict[str, npt.NDArray[np.generic]] = {"ids": canvas_L, "positions": positions, "visible": visible}
        scalars = {"rows": length}
        if self.diffusion.logit_shift:
            scalars["context"] = start
        if self.has_residual:
            scalars["has_residual"] = residual_LD is not None
        if residual_LD is not None:
            where = self._residual_rows(canvas_L, where_L)
            inputs |= {"residual": residual_LD, "where": np.ones(length, dtype=bool) if where is None else where}
        self._run(program, inputs, **scalars)
        return self._result(program, "logits", length)

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """See `Denoiser.soft_embedding`."""
        program = self._soft(len(probs_LV))
        self._run(program, {"probs": probs_LV}, rows=len(probs_LV))
        return self._result(program, "residual", len(probs_LV))

    def _loop_program(
        self, options: LoopOptions, *, positions: int, prompt: npt.NDArray[np.generic], num_prefill: int
    ) -> Bound:
        """The program of the whole loop for one request, from an empty context.

        Args:
            positions: length of the context that the request may fill.
            num_prefill: tokens of the prompt that come before the first block.

        Raises:
            UsageError: an id of the prompt is outside the vocabulary, or shifted logits behind an empty context.
            OutOfMemoryError: there is no room for the context.
        """
        self._check_ids(prompt)
        self._check_shift(num_prefill)
        self.reset()
        self._store.reserve(positions, 0)
        return self._store.get(
            ("loop", options),
            lambda: record_loop(
                self.config, self._formats, options, capacity=self._store.capacity, drops_rows=self.drops_rows,
                shard=self._shard,
            ),
        )  # fmt: skip

    @property
    def _max_rows(self) -> int:
        """Rows of one forward that extends the context: whole blocks."""
        block = self.diffusion.canvas_length
        return max(MAX_ROWS // block * block, block)

    def _extension(self) -> Bound:
        rows = self._max_rows
        return self._store.get(
            "extend",
            lambda: record_extend(
                self.config, self._formats, capacity=self._store.capacity, max_rows=rows, shard=self._shard
            ),
        )

    def _canvas(self, length: int) -> Bound:
        rows = max(self.diffusion.canvas_length, 1 << (length - 1).bit_length())
        return self._store.get(
            ("canvas", rows),
            lambda: record_canvas(
                self.config, self._formats, capacity=self._store.capacity, max_rows=rows, shard=self._shard
            ),
        )

    def _soft(self, length: int) -> Bound:
        rows = max(self.diffusion.canvas_length, 1 << (length - 1).bit_length())
        return self._store.get(
            ("soft_embedding", rows),
            lambda: record_soft_embedding(self.config, self._formats, max_rows=rows, shard=self._shard),
        )
