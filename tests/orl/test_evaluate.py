"""Evaluation: formulas on hand-made outcomes, and a whole report of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlmrt.decode.engine import Engine
from dlmrt.errors import UnknownOptionError, UsageError
from dlmrt.types import GenerateResult
from orl.data import Mixture, held_out
from orl.evaluate import Outcome, Setting, evaluate, outcome_dict, summarise, wilson_interval
from orl.pretrain import pretrain
from orl.progress import settings_table
from orl.recipe import DataSection


def outcome(tokens: int, steps: int, commits: int = 0, **changes: Any) -> Outcome:
    return Outcome(**{
        "task": "chain_sum", "passed": True, "reason": "ok", "completion_tokens": tokens, "num_denoise_steps": steps,
        "num_commit_forwards": commits, "num_blocks": 2, "num_stop_tokens": 1, "total_s": 0.5, "finish_reason": "stop",
        "executor": "cpu", "dtype": "float32", **changes,
    })  # fmt: skip


def test_ratio_of_sums_and_mean_of_ratios_are_both_given_under_their_names():
    """K63: 100 tokens in 10 forwards and 4 in 4 give 7.43 and 5.5."""
    summary = summarise([outcome(100, 8, 2), outcome(4, 3, 1)])
    assert summary["tpf_total"] == pytest.approx(104 / 14)
    assert round(summary["tpf_total"], 2) == 7.43
    assert summary["tpf_total_per_request"]["mean"] == 5.5
    assert summary["tpf_total_per_request"]["median"] == 5.5
    assert summary["tpf_total_per_request"]["p10"] == pytest.approx(1.9)
    assert summary["tpf_denoise"] == pytest.approx(104 / 11)
    assert summary["tpf_total_orl"] == pytest.approx((104 - 2) / (11 + 4))


def test_counts_shares_and_rates():
    outcomes = [
        outcome(1, 1, passed=False, reason="no answer"),
        outcome(9, 3, finish_reason="length", passed=False),
        outcome(10, 5, total_s=1.0),
        outcome(20, 5, total_s=3.0),
    ]
    summary = summarise(outcomes)
    assert (summary["num"], summary["verified"], summary["verified_rate"]) == (4, 2, 0.5)
    assert (summary["empty_share"], summary["cut_share"]) == (0.25, 0.25)
    assert summary["tokens_per_second"] == pytest.approx(40 / 5)
    assert summary["completion_tokens"] == pytest.approx({"mean": 10.0, "p10": 3.4, "median": 9.5, "p90": 17.0})
    assert summary["interval_95"] == list(wilson_interval(2, 4))


def test_no_outcome_gives_zeros_not_errors():
    summary = summarise([])
    assert (summary["num"], summary["verified_rate"], summary["tpf_total"]) == (0, 0.0, 0.0)
    assert summary["interval_95"] == [0.0, 1.0]
    assert summary["by_length"] == {}


def test_output_lengths_stand_in_their_buckets_with_tokens_and_time():
    """K67: bounds belong to the bucket they name; time to the full answer, not only rates."""
    lengths = (1, 32, 33, 128, 512, 513, 2048, 2049)
    outcomes = [outcome(n, 4, total_s=float(i)) for i, n in enumerate(lengths)]
    found = summarise(outcomes)["by_length"]
    assert {name: (row["num"], row["completion_tokens"]) for name, row in found.items()} == {
        "<=32": (2, 33), "<=128": (2, 161), "<=512": (1, 512), "<=2048": (2, 2561), ">2048": (1, 2049),
    }  # fmt: skip
    assert found["<=128"]["total_s"]["mean"] == 2.5
    assert found["<=128"]["tokens_per_second"] == pytest.approx(161 / 5)
    assert found["<=128"]["tpf_total"] == pytest.approx(161 / 8)
    assert list(summarise([outcome(40, 4)])["by_length"]) == ["<=128"]


@pytest.mark.parametrize(
    ("passed", "num", "low", "high"),
    # Agresti and Coull, The American Statistician 52 (1998), and by hand.
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval(passed: int, num: int, low: float, high: float):
    assert wilson_interval(passed, num) == pytest.approx((low, high), abs=5e-5)


def test_setting_takes_names_aliases_and_json_values():
    assert Setting.parse("fast:threshold=0.5,commit_rule=threshold") == Setting(
        name="fast", options={"threshold": 0.5, "commit_rule": "threshold"}
    )
    assert Setting.parse("confidence_threshold=1,ignore_eos=true") == Setting(
        name="confidence_threshold=1,ignore_eos=true", options={"threshold": 1.0, "ignore_eos": True}
    )
    assert Setting.parse("stop=end,stop_token_ids=5").options == {"stop": ("end",), "stop_token_ids": (5,)}
    assert Setting.parse("default:") == Setting(name="default", options={})


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("treshold=0.5", UnknownOptionError, "unknown decode setting 'treshold'; did you mean 'threshold'"),
        ("threshold", UsageError, "'threshold' has no '='; write key=value"),
        ("a:threshold=x", UsageError, "threshold is 'x'; it must be a number"),
        ("top_k=1.5", UsageError, "top_k is 1.5; it must be a whole number"),
    ],
)
def test_setting_refuses_what_it_does_not_know(text: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        Setting.parse(text)


@pytest.fixture(scope="module")
def engine(make_recipe, tmp_path_factory):
    recipe = make_recipe(optim={"steps": 1})
    with Engine.load(pretrain(recipe, tmp_path_factory.mktemp("run")), executor="eager", num_threads=1) as engine:
        yield engine


def test_report_of_a_tiny_model_can_be_repeated_from_what_it_says(engine: Engine):
    """K66: versions, machine, executor, dtype, threads, settings, seed, sample count, interval."""
    problems = held_out(Mixture.of(DataSection(tasks=("chain_sum", "spell_backward"))), 2)
    settings = [Setting.parse("a:threshold=0.9,max_tokens=24"), Setting.parse("b:threshold=0.0,max_tokens=24")]
    answers: list[tuple[str, str, GenerateResult, Outcome]] = []
    report = evaluate(
        engine, problems, settings, seed=3,
        on_answer=lambda setting, problem, *judged: answers.append((setting.name, problem.task, *judged)),
    )  # fmt: skip
    conditions = report["conditions"]
    assert (conditions["executor"], conditions["dtype"], conditions["num_threads"]) == ("eager", "bfloat16", 1)
    assert (conditions["seed"], conditions["num_problems"], conditions["split"]) == (3, 4, ["heldout"])
    environment = conditions["environment"]
    assert environment["cpu"]["model"]
    assert {"dlmrt", "python", "platform"} <= environment.keys()
    assert {"torch", "numpy", "tokenizers"} <= environment["packages"].keys()
    assert [row["setting"] for row in report["results"]] == ["a", "b"]
    for row in report["results"]:
        assert row["settings_in_effect"]["max_tokens"] == 24
        assert row["settings_in_effect"]["commit_rule"] == "threshold"
        assert row["all"]["num"] == 4
        assert {task: s["num"] for task, s in row["tasks"].items()} == {"chain_sum": 2, "spell_backward": 2}
        assert len(row["all"]["interval_95"]) == 2
    assert [(name, task) for name, task, _, _ in answers] == [
        (name, task) for name in ("a", "b") for task in ("chain_sum", "spell_backward") * 2
    ]
    json.dumps(report, allow_nan=False)
    assert settings_table(report).count("\n") == 4
    for _, _, result, judged in answers:
        # K64: every token is counted once.
        assert sum(forward.num_finalised for forward in result.record.forwards) == judged.completion_tokens
        assert judged.completion_tokens == len(result.token_ids)
        assert outcome_dict(judged)["num_denoise_steps"] == result.usage.num_denoise_steps


def test_same_settings_give_the_same_counts(engine: Engine):
    problems = held_out(Mixture.of(DataSection(tasks=("chain_sum",))), 2)
    runs = []
    for _ in range(2):
        outcomes: list[Outcome] = []
        evaluate(engine, problems, [Setting.parse("max_tokens=16")], on_answer=lambda *a, to=outcomes: to.append(a[3]))
        runs.append([(o.passed, o.completion_tokens, o.num_denoise_steps) for o in outcomes])
    assert runs[0] == runs[1]


def test_setting_that_the_model_refuses_fails_before_anything_is_generated(engine: Engine):
    problems = held_out(Mixture.of(DataSection(tasks=("chain_sum",))), 1)
    answered = []
    with pytest.raises(UsageError, match="entropy_bound has no effect with commit_rule 'threshold'"):
        evaluate(
            engine, problems, [Setting.parse("max_tokens=8"), Setting.parse("commit_rule=threshold,entropy_bound=0.1")],
            on_answer=lambda *answer: answered.append(answer),
        )  # fmt: skip
    assert not answered
    with pytest.raises(UsageError, match="nothing to evaluate"):
        evaluate(engine, [], [Setting.parse("max_tokens=8")])


def test_auto_regressive_twin_is_evaluated_like_any_model(make_recipe, tmp_path: Path):
    model = pretrain(make_recipe(optim={"steps": 1}, objective={"kind": "ar"}), tmp_path)
    with Engine.load(model, num_threads=2) as engine:
        problems = held_out(Mixture.of(DataSection(tasks=("chain_sum",))), 1)
        report = evaluate(engine, problems, [Setting.parse("greedy:temperature=0,max_tokens=6")])
    assert report["results"][0]["all"]["tpf_denoise"] == 1.0
    assert report["conditions"]["num_threads"] == engine.num_threads == 2, "the executor's, not torch's"
