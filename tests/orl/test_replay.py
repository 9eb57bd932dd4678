"""Replay equals what the decoder saw; packed equals one by one; sharding changes nothing. Random weights, fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlmrt.decode.engine import Engine
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models import qwen3
from dlmrt.types import DecodeConfig
from orl import gradients
from orl.losses import log_probs, state_losses
from orl.packing import Share, balance, pack_shares
from orl.replay import (
    ReplayBatch,
    ReplayResponse,
    gate,
    packed_logits,
    reference_logits,
    replay_response,
    state_weights,
)
from orl.rollout import RolloutPool, RolloutRequest, Trajectory
from orl.tasks import get_task
from orl.train_recipe import LossSection, TrainRecipe, TrainRunSection, UpdateSection

SECTION = LossSection(gate="all", kl_weight=0.5, aec_weight=3.0)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mask": ("mask", {}, {}),
    "shifted": ("mask", {"logit_shift": 1}, {}),
    "masked residual": ("mask", {"residual": {"where": "masked"}}, {}),
    "causal block": ("mask", {"in_block_attention": "causal"}, {}),
    "block-causal, grid from the prompt's end": ("mask", {"context_attention": "block_causal"}, {}),
    "block-causal, grid from 0": (
        "mask", {"context_attention": "block_causal", "block_anchor": "position_zero"}, {}
    ),
    "edits": ("mask", {}, {"commit_rule": "joint_threshold", "edit_threshold": 0.02, "threshold": 0.05}),
    "uniform": ("uniform", {}, {"entropy_bound": 4.0, "max_denoising_steps": 5}),
    "no residual": ("mask", {}, {"use_residual": False}),
}  # fmt: skip


@pytest.fixture(scope="module")
def roll_out(make_recipe, make_model, codec) -> Callable[..., tuple[Any, dict[str, Tensor], Engine, list[Trajectory]]]:
    """Config, weights, engine and trajectories of `num` answers of two or three blocks."""

    def make(case: str = "mask", *, num: int = 3, per_block: int = 2, executor: str = "eager", workers: int = 1) -> Any:
        kind, changes, options = CASES[case]
        config, params = make_model(make_recipe(objective={"kind": kind}))
        diffusion = config.diffusion
        residual = dataclasses.replace(diffusion.residual, **changes.get("residual", {}))
        config = dataclasses.replace(
            config, diffusion=dataclasses.replace(diffusion, **{**changes, "residual": residual})
        )
        engines = [Engine(make_denoiser(executor, params, config), config, codec) for _ in range(workers)]
        decode = DecodeConfig(**{"temperature": 1.0, "max_tokens": 20, "ignore_eos": True, **options})
        pool = RolloutPool(engines, decode, per_block=per_block, seed=5)
        requests = [
            RolloutRequest(problem=get_task("spell_backward").problem(n), number=n, response_idx=r)
            for n in range(num) for r in range(2)
        ]  # fmt: skip
        return config, params, engines[0], pool.roll_out(requests, policy_version=0)

    return make


def make_denoiser(executor: str, params: dict[str, Tensor], config: Any) -> Any:
    if executor == "eager":
        return EagerDenoiser({name: tensor.detach().clone() for name, tensor in params.items()}, config)
    native = pytest.importorskip("dlmrt.cpu.executor")
    return native.CpuDenoiser({name: t.detach().numpy() for name, t in params.items()}, config, num_threads=1)


def everything(responses: Sequence[ReplayResponse]) -> list[Share]:
    return [Share(response=i, states=tuple(range(len(r.states)))) for i, r in enumerate(responses)]


def banned_of(engine: Engine) -> Tensor:
    banned = torch.zeros(engine.config.vocab_size, dtype=torch.bool)
    banned[torch.from_numpy(engine._banned).long()] = True
    return banned


def loss_and_gradients(
    params: dict[str, Tensor], config: Any, responses: Sequence[ReplayResponse], bins: Sequence[Sequence[Share]],
    banned: Tensor, *, logits_of: Callable[..., Tensor] = packed_logits,
) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    """As the trainer does it: weights over the whole update, then gradients added over micro-batches."""
    weights = state_weights(responses, "response")
    start = {name: tensor.detach() * 1.01 for name, tensor in params.items()}
    total = 0.0
    for tensor in params.values():
        tensor.grad = None
    for shares in bins:
        batch = ReplayBatch(responses, weights, shares, config)
        with torch.no_grad():
            reference = log_probs(logits_of(start, batch), banned)
        losses = state_losses(logits_of(params, batch), batch, SECTION, banned=banned, reference_RV=reference)
        losses.loss.backward()
        total += float(losses.loss)
    return total, {name: tensor.grad.clone() for name, tensor in params.items() if tensor.grad is not None}


def assert_close(first: tuple[float, dict[str, Tensor]], second: tuple[float, dict[str, Tensor]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(second[1][name], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1e-3), msg=name)


@pytest.mark.parametrize("executor", ["eager", "cpu"])
@pytest.mark.parametrize("case", list(CASES))
def test_replayed_logits_are_those_of_the_engine(roll_out, case: str, executor: str):
    """Every kept state, all slots: inputs as recorded, logits within 1e-5 of what the decoder computed."""
    if executor == "cpu" and "prompt's end" in case:
        pytest.skip("the cpu executor refuses it")
    config, params, engine, trajectories = roll_out(case, executor=executor, num=2)
    num_with_residual = 0
    for trajectory in trajectories:
        response = replay_response(trajectory, SECTION)
        whole = dataclasses.replace(
            response,
            states=tuple(dataclasses.replace(s, is_anchored_L=np.ones_like(s.is_open_L)) for s in response.states),
        )
        batch = ReplayBatch([whole], [1.0], everything([whole]), config)
        logits = torch.unflatten(packed_logits(params, batch).detach(), 0, (len(whole.states), -1)).numpy()
        for state, found in zip(batch.states, logits, strict=True):
            num_with_residual += state.residual_LD is not None
            wanted = engine.logits(response.clean_S[: state.start], state.canvas_L, state.residual_LD)
            np.testing.assert_allclose(found, wanted, atol=1e-5 * max(1.0, float(np.abs(wanted).max())))
    assert bool(num_with_residual) == (case != "no residual")


@pytest.mark.parametrize("case", ["shifted", "uniform"])
def test_recorded_entropy_is_that_of_the_replayed_state(roll_out, case: str):
    """The alarm for stale or inexact states reads 0 for fresh ones, also where temperatures fall; else more."""
    config, params, engine, trajectories = roll_out(case)
    temperatures = {float(t) for trajectory in trajectories for b in trajectory.blocks for t in b.temperature_K}
    assert (len(temperatures) > 1) == (case == "uniform")
    responses = [replay_response(t, SECTION) for t in trajectories]
    batch = ReplayBatch(responses, state_weights(responses, "response"), everything(responses), config)
    banned = banned_of(engine)

    def gap(weights: dict[str, Tensor]) -> float:
        losses = state_losses(packed_logits(weights, batch), batch, SECTION, banned=banned, reference_RV=None)
        total, count = losses.recorded_gap(batch, float(np.log(int((~banned).sum()))))
        assert count == int(batch.is_open_R.sum()) > 0
        return total / count

    assert gap(params) < 1e-5
    assert gap({name: tensor * 1.1 for name, tensor in params.items()}) > 1e-3


@pytest.mark.parametrize("case", list(CASES))
def test_packed_equals_each_state_alone(roll_out, case: str):
    config, params, engine, trajectories = roll_out(case)
    responses = [replay_response(t, SECTION) for t in trajectories]
    banned = banned_of(engine)
    alone = loss_and_gradients(
        params, config, responses,
        [[Share(response=i, states=(s,))] for i, r in enumerate(responses) for s in range(len(r.states))],
        banned, logits_of=reference_logits,
    )  # fmt: skip
    packed = loss_and_gradients(params, config, responses, [everything(responses)], banned)
    assert_close(alone, packed)
    adapter = [name for name in alone[1] if name.startswith(qwen3.ADAPTER)]
    assert all(alone[1][name].any() for name in adapter)
    assert bool(adapter) == (case != "no residual")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 90, 10_000])
def test_budget_and_ranks_change_neither_loss_nor_gradient(roll_out, budget: int, num_ranks: int):
    """K54: weights are counted before packing and sharding."""
    config, params, engine, trajectories = roll_out("shifted")
    responses = [replay_response(t, SECTION) for t in trajectories]
    banned = banned_of(engine)
    bins = pack_shares(
        [len(r.clean_S) for r in responses], [len(r.states) for r in responses], canvas_length=8, budget=budget
    )
    whole = loss_and_gradients(params, config, responses, [everything(responses)], banned)
    ranks = [
        loss_and_gradients(params, config, responses, [bins[i] for i in rank], banned)
        for rank in balance([float(len(shares)) for shares in bins], num_ranks)
    ]
    gradients: dict[str, Tensor] = {}
    for _, found in ranks:
        for name, gradient in found.items():
            gradients[name] = gradients.get(name, 0) + gradient
    assert_close(whole, (sum(loss for loss, _ in ranks), gradients))


def test_recorded_gap_of_an_update_does_not_depend_on_packing(roll_out, monkeypatch):
    """A mean over all open slots, not over micro-batches; the adapter's share is read from some states only."""
    config, params, engine, trajectories = roll_out("shifted")
    responses = [replay_response(t, SECTION) for t in trajectories]
    moved = {name: (tensor.detach() * 1.1).requires_grad_() for name, tensor in params.items()}
    seen: list[int] = []

    def ratio(params: Any, states: Sequence[Any], config: Any) -> float:
        seen.append(len(states))
        return 0.5

    monkeypatch.setattr(gradients, "residual_ratio", ratio)
    monkeypatch.setattr(gradients, "_MOST_RATIO_STATES", 3)
    found = [
        gradients.accumulate_gradients(
            moved, params, config, responses,
            TrainRecipe(optim=UpdateSection(rows_per_micro=rows), run=TrainRunSection(dtype="float32")),
            banned=banned_of(engine),
        )
        for rows in (1, 90, 10_000)
    ]  # fmt: skip
    assert len({entry["num_micro"] for entry in found}) == 3
    assert found[0]["recorded_entropy_gap"] > 1e-3
    for entry in found[1:]:
        assert entry["recorded_entropy_gap"] == pytest.approx(found[0]["recorded_entropy_gap"], rel=1e-5)
    assert sum(s.residual_LD is not None for r in responses for s in r.states) > 3
    assert all(1 <= count <= 3 for count in seen)


