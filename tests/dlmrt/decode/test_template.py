"""Chat templates of the three families equal transformers', and no text of a user's becomes a control token.

The templates are ours, with the constructs and control tokens of the released ones: what is compared is our rendering
and encoding with that of transformers' `apply_chat_template` on the same files.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlmrt.decode.template import ChatTemplate
from dlmrt.decode.text import TextCodec
from dlmrt.errors import UnknownOptionError, UsageError

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Weather <b>of</b> a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}


def byte_level(specials, others=()):
    """Byte-level BPE, as Qwen3's and LLaDA2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("<", "|"), ("|", ">"), ("Ċ", "Ċ"), ("Ġ", "t")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in others])
    return tokenizer


def sentence_piece(specials):
    """Spaces as a letter, bytes where the vocabulary ends and no prefix space, as Gemma's."""
    vocabulary = {"<pad>": 0, "<unk>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for token in ("▁", *map(chr, range(33, 127)), "he", "▁t", "\n"):
        vocabulary.setdefault(token, len(vocabulary))
    merges = [("h", "e"), ("▁", "t")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


GEMMA = ["<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
         "<tool_call|>", '<|"|>']  # fmt: skip
FAMILIES = {
    "qwen3": byte_level(
        ["<|mask|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    ),
    "llada2": byte_level(["<|mask|>", "<|startoftext|>", "<|endoftext|>", "<|role_end|>", "<role>", "</role>"]),
    "diffusion_gemma": sentence_piece(GEMMA),
}
SWITCH = {"qwen3": "enable_thinking", "llada2": "thinking", "diffusion_gemma": "enable_thinking"}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Name -> (our codec, transformers' tokenizer) of the same folder."""
    loaded = {}
    for name, tokenizer in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        named = {"bos_token": "<bos>"} if name == "diffusion_gemma" else {"eos_token": "<|endoftext|>"}
        raw = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        (folder / "tokenizer_config.json").write_text(json.dumps(raw))
        (folder / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
        loaded[name] = TextCodec.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


USER = {"role": "user", "content": "  What is the weather?\n"}
CONVERSATIONS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be short. "}, USER],
    "turns": [USER, {"role": "assistant", "content": "hello \n"}, {"role": "user", "content": "thé 你好 👋"}],
    "ends in an answer": [USER, {"role": "assistant", "content": "hello"}],
    "empty": [{"role": "user", "content": ""}],
    "thought in the content": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"}, USER],
    "thought as a field": [USER, {"role": "assistant", "reasoning_content": "\nhm\n", "content": "hello"}],
    "thought in a channel": [USER, {"role": "assistant", "content": "no channel here"}, USER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "call and result": [
        USER, {"role": "assistant", "content": "hello", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain\n"}, {"role": "tool", "content": '{"sun": true}'}, USER,
    ],
    "quoted result": [{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}],
    "two systems": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER],
    "jinja in text": [{"role": "user", "content": "{{ 7 * 7 }} {% if x %} {# #}"}],
    "braces": [{"role": "user", "content": '{"a": [1, "b"]}\n\\n <|im_ |> <role ></ role>'}],
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_equal_to_transformers(families, name, conversation):
    """K52, K53: with and without tools, the thinking switch absent, on and off, a generation prompt or none."""
    codec, reference = families[name]
    messages = CONVERSATIONS[conversation]
    for tools, thinking, prompt in (
        (None, None, True), (None, True, False), (None, False, True), ([TOOL], None, True), ([TOOL, TOOL], True, True),
        ([TOOL], False, False),
    ):  # fmt: skip
        options = ({} if thinking is None else {SWITCH[name]: thinking}) | ({} if tools is None else {"tools": tools})
        wanted = reference.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False, **options)
        assert codec.encode_messages(messages, add_generation_prompt=prompt, **options) == wanted


def control(codec, ids):
    return [token for token in ids if token in codec.special_ids]


def pieces_of(name):
    tokens = [token.content for token in FAMILIES[name].get_added_tokens_decoder().values()]
    halves = [half for token in tokens for half in (token[: len(token) // 2], token[len(token) // 2 :])]
    return [*tokens, *halves, "hello", " ", "\n", "x", "\U000f0000", "user", "<", "|", ">"]


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=20)
def test_users_write_no_control_tokens(families, name, data):
    """K01: whatever stands in contents, calls, results and tools, the control tokens are those of harmless texts."""
    codec, _ = families[name]
    text = st.lists(st.sampled_from(pieces_of(name)), max_size=5).map("".join)

    def conversation(write):
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": write(), "b": [write()]}}}
        messages = [
            {"role": "system", "content": write()}, {"role": "user", "content": write()},
            {"role": "assistant", "content": "y" + write(), "tool_calls": [call]},
            {"role": "tool", "content": write()}, {"role": "user", "content": write()},
        ]  # fmt: skip
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": write()}}}
        return codec.encode_messages(messages, tools=[tool])

    try:
        ids = conversation(lambda: data.draw(text))
    except UsageError as error:
        assert "transforms it" in str(error)
        return
    assert control(codec, ids) == control(codec, conversation(lambda: "x"))


CHANGES = [
    "{{ m.content | lower }}", "{{ m.content | upper | lower }}", "{{ m.content.replace('0', 'o') }}",
    "{{ m.content | replace('(', '<') | replace(')', '>') }}", "{{ m.content | trim }}", "{{ m.content | reverse }}",
    "{{ m.content | list | join }}", "{{ m.content.split('_') | join }}", "{{ m.content[::-1] }}",
    "{{ m.content[1:] }}", "{{ m.content ~ m.content }}", "{{ m.content | tojson }}", "{{ m.content | e | lower }}",
    "{{ '%s' % m.content }}", "{{ m.content.swapcase() }}", "{{ m.content | title | lower }}",
    "{% for c in m.content %}{{ c }}{% endfor %}", "{{ m.content | lower | trim }}{{ m.content | length }}",
    "{{ (m.content | lower).lstrip('x') }}", "{{ '<' ~ m.content ~ '>' }}", "{{ '<|' ~ m.content }}",
]  # fmt: skip
ODD = [
    "<|MASK|>", "<|mask|>", "<|Im_End|>", "(|im_end|)", "<|mas", "k|>", ">|ksam|<", "<|ma_sk|>", "<|im_0nd|>", "|mask|",
    "mask|>", "im_end|>", "x<|IM_END|>", "<|im_end|>", "hello", " ", "<", "|>", "_",
]  # fmt: skip


@functools.cache
def codec_of(template):
    return TextCodec(FAMILIES["qwen3"], template=template)


@pytest.mark.parametrize("change", CHANGES)
@given(contents=st.lists(st.lists(st.sampled_from(ODD), max_size=4).map("".join), min_size=1, max_size=3))
@settings(max_examples=12)
def test_changed_letters_make_no_control_token(change, contents):
    """K01 as a kind: a template that changes or joins letters cannot turn a user's text into a token of its own.

    The template writes <|im_end|> itself, so a user's is not told apart by its text.
    """
    codec = codec_of("{% for m in messages %}" + change + "<|im_end|>{% endfor %}")
    messages = [{"role": "user", "content": content} for content in contents]
    try:
        ids = codec.encode_messages(messages)
    except UsageError as error:
        assert "transforms it" in str(error)
        return
    end = codec.tokenizer.token_to_id("<|im_end|>")
    assert control(codec, ids) == [end] * len(messages)


def test_letters_may_be_changed_when_no_token_comes_about():
    codec = TextCodec(FAMILIES["qwen3"], template="{{ messages[0].content | lower | trim }}<|im_end|>")
    ids = codec.encode_messages([{"role": "user", "content": " Hello <|IM_END|> "}])
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == "hello <|im_end|><|im_end|>"
    assert len(control(codec, ids)) == 1


def test_control_tokens_that_templates_make_of_roles():
    """Some write "<|" + role + "|>": meant so, for words; any other role is a user's text."""
    codec = TextCodec(
        byte_level(["<|user|>", "<|tool|>", "<|end|>"]),
        template="{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}",
    )
    user, end = (codec.tokenizer.token_to_id(text) for text in ("<|user|>", "<|end|>"))
    assert control(codec, codec.encode_messages([{"role": "user", "content": "hello"}])) == [user, end]
    ids = codec.encode_messages([{"role": "x|><|tool", "content": "tool"}])
    assert control(codec, ids) == [end]
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == "<|x|><|tool|>tool<|end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # a name that is a word of the template but for its letters
        ("{{ m.name | lower }}{% if m.role == '<|im_end|>' %}x{% endif %}", {"name": "<|IM_END|>"}),
        # pieces of the token are words and signs that the template looks for, and it cuts strings
        (
            "{{ m.content.split('[')[-1] if m.role == 'MASK' or m.role == ']' else m.content[:99] }}",
            {"content": "[MASK]"},
        ),
        ("{{ m.content[0:99] }}{{ m.content.count('[') * 0 }}{{ 'MASK' if 0 else '' }}", {"content": "a[MASK]"}),
    ],
)
def test_words_of_the_template_in_a_users_mouth(template, message):
    codec = TextCodec(
        byte_level(["[MASK]", "<|im_end|>"]), template="{% for m in messages %}" + template + "{% endfor %}"
    )
    try:
        ids = codec.encode_messages([{"role": "user", **message}])
    except UsageError as error:
        assert "transforms it" in str(error)
        return
    assert control(codec, ids) == []


def test_a_template_that_reads_the_clock_is_rendered_at_one_time():
    template = ChatTemplate("{{ strftime_now('%f') }} {{ messages[0].content }}", {}, ["<x>"])
    assert "strftime_now" not in template.options
    for _ in range(20):
        template.render([{"role": "user", "content": "Hi <x>"}], add_generation_prompt=True, options={})


@pytest.mark.parametrize("name", FAMILIES)
def test_enable_thinking_is_the_switch_of_any_template(families, name):
    """As most clients send it, also where the template calls it otherwise; both names at once are one too many."""
    codec, _ = families[name]
    for value in (True, False):
        wanted = codec.encode_messages([USER], **{SWITCH[name]: value})
        assert codec.encode_messages([USER], enable_thinking=value) == wanted
    assert codec.encode_messages([USER], enable_thinking=True) != codec.encode_messages([USER], enable_thinking=False)
    if SWITCH[name] != "enable_thinking":
        with pytest.raises(UnknownOptionError, match="enable_thinking"):
            codec.encode_messages([USER], enable_thinking=True, **{SWITCH[name]: True})


def test_a_template_without_the_switch_refuses_it():
    codec = TextCodec(FAMILIES["qwen3"], template="{{ messages[0].content }}")
    with pytest.raises(UnknownOptionError, match="does not read 'enable_thinking'"):
        codec.encode_messages([USER], enable_thinking=False)


def test_options_are_what_a_caller_may_set(families):
    assert {"enable_thinking", "tools", "messages"} <= families["qwen3"][0].template_options
    assert not families["qwen3"][0].template_options & {"raise_exception", "namespace", "range"}
