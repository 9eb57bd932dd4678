"""Packed training computes exactly what its problems would compute alone, and what the decoder computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlmrt.decode.sampling import predict
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models import qwen3
from dlmrt.ops import eager as ops
from dlmrt.types import Sampling
from orl.losses import weighted_cross_entropy
from orl.objective import Batch, batch_loss
from orl.packing import CLEAN, PAD, Example, Rows, pack, problem_rows
from orl.pretrain import step_gradients
from orl.recipe import PretrainRecipe

TOLERANCE = 1e-5
VARIANTS = pytest.mark.parametrize(
    ("kind", "self_condition", "logit_shift"),
    [
        ("mask", False, 0), ("mask", True, 0), ("mask", True, 1), ("uniform", False, 1), ("uniform", True, 0),
        ("ar", False, 0),
    ],
)  # fmt: skip


@pytest.fixture
def consumed_z(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every z that a forward was given."""
    seen: list[Tensor] = []
    forward = qwen3.forward

    def watched(*arguments: Any, z: Tensor | None = None, **options: Any) -> Tensor:
        if z is not None:
            seen.append(z)
        return forward(*arguments, z=z, **options)

    monkeypatch.setattr(qwen3, "forward", watched)
    return seen


def noise_for(recipe: PretrainRecipe, noise: Any) -> Any:
    mask_token_id = noise.mask_token_id if recipe.objective.kind == "mask" else None
    return dataclasses.replace(noise, mask_token_id=mask_token_id, logit_shift=recipe.model.logit_shift)


def rows_of(recipe: PretrainRecipe, noise: Any, examples: Sequence[Example]) -> list[Rows]:
    return [problem_rows(example, recipe.objective, noise_for(recipe, noise), 0) for example in examples]


def gradients(params: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in params.items()}
    for tensor in params.values():
        tensor.grad = None
    return found


def loss_and_gradients(
    params: dict[str, Tensor], config: Any, batches: Sequence[Sequence[Rows]], *, self_condition: bool,
    denominator: float,
) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    total = 0.0
    for bins in batches:
        loss, _ = batch_loss(params, config, Batch(bins), self_condition=self_condition, denominator=denominator)
        loss.backward()
        total += loss.item()
    return total, gradients(params)


def assert_close(first: tuple[float, dict[str, Tensor]], second: tuple[float, dict[str, Tensor]]) -> None:
    assert first[0] == pytest.approx(second[0], abs=TOLERANCE)
    for name, gradient in first[1].items():
        worst = (gradient - second[1][name]).abs().max().item()
        assert worst <= TOLERANCE, f"{name} differs by {worst}"


@VARIANTS
def test_packed_equals_one_by_one(
    make_recipe, make_model, make_examples, tiny_noise, kind: str, self_condition: bool, logit_shift: int
):
    recipe = make_recipe(objective={"kind": kind, "prompt_weight": 0.25}, model={"logit_shift": logit_shift})
    config, params = make_model(recipe)
    alone = rows_of(recipe, tiny_noise, make_examples(7))
    denominator = float(sum(rows.weights.sum() for rows in alone))
    bins = pack(alone, 200)
    assert len(bins) < len(alone)
    assert any((rows.copy == PAD).any() for rows in bins)
    packed = loss_and_gradients(params, config, [bins], self_condition=self_condition, denominator=denominator)
    single = loss_and_gradients(
        params, config, [[rows] for rows in alone], self_condition=self_condition, denominator=denominator
    )
    assert packed[0] > 1
    assert packed[1][qwen3.EMBEDDING].abs().max() > 1e-3
    assert_close(packed, single)


@VARIANTS
def test_padding_ids_have_no_influence(
    make_recipe, make_model, make_examples, tiny_noise, kind: str, self_condition: bool, logit_shift: int
):
    """K55: random ids in place of padding leave loss and gradients bit-equal."""
    recipe = make_recipe(objective={"kind": kind}, model={"logit_shift": logit_shift})
    config, params = make_model(recipe)
    (bin_,) = pack(rows_of(recipe, tiny_noise, make_examples(2)), 200)
    is_padding = bin_.copy == PAD
    assert is_padding.sum() > 10
    random_ids = np.random.default_rng(0).integers(4, 299, size=len(bin_.ids)).astype(np.int32)
    other = dataclasses.replace(bin_, ids=np.where(is_padding, random_ids, bin_.ids))
    runs = [
        loss_and_gradients(params, config, [[rows]], self_condition=self_condition, denominator=3.0)
        for rows in (bin_, other)
    ]
    assert runs[0][0] == runs[1][0]
    for name, gradient in runs[0][1].items():
        assert torch.equal(gradient, runs[1][1][name]), name


