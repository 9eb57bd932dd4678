"""Verified rate and tokens per forward over held-out prompts, for several decode settings of one model.

Every setting runs over the same prompts in the same order, through the same engine a user runs, one request at a time.
Numbers are distributions over prompts with intervals, never peaks; the run's TPF is the ratio of sums, and the mean and
quantiles of the per-request ratio stand beside it under their own names, since the two differ. A result carries what is
needed to repeat it: versions, machine, executor, dtype, threads, settings in effect, seed, prompts.

Source: definitions in docs/design.md (benchmarks); Wilson's interval: E. B. Wilson, JASA 22 (1927).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlmrt.cli.environment import environment_report
from dlmrt.decode.aliases import canonical_settings
from dlmrt.decode.engine import Engine
from dlmrt.errors import UsageError
from dlmrt.types import DecodeConfig, GenerateResult, Message
from orl.tasks import get_task
from orl.tasks.types import Problem

SCHEMA = "orl.evaluate/1"
LENGTH_BUCKETS = (32, 128, 512, 2048)  # completion tokens; short answers gain least from decoding in parallel


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A named decode setting. Example: ``Setting(name="conservative", options={"threshold": 0.95})``."""

    name: str
    options: Mapping[str, Any]  # fields of DecodeConfig

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From ``name:key=value,key=value`` or ``key=value,...`` (then the text is the name); values as in JSON.

        Raises:
            UnknownOptionError: a key is no decode setting.
            UsageError: a pair without "=", a value of the wrong type.
        """
        name, colon, body = text.partition(":")
        if not colon:
            body = text
        raw = {}
        for item in filter(None, body.split(",")):
            key, equals, value = item.partition("=")
            if not equals:
                raise UsageError(f"setting {text!r}: {item!r} has no '='; write key=value")
            try:
                raw[key.strip()] = json.loads(value)
            except ValueError:
                raw[key.strip()] = value  # a bare word is a string
        return cls(name=name if colon else text, options=canonical_settings(raw, source=f"setting {text!r}"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One answered problem."""

    task: str
    passed: bool
    reason: str
    completion_tokens: int  # stop token included
    num_denoise_steps: int
    num_commit_forwards: int
    total_s: float
    finish_reason: str