def test_no_gradient_reaches_the_residual_but_its_adapter_gets_one(roll_out):
    config, params, _, trajectories = roll_out("mask")
    response = replay_response(trajectories[0], SECTION)
    assert all(isinstance(s.residual_LD, np.ndarray) for s in response.states if s.residual_LD is not None)
    batch = ReplayBatch([response], [1.0], everything([response]), config)
    for tensor in params.values():
        tensor.grad = None
    packed_logits(params, batch).sum().backward()
    assert params[f"{qwen3.ADAPTER}down_proj.weight"].grad.any()


def test_slots_right_of_the_end_are_anchored_only(roll_out):
    """K03: the whole last block is kept, and what lies right of the answer carries no target."""
    config, _, _, trajectories = roll_out("mask")
    block = dataclasses.replace(trajectories[0].blocks[-1], num_answer=3)
    trajectory = dataclasses.replace(trajectories[0], blocks=(*trajectories[0].blocks[:-1], block))
    state = replay_response(trajectory, SECTION).states[-1]
    assert len(state.targets_L) == config.diffusion.canvas_length
    assert not state.is_open_L[3:].any()
    assert not state.is_gated_L[3:].any()
    assert state.is_anchored_L[3:].all()


def test_gates_read_recorded_entropies():
    entropy = np.array([0.5, 0.1, 0.9, 0.3, 2.0], dtype=np.float32)
    is_open = np.array([True, True, True, True, False])
    assert gate(entropy, is_open, LossSection(gate="quantile", gate_level=0.5)).tolist() == [True, False, True, False,
                                                                                             False]  # fmt: skip
    assert gate(entropy, is_open, LossSection(gate="entropy", gate_level=0.4)).tolist() == [True, False, True, False,
                                                                                            False]  # fmt: skip
    assert gate(entropy, is_open, LossSection(gate="all")).tolist() == is_open.tolist()
    assert gate(entropy, is_open, LossSection(gate="quantile", gate_level=0.0)).sum() == 1
    assert not gate(entropy, np.zeros(5, dtype=bool), LossSection(gate="quantile")).any()


def test_weights_sum_to_one_over_states_and_can_favour_prompts(roll_out):
    _, _, _, trajectories = roll_out("mask")
    responses = [replay_response(t, SECTION) for t in trajectories[:3]]  # two answers to problem 0, one to problem 1
    for norm in ("response", "prompt"):
        weights = state_weights(responses, norm)
        assert sum(w * len(r.states) for w, r in zip(weights, responses, strict=True)) == pytest.approx(1)
    per_prompt = [w * len(r.states) for w, r in zip(state_weights(responses, "prompt"), responses, strict=True)]
    assert per_prompt == pytest.approx([0.25, 0.25, 0.5])
