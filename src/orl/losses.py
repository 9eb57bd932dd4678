"""Losses. Pre-training: weighted cross-entropy over the rows that carry a weight.

Legend: R rows with loss, V vocabulary.

Source: ours.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def weighted_cross_entropy(logits_RV: Tensor, targets_R: Tensor, weights_R: Tensor, *, denominator: float) -> Tensor:
    """sum_r w_r CE(logits_r, target_r) / denominator, in fp32.

    The denominator is counted over the whole step before that is split into micro-batches, so accumulation cannot
    change the loss. Without any row (denominator 0) the loss is 0 with zero gradients, never 0/0.
    """
    ce_R = F.cross_entropy(logits_RV.float(), targets_R.long(), reduction="none")
    return (ce_R * weights_R).sum() / (denominator or 1.0)
