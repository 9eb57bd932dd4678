"""Who sees whom in a packed sequence of clean and noisy rows: the staircase.

Row q may see row k iff both are of one problem and one of these holds:

(1) both are clean and k is not after q (block-causal families: not in a later block);
(2) q is noisy, k is clean and before q's canvas;
(3) both are of the same canvas of the same copy (families that are causal inside a block: and k is not after q).

So a noisy row never sees its own clean answer, a later block or another copy. Padding rows see only themselves: a row
that sees nothing has no defined softmax, and its NaN would spread through 0 * NaN.

Legend: B packed sequences, T rows.

Source: visibility of kuleshov-group/bd3lms 1c3e8f43 (M_BD, M_OBC, M_BC) with a causal clean part; ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlmrt.errors import UsageError
from dlmrt.models.config import DiffusionConfig
from orl.packing import CLEAN, PAD


def staircase(
    segment: Tensor, copy: Tensor, positions: Tensor, block_start: Tensor, diffusion: DiffusionConfig | None
) -> Tensor:
    """Visibility bool [B, T, T] of rows described by int [B, T] arrays (see `orl.packing.Rows`)."""

    def q(x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def k(x: Tensor) -> Tensor:
        return x.unsqueeze(-2)

    not_after = k(positions) <= q(positions)
    clean_context = not_after
    if diffusion is not None and diffusion.context_attention == "block_causal":
        if diffusion.block_anchor != "position_zero":
            raise UsageError("training knows block-causal attention on a grid from position 0 only; set block_anchor")
        block = positions // diffusion.canvas_length
        clean_context = k(block) <= q(block)
    same_canvas = (q(copy) == k(copy)) & (q(block_start) == k(block_start))
    if diffusion is not None and diffusion.in_block_attention == "causal":
        same_canvas &= not_after
    is_clean, is_noisy = copy == CLEAN, copy >= 0
    visible = q(is_clean) & k(is_clean) & clean_context
    visible |= q(is_noisy) & k(is_clean) & (k(positions) < q(block_start))
    visible |= q(is_noisy) & k(is_noisy) & same_canvas
    visible &= q(segment) == k(segment)
    own = torch.eye(segment.shape[-1], dtype=torch.bool, device=segment.device)
    return visible | (own & q(copy == PAD))
