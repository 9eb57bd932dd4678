"""The messages of a request as chat templates expect them: text contents, tool arguments as objects, known roles.

Keys that clients copy from an earlier answer (`refusal`, `annotations`, ...) are accepted where they are empty; `type`
is what lm-evaluation-harness adds. `developer` is the new name of `system`.

Source: ours; shapes of the OpenAI API.
"""

from __future__ import annotations

import json
from typing import Any

from dlmrt.errors import nearest
from dlmrt.serve.problems import ApiError, bad_field

_KEYS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "annotations", "audio",
    "function_call", "type",
)  # fmt: skip
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Check the conversation of a request and bring it into the form that chat templates expect.

    Raises:
        ApiError: 400; the message says where.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message")
    return tuple(_message(message, f"messages[{at}]") for at, message in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(f"{where} must be an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            raise _bad(f"{where}.{key} is not known{nearest(key, _KEYS)}")
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise _bad(f"{where}.role is {given.get('role')!r}; known: {', '.join(_ROLES)}")
    for key in ("audio", "function_call"):
        if given.pop(key, None):
            raise _bad(f"{where}.{key} is not supported")
    for key in ("type", "refusal", "annotations"):  # what clients copy from an answer, or add on the way
        given.pop(key, None)
    content = _content(given.get("content", ""), where)
    checked = {**given, "role": role, "content": content}
    if "tool_calls" in given:
        checked["tool_calls"] = _past_tool_calls(given["tool_calls"], where)
    return checked


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where}.content must be text or a list of text parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise _bad(f"{where}.content[{at}] has type {kind!r}; only text parts are supported")
        texts.append(part["text"])
    return "".join(texts)


def _past_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates expect arguments as an object; the API carries them as JSON text."""
    parsed = []
    for at, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad(f"{where}.tool_calls[{at}] must hold a function with a name")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise _bad(f"{where}.tool_calls[{at}] has arguments that are not JSON") from None
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _bad(message: str) -> ApiError:
    return bad_field("messages", message)
