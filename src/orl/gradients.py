"""One update's gradients: every kept state replayed once, micro-batch by micro-batch, and what the replay says.

Weights of states are counted over the whole update first, so neither micro-batches nor ranks that share them can change
the loss. Several processes deal responses by cost (`orl.cost`) and run equally many micro-batches; one that has fewer
repeats a state with weight 0. The start model sees the same canvas and the same residual.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlmrt.models.config import ModelConfig
from orl.cost import CostModel, deal
from orl.losses import StateLosses, log_probs, state_losses
from orl.packing import Share
from orl.precision import autocast
from orl.ranks import TrainRanks
from orl.replay import ReplayBatch, ReplayResponse, packed_logits, residual_ratio, state_weights
from orl.shard import run_with
from orl.train_recipe import LossSection, TrainRecipe

_MOST_RATIO_STATES = 64  # of an update that the size of the residual's share is read from


def accumulate_gradients(
    params: Mapping[str, Tensor], reference: Mapping[str, Tensor], config: ModelConfig,
    responses: Sequence[ReplayResponse], recipe: TrainRecipe, *, banned: Tensor, ranks: TrainRanks | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Add the gradients of all states of `responses` to `params`; figures for the line of metrics.

    Args:
        reference: parameters of the start model.
        responses: of the whole update, on every process.
        banned: bool [V], ids that may not be predicted.
    """
    ranks = ranks or TrainRanks()
    weights = state_weights(responses, recipe.states.norm)
    log_num_ids = math.log(int((~banned).sum()))
    sums = dict.fromkeys(("loss", "ce", "aec", "kl"), 0.0)
    gap, num_known, num_rows = 0.0, 0, 0
    bins = _micro_batches(responses, config, recipe.optim.rows_per_micro, ranks)
    for shares in bins:
        is_own = bool(shares)
        batch = ReplayBatch(
            responses,
            weights,
            shares or [Share(response=0, states=(0,))],
            config,
            device=ranks.device,
            attention=recipe.run.attention,
        )
        if not is_own:
            batch.weight_S.zero_()
        losses = _micro_batch(params, reference, batch, recipe, banned=banned, always_residual=ranks.size > 1)
        torch.autograd.backward(losses.loss)
        if is_own:
            sums["loss"] += float(losses.loss.detach())
            for name, value in losses.sums(batch.weight_S).items():
                sums[name] += value
            more, count = losses.recorded_gap(batch, log_num_ids)
            gap, num_known, num_rows = gap + more, num_known + count, num_rows + batch.num_rows
    parts = ranks.gathered((sums, gap, num_known, num_rows))
    sums = {name: sum(part[0][name] for part in parts) for name in sums}
    gap, num_known = sum(part[1] for part in parts), sum(part[2] for part in parts)
    states = [state for r in responses for state in r.states]
    some = [state for state in states if state.residual_LD is not None]
    some = some[:: -(-len(some) // _MOST_RATIO_STATES) or 1]
    return {
        **sums,
        "aec_strength": _aec_strength(recipe.loss, sums["aec"], log_num_ids),
        "recorded_entropy_gap": gap / num_known if num_known else None,
        "residual_ratio": run_with(params, lambda p: residual_ratio(p, some, config)),
        "num_states": len(states),
        "num_rows": sum(part[3] for part in parts),
        "num_micro": len(bins),
    }


def _aec_strength(section: LossSection, aec: float, log_num_ids: float) -> float | None:
    """Size of Eq. 2's gradient on an entropy in nats, against 1 for cross-entropy; None for other contractions."""
    if section.aec != "hinge_mean":
        return None
    return 2 * section.aec_weight * math.sqrt(max(0.0, aec)) / log_num_ids


def _micro_batches(
    responses: Sequence[ReplayResponse], config: ModelConfig, budget: int, ranks: TrainRanks
) -> list[list[Share]]:
    """This process's micro-batches."""
    assert config.diffusion is not None
    cost = CostModel.of(config)
    return deal(
        [cost.response(len(r.clean_S), [state.start for state in r.states]) for r in responses],
        [len(r.clean_S) for r in responses], [len(r.states) for r in responses],
        canvas_length=config.diffusion.canvas_length, budget=budget, num_ranks=ranks.size,
    )[ranks.rank]  # fmt: skip


def _micro_batch(
    params: Mapping[str, Tensor], reference: Mapping[str, Tensor], batch: ReplayBatch, recipe: TrainRecipe,
    *, banned: Tensor, always_residual: bool,
) -> StateLosses:  # fmt: skip
    """Losses of one micro-batch under the weights being trained, anchored to the start model."""

    def logits_of(params: Mapping[str, Tensor]) -> Tensor:
        return packed_logits(params, batch, always_residual=always_residual)

    def losses_of(params: Mapping[str, Tensor]) -> StateLosses:
        return state_losses(logits_of(params), batch, recipe.loss, banned=banned, reference_RV=reference_RV)

    with autocast(recipe.run.dtype, str(batch.device)):
        reference_RV = None
        if recipe.loss.kl_weight:
            with torch.no_grad():
                reference_RV = run_with(reference, lambda p: log_probs(logits_of(p), banned))
        return run_with(params, losses_of)
