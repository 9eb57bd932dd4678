"""Rollouts: capture changes no token, the choice of states is fair and repeatable, engines side by side agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.decode.engine import Engine
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.errors import UsageError
from dlmrt.types import DecodeConfig
from orl.errors import StaleRolloutError
from orl.rollout import RolloutPool, RolloutRequest, Trajectory, request_seed, reservoir_slot
from orl.tasks import get_task

DECODE = DecodeConfig(temperature=1.0, max_tokens=20, ignore_eos=True)
REQUESTS = [
    RolloutRequest(problem=get_task("spell_backward").problem(n), number=n, response_idx=r)
    for n in range(3) for r in range(2)
]  # fmt: skip


@pytest.fixture(scope="module")
def model(make_recipe, make_model) -> tuple[Any, dict[str, np.ndarray]]:
    config, params = make_model(make_recipe(model={"logit_shift": 1}))
    return config, {name: tensor.detach().numpy() for name, tensor in params.items()}


@pytest.fixture(scope="module", params=["eager", "cpu"])
def make_engine(request, model, codec) -> Callable[..., Engine]:
    def make(params: dict[str, np.ndarray] | None = None) -> Engine:
        config, given_params = model
        params = params or given_params
        if request.param == "cpu":
            native = pytest.importorskip("dlmrt.cpu.executor")
            return Engine(native.CpuDenoiser(params, config, num_threads=1), config, codec)
        return Engine(EagerDenoiser({n: torch.tensor(v) for n, v in params.items()}, config), config, codec)

    return make


def make_pool(engines: list[Engine], *, per_block: int = 2) -> RolloutPool:
    return RolloutPool(engines, DECODE, per_block=per_block, seed=1)


def assert_same(first: Trajectory, second: Trajectory) -> None:
    assert first.result.token_ids == second.result.token_ids
    assert (first.seed, first.number, first.response_idx) == (second.seed, second.number, second.response_idx)
    for block, other in zip(first.blocks, second.blocks, strict=True):
        assert (block.kept_steps, block.start, block.num_answer) == (other.kept_steps, other.start, other.num_answer)
        for name in ("ids_L", "canvas_KL", "is_unresolved_KL", "committed_KL", "entropy_KL", "argmax_KL",
                     "confidence_KL", "temperature_K", "residual_NLD"):  # fmt: skip
            np.testing.assert_array_equal(getattr(block, name), getattr(other, name), err_msg=name)


def test_capture_changes_no_token_and_keeps_whole_blocks(make_engine, model):
    """K03: what was captured is what a record of the same request holds, also right of the answer's end."""
    engine = make_engine()
    for trajectory in make_pool([engine]).roll_out(REQUESTS[:2], policy_version=0):
        prompt = list(trajectory.result.record.prompt_token_ids)
        plain = engine.generate(prompt, DECODE, seed=trajectory.seed)
        recorded = engine.generate(prompt, DECODE, seed=trajectory.seed, record=True)
        assert plain.token_ids == recorded.token_ids == trajectory.result.token_ids
        assert [len(b.ids_L) for b in trajectory.blocks] == [model[0].diffusion.canvas_length] * 3
        for block, ids in zip(trajectory.blocks, recorded.record.blocks, strict=True):
            np.testing.assert_array_equal(block.ids_L, ids)
        assert sum(b.num_answer for b in trajectory.blocks) == len(plain.token_ids)
        for block_idx, block in enumerate(trajectory.blocks):
            states = [s for s in recorded.record.states if s.block_idx == block_idx]
            assert len(states) == len(block.canvas_KL)
            assert len(block.kept_steps) == 1 + min(2, len(states) - 1)
            for state in states:
                np.testing.assert_array_equal(block.canvas_KL[state.step], state.canvas_L)
                np.testing.assert_array_equal(block.entropy_KL[state.step], state.entropy_L)
                np.testing.assert_array_equal(block.is_unresolved_KL[state.step], state.is_unresolved_L)
                assert block.temperature_K[state.step] == np.float32(state.temperature)
            for at, step in enumerate(block.kept_steps[1:]):
                np.testing.assert_array_equal(block.residual_NLD[at], states[step].residual_LD)


