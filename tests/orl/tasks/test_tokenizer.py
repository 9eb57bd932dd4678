"""The tokenizer: round trip of any text, fixed special ids, specials never made from user text, letters and digits."""

import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orl.tasks import get_task, task_names
from orl.tasks.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, train_tokenizer, write_tokenizer

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer trained on a little text of every task."""
    return train_tokenizer(get_task(name).problem(index) for name in task_names() for index in range(200))


@given(text=st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not ids or min(ids) >= len(SPECIAL_TOKENS)


@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL_TOKENS), st.text(max_size=5)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_special_text_is_ordinary_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text).ids
    assert not set(ids) & {0, 1, 2, 3}
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert SPECIAL_TOKENS == ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
    assert tokenizer.get_vocab_size() <= 2048
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))


def test_digits_and_capitals_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234").tokens == list("1234")
    for letter in string.ascii_uppercase:
        assert tokenizer.encode(f": {letter}{letter}X").tokens == [":", f"\u0120{letter}", letter, "X"]
    assert not [token for token in tokenizer.get_vocab() if re.search(r"[A-Z]{2}|\d.|.\d", token)]


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    again = train_tokenizer(get_task(name).problem(index) for name in task_names() for index in range(200))
    assert again.to_str() == tokenizer.to_str()


def test_too_small_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 260"):
        train_tokenizer([], vocab_size=100)
    assert train_tokenizer([], vocab_size=260).get_vocab_size() == 260


def test_written_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_tokenizer(tokenizer, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    again = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert again.encode("<|mask|>").ids == [3]  # the file does not keep the attribute: every reader sets it
    again.encode_special_tokens = True
    assert again.encode("a <|mask|>").ids == tokenizer.encode("a <|mask|>").ids
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["pad_token"], config["eos_token"], config["mask_token"]) == (
        "<|endoftext|>",
        "<|im_end|>",
        "<|mask|>",
    )


def test_chat_template() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "  hi\n"}, {"role": "assistant", "content": "yes"}]
    assert template.render(messages=messages) == (
        "<|im_start|>user\n  hi\n<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert template.render(messages=messages[:1], add_generation_prompt=True).endswith("<|im_start|>assistant\n")


def test_transformers_reads_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.mask_token_id) == (0, 2, 3)
    text = "Spell SUN: 12 + 30 = 42 \u20ac"
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
