"""Engine: prompts, streams, stop strings, seeds, isolation of requests, loading. Ids in test names: known faults."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode import engine as engine_module
from dlmrt.decode.engine import Engine
from dlmrt.decode.text import TextCodec
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.errors import (
    CheckpointError,
    ContextLengthError,
    MissingDependencyError,
    NonFiniteError,
    UnknownOptionError,
    UsageError,
)
from dlmrt.models.config import ModelConfig, ResidualConfig
from dlmrt.testing import (
    END,
    END_OF_TEXT,
    MASK,
    SPECIALS,
    VOCAB_SIZE,
    RequestView,
    ScriptedDenoiser,
    answering,
    byte_codec,
    encode_bytes,
    peaked,
    scripted_engine,
    tiny_config,
)
from dlmrt.types import CanvasEvent, DecodeConfig, Float32, GenerateResult, Int32, TextEvent

PIECES = "naïve ďábel 你好 👨‍👩‍👧 ok"


def hashed(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
    """Logits that depend on every id the model sees; text bytes and EOS."""
    seed = zlib.crc32(canvas.tobytes() + b"|" + view.context_S.tobytes())
    logits = np.random.default_rng(seed).normal(size=(len(canvas), VOCAB_SIZE)) * 2
    logits[:, 128:] -= 50
    logits[:, END] += 51
    return logits.astype(np.float32)


def same_answer(left: GenerateResult, right: GenerateResult) -> bool:
    """Equal in everything but times."""
    return (left.text, left.token_ids, left.record.forwards, left.record.end_reason) == (
        right.text, right.token_ids, right.record.forwards, right.record.end_reason
    )  # fmt: skip


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


def test_k01_literal_mask_text_is_ordinary_text() -> None:
    engine, denoiser = scripted_engine(answering([*encode_bytes("ok"), END]))
    prompts: list[Any] = [
        "repeat: a <|mask|> b", [{"role": "user", "content": "repeat: a <|mask|> b"}],
        [{"role": "user", "content": "".join(SPECIALS)}],
    ]  # fmt: skip
    for prompt in prompts:
        result = engine.generate(prompt, max_tokens=64)
        context = [token for ids in denoiser.extended for token in ids.tolist()]
        assert MASK not in context and tuple(context) == result.record.prompt_token_ids
        assert result.usage.prompt_tokens == len(context) and result.text == "ok"
        denoiser.extended.clear()
    with pytest.raises(UsageError, match=f"{MASK} at position 1, which is reserved for the mask"):
        engine.generate([65, MASK])
    with pytest.raises(UsageError, match="reserved for the mask"):
        engine.stream([MASK])  # refused at the call, before the first event


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "empty"), ([], "empty"), ([VOCAB_SIZE], "within"), ([-1], "within"), ([10**5000], "within"),
        ([1.5], "1.5"), ([True], "True"), (np.array([1.5]), "integers"), (np.array([True]), "integers"),
        ([None], "None"), (None, "NoneType"), (5, "int"), (b"abc", "bytes"), ({1, 2}, "set"), (iter([1]), "iterator"),
        ({"role": "user", "content": "x"}, "put it into a list"), ([{"role": "user"}, "y"], "message 1"),
        ([{}], "no role"), ("\ud800", "surrogate"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_used(prompt: Any, named: str) -> None:
    engine, denoiser = scripted_engine(hashed)
    with pytest.raises(UsageError, match=named):
        engine.generate(prompt)
    assert not denoiser.forwarded


@pytest.mark.parametrize("batch", [["a", "b"], [[1, 2], [3]], np.array([[1, 2]]), [(1,)]])
def test_k18_a_batch_is_refused(batch: Any) -> None:
    engine, _ = scripted_engine(hashed)
    with pytest.raises(UsageError, match="there are no batches, give them one by one"):
        engine.generate(batch)


@pytest.mark.parametrize(
    "prompt",
    [
        "  ",
        "\n",
        "a\0b",
        "\ufeff\u202eabc",
        "e\u0301" * 9,
        "👨‍👩‍👧",
        range(1, 4),
        (1, 2),
        np.array([1, 2], dtype=np.uint8),
    ],
)
def test_odd_prompts_are_used_as_they_are(prompt: Any) -> None:
    engine, _ = scripted_engine(hashed)
    ids = prompt.encode() if isinstance(prompt, str) else prompt
    assert engine.generate(prompt, max_tokens=2).record.prompt_token_ids == tuple(int(i) for i in ids)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("rule", ["threshold", "joint_threshold", "entropy_bound"])
def test_k07_no_character_is_cut_in_a_stream(width: int, rule: str) -> None:
    answer = [*PIECES.encode(), END]
    engine, _ = scripted_engine(
        answering(answer, confidence=0.9999), config=tiny_config(diffusion={"canvas_length": width})
    )
    for max_tokens in range(1, len(answer) + 3):
        *events, result = engine.stream("x", commit_rule=rule, max_tokens=max_tokens, temperature=0)
        whole = bytes(answer[: min(max_tokens, len(answer) - 1)]).decode(errors="ignore")
        assert text_of(events) == result.text == whole
        assert not any("\N{REPLACEMENT CHARACTER}" in event.text for event in events)
    assert result.text == PIECES


def test_text_is_streamed_while_a_block_is_still_being_decided() -> None:
    """K44: at least one event a block; a sticky rule shows its decided prefix at once."""
    answer = [*encode_bytes("abcdefgh" * 2), END]

    def left_first(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        return peaked(answer, positions - 1, confidence=np.linspace(0.89, 0.3, 8).astype(np.float32))

    engine, _ = scripted_engine(left_first)
    *events, _ = engine.stream("x")
    assert [event.text for event in events] == list("abcdefgh" * 2)
    *events, _ = engine.stream("x", commit_rule="joint_threshold", threshold=0.0)
    assert [event.text for event in events] == ["abcdefgh", "abcdefgh"]


@given(
    text=st.text(alphabet="abAB é", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="abAB é", min_size=1, max_size=3), min_size=1, max_size=3),
    width=st.sampled_from([1, 3, 8]),
)
@settings(deadline=None, max_examples=60)
def test_stop_strings_end_the_text_wherever_it_is_cut(text: str, stops: list[str], width: int) -> None:
    """Within a block, across blocks, overlapping: text ends before the first one; streamed == plain; K64."""
    engine, _ = scripted_engine(
        answering([*text.encode(), END]), config=tiny_config(diffusion={"canvas_length": width})
    )
    *events, result = engine.stream("x", stop=tuple(stops))
    first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert text_of(events) == result.text == text[:first]
    assert result.finish_reason == "stop"
    assert result.record.end_reason == ("stop_string" if first < len(text) else "eos")
    assert sum(forward.num_finalised for forward in result.record.forwards) == len(result.token_ids)
    assert bytes(token for token in result.token_ids if token < 256).decode(errors="ignore").startswith(text[:first])


def test_a_stop_string_ends_the_work_too() -> None:
    engine, denoiser = scripted_engine(answering(encode_bytes("one STOP two" + " and more" * 9)))
    result = engine.generate("x", stop="STOP", max_tokens=90)
    assert result.text == "one " and result.token_ids == tuple(encode_bytes("one STOP"))
    assert len(denoiser.forwarded) == 1 and result.usage.num_commit_forwards == 0


def test_k13_seeds_and_temperature() -> None:
    for noise in ("mask", "uniform"):
        engine, _ = scripted_engine(hashed, config=tiny_config(diffusion={"noise": noise}))

        def texts(temperature: float, engine: Engine = engine) -> list[str]:
            return [
                engine.generate("x", temperature=temperature, seed=seed, max_tokens=16).text for seed in range(1, 9)
            ]

        warm, again = texts(1.0), texts(1.0)
        assert warm == again and len(set(warm)) >= 2
        assert len(set(texts(0.0))) == 1
    a, b = (engine.generate("x", temperature=0, noise_seed=n, max_tokens=16).text for n in (0, 1))
    assert a != b  # the last engine has uniform noise


def test_k13_filters_bind_what_is_drawn() -> None:
    engine, _ = scripted_engine(hashed)
    greedy = engine.generate("x", max_tokens=16).token_ids
    for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
        assert engine.generate("x", temperature=1.0, seed=5, max_tokens=16, **{name: value}).token_ids == greedy


def test_k19_k68_nothing_of_the_callers_is_changed() -> None:
    engine, _ = scripted_engine(hashed, generation_defaults={"temperature": 1.0, "diffusion": {"threshold": 0.5}})
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    config = DecodeConfig(seed=7, stop=("zz",), max_tokens=12)
    messages = [{"role": "user", "content": "hi"}]
    before = copy.deepcopy((config, messages, engine._defaults, engine.config))
    tokenizer = engine.tokenizer.tokenizer.to_str()
    engine.generate(messages, config, threshold=0.7)
    assert (config, messages, engine._defaults, engine.config) == before
    assert engine.tokenizer.tokenizer.to_str() == tokenizer
    assert random.getstate() == python_state and torch.equal(torch.get_rng_state(), torch_state)
    assert all(np.array_equal(a, b) for a, b in zip(numpy_state, np.random.get_state(), strict=True))
    assert len({engine.generate("x", max_tokens=16).text for _ in range(4)}) > 1  # no seed: runs differ
    assert engine.generate("x", max_tokens=16, temperature=0).record.seed == 0


def test_k23_a_default_of_the_file_that_cuts_says_length() -> None:
    engine, _ = scripted_engine(answering([*encode_bytes("a" * 100), END]), generation_defaults={"max_new_tokens": 16})
    result = engine.generate("x")
    assert (len(result.token_ids), result.finish_reason) == (16, "length")
    assert engine.generate("x", max_tokens=200).finish_reason == "stop"
    assert engine.settings().max_tokens == 16


def test_context_length_is_checked_before_any_work() -> None:
    engine, denoiser = scripted_engine(hashed, config=tiny_config(max_position_embeddings=64))
    with pytest.raises(ContextLengthError, match="at most 48"):
        engine.stream([65] * 10, max_tokens=49)
    with pytest.raises(ContextLengthError, match="leaves no room"):
        engine.generate([65] * 60)
    assert not denoiser.forwarded
    assert engine.generate([65] * 10, ignore_eos=True).usage.completion_tokens == 48  # the default gives way
    zero = tiny_config(max_position_embeddings=64, diffusion={"block_anchor": "position_zero"})
    engine, _ = scripted_engine(hashed, config=zero)
    assert engine.generate([65] * 10, ignore_eos=True).usage.completion_tokens == 54


def test_k05_k25_k28_a_request_equals_that_of_a_fresh_engine() -> None:
    """200 random pairs on one engine, errors, cancels and abandoned streams between them."""
    draw = np.random.default_rng(0)
    config = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=4))

    def failing(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        logits = hashed(canvas, positions, step, view)
        return logits * np.nan if view.context_S[0] == 0 else logits

    used, _ = scripted_engine(failing, config=config, has_residual=True)
    for pair in range(200):
        first = draw.integers(1, 128, draw.integers(60, 101)).tolist()
        second = draw.integers(1, 128, draw.integers(1, 41)).tolist()
        options = {"max_tokens": 12, "temperature": 0.8, "seed": pair}
        if pair % 4 == 0:
            with pytest.raises(NonFiniteError):
                used.generate([0, *first], **options)
        elif pair % 4 == 1:
            stream = used.stream(first, canvas=True, **options)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        elif pair % 4 == 2:
            cancel = threading.Event()
            for _ in used.stream(first, canvas=True, cancel=cancel, **options):
                cancel.set()
        else:
            turn = used.generate(first, **options)
            second = [*first, *(token for token in turn.token_ids if token < 256), *second]  # a next turn
        fresh, _ = scripted_engine(failing, config=config, has_residual=True)
        again, anew = used.generate(second, record=True, **options), fresh.generate(second, record=True, **options)
        assert same_answer(again, anew) and again.record.prompt_token_ids == tuple(second)
        assert all(
            (a.canvas_L == b.canvas_L).all() for a, b in zip(again.record.states, anew.record.states, strict=True)
        )


def test_k06_concurrent_callers_wait_for_each_other() -> None:
    """Each answer holds only its own marker and equals the sequential one."""

    def echo(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        marker = view.context_S[: view.num_prompt].tolist()
        return peaked(marker * 5 + [END], positions - view.num_prompt)

    engine, _ = scripted_engine(echo)
    wrong: list[str] = []

    def client(name: str) -> None:
        for turn in range(20):
            marker = f"<{name}{turn}>"
            text = engine.generate(marker).text if turn % 3 else text_of(list(engine.stream(marker)))
            if text != marker * 5:
                wrong.append(text)

    threads = [threading.Thread(target=client, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cancel_from_another_thread_ends_the_running_request() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        begun.set()
        go_on.wait(5)
        return answering(encode_bytes("a" * 300))(canvas, positions, step, view)

    engine, denoiser = scripted_engine(slow)
    results: list[GenerateResult] = []
    thread = threading.Thread(target=lambda: results.append(engine.generate("x")))
    thread.start()
    assert begun.wait(5)
    engine.cancel()
    go_on.set()
    thread.join(5)
    assert results[0].finish_reason == "cancelled" and results[0].text == "a" * 8 and len(denoiser.forwarded) == 1
    assert results[0].usage.completion_tokens == sum(f.num_finalised for f in results[0].record.forwards) == 8
    engine.cancel()  # nothing runs: no effect on the next request
    assert engine.generate("x", max_tokens=4).finish_reason == "length"


def test_a_stream_left_open_is_an_error_not_a_deadlock() -> None:
    """The main thread alone could go on with it; close() does not wait for it either."""
    engine, _ = scripted_engine(answering(encode_bytes("a" * 300)))
    with engine:
        stream = engine.stream("x", max_tokens=200)
        next(stream)
        for blocked in (
            lambda: engine.generate("y"),
            lambda: engine.logits([1], [2]),
            lambda: next(engine.stream("y")),
        ):
            with pytest.raises(UsageError, match="a stream of this engine is open in this thread"):
                blocked()
    *_, result = stream
    assert isinstance(result, GenerateResult) and result.finish_reason == "cancelled"
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate("y")


def test_a_stream_left_open_in_another_thread_does_not_block_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a second request there, nor one of the main thread, nor close(); a stream that is used is waited for."""
    monkeypatch.setattr(engine_module, "ABANDONED_S", 0.2)
    engine, _ = scripted_engine(answering(encode_bytes("a" * 300)))
    refused: list[str] = []
    streams: list[Any] = []

    def leave_open() -> None:
        streams.append(engine.stream("x", max_tokens=200))
        next(streams[0])
        try:
            engine.generate("y")
        except UsageError as error:
            refused.append(str(error))

    thread = threading.Thread(target=leave_open)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and "was left open" in refused[0]
    with pytest.raises(UsageError, match="was left open"):
        engine.generate("y")
    engine.close()
    *_, result = streams[0]
    assert result.finish_reason == "cancelled"


