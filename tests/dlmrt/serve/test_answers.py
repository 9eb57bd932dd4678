"""What an answer says, over HTTP, with a scripted model. Ids in test names: known faults."""

from __future__ import annotations

import json

import pytest

from dlmrt.decode.engine import Engine
from dlmrt.errors import DeviceError
from dlmrt.serve.faults import FaultyDenoiser
from dlmrt.testing import (
    END,
    MASK,
    ScriptedDenoiser,
    answering,
    byte_codec,
    encode_bytes,
    peaked,
    scripted_engine,
    tiny_config,
)

from .conftest import echoing, endless, events, user

PIECES = "naïve ďábel 你好 👨‍👩‍👧 ok"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def body(path: str, content: str = "x", **fields):
    return {"messages": user(content), **fields} if path == "chat" else {"prompt": content, **fields}


def text_of(path: str, choice) -> str:
    if path == "chat":
        return (choice.get("message") or choice["delta"]).get("content") or ""
    return choice["text"]


def joined(path: str, chunks) -> str:
    return "".join(text_of(path, chunk["choices"][0]) for chunk in chunks if chunk != "[DONE]" and chunk["choices"])


def engine_of(answer, **fields):
    return scripted_engine(answering(answer), config=tiny_config(max_position_embeddings=2048, **fields))


@pytest.mark.parametrize("path", PATHS)
def test_k01_literal_mask_text_is_ordinary_text(start, path):
    engine, denoiser = engine_of([*encode_bytes("ok"), END], diffusion={"canvas_length": 32})
    server = start(engine, denoiser=denoiser)
    status, answer = server.post(PATHS[path], **body(path, "repeat: a <|mask|> b"), max_tokens=64)
    assert status == 200 and text_of(path, answer["choices"][0]) == "ok"
    context = [token for ids in denoiser.extended for token in ids.tolist()]
    assert MASK not in context and answer["usage"]["prompt_tokens"] == len(context)
    status, answer = server.post(PATHS["completions"], prompt=[65, MASK])
    assert status == 400 and answer["error"]["param"] == "prompt" and str(MASK) in answer["error"]["message"]


