"""Thoughts and answers are told apart by token ids, for the markers of each family."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dlmrt.decode.reasoning import ReasoningSplitter, is_open, reasoning_markers, split_reasoning
from dlmrt.decode.text import TextCodec
from dlmrt.testing import END, END_THINK, THINK, byte_codec, encode_bytes

QWEN = byte_codec()


def gemma_codec():
    """Bytes, and Gemma's channel markers as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|channel>", "<channel|>")])
    return TextCodec(tokenizer)


def test_thought_then_answer():
    ids = [THINK, *encode_bytes("\n2 + 3 is 5\n"), END_THINK, *encode_bytes("\n\nIt is 5."), END]
    assert split_reasoning(QWEN, [], ids) == ("2 + 3 is 5", "It is 5.")


def test_a_template_may_open_the_thought():
    prompt = [*encode_bytes("question"), THINK]
    assert is_open(prompt, reasoning_markers(QWEN))
    assert split_reasoning(QWEN, prompt, [*encode_bytes("hm"), END_THINK, *encode_bytes("5")]) == ("hm", "5")
    closed = [*prompt, END_THINK]  # thinking switched off: the template writes an empty thought
    assert not is_open(closed, reasoning_markers(QWEN))
    assert split_reasoning(QWEN, closed, encode_bytes("5")) == (None, "5")


def test_an_answer_cut_within_its_thought_has_no_content():
    assert split_reasoning(QWEN, [], [THINK, *encode_bytes("hm")]) == ("hm", "")


@pytest.mark.parametrize("text", ["plain", "typed <think>letters</think> stay", ""])
def test_without_marker_tokens_everything_is_content(text):
    assert split_reasoning(QWEN, [], encode_bytes(text)) == (None, text)


def test_channel_markers_and_their_label():
    codec = gemma_codec()
    start, end = (codec.tokenizer.token_to_id(text) for text in ("<|channel>", "<channel|>"))
    ids = [start, *codec.encode("thought\nhm\n"), end, *codec.encode("5")]
    assert split_reasoning(codec, [], ids) == ("hm", "5")


GEMMA = gemma_codec()
CHANNEL, END_CHANNEL = (GEMMA.tokenizer.token_to_id(text) for text in ("<|channel>", "<channel|>"))
PIECES = {
    "qwen": (
        QWEN,
        [[THINK], [END_THINK], encode_bytes("\n"), encode_bytes("\n\n"), encode_bytes("2 + 3"), [0xC3], [0xA9]],
    ),
    "gemma": (
        GEMMA,
        [[CHANNEL], [END_CHANNEL], *(GEMMA.encode(text) for text in ("thought\n", "thou", "\n", "\u00e9", "hm"))],
    ),
}


@pytest.mark.parametrize("name", PIECES)
@given(data=st.data())
def test_streams_equal_the_whole_for_every_cut(name, data):
    """Thoughts and answer do not depend on how the ids arrive, and no text of theirs is lost but the frames."""
    codec, choices = PIECES[name]
    ids = [token for piece in data.draw(st.lists(st.sampled_from(choices), max_size=8)) for token in piece]
    prompt = data.draw(st.sampled_from([[], choices[0], choices[0] + choices[1]]))
    thought, content = split_reasoning(codec, prompt, ids)
    splitter = ReasoningSplitter(codec, prompt)
    parts = {"reasoning": "", "content": ""}
    position = 0
    while position < len(ids):
        end = data.draw(st.integers(position + 1, len(ids)))
        for channel, text in splitter.push(ids[position:end]):
            assert text
            parts[channel] += text
        position = end
    for channel, text in splitter.finish():
        parts[channel] += text
    assert (parts["reasoning"], parts["content"]) == (thought or "", content)
    assert (thought is not None) == splitter.has_reasoning
    if thought:
        assert not thought.startswith("\n") and not thought.endswith("\n")


def test_text_is_given_as_soon_as_it_is_no_frame():
    splitter = ReasoningSplitter(GEMMA, [])
    assert splitter.push([CHANNEL]) == [] and splitter.push(GEMMA.encode("thou")) == []
    assert splitter.push(GEMMA.encode("ght\n\nhm\n")) == [("reasoning", "hm")]
    assert splitter.push(GEMMA.encode("so")) == [("reasoning", "\nso")]
    assert splitter.push([*GEMMA.encode("\n"), END_CHANNEL, *GEMMA.encode("\n5")]) == [("content", "5")]
    assert splitter.finish() == []
