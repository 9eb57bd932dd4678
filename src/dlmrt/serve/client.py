"""A running server in place of an engine, for the terminal chat: the same events, over HTTP.

Only what a conversation needs: `stream` and `decode`. Lines are read by a thread of their own, so that a cancelled
request ends at once: the connection is closed, the server stops, and what had arrived is the answer. Its counts are
then not known. The record has no forwards: the API sends their numbers, not each of them.

Source: ours; standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import queue
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args
from urllib.parse import urlsplit

import numpy as np

from dlmrt.errors import DeviceError, DlmrtError, ModelNotFoundError, UsageError
from dlmrt.types import (
    CanvasEvent,
    DecodeConfig,
    EndReason,
    GenerateResult,
    Message,
    RequestRecord,
    TextEvent,
    Usage,
)

_POLL_S = 0.1  # how late a cancel flag is seen
_ERRORS: dict[int, type[DlmrtError]] = {400: UsageError, 401: UsageError, 404: ModelNotFoundError}
_END = b""


class RemoteEngine:
    """The model behind a base URL.

    Args:
        base_url: ``http://host:port``, with or without ``/v1``.
        model: name that the server knows; None: the one it serves.
        api_key: of the server, if it asks for one.

    Raises:
        DeviceError: the server cannot be reached or is not ready.
    """

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{base_url!r} is not a base URL; write e.g. http://127.0.0.1:8000")
        self._is_secure, self._address = parts.scheme == "https", parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._pieces: dict[int, str] = {}
        response, _ = self._request("GET", "/models")
        models = [card["id"] for card in json.loads(response.read())["data"]]
        self.model = model if model is not None else str(models[0])

    @property
    def tokenizer(self) -> RemoteEngine:
        """What decodes single ids."""
        return self

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids that a canvas event has shown."""
        return "".join(self._pieces.get(int(token), "") for token in ids)

    def stream(
        self, prompt: str | Sequence[Message], config: DecodeConfig, *, canvas: bool = False,
        cancel: threading.Event | None = None, template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[TextEvent | CanvasEvent | GenerateResult]:  # fmt: skip
        """As `Engine.stream`: raises at once when the server refuses the request."""
        given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        settings = {f.name: given[f.name] for f in dataclasses.fields(config) if given[f.name] != f.default}
        is_text = isinstance(prompt, str)
        body = {
            "model": self.model,
            **({"prompt": prompt} if is_text else {"messages": list(prompt)}),
            "stream": True,
            "stream_options": {"include_usage": True},
            "diffusion": {**settings, "return_canvas": canvas},
            **({"chat_template_kwargs": dict(template_options)} if template_options else {}),
        }
        path = "/completions" if is_text else "/chat/completions"
        response, line = self._request("POST", path, json.dumps(body).encode())
        return self._events(response, line, cancel or threading.Event())

    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        make = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = make(self._address)
        try:
            connection.request(method, self._path + path, body, self._headers)
            line = connection.sock
            response = connection.getresponse()
        except OSError as error:
            raise DeviceError(f"{self._address} cannot be reached ({error}); is the server running?") from error
        if response.status != 200:
            raise _error(response.status, response.read())
        return response, line

    def _events(
        self, response: http.client.HTTPResponse, line: socket.socket, cancel: threading.Event
    ) -> Iterator[TextEvent | CanvasEvent | GenerateResult]:
        text, reason, usage = [], "cancelled", None
        try:
            for event in _server_events(response, cancel):
                if "error" in event:
                    raise DeviceError(event["error"]["message"])
                if "diffusion" in event:
                    yield self._canvas(event["diffusion"])
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                    content = choice.get("text") or choice.get("delta", {}).get("content")
                    if content:
                        text.append(content)
                        yield TextEvent(text=content)
                usage = event.get("usage", usage)
        finally:
            # Closing would wait for the reading thread, and the server would not learn that nobody listens.
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        yield _result("".join(text), reason, usage)

    def _canvas(self, canvas: Mapping[str, Any]) -> CanvasEvent:
        self._pieces.update(zip(canvas["token_ids"], canvas["tokens"], strict=True))
        length = len(canvas["token_ids"])
        return CanvasEvent(
            block_idx=canvas["block"], step=canvas["step"], start=canvas["position"],
            canvas_L=np.array(canvas["token_ids"], dtype=np.int32), text=canvas["text"],
            is_unresolved_L=np.isin(np.arange(length), canvas["open"]),
            changed_L=np.isin(np.arange(length), canvas["changed"]),
            confidence_L=np.array(canvas["confidence"], dtype=np.float32),
        )  # fmt: skip


def _server_events(response: http.client.HTTPResponse, cancel: threading.Event) -> Iterator[dict[str, Any]]:
    """The data of each event until the end marker, the end of the connection, or `cancel`."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        try:
            while line := response.readline():
                lines.put(line)
        except (OSError, ValueError, http.client.HTTPException):  # closed under the reader
            pass
        lines.put(_END)

    threading.Thread(target=read, daemon=True).start()
    while not cancel.is_set():
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if line == _END:
            raise DeviceError("the server ended the connection before the answer was complete; try again")
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _error(status: int, body: bytes) -> DlmrtError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"status {status}"
    return _ERRORS.get(status, DeviceError)(f"the server refuses: {message}")


def _result(text: str, reason: str, usage: Mapping[str, Any] | None) -> GenerateResult:
    """The finished answer; without `usage` the counts are 0."""
    known = usage["diffusion"] if usage is not None else {}
    counts = {name: known.get(name, 0) for name in ("num_prefill_forwards", "num_denoise_steps", "num_commit_forwards",
                                                    "num_blocks", "num_edits")}  # fmt: skip
    times = {name: known.get(name, 0.0) for name in ("prefill_s", "decode_s", "time_to_first_block_s", "total_s")}
    end = known.get("end_reason", "cancelled")
    return GenerateResult(
        text=text,
        token_ids=(),
        finish_reason="stop" if reason in ("stop", "tool_calls") else "length" if reason == "length" else "cancelled",
        usage=Usage(
            prompt_tokens=usage["prompt_tokens"] if usage is not None else 0,
            completion_tokens=usage["completion_tokens"] if usage is not None else 0,
            **counts,
            **times,
        ),
        record=RequestRecord(
            seed=known.get("seed", 0), executor=known.get("executor", "unknown"), dtype=known.get("dtype", "unknown"),
            commit_rule=known.get("settings", {}).get("commit_rule", "unknown"), forwards=(),
            end_reason=cast(EndReason, end) if end in get_args(EndReason) else "cancelled",
            num_blocks=counts["num_blocks"], settings=known.get("settings", {}), prompt_token_ids=(),
            num_cached_prompt_tokens=usage["prompt_tokens_details"]["cached_tokens"] if usage is not None else 0,
        ),
    )  # fmt: skip
