"""Engine: a checkpoint, an executor and a tokenizer behind `generate`, `stream` and `logits`.

One engine serves one request at a time; a second caller waits for the lock. Every request starts from an empty context,
so neither an error nor an abandoned stream can leave anything behind: reusing prefixes between requests is left out.
Requests are checked before any work: a `stream` call raises at once, not at its first event.

Source: ours; the surface is described in docs/design.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from dlmrt.checkpoint.hub import resolve as resolve_model
from dlmrt.checkpoint.load import Checkpoint, open_checkpoint
from dlmrt.decode.loop import BlockEvent, LoopRequest, PrefillEvent, StepEvent, decode, prefill
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import ResolvedDecode, resolve, with_overrides
from dlmrt.decode.text import StopMatcher, TextCodec
from dlmrt.errors import ContextLengthError, MissingDependencyError, UnknownOptionError, UsageError, nearest
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.types import (
    CanvasEvent,
    DecodeConfig,
    Denoiser,
    EndReason,
    FinishReason,
    Float32,
    ForwardRecord,
    GenerateResult,
    Int32,
    Message,
    RequestRecord,
    StepState,
    TextEvent,
    Usage,
)

Prompt = str | Sequence[int] | Sequence[Message]

# In the order in which "auto" tries them: module with `load_denoiser`, package it needs, extra that brings it.
EXECUTORS: dict[str, tuple[str, str, str]] = {"eager": ("dlmrt.eager.executor", "torch", "train")}

_OPEN_SLOT = "\u2591"
_FINISH: dict[EndReason, FinishReason] = {
    "eos": "stop", "stop_token": "stop", "stop_string": "stop", "max_tokens": "length", "cancelled": "cancelled",
}  # fmt: skip


def make_denoiser(checkpoint: Checkpoint, *, executor: str, dtype: str, num_threads: int | None) -> Denoiser:
    """Load `checkpoint` into `executor`; "auto" takes the first one whose package is installed.

    Raises:
        UnknownOptionError: no executor goes by that name.
        MissingDependencyError: the package of the executor is not installed.
    """
    if executor != "auto" and executor not in EXECUTORS:
        raise UnknownOptionError(f"unknown executor {executor!r}{nearest(executor, ('auto', *EXECUTORS))}")
    for name in EXECUTORS if executor == "auto" else (executor,):
        module, package, _ = EXECUTORS[name]
        if importlib.util.find_spec(package) is not None:
            loaded = importlib.import_module(module).load_denoiser(checkpoint, dtype=dtype, num_threads=num_threads)
            return cast(Denoiser, loaded)
    name = next(iter(EXECUTORS)) if executor == "auto" else executor
    _, package, extra = EXECUTORS[name]
    raise MissingDependencyError(f"executor {name!r} needs {package}, not installed; pip install 'dlmrt[{extra}]'")


class Engine:
    """Generates text with one model, one request at a time.

    Example:
        with Engine.load("path/to/checkpoint") as engine:
            print(engine.generate("2 + 3 =", threshold=0.9).text)

    Args:
        denoiser: executor that holds the weights.
        config: of the checkpoint.
        codec: its tokenizer and chat template.
        generation_defaults: parsed generation_config.json.
    """

    def __init__(
        self, denoiser: Denoiser, config: ModelConfig, codec: TextCodec,
        generation_defaults: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.tokenizer = codec
        self._defaults = dict(generation_defaults or {})
        self.settings()  # a checkpoint whose own settings are wrong fails here
        assert config.diffusion is not None
        self._diffusion: DiffusionConfig = config.diffusion
        self._denoiser: Denoiser | None = denoiser
        self._banned = banned_ids(config, codec.vocab_size)
        self._allowed = np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), self._banned)
        self._lock = threading.Lock()
        self._running: threading.Event | None = None  # cancel flag of the request that holds the lock

    @classmethod
    def load(
        cls, name_or_path: str | Path, *, executor: str = "auto", dtype: str = "auto", num_threads: int | None = None,
        revision: str | None = None,
    ) -> Engine:  # fmt: skip
        """Load a model by embedded name, folder or hub id.

        Args:
            executor: "auto", or a name of `EXECUTORS`.
            dtype: "auto" for the checkpoint's own.
            num_threads: CPU threads; None leaves the executor's default.
            revision: branch, tag or commit of a hub repository.
        """
        checkpoint = open_checkpoint(resolve_model(name_or_path, revision=revision))
        codec = TextCodec.from_folder(checkpoint.folder)
        denoiser = make_denoiser(checkpoint, executor=executor, dtype=dtype, num_threads=num_threads)
        return cls(denoiser, checkpoint.config, codec, checkpoint.generation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights; waits for a running request. Later calls raise UsageError."""
        with self._lock:
            self._denoiser = None

    def cancel(self) -> None:
        """End the running request, if any, before its next forward; it returns what is final with "cancelled"."""
        running = self._running
        if running is not None:
            running.set()

    def settings(self, config: DecodeConfig | None = None, **overrides: Any) -> ResolvedDecode:
        """The settings that a request with `config` and `overrides` would run with."""
        return resolve(with_overrides(config, overrides), self.config, self._defaults)

    def generate(
        self, prompt: Prompt, config: DecodeConfig | None = None, *, record: bool = False,
        cancel: threading.Event | None = None, **overrides: Any,
    ) -> GenerateResult:  # fmt: skip
        """Answer one prompt.

        Args:
            prompt: text to be continued as it is, token ids, or messages for the chat template.
            record: keep every state and whole blocks in `GenerateResult.record`.
            cancel: set it from another thread to end this request.
            overrides: fields of DecodeConfig, on top of `config`.

        Raises:
            UsageError: prompt or settings cannot be used; UnknownOptionError for an unknown override.
            ContextLengthError: prompt and max_tokens do not fit the context.
            NonFiniteError: the model produced NaN or infinite values.
        """
        *_, result = self.stream(prompt, config, record=record, cancel=cancel, **overrides)
        assert isinstance(result, GenerateResult)
        return result

    def stream(
        self, prompt: Prompt, config: DecodeConfig | None = None, *, canvas: bool = False, record: bool = False,
        cancel: threading.Event | None = None, **overrides: Any,
    ) -> Iterator[TextEvent | CanvasEvent | GenerateResult]:  # fmt: skip
        """As `generate`, event by event; the result is the last item and its text equals the joined TextEvents.

        At least one TextEvent a finished block that adds text. Held back: what could still become a stop string and
        characters that are not complete. Closing the iterator ends the request.

        Args:
            canvas: also yield the canvas after every denoising step.
        """
        prompt_ids = self._prompt_ids(prompt)
        settings = self._fit(self.settings(config, **overrides), len(prompt_ids), with_overrides(config, overrides))
        reply = _Reply(StopMatcher(settings.stop), self.tokenizer)
        request = LoopRequest(
            prompt_S=np.array(prompt_ids, dtype=np.int32), settings=settings, diffusion=self._diffusion,
            banned=self._banned, allowed=self._allowed, cancel=cancel or threading.Event(), watch=reply.push,
        )  # fmt: skip
        return self._run(request, reply, canvas=canvas, record=record)

    def logits(self, context_ids: Sequence[int], canvas_ids: Sequence[int], residual: Float32 | None = None) -> Float32:
        """Logits float32 [L, V] of one canvas behind a committed context, as the loop would see them.

        Args:
            canvas_ids: may hold the mask id.
            residual: z [L, D] as a record's states hold it; None stands for 0.
        """
        context_S = np.array(self._checked_ids(context_ids, "context_ids"), dtype=np.int32)
        canvas_L = np.array(self._checked_ids(canvas_ids, "canvas_ids", may_mask=True), dtype=np.int32)
        needed = len(context_S) + len(canvas_L)
        if needed > self.config.max_position_embeddings:
            limit = self.config.max_position_embeddings
            raise ContextLengthError(f"{needed} positions exceed the model's {limit}; pass fewer ids")
        with self._lock:
            denoiser = self._open_denoiser()
            denoiser.reset()
            prefill(denoiser, context_S, self._diffusion.canvas_length)
            return denoiser.forward(canvas_L, residual, None)

    def _open_denoiser(self) -> Denoiser:
        if self._denoiser is None:
            raise UsageError("the engine is closed; load it again")
        return self._denoiser

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids = self.tokenizer.encode_messages(cast(Sequence[Message], prompt))
        else:
            ids = list(cast(Sequence[int], prompt))
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        return self._checked_ids(ids, "the prompt")

    def _checked_ids(self, ids: Sequence[int], name: str, *, may_mask: bool = False) -> list[int]:
        known, mask = min(self.tokenizer.vocab_size, self.config.vocab_size), self._diffusion.mask_token_id
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise UsageError(f"{name} holds {token!r} at position {at}; ids are integers")
            if token == mask and not may_mask:
                raise UsageError(f"{name} holds id {mask} at position {at}, which is reserved for the mask; remove it")
            if not 0 <= token < known and token != mask:
                raise UsageError(f"{name} holds id {token} at position {at}; ids lie within [0, {known - 1}]")
        return [int(token) for token in ids]

    def _fit(self, settings: ResolvedDecode, num_prompt: int, asked: DecodeConfig) -> ResolvedDecode:
        """Check prompt and answer against the context, whole blocks included; a default max_tokens is cut to fit."""
        length, limit = settings.canvas_length, self.config.max_position_embeddings
        start = num_prompt // length * length if self._diffusion.block_anchor == "position_zero" else num_prompt
        room = (limit - start) // length * length - (num_prompt - start)
        if room < 1:
            raise ContextLengthError(
                f"a prompt of {num_prompt} tokens leaves no room for a block of {length} in a context of {limit}; "
                "shorten it"
            )
        if settings.max_tokens <= room:
            return settings
        if asked.max_tokens is None:
            return dataclasses.replace(settings, max_tokens=room)
        raise ContextLengthError(
            f"a prompt of {num_prompt} tokens and max_tokens {settings.max_tokens} do not fit a context of {limit} in "
            f"whole blocks of {length}; max_tokens can be at most {room}"
        )

    def _run(
        self, request: LoopRequest, reply: _Reply, *, canvas: bool, record: bool
    ) -> Iterator[TextEvent | CanvasEvent | GenerateResult]:
        with self._lock:
            denoiser = self._open_denoiser()
            self._running = request.cancel
            trace = _Trace(request)
            loop = decode(denoiser, request)
            try:
                for event in loop:
                    trace.add(event, record=record)
                    if canvas and isinstance(event, StepEvent):
                        yield self._canvas_event(event)
                    if text := reply.take():
                        yield TextEvent(text=text)
                if trace.end_reason != "stop_string" and reply.finish():
                    trace.end_reason = "stop_string"
                if text := reply.take():
                    yield TextEvent(text=text)
                yield trace.result(reply.text, denoiser)
            finally:
                loop.close()
                self._running = None

    def _canvas_event(self, event: StepEvent) -> CanvasEvent:
        after = event.after
        runs: list[tuple[bool, list[int]]] = []
        for slot in np.flatnonzero(~after.is_pinned_L):
            is_open = bool(after.is_open_L[slot])
            if not runs or runs[-1][0] != is_open:
                runs.append((is_open, []))
            runs[-1][1].append(int(after.canvas_L[slot]))
        text = "".join(_OPEN_SLOT * len(ids) if is_open else self.tokenizer.decode(ids) for is_open, ids in runs)
        return CanvasEvent(
            block_idx=event.state.block_idx, step=event.state.step, start=event.state.start, canvas_L=after.canvas_L,
            is_unresolved_L=after.is_open_L, changed_L=after.committed_L & (after.canvas_L != event.state.canvas_L),
            confidence_L=event.prediction.confidence_L, text=text,
        )  # fmt: skip


class _Reply:
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
class _Trace:
    """Collects what the loop reports into counts, times and the record."""

    request: LoopRequest
    began: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first_block: float = 0.0
    forwards: list[ForwardRecord] = field(default_factory=list)
    states: list[StepState] = field(default_factory=list)
    blocks: list[Int32] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    num_blocks: int = 0
    end_reason: EndReason = "cancelled"

    def add(self, event: PrefillEvent | StepEvent | BlockEvent, *, record: bool) -> None:
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
            seed=settings.seed, executor=denoiser.name, dtype=denoiser.dtype, commit_rule=settings.commit_rule,
            end_reason=self.end_reason, forwards=tuple(self.forwards), num_blocks=self.num_blocks,
            num_cached_prompt_tokens=0, settings=settings.as_dict(),
            prompt_token_ids=tuple(self.request.prompt_S.tolist()),
            states=tuple(self.states), blocks=tuple(self.blocks),
        )  # fmt: skip
        return GenerateResult(
            text=text, token_ids=tuple(self.answer), finish_reason=_FINISH[self.end_reason], usage=usage, record=record
        )
