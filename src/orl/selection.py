"""Which checkpoint of a run is the best, and when a run has lost too much accuracy to go on.

The best is the one with the most tokens per forward at matched accuracy: the start model's best over all settings, less
a slack. Accuracy is judged against the start model, never against the run so far, which may sink slowly. A start model
that verifies nothing has no accuracy that another could match, and then there is no best one.

Source: the matched-accuracy rule of docs/design.md; ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orl.frontier import accuracy_floor, matched_tpf
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

    def add(self, step: int, points: Points, coverage: float | None = None) -> dict[str, Any]:
        """Judge the weights after `step` updates.

        Args:
            coverage: share of prompts with a kept answer, over the updates since the evaluation before.
        """
        known = [e["coverage"] for e in self.entries if e.get("coverage") is not None]  # absent from early versions
        is_uncovered = bool(known) and coverage is not None and coverage < known[0] - self.section.max_coverage_loss
        entry: dict[str, Any] = {"step": step, "points": [list(point) for point in points], "coverage": coverage}
        self.entries.append(entry)
        floor = accuracy_floor(self._start, self.section.accuracy_slack)
        entry["matched_tpf"] = matched_tpf([(a, t) for a, t in points], floor)
        entry["is_alert"] = self._has_lost_accuracy(entry) or is_uncovered
        return entry

    @property
    def _start(self) -> float:
        """The start model's best verified rate."""
        return _best_accuracy(self.entries[0])

    def _has_lost_accuracy(self, entry: Mapping[str, Any]) -> bool:
        return _best_accuracy(entry) < self._start - self.section.max_accuracy_loss

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
        lost = f"the best verified rate stayed more than {self.section.max_accuracy_loss} below the start model's"
        if not all(map(self._has_lost_accuracy, recent)):
            lost += f", or coverage more than {self.section.max_coverage_loss} below the first updates',"
        return f"{lost} for {self.section.patience} evaluations"


def _best_accuracy(entry: Mapping[str, Any]) -> float:
    return float(max(accuracy for accuracy, _ in entry["points"]))
