"""The two completion routes as one ASGI application: read, check, queue, run, send.

It speaks ASGI itself because three things happen at once: the engine's events arrive, the client may leave, and
time runs out. A stream's status line goes out with its first event, so a request that fails before that still gets
its proper status; after it, an error is an event of the stream, and the connection closes.

Source: ours; the ASGI specification, HTTP part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from dlmrt.decode.engine import StreamEvent
from dlmrt.serve.body import ClientGone, Receive, read_json
from dlmrt.serve.fields import Endpoint
from dlmrt.serve.problems import ApiError, as_api_error, dumps
from dlmrt.serve.queue import Job
from dlmrt.serve.replies import Choice, Reply
from dlmrt.serve.requests import ApiCall, parse_call
from dlmrt.serve.service import Service
from dlmrt.types import CanvasEvent

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class CompletionsEndpoint:
    """`POST /v1/chat/completions` or `POST /v1/completions`."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        outlet = _Outlet(send, timeout_s=self._service.config.send_timeout_s)
        body: dict[str, Any] = {}
        try:
            self._service.authorise(headers.get("authorization"))
            _check_page(headers)
            body = await read_json(receive, headers, self._service.config.body)
            call = parse_call(
                body, self._endpoint, ignore_unknown=self._service.config.ignore_unknown_fields
            )  # fmt: skip
            self._service.check_model(call.model)
            await self._run(call, receive, outlet)
        except ClientGone:
            self._service.metrics.failed("disconnected")
        except Exception as error:
            await self._fail(outlet, error, body)

    async def _run(self, call: ApiCall, receive: Receive, outlet: _Outlet) -> None:
        service = self._service
        _ = service.engine  # refuse before a place in the queue is taken
        job = service.slot.admit()
        watcher = asyncio.create_task(self._watch(receive, job))
        timer = asyncio.get_running_loop().call_later(service.config.request_timeout_s, self._expire, job)
        try:
            reply = await asyncio.get_running_loop().run_in_executor(service.preparer, service.prepare, call, job)
            service.slot.start(job)
            await (self._stream(reply, outlet) if call.stream else self._plain(reply, outlet))
        finally:
            watcher.cancel()
            timer.cancel()
            service.slot.leave(job, "disconnect")

    async def _watch(self, receive: Receive, job: Job) -> None:
        """The client's next message is its leaving."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.slot.leave(job, "disconnect")

    def _expire(self, job: Job) -> None:
        message = f"the request waited longer than {self._service.config.request_timeout_s:g} s; try again later"
        self._service.slot.leave(job, "deadline", ApiError(503, message, code="timeout", retry_after_s=5))

    async def _plain(self, reply: Reply, outlet: _Outlet) -> None:
        async for choice, event in self._events(reply):
            if event is not None:
                choice.take(event)
        self._finish(reply)
        await outlet.respond(200, reply.document())

    async def _stream(self, reply: Reply, outlet: _Outlet) -> None:
        async for choice, event in self._events(reply):
            if event is None:  # silence
                await outlet.keep_alive()
                continue
            if not choice.has_begun:
                await outlet.events(reply.head(choice))
            deltas = choice.take(event)
            if isinstance(event, CanvasEvent):
                await outlet.events([reply.canvas_chunk(choice, event)])
            await outlet.events(reply.chunks(choice, deltas))
            if choice.result is not None:
                await outlet.events([reply.last(choice)])
        self._finish(reply)
        if reply.call.include_usage:
            await outlet.events([reply.usage_chunk()])
        await outlet.done()

    async def _events(self, reply: Reply) -> AsyncIterator[tuple[Choice, StreamEvent | None]]:
        """The engine's events with their choices; None for a silence of `keep_alive_s` while the engine runs.

        Raises:
            ClientGone: the job ended because nobody waits for it.
            Exception: what ended the job otherwise.
        """
        job, choice = reply.job, reply.choices[0]
        while True:
            try:
                async with asyncio.timeout(self._service.config.keep_alive_s):
                    event = await job.events.get()
            except TimeoutError:
                if job.began is not None:
                    yield choice, None
                continue
            if isinstance(event, Exception):
                raise event
            if event is None:
                break
            choice = reply.choices[event[0]]
            yield choice, event[1]
            await asyncio.sleep(0)  # a full queue never waits: let the loop see a client that leaves, and the others
        if not reply.is_complete:
            raise ClientGone

    def _finish(self, reply: Reply) -> None:
        """Count the answer and log its line."""
        job, usage = reply.job, reply.usage()
        finish_reason = "abort" if job.cut == "disconnect" else reply.choices[-1].finish_reason
        self._service.metrics.answered(
            reply.results, finish_reason=finish_reason, queue_s=job.queue_s, total_s=time.perf_counter() - job.arrived
        )
        diffusion = usage["diffusion"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        computed = usage["prompt_tokens"] - cached
        rate = computed / diffusion["prefill_s"] if diffusion["prefill_s"] > 0 else 0.0
        logger.info(
            "%s: %d cached + %d new prompt tokens (%.0f/s), %d completion tokens, %d forwards, %.2f tokens/forward, "
            "%.3f s queued, %.3f s, %s",
            self._endpoint, cached, computed, rate, usage["completion_tokens"], diffusion["num_forwards"],
            diffusion["tpf_total"], diffusion["queue_s"], diffusion["total_s"], job.cut or diffusion["end_reason"],
        )  # fmt: skip

    async def _fail(self, outlet: _Outlet, error: Exception, body: dict[str, Any]) -> None:
        problem = as_api_error(error, body)
        self._service.metrics.failed(problem.reason)
        if problem.status >= 500 and not isinstance(error, ApiError):
            logger.error("request failed: %s: %s", type(error).__name__, error, exc_info=error)
        with contextlib.suppress(ClientGone):
            await outlet.fail(problem)


def _check_page(headers: Mapping[str, str]) -> None:
    """Refuse what a page of another origin may send without asking: it cannot send JSON unless it is allowed to.

    Raises:
        ApiError: 415.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in headers and kind != "application/json":
        raise ApiError(415, f"a page may not send {kind or 'a body without a type'}; send application/json")


class _Outlet:
    """Sends a response: at once, or as server-sent events. A client that does not read for too long has gone."""

    def __init__(self, send: Send, *, timeout_s: float) -> None:
        self._send_message, self._timeout_s = send, timeout_s
        self._is_streaming = False

    async def respond(self, status: int, document: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        """One JSON document."""
        body = dumps(document)
        lines = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        await self._start(status, lines)
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, documents: Iterable[dict[str, Any]]) -> None:
        """One event each."""
        data = b"".join(b"data: " + dumps(document) + b"\n\n" for document in documents)
        if data:
            await self._write(data)

    async def keep_alive(self) -> None:
        """Keeps proxies from giving up: empty lines, since some clients take a comment for a part of the next event."""
        await self._write(b"\n\n")

    async def done(self) -> None:
        """The end of a stream."""
        await self._write(b"data: [DONE]\n\n", is_last=True)

    async def fail(self, problem: ApiError) -> None:
        """An error: with its own status if nothing was sent yet, else as the last event of the stream."""
        if self._is_streaming:
            await self._write(b"data: " + dumps(problem.document()) + b"\n\n", is_last=True)
        else:
            await self.respond(problem.status, problem.document(), problem.headers())

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._is_streaming:
            self._is_streaming = True
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                    "connection": "close",  # so that an error event can end the connection, too
                },
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_message(message)
        except TimeoutError:
            raise ClientGone from None
