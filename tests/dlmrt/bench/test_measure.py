"""Formulas of the paired timing on hand-made turns; nothing is timed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure import MIN_QUIET, TOLERANCE, Turn, check, document, publish, quantile, ratio, row, take_turns


def turns(*values, others=0.0):
    return [Turn(value=value, others=others, wall_s=1.0) for value in values]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_quantile_is_linear_interpolation(values, share):
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


def test_ratio_is_the_median_of_ratios_within_rounds_not_of_medians():
    """A load that slows whole rounds down cancels out; medians of each side would give 2.5 / 10."""
    taken = {"a": turns(1.0, 2.5, 30.0), "b": turns(2.0, 10.0, 60.0)}
    found = ratio("g", taken, "a", "b", limit=0.5)
    assert (found.value, found.what, found.is_met) == (0.5, "a / b", True)
    assert ratio("g", taken, "b", "a", limit=1.9).is_met is False
    assert ratio("g", taken, "a", "b").is_met is None


def test_a_floor_is_met_from_above():
    assert check("g", "share of the peak", [0.9, 0.8], limit=0.85, is_floor=True).is_met
    assert not check("g", "share of the peak", [0.8], limit=0.85, is_floor=True).is_met


def test_disturbed_rounds_are_dropped_on_both_sides():
    taken = {"a": turns(1.0, 1.0, 1.0) + turns(9.0, others=0.5) + turns(1.0), "b": turns(2.0, 2.0, 2.0, 2.0, 2.0)}
    taken["b"][4] = turns(50.0, others=0.5)[0]
    found = ratio("g", taken, "a", "b")
    assert (found.value, found.q75, found.num) == (0.5, 0.5, 3)


def test_too_few_quiet_rounds_use_all_and_say_so():
    busy = turns(1.0, 2.0, 3.0, others=1.0)
    assert row("g", "a", turns(5.0) + busy, unit="s").is_quiet is False
    assert row("g", "a", turns(5.0) + busy, unit="s").num == 4
    quiet = row("g", "a", turns(*[5.0] * MIN_QUIET) + busy, unit="s")
    assert (quiet.median, quiet.num, quiet.num_dropped, quiet.is_quiet) == (5.0, MIN_QUIET, 3, True)


def test_a_short_turn_is_given_the_grain_of_the_clock():
    """/proc/stat counts hundredths of a second: 20 ms of a 50 ms turn may be rounding."""
    assert Turn(value=1, others=TOLERANCE + 0.3, wall_s=0.05).is_quiet
    assert not Turn(value=1, others=TOLERANCE + 0.3, wall_s=1.0).is_quiet


def test_rounds_alternate_and_stop_when_enough_are_quiet():
    order = []

    def runtime(name, others):
        def take():
            order.append(name)
            return turns(1.0, others=others)[0]

        return take

    taken = take_turns({"a": runtime("a", 0.0), "b": runtime("b", 0.0)}, num_rounds=3, rest_s=0)
    assert order == list("abbaab")
    assert [len(of) for of in taken.values()] == [3, 3]
    taken = take_turns({"a": runtime("a", 1.0)}, num_rounds=3, rest_s=0)
    assert len(taken["a"]) == 6, "disturbed rounds are repeated, up to twice the number"


def test_document_holds_every_number_and_is_the_last_line_of_stdout(capsys):
    rows, checks = [row("g", "a", turns(1.0, 2.0, 3.0), unit="s")], [check("g", "a / b", [0.5], limit=0.4)]
    publish(document("x", conditions={"n": 1}, rows=rows, checks=checks, skipped=["c: absent"]), save=False)
    out, err = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert (told["schema"], told["name"], told["skipped"]) == ("dlmrt.benchmark/1", "x", ["c: absent"])
    assert told["rows"][0]["median"] == 2.0
    assert told["checks"][0] == {
        "group": "g", "what": "a / b", "value": 0.5, "q25": 0.5, "q75": 0.5, "num": 1, "limit": 0.4,
        "is_floor": False, "is_met": False,
    }  # fmt: skip
    assert "MISSED" in err
    assert "c: absent" in err
