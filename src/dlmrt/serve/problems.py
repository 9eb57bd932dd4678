"""Answers that are not a completion: one exception, one JSON shape, no path or traceback in it.

Source: ours; the shape is OpenAI's error object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dlmrt.decode.aliases import CANONICAL
from dlmrt.errors import ContextLengthError, DlmrtError, NonFiniteError, UnknownOptionError, http_status

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES: dict[type[Exception], str] = {
    ContextLengthError: "context_length_exceeded",
    UnknownOptionError: "unknown_parameter",
    NonFiniteError: "non_finite_logits",
}


class ApiError(Exception):
    """A request that ends with `status`; `reason` is its label in the metrics."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None, reason: str | None = None, must_close: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s
        self.reason = reason or code or _TYPES.get(status, "error")
        self.must_close = must_close  # what is left of the request's body will not be read

    def document(self) -> dict[str, Any]:
        """The body of the answer, also of an error event within a stream."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "api_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        headers = {"connection": "close"} if self.must_close else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad_field(param: str, message: str) -> ApiError:
    """A request field that cannot be used."""
    return ApiError(400, message, param=param)


def as_api_error(error: Exception, given: Mapping[str, Any] | None = None) -> ApiError:
    """The answer to `error`. Faults of our own say nothing of their inside.

    Args:
        given: the request's body; the field of it that a user error's message mentions becomes `param`.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, DlmrtError):
        return ApiError(500, "the server failed on this request; its log says why", code="internal_error")
    code = next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), None)
    status = http_status(error)
    return ApiError(status, str(error), code=code, param=_param(str(error), given or {}) if status == 400 else None)


def _param(message: str, given: Mapping[str, Any]) -> str | None:
    """The first setting that `message` mentions by its own name, as the request spells it; else prompt or messages."""
    diffusion = given.get("diffusion")
    spellings = {CANONICAL.get(key, key): key for key in (*given, *(diffusion if isinstance(diffusion, dict) else ()))}
    words = [spellings[word] for word in re.findall(r"\w+", message) if word in spellings]
    return min(words, key=lambda word: word in ("prompt", "messages"), default=None)


def dumps(document: Any) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate, which a client may have sent, stays an escape."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace")
