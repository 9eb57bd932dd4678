"""Losses of On-Policy Residual Learning: by hand on five slots, by finite differences, and in every corner case."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orl.errors import RecipeError
from orl.losses import StateLosses, aec_hinge, log_probs, normalised_entropy, state_losses
from orl.train_recipe import LossSection

VOCAB, BANNED_ID = 6, 5
BANNED = torch.arange(VOCAB) == BANNED_ID
KINDS = ["hinge_mean", "hinge_token", "log_ratio", "cap", "minent"]


def five_slots(**changes: Any) -> SimpleNamespace:
    """Two states: state 0 has slots 0-2 (2 is anchored only) and a step before it, state 1 slots 3-4 and none."""
    fields = {
        "states": [None, None],
        "weight_S": torch.tensor([0.25, 0.75], dtype=torch.float64),
        "state_R": torch.tensor([0, 0, 0, 1, 1]),
        "targets_R": torch.tensor([1, 0, 2, 3, 4]),
        "is_open_R": torch.tensor([True, True, False, True, True]),
        "is_gated_R": torch.tensor([True, False, False, True, True]),
        "is_anchored_R": torch.tensor([False, True, True, False, False]),
        "own_entropy_R": torch.full((5,), math.nan),
        "source_entropy_R": torch.tensor([0.3, 0.5, 0.1, math.nan, math.nan]),
        "source_entropy_S": torch.tensor([0.4, math.nan]),
        "own_temperature_S": torch.ones(2),
        "source_temperature_S": torch.ones(2),
    }
    return SimpleNamespace(**{**fields, **changes})


def logits(seed: int = 0) -> Tensor:
    return torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def losses_of(batch: Any, section: LossSection, *, seed: int = 0, reference: Tensor | None = None) -> StateLosses:
    return state_losses(logits(seed), batch, section, banned=BANNED, reference_RV=reference)


def probabilities(seed: int = 0) -> np.ndarray:
    values = logits(seed).numpy()[:, :BANNED_ID]
    weights = np.exp(values - values.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_terms_by_hand():
    section = LossSection(aec_weight=2.0, aec_rho=0.25, kl_weight=0.5, kl_cap=0.4)
    found = losses_of(five_slots(), section, reference=log_probs(logits(1), BANNED))
    p, q = probabilities(0), probabilities(1)
    targets = [1, 0, 2, 3, 4]
    ce = [-math.log(p[i, targets[i]]) for i in range(5)]
    entropy = -(p * np.log(p)).sum(axis=1) / math.log(5)
    kl = np.minimum((p * np.log(p / q)).sum(axis=1), 0.4)
    assert kl.max() == 0.4, "the cap is reached"
    contraction = max(0.0, (entropy[0] + entropy[1]) / 2 - 0.75 * 0.4 / math.log(5)) ** 2
    assert contraction > 0
    np.testing.assert_allclose(found.cross_entropy_S, [ce[0], (ce[3] + ce[4]) / 2], rtol=1e-12)
    np.testing.assert_allclose(found.contraction_S, [contraction, 0], rtol=1e-6)
    np.testing.assert_allclose(found.anchor_S, [(kl[1] + kl[2]) / 2, 0], rtol=1e-12)
    total = 0.25 * (ce[0] + 2 * contraction + 0.5 * (kl[1] + kl[2]) / 2) + 0.75 * (ce[3] + ce[4]) / 2
    assert float(found.loss) == pytest.approx(total, rel=1e-6)
    sums = found.sums(five_slots().weight_S)
    assert sums["ce"] + 2 * sums["aec"] + 0.5 * sums["kl"] == pytest.approx(total, rel=1e-6)


def test_example_of_the_method():
    """H 0.40 before, 0.36 after, rho 0.25: the loss is 0.0036."""
    hinge = aec_hinge(torch.tensor(0.36, dtype=torch.float64), torch.tensor(0.40, dtype=torch.float64), 0.25)
    assert float(hinge.square()) == pytest.approx(0.0036)
    assert float(aec_hinge(torch.tensor(0.29), torch.tensor(0.40), 0.25)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind: str):
    section = LossSection(aec=kind, aec_weight=3.0, kl_weight=0.5, kl_cap=10.0)
    reference = log_probs(logits(1), BANNED)
    batch = five_slots(
        source_entropy_S=torch.tensor([0.4, math.nan], dtype=torch.float64),
        source_entropy_R=torch.tensor([0.3, 0.5, 0.1, math.nan, math.nan], dtype=torch.float64),
    )

    def loss(values: Tensor) -> Tensor:
        return state_losses(values, batch, section, banned=BANNED, reference_RV=reference).loss

    assert torch.autograd.gradcheck(loss, logits().requires_grad_(), eps=1e-6, atol=1e-7)
    values = logits().requires_grad_()
    loss(values).backward()
    assert not values.grad[:, BANNED_ID].any(), "a banned id gets no gradient"
    assert values.grad.isfinite().all()


def test_forms_of_the_contraction():
    entropy = normalised_entropy(log_probs(logits(), BANNED), 5).numpy()
    is_right = logits()[:, :BANNED_ID].argmax(-1).numpy() == np.array([1, 0, 2, 3, 4])
    before = np.array([0.3, 0.5]) / math.log(5)
    token = np.mean(np.maximum(0, entropy[:2] - 0.75 * before) ** 2)
    ratio = max(0.0, math.log(entropy[:2].mean()) - math.log(0.4 / math.log(5)) - math.log(0.75)) ** 2
    cap = [entropy[s][is_right[s]].mean() if is_right[s].any() else 0.0 for s in (slice(0, 2), slice(3, 5))]
    wanted = {
        "hinge_token": [token, 0], "log_ratio": [ratio, 0], "cap": cap,
        "minent": [entropy[:2].mean(), entropy[3:].mean()],
    }  # fmt: skip
    for kind, values in wanted.items():
        found = losses_of(five_slots(), LossSection(aec=kind))
        np.testing.assert_allclose(found.contraction_S, values, rtol=1e-6, err_msg=kind)
    with pytest.raises(RecipeError, match="infinite contraction"):
        LossSection(aec="log_ratio", aec_rho=1.0)


def test_cap_judges_by_the_ids_that_may_be_predicted():
    """A banned id with the largest logit is no prediction: the decoder never commits it."""
    values, batch = logits(), five_slots(targets_R=logits()[:, :BANNED_ID].argmax(-1))
    values[:, BANNED_ID] = 50.0
    found = state_losses(values, batch, LossSection(aec="cap"), banned=BANNED, reference_RV=None)
    np.testing.assert_allclose(found.contraction_S, losses_of(batch, LossSection(aec="minent")).contraction_S)


def test_recorded_gap_counts_open_slots_with_a_record():
    batch = five_slots(own_entropy_R=torch.tensor([0.5, math.nan, 9.0, 0.2, math.nan]))
    found, entropy = losses_of(batch, LossSection()), normalised_entropy(log_probs(logits(), BANNED), 5).numpy()
    wanted = abs(entropy[0] - 0.5 / math.log(5)) + abs(entropy[3] - 0.2 / math.log(5))
    assert found.recorded_gap(batch, math.log(5)) == (pytest.approx(wanted, rel=1e-6), 2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gate": "all", "gate_level": 0.3}, "gate_level has no effect, since gate is 'all'"),
        ({"kl_weight": 0.0, "kl_cap": 2.0}, "kl_cap has no effect, since kl_weight is 0"),
        ({"aec": "minent", "aec_rho": 0.5}, "aec_rho has no effect, since aec is 'minent'"),
    ],
)
def test_a_key_that_does_nothing_is_refused(given: dict[str, Any], why: str):
    with pytest.raises(RecipeError, match=why):
        LossSection(**given)


def two_candidates(temperature: float) -> SimpleNamespace:
    """One open slot whose logits 2 and 0 were recorded at `temperature` in this step and in the one before."""
    p = 1 / (1 + math.exp(-2 / temperature))
    nats = -p * math.log(p) - (1 - p) * math.log(1 - p)
    return SimpleNamespace(
        states=[None], weight_S=torch.ones(1), state_R=torch.tensor([0]), targets_R=torch.tensor([0]),
        is_open_R=torch.tensor([True]), is_gated_R=torch.tensor([False]), is_anchored_R=torch.tensor([False]),
        own_entropy_R=torch.tensor([nats]), source_entropy_R=torch.tensor([nats]),
        source_entropy_S=torch.tensor([nats]),
        own_temperature_S=torch.tensor([temperature]), source_temperature_S=torch.tensor([temperature]),
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.0, 1.5])
@pytest.mark.parametrize("kind", ["hinge_mean", "hinge_token", "log_ratio"])
def test_entropies_are_compared_at_the_temperature_of_the_record(kind: str, temperature: float):
    """Without a change between two steps there is no contraction, whatever temperature the decoder had."""
    batch, banned = two_candidates(temperature), torch.tensor([False, False, True])
    if temperature == 0.8:
        assert float(batch.source_entropy_S) == pytest.approx(0.269, abs=1e-3)  # and 0.365 at temperature 1

    def losses(rho: float) -> StateLosses:
        section = LossSection(aec=kind, aec_rho=rho)
        return state_losses(torch.tensor([[2.0, 0.0, 5.0]]), batch, section, banned=banned, reference_RV=None)

    assert float(losses(0.0).contraction_S) == pytest.approx(0, abs=1e-10)
    asked = float(batch.source_entropy_S) / math.log(2) * 0.25
    wanted = math.log(0.75) ** 2 if kind == "log_ratio" else asked**2
    assert float(losses(0.25).contraction_S) == pytest.approx(wanted, rel=1e-4)
    assert losses(0.0).recorded_gap(batch, math.log(2)) == (pytest.approx(0, abs=1e-6), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_tempered_entropies_equal_finite_differences(kind: str):
    batch = five_slots(
        source_entropy_S=torch.tensor([0.4, 0.2], dtype=torch.float64),
        source_entropy_R=torch.tensor([0.3, 0.5, 0.1, 0.2, 0.2], dtype=torch.float64),
        source_temperature_S=torch.tensor([0.8, 0.6]), own_temperature_S=torch.tensor([0.7, 0.5]),
    )  # fmt: skip

    def loss(values: Tensor) -> Tensor:
        section = LossSection(aec=kind, aec_weight=3.0)
        return state_losses(values, batch, section, banned=BANNED, reference_RV=None).loss

    assert torch.autograd.gradcheck(loss, logits().requires_grad_(), eps=1e-6, atol=1e-7)


def test_divergence_to_the_policy_itself_is_nothing():
    """With one update a rollout the policy that rolled out cannot be the anchor: value and gradient are 0."""
    values = logits().requires_grad_()
    section = LossSection(aec_weight=0.0, kl_weight=1.0)
    batch = five_slots(is_gated_R=torch.zeros(5, dtype=torch.bool), is_anchored_R=torch.ones(5, dtype=torch.bool))
    loss = state_losses(values, batch, section, banned=BANNED, reference_RV=log_probs(logits(), BANNED)).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert float(values.grad.abs().max()) < 1e-12


def test_divergence_above_the_cap_pushes_nothing():
    values = logits().requires_grad_()
    section = LossSection(aec_weight=0.0, kl_weight=1.0, kl_cap=1e-4)
    batch = five_slots(is_gated_R=torch.zeros(5, dtype=torch.bool))
    loss = state_losses(values, batch, section, banned=BANNED, reference_RV=log_probs(logits(3), BANNED)).loss
    loss.backward()
    assert float(loss.detach()) > 0
    assert not values.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_open_or_gated_gives_zero_with_finite_gradients(kind: str):
    """K57: states whose slots are all decided, or lie right of the answer's end."""
    nothing = torch.zeros(5, dtype=torch.bool)
    batch = five_slots(is_open_R=nothing, is_gated_R=nothing, is_anchored_R=nothing)
    values = logits().requires_grad_()
    loss = state_losses(
        values, batch, LossSection(aec=kind), banned=BANNED, reference_RV=log_probs(logits(1), BANNED)
    ).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert not values.grad.any()


def test_entropy_is_normalised_over_ids_that_may_be_predicted():
    flat = log_probs(torch.zeros(1, VOCAB), BANNED)
    assert float(normalised_entropy(flat, 5)) == pytest.approx(1)
    assert float(flat[0, BANNED_ID].exp()) == 0
    sure = log_probs(torch.tensor([[100.0, 0, 0, 0, 0, 0]]), BANNED)
    assert float(normalised_entropy(sure, 5)) == pytest.approx(0, abs=1e-6)