def test_a_consumer_that_fails_or_leaves_frees_the_engine() -> None:
    engine, _ = scripted_engine(answering([*encode_bytes("ab" * 20), END]))
    with pytest.raises(KeyError):
        for _ in engine.stream("x"):
            raise KeyError
    stream = engine.stream("x")
    next(stream)
    with pytest.raises(RuntimeError, match="thrown"):
        stream.throw(RuntimeError("thrown"))  # type: ignore[attr-defined]
    stream = engine.stream("x")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    stream.close()  # type: ignore[attr-defined]
    unstarted = engine.stream("x")
    assert engine.generate("x").text == text_of(list(unstarted)) == "ab" * 20
    cancelled = threading.Event()
    cancelled.set()
    result = engine.generate("x", cancel=cancelled)
    assert (result.finish_reason, result.text, result.token_ids, result.usage.tpf_total) == ("cancelled", "", (), 0.0)


def test_threads_that_stream_cancel_and_close_at_once() -> None:
    engine, _ = scripted_engine(answering(encode_bytes("ab" * 150)))
    go, outcomes = threading.Event(), []

    def client(number: int) -> None:
        go.wait(5)
        try:
            for _ in range(5):
                result = engine.generate("x", max_tokens=200)
                is_whole = result.finish_reason == "length" and result.text == "ab" * 100
                outcomes.append(is_whole or (result.finish_reason == "cancelled" and result.text < "ab" * 100))
                engine.cancel()
        except UsageError as error:
            outcomes.append("closed" in str(error))
        if number == 3:
            engine.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads) and all(outcomes)