@pytest.mark.parametrize("self_conditioning_p", [0.0, 1.0])
def test_gradient_accumulation_does_not_change_the_step(
    make_recipe, make_model, make_examples, tiny_noise, self_conditioning_p: float
):
    """K54: 8 micro-batches of 1 equal 1 of 8."""
    runs = []
    for bins_per_micro in (1, 8):
        recipe = make_recipe(
            objective={"self_conditioning_p": self_conditioning_p},
            optim={"bins_per_step": 8, "bins_per_micro": bins_per_micro},
        )
        config, params = make_model(recipe)
        bins = pack(rows_of(recipe, tiny_noise, make_examples(28)), 150)[:8]
        assert len(bins) == 8
        entry = step_gradients(params, config, recipe, bins, 0)
        assert entry["denominator"] == pytest.approx(sum(rows.weights.sum(dtype=np.float64) for rows in bins))
        runs.append((entry["loss"], gradients(params)))
    assert_close(*runs)


def test_loss_by_hand():
    """K54: sum of w * CE over the sum of weights of the whole step."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [0.0, 3.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.25, 2.0])
    by_hand = sum(
        w * (np.log(np.exp(row).sum()) - row[target])
        for w, row, target in zip((1.0, 0.25, 2.0), logits.numpy(), (0, 2, 1), strict=True)
    )
    loss = weighted_cross_entropy(logits, torch.tensor([0, 2, 1]), weights, denominator=0.5)
    assert loss.item() == pytest.approx(by_hand / 0.5, rel=1e-6)
    assert loss.dtype == torch.float32
    assert weighted_cross_entropy(logits[:0], torch.empty(0), weights[:0], denominator=0.0).item() == 0


@VARIANTS
def test_batch_with_a_wholly_padded_bin_is_finite(
    make_recipe, make_model, make_examples, tiny_noise, kind: str, self_condition: bool, logit_shift: int
):
    """K26: also where nothing but padding is in the batch."""
    recipe = make_recipe(objective={"kind": kind}, model={"logit_shift": logit_shift})
    config, params = make_model(recipe)
    (bin_,) = pack(rows_of(recipe, tiny_noise, make_examples(1)), 200)
    empty = _padding(200)
    with_empty = loss_and_gradients(params, config, [[bin_, empty]], self_condition=self_condition, denominator=3.0)
    without = loss_and_gradients(params, config, [[bin_]], self_condition=self_condition, denominator=3.0)
    assert_close(with_empty, without)
    loss, found = loss_and_gradients(params, config, [[empty]], self_condition=self_condition, denominator=0.0)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in found.values())


def _padding(length: int) -> Rows:
    zeros = np.zeros(length, dtype=np.int32)
    return Rows(
        problem=zeros - 1, ids=zeros, positions=zeros, segment=zeros - 1, copy=np.full(length, PAD, dtype=np.int32),
        block_start=zeros, targets=zeros, predicted_by=np.arange(length, dtype=np.int32),
        weights=np.zeros(length, dtype=np.float32), is_unresolved=np.zeros(length, dtype=np.bool_),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["mask", "uniform", "ar"])
def test_batch_without_any_target_has_loss_zero_and_zero_gradients(
    make_recipe, make_model, make_examples, tiny_noise, kind: str
):
    """K57: empty answers, prompts only."""
    recipe = make_recipe(objective={"kind": kind})
    config, params = make_model(recipe)
    prompts = [Example(number=e.number, prompt_ids=e.prompt_ids, response_ids=()) for e in make_examples(4)]
    bins = pack(rows_of(recipe, tiny_noise, prompts), 100)
    for self_condition in (False, kind != "ar"):
        loss, found = loss_and_gradients(params, config, [bins], self_condition=self_condition, denominator=0.0)
        assert loss == 0
        assert all((gradient == 0).all() for gradient in found.values())


def test_no_gradient_through_z_and_one_into_the_adapter(
    make_recipe, make_model, make_examples, tiny_noise, consumed_z: list[Tensor]
):
    """The gradient is that of a forward whose z is a constant: not even the soft embedding's table gets a share."""
    recipe = make_recipe()
    config, params = make_model(recipe)
    batch = Batch(pack(rows_of(recipe, tiny_noise, make_examples(3)), 150))
    loss, _ = batch_loss(params, config, batch, self_condition=True, denominator=9.0)
    loss.backward()
    two_pass = gradients(params)
    (z,) = consumed_z
    assert not z.requires_grad
    assert z[batch.is_noisy].abs().max() > 0.1
    assert (z[~batch.is_noisy] == 0).all()
    hidden = qwen3.forward(
        ops, params, config, batch.ids, batch.positions, batch.attend(config), z=z.clone(), where=batch.is_noisy
    )
    counted = batch.weights > 0
    logits = qwen3.head(ops, params, config, hidden[counted])
    weighted_cross_entropy(logits, batch.targets[counted], batch.weights[counted], denominator=9.0).backward()
    for name, gradient in gradients(params).items():
        assert torch.equal(gradient, two_pass[name]), name
    for part in ("norm", "gate_proj", "up_proj", "down_proj"):
        assert two_pass[f"{qwen3.ADAPTER}{part}.weight"].abs().max() > 1e-5


