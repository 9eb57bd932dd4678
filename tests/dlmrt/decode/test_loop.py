"""The loop through a scripted denoiser: ends, regions, residual, counts, cancellation. Ids in names: known faults."""

from __future__ import annotations

import itertools
import threading
import zlib
from typing import Any

import numpy as np
import pytest

from dlmrt.decode.loop import BlockEvent, LoopRequest, StepEvent, decode
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import resolve
from dlmrt.errors import NonFiniteError
from dlmrt.models.config import ModelConfig, ResidualConfig
from dlmrt.testing import (
    END,
    END_OF_TEXT,
    MASK,
    VOCAB_SIZE,
    RequestView,
    ScriptedDenoiser,
    answering,
    encode_bytes,
    peaked,
    scripted_engine,
    tiny_config,
)
from dlmrt.types import DecodeConfig, Float32, Int32

SDAR_LIKE = {"context_attention": "block_causal", "block_anchor": "position_zero"}


def flat(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
    return np.zeros((len(canvas), VOCAB_SIZE), dtype=np.float32)


def hashed(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
    """Logits that depend on every id the model sees, mildly peaked; text bytes only."""
    seed = zlib.crc32(canvas.tobytes() + b"|" + view.context_S.tobytes())
    logits = np.random.default_rng(seed).normal(size=(len(canvas), VOCAB_SIZE)) * 2
    logits[:, 128:] -= 50
    return logits.astype(np.float32)


def loop_events(
    denoiser: ScriptedDenoiser, config: ModelConfig, prompt: list[int], *, cancel: threading.Event | None = None,
    **fields: Any,
) -> list[Any]:  # fmt: skip
    assert config.diffusion is not None
    banned = banned_ids(config, range(VOCAB_SIZE))
    request = LoopRequest(
        prompt_S=np.array(prompt, dtype=np.int32), settings=resolve(DecodeConfig(**fields), config, {}),
        diffusion=config.diffusion, banned=banned, cancel=cancel or threading.Event(),
        allowed=np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), banned),
    )  # fmt: skip
    return list(decode(denoiser, request))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("offset", range(1, 32))
def test_k02_eos_inside_a_block(offset: int, streamed: bool) -> None:
    answer = [*encode_bytes("abcdefghijklmnopqrstuvwxyz0123456789"[:offset]), END, *encode_bytes("Z" * 40)]
    engine, denoiser = scripted_engine(answering(answer), config=tiny_config(diffusion={"canvas_length": 32}))
    *events, result = engine.stream("x", max_tokens=96)
    text = "".join(event.text for event in events) if streamed else result.text
    assert text == bytes(answer[:offset]).decode() and "Z" not in text
    assert (result.finish_reason, result.usage.completion_tokens) == ("stop", offset + 1)
    assert len(denoiser.forwarded) == 1 and result.usage.num_commit_forwards == 0


def test_k03_the_record_keeps_whole_blocks_right_of_eos() -> None:
    """EOS at offset 3, some of 4..7 decided with it, others still open; every consumed state can be rebuilt."""
    config = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=4))
    answer = [*encode_bytes("abc"), END, *encode_bytes("zzzz")]
    confidence = np.array([0.99, 0.99, 0.5, 0.99, 0.99, 0.99, 0.4, 0.3], dtype=np.float32)
    engine, denoiser = scripted_engine(
        lambda canvas, positions, step, view: peaked(answer, positions - view.num_prompt, confidence=confidence),
        config=config, has_residual=True,
    )  # fmt: skip
    result = engine.generate("x", record=True)
    assert result.text == "abc" and result.token_ids == tuple(answer[:4])
    assert result.record.blocks[0].tolist() == [*answer[:6], MASK, MASK]
    assert len(result.record.states) == len(denoiser.forwarded) == 2
    for state, canvas, residual in zip(result.record.states, denoiser.forwarded, denoiser.residuals, strict=True):
        np.testing.assert_array_equal(state.canvas_L, canvas)
        assert (state.residual_LD is None) == (residual is None)
        if residual is not None:
            np.testing.assert_array_equal(state.residual_LD, residual)
    assert result.record.states[1].is_unresolved_L.tolist() == [False, False, True, False, False, False, True, True]
    assert result.record.states[1].committed_L.tolist() == [False, False, True, False, False, False, False, False]
    assert [forward.num_finalised for forward in result.record.forwards if forward.kind == "denoise"] == [3, 1]


def test_k09_flat_logits_end_within_the_budget() -> None:
    engine, _ = scripted_engine(flat, config=tiny_config(diffusion={"canvas_length": 32}))
    result = engine.generate("x", threshold=0.99, max_tokens=96)
    assert result.finish_reason == "length" and result.usage.completion_tokens == 96
    denoise = [forward for forward in result.record.forwards if forward.kind == "denoise"]
    assert len(denoise) <= 96 and all(forward.num_finalised >= 1 for forward in denoise)
    assert result.usage.num_commit_forwards == 2


