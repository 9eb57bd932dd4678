"""Run a server: the socket opens at once, the model loads behind it, signals end it in order.

The first line on stdout is one JSON object with the address, for whoever started the server on port 0. Until the model
is there, /health and the API answer 503 with the phase. A load that fails ends the process with the error's status.
SIGTERM or Ctrl-C refuses whoever waits and lets the running answer end, for at most the grace time; a second Ctrl-C
ends at once.

uvicorn is imported here only, when a server starts: it belongs to the extra `serve`.

Source: ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
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
    return asyncio.run(_serve(config, load, listener))


async def _serve(config: ServeConfig, load: Load, listener: socket.socket) -> int:
    with _extra():
        service = Service(config)
        server = make_server(service)
    failures: list[Exception] = []

    def load_behind() -> None:
        try:
            start = time.perf_counter()
            service.phase = "loading"
            service.set_engine(load())
            logger.info("%s is ready after %.1f s", config.model, time.perf_counter() - start)
        except Exception as error:
            service.phase = "failed"
            failures.append(error)
            server.should_exit = True

    loader = threading.Thread(target=load_behind, name="dlmrt-load", daemon=True)
    loader.start()
    with _signals(server) as received:
        await server.serve(sockets=[listener])
    if service.slot.running is not None:  # ended by force: the engine's thread must not outlive the answer's client
        service.slot.running.end("shutdown")
    if failures:
        raise failures[0]
    if not server.force_exit:
        service.close()
    return 130 if signal.SIGINT in received else 0


def make_server(service: Service) -> Any:
    """A uvicorn server of `service`; `serve(sockets=...)` runs it, `should_exit` ends it in order."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # `_signals` does, and whoever runs the server in a thread has none

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.stop()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        make_app(service), http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, root_path=service.config.root_path,
        timeout_graceful_shutdown=round(service.config.grace_s + service.config.send_timeout_s),
    )  # fmt: skip
    return Server(config)


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
