"""The staircase in two passes, for families whose context rows run otherwise than canvas rows (DiffusionGemma).

Clean rows go through the model as context, and each layer's keys and values are kept, with their gradient. Canvas rows
then go through it as a canvas over [clean prefix ; own canvas]. Value and gradient are those of one pass wherever the
family runs both kinds of rows alike. Layers with a window see what decoding shows them.

Legend: T packed rows, C clean ones, L canvas slots, G key/value heads, H head width.

Source: visibility as in `orl.attention` and `dlmrt.eager.executor`; ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlmrt.eager.executor import canvas_visible, context_visible
from dlmrt.models.config import ModelConfig
from dlmrt.ops.eager import scaled_dot_product
from orl.attention import Layout


class TwoPassStaircase:
    """Attention of both passes over rows that `layout` describes; `context` runs first."""

    def __init__(self, layout: Sequence[Layout], config: ModelConfig) -> None:
        assert config.diffusion is not None
        self.layout, self.config, self.diffusion = layout, config, config.diffusion
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys and values [C, G, H] of the clean rows

    def context(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `dlmrt.ops.spec.Attend`; rows are the clean ones of all responses."""
        self._kept[layer_idx] = k, v
        window = self.config.attention(layer_idx).window
        out, first = [], 0
        for _, num_clean, grid, _ in self.layout:
            if num_clean:
                rows, positions = slice(first, first + num_clean), torch.arange(num_clean)
                visible = context_visible(self.diffusion, positions, positions, grid=grid, window=window)
                out.append(scaled_dot_product(q[rows], k[rows], v[rows], visible.to(q.device), scale=scale))
            first += num_clean
        return torch.cat(out)

    def canvases(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `dlmrt.ops.spec.Attend`; rows are the canvases of all responses."""
        context_k, context_v = self._kept[layer_idx]
        window, length = self.config.attention(layer_idx).window, self.diffusion.canvas_length
        out, clean, row = [], 0, 0
        for _, num_clean, _, canvases in self.layout:
            for group in canvases:
                rows, seen = slice(row, row + group.count * length), slice(clean, clean + group.start)
                own_q, own_k, own_v = (torch.unflatten(t[rows], 0, (group.count, length)) for t in (q, k, v))
                keys, values = (t[seen].expand(group.count, -1, -1, -1) for t in (context_k, context_v))
                visible = canvas_visible(self.diffusion, group.start, length, window=window)
                found = scaled_dot_product(
                    own_q, torch.cat((keys, own_k), dim=1), torch.cat((values, own_v), dim=1),
                    None if visible is None else visible.to(q.device), scale=scale,
                )  # fmt: skip
                out.append(found.flatten(0, 1))
                row += group.count * length
            clean += num_clean
        return torch.cat(out)
