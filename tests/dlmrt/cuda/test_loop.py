"""The whole loop as one captured graph equals the slow loop, token for token and forward for forward.

The graph is captured on the stand-in driver and executed there, kernels run in Triton's interpreter: everything but
the device itself is what runs on a GPU.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from pairs_cuda import (
    ADAPTER,
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
from dlmrt.cuda import programs
from dlmrt.cuda.runners import Launches
from dlmrt.decode.loop import GivenDraws, StepEvent

PROMPT = np.arange(3, 9)
EDITS = {"mask_token_id": 256, "delete_token_id": 100, "split_token_id": 101, "commit_rule": "joint_threshold_indel"}

SCENARIOS = {
    "threshold, residual": ({"residual": ADAPTER}, {"temperature": 0, "threshold": 0.3}),
    "joint_threshold, sampled, whole blocks from 0": (
        {"block_anchor": "position_zero", "context_attention": "block_causal"},
        {"temperature": 0.9, "seed": 11, "commit_rule": "joint_threshold", "threshold": 0.2, "edit_threshold": 0.1,
         "max_post_edit_steps": 2},
    ),
    "entropy_bound, filtered, uniform noise, shifted": (
        UNIFORM_SHIFTED,
        {"temperature": 0.8, "seed": 5, "commit_rule": "entropy_bound", "entropy_bound": 1.0, "top_k": 20,
         "top_p": 0.9, "min_p": 0.01, "max_denoising_steps": 3},
    ),
    "sub_blocks, shifted, sampled, grid from 0": (
        {"logit_shift": 1, "block_anchor": "position_zero", "context_attention": "block_causal"},
        {"temperature": 0.7, "seed": 3, "commit_rule": "sub_blocks", "threshold": 0.1, "sub_block_length": 2},
    ),
    "joint_threshold_indel, sampled": (
        EDITS | {"block_anchor": "position_zero", "context_attention": "block_causal"},
        {"temperature": 0.7, "seed": 3, "threshold": 0.1, "edit_threshold": 0.0, "max_post_edit_steps": 5,
         "max_denoising_steps": 12},
    ),
    "steps, causal canvas": ({"in_block_attention": "causal"}, {"temperature": 0, "commit_rule": "steps"}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """The interpreter visits every program of a grid, so grids are kept small."""
    for module in (dlmrt.decode.loop, dlmrt.decode.native):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(dlmrt.cuda.executor, "MAX_ROWS", 4)


@pytest.fixture
def runners(monkeypatch):
    """Loops run on the stand-in driver; the runners that were made, in order."""
    made = []

    def make(steps, **_):
        is_loop = any(not hasattr(step, "grid") for step in steps)
        made.append(GraphRunner(steps) if is_loop else Launches(steps))
        return made[-1]

    monkeypatch.setattr(programs, "make_runner", make)
    return made


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_the_captured_loop_equals_the_slow_loop(name, runners):
    diffusion, settings = SCENARIOS[name]
    config = small_config(**diffusion)
    params = draw_params(config)
    request = request_for(config, PROMPT, max_tokens=6, **{"max_denoising_steps": 4, **settings})
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


def test_logits_that_are_not_finite_end_the_request_with_an_error(runners):
    from dlmrt.errors import NonFiniteError

    config = small_config()
    params = draw_params(config)
    params["model.norm.weight"][0] = float("nan")
    request = request_for(config, PROMPT[:4], max_tokens=4, temperature=0)
    with pytest.raises(NonFiniteError, match="block 0, step 0"):
        fast(make_cuda(config, params), request)


def test_a_request_that_was_cancelled_before_its_first_forward_runs_none(runners):
    config = small_config()
    request = request_for(config, PROMPT[:4], max_tokens=4, temperature=0)
    request.cancel.set()
    *_, last = fast(make_cuda(config, draw_params(config)), request)
    assert last.end_reason == "cancelled" and not last.forwards


def test_given_draws_take_the_place_of_random_ones(runners):
    """A recorded run, whatever drew it: the same canvases and tokens in both loops."""
    config = small_config(**UNIFORM_SHIFTED)
    params = draw_params(config)
    rng = np.random.default_rng(7)
    token_NSL, noise_NSL = (rng.integers(0, config.vocab_size - 8, (2, 3, 4)).astype(np.int32) for _ in range(2))
    request = dataclasses.replace(
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
