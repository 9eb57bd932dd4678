"""Tool calls as models write them, between a pair of marker tokens, into the name and JSON arguments of the API.

    Qwen3, LLaDA2   <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>
    DiffusionGemma  <|tool_call>call:add{x:1,note:<|"|>text<|"|>}<tool_call|>

A call that does not parse is None, never a guess: the caller shows it as text.

Source: chat templates of Qwen3 and DiffusionGemma (NVIDIA-NeMo/Automodel 36044ad examples/dllm_sft).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = dict[str, str]  # {"name": ..., "arguments": JSON text}
_MAX_DEPTH = 64
QUOTE = '<|"|>'


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How one family writes calls."""

    start: str
    end: str
    parse: Callable[[str], Call | None]
    quote: str | None = None  # token that delimits texts; not shown in decoded text


def parse_json_call(text: str) -> Call | None:
    """Read ``{"name": ..., "arguments": {...}}``."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return _call(call["name"], call.get("arguments", call.get("parameters", {})))


def parse_gemma_call(text: str) -> Call | None:
    """Read ``call:NAME{key:value,...}`` with texts between `QUOTE` marks."""
    head = re.match(r"\s*call:([\w.-]+)(?=\{)", text)
    if head is None:
        return None
    reader = _Reader(text, head.end())
    try:
        arguments = reader.value()
        reader.end()
    except ValueError:
        return None
    return _call(head[1], arguments)


def _call(name: str, arguments: Any) -> Call | None:
    if not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


class _Reader:
    """Values of the second syntax: objects with bare keys, lists, quoted texts, JSON's numbers and words."""

    _BARE = re.compile(r"[^,{}\[\]]*")
    _KEY = re.compile(r"\s*([^,:{}\[\]]+?)\s*:")
    _SPACE = re.compile(r"\s*")

    def __init__(self, text: str, at: int) -> None:
        self._text, self._at, self._depth = text, at, 0

    def value(self) -> Any:
        """The value that begins here."""
        self._skip()
        if self._take(QUOTE):
            return self._until(QUOTE)
        if self._take("{"):
            return dict(self._items("}", self._pair))
        if self._take("["):
            return self._items("]", self.value)
        return self._bare()

    def end(self) -> None:
        """Only white space may follow."""
        self._skip()
        if self._at != len(self._text):
            raise ValueError("text after the call")

    def _items(self, close: str, item: Callable[[], Any]) -> list[Any]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        items: list[Any] = []
        self._skip()
        while not self._take(close):
            if items and not self._take(","):
                raise ValueError("a comma is missing")
            items.append(item())
            self._skip()
        self._depth -= 1
        return items

    def _pair(self) -> tuple[str, Any]:
        self._skip()
        if self._take(QUOTE):
            key = self._until(QUOTE)
            self._skip()
            if not self._take(":"):
                raise ValueError("a colon is missing")
            return key, self.value()
        found = self._KEY.match(self._text, self._at)
        if found is None:
            raise ValueError("a key is missing")
        self._at = found.end()
        return found[1], self.value()

    def _bare(self) -> Any:
        found = self._BARE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        word = found[0].strip()
        if not word:
            raise ValueError("a value is missing")
        return json.loads(word, parse_constant=_refuse)

    def _until(self, mark: str) -> str:
        end = self._text.index(mark, self._at)
        text, self._at = self._text[self._at : end], end + len(mark)
        return text

    def _take(self, mark: str) -> bool:
        is_here = self._text.startswith(mark, self._at)
        self._at += len(mark) if is_here else 0
        return is_here

    def _skip(self) -> None:
        found = self._SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


SYNTAXES = (
    CallSyntax(start="<tool_call>", end="</tool_call>", parse=parse_json_call),
    CallSyntax(start="<|tool_call>", end="<tool_call|>", parse=parse_gemma_call, quote=QUOTE),
)
