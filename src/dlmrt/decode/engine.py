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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from dlmrt.checkpoint.hub import resolve as resolve_model
from dlmrt.checkpoint.load import Checkpoint, open_checkpoint
from dlmrt.decode.answer import Reply, Trace
from dlmrt.decode.loop import BlockEvent, LoopRequest, StepEvent, prefill
from dlmrt.decode.native import run_loop
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import ResolvedDecode, resolve, with_overrides
from dlmrt.decode.text import StopMatcher, TextCodec
from dlmrt.decode.tokens import TokenTrace
from dlmrt.errors import ContextLengthError, MissingDependencyError, UnknownOptionError, UsageError, nearest
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.types import (
    CanvasEvent,
    DecodeConfig,
    Denoiser,
    Float32,
    GenerateResult,
    Message,
    TextEvent,
    TokensEvent,
)

Prompt = str | Sequence[int] | Sequence[Message]
StreamEvent = TextEvent | CanvasEvent | TokensEvent | GenerateResult

# In the order in which "auto" tries them: module with `load_denoiser`, package it needs, extra that brings it.
EXECUTORS: dict[str, tuple[str, str, str]] = {
    "eager": ("dlmrt.eager.executor", "torch", "train"),
    "cpu": ("dlmrt.cpu.executor", "dlmrt.cpu._native", "cpu"),
}

_OPEN_SLOT = "\u2591"


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
        self, prompt: Prompt, config: DecodeConfig | None = None, *, canvas: bool = False, tokens: bool = False,
        num_top_logprobs: int = 0, record: bool = False, cancel: threading.Event | None = None, **overrides: Any,
    ) -> Iterator[StreamEvent]:  # fmt: skip
        """As `generate`, event by event; the result is the last item and its text equals the joined TextEvents.

        At least one TextEvent a finished block that adds text. Held back: what could still become a stop string and
        characters that are not complete. Closing the iterator ends the request.

        Args:
            canvas: also yield the canvas after every denoising step.
            tokens: also yield the ids of every closed block with their log-probabilities.
            num_top_logprobs: with `tokens`, also the log-probabilities of that many most probable ids.
        """
        prompt_ids = self._prompt_ids(prompt)
        settings = self._fit(self.settings(config, **overrides), len(prompt_ids), with_overrides(config, overrides))
        reply = Reply(StopMatcher(settings.stop), self.tokenizer)
        request = LoopRequest(
            prompt_S=np.array(prompt_ids, dtype=np.int32), settings=settings, diffusion=self._diffusion,
            banned=self._banned, allowed=self._allowed, cancel=cancel or threading.Event(), watch=reply.push,
            with_probs=tokens and num_top_logprobs > 0,
        )  # fmt: skip
        token_trace = TokenTrace(num_top_logprobs) if tokens else None
        return self._run(request, reply, token_trace, canvas=canvas, record=record)

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
        self, request: LoopRequest, reply: Reply, token_trace: TokenTrace | None, *, canvas: bool, record: bool
    ) -> Iterator[StreamEvent]:
        with self._lock:
            denoiser = self._open_denoiser()
            self._running = request.cancel
            trace = Trace(request)
            loop = run_loop(denoiser, request, wants_steps=canvas, keeps_residual=record)
            try:
                for event in loop:
                    trace.add(event, record=record)
                    if canvas and isinstance(event, StepEvent):
                        yield self._canvas_event(event)
                    if token_trace is not None and isinstance(event, StepEvent):
                        token_trace.step(event)
                    if token_trace is not None and isinstance(event, BlockEvent):
                        yield token_trace.close(event)
                    if text := reply.take():
                        yield TextEvent(text=text)
                if trace.end_reason != "stop_string" and reply.finish():
                    trace.end_reason = "stop_string"
                if text := reply.take():
                    yield TextEvent(text=text)
                result = trace.result(reply.text, denoiser)
            finally:
                loop.close()
                self._running = None
        yield result  # the next caller need not wait until this iterator is exhausted

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
