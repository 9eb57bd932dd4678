"""The real `openai` client against the real server. Ids in test names: known faults."""

from __future__ import annotations

import openai
import pytest

from dlmrt.decode.engine import Engine
from dlmrt.testing import END, ScriptedDenoiser, byte_codec, encode_bytes, peaked, scripted_engine, tiny_config

from .conftest import echoing, endless, user


@pytest.fixture
def connect(start):
    """A server over a script, and a client of it."""

    def make(what, *, key="none", **fields):
        server = start(what, **fields)
        return server, openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

    return make


def test_plain_and_streamed_answers_are_the_same(connect):
    _, client = connect(echoing)
    plain = client.chat.completions.create(model="tiny", messages=user("hello, little world"))
    assert plain.choices[0].message.content == "HELLO, LITTLE WORLD"
    assert (plain.choices[0].finish_reason, plain.object) == ("stop", "chat.completion")
    assert plain.usage.completion_tokens == len("HELLO, LITTLE WORLD") + 1  # the stop token counts
    assert plain.usage.diffusion["num_blocks"] == 3
    chunks = list(client.chat.completions.create(model="tiny", messages=user("hello, little world"), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "HELLO, LITTLE WORLD"
    assert {(chunk.id, chunk.object, chunk.model) for chunk in chunks} == {
        (chunks[0].id, "chat.completion.chunk", "tiny")
    }


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_k47_one_finish_reason_and_k44_a_chunk_a_block(connect, path):
    server, _ = connect(echoing)
    body = {"messages": user("a" * 40)} if path == "chat" else {"prompt": "a" * 40}
    *chunks, last = server.stream("/v1/chat/completions" if path == "chat" else "/v1/completions", **body)
    assert last == "[DONE]"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    texts = [c["choices"][0]["delta"].get("content") if path == "chat" else c["choices"][0]["text"] for c in chunks]
    assert sum(map(bool, texts)) >= 5  # 41 tokens in blocks of 8


@pytest.mark.parametrize("wanted", [True, False, None])
def test_k42_usage_chunk(connect, wanted):
    _, client = connect(echoing)
    plain = client.chat.completions.create(model="tiny", messages=user("count me")).usage
    options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    chunks = list(client.chat.completions.create(model="tiny", messages=user("count me"), stream=True, **options))
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert [chunk.choices for chunk in with_usage] == ([[]] if wanted else [])
    if wanted:
        usage = with_usage[0].usage
        assert chunks[-1] is with_usage[0]
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
            plain.prompt_tokens, plain.completion_tokens, plain.total_tokens
        )  # fmt: skip
        counts = ("num_forwards", "num_denoise_steps", "num_commit_forwards", "num_blocks", "tpf_total", "seed")
        assert {n: usage.diffusion[n] for n in counts} == {n: plain.diffusion[n] for n in counts}


def test_canvas_events_are_ordinary_chunks(connect):
    """A loop that knows nothing of them still reads the text; the extra key holds the canvas."""
    _, client = connect(echoing)
    stream = client.chat.completions.create(
        model="tiny", messages=user("canvas"), stream=True, extra_body={"diffusion": {"return_canvas": True}}
    )
    text, frames = "", []
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if getattr(chunk, "diffusion", None):
            frames.append(chunk.diffusion)
    assert text == "CANVAS"
    assert [frame["committed_len"] for frame in frames] == [3, 6, 8]
    assert frames[0]["tokens"][:3] == list("CAN") and frames[0]["open"] == [3, 4, 5, 6, 7]
    assert frames[1]["changed"] == [3, 4, 5] and frames[1]["text"].startswith("CANVAS\u2591")
    assert all(len(frame["confidence"]) == 8 for frame in frames)


def test_completions_with_n_prompts_echo_and_seeds(connect):
    def noisy(canvas, positions, step, view):
        return peaked(encode_bytes("abcdefgh"), positions - view.num_prompt, confidence=0.5, fill=END)

    _, client = connect(noisy)

    def texts(**fields):
        answer = client.completions.create(model="tiny", prompt=["one", "two"], temperature=1, max_tokens=8, **fields)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices], answer.usage

    first, usage = texts(n=2, seed=5, echo=True)
    again, _ = texts(n=2, seed=5, echo=True)
    other, _ = texts(n=2, seed=6, echo=True)
    assert first == again != other
    assert [text[:3] for text in first] == ["one", "one", "two", "two"]
    assert first[0] != first[1]  # the choices have seeds of their own
    single, single_usage = texts(seed=5)
    assert single == [first[0][3:], first[2][3:]]
    assert usage.diffusion["seed"] == 5 and usage.prompt_tokens == 2 * single_usage.prompt_tokens