def test_a_stream_that_has_given_its_result_blocks_nobody() -> None:
    engine, _ = scripted_engine(answering([*encode_bytes("ab"), END]))
    stream = engine.stream("x")
    assert isinstance(next(stream), TextEvent) and isinstance(next(stream), GenerateResult)
    assert engine.generate("x").text == "ab"


def test_canvas_events_show_every_step() -> None:
    engine, denoiser = scripted_engine(answering([*encode_bytes("hi"), END], confidence=0.5))
    events = list(engine.stream("x", canvas=True, commit_rule="steps", max_denoising_steps=4, max_tokens=8))
    canvases = [event for event in events if isinstance(event, CanvasEvent)]
    assert len(canvases) == len(denoiser.forwarded) == 2
    assert canvases[0].text == "hi" + "░" * 6 and canvases[0].start == 1
    assert canvases[0].changed_L.tolist() == [True, True] + [False] * 6
    assert canvases[0].is_unresolved_L.tolist() == [False, False] + [True] * 6
    assert canvases[0].confidence_L[0] == pytest.approx(0.5, abs=0.01)
    assert isinstance(events[-1], GenerateResult) and text_of(events) == events[-1].text == "hi"


def test_usage_adds_up() -> None:
    """K61, K64: 41 visible tokens are counted, prompt tokens apart."""
    engine, _ = scripted_engine(answering([*encode_bytes("x" * 40), END]))
    result = engine.generate("p" * 70)
    usage = result.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.num_blocks) == (70, 41, 6)
    assert (usage.num_prefill_forwards, usage.num_denoise_steps, usage.num_commit_forwards) == (1, 6, 5)
    assert usage.num_forwards == 11 and usage.tpf_total == 41 / 11 and usage.tpf_denoise == 41 / 6
    assert 0 <= usage.prefill_s <= usage.time_to_first_block_s <= usage.total_s
    assert result.record.settings == engine.settings().as_dict() | {"max_tokens": 440}


