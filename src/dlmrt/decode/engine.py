"""Engine: a checkpoint, an executor and a tokenizer behind `generate`, `stream` and `logits`.

One engine serves one request at a time; a second caller waits for the lock. Every request starts from an empty context,
so neither an error nor an abandoned stream can leave anything behind: reusing prefixes between requests is left out.
Requests are checked before any work: a `stream` call raises at once, not at its first event.

Source: ours; the surface is described in docs/design.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from dlmrt.checkpoint.adapter import open_adapter, with_adapter
from dlmrt.checkpoint.hub import resolve as resolve_model
from dlmrt.checkpoint.load import Checkpoint, open_checkpoint
from dlmrt.cpu.memory import available_bytes
from dlmrt.decode.answer import Reply, Trace
from dlmrt.decode.loop import BlockEvent, Event, LoopRequest, StepEvent, prefill
from dlmrt.decode.native import is_native, run_loop
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import ResolvedDecode, resolve, with_overrides
from dlmrt.decode.text import StopMatcher, TextCodec
from dlmrt.decode.tokens import TokenTrace
from dlmrt.errors import (
    CheckpointError,
    ContextLengthError,
    MissingDependencyError,
    UnknownOptionError,
    UnsupportedModelError,
    UsageError,
    nearest,
)
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.families import family_of
from dlmrt.models.typed import shown
from dlmrt.parallel.ranks import EXECUTOR as PARALLEL
from dlmrt.types import (
    Assignable,
    CanvasEvent,
    DecodeConfig,
    Denoiser,
    Float32,
    GenerateResult,
    Message,
    TextEvent,
    TokensEvent,
)

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Message]
StreamEvent = TextEvent | CanvasEvent | TokensEvent | GenerateResult

# Module with `load_denoiser`, package it needs, how to get that.
EXECUTORS: dict[str, tuple[str, str, str]] = {
    "cuda": ("dlmrt.cuda.executor", "triton", "pip install 'dlmrt[cuda]'"),
    "cpu": ("dlmrt.cpu.executor", "dlmrt.cpu._native", "install dlmrt from a wheel, or with a C++17 compiler at hand"),
    "eager": ("dlmrt.eager.executor", "torch", "pip install 'dlmrt[train]'"),
    PARALLEL: ("dlmrt.parallel.lead", "torch", "pip install 'dlmrt[train]'"),
}

AUTO = ("cpu", "eager")  # in the order in which "auto" tries them; cuda joins when it has run on a GPU (docs/gpu.md)

MAX_THREADS = 4096
# Of a step's arrays [L, V] in decode.sampling and the denoiser, at their largest: without and with a draw.
_GREEDY_BYTES, _DRAWN_BYTES = 36, 56
ABANDONED_S = 60.0  # a stream that nobody has gone on with for so long is not waited for
_OPEN_SLOT = "\u2591"


def make_denoiser(checkpoint: Checkpoint, *, executor: str, dtype: str, num_threads: int | None) -> Denoiser:
    """Load `checkpoint` into `executor`; "auto" takes the first of `AUTO` that is installed and knows the model.

    Raises:
        UnknownOptionError: no executor goes by that name.
        MissingDependencyError: the package of the executor is not installed.
    """
    if executor not in ("auto", *EXECUTORS):
        raise UnknownOptionError(f"unknown executor {shown(executor)}{nearest(executor, ('auto', *EXECUTORS))}")
    if num_threads is not None and (type(num_threads) is not int or not 1 <= num_threads <= MAX_THREADS):
        raise UsageError(f"num_threads is {shown(num_threads)}; it must be a whole number within [1, {MAX_THREADS}]")
    names = AUTO if executor == "auto" else (executor,)
    for name in names:
        module, package, way = EXECUTORS[name]
        if importlib.util.find_spec(package) is None:
            if name != names[-1]:
                logger.warning("executor %s is not available (%s not installed): %s", name, package, way)
            continue
        try:
            loaded = importlib.import_module(module).load_denoiser(checkpoint, dtype=dtype, num_threads=num_threads)
        except UnsupportedModelError as error:
            if name == names[-1]:
                raise
            logger.info("executor %s is passed over: %s", name, error)
            continue
        return cast(Denoiser, loaded)
    _, package, way = EXECUTORS[names[-1]]
    raise MissingDependencyError(f"executor {names[-1]!r} needs {package}, not installed; {way}")


def open_model(
    name_or_path: str | Path, *, revision: str | None = None, adapter: str | Path | None = None
) -> Checkpoint:
    """Open a model by embedded name, folder or hub id, with a residual adapter laid over it if one is given."""
    checkpoint = open_checkpoint(resolve_model(name_or_path, revision=revision))
    return checkpoint if adapter is None else with_adapter(checkpoint, open_adapter(Path(adapter)))


def with_stop_tokens(config: ModelConfig, codec: TextCodec) -> ModelConfig:
    """`config` that also ends answers at the family's end-of-turn tokens, which some files do not name as EOS."""
    ids = map(codec.tokenizer.token_to_id, family_of(config).STOP_TOKENS)
    known = [token for token in ids if token is not None]
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *known))))


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

    Attributes:
        num_threads: CPU threads that the executor computes on; None where it does not say.
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
        self.num_threads: int | None = getattr(denoiser, "num_threads", None)
        self._check_tokenizer(codec)
        self._banned = banned_ids(config, codec.known_ids)
        self._allowed = np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), self._banned)
        self._lock = threading.Lock()
        self._running: threading.Event | None = None  # cancel flag of the request that holds the lock
        self._holder: int | None = None  # thread that last worked on that request
        self._paused: float | None = None  # since when that request's stream waits to be gone on with

    @classmethod
    def load(
        cls, name_or_path: str | Path, *, executor: str = "auto", dtype: str = "auto", num_threads: int | None = None,
        revision: str | None = None, adapter: str | Path | None = None,
    ) -> Engine:  # fmt: skip
        """Load a model by embedded name, folder or hub id.

        Args:
            executor: "auto", or a name of `EXECUTORS`.
            dtype: "auto" for the checkpoint's own.
            num_threads: CPU threads; None leaves the executor's default.
            revision: branch, tag or commit of a hub repository.
            adapter: folder of a residual adapter that was trained on this model (`dlmrt.checkpoint.adapter`).
        """
        return cls.over(
            open_model(name_or_path, revision=revision, adapter=adapter),
            lambda opened: make_denoiser(opened, executor=executor, dtype=dtype, num_threads=num_threads),
        )

    @classmethod
    def over(cls, checkpoint: Checkpoint, denoiser_of: Callable[[Checkpoint], Denoiser]) -> Engine:
        """An engine over an open checkpoint; its tokenizer is read before `denoiser_of` loads its weights."""
        codec = TextCodec.from_folder(checkpoint.folder)
        return cls(denoiser_of(checkpoint), with_stop_tokens(checkpoint.config, codec), codec, checkpoint.generation)

    def _check_tokenizer(self, codec: TextCodec) -> None:
        """Refuse a tokenizer that does not belong to the model, or that can write the mask token as text."""
        mask = self._diffusion.mask_token_id
        if mask in codec.known_ids - codec.special_ids:
            raise CheckpointError(
                f"mask_token_id {mask} is {codec.tokenizer.id_to_token(mask)!r}, an ordinary token of the tokenizer, "
                "which text can contain; the mask must be a token of its own"
            )
        if not codec.known_ids & set(range(self.config.vocab_size)) - {mask}:
            raise CheckpointError("the tokenizer has no token with a row in the embedding table; get the model's own")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights; waits for a running request. Later calls raise UsageError.

        A stream that is open in the calling thread, or was left open in another one, is not waited for: it ends as if
        cancelled when it is gone on with.
        """
        running = self._running
        is_mine = running is not None and self._holder == threading.get_ident()
        is_taken = not is_mine and self._acquire()
        self._denoiser = None
        if is_taken:
            self._lock.release()
        elif running is not None:
            running.set()

    def cancel(self) -> None:
        """End the running request, if any, before its next forward; it returns what is final with "cancelled"."""
        running = self._running
        if running is not None:
            running.set()

    def assign(self, params: Mapping[str, Float32]) -> None:
        """Replace the weights by float32 tensors of the same names and shapes, in place; waits for a running request.

        Raises:
            UsageError: the executor cannot, or a name or shape differs from the model's.
        """
        shapes = family_of(self.config).tensor_shapes(self.config)
        for name in (*shapes, *params):
            if name not in params or name not in shapes or params[name].shape != shapes[name]:
                raise UsageError(f"tensor {name} is missing, extra or of another shape; pass every tensor of the model")
        with self._slot():
            denoiser = self._open_denoiser()
            if not isinstance(denoiser, Assignable):
                raise UsageError(f"executor {denoiser.name!r} cannot take other weights; use 'cpu' or 'eager'")
            denoiser.assign(params)

    def settings(self, config: DecodeConfig | None = None, **overrides: Any) -> ResolvedDecode:
        """The settings that a request with `config` and `overrides` would run with."""
        return resolve(with_overrides(config, overrides), self.config, self._defaults)

    def generate(
        self, prompt: Prompt, config: DecodeConfig | None = None, *, record: bool = False,
        cancel: threading.Event | None = None, observe: Callable[[Event], None] | None = None,
        template_options: Mapping[str, Any] | None = None, **overrides: Any,
    ) -> GenerateResult:  # fmt: skip
        """Answer one prompt.

        Args:
            prompt: text to be continued as it is, token ids, or messages for the chat template.
            record: keep every state, whole blocks and log-probabilities in `GenerateResult.record`.
            cancel: set it from another thread to end this request.
            observe: gets every event of the loop, states with the residual they consumed; arrays are its to keep.
            template_options: of messages, what the chat template reads, e.g. ``{"enable_thinking": False}``.
            overrides: fields of DecodeConfig, on top of `config`.

        Raises:
            UsageError: prompt or settings cannot be used; UnknownOptionError for an unknown override.
            ContextLengthError: prompt and max_tokens do not fit the context.
            NonFiniteError: the model produced NaN or infinite values.
        """
        *_, result = self.stream(
            prompt, config, record=record, cancel=cancel, observe=observe, template_options=template_options,
            **overrides,
        )  # fmt: skip
        assert isinstance(result, GenerateResult)
        return result

    def stream(
        self, prompt: Prompt, config: DecodeConfig | None = None, *, canvas: bool = False, tokens: bool = False,
        num_top_logprobs: int = 0, record: bool = False, cancel: threading.Event | None = None,
        observe: Callable[[Event], None] | None = None, template_options: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Iterator[StreamEvent]:  # fmt: skip
        """As `generate`, event by event; the result is the last item and its text equals the joined TextEvents.

        At least one TextEvent a finished block that adds text. Held back: what could still become a stop string and
        characters that are not complete. Closing the iterator ends the request.

        Args:
            canvas: also yield the canvas after every denoising step.
            tokens: also yield the ids of every closed block with their log-probabilities.
            num_top_logprobs: with `tokens`, also the log-probabilities of that many most probable ids.
        """
        if type(num_top_logprobs) is not int or not 0 <= num_top_logprobs <= self.config.vocab_size:
            limit = self.config.vocab_size
            raise UsageError(f"num_top_logprobs is {shown(num_top_logprobs)}; it must be within [0, {limit}]")
        if num_top_logprobs and not tokens:
            raise UsageError("num_top_logprobs has no effect without tokens=True; set it, or leave both out")
        prompt_ids = self._prompt_ids(prompt, template_options or {})
        settings = self._fit(self.settings(config, **overrides), len(prompt_ids), with_overrides(config, overrides))
        reply = Reply(StopMatcher(settings.stop), self.tokenizer)
        request = LoopRequest(
            prompt_S=np.array(prompt_ids, dtype=np.int32), settings=settings, diffusion=self._diffusion,
            banned=self._banned, allowed=self._allowed, cancel=cancel or threading.Event(), watch=reply.push,
            with_probs=tokens and num_top_logprobs > 0,
        )  # fmt: skip
        token_trace = TokenTrace(num_top_logprobs) if tokens or record else None
        self._check_memory(request)
        events = self._run(request, reply, token_trace, canvas=canvas, tokens=tokens, record=record, observe=observe)
        return self._watched(events)

    def logits(self, context_ids: Sequence[int], canvas_ids: Sequence[int], residual: Float32 | None = None) -> Float32:
        """Logits float32 [L, V] of one canvas behind a committed context, as the loop would see them.

        Args:
            canvas_ids: may hold the mask id.
            residual: z [L, D] as a record's states hold it; None stands for 0.
        """
        context_S = np.array(self._checked_ids(context_ids, "context_ids"), dtype=np.int32)
        canvas_L = np.array(self._checked_ids(canvas_ids, "canvas_ids", may_mask=True), dtype=np.int32)
        if not len(canvas_L):
            raise UsageError("canvas_ids is empty; give at least one id")
        if residual is not None:
            residual = np.asarray(residual, dtype=np.float32)
            if residual.ndim != 2 or len(residual) != len(canvas_L) or not np.isfinite(residual).all():
                raise UsageError(f"the residual must be finite and have one row for each of {len(canvas_L)} canvas ids")
        needed = len(context_S) + len(canvas_L)
        if needed > self.config.max_position_embeddings:
            limit = self.config.max_position_embeddings
            raise ContextLengthError(f"{needed} positions exceed the model's {limit}; pass fewer ids")
        with self._slot():
            denoiser = self._open_denoiser()
            denoiser.reset()
            is_causal = self._diffusion.context_attention == "causal"
            prefill(denoiser, context_S, self._diffusion.canvas_length, is_causal=is_causal)
            return denoiser.forward(canvas_L, residual, None)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """The right to use the denoiser, for one request at a time.

        A stream that the main thread has left open would be waited for by the only thread that can go on with it. Of
        other threads nobody knows that: pools move streams between them. There, time tells.

        Raises:
            UsageError: a stream is open that this thread, or nobody for a long time, has gone on with.
        """
        me = threading.get_ident()
        if self._holder == me == threading.main_thread().ident:
            raise UsageError("a stream of this engine is open in this thread; exhaust it or call its close() first")
        if not self._acquire():
            raise UsageError("another stream of this engine was left open; exhaust it or call its close() first")
        try:
            self._holder = me
            yield
        finally:
            self._holder = None
            self._lock.release()

    def _acquire(self) -> bool:
        """Wait for the lock; False when the stream that has it was left open."""
        while not self._lock.acquire(timeout=ABANDONED_S / 4):
            paused = self._paused
            if paused is not None and time.monotonic() - paused > ABANDONED_S:
                return False
        return True

    def _watched(self, events: Generator[StreamEvent, None, None]) -> Iterator[StreamEvent]:
        """`events`, noting since when their reader is waited for while the slot is taken."""
        with contextlib.closing(events):
            for event in events:
                if isinstance(event, GenerateResult):  # the slot is free
                    yield event
                    continue
                self._paused = time.monotonic()
                try:
                    yield event
                finally:
                    self._paused = None

    def _open_denoiser(self) -> Denoiser:
        if self._denoiser is None:
            raise UsageError("the engine is closed; load it again")
        return self._denoiser

    def _prompt_ids(self, prompt: Prompt, template_options: Mapping[str, Any]) -> list[int]:
        is_conversation = False
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Mapping):
            raise UsageError("the prompt is a single message; put it into a list")
        elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray | memoryview):
            if len(prompt) > 0 and isinstance(prompt[0], str | list | tuple | np.ndarray):
                raise UsageError(
                    f"the prompt is a list of {len(prompt)} prompts; there are no batches, give them one by one"
                )
            is_conversation = len(prompt) > 0 and isinstance(prompt[0], Mapping)
            ids = (
                self.tokenizer.encode_messages(cast(Any, prompt), **template_options)
                if is_conversation
                else list(cast(Any, prompt))
            )
        else:
            raise UsageError(f"the prompt is a {type(prompt).__name__}; give text, a list of ids or a list of messages")
        if template_options and not is_conversation:
            raise UsageError("template_options have no effect without messages; leave them out")
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        return self._checked_ids(ids, "the prompt")

    def _checked_ids(self, ids: Sequence[int], name: str, *, may_mask: bool = False) -> list[int]:
        if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, str | bytes | bytearray | memoryview):
            raise UsageError(f"{name} is a {type(ids).__name__}; give a list of ids")
        known, mask = self.tokenizer.known_ids, self._diffusion.mask_token_id
        largest = min(self.tokenizer.vocab_size, self.config.vocab_size) - 1
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise UsageError(f"{name} holds {shown(token)} at position {at}; ids are integers")
            if token == mask and not may_mask:
                raise UsageError(f"{name} holds id {mask} at position {at}, which is reserved for the mask; remove it")
            if not 0 <= token <= largest and token != mask:
                raise UsageError(f"{name} holds id {shown(token)} at position {at}; ids lie within [0, {largest}]")
            if token not in known and token != mask:
                raise UsageError(f"{name} holds id {token} at position {at}, which the tokenizer has no token for")
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

    def _check_memory(self, request: LoopRequest) -> None:
        """Refuse a canvas whose predictions would not fit; a native loop keeps none and checks what it needs itself."""
        settings, available = request.settings, available_bytes()
        if available is None or self._denoiser is None or is_native(self._denoiser, request):
            return
        num_bytes = _GREEDY_BYTES if settings.is_greedy else _DRAWN_BYTES
        needed = num_bytes * settings.canvas_length * self.config.vocab_size
        if needed > available:
            raise UsageError(
                f"canvas_length {settings.canvas_length} needs {needed:,} bytes ({needed / 2**30:.2f} GiB) for the "
                f"predictions of one step over {self.config.vocab_size} ids, {available:,} ({available / 2**30:.2f} "
                "GiB) are available; choose a shorter one"
            )

    def _run(
        self, request: LoopRequest, reply: Reply, token_trace: TokenTrace | None, *, canvas: bool, tokens: bool,
        record: bool, observe: Callable[[Event], None] | None,
    ) -> Generator[StreamEvent, None, None]:  # fmt: skip
        with self._slot():
            denoiser = self._open_denoiser()
            self._running = request.cancel
            trace = Trace(request)
            loop = run_loop(denoiser, request, wants_steps=canvas, keeps_residual=record or observe is not None)
            try:
                for event in loop:
                    self._holder = threading.get_ident()
                    trace.add(event, record=record)
                    if observe is not None:
                        observe(event)
                    if canvas and isinstance(event, StepEvent):
                        yield self._canvas_event(event)
                    if token_trace is not None and isinstance(event, StepEvent):
                        token_trace.step(event)
                    if token_trace is not None and isinstance(event, BlockEvent):
                        closed = token_trace.close(event)
                        trace.logprobs += closed.logprobs if record else ()
                        if tokens:
                            yield closed
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
