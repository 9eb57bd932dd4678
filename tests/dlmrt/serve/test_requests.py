"""The table of fields: every field honoured or refused by name, the same on both endpoints. Ids: known faults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.serve.body import MAX_DEPTH, parse_object
from dlmrt.serve.fields import HONOURED, KNOWN, NEUTRAL, NO_EFFECT, REFUSED, TOP_LEVEL_SETTINGS
from dlmrt.serve.problems import ApiError, dumps
from dlmrt.serve.requests import ApiCall, decode_config, derived_seed, parse_call
from dlmrt.types import DecodeConfig

BASE: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
}
VALUES: dict[str, Any] = {  # one usable value of each honoured field
    "model": "tiny", "messages": BASE["chat"]["messages"], "prompt": "x", "max_tokens": 3, "max_completion_tokens": 3,
    "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["a"], "stop_token_ids": [3],
    "ignore_eos": True, "n": 2, "stream": True, "stream_options": {}, "logprobs": True, "top_logprobs": 0, "echo": True,
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "chat_template_kwargs": {"a": 1},
    "reasoning_effort": "low", "response_format": {"type": "text"}, "return_meta_info": True,
    "diffusion": {"threshold": 0.5}, "stream_mode": "denoise", "vllm_xargs": {"diffusion_max_steps": 3},
}  # fmt: skip


def refusal(endpoint: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_call({**BASE[endpoint], **fields}, endpoint)
    assert caught.value.status == 400
    return caught.value


def call(endpoint: Any, **fields: Any) -> ApiCall:
    return parse_call({**BASE[endpoint], **fields}, endpoint)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("name", HONOURED)
def test_k48_honoured_fields_change_the_call_or_belong_elsewhere(name: str, endpoint: Any) -> None:
    extra = {"stream": True} if name in ("stream_mode", "stream_options") else {}
    field = HONOURED[name]
    if field.only not in (None, endpoint):
        assert refusal(endpoint, **{name: VALUES[name]}).param == name
        return
    parsed = call(endpoint, **extra, **{name: VALUES[name]})
    silent = {"messages", "prompt", "stream_options", "top_logprobs", "response_format", "tool_choice"}
    assert (parsed != call(endpoint, **extra)) == (name not in silent)
    if name not in BASE[endpoint]:
        assert call(endpoint, **extra, **{name: None}) == call(endpoint, **extra)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_k48_neutral_values_pass_and_others_are_refused_by_name(endpoint: Any) -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            assert call(endpoint, **{name: value}) == call(endpoint)
        for other in (0.5, "x", values[0] is not True):
            error = refusal(endpoint, **{name: other})
            assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_k45_k48_refused_fields_and_unknown_ones_name_themselves(endpoint: Any) -> None:
    for name in REFUSED:
        assert refusal(endpoint, **{name: {"a": 1}}).param == name
    for kind in ("json_object", "json_schema", "grammar"):
        assert refusal(endpoint, response_format={"type": kind}).param == "response_format"
    error = refusal(endpoint, temprature=0)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
    assert "did you mean 'temperature'" in str(error)
    assert "did you mean" in str(refusal(endpoint, diffusion={"treshold": 0.5}))
    assert parse_call({**BASE[endpoint], "temprature": 0}, endpoint, ignore_unknown=True) == call(endpoint)
    for name in NO_EFFECT:
        assert call(endpoint, **{name: "x"}) == call(endpoint)


def test_the_groups_of_the_table_do_not_overlap() -> None:
    assert len(KNOWN) == sum(map(len, (HONOURED, NEUTRAL, NO_EFFECT, REFUSED, TOP_LEVEL_SETTINGS)))
    assert set(VALUES) == set(HONOURED)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("value", ["5", 1.5, True, [1]])
def test_k46_max_tokens_has_one_type(endpoint: Any, value: Any) -> None:
    assert refusal(endpoint, max_tokens=value).param == "max_tokens"
    assert refusal(endpoint, max_completion_tokens=value).param == "max_completion_tokens"


def test_two_spellings_agree_or_are_refused() -> None:
    assert call("chat", max_tokens=5, max_completion_tokens=5).settings == {"max_tokens": 5}
    refusal("chat", max_tokens=5, max_completion_tokens=6)
    same = {"threshold": 0.5, "diffusion": {"confidence_threshold": 0.5}}
    assert call("chat", **same).settings == {"threshold": 0.5}
    refusal("chat", threshold=0.5, diffusion={"threshold": 0.6})
    assert call("chat", vllm_xargs={"diffusion_max_steps": 4}, diffusion={"max_steps": 4}).settings == {
        "max_denoising_steps": 4
    }
    rule = call("chat", diffusion_sampler="entropy-bound", diffusion={"dllm_algorithm": "Gemma4Renoise"})
    assert rule.settings == {"commit_rule": "entropy_bound"}
    assert call("chat", block_length=4, editing_threshold=0.1, max_post_steps=2).settings == {
        "canvas_length": 4, "edit_threshold": 0.1, "max_post_edit_steps": 2
    }  # fmt: skip
    assert refusal("chat", vllm_xargs={"diffusion_seed_canvas": "a"}).param == "vllm_xargs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"), ({"n": 9}, "n"), ({"n": True}, "n"), ({"n": "2"}, "n"), ({"stream": 1}, "stream"),
        ({"logprobs": 21}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 2, "top_logprobs": 3}, "top_logprobs"),
        ({"echo": True, "logprobs": True}, "echo"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options"), ({"stop": ["a"] * 65}, "stop"),
        ({"stop": 5}, "stop"), ({"diffusion": []}, "diffusion"),
        ({"diffusion": {"return_canvas": True}}, "return_canvas"),
        ({"seed": 1.5}, "seed"), ({"temperature": "0"}, "temperature"), ({"stream_mode": "x"}, "stream_mode"),
        ({"model": 5}, "model"), ({"total_steps": 5}, "total_steps"),
        ({"diffusion": {"seed_canvas": "x"}}, "seed_canvas"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_k70_nonsense_is_refused_by_name(endpoint: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal(endpoint, **fields).param == param


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hi", [5], [{"role": "user", "content": 5}], [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], [{"role": "user", "contnt": "x"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read(messages: Any) -> None:
    assert refusal("chat", messages=messages).param == "messages"


def test_messages_as_clients_send_them() -> None:
    """Text parts, keys copied from an answer, lm-eval's extra type, tool calls with arguments as text."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "type": "text"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]  # fmt: skip
    before = copy.deepcopy(messages)
    parsed = call("chat", messages=messages).messages
    assert [m["content"] for m in parsed] == ["be brief", "ab", "", "1"]
    assert parsed[0]["role"] == "system" and set(parsed[1]) == {"role", "content"}
    assert parsed[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert messages == before  # K68


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), ([1, 2], ([1, 2],)), (["a", "b"], ("a", "b")), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert call("completions", prompt=prompt).prompts == expected
    for wrong in ([], {}, 5, [1, "a"], ["a"] * 65):
        assert refusal("completions", prompt=wrong).param == "prompt"