def test_unknown_options_and_a_closed_engine() -> None:
    engine, _ = scripted_engine(hashed)
    with pytest.raises(UnknownOptionError, match="did you mean 'max_tokens'"):
        engine.generate("x", max_token=3)
    with engine:
        pass
    with pytest.raises(UsageError, match="closed"):
        engine.generate("x")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, make_params: Callable[..., dict[str, torch.Tensor]]) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=16))
    source = tmp_path_factory.mktemp("tokenizer")
    byte_codec().tokenizer.save(str(source / "tokenizer.json"))
    save_checkpoint(
        folder, config, make_params(config), generation={"max_new_tokens": 24, "diffusion": {"threshold": 0.3}},
        tokenizer_files=source,
    )  # fmt: skip
    return folder


def eager_engine(config: ModelConfig, params: dict[str, torch.Tensor]) -> Engine:
    return Engine(EagerDenoiser(params, config), config, byte_codec())


def test_load_and_generate_with_the_eager_executor(checkpoint: Path) -> None:
    with Engine.load(checkpoint, executor="eager", num_threads=1) as engine:
        result = engine.generate("hello", ignore_eos=True, record=True)
        assert result.record.executor == "eager" and result.usage.completion_tokens == 24
        assert result.record.settings["threshold"] == 0.3
        assert engine.generate("hello", ignore_eos=True).token_ids == result.token_ids
        with pytest.raises(UnknownOptionError, match="executor"):
            Engine.load(checkpoint, executor="eagre")


