"""Thoughts and tool calls of both families of markers, over HTTP. Ids in test names: known faults."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from dlmrt.decode.engine import Engine
from dlmrt.decode.text import TextCodec
from dlmrt.testing import (
    END,
    END_THINK,
    THINK,
    VOCAB_SIZE,
    ScriptedDenoiser,
    answering,
    byte_codec,
    encode_bytes,
    tiny_config,
)

from .conftest import echoing, user
from .test_answers import PATHS, engine_of, joined

THOUGHT = [THINK, *encode_bytes("a"), END_THINK, *encode_bytes("b STOP c"), END]


@pytest.mark.parametrize("length", [4, 32])
def test_k40_reasoning_stop_and_logprobs_keep_in_step(start, length):
    engine, _ = engine_of(THOUGHT, diffusion={"canvas_length": length})
    server = start(engine)
    answer = server.chat("x", stop=["STOP"], logprobs=True)
    choice = answer["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("a", "b ")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["b", " ", "", "", "", ""]
    assert [entry["token"] for entry in choice["logprobs"]["reasoning_content"]] == ["", "a", ""]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert answer["usage"]["completion_tokens"] == 9
    chunks = server.stream(PATHS["chat"], messages=user("x"), stop=["STOP"])
    assert joined("chat", chunks) == "b "
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "a"


def test_a_stop_string_ends_reasoning_too(start):
    server = start(engine_of([THINK, *encode_bytes("long thought"), END_THINK, *encode_bytes("b"), END])[0])
    message = server.chat("x", stop=["thou"])["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("long ", "")


def test_k41_markers_are_seen_by_id_and_tag_text_is_kept(start):
    answer = [THINK, *encode_bytes("t"), END_THINK, *encode_bytes("<b>x</b> <think>"), END_THINK, END]
    server = start(engine_of(answer)[0])
    message = server.chat("x")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("t", "<b>x</b> <think>")
    assert server.post(PATHS["completions"], prompt="x")[1]["choices"][0]["text"] == "t<b>x</b> <think>"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def tool_engine(answer: list[int]) -> Engine:
    """A vocabulary with tool-call markers as special tokens and a template that reads tools."""
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}"
    codec = byte_codec(template=template)
    codec.tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<tool_call>", "</tool_call>")])
    codec = type(codec)(codec.tokenizer, template=template)
    size = VOCAB_SIZE + 2
    script = answering(answer, vocab_size=size)
    config = tiny_config(vocab_size=size, max_position_embeddings=1024)
    return Engine(ScriptedDenoiser(script, vocab_size=size), config, codec)


CALL, CALL_END = VOCAB_SIZE, VOCAB_SIZE + 1
GOOD = '{"name": "add", "arguments": {"x": [1, 2], "s": "é"}}'


def test_k41_tool_calls_are_parsed_from_whole_blocks(start):
    answer = [
        *encode_bytes("well "),
        CALL,
        *encode_bytes(GOOD),
        CALL_END,
        CALL,
        *encode_bytes("not json"),
        CALL_END,
        END,
    ]
    server = start(tool_engine(answer))
    answer = server.chat("x", tools=TOOLS, logprobs=True)
    choice = answer["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"x": [1, 2], "s": "é"}
    assert choice["message"]["content"] == "well <tool_call>not json</tool_call>"
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == choice["message"]["content"]
    assert len(tokens) + len(choice["logprobs"]["tool_calls"]) == answer["usage"]["completion_tokens"]
    deltas = [c["choices"][0]["delta"] for c in server.stream(PATHS["chat"], messages=user("x"), tools=TOOLS)[:-1]]
    calls = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert [(c["index"], c["function"]) for c in calls] == [(0, call["function"])]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]


def test_tools_are_refused_where_nothing_would_parse_them(start):
    server = start(echoing)
    status, error = server.post(PATHS["chat"], messages=user("x"), tools=TOOLS)
    assert (status, error["error"]["param"]) == (400, "tools")
    status, error = server.post(PATHS["chat"], messages=user("x"), tools=TOOLS, tool_choice="required")
    assert (status, error["error"]["param"]) == (400, "tool_choice")
    assert server.chat("x", tools=TOOLS, tool_choice="none")["choices"][0]["message"]["content"] == "X"


def test_line_breaks_around_a_thought_are_not_shown(start):
    """As Qwen3's template frames it; entries still join to the texts."""
    answer = [THINK, *encode_bytes("\n\na\n\nb\n"), END_THINK, *encode_bytes("\n\nc\n"), END]
    server = start(engine_of(answer)[0])
    choice = server.chat("x", logprobs=True)["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("a\n\nb", "c\n")
    for key, text in (("reasoning_content", "a\n\nb"), ("content", "c\n")):
        assert "".join(entry["token"] for entry in choice["logprobs"][key]) == text
    deltas = [c["choices"][0]["delta"] for c in server.stream(PATHS["chat"], messages=user("x"))[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "a\n\nb"


CHANNEL, CHANNEL_END = THINK, END_THINK  # the same ids under DiffusionGemma's names
QUOTE = CALL_END + 1
GEMMA_CALL = [CALL, *encode_bytes("call:add{x:[1,2],s:"), QUOTE, *encode_bytes("\u00e9, }"), QUOTE, 125, CALL_END]


def gemma_engine(answer: list[int], length: int) -> Engine:
    """A vocabulary and template with DiffusionGemma's markers."""
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}"
    named = byte_codec().tokenizer.to_str().replace("</think>", "<channel|>").replace("<think>", "<|channel>")
    tokenizer = Tokenizer.from_str(named)
    marks = ("<|tool_call>", "<tool_call|>", '<|"|>')
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in marks])
    size = VOCAB_SIZE + 3
    config = tiny_config(vocab_size=size, max_position_embeddings=1024, diffusion={"canvas_length": length})
    denoiser = ScriptedDenoiser(answering(answer, vocab_size=size), vocab_size=size)
    return Engine(denoiser, config, TextCodec(tokenizer, template=template))


@pytest.mark.parametrize("length", [1, 5, 64])
def test_k41_thoughts_and_calls_of_diffusion_gemma(start, length):
    """The channel's name is no part of the thought, and no marker is left in a text."""
    thought = [CHANNEL, *encode_bytes("thought\nhm, two\n"), CHANNEL_END]
    server = start(gemma_engine([*thought, *encode_bytes("well"), *GEMMA_CALL, END], length))
    answer = server.chat("x", tools=TOOLS, logprobs=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, two", "well")
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"x": [1, 2], "s": "\u00e9, }"}
    entries = answer["choices"][0]["logprobs"]
    assert sum(len(entries[key] or ()) for key in entries) == answer["usage"]["completion_tokens"]
    deltas = [c["choices"][0]["delta"] for c in server.stream(PATHS["chat"], messages=user("x"), tools=TOOLS)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, two"
    assert [part["function"] for delta in deltas for part in delta.get("tool_calls", [])] == [call["function"]]


@pytest.mark.parametrize(
    ("inside", "shown"),
    [("though!", "though!"), ("thoughts", "thoughts"), ("thought\n", None), ("thought\nthought\n", "thought")],
)
def test_only_the_label_itself_is_cut_off(start, inside, shown):
    answer = [CHANNEL, *encode_bytes(inside), CHANNEL_END, *encode_bytes("b"), END]
    message = start(gemma_engine(answer, 4)).chat("x")["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (shown, "b")