def evaluate(
    engine: Engine, problems: Sequence[Problem], settings: Sequence[Setting], *, seed: int = 0,
    on_answer: Callable[[Setting, Problem, GenerateResult, Outcome], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Answer every problem under every setting; return the report (see `summarise`) as JSON-ready data.

    Raises:
        UsageError: no problem, no setting, or a setting that the model refuses; found before any answer is generated.
    """
    if not problems or not settings:
        raise UsageError("there is nothing to evaluate; give at least one problem and one setting")
    configs = [DecodeConfig(**{"seed": seed, **setting.options}) for setting in settings]
    for config in configs:
        engine.settings(config)
    rows = []
    for setting, config in zip(settings, configs, strict=True):
        outcomes = []
        for problem in problems:
            result = engine.generate([Message(role="user", content=problem.prompt)], config)
            outcome = _judge(problem, result)
            outcomes.append(outcome)
            if on_answer:
                on_answer(setting, problem, result, outcome)
        tasks = dict.fromkeys(outcome.task for outcome in outcomes)
        rows.append(
            {
                "setting": setting.name,
                "options": dict(setting.options),
                "settings_in_effect": engine.settings(config).as_dict(),
                "all": summarise(outcomes),
                "tasks": {task: summarise([o for o in outcomes if o.task == task]) for task in tasks},
            }
        )
    return {
        "schema": SCHEMA,
        "conditions": {
            "executor": result.record.executor,
            "dtype": result.record.dtype,
            "num_threads": _num_threads(),
            "seed": seed,
            "num_problems": len(problems),
            "split": sorted({problem.split for problem in problems}),
            "environment": environment_report(),
        },
        "results": rows,
    }


def _judge(problem: Problem, result: GenerateResult) -> Outcome:
    verdict, usage = get_task(problem.task).verify(problem, result.text), result.usage
    return Outcome(
        task=problem.task,
        passed=verdict.passed,
        reason=verdict.reason,
        completion_tokens=usage.completion_tokens,
        num_denoise_steps=usage.num_denoise_steps,
        num_commit_forwards=usage.num_commit_forwards,
        total_s=usage.total_s,
        finish_reason=result.finish_reason,
    )


def _num_threads() -> int | None:
    """Threads of torch, where an executor has loaded it."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, verified rate with its 95 % interval, and TPF as ratio of sums and as a distribution over requests.

    `tpf_total` and `tpf_denoise` are ratios of sums; `tpf_total_per_request` holds mean and quantiles of the ratio.
    """
    num, passed = len(outcomes), sum(o.passed for o in outcomes)
    tokens = np.array([o.completion_tokens for o in outcomes], dtype=np.float64)
    steps = np.array([o.num_denoise_steps for o in outcomes], dtype=np.float64)
    forwards = steps + np.array([o.num_commit_forwards for o in outcomes], dtype=np.float64)
    seconds = np.array([o.total_s for o in outcomes], dtype=np.float64)
    low, high = wilson_interval(passed, num)
    return {
        "num": num,
        "verified": passed,
        "verified_rate": passed / num if num else 0.0,
        "interval_95": [low, high],
        "tpf_total": float(tokens.sum() / max(1.0, forwards.sum())),
        "tpf_denoise": float(tokens.sum() / max(1.0, steps.sum())),
        "tpf_total_per_request": _distribution(tokens / np.maximum(forwards, 1)),
        "completion_tokens": _distribution(tokens),
        "empty_share": float(np.mean(tokens <= 1)) if num else 0.0,  # nothing but the stop token
        "cut_share": float(np.mean([o.finish_reason == "length" for o in outcomes])) if num else 0.0,
        "tokens_per_second": float(tokens.sum() / max(1e-9, seconds.sum())),
        "total_s": _distribution(seconds),
        "by_length": _by_length(tokens, forwards, seconds),
    }


def _by_length(
    tokens: npt.NDArray[np.float64], forwards: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """The same run by output length; a bucket holds lengths above the bound before it, empty ones are left out."""
    found = {}
    bucket = np.searchsorted(LENGTH_BUCKETS, tokens)
    for idx, name in enumerate([*(f"<={bound}" for bound in LENGTH_BUCKETS), f">{LENGTH_BUCKETS[-1]}"]):
        here = bucket == idx
        if here.any():
            found[name] = {
                "num": int(here.sum()),
                "completion_tokens": int(tokens[here].sum()),
                "tpf_total": float(tokens[here].sum() / max(1.0, forwards[here].sum())),
                "tokens_per_second": float(tokens[here].sum() / max(1e-9, seconds[here].sum())),
                "total_s": _distribution(seconds[here]),
            }
    return found


def _distribution(values: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {}
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"mean": float(values.mean()), "p10": float(p10), "median": float(median), "p90": float(p90)}


def matched_tpf(points: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """Largest tokens per forward at `accuracy` or more, None where no point reaches it.

    Between two points every mixture can be had (some prompts under one setting, the others under the other), so the
    curve is their piecewise linear upper hull.

    Args:
        points: (accuracy, tokens per forward) of one model under several settings.
    """
    reaching = [point for point in points if point[0] >= accuracy]
    found = [tpf for _, tpf in reaching]
    for high, tpf_high in reaching:
        for low, tpf_low in points:
            if low < accuracy:
                share = (accuracy - low) / (high - low)
                found.append(share * tpf_high + (1 - share) * tpf_low)
    return max(found, default=None)


def wilson_interval(passed: int, num: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval of a proportion; (0, 1) without trials."""
    if num == 0:
        return 0.0, 1.0
    share = passed / num
    centre = share + z * z / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    scale = 1 + z * z / num
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON-ready data."""
    return asdict(outcome)
