"""Who sees whom in a packed sequence of clean and noisy rows: the staircase.

Row q may see row k iff both are of one problem and one of these holds:

(1) both are clean and k is not after q (block-causal families whose blocks see themselves whole: not in a later block);
(2) q is noisy, k is clean and before q's canvas;
(3) both are of the same canvas of the same copy (families that are causal inside a block: and k is not after q).

So a noisy row never sees its own clean answer, a later block or another copy. Padding rows see only themselves: a row
that sees nothing has no defined softmax, and its NaN would spread through 0 * NaN.

Two implementations: `staircase`, a dense boolean mask, and `StaircaseAttention`, which enumerates what is visible (the
clean prefix of each canvas and the canvas itself) and needs no mask over all rows; padding rows do not occur there.

Legend: B packed sequences, T rows, L canvas slots, N heads, G key/value heads, H head width.

Source: visibility of kuleshov-group/bd3lms 1c3e8f43 (M_BD, M_OBC, M_BC) with a causal clean part; ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmrt.eager.executor import canvas_visible, context_visible
from dlmrt.errors import UsageError
from dlmrt.models.config import DiffusionConfig
from dlmrt.ops.eager import scaled_dot_product
from orl.packing import CLEAN, PAD


def staircase(
    segment: Tensor, copy: Tensor, positions: Tensor, block_start: Tensor, diffusion: DiffusionConfig | None,
    *, grid: int | None = None,
) -> Tensor:  # fmt: skip
    """Visibility bool [B, T, T] of rows described by int [B, T] arrays (see `orl.packing.Rows`).

    Args:
        grid: where the block grid starts, for clean rows that see whole blocks; None: at position 0.
    """

    def q(x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def k(x: Tensor) -> Tensor:
        return x.unsqueeze(-2)

    not_after = k(positions) <= q(positions)
    clean_context = not_after
    is_causal_inside = diffusion is not None and diffusion.in_block_attention == "causal"
    if diffusion is not None and diffusion.context_attention == "block_causal" and not is_causal_inside:
        if grid is None and diffusion.block_anchor != "position_zero":
            raise UsageError("training knows block-causal attention on a grid from position 0 only; set block_anchor")
        block = torch.div(positions - (grid or 0), diffusion.canvas_length, rounding_mode="floor")
        clean_context = k(block) <= q(block)
    same_canvas = (q(copy) == k(copy)) & (q(block_start) == k(block_start))
    if is_causal_inside:
        same_canvas &= not_after
    is_clean, is_noisy = copy == CLEAN, copy >= 0
    visible = q(is_clean) & k(is_clean) & clean_context
    visible |= q(is_noisy) & k(is_clean) & (k(positions) < q(block_start))
    visible |= q(is_noisy) & k(is_noisy) & same_canvas
    visible &= q(segment) == k(segment)
    own = torch.eye(segment.shape[-1], dtype=torch.bool, device=segment.device)
    return visible | (own & q(copy == PAD))


@dataclass(frozen=True, kw_only=True)
class Canvases:
    """Canvases of one block that stand in consecutive rows. Example: 5 canvases of 32 rows from row 120, start 88."""

    start: int  # position of slot 0: they see so many clean rows
    first_row: int
    count: int


# First row of the clean rows of one response, their number, where its block grid starts, its canvases in row order.
Layout = tuple[int, int, int, tuple[Canvases, ...]]


class StaircaseAttention:
    """Attention of packed rows [T]: per response clean rows, then canvases, which fill its rows without a gap.

    A canvas attends to [clean prefix ; itself]; canvases of one block go through one product. Every sum is over the
    rows that are visible, so a state's result does not depend on what else is packed.
    """

    def __init__(self, layout: Sequence[Layout], diffusion: DiffusionConfig, *, device: str = "cpu") -> None:
        self.layout, self.length = layout, diffusion.canvas_length
        self.visible_clean = []
        self.visible_canvas: dict[int, Tensor | None] = {}
        for _, num_clean, grid, canvases in layout:
            rows = torch.arange(num_clean, device=device)
            self.visible_clean.append(context_visible(diffusion, rows, rows, grid=grid))
            for group in canvases:
                self.visible_canvas[group.start] = canvas_visible(
                    diffusion, group.start, self.length, window=None, device=torch.device(device)
                )

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `dlmrt.ops.spec.Attend`."""
        out = []
        for (first, num_clean, _, canvases), visible in zip(self.layout, self.visible_clean, strict=True):
            clean = slice(first, first + num_clean)
            if num_clean:
                out.append(scaled_dot_product(q[clean], k[clean], v[clean], visible, scale=scale))
            for group in canvases:
                rows = slice(group.first_row, group.first_row + group.count * self.length)
                own_q, own_k, own_v = (torch.unflatten(t[rows], 0, (group.count, self.length)) for t in (q, k, v))
                context_k, context_v = (t[first : first + group.start].expand(group.count, -1, -1, -1) for t in (k, v))
                found = scaled_dot_product(
                    own_q, torch.cat((context_k, own_k), dim=1), torch.cat((context_v, own_v), dim=1),
                    self.visible_canvas[group.start], scale=scale,
                )  # fmt: skip
                out.append(found.flatten(0, 1))
        return torch.cat(out)
