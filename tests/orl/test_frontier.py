"""The frontier's formulas by hand and against a slow search, and `orl frontier` and `orl compare` on tiny models."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orl import sweep as sweep_module
from orl.errors import ReportError
from orl.evaluate import Setting
from orl.frontier import (
    Curves,
    Sweep,
    compare,
    floor_of,
    frontier_report,
    interval,
    matched,
    matched_tpf,
    pareto,
    resample,
    verdict,
)
from orl.pretrain import pretrain
from orl.progress import CountBar
from orl.tasks import get_task


def curves(*points: tuple[float, float]) -> Curves:
    """One resample with these (accuracy, tokens per forward)."""
    accuracy, tpf = (np.array([column], dtype=np.float64) for column in zip(*points, strict=True))
    return Curves(accuracy_RK=accuracy, tpf_RK=tpf, speed_RK=10 * tpf)


def crossing(floor: float, *points: tuple[float, float]) -> tuple[float, bool]:
    found = matched(curves(*points), np.array([floor]))
    assert found.speed_R[0] == pytest.approx(10 * found.tpf_R[0])
    return float(found.tpf_R[0]), bool(found.is_edge_R[0])


def sweep(model: str, passed: Any, tokens: Any, forwards: Any, **changes: Any) -> Sweep:
    num_knobs, num_prompts = np.shape(passed)
    return Sweep(**{
        "model": model, "settings": tuple(f"k{k}" for k in range(num_knobs)),
        "keys": tuple(f"k{k}" for k in range(num_knobs)), "prompts": tuple(f"p{p}" for p in range(num_prompts)),
        "tasks": ("t",) * num_prompts, "passed_KP": np.array(passed, dtype=np.float64),
        "tokens_KP": np.broadcast_to(tokens, np.shape(passed)).astype(np.float64),
        "forwards_KP": np.broadcast_to(forwards, np.shape(passed)).astype(np.float64),
        "seconds_KP": np.ones(np.shape(passed)), **changes,
    })  # fmt: skip


def test_matched_accuracy_is_read_between_the_pareto_points():
    points = [(0.9, 2.0), (0.8, 4.0), (0.5, 5.0), (0.6, 3.0)]  # the last one is beaten by the second
    assert crossing(0.85, *points) == (pytest.approx(3.0), False)
    assert crossing(0.8, *points) == (pytest.approx(4.0), False)
    assert crossing(0.65, *points) == (pytest.approx(4.5), False)
    assert crossing(0.9, *points) == (pytest.approx(2.0), False)


def test_a_curve_that_never_gets_there_has_nothing_and_one_that_stays_above_ends_at_its_fastest_knob():
    assert crossing(0.95, (0.9, 2.0), (0.8, 4.0)) == (0.0, False)
    assert crossing(0.7, (0.9, 2.0), (0.8, 4.0)) == (4.0, True)
    assert crossing(0.7, (0.9, 2.0), (0.8, 4.0), (0.5, 4.0)) == (4.0, False)  # nothing is gained by going on
    assert crossing(math.nan, (0.9, 2.0)) == (0.0, False)
    assert matched_tpf([(0.9, 2.0), (0.8, 4.0)], 0.95) is None
    assert matched_tpf([(0.9, 2.0), (0.8, 4.0)], 0.85) == pytest.approx(3.0)


def test_a_baseline_that_verifies_nothing_sets_no_level():
    """Tokens per forward without a right answer are worth nothing, whatever the tolerance."""
    assert np.isnan(floor_of(curves((0.0, 9.0)), 0.005)).all()
    report = frontier_report([sweep("a", [[0, 0]], 8, 2), sweep("b", [[1, 1]], 8, 1)], num_resamples=20)
    assert report["tasks"]["all"]["matched_accuracy"] is None
    assert report["tasks"]["all"]["models"]["b"]["at_matched_accuracy"]["is_reached"] is False


def slow_crossing(floor: float, points: list[tuple[float, float]]) -> float:
    """Walk along the straight lines between Pareto points in small steps."""
    line = [points[i] for i in pareto(*(np.array(c) for c in zip(*points, strict=True)))]
    best = max((tpf for accuracy, tpf in line if accuracy >= floor), default=0.0)
    if best:
        for (a0, t0), (a1, t1) in itertools.pairwise(line):
            for share in np.linspace(0, 1, 401):
                if a0 + share * (a1 - a0) >= floor:
                    best = max(best, t0 + share * (t1 - t0))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=7), st.integers(0, 20))
def test_crossing_equals_a_walk_along_the_curve(raw: list[tuple[int, int]], level: int):
    points = [(a / 20, float(t)) for a, t in raw]
    assert crossing(level / 20, *points)[0] == pytest.approx(slow_crossing(level / 20, points), abs=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_pareto_points_are_those_that_nothing_beats(points: list[tuple[int, int]]):
    accuracy, tpf = np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)
    chosen = pareto(accuracy, tpf)
    kept = {points[i] for i in chosen}
    assert len(kept) == len(chosen)
    beaten = {p for p in points if any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
    assert kept == set(points) - beaten
    assert list(tpf[chosen]) == sorted(tpf[chosen])


def test_tokens_per_forward_of_a_curve_is_the_ratio_of_sums():
    """K63."""
    one = sweep("a", [[1, 0]], [[100, 4]], [[10, 4]])
    found = Curves.of(one, np.array([[1.0, 1.0], [2.0, 0.0]]))
    assert found.tpf_RK.tolist() == [[pytest.approx(104 / 14)], [10.0]]
    assert found.accuracy_RK.tolist() == [[0.5], [1.0]]
    assert found.speed_RK[0, 0] == 52.0


def test_resamples_are_of_the_sample_size_and_repeat_with_their_seed():
    counts = resample(7, num_resamples=50, seed=3)
    assert counts.shape == (51, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert (counts[0] == 1).all()
    assert (counts == resample(7, num_resamples=50, seed=3)).all()
    assert (counts != resample(7, num_resamples=50, seed=4)).any()


def test_same_prompts_for_every_model_make_a_constant_gain_certain():
    """The interval of each curve is wide, that of the ratio has no width: prompts are paired."""
    rng = np.random.default_rng(0)
    passed = rng.random((3, 60)) < [[0.9], [0.8], [0.5]]
    tokens = rng.integers(5, 50, (3, 60))
    forwards = tokens / np.array([[2.0], [3.0], [4.0]])
    base, trained = sweep("base", passed, tokens, 3 * forwards), sweep("orl", passed, tokens, 2 * forwards)
    report = frontier_report([base, trained], num_resamples=200)
    row = report["tasks"]["all"]["models"]["orl"]
    low, high = row["points"][0]["verified_rate_95"]
    assert high - low > 0.05
    assert row["at_matched_accuracy"]["tpf_ratio"] == pytest.approx(1.5)
    assert row["at_matched_accuracy"]["tpf_ratio_95"] == [pytest.approx(1.5)] * 2
    assert row["at_matched_accuracy"]["verdict"] == "higher"
    own = report["tasks"]["all"]["models"]["base"]["at_matched_accuracy"]
    assert (own["tpf_ratio"], own["verdict"], own["reached_share"]) == (1.0, "overlap", 1.0)
    assert list(report["tasks"]) == ["all"]  # one task: its row would repeat the first


def test_faster_and_wrong_is_no_gain():
    """TPF is never read alone: a model that lost its accuracy fails the comparison."""
    base = sweep("base", [[1] * 9 + [0]], 10, 5)
    worse = sweep("worse", [[1] * 5 + [0] * 5], 10, 1)
    row = frontier_report([base, worse], num_resamples=100)["tasks"]["all"]["models"]["worse"]
    assert row["points"][0]["tpf_total"] == 10.0
    assert row["at_matched_accuracy"]["tpf_total"] is None
    assert row["at_matched_accuracy"]["is_reached"] is False
    assert row["at_matched_accuracy"]["verdict"] == "lower"


def test_every_task_has_its_own_curve():
    tasks = ("x", "y", "x", "y")
    report = frontier_report([sweep("a", [[1, 0, 1, 0]], 8, 2, tasks=tasks)], num_resamples=10)
    assert list(report["tasks"]) == ["all", "x", "y"]
    assert report["tasks"]["x"]["models"]["a"]["points"][0]["verified_rate"] == 1.0
    json.dumps(report, allow_nan=False)


def test_models_swept_apart_are_refused():
    with pytest.raises(ReportError, match="b and a were swept over different settings or prompts; sweep them together"):
        frontier_report([sweep("a", [[1, 0]], 8, 2), sweep("b", [[1, 0, 0]], 8, 2)])
    with pytest.raises(ReportError, match=r"x is a document of schema 'orl\.evaluate/1'.*evaluate it again"):
        Sweep.of("x", {"schema": "orl.evaluate/1"})


def test_comparison_pairs_the_prompts_that_both_answered_in_whatever_order():
    first = sweep("a", [[1, 0, 0, 1]], 8, 2)
    second = sweep("b", [[1, 1, 1]], 8, 4, prompts=("p2", "p9", "p0"))
    found = compare(first, second, num_resamples=100)
    assert (found["num_prompts"], found["prompts_left_out"]) == (2, [2, 1])
    (row,) = found["results"]
    assert row["verified_rate"] == [0.5, 1.0]  # p0 and p2
    assert row["difference"] == 0.5
    assert (row["tpf_ratio"], row["tpf"], row["accuracy"]) == (0.5, "lower", "overlap")
    with pytest.raises(ReportError, match="0 prompts and 1 settings in common"):
        compare(first, sweep("c", [[1]], 8, 2, prompts=("z",)))


@pytest.mark.parametrize(
    ("bounds", "neutral", "expected"),
    [([0.1, 0.2], 0, "higher"), ([-0.2, -0.1], 0, "lower"), ([0.0, 0.2], 0, "overlap"), ([1, 1], 1, "overlap")],
)
def test_verdict(bounds: list[float], neutral: float, expected: str):
    assert verdict(bounds, neutral=neutral) == expected


def test_interval_covers_the_middle_95_percent():
    assert interval(np.arange(0, 1001, dtype=np.float64)) == [25.0, 975.0]


@pytest.fixture(scope="module")
def models(make_recipe, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("frontier")
    return tuple(
        pretrain(make_recipe(optim={"steps": 1}, run={"seed": seed}), folder / name)
        for seed, name in ((0, "base"), (1, "trained"))
    )  # type: ignore[return-value]


ARGUMENTS = ["--task", "chain_sum", "--problems", "2", "--sweep", "threshold=0.9,0.1", "--fixed", "max_tokens=16"]


def test_killed_sweep_goes_on_and_gives_the_same_answers(orl, models: tuple[Path, Path], tmp_path: Path):
    """Answers are kept one by one; a second run asks only for what is missing, and the half line of a kill is cut."""
    arguments = ["frontier", *models, *ARGUMENTS, "--no-plot", "--out", tmp_path]
    status, stdout, stderr = orl(*arguments)
    assert (status, "Traceback" in stderr) == (0, False)
    assert "at matched accuracy: best of base minus 0.5 points" in stderr
    report = json.loads(stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "frontier.json").read_text())
    assert list(report["reports"]) == ["base", "trained"]
    log = tmp_path / "answers_trained.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 4
    log.write_text("".join(lines[:3]) + lines[3][:20])
    status, stdout, _ = orl(*arguments, "--quiet")
    assert status == 0
    assert log.read_text().splitlines(keepends=True)[:3] == lines[:3]
    again = json.loads(stdout.splitlines()[-1])

    def counts(report: dict[str, Any]) -> Any:
        answers = report["reports"]["trained"]["results"]
        return [{k: v for k, v in row["answers"].items() if k != "total_s"} for row in answers]

    assert counts(again) == counts(report)
    assert orl(*arguments, "--quiet", "--seed", "1")[0] == 1  # other answers: they must not be mixed with these


def test_progress_counts_known_answers_of_this_sweep_alone(models: tuple[Path, Path], tmp_path: Path, monkeypatch):
    counts: list[int] = []

    class Bar(CountBar):
        def advance(self, count: int = 1) -> None:
            counts.append(count)

    monkeypatch.setattr(sweep_module, "CountBar", Bar)
    problems = (get_task("chain_sum").problem(0, "heldout"),)
    for texts in (["max_tokens=2"], ["max_tokens=3", "max_tokens=2"], ["max_tokens=4"]):
        plan = sweep_module.Plan(
            problems=problems, settings=tuple(map(Setting.parse, texts)), seed=0, executor="eager", dtype="float32",
            num_threads=1,
        )  # fmt: skip
        sweep_module.sweep_models({"x": str(models[0])}, plan, tmp_path)
    assert counts == [0, 1, 1, 1, 0, 1]  # where each bar begins, then one an answer


def test_another_checkpoint_in_the_same_folder_is_refused(orl, models: tuple[Path, Path], tmp_path: Path):
    arguments = ["--task", "chain_sum", "--problems", "1", "--setting", "max_tokens=4", "--no-plot", "--out", tmp_path]
    assert orl("frontier", f"x={models[0]}", *arguments, "--quiet")[0] == 0
    status, stdout, stderr = orl("frontier", f"x={models[1]}", *arguments)
    assert (status, stdout) == (1, "")
    assert "holds answers made otherwise (checkpoint " in stderr
    assert "take another --out or remove the file" in stderr


def test_compare_reads_both_kinds_of_reports(orl, models: tuple[Path, Path], tmp_path: Path):
    assert orl("frontier", *models, *ARGUMENTS, "--no-plot", "--out", tmp_path, "--quiet")[0] == 0
    status, stdout, stderr = orl("compare", tmp_path / "frontier.json", "--json")
    assert (status, stderr) == (0, "")
    (found,) = json.loads(stdout)
    assert (found["models"], found["num_prompts"]) == (["base", "trained"], 2)
    status, _, stderr = orl(
        "evaluate", models[0], "--task", "chain_sum", "--problems", "1", "--setting", "threshold=0.9,max_tokens=16",
        "--out", tmp_path / "one.json", "--quiet",
    )  # fmt: skip
    assert status == 0
    status, stdout, _ = orl("compare", tmp_path / "frontier.json", tmp_path / "one.json")
    assert status == 0
    assert "one.json against base: 1 common prompts" in stdout
    assert "left out: 1 prompts that only base has" in stdout
    status, stdout, stderr = orl("compare", tmp_path / "one.json")
    assert (status, stdout) == (2, "")
    assert "holds one model; give a second report" in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b/a"], "'b/a' has no name of its own; write NAME=b/a"),
        (["dlmrt-tiny", "--fixed", "threshold=1"], "--fixed goes with --sweep"),
        (["dlmrt-tiny", "--sweep", "threshold"], "--sweep 'threshold' has no values"),
        (["dlmrt-tiny", "--sweep", "treshold=1"], "unknown decode setting 'treshold'; did you mean 'threshold'?"),
        (["dlmrt-tiny", "--sweep", "threshold=0.5,0.50"], "setting 'threshold=0.5' is there twice"),
    ],
)
def test_wrong_sweeps_are_usage_errors(orl, arguments: list[str], message: str, tmp_path: Path):
    status, stdout, stderr = orl("frontier", *arguments, "--task", "chain_sum", cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert not list(tmp_path.iterdir())


def test_plots_are_svg_and_png_and_repeat(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="plots need the plot extra")
    from orl.plot import write_plots

    tasks = ("x", "y", "x", "y")
    report = frontier_report(
        [sweep(name, [[1, 0, 1, 1], [1, 0, 0, 1]], 8, [[2], [1]], tasks=tasks) for name in ("base", "orl")],
        num_resamples=20,
    )
    svg, png = write_plots(report, tmp_path / "frontier")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert text.count("tokens per forward (total)") == 3
    assert "base" in text
    shutil.move(svg, tmp_path / "first.svg")
    write_plots(report, tmp_path / "frontier")
    assert svg.read_text() == text
