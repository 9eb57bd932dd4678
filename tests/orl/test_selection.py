"""The best checkpoint of a run, and when a run ends by itself."""

from __future__ import annotations

import json

import pytest

from orl.selection import Evaluations
from orl.train_recipe import EvalSection

SECTION = EvalSection(accuracy_slack=0.02, max_accuracy_loss=0.05, patience=2)
START = [(0.95, 5.0), (0.80, 9.0)]


def test_best_is_fastest_at_the_start_models_accuracy():
    """A model that is faster at every threshold but wrong more often does not win."""
    found = Evaluations(SECTION)
    assert found.add(0, START)["matched_tpf"] == pytest.approx(5.0 + 4.0 * 0.02 / 0.15)
    found.add(10, [(0.94, 6.0), (0.85, 9.0)])
    found.add(20, [(0.91, 12.0), (0.60, 20.0)])
    assert [entry["matched_tpf"] is None for entry in found.entries] == [False, False, True]
    assert found.best is found.entries[1]
    found.add(30, [(0.94, 6.0), (0.85, 9.0)])
    assert found.best is found.entries[1], "the earliest of equals"
    assert found.has(30)
    assert not found.has(20)


def test_alerts_in_a_row_end_the_run():
    found = Evaluations(SECTION)
    assert not found.has(0)
    for step, accuracy in enumerate((0.95, 0.89, 0.91, 0.89)):
        found.add(step, [(accuracy, 5.0)])
        assert found.stop_reason == ""
    found.add(9, [(0.5, 50.0), (0.4, 60.0)])
    assert "more than 0.05 below the start model's for 2 evaluations" in found.stop_reason
    assert [entry["is_alert"] for entry in found.entries] == [False, True, False, True, True]


def test_a_start_model_that_verifies_nothing_cannot_be_matched():
    """Else the floor would lie below 0 and the best would be whatever decodes fastest."""
    found = Evaluations(SECTION)
    for step, points in enumerate([[(0.0, 5.0)], [(0.0, 9.0)], [(0.5, 2.0)]]):
        assert found.add(step, points)["matched_tpf"] is None
    assert found.best is None
    assert found.stop_reason == ""
    slack = Evaluations(SECTION)  # a start whose accuracy lies within the slack is not matched by nothing
    assert slack.add(0, [(0.01, 5.0)])["matched_tpf"] == pytest.approx(5.0)
    assert slack.add(1, [(0.0, 50.0)])["matched_tpf"] is None


def test_lost_coverage_is_an_alert_too():
    """Against the first updates'; the evaluation before any update knows no coverage."""
    found = Evaluations(EvalSection(max_coverage_loss=0.1, patience=2))
    for step, (coverage, is_alert) in enumerate([(None, False), (0.8, False), (0.71, False), (0.69, True)]):
        assert found.add(step, START, coverage)["is_alert"] is is_alert
        assert found.stop_reason == ""
    found.add(9, START, 0.2)
    assert "or coverage more than 0.1 below the first updates', for 2 evaluations" in found.stop_reason


def test_entries_survive_json():
    found = Evaluations(SECTION)
    found.add(0, START)
    found.add(1, [(0.1, 1.0)])
    again = Evaluations(SECTION, json.loads(json.dumps(found.entries)))
    assert again.entries == found.entries
    assert again.best == found.best
    assert again.add(2, START) == found.add(2, START)