def test_k13_seed_and_temperature(connect):
    def noisy(canvas, positions, step, view):
        return peaked(encode_bytes("abcdefgh"), positions - view.num_prompt, confidence=0.5, fill=END)

    _, client = connect(noisy)

    def text(seed, temperature):
        answer = client.chat.completions.create(
            model="tiny", messages=user("x"), seed=seed, temperature=temperature, max_tokens=8
        )
        return answer.choices[0].message.content

    sampled = [text(seed, 1) for seed in range(1, 9)]
    assert len(set(sampled)) > 1 and sampled == [text(seed, 1) for seed in range(1, 9)]
    assert {text(seed, 0) for seed in range(1, 9)} == {"abcdefgh"}


def test_errors_are_the_clients_own_exceptions(connect):
    _, client = connect(echoing, key="sesame", api_key="sesame")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=user("x"), presence_penalty=0.5)
    assert (bad.value.param, bad.value.code) == ("presence_penalty", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        client.chat.completions.create(model="gpt-9", messages=user("x"))
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=user("x"), max_tokens=100_000, stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")  # K43: no broken stream
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="tiny", messages=user("x"))
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_stop_strings_and_ids(connect):
    _, client = connect(endless)
    answer = client.completions.create(model="tiny", prompt="x", stop=["hij", "zz"], max_tokens=60)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcdefg", "stop")
    assert answer.usage.diffusion["end_reason"] == "stop_string"
    streamed = client.completions.create(model="tiny", prompt="x", stop="hij", max_tokens=60, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abcdefg"
    answer = client.completions.create(model="tiny", prompt="x", extra_body={"stop_token_ids": [ord("d")]})
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("abc", 4)
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcde", "length")


def test_settings_of_the_request_reach_the_engine_and_come_back(connect):
    _, client = connect(echoing)
    options = {"diffusion": {"commit_rule": "steps", "max_steps": 4}, "return_meta_info": True}
    answer = client.chat.completions.create(model="tiny", messages=user("abcdefgh"), extra_body=options)
    diffusion = answer.usage.diffusion
    assert (diffusion["settings"]["commit_rule"], diffusion["settings"]["max_denoising_steps"]) == ("steps", 4)
    assert answer.meta_info == {
        "spec_verify_ct": diffusion["num_forwards"], "spec_accept_length": diffusion["tpf_total"]
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=user("a"), extra_body={"diffusion": {"entropy_bound": 1}})
    assert error.value.param == "entropy_bound"  # K70: it would have no effect under this rule


def test_template_options_are_honoured_or_refused(connect):
    """K53: the switch reaches the template; one that the template does not have is refused."""
    server, client = connect(echoing)

    def prompt(**options):
        server.denoiser.extended.clear()
        client.chat.completions.create(model="tiny", messages=user("x"), extra_body=options)
        return [token for ids in server.denoiser.extended for token in ids.tolist()]

    engine, _ = scripted_engine(echoing)
    for value in (True, False):
        expected = engine.tokenizer.encode_messages(user("x"), enable_thinking=value)
        assert prompt(chat_template_kwargs={"enable_thinking": value}) == expected
    for options in ({"chat_template_kwargs": {"thinking": True}}, {"reasoning_effort": "low"}):
        with pytest.raises(openai.BadRequestError, match="does not read"):
            client.chat.completions.create(model="tiny", messages=user("x"), extra_body=options)


def test_two_names_of_one_switch(start):
    """DFlash's client sends both with `--reasoning high`; a template reads one of them."""
    template = "{{ reasoning_effort }}{{ enable_thinking }}{{ messages[-1].content }}"
    denoiser = ScriptedDenoiser(echoing)
    server = start(Engine(denoiser, tiny_config(), byte_codec(template=template)))
    both = {"enable_thinking": True, "reasoning_effort": "high", "reasoning_strength": "high"}
    server.chat("x", chat_template_kwargs=both, max_tokens=2)
    assert bytes(denoiser.extended[0].tolist()) == b"highTruex"
    status, error = server.post("/v1/chat/completions", messages=user("x"), chat_template_kwargs={"effort": 1})
    assert status == 400 and "does not read 'effort'" in error["error"]["message"]
