"""A real server in a thread, on a free port, over a scripted or a tiny engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dlmrt.decode.engine import Engine
from dlmrt.serve.run import listen, make_server
from dlmrt.serve.service import ServeConfig, Service
from dlmrt.testing import END, RequestView, encode_bytes, peaked, scripted_engine, tiny_config
from dlmrt.types import Float32, Int32

WAIT_S = 30  # the longest that a condition may take on a busy machine


@dataclass
class Running:
    """A server and how to talk to it."""

    service: Service
    port: int
    denoiser: Any = None
    _loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request; a body that is not bytes is sent as JSON. Header names are in lower case."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        try:
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and parsed body of a POST."""
        status, _, data = self.request("POST", path, body)
        return status, json.loads(data)

    def chat(self, content: str, **fields: Any) -> Any:
        """The document of a plain answer."""
        status, document = self.post("/v1/chat/completions", messages=user(content), **fields)
        assert status == 200, document
        return document

    def stream(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream, parsed; the end marker as "[DONE]"."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
        return events(data)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        _, _, data = self.request("GET", "/metrics")
        lines = [line for line in data.decode().splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run in the server's loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)


def events(data: bytes) -> list[Any]:
    """The data of server-sent events."""
    texts = [block[len(b"data: ") :] for block in data.split(b"\n\n") if block.startswith(b"data: ")]
    return [text.decode() if text == b"[DONE]" else json.loads(text.decode("utf-8")) for text in texts]


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for the server to reach a state; a state that does not come fails the test."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the state did not come"
        time.sleep(0.01)


def echoing(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
    """The answer is the user's text in capitals, three tokens a step."""
    prompt = bytes(token for token in view.context_S[: view.num_prompt].tolist() if token < 256)
    content = prompt.rpartition(b"user\n")[2].partition(b"\nassistant\n")[0] or prompt
    answer = [*content.upper(), END]
    order = (positions - view.num_prompt) % len(canvas) // 3
    confidence = [0.99 if turn <= step else 0.2 for turn in order.tolist()]
    return peaked(answer, positions - view.num_prompt, confidence=confidence, fill=END)


def endless(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
    """An answer without an end: the alphabet, one block a step."""
    alphabet = encode_bytes("abcdefghijklmnopqrstuvwxyz")
    return peaked(alphabet * (1 + int(positions[-1]) // 26), positions - view.num_prompt)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Start servers: `start(engine, **fields of ServeConfig)`, or with a script in place of an engine."""
    stops: list[Callable[[], None]] = []

    def run(what: Any, *, denoiser: Any = None, **fields: Any) -> Running:
        if not isinstance(what, Engine) and what is not None:
            what, denoiser = scripted_engine(what, config=tiny_config(max_position_embeddings=16384))
        listener = listen("127.0.0.1", 0)
        box: dict[str, Any] = {}
        is_up = threading.Event()

        async def main() -> None:
            service = Service(ServeConfig(**{"model": "tiny", "grace_s": 5.0, **fields}))
            if what is not None:
                service.set_engine(what)
            box.update(service=service, server=make_server(service), loop=asyncio.get_running_loop())
            is_up.set()
            await box["server"].serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        assert is_up.wait(WAIT_S)

        def stop() -> None:
            box["server"].should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server did not end"

        stops.append(stop)
        running = Running(service=box["service"], port=listener.getsockname()[1], denoiser=denoiser, _loop=box["loop"])
        running.stop = stop  # type: ignore[attr-defined]
        return running

    yield run
    for stop in stops:
        stop()
