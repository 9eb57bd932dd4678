"""The loop of an executor that runs it outside Python, seen through the same events as `decode.loop`.

The executor decides: forwards, predictions, commits, noise, and the ends that ids can bring (EOS, stop ids,
max_tokens). It appends one record a step and one a block to a ring. This module reads the ring while the loop runs and
replays the bookkeeping of `decode.loop` on the records: settling, text through `watch`, credit for visible tokens.
Events and request records are thus made by one text, whoever ran the forwards.

The loop may be some steps ahead of the reader. When a stop string is found in step k, or the request is cancelled
before step k is read, the answer ends there as it would have in the slow loop: later records are dropped and the loop
is told to stop. What it computed meanwhile is wasted, never shown.

Source: ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from dlmrt.decode.loop import (
    PREFILL_CHUNK,
    Block,
    BlockEvent,
    Event,
    GivenDraws,
    LoopRequest,
    PrefillEvent,
    StepEvent,
    decode,
    denoise_record,
)
from dlmrt.decode.rules import BlockState
from dlmrt.decode.settings import ResolvedDecode
from dlmrt.errors import non_finite_error
from dlmrt.program.loop import END_REASONS, MAX_HISTORY, LoopOptions
from dlmrt.types import Denoiser, EndReason, Float32, ForwardRecord, Prediction, StepState

POLL_SECONDS = 0.05  # how late a cancel flag set by another thread may reach a loop whose records are far apart

Record = tuple[str, np.void]


class LoopRun(Protocol):
    """A loop that is running."""

    def read(self, seconds: float) -> list[Record]:
        """Records that are ready, in order; waits up to `seconds` for an urgent one."""

    def cancel(self) -> None:
        """End the loop before its next forward."""

    def close(self) -> None:
        """End the loop and wait for it."""


@runtime_checkable
class LoopExecutor(Protocol):
    """A denoiser that can run the whole loop by itself; `dlmrt.program.loop` gives names and meaning of its inputs."""

    vocab_size: int
    has_residual: bool

    def start_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> LoopRun:  # fmt: skip
        """Start one request from an empty context that may fill `positions`."""


def is_native(denoiser: Denoiser, request: LoopRequest) -> bool:
    """Whether `denoiser` runs the loop of `request` itself; whole distributions never leave a native loop."""
    settings = request.settings
    return (
        isinstance(denoiser, LoopExecutor)
        and (settings.edit_ids is None or settings.max_denoising_steps <= MAX_HISTORY)
        and not request.with_probs
    )


def run_loop(
    denoiser: Denoiser, request: LoopRequest, *, wants_steps: bool = False, keeps_residual: bool = False
) -> Generator[Event]:
    """Run one request in the fastest way that `denoiser` offers.

    Args:
        wants_steps: steps are wanted as they happen; otherwise a native loop wakes the reader once a block.
        keeps_residual: states carry the residual they consumed.
    """
    if not is_native(denoiser, request):
        return decode(denoiser, request)
    return _follow(cast(LoopExecutor, denoiser), request, wants_steps=wants_steps, keeps_residual=keeps_residual)


def _follow(
    executor: LoopExecutor, request: LoopRequest, *, wants_steps: bool, keeps_residual: bool
) -> Generator[Event]:
    settings, length, num_prompt = request.settings, request.settings.canvas_length, len(request.prompt_S)
    is_grid_at_zero = request.diffusion.block_anchor == "position_zero"
    start = num_prompt // length * length if is_grid_at_zero else num_prompt
    pinned, block_idx, num_answer = request.prompt_S[start:], 0, 0
    run = executor.start_loop(
        loop_options(
            request.settings, has_residual=executor.has_residual, keeps_residual=keeps_residual, given=request.given
        ),
        positions=start + -(-(len(pinned) + settings.max_tokens) // length) * length,
        scalars=_scalars(request, num_prefill=start, wants_steps=wants_steps or bool(settings.stop)),
        arrays=_arrays(executor, request),
    )
    try:
        records = _records(run, request)
        _, prefill = next(records)
        yield PrefillEvent(forwards=_prefill_records(int(prefill["context"]), start, request))
        end_reason: EndReason | None = None
        while end_reason is None:
            block = _NativeBlock(
                executor, request, records, block_idx=block_idx, start=start, pinned=pinned, num_before=num_answer
            )
            yield from block.steps()
            end_reason = block.end_reason
            forwards = block.credited_forwards()
            if end_reason is None:
                _, closed = next(records)
                assert closed["block_idx"] == block_idx and closed["needs_commit"], "loop and reader disagree"
                forwards += (ForwardRecord(kind="commit", block_idx=block_idx, step=-1, num_rows=length),)
            yield BlockEvent(
                block_idx=block_idx, start=start, ids_L=block.state.answer_L, answer=tuple(block.answer),
                forwards=forwards, end_reason=end_reason,
            )  # fmt: skip
            num_answer += len(block.answer)
            start, pinned, block_idx = start + length, pinned[:0], block_idx + 1
    finally:
        run.close()


class _NativeBlock(Block):
    """Steps 2 to 9 of one block, from records instead of forwards."""

    def __init__(self, executor: Any, request: LoopRequest, records: Iterator[Record], **place: Any) -> None:
        super().__init__(executor, request, **place)
        self.native_records = records
        if self._begins_decided():
            is_open_L = self.state.is_open_L.copy()
            is_open_L[0] = False
            self.state = replace(self.state, is_open_L=is_open_L)

    def steps(self) -> Iterator[StepEvent]:
        """Read steps until the block is done or the answer ends."""
        while not self.state.is_done and self.end_reason is None:
            if self.request.cancel.is_set():
                self.end_reason = "cancelled"
                return
            kind, record = next(self.native_records)
            if kind == "block":
                self._end_early(record)
                return
            yield self._replay(record)

    def _replay(self, record: np.void) -> StepEvent:
        before = replace(self.state, canvas_L=record["before"])
        prediction = Prediction(
            argmax_L=record["argmax"], argmax_confidence_L=record["argmax_confidence"], token_L=record["token"],
            confidence_L=record["confidence"], entropy_L=record["entropy"],
        )  # fmt: skip
        # Open slots keep what they held, until it is known that another step follows. A mask stays a mask, also where
        # edits have moved it.
        is_noise_L = record["is_open"] & (self.request.diffusion.noise == "uniform")
        after = BlockState(
            canvas_L=np.where(is_noise_L, record["before"], record["canvas"]),
            answer_L=record["answer"], is_open_L=record["is_open"], is_pinned_L=before.is_pinned_L,
            committed_L=record["committed"], changed_L=record["changed"], num_edits=int(record["num_edits"]),
            step=int(record["step"]), num_full_steps=int(record["num_full_steps"]),
            num_repeats=int(record["num_repeats"]), is_done=bool(record["is_done"]),
        )  # fmt: skip
        self.changed_at_L[after.changed_L] = before.step
        consumed, self.state = self.residual_LD, after
        self.settle()
        assert self.end_reason in ("stop_string", END_REASONS[record["end_reason"]] or None), "loop and reader disagree"
        if not after.is_done and self.end_reason is None:
            self.state = replace(after, canvas_L=record["canvas"])
            self.residual_LD = _residual(record)
        self.records.append(denoise_record(self.block_idx, before, after, prediction))
        return StepEvent(
            state=StepState(
                block_idx=self.block_idx, step=before.step, start=self.start, canvas_L=before.canvas_L,
                residual_LD=consumed, is_unresolved_L=before.is_open_L, entropy_L=prediction.entropy_L,
                committed_L=after.committed_L, temperature=self.settings.step_temperature(before.step),
            ),
            after=self.state, prediction=prediction, num_settled=self.num_before + len(self.answer),
        )  # fmt: skip

    def _end_early(self, record: np.void) -> None:
        """The block closed without another step: cancelled, or the model's numbers cannot be used."""
        if END_REASONS[record["end_reason"]] == "non_finite":
            slots = np.flatnonzero(~record["is_finite_row"]).tolist()
            raise non_finite_error(slots, block=self.block_idx, step=self.state.step)
        assert END_REASONS[record["end_reason"]] == "cancelled", "loop and reader disagree"
        self.end_reason = "cancelled"