def test_engines_side_by_side_give_the_answers_of_one(make_engine):
    alone = make_pool([make_engine()]).roll_out(REQUESTS, policy_version=0)
    with make_pool([make_engine() for _ in range(3)]) as pool:
        together = pool.roll_out(REQUESTS, policy_version=0)
    for first, second in zip(alone, together, strict=True):
        assert_same(first, second)
    answers = [t.result.token_ids for t in alone]
    assert len(set(answers)) == len(answers), "every answer has its own seed"


def test_published_weights_are_those_of_a_fresh_engine(make_engine, model):
    """In place, without the disk; the version travels with every trajectory."""
    rng = np.random.default_rng(3)
    changed = {
        name: (values * (1 + 0.3 * rng.standard_normal(values.shape))).astype(np.float32)
        for name, values in model[1].items()
    }
    pool = make_pool([make_engine()])
    before = pool.roll_out(REQUESTS[:2], policy_version=0)
    pool.publish(changed, 1)
    with pytest.raises(StaleRolloutError, match="hold version 1 of the weights and version 0"):
        pool.roll_out(REQUESTS[:2], policy_version=0)
    after = pool.roll_out(REQUESTS[:2], policy_version=1)
    fresh = make_pool([make_engine(changed)]).roll_out(REQUESTS[:2], policy_version=0)
    for first, second in zip(after, fresh, strict=True):
        assert_same(first, second)
    assert [t.policy_version for t in after] == [1, 1]
    assert [t.result.token_ids for t in after] != [t.result.token_ids for t in before]
    pool.publish(model[1], 2)
    for first, second in zip(before, pool.roll_out(REQUESTS[:2], policy_version=2), strict=True):
        assert_same(first, second)


def test_weights_of_another_model_are_refused(make_engine, model):
    engine, (_, params) = make_engine(), model
    name = "model.norm.weight"
    for wrong in (
        {k: v for k, v in params.items() if k != name},
        {**params, "model.extra.weight": params[name]},
        {**params, name: params[name][:-1]},
    ):
        with pytest.raises(UsageError, match=r"tensor model\.\w+\.weight is missing, extra or of another shape"):
            engine.assign(wrong)


@given(seed=st.integers(0, 2**53 - 1), num_steps=st.integers(1, 40), capacity=st.integers(0, 6))
def test_reservoir_is_full_and_holds_distinct_steps(seed: int, num_steps: int, capacity: int):
    held: dict[int, int] = {}
    for step in range(1, num_steps + 1):
        slot = reservoir_slot(seed, block=0, step=step, capacity=capacity)
        assert slot == reservoir_slot(seed, block=0, step=step, capacity=capacity)
        if slot is not None:
            held[slot] = step
    assert sorted(held) == list(range(min(capacity, num_steps)))


def test_reservoir_keeps_every_step_equally_often():
    """Within 4 sigma of K / n over 3,000 seeds."""
    num, steps, capacity = 3000, 12, 3
    counts = np.zeros(steps + 1)
    for seed in range(num):
        held = {}
        for step in range(1, steps + 1):
            slot = reservoir_slot(seed, block=seed % 5, step=step, capacity=capacity)
            if slot is not None:
                held[slot] = step
        counts[list(held.values())] += 1
    share = capacity / steps
    assert np.abs(counts[1:] / num - share).max() < 4 * math.sqrt(share * (1 - share) / num)


def test_seeds_differ_by_problem_and_answer():
    seeds = {request_seed(run, request) for run in range(3) for request in REQUESTS}
    assert len(seeds) == 3 * len(REQUESTS)
    assert all(0 <= seed < 1 << 53 for seed in seeds)
