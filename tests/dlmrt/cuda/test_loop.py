"""The whole loop as one captured graph equals the slow loop, token for token and forward for forward.

The graph is captured on the stand-in driver and executed there, kernels run in Triton's interpreter: everything but
the device itself is what runs on a GPU. Each family and each rule runs once; DLMRT_TEST_CUDA_MATRIX=all runs each rule
on each family.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from pairs_cuda import (
    ADAPTER,
    FAMILIES,
    UNIFORM_SHIFTED,
    assert_same,
    draw_params,
    fast,
    make_cuda,
    make_eager,
    request_for,
    slow,
    small_config,
)
from stand_in import GraphRunner

import dlmrt.cuda.executor
import dlmrt.decode.loop
import dlmrt.decode.native
import dlmrt.program.denoiser
from dlmrt.cuda import programs
from dlmrt.cuda.runners import Launches
from dlmrt.decode.loop import GivenDraws, StepEvent
from dlmrt.decode.native import run_loop
from dlmrt.errors import NonFiniteError

# The interpreter is slow, and slower where it shares a machine.
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("small_chunks")]

PROMPT = np.arange(3, 9)
FROM_0 = {"block_anchor": "position_zero", "context_attention": "block_causal"}
EDITS = {"mask_token_id": 256, "delete_token_id": 100, "split_token_id": 101}
QWEN3 = {
    "qwen3": small_config(),
    "qwen3, residual": small_config(residual=ADAPTER),
    "qwen3, whole blocks from 0": small_config(**FROM_0),
    "qwen3, uniform noise, shifted": small_config(**UNIFORM_SHIFTED),
    "qwen3, causal canvas": small_config(in_block_attention="causal"),
}
CONFIGS = (
    QWEN3
    | FAMILIES
    | {
        "qwen3, whole blocks from 0, shifted": small_config(**FROM_0, logit_shift=1),
        "qwen3, edits": small_config(**FROM_0, **EDITS),
    }
)
RULES = {
    "threshold": {"threshold": 0.3},
    "joint_threshold": {"threshold": 0.2, "edit_threshold": 0.1, "max_post_edit_steps": 2},
    "entropy_bound": {"entropy_bound": 1.0},
    "steps": {},
    "sub_blocks": {"threshold": 0.1, "sub_block_length": 2},
    "joint_threshold_indel": {"threshold": 0.1, "edit_threshold": 0.0, "max_post_edit_steps": 5},
}
GREEDY = {"temperature": 0}
DRAWN = {"temperature": 0.9, "seed": 11}
FILTERED = {"temperature": 0.8, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}

SAMPLE = [
    ("qwen3, residual", "threshold", GREEDY, 6, 4),
    ("qwen3, whole blocks from 0", "joint_threshold", DRAWN, 6, 4),
    ("qwen3, whole blocks from 0, shifted", "sub_blocks", DRAWN, 6, 4),
    ("qwen3, edits", "joint_threshold_indel", DRAWN, 6, 12),
    ("qwen3, uniform noise, shifted", "entropy_bound", FILTERED, 4, 2),
    ("qwen3, causal canvas", "steps", GREEDY, 6, 4),
    ("llada2, groups of experts", "joint_threshold", GREEDY, 4, 2),
    ("diffusion_gemma", "entropy_bound", DRAWN, 3, 2),
]
MATRIX = [
    (config, rule, DRAWN if (i + j) % 2 else GREEDY, 5, 2)
    for i, config in enumerate(CONFIGS) for j, rule in enumerate(RULES)
    if rule != "joint_threshold_indel" or CONFIGS[config].diffusion.delete_token_id is not None
] + SAMPLE  # fmt: skip
SCENARIOS = MATRIX if os.environ.get("DLMRT_TEST_CUDA_MATRIX") == "all" else SAMPLE


def settings_of(rule, draw, *, max_tokens, max_steps):
    return RULES[rule] | draw | {"commit_rule": rule, "max_tokens": max_tokens, "max_denoising_steps": max_steps}


@pytest.mark.parametrize(
    ("name", "rule", "draw", "max_tokens", "max_steps"), SCENARIOS,
    ids=["; ".join((name, rule, " ".join(draw))) for name, rule, draw, *_ in SCENARIOS],
)  # fmt: skip
def test_the_captured_loop_equals_the_slow_loop(name, rule, draw, max_tokens, max_steps, runners):
    config = CONFIGS[name]
    params = draw_params(config)
    settings = settings_of(rule, draw, max_tokens=max_tokens, max_steps=max_steps)
    request = request_for(config, PROMPT, **settings)
    denoiser = make_cuda(config, params)
    assert_same(fast(denoiser, request), slow(make_eager(config, params), request))
    assert runners[-1].driver.num_launches == 1


def test_launches_of_one_block_each_go_on_where_the_last_one_stopped(runners, monkeypatch):
    """And the runner that launches kernel by kernel does the same."""
    config = small_config()
    params = draw_params(config)
    request = request_for(config, PROMPT, max_tokens=6, temperature=0, threshold=0.0, max_denoising_steps=4)
    monkeypatch.setattr(dlmrt.cuda.executor, "MIN_SLOTS", 7)
    denoiser = make_cuda(config, params)
    expected = slow(make_eager(config, params), request)
    assert_same(fast(denoiser, request), expected)
    assert runners[-1].driver.num_launches == 2
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: Launches(steps))
    denoiser._store._programs.clear()
    assert_same(fast(denoiser, request), expected)


def test_conditions_that_kernels_of_their_own_set_decide_the_same(monkeypatch):
    """What runs where the driver cannot load a kernel that sets a condition."""
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: GraphRunner(steps, is_direct=False))
    config = small_config()
    params = draw_params(config)
    request = request_for(config, PROMPT, max_tokens=4, temperature=0, threshold=0.3, max_denoising_steps=3)
    assert_same(fast(make_cuda(config, params), request), slow(make_eager(config, params), request))


def test_logits_that_are_not_finite_end_the_request_with_an_error_and_the_next_one_is_right(runners):
    config = small_config()
    params = draw_params(config)
    denoiser = make_cuda(config, params)
    (embedding,) = [weight for (name, *_), weight in denoiser._store._weights.items() if name.endswith("embed_tokens")]
    prompt = np.array([11, 250, 4, 9])
    settings = {"max_tokens": 4, "temperature": 0, "max_denoising_steps": 2}
    sound, kept = request_for(config, PROMPT[:4], **settings), embedding.values[250].clone()
    embedding.values[250] = float("nan")  # a row of the table, so the prompt decides what is not finite
    with pytest.raises(NonFiniteError, match="block 0, step 0"):
        fast(denoiser, request_for(config, prompt, **settings))
    embedding.values[250] = kept
    assert_same(fast(denoiser, sound), slow(make_eager(config, params), sound))


@pytest.mark.parametrize("is_banned", [False, True])
def test_one_logit_that_is_not_finite_is_judged_alike_by_both_loops(is_banned, runners):
    """It fails the request; of a banned id it is nobody's."""
    config = replace(small_config(), tie_word_embeddings=False)
    params = draw_params(config)
    params["lm_head.weight"][config.diffusion.mask_token_id if is_banned else 30, 3] = -np.inf
    request = request_for(config, PROMPT[:4], max_tokens=4, temperature=0, threshold=0.3, max_denoising_steps=2)
    both = ((slow, make_eager(config, params)), (fast, make_cuda(config, params)))
    if is_banned:
        expected, found = (run(denoiser, request) for run, denoiser in both)
        assert_same(found, expected)
        return
    for run, denoiser in both:
        with pytest.raises(NonFiniteError, match=r"block 0, step 0, slots \[0, 1, 2, 3\]"):
            run(denoiser, request)


