"""Reading a request's body within limits of size, time and nesting.

A body that is too large is read on and thrown away, up to a bound: a client that is still sending when the connection
closes would see a broken pipe instead of the answer.

Source: ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dlmrt.serve.problems import ApiError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_DEPTH = 64
_DISCARD_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """What a body may take."""

    max_bytes: int = 4 << 20  # a prompt of a million tokens fits
    timeout_s: float = 30.0  # from the headers to the last byte


class ClientGone(Exception):
    """The client closed the connection; nobody waits for an answer."""


async def read_json(receive: Receive, headers: Mapping[str, str], limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        ApiError: 408, 413, or 400 for what is not a JSON object of moderate depth.
        ClientGone: the connection was closed before the end of the body.
    """
    body = _Body(receive, headers, limits.max_bytes)
    try:
        async with asyncio.timeout(limits.timeout_s):
            await body.read()
    except TimeoutError:
        if body.is_too_large:
            raise body.refusal(must_close=True) from None
        raise ApiError(
            408, f"the body did not arrive within {limits.timeout_s:g} s; send it faster", code="body_timeout",
            must_close=True,
        ) from None  # fmt: skip
    return parse_object(b"".join(body.chunks))


class _Body:
    """A body as it arrives."""

    def __init__(self, receive: Receive, headers: Mapping[str, str], max_bytes: int) -> None:
        self._receive, self._headers, self._max_bytes = receive, headers, max_bytes
        self._size = 0
        self.chunks: list[bytes] = []

    @property
    def is_too_large(self) -> bool:
        """Whether more has come than may."""
        return self._size > self._max_bytes

    def refusal(self, *, must_close: bool = False) -> ApiError:
        """The answer to a body that is too large."""
        message = f"the body has more than {self._max_bytes} bytes; shorten it"
        return ApiError(413, message, code="body_too_large", must_close=must_close)

    async def read(self) -> None:
        """Read to the end, throwing away what is too much."""
        declared = self._headers.get("content-length", "")
        num_declared = int(declared) if declared.isascii() and declared.isdigit() else 0
        may_wait = self._headers.get("expect", "").lower() == "100-continue"
        if num_declared > self._max_bytes and (may_wait or num_declared > _DISCARD_BYTES):
            raise self.refusal(must_close=True)
        is_last = False
        while not is_last:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._size += len(message.get("body", b""))
            is_last = not message.get("more_body", False)
            if not self.is_too_large:
                self.chunks.append(message.get("body", b""))
            elif self._size > _DISCARD_BYTES:
                raise self.refusal(must_close=True)
            else:
                self.chunks.clear()
        if self.is_too_large:
            raise self.refusal()


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse strictly: UTF-8, no NaN, at most `MAX_DEPTH` levels, an object at the top."""
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON ({_short(error)})", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    _check_depth(document)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(document: Any) -> None:
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        values = (v for node in level for v in (node.values() if isinstance(node, dict) else node))
        level = [value for value in values if isinstance(value, dict | list)]


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels; flatten it", code="invalid_json")


def _short(error: ValueError) -> str:
    return str(error).split("; use sys.set_int")[0][:200]
