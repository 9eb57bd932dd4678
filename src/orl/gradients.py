"""One update's gradients: every kept state replayed once, micro-batch by micro-batch, and what the replay says.

Weights of states are counted over the whole update first, so neither micro-batches nor ranks that share them can change
the loss. The start model sees the same canvas and the same residual.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlmrt.models.config import ModelConfig
from orl.losses import log_probs, state_losses
from orl.packing import pack_shares
from orl.replay import ReplayBatch, ReplayResponse, packed_logits, residual_ratio, state_weights
from orl.train_recipe import TrainRecipe


def accumulate_gradients(
    params: Mapping[str, Tensor], reference: Mapping[str, Tensor], config: ModelConfig,
    responses: Sequence[ReplayResponse], recipe: TrainRecipe, *, banned: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """Add the gradients of all states of `responses` to `params`; figures for the line of metrics.

    Args:
        reference: parameters of the start model.
        banned: bool [V], ids that may not be predicted.
    """
    assert config.diffusion is not None
    weights = state_weights(responses, recipe.states.norm)
    bins = pack_shares(
        [len(response.clean_S) for response in responses], [len(response.states) for response in responses],
        canvas_length=config.diffusion.canvas_length, budget=recipe.optim.rows_per_micro,
    )  # fmt: skip
    log_num_ids = math.log(int((~banned).sum()))
    sums = dict.fromkeys(("loss", "ce", "aec", "kl"), 0.0)
    gaps, num_rows = [], 0
    for shares in bins:
        batch = ReplayBatch(responses, weights, shares, config)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.run.dtype == "bfloat16"):
            reference_RV = None
            if recipe.loss.kl_weight:
                with torch.no_grad():
                    reference_RV = log_probs(packed_logits(reference, batch), banned)
            logits_RV = packed_logits(params, batch)
            losses = state_losses(logits_RV, batch, recipe.loss, banned=banned, reference_RV=reference_RV)
        torch.autograd.backward(losses.loss)
        sums["loss"] += float(losses.loss.detach())
        for name, value in losses.sums(batch.weight_S).items():
            sums[name] += value
        gaps.append(losses.recorded_gap(batch, log_num_ids))
        num_rows += batch.num_rows
    known = [gap for gap in gaps if not math.isnan(gap)]
    return {
        **sums,
        # Size of the contraction's gradient on an entropy in nats, against 1 for cross-entropy.
        "aec_strength": 2 * recipe.loss.aec_weight * math.sqrt(max(0.0, sums["aec"])) / log_num_ids,
        "recorded_entropy_gap": float(np.mean(known)) if known else None,
        "residual_ratio": residual_ratio(params, [state for r in responses for state in r.states], config),
        "num_states": sum(len(response.states) for response in responses),
        "num_rows": num_rows,
        "num_micro": len(bins),
    }


def why_unusable(loss: float, norms: Mapping[str, float]) -> str | None:
    """Why an update's gradient cannot be used, None if it can."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    if not all(map(math.isfinite, norms.values())):
        return "the gradient is not finite"
    return None