def test_a_request_that_was_cancelled_before_its_first_forward_runs_none(runners):
    config = small_config()
    request = request_for(config, PROMPT[:4], max_tokens=4, temperature=0)
    request.cancel.set()
    *_, last = fast(make_cuda(config, draw_params(config)), request)
    assert last.end_reason == "cancelled" and not last.forwards


def test_a_cancelled_loop_ends_before_its_next_forward_with_what_is_final(runners):
    """The flag is set while the device runs: no later block is begun, and the next request is whole."""
    config = small_config()
    params = draw_params(config)
    settings = {"temperature": 0, "threshold": 0.0, "max_denoising_steps": 2}
    request = request_for(config, PROMPT[:4], max_tokens=4000, **settings)
    denoiser = make_cuda(replace(config, max_position_embeddings=8192), params)
    events = []
    for event in run_loop(denoiser, request, wants_steps=True):
        events.append(event)
        if isinstance(event, StepEvent):
            request.cancel.set()
    assert events[-1].end_reason == "cancelled"
    assert sum(isinstance(event, StepEvent) for event in events) < 20, "the loop went on"
    assert int(denoiser._store._programs[next(reversed(denoiser._store._programs))].scalars.read("block_idx")) < 20
    after = request_for(config, PROMPT[:4], max_tokens=4, **settings)
    assert_same(fast(denoiser, after), slow(make_eager(config, params), after))


def test_given_draws_take_the_place_of_random_ones(runners):
    """A recorded run, whatever drew it: the same canvases and tokens in both loops."""
    config = small_config(**UNIFORM_SHIFTED)
    params = draw_params(config)
    rng = np.random.default_rng(7)
    token_NSL, noise_NSL = (rng.integers(0, config.vocab_size - 8, (2, 3, 4)).astype(np.int32) for _ in range(2))
    request = replace(
        request_for(
            config, PROMPT, max_tokens=6, temperature=0.8, commit_rule="entropy_bound", entropy_bound=1.0,
            max_denoising_steps=3,
        ),
        given=GivenDraws(token_NSL=token_NSL, noise_NSL=noise_NSL),
    )  # fmt: skip
    events = fast(make_cuda(config, params), request)
    assert_same(events, slow(make_eager(config, params), request))
    first = next(event for event in events if isinstance(event, StepEvent))
    np.testing.assert_array_equal(first.state.canvas_L, noise_NSL[0, 0])
    np.testing.assert_array_equal(first.prediction.token_L, token_NSL[0, 0])
