"""Blocks whose length of text changes while they are denoised: deletions and splits of rule `joint_threshold_indel`.

The model predicts two special ids. DELETE takes its slot away, SPLIT puts a new mask before it; the block keeps its
length, so text moves left or right and the end is cut or filled with masks. A mask that edits introduced is not one of
those that the block began with: only the latter must be resolved before the edit budget starts to run.

Legend: L canvas slots, V vocabulary.

Source: JointThresholdInDel of sglang 0.5.23 srt/dllm/algorithm (compared run by run in tests); LLaDA2.2 report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dlmrt.types import Bool, Float32, Int32


@dataclass(frozen=True, kw_only=True)
class EditHistory:
    """What the rule remembers of one block beside its canvas."""

    is_original_L: Bool  # slots whose mask, if they hold one, was there at the start; moves with the text
    seen: frozenset[tuple[int, ...]] = frozenset()  # canvases of earlier steps
    written: Mapping[int, frozenset[int]] = field(default_factory=dict)  # ids that each slot was given so far

    def after(self, canvas_L: Int32, written_L: Bool, token_L: Int32, is_original_L: Bool) -> EditHistory:
        """The history with one more step."""
        slots = np.flatnonzero(written_L).tolist()
        ids = {slot: self.written.get(slot, frozenset()) | {int(token_L[slot])} for slot in slots}
        return replace(
            self,
            is_original_L=is_original_L,
            seen=self.seen | {tuple(canvas_L.tolist())},
            written={**self.written, **ids},
        )


@dataclass(frozen=True, kw_only=True)
class EditIds:
    """The ids with a meaning of their own."""

    mask: int
    delete: int
    split: int


def best_other(logits_V: Float32, excluded: Iterable[int], otherwise: int) -> int:
    """The id of highest logit that is not `excluded`, the lowest on ties; `otherwise` if every other one is banned."""
    allowed = np.array(logits_V)
    allowed[list(excluded)] = -np.inf
    best = int(allowed.argmax())
    return best if allowed[best] > -np.inf else otherwise


def apply_edits(
    token_L: Int32, canvas_L: Int32, is_original_L: Bool, is_pinned_L: Bool, ids: EditIds
) -> tuple[Int32, Bool]:
    """The next canvas and its original slots.

    Args:
        token_L: ids that the step wants, DELETE and SPLIT among them.
        canvas_L: ids that the step saw; what a SPLIT keeps behind its new mask.
    """
    length = len(canvas_L)
    pairs: list[tuple[int, bool]] = []
    for slot in range(length):
        original = bool(is_original_L[slot])
        if is_pinned_L[slot]:
            pairs.append((int(canvas_L[slot]), original))
        elif token_L[slot] == ids.split:
            pairs += [(ids.mask, False), (int(canvas_L[slot]), original)]
        elif token_L[slot] != ids.delete:
            pairs.append((int(token_L[slot]), original))
    pairs = [*pairs, *[(ids.mask, False)] * length][:length]
    return np.array([token for token, _ in pairs], dtype=np.int32), np.array([original for _, original in pairs])
