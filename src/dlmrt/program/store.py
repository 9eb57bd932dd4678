"""Programs of one model that are bound to memory: which are kept, for how many positions, and what is refused.

All programs of a model share its weights, one arena of scratch (only one runs at a time) and the committed context.
When the context must hold more positions, or a program needs a larger arena, that memory is replaced and every program
is bound anew at its next use: growth happens between requests, never while a program runs. What does not fit the memory
is refused before anything is replaced, and leaves all as it was. An executor says how much fits, and brings weights,
context and programs to their places.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dlmrt.errors import OutOfMemoryError
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.loop import record_types
from dlmrt.program.nodes import Buffer, Program
from dlmrt.program.plan import Plan, plan

MAX_PROGRAMS = 16  # that are kept; a model's own forwards are 3 to 6, each kind of request adds one

Bound = TypeVar("Bound")  # a program that is ready to run
Param = TypeVar("Param")  # a tensor of the checkpoint


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A program of an executor's kernels and what its fused weights are made of."""

    program: Program
    sources: Mapping[Buffer, tuple[Buffer, ...]]  # weight -> tensors whose rows it holds, in order
    part_bytes: int = 0  # that other ranks read of this one between two meetings, at most; 0 without ranks


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A lowered program with the places of its scratch."""

    lowered: Lowered
    plan: Plan
    record_types: Mapping[str, npt.DTypeLike]  # of the records that it publishes

    @property
    def program(self) -> Program:
        """What is to be bound."""
        return self.lowered.program

    @property
    def record_bytes(self) -> int:
        """Size of the largest record; 0: it publishes none."""
        return max((np.dtype(kind).itemsize for kind in self.record_types.values()), default=0)


class Store(Generic[Bound, Param]):
    """Weights, context and programs of one model.

    Args:
        params: the checkpoint's tensors; kept only while weights are brought to their places.
        page: positions by which the context grows.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Param], *, page: int) -> None:
        self.config = config
        self.capacity = 0  # positions that the next program is recorded for
        self._bound = 0  # and those that the context holds
        self._least = 0  # positions that are asked for: `capacity` where memory is short
        self._num_kept = 0  # of the context, when it grows
        self._page = page
        self._params: Mapping[str, Param] | None = params
        self._programs: dict[Hashable, Bound] = {}  # the last one is the one used last

    def get(self, key: Hashable, record: Callable[[], Program]) -> Bound:
        """The program called `key`, recorded and bound at its first use.

        Raises:
            OutOfMemoryError: there is no memory for it, or for the context that `reserve` asked for.
        """
        if self.capacity != self._bound or key not in self._programs:
            before = self._bound
            try:
                program = self._made(record)
            except BaseException:
                self._bound = before
                raise
            finally:
                self.capacity = self._least = self._bound
            self._programs[key] = program
        program = self._programs[key] = self._programs.pop(key)
        return program

    def reserve(self, positions: int, kept: int) -> None:
        """Make room for `positions` in the context at the next `get`, keeping the first `kept`."""
        if positions <= self._bound:
            return
        limit = self.config.max_position_embeddings
        wanted = max(positions, min(limit, max(1024, 1 << (positions - 1).bit_length())))
        self.capacity, self._least = (-(-count // self._page) * self._page for count in (wanted, positions))
        self._num_kept = kept

    def release_params(self) -> None:
        """Weights are where programs read them: forget where they came from."""
        self._params = None

    def _made(self, record: Callable[[], Program]) -> Bound:
        placed = self._fitting(record)
        self._load_weights(placed.lowered)
        if self.capacity > self._bound:
            self._drop_programs(0)
            self._bound = self.capacity
            self._grow_context(self._num_kept)
        if placed.plan.num_bytes > self._arena_bytes():
            self._drop_programs(0)
            self._replace_arena(placed.plan.num_bytes)
        self._drop_programs(MAX_PROGRAMS - 1)
        return self._bind(placed)

    def _fitting(self, record: Callable[[], Program]) -> Placed:
        """What `record` gives, lowered and placed: for `capacity`, or for no more than is asked for if that fits."""
        while True:
            recorded = record()
            lowered = self._lowered(recorded)
            placed = Placed(lowered=lowered, plan=plan(lowered.program), record_types=record_types(recorded))
            try:
                self._check_fits(placed)
            except OutOfMemoryError:
                if self.capacity == self._least:
                    raise
                self.capacity = self._least
            else:
                return placed

    def _drop_programs(self, num_kept: int) -> None:
        """Drop all programs but those used last."""
        while len(self._programs) > num_kept:
            self._release(self._programs.pop(next(iter(self._programs))))

    def _missing_bytes(self, placed: Placed) -> int:
        """What `placed` needs beside what is there: weights, context, other states, scratch."""
        shared = [buffer for buffer in placed.program.buffers() if buffer.kind in ("weight", "state")]
        missing = (max(self._num_bytes(buffer) - self._held_bytes(buffer), 0) for buffer in shared)
        return max(placed.plan.num_bytes - self._arena_bytes(), 0) + sum(missing)

    def _param(self, name: str) -> Param:
        assert self._params is not None, f"{name} is asked for after the weights were brought to their places"
        family = family_of(self.config)
        is_tied = name == family.HEAD and self.config.tie_word_embeddings
        return self._params[family.EMBEDDING if is_tied else name]

    # What executors do.

    def _lowered(self, recorded: Program) -> Lowered:
        raise NotImplementedError

    def _num_bytes(self, buffer: Buffer) -> int:
        """Size of a weight or state."""
        return buffer.num_bytes

    def _held_bytes(self, buffer: Buffer) -> int:
        """How much of a weight or state is there and stays."""
        raise NotImplementedError

    def _check_fits(self, placed: Placed) -> None:
        """Raise OutOfMemoryError unless there is memory for what is missing."""
        raise NotImplementedError

    def _load_weights(self, lowered: Lowered) -> None:
        """Bring the weights of a program that are not there yet to their places."""
        raise NotImplementedError

    def _grow_context(self, num_kept: int) -> None:
        """The context is to hold `capacity` positions, and keep `num_kept` of what it holds."""
        raise NotImplementedError

    def _arena_bytes(self) -> int:
        raise NotImplementedError

    def _replace_arena(self, num_bytes: int) -> None:
        raise NotImplementedError

    def _bind(self, placed: Placed) -> Bound:
        raise NotImplementedError

    def _release(self, program: Bound) -> None:
        """Free what a program that is dropped holds beside memory."""


def weight_key(buffer: Buffer) -> tuple[str, str, str]:
    """One weight may be there in several types and orders."""
    return buffer.name, buffer.dtype, buffer.layout


def shortage(needed_bytes: int, available_bytes: int | None, what: str) -> str:
    """Why `what` does not fit, with both numbers; empty: it fits, or nobody knows."""
    if available_bytes is None or needed_bytes <= available_bytes:
        return ""
    return (
        f"{what} needs {needed_bytes:,} bytes ({needed_bytes / 2**30:.2f} GiB) of memory, {available_bytes:,} "
        f"({available_bytes / 2**30:.2f} GiB) are available; free memory, or choose a smaller dtype or context"
    )