def test_k03_recorded_states_replay_through_logits(checkpoint: Path) -> None:
    """`engine.logits` on a recorded state gives the step's own entropies: context, canvas and residual are complete."""
    with Engine.load(checkpoint, executor="eager", num_threads=1) as engine:
        result = engine.generate("replay", ignore_eos=True, record=True, commit_rule="steps", max_tokens=24)
        final = [*result.record.prompt_token_ids, *(int(token) for block in result.record.blocks for token in block)]
        for state in result.record.states:
            logits = engine.logits(final[: state.start], state.canvas_L.tolist(), state.residual_LD)
            logits[:, MASK] = -np.inf
            probs = np.exp(logits - logits.max(axis=1, keepdims=True))
            probs /= probs.sum(axis=1, keepdims=True)
            entropy = -(probs * np.log(np.where(probs > 0, probs, 1))).sum(axis=1)
            np.testing.assert_allclose(entropy, state.entropy_L, atol=1e-4)
        assert len(result.record.states) == 24 and result.record.states[1].residual_LD is not None


@pytest.mark.parametrize("noise", ["mask", "uniform"])
def test_k05_eager_requests_do_not_see_each_other(
    noise: str, make_params: Callable[..., dict[str, torch.Tensor]]
) -> None:
    config = tiny_config(diffusion={"noise": noise})
    params = make_params(config)
    used = eager_engine(config, params)
    draw = np.random.default_rng(1)
    for _ in range(4):
        used.generate(draw.integers(0, 256, 60).tolist(), max_tokens=8)
        prompt = draw.integers(0, 256, 20).tolist()
        assert same_answer(
            used.generate(prompt, max_tokens=16), eager_engine(config, params).generate(prompt, max_tokens=16)
        )


