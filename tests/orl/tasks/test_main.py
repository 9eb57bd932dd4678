"""The sample printer."""

import sys

import pytest

from orl.tasks import __main__ as printer

pytest.importorskip("reasoning_gym")


def test_prints_samples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["orl.tasks", "--show", "2", "--task", "chain_sum", "--split", "heldout"])
    printer.main()
    out = capsys.readouterr().out
    assert out.count(">>>") == 2 and "--- chain_sum heldout 1" in out and "#### " in out
