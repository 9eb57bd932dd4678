"""Tool calls of both syntaxes: what is read, and that anything else is None and never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.serve.calls import QUOTE, parse_gemma_call, parse_json_call

KEYS = st.text("abc_1", min_size=1, max_size=4)
TEXTS = st.text("ab ,:{}[]\"'\n\u00e9", max_size=8)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9, allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def gemma(value: Any) -> str:
    """`value` as DiffusionGemma's template writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


@settings(deadline=None)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_a_template_writes_is_read_back(arguments: dict[str, Any]) -> None:
    call = parse_gemma_call(f"call:get.some-thing_2{gemma(arguments)}")
    assert call is not None and call["name"] == "get.some-thing_2"
    assert json.loads(call["arguments"]) == arguments
    call = parse_json_call(json.dumps({"name": "f", "arguments": arguments}))
    assert call is not None and json.loads(call["arguments"]) == arguments


@settings(deadline=None)
@given(text=st.text('call:f{}[],:"1 a' + QUOTE, max_size=30))
def test_anything_else_is_no_call(text: str) -> None:
    for parse in (parse_gemma_call, parse_json_call):
        call = parse(text)
        assert call is None or isinstance(json.loads(call["arguments"]), dict)


@pytest.mark.parametrize(
    "text",
    [
        "", "f{}", "call:f", "call:f{", "call:f{a}", "call:f{a:}", "call:f{a:1", "call:f{a:1}x", "call:f[1]",
        "call:f{a:1 b:2}", "call:f{a:bare}", "call:f{a:NaN}", f"call:f{{a:{QUOTE}open}}", "call:f{a:" + "[" * 10_000,
    ],
)  # fmt: skip
def test_calls_that_are_cut_or_wrong(text: str) -> None:
    assert parse_gemma_call(text) is None


@pytest.mark.parametrize(
    "text", ["", "5", "[]", '{"name": 5}', '{"arguments": {}}', '{"name": "f", "arguments": 5}', "[" * 10_000]
)
def test_json_that_is_no_call(text: str) -> None:
    assert parse_json_call(text) is None