def _records(run: LoopRun, request: LoopRequest) -> Iterator[Record]:
    """All records of the run in order; hands a cancel flag that was set meanwhile on to the loop."""
    while True:
        for kind, record in run.read(POLL_SECONDS):
            if kind == "end":
                return
            yield kind, record
        if request.cancel.is_set():
            run.cancel()


def _residual(record: np.void) -> Float32 | None:
    assert record.dtype.names is not None
    return record["residual"] if "residual" in record.dtype.names else None


def _prefill_records(num_rows: int, num_prefill: int, request: LoopRequest) -> tuple[ForwardRecord, ...]:
    """The forwards that brought `num_rows` of `num_prefill` rows into the context, as `loop.prefill` divides them."""
    length = request.settings.canvas_length
    chunk = _prefill_chunk(length)
    is_causal = request.diffusion.context_attention == "causal"
    bounds = [0, *range(chunk if is_causal else chunk - -num_prefill % length, num_rows, chunk), num_rows]
    return tuple(
        ForwardRecord(kind="prefill", block_idx=-1, step=-1, num_rows=end - begin)
        for begin, end in itertools.pairwise(bounds) if end > begin
    )  # fmt: skip


def _prefill_chunk(length: int) -> int:
    return max(PREFILL_CHUNK // length * length, length)


def loop_options(
    settings: ResolvedDecode, *, has_residual: bool, keeps_residual: bool = False, given: GivenDraws | None = None
) -> LoopOptions:
    """What a program must be recorded for to serve requests with `settings`."""
    num_blocks, num_steps, _ = (0, 0, 0) if given is None else given.token_NSL.shape
    has_filter = settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0
    use_residual = has_residual and settings.use_residual
    return LoopOptions(
        canvas_length=settings.canvas_length,
        prefill_chunk=_prefill_chunk(settings.canvas_length),
        commit_rule=settings.commit_rule,
        is_greedy=settings.is_greedy or given is not None,
        is_filtered=has_filter and not settings.is_greedy and given is None,
        use_residual=use_residual,
        keeps_residual=use_residual and keeps_residual,
        num_given=(num_blocks, num_steps),
        num_remembered=0 if settings.edit_ids is None else _history(settings.max_denoising_steps),
    )


def _history(num_steps: int) -> int:
    """Steps that a program remembers: a power of two, so that few programs serve all requests."""
    return max(64, 1 << (num_steps - 1).bit_length())


def _scalars(request: LoopRequest, *, num_prefill: int, wants_steps: bool) -> dict[str, int | float]:
    s: ResolvedDecode = request.settings
    names = ("threshold", "min_commit", "sub_block_length", "max_post_edit_steps", "entropy_bound", "stop_entropy",
             "stability_threshold", "t_min", "t_max", "temperature", "top_k", "top_p", "min_p", "seed", "noise_key",
             "max_tokens")  # fmt: skip
    return {name: getattr(s, name) for name in names} | {
        "edit_threshold": 0.0 if s.edit_threshold is None else s.edit_threshold,
        "max_steps": s.max_denoising_steps,
        "num_prompt": len(request.prompt_S),
        "num_prefill": num_prefill,
        "num_allowed": len(request.allowed),
        "cancel": request.cancel.is_set(),
        "wants_steps": wants_steps,
    }


def _arrays(executor: LoopExecutor, request: LoopRequest) -> dict[str, npt.NDArray[np.generic]]:
    vocab_size, settings, given = executor.vocab_size, request.settings, request.given
    draws = {} if given is None else {"given_tokens": given.token_NSL, "given_noise": given.noise_NSL}
    return {
        **draws,
        "prompt": request.prompt_S,
        "allowed": request.allowed,
        "banned": _bits(request.banned, vocab_size),
        "eos": _bits(settings.eos_token_ids, vocab_size),
        "stop": _bits(settings.stop_token_ids, vocab_size),
    }


def _bits(ids: Any, vocab_size: int) -> npt.NDArray[np.uint32]:
    """Bit id % 32 of word id // 32 for each id; ids that the model cannot produce are left out."""
    chosen = np.array([token for token in ids if 0 <= token < vocab_size], dtype=np.int64)
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    np.bitwise_or.at(words, chosen // 32, np.uint32(1) << (chosen % 32).astype(np.uint32))
    return words