@pytest.mark.parametrize("noise", ["mask", "uniform"])
@pytest.mark.parametrize("rule", ["threshold", "joint_threshold", "entropy_bound", "steps"])
@pytest.mark.parametrize("script", [flat, hashed])
def test_k64_k09_every_rule_on_every_noise(noise: str, rule: str, script: Any) -> None:
    """Finalised tokens sum to the answer, each rule ends, no mask is left (K15, K20)."""
    engine, denoiser = scripted_engine(script, config=tiny_config(diffusion={"noise": noise}))
    for length in (1, 7, 8, 19):
        result = engine.generate("prompt", commit_rule=rule, max_tokens=length, temperature=0, ignore_eos=True)
        assert result.usage.completion_tokens == len(result.token_ids) == length
        assert sum(forward.num_finalised for forward in result.record.forwards) == length
        assert MASK not in result.token_ids
        assert result.usage.num_blocks == -(-length // 8) == result.usage.num_commit_forwards + 1
    assert all(np.isin(canvas, np.arange(VOCAB_SIZE)).all() for canvas in denoiser.forwarded)


def test_k16_each_request_has_its_own_schedule() -> None:
    """Block 8 with 8 steps, then block 16 with 4 steps on the same engine."""
    engine, _ = scripted_engine(flat)
    one = engine.generate("x", commit_rule="steps", canvas_length=8, max_denoising_steps=8, max_tokens=16)
    assert [forward.num_finalised for forward in one.record.forwards if forward.kind == "denoise"] == [1] * 16
    four = engine.generate("x", commit_rule="steps", canvas_length=16, max_denoising_steps=4, max_tokens=32)
    assert [forward.num_finalised for forward in four.record.forwards if forward.kind == "denoise"] == [4] * 8


def test_k15_confidence_rising_to_the_right_strands_no_mask() -> None:
    def rising(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        return peaked([65] * 99, positions, confidence=np.linspace(0.1, 0.8, len(canvas)).astype(np.float32))

    engine, _ = scripted_engine(rising)
    result = engine.generate("x", commit_rule="steps", max_tokens=16, record=True)
    assert result.text == "A" * 16 and all(MASK not in block for block in result.record.blocks)


@pytest.mark.parametrize("rule", ["threshold", "steps", "joint_threshold", "entropy_bound"])
def test_k22_eos_first_at_the_right_end_ends_nothing(rule: str) -> None:
    """The model is surest of EOS at the right end; the answer still has all that comes before."""
    answer = [*encode_bytes("hello"), END, END, END]

    def backwards(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        return peaked(answer, positions - 1, confidence=np.linspace(0.3, 0.89, 8).astype(np.float32))

    engine, denoiser = scripted_engine(backwards)
    result = engine.generate("x", commit_rule=rule, temperature=0)
    assert result.text == "hello" and result.token_ids == tuple(answer[:6])
    if rule in ("threshold", "steps"):
        assert len(denoiser.forwarded) == 8 and denoiser.forwarded[1].tolist() == [MASK] * 7 + [END]


def test_an_answer_ends_as_soon_as_all_before_eos_is_decided() -> None:
    """Nothing right of the stop token is waited for."""
    answer = [*encode_bytes("ab"), END]

    def left_first(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        return peaked(answer, positions - 1, confidence=np.linspace(0.89, 0.3, 8).astype(np.float32))

    engine, _ = scripted_engine(left_first)
    result = engine.generate("x")
    assert result.text == "ab" and result.usage.num_denoise_steps == 3


def test_ignore_eos_and_stop_token_ids() -> None:
    answer = [*encode_bytes("ab"), END, *encode_bytes("cdXef")]
    engine, _ = scripted_engine(answering(answer))
    past = engine.generate("x", ignore_eos=True, max_tokens=8)
    assert (past.text, past.finish_reason, past.usage.completion_tokens) == ("abcdXef", "length", 8)
    stopped = engine.generate("x", ignore_eos=True, max_tokens=8, stop_token_ids=(ord("X"),))
    assert (stopped.text, stopped.record.end_reason) == ("abcd", "stop_token")
    assert stopped.token_ids == tuple(answer[:6]) and stopped.finish_reason == "stop"


@pytest.mark.parametrize("anchor", ["prompt_end", "position_zero"])
@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9, 16, 21])
@pytest.mark.parametrize("rule", ["threshold", "joint_threshold", "entropy_bound", "steps"])
def test_k01_k24_k25_context_and_prompt_region(anchor: str, num_prompt: int, rule: str) -> None:
    """Prompt tokens are processed once, the context only ever holds final ids, pinned slots never change."""
    config = tiny_config(diffusion=SDAR_LIKE if anchor == "position_zero" else {})
    prompt = [10 + n % 7 for n in range(num_prompt)]
    denoiser = ScriptedDenoiser(hashed)
    contexts: list[list[int]] = []
    denoiser.script = lambda canvas, positions, step, view: (
        contexts.append(view.context_S.tolist()) or hashed(canvas, positions, step, view)  # type: ignore[func-returns-value]
    )
    events = loop_events(denoiser, config, prompt, commit_rule=rule, max_tokens=20, temperature=0, ignore_eos=True)
    blocks = [event for event in events if isinstance(event, BlockEvent)]
    start = num_prompt // 8 * 8 if anchor == "position_zero" else num_prompt
    assert [block.start for block in blocks] == [start + 8 * n for n in range(len(blocks))]
    final = prompt[:start] + [int(token) for block in blocks for token in block.ids_L]
    assert final[:num_prompt] == prompt
    answer = [token for block in blocks for token in block.answer]
    assert final[num_prompt : num_prompt + 20] == answer and len(answer) == 20
    committed = [token for ids in denoiser.extended for token in ids.tolist()]
    assert committed == final[: len(committed)] and len(committed) == start + 8 * (len(blocks) - 1)
    for context, canvas in zip(contexts, denoiser.forwarded, strict=True):
        assert context == final[: len(context)]
        in_block = max(0, num_prompt - len(context))
        assert canvas[:in_block].tolist() == prompt[len(context) :] and MASK not in context
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert not any(step.state.is_unresolved_L[step.after.is_pinned_L].any() for step in steps)


def test_k01_a_prompt_equal_to_the_mask_is_no_hole() -> None:
    """The region is a length: even an id equal to the mask inside the pinned part is left alone."""
    denoiser = ScriptedDenoiser(hashed)
    events = loop_events(
        denoiser, tiny_config(diffusion=SDAR_LIKE), [MASK, 65, MASK], max_tokens=5, commit_rule="joint_threshold",
        edit_threshold=0.0,
    )  # fmt: skip
    assert isinstance(events[-1], BlockEvent) and events[-1].ids_L[:3].tolist() == [MASK, 65, MASK]
    assert all(canvas[:3].tolist() == [MASK, 65, MASK] for canvas in denoiser.forwarded)


def test_prefill_comes_in_chunks_of_whole_blocks() -> None:
    config = tiny_config(max_position_embeddings=4096, diffusion={"canvas_length": 48})
    denoiser = ScriptedDenoiser(answering([END]))
    loop_events(denoiser, config, [65] * 1100, max_tokens=4)
    assert [len(ids) for ids in denoiser.extended] == [480, 480, 140]


@pytest.mark.parametrize("where", ["all", "masked"])
@pytest.mark.parametrize("noise", ["mask", "uniform"])
def test_residual_is_the_last_prediction_of_the_same_block(where: str, noise: str) -> None:
    residual = ResidualConfig(kind="gated_mlp", where=where, intermediate_size=4)  # type: ignore[arg-type]
    config = tiny_config(diffusion={"noise": noise}, residual=residual)
    denoiser = ScriptedDenoiser(hashed, has_residual=True)
    events = loop_events(denoiser, config, [65], max_tokens=16, temperature=0.7, seed=3, ignore_eos=True)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert len(steps) == len(denoiser.residuals) > 4
    for before, step, z, rows in zip([None, *steps], steps, denoiser.residuals, denoiser.wheres, strict=False):
        if before is None or before.state.block_idx != step.state.block_idx:
            assert z is None and rows is None and step.state.residual_LD is None
            continue
        np.testing.assert_array_equal(z, before.prediction.probs_LV)
        np.testing.assert_array_equal(step.state.residual_LD, z)
        assert z[:, MASK].max() == 0 if noise == "mask" else z[:, MASK].max() > 0
        if where == "all":
            assert rows is None
        else:
            np.testing.assert_array_equal(rows, step.state.is_unresolved_L)


def test_residual_can_be_left_out() -> None:
    config = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=4))
    denoiser = ScriptedDenoiser(hashed, has_residual=True)
    loop_events(denoiser, config, [65], max_tokens=8, use_residual=False)
    assert all(z is None for z in denoiser.residuals)
    plain = ScriptedDenoiser(hashed, has_residual=False)
    loop_events(plain, config, [65], max_tokens=8)
    assert all(z is None for z in plain.residuals)