@pytest.mark.parametrize("k", [1, 13, 31])
def test_k02_nothing_right_of_a_stop_token_is_shown(start, k):
    answer = [*encode_bytes("t" * k), END, *encode_bytes("ZZZ")]
    engine, denoiser = scripted_engine(
        answering(answer), config=tiny_config(diffusion={"canvas_length": 32}, max_position_embeddings=512)
    )
    server = start(engine, denoiser=denoiser)
    plain = server.chat("x", max_tokens=96)
    chunks = server.stream(PATHS["chat"], messages=user("x"), max_tokens=96, stream_options={"include_usage": True})
    assert plain["choices"][0]["message"]["content"] == joined("chat", chunks) == "t" * k
    assert plain["usage"]["completion_tokens"] == chunks[-2]["usage"]["completion_tokens"] == k + 1
    assert plain["usage"]["diffusion"]["num_blocks"] == 1 and plain["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("width", [1, 3, 32])
def test_k07_no_character_is_cut_in_a_stream(start, width):
    engine, _ = engine_of([*PIECES.encode(), END], diffusion={"canvas_length": width})
    server = start(engine)
    for max_tokens in (200, 7, 21):  # within a character, too
        plain = server.chat("x", max_tokens=max_tokens)["choices"][0]["message"]["content"]
        chunks = server.stream(PATHS["chat"], messages=user("x"), max_tokens=max_tokens)
        assert plain == joined("chat", chunks) == PIECES.encode()[:max_tokens].decode(errors="ignore")
        assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


@pytest.mark.parametrize(
    "fields",
    [{}, {"stop": ["lo w"]}, {"max_tokens": 5}, {"max_tokens": 14}, {"commit_rule": "joint_threshold"},
     {"temperature": 0.5, "seed": 3}],
    ids=["eos", "stop string", "length", "cut character", "edits", "sampled"],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_k08_one_logprob_a_token_and_texts_join(start, path, fields):
    engine, _ = engine_of([*encode_bytes("hello world é!"), END])
    server = start(engine)
    request = body(path, logprobs=True, top_logprobs=3, **fields)
    _, plain = server.post(PATHS[path], **request)
    chunks = server.stream(PATHS[path], **request, stream_options={"include_usage": True})
    choice = plain["choices"][0]
    text, usage = text_of(path, choice), plain["usage"]
    streamed = [
        c["choices"][0]["logprobs"] for c in chunks if c != "[DONE]" and c["choices"] and c["choices"][0]["logprobs"]
    ]
    if path == "chat":
        entries = choice["logprobs"]["content"]
        assert [entry for part in streamed for entry in part["content"]] == entries
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
        tokens, values = [e["token"] for e in entries], [e["logprob"] for e in entries]
        assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    else:
        logprobs = choice["logprobs"]
        for key in logprobs:
            assert [item for part in streamed for item in part[key]] == logprobs[key]
        tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
        offsets = logprobs["text_offset"]
        assert all(text[at : at + len(token)] == token for at, token in zip(offsets, tokens, strict=True))
    assert "".join(tokens) == text == joined(path, chunks)
    assert len(tokens) == usage["completion_tokens"] and all(value <= 0 for value in values)


def test_k08_the_value_is_of_the_forward_that_finalised_the_token(start):
    """Slots are sure one after the other; at each step the others are given other odds."""

    def rising(canvas, positions, step, view):
        offsets = positions - view.num_prompt
        sure = [0.95 if offset == step else 0.1 + 0.01 * step for offset in offsets.tolist()]
        return peaked([*encode_bytes("abcd"), END], offsets, confidence=sure)

    server = start(rising)
    entries = server.chat("x", logprobs=True, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list("abcd")
    assert [entry["logprob"] for entry in entries] == pytest.approx([-0.0513] * 4, abs=1e-3)  # ln 0.95


def test_k11_nan_is_a_500_with_a_reason_and_the_next_request_is_right(start):
    engine, _ = engine_of([*encode_bytes("fine"), END])
    faulty = Engine(FaultyDenoiser(ScriptedDenoiser(answering([*encode_bytes("fine"), END])), {"nan": 1.0}),
                    engine.config, byte_codec())  # fmt: skip
    server = start(faulty)
    first = server.chat("x")["choices"]
    status, error = server.post(PATHS["chat"], messages=user("x"))
    assert status == 500 and error["error"]["code"] == "non_finite_logits" and "non-finite" in error["error"]["message"]
    assert server.chat("x")["choices"] == first
    assert server.metric("dlmrt:request_failures_total") == 1


@pytest.mark.parametrize("path", PATHS)
def test_k43_an_error_in_mid_stream_is_an_event_and_ends_the_connection(start, path):
    def breaking(canvas, positions, step, view):
        if positions[0] - view.num_prompt >= 16:
            raise DeviceError("the device is gone; restart it")
        return endless(canvas, positions, step, view)

    server = start(breaking)
    status, headers, data = server.request("POST", PATHS[path], body(path, stream=True))
    *chunks, last = events(data)
    assert status == 200 and joined(path, chunks) == "abcdefghijklmnop" and "[DONE]" not in (*chunks, last)
    assert headers["connection"] == "close"
    assert last == {"error": {"message": "the device is gone; restart it", "type": "server_error", "param": None,
                              "code": None}}  # fmt: skip
    assert server.request("GET", "/health")[0] == 200


def test_faults_of_our_own_show_nothing_of_their_inside(start):
    def broken(canvas, positions, step, view):
        raise RuntimeError("/secret/path/model.py line 5")

    server = start(broken)
    status, _, data = server.request("POST", PATHS["chat"], {"messages": user("x")})
    assert status == 500 and b"secret" not in data and b"Traceback" not in data
    assert json.loads(data)["error"]["code"] == "internal_error"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("value", "status"), [(0, 400), (1, 200), (-1, 400), (10**9, 400), ("5", 400), (None, 200)])
def test_k46_max_tokens_edge_values(start, path, value, status):
    server = start(echoing)
    for name in ("max_tokens", "max_completion_tokens"):
        got, answer = server.post(PATHS[path], **body(path, **{name: value}))
        assert got == status
        assert answer["usage"]["completion_tokens"] >= 1 if status == 200 else answer["error"]["param"] == name


def test_k68_k69_requests_leave_the_servers_settings_alone(start):
    from dlmrt.types import DecodeConfig

    base = DecodeConfig(threshold=0.5, max_tokens=9)
    server = start(endless, decode=base)
    before = server.chat("x")["usage"]["diffusion"]["settings"]
    assert (before["threshold"], before["max_tokens"]) == (0.5, 9)
    other = server.chat("x", max_tokens=4, commit_rule="steps")["usage"]["diffusion"]["settings"]
    assert other["max_tokens"] == 4 and "threshold" not in other
    assert server.chat("x")["usage"]["diffusion"]["settings"] == before
    assert server.service.config.decode == base


def test_echo_repeats_the_prompt(start):
    server = start(echoing)
    assert server.post(PATHS["completions"], prompt="abc", echo=True)[1]["choices"][0]["text"] == "abcABC"
    ids = [*encode_bytes("abc")]
    assert server.post(PATHS["completions"], prompt=ids, echo=True)[1]["choices"][0]["text"] == "abcABC"
    content = server.chat("abc", echo=True)["choices"][0]["message"]["content"]
    assert content == "user\nabc\nassistant\nABC"
    assert joined("chat", server.stream(PATHS["chat"], messages=user("abc"), echo=True)) == content


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [{"threshold": -0.1}, {"threshold": 1.5}, {"canvas_length": 0}, {"block_length": 10**9}, {"steps": 0},
     {"temperature": -1}, {"temperature": 1e-9}, {"top_p": 0}, {"top_k": -1}, {"min_p": 2}, {"seed": -1},
     {"entropy_bound": 0.1}, {"noise_seed": 3}, {"commit_rule": "best"}, {"min_commit": 99}, {"stop": [""]},
     {"stop_token_ids": [10**6]}],
    ids=str,
)  # fmt: skip
def test_k70_nonsense_values_and_settings_without_effect(start, path, fields):
    """At the top level and under `diffusion`; the field is named as the request spells it."""
    server = start(echoing)
    (name,) = fields
    for request in (fields, {"diffusion": fields}):
        status, error = server.post(PATHS[path], **body(path, **request))
        assert (status, error["error"]["param"]) == (400, name), error
