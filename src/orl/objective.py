"""The pre-training objective: one forward (or two) over packed sequences, and what it says.

For a share of micro-batches a first pass without gradient gives the soft embedding z that the noisy rows of the second
pass consume (two-pass self-conditioning): that trains the residual pathway without back-propagation through time.

Source: two-pass self-conditioning as in Chen et al., arXiv 2208.04202, and DiffusionGemma's training recipe
(NVIDIA-NeMo/Automodel 36044ad docs/guides/dllm/diffusiongemma.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dlmrt.models import qwen3
from dlmrt.models.config import ModelConfig
from dlmrt.ops import eager as ops
from orl.attention import staircase
from orl.losses import weighted_cross_entropy
from orl.packing import Rows


class Batch:
    """Packed sequences as tensors [B, T]; see `orl.packing.Rows`."""

    def __init__(self, bins: Sequence[Rows], *, device: str = "cpu") -> None:
        def stack(name: str) -> Tensor:
            return torch.from_numpy(np.stack([getattr(rows, name) for rows in bins])).to(device)

        self.ids, self.positions, self.targets, self.weights = map(stack, ("ids", "positions", "targets", "weights"))
        self.segment, self.copy, self.block_start = map(stack, ("segment", "copy", "block_start"))
        self.is_unresolved = stack("is_unresolved")
        self._predicted_by = stack("predicted_by").long()
        self.is_noisy = self.copy >= 0

    def predictors(self, hidden: Tensor, which: Tensor) -> Tensor:
        """Hidden states [R, D] of the rows that predict the rows `which` (bool [B, T]) of `hidden` [B, T, D]."""
        bins = torch.arange(len(hidden), device=hidden.device).unsqueeze(-1).expand_as(which)
        return hidden[bins[which], self._predicted_by[which]]

    def attend(self, config: ModelConfig) -> ops.MaskedAttention:
        """Attention under the staircase of these rows."""
        visible = staircase(self.segment, self.copy, self.positions, self.block_start, config.diffusion)
        return ops.MaskedAttention(visible)


def batch_loss(
    params: Mapping[str, Tensor], config: ModelConfig, batch: Batch, *, self_condition: bool, denominator: float,
    run_first_pass: bool = False, banned: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Weighted cross-entropy of one micro-batch, and the accuracy on next tokens and on unresolved slots.

    Args:
        self_condition: run a first pass without gradient and feed its soft embedding to the noisy rows.
        denominator: sum of weights over the whole step.
        run_first_pass: run it even if its result is not used but replaced by 0, because another process of a sharded
            model does: collectives, and which parameters get a gradient, must match.
        banned: bool [V], ids that decoding never predicts; they have no share in the soft embedding.
    """
    attend = batch.attend(config)
    z = _first_pass(params, config, batch, attend, banned) if self_condition or run_first_pass else None
    if z is not None and not self_condition:
        z = torch.zeros_like(z)
    where = batch.is_noisy
    if config.diffusion is not None and config.diffusion.residual.where == "masked":
        where = where & batch.is_unresolved
    hidden = qwen3.forward(ops, params, config, batch.ids, batch.positions, attend, z=z, where=where)
    counted = batch.weights > 0
    logits = qwen3.head(ops, params, config, batch.predictors(hidden, counted))
    targets = batch.targets[counted]
    loss = weighted_cross_entropy(logits, targets, batch.weights[counted], denominator=denominator)
    hit = (logits.detach().argmax(-1) == targets).float()
    is_next = ~batch.is_noisy[counted]
    is_open = (batch.is_unresolved & (batch.targets != config.pad_token_id))[counted]
    return loss, {"ar_acc": _mean(hit[is_next]), "canvas_acc": _mean(hit[is_open])}


@torch.no_grad()
def _first_pass(
    params: Mapping[str, Tensor], config: ModelConfig, batch: Batch, attend: ops.MaskedAttention, banned: Tensor | None
) -> Tensor:
    """Residual z [B, T, D] of the noisy rows, 0 elsewhere."""
    hidden = qwen3.forward(ops, params, config, batch.ids, batch.positions, attend)
    logits = qwen3.head(ops, params, config, batch.predictors(hidden, batch.is_noisy))
    probs = ops.emittable_probs(logits, banned)
    z = torch.zeros_like(hidden)
    z[batch.is_noisy] = qwen3.soft_embedding(ops, params, config, probs).to(z.dtype)
    return z


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else float("nan")
