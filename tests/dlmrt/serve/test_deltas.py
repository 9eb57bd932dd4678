"""Channels of an answer, however it is cut: a stream joins to the same message, entries to the same texts."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from dlmrt.serve.deltas import Deltas, Markers
from dlmrt.testing import END, VOCAB_SIZE, answering, byte_codec, scripted_engine, tiny_config

TEXT = st.text("ab \n<>é\U0001f600", max_size=6)
CALL, CALL_END, THINK, END_THINK = VOCAB_SIZE, VOCAB_SIZE + 1, 260, 261


def codec_with_tools():
    codec = byte_codec()
    codec.tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<tool_call>", "</tool_call>")])
    return type(codec)(codec.tokenizer)


CODEC = codec_with_tools()
MARKERS = Markers.of(CODEC)


def parts(answer: list[int], length: int, stop: tuple[str, ...], max_tokens: int, with_tokens: bool):
    """Texts and entries of each channel, calls, and the engine's own result."""
    config = tiny_config(vocab_size=VOCAB_SIZE + 2, diffusion={"canvas_length": length}, max_position_embeddings=1024)
    engine, _ = scripted_engine(answering(answer, vocab_size=VOCAB_SIZE + 2), config=config)
    engine.tokenizer = CODEC
    deltas = Deltas(CODEC, MARKERS, channel="content", with_tokens=with_tokens)
    texts = {"content": "", "reasoning": "", "tool_call": ""}
    joined = dict(texts)
    calls, count, result = [], 0, None
    for event in engine.stream("x", stop=stop, max_tokens=max_tokens, tokens=True):
        for delta in deltas.feed(event):
            texts[delta.channel] += delta.text
            if delta.tool_call is None:
                joined[delta.channel] += "".join(entry.text for entry in delta.entries)
            else:
                calls.append(delta.tool_call)
            count += len(delta.entries)
        result = event
    assert texts == joined and count == len(result.token_ids)
    return texts, calls, result


SECTION = st.one_of(
    TEXT.map(lambda text: list(text.encode())),
    TEXT.map(lambda text: [THINK, *text.encode(), END_THINK]),
    TEXT.map(lambda text: [CALL, *json.dumps({"name": "f", "arguments": {"x": text}}).encode(), CALL_END]),
    TEXT.map(lambda text: [CALL, *text.encode(), CALL_END]),
    st.sampled_from([[THINK], [END_THINK], [CALL], [CALL_END]]),
)


@settings(deadline=None, max_examples=25)
@given(
    sections=st.lists(SECTION, max_size=5), stop=st.lists(st.sampled_from(["a<", "b ", "é", "\n\n"]), max_size=2),
    max_tokens=st.integers(1, 200),
)  # fmt: skip
def test_an_answer_does_not_depend_on_the_block_length(sections, stop, max_tokens):
    answer = [*(token for section in sections for token in section), END]
    texts, calls, result = parts(answer, 64, tuple(stop), max_tokens, True)
    for length in (1, 7):
        other = parts(answer, length, tuple(stop), max_tokens, False)
        assert other[:2] == (texts, calls) and other[2].text == result.text


def test_text_passes_at_once_where_nothing_needs_ids():
    engine, _ = scripted_engine(answering([*b"abcdefghijkl", END]))
    deltas = Deltas(byte_codec(), Markers(), channel="content", with_tokens=False)
    assert not deltas.needs_tokens
    texts = [delta.text for event in engine.stream("x") for delta in deltas.feed(event)]
    assert texts == ["abcdefgh", "ijkl"]


def test_a_template_that_opens_the_reasoning_itself():
    assert MARKERS.open_channel([65, THINK, 10]) == "reasoning"
    assert MARKERS.open_channel([THINK, 65, END_THINK, 10]) == "content"
    assert MARKERS.open_channel([65]) == "content"
    texts, _, _ = parts([*b"ab", END_THINK, *b"c", END], 8, (), 20, True)
    assert texts["content"] == "abc"  # without a beginning the end marker is nothing
    deltas = Deltas(CODEC, MARKERS, channel="reasoning", with_tokens=False)
    engine, _ = scripted_engine(answering([*b"ab", END_THINK, *b"c", END]))
    found = [delta for event in engine.stream("x", tokens=True) for delta in deltas.feed(event)]
    assert [(delta.channel, delta.text) for delta in found] == [("reasoning", "ab"), ("content", "c")]
