"""What a server is made of, without HTTP: settings, the engine as it loads, the slot, the metrics.

Source: ours.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from dlmrt.decode.engine import Engine
from dlmrt.serve.body import BodyLimits
from dlmrt.serve.deltas import Deltas, Markers
from dlmrt.serve.metrics import Metrics
from dlmrt.serve.problems import ApiError
from dlmrt.serve.queue import Job, Slot
from dlmrt.serve.replies import Choice, Reply
from dlmrt.serve.requests import ApiCall, decode_config, derived_seed
from dlmrt.types import DecodeConfig

_EFFORTS = ("reasoning_effort", "reasoning_strength")  # two names of one switch; some clients send both
Phase = Literal["starting", "loading", "ready", "failed", "stopping"]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of one server. Example: ``ServeConfig(model="dlmrt-tiny", port=0, max_queue=8)``."""

    model: str  # served name, as clients say it and answers repeat it
    aliases: tuple[str, ...] = ()  # further names that clients may say
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    api_key: str | None = None  # that /v1 asks for
    max_queue: int = 32  # requests that may wait for the slot
    request_timeout_s: float = 600.0  # from arrival; a running answer is cut, a waiting one refused
    grace_s: float = 30.0  # that a running answer has left when the server is told to stop
    step_timeout_s: float = 120.0  # that the engine has to stop after a cut; then the server ends with status 1
    send_timeout_s: float = 60.0  # without progress of a slow reader
    keep_alive_s: float = 15.0  # silence after which a stream gets empty lines
    body: BodyLimits = field(default_factory=BodyLimits)
    root_path: str = ""  # prefix under which a proxy shows the server
    cors_origins: tuple[str, ...] = ()
    ignore_unknown_fields: bool = False
    decode: DecodeConfig = field(default_factory=DecodeConfig)  # what requests leave open


