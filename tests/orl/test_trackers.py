"""Trackers get the numbers of metrics.jsonl; none of them can end a run."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.errors import MissingDependencyError
from orl import trackers
from orl.recipe import PretrainRecipe, RunSection
from orl.run_folder import RunFolder
from orl.trackers import flat, open_tracker

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40)
leaves = numbers | st.text(max_size=3) | st.none() | st.lists(st.integers(), max_size=2) | st.just(math.nan)
names = st.text("abc=.", min_size=1, max_size=4)


@given(st.dictionaries(names, st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3))))
def test_flat_keeps_every_finite_number_under_its_path(entry: dict[str, object]) -> None:
    found = dict(flat(entry))
    for path, value in found.items():
        here: object = entry
        for key in path.split("/"):
            assert isinstance(here, dict)
            here = here[key]
        assert here == value and math.isfinite(value)


def test_tensorboard_holds_what_metrics_hold_also_after_a_resume(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = PretrainRecipe(run=RunSection(tracker="tensorboard"))
    folder = RunFolder(tmp_path / "run")
    for first in (0, 2):  # killed after step 3, of which the state of step 2 stands
        folder.watch(recipe, first)
        for step in range(first + 1, first + 4):
            folder.log({"step": step, "loss": 10.0 * first + step, "eval": {"all": {"tpf_total": 2.0}}, "note": "x"})
        folder.close()
    events = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "eval/all/tpf_total"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 23), (4, 24), (5, 25)]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        open_tracker("wandb", tmp_path, config={}, step=0)


def test_a_tracker_that_fails_is_dropped_once_and_the_record_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def log(self, numbers: object, step: int) -> None:
            raise OSError("no space left")

        def close(self) -> None:
            raise AssertionError("it was dropped")

    monkeypatch.setattr(trackers, "_trackio", lambda run_dir, config: Full())
    folder = RunFolder(tmp_path / "run")
    folder.watch(PretrainRecipe(run=RunSection(tracker="trackio")), 0)
    for step in (1, 2):
        folder.log({"step": step, "loss": 1.0})
    folder.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2]
    assert caplog.text.count("no space left") == 1


def test_a_tracker_that_fails_at_its_end_does_not_end_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Offline:
        def log(self, numbers: object, step: int) -> None:
            pass

        def close(self) -> None:
            raise RuntimeError("no connection")

    monkeypatch.setattr(trackers, "_trackio", lambda run_dir, config: Offline())
    folder = RunFolder(tmp_path / "run")
    folder.watch(PretrainRecipe(run=RunSection(tracker="trackio")), 0)
    folder.close()
    folder.close()
    assert caplog.text.count("no connection") == 1