def test_k69_another_rule_drops_only_what_the_other_rule_had() -> None:
    base = DecodeConfig(threshold=0.7, min_commit=2, temperature=0.3, max_tokens=9)
    changed = decode_config(base, {"commit_rule": "steps", "max_denoising_steps": 4}, "threshold")
    assert changed == DecodeConfig(commit_rule="steps", max_denoising_steps=4, temperature=0.3, max_tokens=9)
    kept = decode_config(base, {"commit_rule": "threshold", "temperature": 0.5}, "threshold")
    assert kept == DecodeConfig(commit_rule="threshold", threshold=0.7, min_commit=2, temperature=0.5, max_tokens=9)
    assert base == DecodeConfig(threshold=0.7, min_commit=2, temperature=0.3, max_tokens=9)


@settings(deadline=None)
@given(seed=st.integers(0, 2**64 - 1))
def test_derived_seeds_differ_and_fit_json(seed: int) -> None:
    seeds = [derived_seed(seed, choice) for choice in range(8)]
    assert seeds[0] == seed and len(set(seeds)) == 8 and all(0 <= s < 2**53 for s in seeds[1:])
    assert seeds == [derived_seed(seed, choice) for choice in range(8)]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"5", b"{", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": "\xff"}', b'{"a":' * 100_000, b"[" * 100_000,
        b'{"a": ' + b"9" * 10_000 + b"}", b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    ],
)  # fmt: skip
def test_k51_bodies_that_are_not_a_moderate_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "sys." not in str(caught.value)


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_documents_survive_the_wire(document: dict[str, Any]) -> None:
    assert parse_object(dumps(document)) == document


def test_a_lone_surrogate_stays_valid_json() -> None:
    assert parse_object(dumps({"a": "\ud800b"})) == {"a": "\ud800b"}
