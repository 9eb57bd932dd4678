"""From the loop's events to what a caller gets: text as it becomes certain, counts, times, the record.

Source: ours; counting rules from docs/design.md (usage, tokens finalised per forward).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from dlmrt.decode.loop import Event, LoopRequest, PrefillEvent, StepEvent
from dlmrt.decode.text import StopMatcher, TextCodec
from dlmrt.types import (
    Denoiser,
    EndReason,
    FinishReason,
    ForwardRecord,
    GenerateResult,
    Int32,
    RequestRecord,
    StepState,
    TokenLogprob,
    Usage,
)

_FINISH: dict[EndReason, FinishReason] = {
    "eos": "stop", "stop_token": "stop", "stop_string": "stop", "max_tokens": "length", "cancelled": "cancelled",
}  # fmt: skip


class Reply:
    """Turns settled ids into text, holding back what is not certain yet."""

    def __init__(self, stops: StopMatcher, codec: TextCodec) -> None:
        self._stops, self._decoder = stops, codec.incremental()
        self._given: list[str] = []
        self._ready: list[str] = []

    def push(self, ids: list[int]) -> int | None:
        """Take settled ids; the number of them that count when a stop string is complete, else None."""
        for count, token in enumerate(ids, start=1):
            emit, is_matched = self._stops.push(self._decoder.push([token]))
            self._ready.append(emit)
            if is_matched:
                return count
        return None

    def take(self) -> str:
        """Text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        self._given.append(text)
        return text

    def finish(self) -> bool:
        """The answer has ended otherwise: make the rest ready; whether that rest held a stop string."""
        emit, is_matched = self._stops.push(self._decoder.finish())
        rest, is_matched = self._stops.flush() if not is_matched else ("", True)
        self._ready += [emit, rest]
        return is_matched

    @property
    def text(self) -> str:
        """All text taken so far."""
        return "".join(self._given)


@dataclass
class Trace:
    """Collects what the loop reports into counts, times and the record."""

    request: LoopRequest
    began: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first_block: float = 0.0
    forwards: list[ForwardRecord] = field(default_factory=list)
    states: list[StepState] = field(default_factory=list)
    blocks: list[Int32] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    num_blocks: int = 0
    end_reason: EndReason = "cancelled"

    def add(self, event: Event, *, record: bool) -> None:
        """Count one event; states and blocks are kept only with `record`."""
        if isinstance(event, PrefillEvent):
            self.prefilled = time.perf_counter()
            self.forwards += event.forwards
        elif isinstance(event, StepEvent):
            if record:
                self.states.append(event.state)
        else:
            self.first_block = self.first_block or time.perf_counter()
            self.forwards += event.forwards
            self.answer += event.answer
            self.num_blocks += bool(event.forwards)
            if record and event.forwards:
                self.blocks.append(event.ids_L)
            self.end_reason = event.end_reason or self.end_reason

    def result(self, text: str, denoiser: Denoiser) -> GenerateResult:
        """The finished answer; called after the last block event."""
        ended, settings = time.perf_counter(), self.request.settings
        by_kind = Counter(forward.kind for forward in self.forwards)
        usage = Usage(
            prompt_tokens=len(self.request.prompt_S),
            completion_tokens=len(self.answer),
            num_prefill_forwards=by_kind["prefill"],
            num_denoise_steps=by_kind["denoise"],
            num_commit_forwards=by_kind["commit"],
            num_blocks=self.num_blocks,
            num_edits=sum(forward.num_edits for forward in self.forwards),
            prefill_s=self.prefilled - self.began,
            decode_s=ended - self.prefilled,
            time_to_first_block_s=self.first_block - self.began,
            total_s=ended - self.began,
        )
        record = RequestRecord(
            seed=settings.seed, executor=denoiser.name, dtype=denoiser.dtype,
            graphs=bool(getattr(denoiser, "uses_graphs", False)), commit_rule=settings.commit_rule,
            end_reason=self.end_reason, forwards=tuple(self.forwards), num_blocks=self.num_blocks,
            num_cached_prompt_tokens=0, settings=settings.as_dict(),
            prompt_token_ids=tuple(self.request.prompt_S.tolist()),
            states=tuple(self.states), blocks=tuple(self.blocks), logprobs=tuple(self.logprobs),
        )  # fmt: skip
        return GenerateResult(
            text=text, token_ids=tuple(self.answer), finish_reason=_FINISH[self.end_reason], usage=usage, record=record
        )
