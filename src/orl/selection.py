"""Which checkpoint of a run is the best, and when a run has lost too much accuracy to go on.

The best is the one with the most tokens per forward at matched accuracy: the start model's best over all settings, less
a slack. Accuracy is judged against the start model, never against the run so far, which may sink slowly.

Source: the matched-accuracy rule of docs/design.md; ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orl.frontier import matched_tpf
from orl.train_recipe import EvalSection

Points = Sequence[Sequence[float]]  # (verified rate, tokens per forward) under each setting


class Evaluations:
    """The evaluations of a run, the start model's first.

    Args:
        entries: of a saved run, as `entries` held them.
    """

    def __init__(self, section: EvalSection, entries: Sequence[Mapping[str, Any]] = ()) -> None:
        self.section = section
        self.entries = [dict(entry) for entry in entries]

    def add(self, step: int, points: Points) -> dict[str, Any]:
        """Judge the weights after `step` updates."""
        start = max(accuracy for accuracy, _ in (self.entries[0]["points"] if self.entries else points))
        accuracy = max(accuracy for accuracy, _ in points)
        self.entries.append({
            "step": step,
            "points": [list(point) for point in points],
            "matched_tpf": matched_tpf([(a, t) for a, t in points], start - self.section.accuracy_slack),
            "is_alert": accuracy < start - self.section.max_accuracy_loss,
        })  # fmt: skip
        return self.entries[-1]

    def has(self, step: int) -> bool:
        """Whether the weights after `step` updates are the newest that were judged."""
        return bool(self.entries) and self.entries[-1]["step"] == step

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The entry with the most tokens per forward at matched accuracy; the earliest of equals."""
        reaching = [entry for entry in self.entries if entry["matched_tpf"] is not None]
        return max(reaching, key=lambda entry: entry["matched_tpf"], default=None)

    @property
    def stop_reason(self) -> str:
        """Why the run should end: alerts in a row; "" while it may go on."""
        recent = self.entries[-self.section.patience :]
        if len(recent) < self.section.patience or not all(entry["is_alert"] for entry in recent):
            return ""
        return (
            f"the best verified rate stayed more than {self.section.max_accuracy_loss} below the start model's for "
            f"{self.section.patience} evaluations"
        )