def test_uniform_noise_is_fresh_each_step_and_kept_where_decided() -> None:
    denoiser = ScriptedDenoiser(flat)
    loop_events(denoiser, tiny_config(diffusion={"noise": "uniform"}), [65], max_tokens=8, commit_rule="steps")
    canvases = denoiser.forwarded
    for step, (before, after) in enumerate(itertools.pairwise(canvases), start=1):
        assert after[:step].tolist() == [0] * step  # flat logits decide id 0, from the left
        assert (after[step:] != before[step:]).any()


def test_k11_nan_fails_one_request_only() -> None:
    def broken_once(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        logits = answering([*encode_bytes("twelve bytes"), END])(canvas, positions, step, view)
        if view.request_idx == 1 and len(view.context_S) > view.num_prompt:
            logits[2, 5] = np.nan
        return logits

    engine, _ = scripted_engine(broken_once)
    first = engine.generate("x")
    with pytest.raises(NonFiniteError, match="block 1, step 0"):
        engine.generate("x")
    assert engine.generate("x").token_ids == first.token_ids and first.text == "twelve bytes"


def test_cancelled_before_a_forward_returns_what_is_final() -> None:
    """Sticky rules keep the decided prefix; the counts still sum (K64)."""
    cancel = threading.Event()

    def slow(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        if len(view.context_S) > view.num_prompt and step == 2:
            cancel.set()
        return flat(canvas, positions, step, view)

    denoiser = ScriptedDenoiser(slow)
    events = loop_events(denoiser, tiny_config(), [65], max_tokens=100, cancel=cancel)
    last = events[-1]
    assert isinstance(last, BlockEvent) and last.end_reason == "cancelled" and len(last.answer) == 3
    assert sum(forward.num_finalised for forward in last.forwards) == 3 and len(denoiser.forwarded) == 8 + 3


def test_cancelled_before_it_began() -> None:
    cancel = threading.Event()
    cancel.set()
    denoiser = ScriptedDenoiser(flat)
    events = loop_events(denoiser, tiny_config(), [65] * 50, cancel=cancel)
    assert isinstance(events[-1], BlockEvent) and events[-1].end_reason == "cancelled" and not events[-1].answer
    assert not denoiser.forwarded and not denoiser.extended


def test_k14_through_the_loop() -> None:
    """Junk at step 1, then Paris for ever: the junk is never committed."""
    answer = [*encode_bytes("Paris"), END]

    def script(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        return peaked(encode_bytes("junkjunk") if step == 0 else answer, positions - view.num_prompt, confidence=0.9999)

    for stability, steps in ((1, 3), (2, 4)):
        engine, _ = scripted_engine(script, config=tiny_config(diffusion={"noise": "uniform"}))
        result = engine.generate("x", commit_rule="entropy_bound", stability_threshold=stability, temperature=0)
        assert (result.text, result.usage.num_denoise_steps) == ("Paris", steps)
        assert [forward.num_finalised for forward in result.record.forwards[1:]] == [0, 6] + [0] * (steps - 2)


def test_edits_are_counted_and_shown_only_when_the_block_is_done() -> None:
    """joint_threshold: a decided slot may change later, so no text leaves before; each token has one last forward."""
    first, last = encode_bytes("abcdefgh"), [*encode_bytes("abXdefg"), END]

    def script(canvas: Int32, positions: Int32, step: int, view: RequestView) -> Float32:
        return peaked(first if step == 0 else last, positions - view.num_prompt, confidence=0.99)

    denoiser = ScriptedDenoiser(script)
    events = loop_events(
        denoiser, tiny_config(), [65], commit_rule="joint_threshold", threshold=0.5, edit_threshold=0.9
    )
    settled = [event.num_settled for event in events if isinstance(event, StepEvent)]
    block = events[-1]
    assert isinstance(block, BlockEvent) and settled == [0, 0, 8] and bytes(block.answer[:7]) == b"abXdefg"
    assert [forward.num_finalised for forward in block.forwards] == [6, 2, 0]
    assert [forward.num_edits for forward in block.forwards] == [0, 2, 0]


def test_pad_right_of_the_stop_token_is_neither_shown_nor_counted() -> None:
    engine, _ = scripted_engine(answering([*encode_bytes("ok"), END, *[END_OF_TEXT] * 5]))
    result = engine.generate("x", record=True)
    assert result.text == "ok" and result.usage.completion_tokens == 3
    assert result.record.blocks[0].tolist() == [*encode_bytes("ok"), END, *[END_OF_TEXT] * 5]


@pytest.mark.parametrize("num_prompt", [1, 7, 8, 511, 512, 513, 1100])
def test_chunks_of_a_block_causal_prompt_end_where_blocks_do(num_prompt: int) -> None:
    """dLLM's A2D counts blocks from the prompt's end, so what the grid leaves over comes first."""
    config = tiny_config(diffusion={"context_attention": "block_causal"}, max_position_embeddings=2048)
    denoiser = ScriptedDenoiser(answering([END]))
    loop_events(denoiser, config, [65] * num_prompt)
    ends = np.cumsum([len(ids) for ids in denoiser.extended])
    assert ends[-1] == num_prompt and ((ends - num_prompt) % 8 == 0).all()