def test_k12_a_head_wider_than_the_tokenizer() -> None:
    """Ids beyond the tokenizer are never finalised at high temperature, in neither canvas nor answer."""
    config = tiny_config(vocab_size=320, diffusion={"noise": "uniform"})

    def biased(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        logits = np.zeros((len(canvas), 320), dtype=np.float32)
        logits[:, [300, 319]] = 20.0
        return logits

    denoiser = ScriptedDenoiser(biased, vocab_size=320)
    engine = Engine(denoiser, config, byte_codec())
    for seed in range(5):
        result = engine.generate("x", temperature=2.0, seed=seed, max_tokens=32, ignore_eos=True)
        assert max(result.token_ids) < VOCAB_SIZE
    assert max(canvas.max() for canvas in denoiser.forwarded) < VOCAB_SIZE


def test_k12_holes_of_the_vocabulary_are_never_drawn() -> None:
    """A vocabulary with a gap: ids in the gap have no text."""
    raw = json.loads(byte_codec().tokenizer.to_str())
    del raw["model"]["vocab"]["A"]
    script = answering([65] * 40, confidence=0.999)
    engine = Engine(ScriptedDenoiser(script), tiny_config(), TextCodec(Tokenizer.from_str(json.dumps(raw))))
    for temperature in (0, 1):
        assert 65 not in engine.generate("x", temperature=temperature, seed=1, max_tokens=16).token_ids
    with pytest.raises(UsageError, match="holds id 65 at position 1, which the tokenizer has no token for"):
        engine.generate([66, 65])


def test_k56_a_mask_that_is_text_is_refused() -> None:
    """An ordinary token as the mask: a prompt that contains its text would hold a hole."""
    with pytest.raises(CheckpointError, match="mask_token_id 65 is 'A', an ordinary token of the tokenizer"):
        scripted_engine(hashed, config=tiny_config(diffusion={"mask_token_id": 65}))
    nothing = TextCodec(Tokenizer(models.BPE(vocab={}, merges=[])))
    with pytest.raises(CheckpointError, match="no token with a row"):
        Engine(ScriptedDenoiser(hashed), tiny_config(), nothing)


@pytest.mark.parametrize("count", [None, -1, True, 1.5, "2", VOCAB_SIZE + 1])
def test_numbers_of_logprobs_that_cannot_be(count: Any) -> None:
    engine, _ = scripted_engine(hashed)
    with pytest.raises(UsageError, match="num_top_logprobs"):
        engine.stream("x", tokens=True, num_top_logprobs=count)


def test_arguments_of_logits_and_load_that_cannot_be(checkpoint: Path) -> None:
    engine, _ = scripted_engine(hashed)
    with pytest.raises(UsageError, match="without tokens=True"):
        engine.stream("x", num_top_logprobs=2)
    for ids in (None, "ab", 5):
        with pytest.raises(UsageError, match="context_ids"):
            engine.logits(ids, [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="canvas_ids is empty"):
        engine.logits([1], [])
    for residual in (np.ones((2, 4)), np.full((1, 4), np.nan), np.ones(4)):
        with pytest.raises(UsageError, match="residual"):
            engine.logits([1], [2], residual=residual)
    for threads in (0, -1, True, "2", 1.5, 10**9, 10**5000):
        with pytest.raises(UsageError, match="num_threads"):
            Engine.load(checkpoint, num_threads=threads)  # type: ignore[arg-type]
    for executor in (None, [], "gpu"):
        with pytest.raises(UnknownOptionError, match="unknown executor"):
            Engine.load(checkpoint, executor=executor)  # type: ignore[arg-type]


def test_k20_a_checkpoint_whose_own_settings_are_wrong_is_refused_at_load() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: unknown commit_rule 'unmask_all'"):
        scripted_engine(hashed, config=tiny_config(diffusion={"commit_rule": "unmask_all"}))
    with pytest.raises(UsageError, match="auto-regressive"):
        scripted_engine(hashed, config=dataclasses.replace(tiny_config(), diffusion=None))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    row = ("dlmrt.eager.executor", "no_such_package", "pip install 'dlmrt[train]'")
    monkeypatch.setattr(engine_module, "EXECUTORS", {"eager": row})
    monkeypatch.setattr(engine_module, "AUTO", ("eager",))
    for executor in ("auto", "eager"):
        with pytest.raises(MissingDependencyError, match=r"dlmrt\[train\]"):
            Engine.load(checkpoint, executor=executor)


def test_eos_ids_of_both_files_end_an_answer() -> None:
    engine, _ = scripted_engine(
        answering([*encode_bytes("ab!cd"), END_OF_TEXT]), generation_defaults={"eos_token_id": [ord("!")]}
    )
    assert engine.generate("x").text == "ab"