def test_self_conditioning_under_autocast_reaches_every_weight(make_recipe, make_model, make_examples, tiny_noise):
    """Weights cast in the pass without gradient must not be reused, cast, by the pass with gradient."""
    recipe = make_recipe(run={"dtype": "bfloat16"}, objective={"self_conditioning_p": 1.0})
    config, params = make_model(recipe)
    bins = pack(rows_of(recipe, tiny_noise, make_examples(4)), 150)
    step_gradients(params, config, recipe, bins, 0)
    for name, gradient in gradients(params).items():
        assert gradient.dtype == torch.float32
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("kind", ["mask", "uniform"])
@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("logit_shift", [0, 1])
def test_canvas_rows_equal_what_the_decoder_computes(
    make_recipe, make_model, make_examples, tiny_noise, kind: str, has_z: bool, logit_shift: int
):
    """Logits that predict a canvas in the packed layout == the executor's behind prompt and earlier clean blocks."""
    recipe = make_recipe(objective={"kind": kind}, model={"logit_shift": logit_shift})
    config, params = make_model(recipe)
    examples = make_examples(4, seed=3)
    length, num_canvases, worst = config.diffusion.canvas_length, 0, 0.0
    generator = torch.Generator().manual_seed(5)
    denoiser = EagerDenoiser({name: p.detach() for name, p in params.items()}, config)
    for bin_ in pack(rows_of(recipe, tiny_noise, examples), 200):
        batch = Batch([bin_])
        z = torch.randn(1, 200, config.hidden_size, generator=generator) if has_z else None
        with torch.no_grad():
            hidden = qwen3.forward(
                ops, params, config, batch.ids, batch.positions, batch.attend(config), z=z, where=batch.is_noisy
            )
            everything = torch.ones_like(batch.is_noisy)
            logits = qwen3.head(ops, params, config, batch.predictors(hidden, everything)).numpy()
        canvases = {(s, c, b) for s, c, b in zip(bin_.segment, bin_.copy, bin_.block_start, strict=True) if c >= 0}
        for segment, copy, start in sorted(canvases):
            at = np.flatnonzero((bin_.segment == segment) & (bin_.copy == copy) & (bin_.block_start == start))
            clean = bin_.ids[(bin_.segment == segment) & (bin_.copy == CLEAN)]
            denoiser.reset()
            denoiser.extend(clean[:start])
            z_L = None if z is None else z[0, at].numpy()
            expected = denoiser.forward(bin_.ids[at], z_L, None)
            assert len(at) == length
            worst = max(worst, float(np.abs(logits[at] - expected).max()))
            num_canvases += 1
    assert num_canvases > 8
    assert worst <= TOLERANCE, worst


@pytest.mark.parametrize("logit_shift", [0, 1])
def test_two_pass_z_is_what_the_decoder_feeds_back(
    make_recipe, make_model, make_examples, tiny_noise, consumed_z: list[Tensor], logit_shift: int
):
    """z of the first pass == soft embedding of what decoding predicts for that canvas at T = 1, without banned ids."""
    recipe = make_recipe(objective={"kind": "uniform"}, model={"logit_shift": logit_shift})
    config, params = make_model(recipe)
    (bin_,) = pack(rows_of(recipe, tiny_noise, make_examples(2, seed=3)), 300)
    batch = Batch([bin_])
    ids = np.array([0, 5, config.vocab_size - 1], dtype=np.int32)
    banned = torch.isin(torch.arange(config.vocab_size), torch.from_numpy(ids))
    batch_loss(params, config, batch, self_condition=True, denominator=1.0, banned=banned)
    (z,) = consumed_z
    denoiser = EagerDenoiser({name: p.detach() for name, p in params.items()}, config)
    start = int(bin_.block_start[(bin_.segment == 0) & (bin_.copy == 1)].min())
    at = np.flatnonzero((bin_.segment == 0) & (bin_.copy == 1) & (bin_.block_start == start))
    denoiser.extend(bin_.ids[(bin_.segment == 0) & (bin_.copy == CLEAN)][:start])
    sampling = Sampling(temperature=1.0, is_greedy=True, seed=0)
    prediction = predict(
        denoiser.forward(bin_.ids[at], None, None), sampling, ids, block=0, step=0, with_probs=True
    )  # fmt: skip
    assert prediction.probs_LV is not None
    expected = denoiser.soft_embedding(prediction.probs_LV)
    np.testing.assert_allclose(z[0, at].numpy(), expected, atol=TOLERANCE)
