"""The page is what the result files say, and it is fresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from measure import Turn, check, document, row
from rates import Answer, summarise
from report import page, quantity, read_results

ROOT = Path(__file__).parents[3]
CONDITIONS = {
    "cpu": {"model": "A CPU", "flags": ["avx2"], "num_cpus_allowed": 2}, "packages": {"numpy": "2.0", "torch": None},
    "commit": "abc", "is_modified": True, "num_threads": 2, "memory_bytes": 2**34, "load_average_before": [0.1, 0, 0],
    "date": "2026-01-01", "python": "3.11.7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s a step", "12.3 ms a step"),
        (2.5, "s", "2.5 s"),
        (4e-5, "s a token", "40 us a token"),
        (3, "GB", "3 GB"),
    ],
)
def test_quantities_are_scaled(value, unit, text):
    assert quantity(value, unit) == text


def test_page_shows_values_targets_and_what_is_missing():
    answers = [Answer(num_tokens=8, seconds=0.1, num_denoise_steps=2, num_blocks=1, passed=True)]
    result = document(
        "cpu_step_tiny", conditions=CONDITIONS, details={"dlmrt int8": summarise(answers)}, skipped=["b: not there"],
        rows=[row("tiny", "a", [Turn(value=0.002, others=0.0, wall_s=1.0)] * 3, unit="s")],
        checks=[check("tiny", "a / b", [0.4], limit=0.3), check("tiny", "a / c", [0.2])],
    )  # fmt: skip
    text = page([result])
    assert "| tiny: a / b | 0.4 (0.4 .. 0.4, 1 rounds) | <= 0.3 | **missed** |" in text
    assert "| tiny: a / c | 0.2 (0.2 .. 0.2, 1 rounds) |  |  |" in text
    assert "| tiny: a | 2 ms (2 ms .. 2 ms) | 3, 0 dropped |  |" in text
    assert "| dlmrt int8 | 80 | 80 (80 .. 80) | 8 | 4.00 | 4.00 | 4.00 | 2.67 | 1.000 (0.207 .. 1.000) of 1 |" in text
    assert "Not measured: b: not there." in text
    assert "commit abc with local changes" in text
    assert "numpy 2.0; " not in text.partition("A CPU")[0]


def test_results_in_the_repository_are_complete():
    for result in read_results():
        assert result["rows"] or result["checks"], result["name"]
        assert all(item["num"] >= 1 for item in result["rows"] + result["checks"])


def test_page_is_fresh():
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
