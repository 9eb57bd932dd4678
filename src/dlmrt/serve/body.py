"""Reading a request's body within limits of size, time and nesting.

A body that is too large is read on and thrown away, up to a bound: a client that is still sending when the connection
closes would see a broken pipe instead of the answer.

Source: ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
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


async def read_json(receive: Receive, headers: Any, limits: BodyLimits) -> dict[str, Any]:
    """The JSON object in the body.

    Raises:
        ApiError: 408, 413, or 400 for what is not a JSON object of moderate depth.
        ClientGone: the connection was closed before the end of the body.
    """
    try:
        async with asyncio.timeout(limits.timeout_s):
            body = await _read(receive, headers, limits.max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.timeout_s:g} s; send it faster", code="body_timeout",
            must_close=True,
        ) from None  # fmt: skip
    return parse_object(body)


async def _read(receive: Receive, headers: Any, max_bytes: int) -> bytes:
    declared = headers.get("content-length", "")
    num_declared = int(declared) if declared.isascii() and declared.isdigit() else 0
    is_waiting = headers.get("expect", "").lower() == "100-continue"
    too_large = ApiError(413, f"the body has more than {max_bytes} bytes; shorten it", code="body_too_large")
    if num_declared > max_bytes and (is_waiting or num_declared > _DISCARD_BYTES):
        too_large.must_close = True
        raise too_large
    chunks: list[bytes] = []
    size, is_last = 0, False
    while not is_last:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        size += len(message.get("body", b""))
        is_last = not message.get("more_body", False)
        if size <= max_bytes:
            chunks.append(message.get("body", b""))
        elif size > _DISCARD_BYTES:
            too_large.must_close = True
            raise too_large
        else:
            chunks.clear()
    if size > max_bytes:
        raise too_large
    return b"".join(chunks)


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