class Service:
    """The state of one server. Methods belong to the event loop's thread unless they say otherwise."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.phase: Phase = "starting"
        self.slot = Slot(
            max_queue=config.max_queue, step_timeout_s=config.step_timeout_s, on_stuck=self._give_up
        )  # fmt: skip
        # One thread: a tokenizer keeps caches of megabytes for each thread that has used it.
        self.preparer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dlmrt-prepare")
        self.is_stuck = False
        self.end_server: Callable[[], None] = lambda: None  # set by whoever runs the server
        self.metrics = Metrics(config.model)
        self._engine: Engine | None = None
        self._markers = Markers()
        self._key_digest = _digest(config.api_key) if config.api_key is not None else None

    def set_engine(self, engine: Engine) -> None:
        """The model is loaded. May be called from any thread.

        Raises:
            UsageError: the server's decode settings do not fit the model.
        """
        engine.settings(self.config.decode)
        self._markers = Markers.of(engine.tokenizer)
        self._engine = engine
        if self.phase != "stopping":
            self.phase = "ready"

    @property
    def engine(self) -> Engine:
        """The loaded engine.

        Raises:
            ApiError: 503 while there is none.
        """
        if self._engine is None or self.phase != "ready":
            raise ApiError(
                503, f"the server is not ready ({self.phase}); try again later", code=self.phase, retry_after_s=2
            )
        return self._engine

    def authorise(self, authorization: str | None) -> None:
        """Check the header `Authorization` in a time that does not depend on what it holds.

        Raises:
            ApiError: 401.
        """
        if self._key_digest is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        is_right = hmac.compare_digest(_digest(key.strip()), self._key_digest)
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(401, "the API key is missing or wrong; send 'Authorization: Bearer KEY'", code="api_key")

    def check_model(self, name: str | None) -> None:
        """A request that names a model must name this one.

        Raises:
            ApiError: 404.
        """
        if name and name not in (self.config.model, *self.config.aliases):
            raise ApiError(
                404, f"the model {name!r} is not served here; {self.config.model!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip

    def prepare(self, call: ApiCall, job: Job) -> Reply:
        """Encode prompts, check settings and lengths, and give `job` its streams. Runs in any thread.

        Raises:
            ApiError, UsageError: the request cannot be run.
        """
        engine = self.engine
        markers = self._markers.only("reasoning", "tool_call") if call.tools else self._markers.only("reasoning")
        if call.endpoint == "completions":
            markers = Markers()
        base = decode_config(self.config.decode, call.settings, engine.settings().commit_rule)
        settings = engine.settings(base)
        if call.top_logprobs is not None and settings.edit_ids is not None:
            raise ApiError(
                400, "logprobs are not defined for a rule that moves tokens; leave them out", param="logprobs"
            )
        choices: list[Choice] = []
        for prompt_ids, text in self._prompts(engine, call):
            for number in range(call.num_choices):
                deltas = Deltas(
                    engine.tokenizer, markers, channel=markers.open_channel(prompt_ids),
                    with_tokens=call.top_logprobs is not None,
                )  # fmt: skip
                stream = engine.stream(
                    prompt_ids, dataclasses.replace(base, seed=derived_seed(settings.seed, number)),
                    canvas=call.return_canvas, tokens=deltas.needs_tokens, num_top_logprobs=call.top_logprobs or 0,
                    cancel=job.cancel,
                )  # fmt: skip
                job.streams.append(stream)
                prefix = "" if not call.echo else engine.tokenizer.decode(prompt_ids) if text is None else text
                choices.append(Choice(index=len(choices), deltas=deltas, num_prompt=len(prompt_ids), prefix=prefix))
            job.num_positions = max(job.num_positions, len(prompt_ids) + settings.max_tokens)
        return Reply(call, job, engine.tokenizer, model=self.config.model, choices=choices)

    def _prompts(self, engine: Engine, call: ApiCall) -> list[tuple[Sequence[int], str | None]]:
        """Ids of each prompt, and its text where the client sent text. The engine checks the ids."""
        if call.endpoint == "chat":
            options = self._template_options(engine, call)
            return [(engine.tokenizer.encode_messages(call.messages, **options), None)]
        return [(engine.tokenizer.encode(p), p) if isinstance(p, str) else (p, None) for p in call.prompts]

    def _template_options(self, engine: Engine, call: ApiCall) -> dict[str, Any]:
        options = dict(call.template_options)
        known = engine.tokenizer.template_options
        if any(name in known for name in _EFFORTS if name in options):
            options = {name: value for name, value in options.items() if name in known or name not in _EFFORTS}
        if call.tools:
            has_parser = "tool_call" in self._markers.starts.values()
            if "tools" not in known or not has_parser:
                raise ApiError(
                    400, "tools need a chat template that reads them and a tokenizer with tokens around calls; this "
                    "model has none", param="tools", code="unsupported_parameter",
                )  # fmt: skip
            options["tools"] = list(call.tools)
        return options

    def default_settings(self) -> Mapping[str, Any]:
        """Decode settings of a request that gives none."""
        return self.engine.settings(self.config.decode).as_dict()

    def stop(self) -> None:
        """Begin to shut down: nobody new, nobody who waits; the running answer has `grace_s` seconds left."""
        if self.phase == "stopping":
            return
        self.phase = "stopping"
        self.slot.close()
        asyncio.get_running_loop().call_later(self.config.grace_s, self._cut)

    def close(self) -> None:
        """Free the weights; the server has ended."""
        if self._engine is not None:
            self._engine.close()

    def _cut(self) -> None:
        if self.slot.running is not None:
            self.slot.leave(self.slot.running, "shutdown")

    def _give_up(self) -> None:
        """The engine hangs: nobody can be served any more, and its thread cannot be ended."""
        self.is_stuck = True
        self.end_server()

    def context_share(self) -> float:
        """Share of the context that the running request may fill."""
        job, engine = self.slot.running, self._engine
        if job is None or engine is None:
            return 0.0
        return min(1.0, job.num_positions / engine.config.max_position_embeddings)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
