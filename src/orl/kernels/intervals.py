"""The staircase as two intervals of keys a row: what an attention kernel needs instead of a mask.

A clean row sees clean rows up to a bound. A noisy row sees the clean rows before its canvas, and its canvas. Both are
half-open runs of packed rows, so four integers a row say everything, a tile of rows knows the keys it must visit, and
no mask over pairs exists anywhere.

Left out on purpose: sliding windows; the families that have them are replayed in two passes (`orl.two_pass`).

Legend: T packed rows.

Source: ours; visibility as in `orl.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlmrt.models.config import DiffusionConfig
from dlmrt.types import Int32
from orl.attention import Layout


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Rows t sees keys in [low_2T[i, t], high_2T[i, t]) for i = 0 (context) and 1 (own canvas)."""

    low_2T: Int32
    high_2T: Int32

    @classmethod
    def of(cls, layout: Sequence[Layout], diffusion: DiffusionConfig) -> Intervals:
        """Of the packed rows that `layout` describes."""
        low: list[Int32] = []
        high: list[Int32] = []
        length, is_causal = diffusion.canvas_length, diffusion.in_block_attention == "causal"
        slot = np.arange(length)
        end = slot + 1 if is_causal else np.full(length, length)  # of the own canvas, for each slot
        for first, num_clean, grid, canvases in layout:
            position = np.arange(num_clean)
            bound = position + 1
            if diffusion.context_attention == "block_causal" and not is_causal:
                bound = np.minimum(((position - grid) // length + 1) * length + grid, num_clean)
            nothing = np.zeros(num_clean, dtype=np.int32)
            low.append(np.stack([np.full(num_clean, first), nothing]).astype(np.int32))
            high.append(np.stack([first + bound, nothing]).astype(np.int32))
            for group in canvases:
                for canvas in range(group.first_row, group.first_row + group.count * length, length):
                    low.append(np.stack([np.full(length, first), np.full(length, canvas)]).astype(np.int32))
                    high.append(np.stack([np.full(length, first + group.start), canvas + end]).astype(np.int32))
        return cls(low_2T=np.concatenate(low, axis=1), high_2T=np.concatenate(high, axis=1))

    def dense(self) -> npt.NDArray[np.bool_]:
        """The same as visibility [T, T]."""
        key = np.arange(self.low_2T.shape[1])
        inside = (key >= self.low_2T[..., None]) & (key < self.high_2T[..., None])
        return np.asarray(inside.any(axis=0))


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Which keys a tile of query rows visits, and which query tiles a tile of keys meets; nothing else is computed."""

    bounds_Q4: Int32  # per query tile: both runs of keys, [low, high) each; low is a multiple of the key tile
    offsets_K: Int32  # per key tile: where its query tiles begin in `queries`, one more at the end
    queries: Int32  # query tiles, ascending for each key tile: sums over them have a fixed order

    @classmethod
    def of(cls, intervals: Intervals, *, query_tile: int, key_tile: int) -> Tiles:
        """Tiles of `query_tile` and `key_tile` rows."""
        num_rows = intervals.low_2T.shape[1]
        bounds, met = [], []
        for first in range(0, num_rows, query_tile):
            runs = []
            for low, high in zip(intervals.low_2T, intervals.high_2T, strict=True):
                begin, end = low[first : first + query_tile], high[first : first + query_tile]
                used = begin < end
                lowest = int(begin[used].min()) // key_tile * key_tile if used.any() else 0
                runs.append((lowest, int(end[used].max()) if used.any() else 0))
            bounds.append([bound for run in runs for bound in run])
            met.append({n // key_tile for low, high in runs for n in range(low, high, key_tile)})
        num_key_tiles = -(-num_rows // key_tile)
        lists = [[q for q, keys in enumerate(met) if key in keys] for key in range(num_key_tiles)]
        return cls(
            bounds_Q4=np.array(bounds, dtype=np.int32),
            offsets_K=np.cumsum([0, *map(len, lists)]).astype(np.int32),
            queries=np.array([q for found in lists for q in found], dtype=np.int32),
        )
