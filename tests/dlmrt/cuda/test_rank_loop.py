"""Captured loops of several ranks equal the slow loop of one process; a cancel and the loss of a rank end all of them.

Every rank captures the loop of its part on a stand-in driver of its own; ranks are threads of this process whose
launches take turns (`ranks_cuda`). Vocabularies, heads and experts do not divide by the number of ranks.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from pairs_cuda import (
    ADAPTER,
    GEMMA,
    LLADA2,
    MOE,
    UNIFORM_SHIFTED,
    assert_same,
    draw_params,
    fast,
    make_eager,
    request_for,
    slow,
    small_config,
)
from ranks_cuda import Machine, Ranks, Stopped
from test_loop import DRAWN, EDITS, FILTERED, FROM_0, GREEDY, PROMPT, settings_of

from dlmrt.cuda import programs
from dlmrt.cuda.launches import Launch
from dlmrt.decode.loop import StepEvent, decode
from dlmrt.decode.native import is_native, run_loop
from dlmrt.errors import DeviceError, OutOfMemoryError

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("small_chunks", "runners")]

ODD = 263  # ids: a multiple of neither 2 nor 3; parts begin at ids that are no multiple of 4
CONFIGS = {
    "qwen3, residual": small_config(residual=ADAPTER),
    "qwen3, uniform noise, shifted": small_config(**UNIFORM_SHIFTED),
    "qwen3, whole blocks from 0, shifted": small_config(**FROM_0, logit_shift=1),
    "qwen3, edits": small_config(**FROM_0, **EDITS),
    "llada2, 10 experts": replace(LLADA2, moe=replace(MOE, num_experts=10, num_groups=5)),
    "diffusion_gemma": replace(GEMMA, moe=replace(GEMMA.moe, num_experts=5)),
}
SAMPLE = [
    ("qwen3, residual", "threshold", GREEDY, 6, 4, 3),
    ("llada2, 10 experts", "joint_threshold", DRAWN, 4, 2, 3),
    ("qwen3, uniform noise, shifted", "entropy_bound", FILTERED, 4, 2, 2),
]
REST = [
    ("diffusion_gemma", "entropy_bound", DRAWN, 3, 2, 2),
    ("qwen3, edits", "joint_threshold_indel", DRAWN, 6, 12, 2),
    ("qwen3, whole blocks from 0, shifted", "sub_blocks", DRAWN, 6, 4, 2),
]
SCENARIOS = SAMPLE + REST if os.environ.get("DLMRT_TEST_CUDA_MATRIX") == "all" else SAMPLE


def odd(config, size):
    """`config` with sizes that `size` does not divide, but enough heads."""
    sliding = config.sliding and replace(config.sliding, full_num_kv_heads=size + 1)
    return replace(
        config, vocab_size=ODD, num_heads=size + 1, num_kv_heads=1, intermediate_size=37, sliding=sliding
    )  # fmt: skip


@pytest.fixture
def machine_of(monkeypatch):
    """Makes the machine on whose ranks all launches of the test run."""

    def make(size, **how):
        machine = Machine(size, **how)
        monkeypatch.setattr(Launch, "run", lambda launch, handle=None: machine.run(launch, handle))
        return machine

    return make


def assert_all_decided_alike(ranks):
    """Canvas, answer and place of the loop are those of rank 0, on every rank."""
    ranks.settle()
    first, *others = (part._loop for part in ranks.parts)
    for other in others:
        for name in ("canvas", "answer", "entropy", "confidence"):
            assert first.states[name].equal(other.states[name]), name
        for name in ("block_idx", "step", "end_reason", "context"):
            assert first.scalars.read(name) == other.scalars.read(name), name


@pytest.mark.parametrize(
    ("name", "rule", "draw", "max_tokens", "max_steps", "size"), SCENARIOS,
    ids=["; ".join((name, rule, " ".join(draw), str(size))) for name, rule, draw, _, _, size in SCENARIOS],
)  # fmt: skip
def test_captured_loops_of_ranks_equal_the_slow_loop(name, rule, draw, max_tokens, max_steps, size, machine_of):
    config = odd(CONFIGS[name], size)
    params = draw_params(config)
    request = request_for(config, PROMPT, **settings_of(rule, draw, max_tokens=max_tokens, max_steps=max_steps))
    expected = slow(make_eager(config, params), request)
    ranks = Ranks(config, params, machine_of(size))
    with ranks as leader:
        assert is_native(leader, request)
        assert_same(fast(leader, request), expected)
        assert_all_decided_alike(ranks)
    assert not any(ranks.errors)


def test_single_calls_are_those_of_one_process_and_a_cancel_ends_all_ranks_at_one_step(machine_of):
    """The flag is rank 0's; the request after it is whole."""
    config = odd(small_config(residual=ADAPTER), 2)
    params = draw_params(config)
    settings = {"temperature": 0, "threshold": 0.0, "max_denoising_steps": 2}
    request = request_for(config, PROMPT[:4], max_tokens=400, **settings)
    after = request_for(config, PROMPT[:4], max_tokens=4, **settings)
    ranks, alone = Ranks(config, params, machine_of(2)), make_eager(config, params)
    with ranks as leader:
        probs = np.random.default_rng(5).dirichlet(np.ones(ODD), 4).astype(np.float32)
        canvas, z = np.arange(4, dtype=np.int32), alone.soft_embedding(probs)
        np.testing.assert_allclose(leader.soft_embedding(probs), z, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(leader.forward(canvas, z, None), alone.forward(canvas, z, None), atol=2e-5)
        events = []
        for event in run_loop(leader, request, wants_steps=True):
            events.append(event)
            if isinstance(event, StepEvent):
                request.cancel.set()
        assert events[-1].end_reason == "cancelled"
        assert ranks.parts[0]._loop.scalars.read("block_idx") < 20, "the loop went on"
        assert_all_decided_alike(ranks)
        assert_same(fast(leader, after), slow(alone, after))
    assert not any(ranks.errors)


@pytest.mark.parametrize(("place", "stop"), [("prefill", 2), ("a step", 12)])
def test_a_rank_that_stops_ends_the_others_with_its_name(place, stop, machine_of):
    """Nobody hangs, nothing is shown of the step in which it was lost, and the next call is refused."""
    config = odd(small_config(), 3)
    params = draw_params(config)
    request = request_for(config, PROMPT, max_tokens=60, temperature=0, threshold=0.0)
    expected = decode(make_eager(config, params), request)
    ranks = Ranks(config, params, machine_of(3, stops=(1, stop)))
    with ranks as leader:
        events = run_loop(leader, request)
        with pytest.raises(DeviceError, match="rank 1 of 3 did not come"):
            for event in events:
                assert_same([event], [next(expected)])
        with pytest.raises(DeviceError, match="rank 1 of 3 did not come"):
            leader.reset()
    assert isinstance(ranks.errors[1], Stopped)
    assert isinstance(ranks.errors[2], DeviceError) and "rank 1 of 3" in str(ranks.errors[2])


def test_what_one_rank_has_no_memory_for_is_refused_on_all_and_the_next_request_is_answered(machine_of, monkeypatch):
    """Its device is full, or its part of what ranks tell each other has no room: by its number and those of memory."""
    config = replace(odd(small_config(), 2), max_position_embeddings=1 << 16)
    params = draw_params(config)
    settings = {"temperature": 0, "threshold": 0.0, "max_denoising_steps": 2}
    request = request_for(config, PROMPT[:4], max_tokens=4, **settings)
    long = request_for(config, PROMPT[:4], max_tokens=40_000, **settings)
    expected = slow(make_eager(config, params), request)
    machine = machine_of(2)
    ranks = Ranks(config, params, machine)
    with ranks as leader:
        full = {1: 1_000_000}
        monkeypatch.setattr(
            programs, "available_bytes",
            lambda device: full.get(int(threading.current_thread().name.replace("MainThread", "0"))),
        )  # fmt: skip
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match=r"the part of rank 1 needs [\d,]{9,} bytes .* 1,000,000 "):
                fast(leader, long)
            assert_same(fast(leader, request), expected)
        full.clear()
        machine.limits[1] = 0
        monkeypatch.setattr("dlmrt.cuda.comm.GRAIN", 16)
        for part in ranks.parts:
            part._store.peers.num_bytes = 16  # as if all before had been small
        filtered = request_for(config, PROMPT[:4], max_tokens=4, **settings | FILTERED)
        with pytest.raises(OutOfMemoryError, match=r"rank 1 has no [\d,]+ bytes for what ranks tell .* out of memory"):
            fast(leader, filtered)
        assert_same(fast(leader, request), expected)
        assert [part._store.capacity for part in ranks.parts] == [1024] * 2
    assert not any(ranks.errors)
