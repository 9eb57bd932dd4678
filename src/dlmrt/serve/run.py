"""Run a server: the socket opens at once, the model loads behind it, signals end it in order.

The first line on stdout is one JSON object with the address, for whoever started the server on port 0. Until the model
is there, /health and the API answer 503 with the phase. A load that fails ends the process with the error's status.
SIGTERM or Ctrl-C refuses whoever waits and lets the running answer end, for at most the grace time; a second Ctrl-C
ends at once. An engine that hangs in a step ends the process, too, with status 1: a supervisor can start another one.

uvicorn is imported here only, when a server starts: it belongs to the extra `serve`.

Source: ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from dlmrt.decode.engine import Engine
from dlmrt.errors import DeviceError, MissingDependencyError
from dlmrt.serve.api import make_app
from dlmrt.serve.queue import Job
from dlmrt.serve.service import ServeConfig, Service

logger = logging.getLogger(__name__)

Load = Callable[[], Engine]


def serve(config: ServeConfig, load: Load) -> int:
    """Serve until a signal ends it; returns the exit status: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        MissingDependencyError: the extra `serve` is not installed.
        DeviceError: the address cannot be used.
        Exception: what `load` raised.
    """
    with _extra():
        import uvicorn  # noqa: F401
    # The engine's thread is busy with Python; at the default of 5 ms each event of the loop would wait that long.
    sys.setswitchinterval(0.0005)
    listener = listen(config.host, config.port)
    if config.api_key is None and config.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("%s can be reached from other machines and asks for no key; set --api-key", config.host)
    announce(config, listener)
    status, last, patience_s = asyncio.run(_serve(config, load, listener))
    if last is not None and not last.has_run.wait(patience_s):
        message = f"error: a step of the model does not end after {config.step_timeout_s:g} s; check the device"
        print(message, file=sys.stderr, flush=True)
        os._exit(1)  # the interpreter would wait for the engine's thread
    return status


async def _serve(config: ServeConfig, load: Load, listener: socket.socket) -> tuple[int, Job | None, float]:
    """Exit status, the job that the engine still works on, and how long that may take."""
    with _extra():
        service = Service(config)
        server = make_server(service)
    failures: list[Exception] = []

    def load_behind() -> None:
        try:
            start = time.perf_counter()
            service.phase = "loading"
            service.set_engine(load())
            settings = ", ".join(f"{name} {value}" for name, value in service.default_settings().items())
            logger.info("%s is ready after %.1f s", config.model, time.perf_counter() - start)
            logger.info("a request that says nothing else runs with %s", settings)
        except Exception as error:
            service.phase = "failed"
            failures.append(error)
            server.should_exit = True

    loader = threading.Thread(target=load_behind, name="dlmrt-load", daemon=True)
    loader.start()
    with _signals(server) as received:
        await server.serve(sockets=[listener])
    last = service.slot.running
    if last is not None:  # ended by force: the engine's thread must not outlive the answer's client
        last.end("shutdown")
    if failures:
        raise failures[0]
    if last is None and not server.force_exit:
        service.close()
    return 130 if signal.SIGINT in received else 0, last, 0.0 if service.is_stuck else config.step_timeout_s


def make_server(service: Service) -> Any:
    """A uvicorn server of `service`; `serve(sockets=...)` runs it, `should_exit` ends it in order."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes connections that do not bring the head of a request in the time that a body has."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._set_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._set_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()

        def _set_timer(self) -> None:
            if self._timer is None and self._is_idle():
                self._timer = self.loop.call_later(service.config.body.timeout_s, self._look)

        def _look(self) -> None:
            self._timer = None
            if self._is_idle():
                self.transport.close()

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # `_signals` does, and whoever runs the server in a thread has none

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.stop()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        make_app(service), http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, root_path=service.config.root_path,
        timeout_graceful_shutdown=round(service.config.grace_s + service.config.send_timeout_s),
    )  # fmt: skip
    server = Server(config)

    def end() -> None:
        server.should_exit = True

    service.end_server = end
    return server


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        DeviceError: the address is taken or does not exist.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise DeviceError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another, or --port 0 for a free one"
        ) from error


def announce(config: ServeConfig, listener: socket.socket) -> None:
    """The machine-readable line."""
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    line = {"event": "listening", "host": host, "port": port, "url": f"http://{name}:{port}", "model": config.model}
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def _signals(server: Any) -> Iterator[set[int]]:
    """The first SIGINT or SIGTERM ends the server in order, a second SIGINT at once; yields those received."""
    received: set[int] = set()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and server.should_exit:
            server.force_exit = True
        received.add(number)
        server.should_exit = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the server needs {error.name}, not installed; pip install 'dlmrt[serve]'"
        ) from error
