"""The training-step benchmark: every arm computes the same loss and gradient, whatever pieces of the system it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_all_off_and_all_on_have_the_same_loss_and_gradient(tmp_path: Path):
    """Two answers of the shipped model; the speeds of so small a run mean nothing and are not looked at."""
    done = subprocess.run(
        [sys.executable, "benchmarks/train_step.py", "--prompts", "1", "--responses", "2", "--repeats", "1", "--ranks",
         "2", "--task", "spell_backward", "--executor", "eager", "--json", str(tmp_path / "report.json")],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert [row["arm"] for row in report["arms"]] == [
        "all off", "+ packing and staircase", "+ dealing by cost", "+ reservoir capture"
    ]  # fmt: skip
    first = report["arms"][0]
    for row in report["arms"]:
        assert row["loss"] == pytest.approx(first["loss"], rel=1e-4)
        assert row["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4)
    assert report["conditions"]["device"] == "cpu; not run on a GPU"
    assert report["num_responses"] == 2
