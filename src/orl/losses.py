"""Losses: weighted cross-entropy of pre-training; the three terms of On-Policy Residual Learning.

Per state s of a kept answer, H the entropy of a slot divided by the log of the number of ids that may be predicted:

    cross-entropy   mean over gated slots of -log p(final token)
    contraction     Eq. 2: max(0, mean H(s) over open slots - (1 - rho) mean H(the step before))^2, no gradient into the
                    latter, which is the recorded one; both at the temperature of the step before
    anchor          mean over anchored slots of min(KL(p || p_start), cap); above the cap the gradient is zero

    loss = sum_s weight_s (cross-entropy + aec_weight * contraction + kl_weight * anchor)

A decoder records the entropies of its tempered distributions, and some of its temperatures fall from step to step:
entropies of two temperatures would contract, or fail to, by themselves. What is compared with a recorded entropy is
therefore taken at the temperature of that record; cross-entropy, anchor and what has no step before, at 1.

A mean over no slots is 0 with zero gradient. Weights come from outside (`orl.replay.state_weights`).

Alternatives to Eq. 2 (`loss.aec`): hinge_token squares each open slot's hinge against its own entropy before; log_ratio
takes the hinge of log ratios; cap is the entropy of open slots whose argmax is right (dParallel's certainty loss);
minent the entropy of all open slots.

Legend: R slots with loss, S states, V vocabulary.

Source: Eq. 2 and the stated roles of the terms: ORL (arXiv 2610.20687, project page); cap: czg1225/dParallel 2ca4d14;
per-token cap of the divergence: xingzhejun/d-OPSD 1b55cf3; forms of gates and weights are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from orl.train_recipe import LossSection

if TYPE_CHECKING:
    from orl.replay import ReplayBatch

StateMean = Callable[[Tensor, Tensor], Tensor]  # values [R], chosen bool [R] -> mean over the chosen of each state [S]

_BANNED = -1e9  # logit of ids that may not be predicted: exp underflows to exactly 0 and products with it stay finite
_LEAST_ENTROPY = 1e-3  # floor under the logarithms of log_ratio


def weighted_cross_entropy(logits_RV: Tensor, targets_R: Tensor, weights_R: Tensor, *, denominator: float) -> Tensor:
    """sum_r w_r CE(logits_r, target_r) / denominator, in fp32.

    The denominator is counted over the whole step before that is split into micro-batches, so accumulation cannot
    change the loss. Without any row (denominator 0) the loss is 0 with zero gradients, never 0/0.
    """
    ce_R = F.cross_entropy(logits_RV.float(), targets_R.long(), reduction="none")
    return (ce_R * weights_R).sum() / (denominator or 1.0)


@dataclass(frozen=True, kw_only=True)
class StateLosses:
    """The terms of each state, and what the diagnostics read."""

    cross_entropy_S: Tensor
    contraction_S: Tensor
    anchor_S: Tensor
    own_entropy_R: Tensor  # normalised entropy of every slot at the temperature it was decoded at, detached
    loss: Tensor  # weighted sum of the terms

    def sums(self, weight_S: Tensor) -> dict[str, float]:
        """Weighted sums of the three terms, which add up over micro-batches."""
        terms = {"ce": self.cross_entropy_S, "aec": self.contraction_S, "kl": self.anchor_S}
        return {name: float((weight_S * term_S).sum()) for name, term_S in terms.items()}

    def recorded_gap(self, batch: ReplayBatch, log_num_ids: float) -> tuple[float, int]:
        """Sum of |entropy - recorded entropy|, normalised, over open slots with a record, and their number.

        It is 0 up to rounding while rollouts are fresh.
        """
        is_known_R = batch.is_open_R & ~torch.isnan(batch.own_entropy_R)
        gap_R = (self.own_entropy_R - batch.own_entropy_R / log_num_ids).abs()[is_known_R]
        return float(gap_R.sum(dtype=torch.float64)), len(gap_R)


def log_probs(logits_RV: Tensor, banned: Tensor) -> Tensor:
    """Log-probabilities [R, V], float32 or better, over the ids that may be predicted; `banned` bool [V]."""
    return (
        logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).masked_fill(banned, _BANNED).log_softmax(-1)
    )


def normalised_entropy(log_probs_RV: Tensor, num_ids: int) -> Tensor:
    """Entropy of each row divided by log `num_ids`, within [0, 1]."""
    return -(log_probs_RV.exp() * log_probs_RV).sum(-1) / math.log(num_ids)


def state_losses(
    logits_RV: Tensor, batch: ReplayBatch, section: LossSection, *, banned: Tensor, reference_RV: Tensor | None
) -> StateLosses:
    """All terms for the states of one micro-batch.

    Args:
        logits_RV: of the model being trained, one row a slot of `batch`.
        banned: bool [V], ids that may not be predicted.
        reference_RV: log-probabilities of the start model; None leaves the anchor out.
    """
    num_ids = int((~banned).sum())
    logp_RV = log_probs(logits_RV, banned)
    entropy_R = normalised_entropy(logp_RV, num_ids)

    def entropy_at(temperature_S: Tensor) -> Tensor:
        if bool((temperature_S == 1).all()):
            return entropy_R
        tempered_RV = logits_RV / temperature_S[batch.state_R].unsqueeze(-1)
        return normalised_entropy(log_probs(tempered_RV, banned), num_ids)

    def mean_by_state(values_R: Tensor, chosen_R: Tensor) -> Tensor:
        zeros_S = values_R.new_zeros(len(batch.states))
        counts_S = zeros_S.index_add(0, batch.state_R, chosen_R.to(values_R.dtype))
        sums_S = zeros_S.index_add(0, batch.state_R, torch.where(chosen_R, values_R, torch.zeros_like(values_R)))
        return sums_S / counts_S.clamp(min=1)

    ce_R = -logp_RV.gather(-1, batch.targets_R.unsqueeze(-1)).squeeze(-1)
    cross_entropy_S = mean_by_state(ce_R, batch.is_gated_R)
    is_right_R = logp_RV.detach().argmax(-1) == batch.targets_R
    has_source = section.aec not in ("cap", "minent")
    compared_R = entropy_at(batch.source_temperature_S) if has_source else entropy_R
    contraction_S = _contraction(compared_R, is_right_R, batch, section, math.log(num_ids), mean_by_state)
    anchor_S = torch.zeros_like(cross_entropy_S)
    if reference_RV is not None:
        kl_R = (logp_RV.exp() * (logp_RV - reference_RV)).sum(-1)
        anchor_S = mean_by_state(kl_R.clamp(max=section.kl_cap), batch.is_anchored_R)
    total_S = cross_entropy_S + section.aec_weight * contraction_S + section.kl_weight * anchor_S
    with torch.no_grad():
        own_entropy_R = entropy_at(batch.own_temperature_S).detach()
    return StateLosses(
        cross_entropy_S=cross_entropy_S.detach(), contraction_S=contraction_S.detach(), anchor_S=anchor_S.detach(),
        own_entropy_R=own_entropy_R, loss=(batch.weight_S * total_S).sum(),
    )  # fmt: skip


def aec_hinge(entropy: Tensor, source: Tensor, rho: float) -> Tensor:
    """max(0, H - (1 - rho) H_source): how far a step is from the contraction asked of it."""
    return (entropy - (1 - rho) * source).clamp(min=0)


def _contraction(
    entropy_R: Tensor, is_right_R: Tensor, batch: ReplayBatch, section: LossSection, log_num_ids: float, mean: StateMean
) -> Tensor:
    """Adjacent entropy contraction of each state, 0 where there is no step before or no open slot.

    Args:
        entropy_R: at the temperature of the step before, for the kinds that look at it.
    """
    kind, rho = section.aec, section.aec_rho
    if kind == "minent":
        return mean(entropy_R, batch.is_open_R)
    if kind == "cap":
        return mean(entropy_R, batch.is_open_R & is_right_R)
    source_S = batch.source_entropy_S / log_num_ids
    has_source_S = ~torch.isnan(source_S)
    if kind == "hinge_token":
        source_R = torch.nan_to_num(batch.source_entropy_R / log_num_ids)
        return mean(aec_hinge(entropy_R, source_R, rho).square(), batch.is_open_R & has_source_S[batch.state_R])
    mean_S, source_S = mean(entropy_R, batch.is_open_R), torch.nan_to_num(source_S)
    if kind == "hinge_mean":
        return torch.where(has_source_S, aec_hinge(mean_S, source_S, rho).square(), torch.zeros_like(mean_S))
    log_S, log_source_S = (values.clamp(min=_LEAST_ENTROPY).log() for values in (mean_S, source_S))
    hinge_S = (log_S - log_source_S - math.log(1 - rho)).clamp(min=0)
    return torch.where(has_source_S, hinge_S.square(), torch.zeros_like(mean_S))
