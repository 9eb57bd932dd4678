"""Verified rate and tokens per forward over held-out prompts, for several decode settings of one model.

Every setting runs over the same prompts in the same order, through the same engine a user runs, one request at a time.
Numbers are distributions over prompts with intervals, never peaks; the run's TPF is the ratio of sums, and the mean and
quantiles of the per-request ratio stand beside it under their own names, since the two differ. A result carries what is
needed to repeat it (versions, machine, executor, dtype, threads, settings in effect, seed, prompts) and every answer's
counts, so that two reports can be compared prompt by prompt.

Source: definitions in docs/design.md (benchmarks); Wilson's interval: E. B. Wilson, JASA 22 (1927).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlmrt.cli.environment import environment_report
from dlmrt.decode.aliases import canonical_settings
from dlmrt.decode.engine import Engine
from dlmrt.errors import UsageError
from dlmrt.models.config import ModelConfig
from dlmrt.types import DecodeConfig, GenerateResult, Message
from orl.tasks import get_task
from orl.tasks.types import Problem

SCHEMA = "orl.evaluate/2"
LENGTH_BUCKETS = (32, 128, 512, 2048)  # completion tokens; short answers gain least from decoding in parallel
# Settings that are run when none is given, by the checkpoint's kind; the first is the conservative one.
DEFAULT_SETTINGS = {
    "mask": (
        "conservative:commit_rule=threshold,threshold=0.95",
        "commit_rule=threshold,threshold=0.9",
        "commit_rule=threshold,threshold=0.7",
        "commit_rule=threshold,threshold=0.5",
    ),
    "uniform": (
        "conservative:commit_rule=entropy_bound,entropy_bound=0.05",
        "commit_rule=entropy_bound,entropy_bound=0.1",
        "commit_rule=entropy_bound,entropy_bound=0.3",
        "commit_rule=threshold,threshold=0.95",
    ),
    "ar": ("greedy:temperature=0",),
}
_ANSWER_COLUMNS = ("passed", "completion_tokens", "num_denoise_steps", "num_commit_forwards", "total_s")


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

    @property
    def key(self) -> str:
        """Text that two settings share exactly if their options are equal."""
        return json.dumps(dict(self.options), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One answered problem."""

    task: str
    passed: bool
    reason: str
    completion_tokens: int  # stop token included
    num_denoise_steps: int
    num_commit_forwards: int
    num_blocks: int
    num_stop_tokens: int  # 1 when a token ended the answer, which is counted among its tokens
    total_s: float
    finish_reason: str
    executor: str
    dtype: str


Known = Mapping[tuple[str, str], Outcome]  # by setting key and prompt digest
OnAnswer = Callable[[Setting, Problem, GenerateResult, Outcome], None]


def kind_of(config: ModelConfig) -> str:
    """Row of DEFAULT_SETTINGS: one position a block is an auto-regressive model, whatever its noise is called."""
    diffusion = config.diffusion
    return "ar" if diffusion is None or diffusion.canvas_length == 1 else diffusion.noise


def prompt_digest(problem: Problem) -> str:
    """Names a problem by its task and text, whatever order or number it is evaluated in."""
    return hashlib.blake2b(f"{problem.task}\0{problem.prompt}".encode(), digest_size=8).hexdigest()


def evaluate(
    engine: Engine, problems: Sequence[Problem], settings: Sequence[Setting], *, seed: int = 0,
    known: Known | None = None, on_answer: OnAnswer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Answer every problem under every setting; return the report (see `summarise`) as JSON-ready data.

    Args:
        known: answers that an earlier run of the same model and seed gave; they are not asked for again.
        on_answer: called for each new answer.

    Raises:
        UsageError: no problem, no setting, or a setting that the model refuses; found before any answer is generated.
    """
    if not problems or not settings:
        raise UsageError("there is nothing to evaluate; give at least one problem and one setting")
    configs = [DecodeConfig(**{"seed": seed, **setting.options}) for setting in settings]
    for config in configs:
        engine.settings(config)
    known, digests = known or {}, [prompt_digest(problem) for problem in problems]
    rows, everything = [], []
    for setting, config in zip(settings, configs, strict=True):
        outcomes = []
        for problem, digest in zip(problems, digests, strict=True):
            outcome = known.get((setting.key, digest))
            if outcome is None:
                result = engine.generate([Message(role="user", content=problem.prompt)], config)
                outcome = _judge(problem, result)
                if on_answer:
                    on_answer(setting, problem, result, outcome)
            outcomes.append(outcome)
        everything += outcomes
        tasks = dict.fromkeys(outcome.task for outcome in outcomes)
        rows.append(
            {
                "setting": setting.name,
                "options": dict(setting.options),
                "settings_in_effect": engine.settings(config).as_dict(),
                "all": summarise(outcomes),
                "tasks": {task: summarise([o for o in outcomes if o.task == task]) for task in tasks},
                "answers": {name: [_number(getattr(o, name)) for o in outcomes] for name in _ANSWER_COLUMNS},
            }
        )
    return {
        "schema": SCHEMA,
        "conditions": {
            "executor": _only(o.executor for o in everything),
            "dtype": _only(o.dtype for o in everything),
            "num_threads": engine.num_threads,
            "seed": seed,
            "num_problems": len(problems),
            "split": sorted({problem.split for problem in problems}),
            "environment": environment_report(),
        },
        "prompts": {"task": [problem.task for problem in problems], "digest": digests},
        "results": rows,
    }


def _number(value: bool | int | float) -> int | float:
    """As short as JSON allows: flags as 0 and 1, seconds to the microsecond."""
    return round(value, 6) if isinstance(value, float) else int(value)


def _only(values: Iterable[str]) -> str:
    """The one value, or all of them where answers of an earlier run had another."""
    return ", ".join(sorted(set(values)))


def _judge(problem: Problem, result: GenerateResult) -> Outcome:
    verdict, usage = get_task(problem.task).verify(problem, result.text), result.usage
    return Outcome(
        task=problem.task,
        passed=verdict.passed,
        reason=verdict.reason,
        completion_tokens=usage.completion_tokens,
        num_denoise_steps=usage.num_denoise_steps,
        num_commit_forwards=usage.num_commit_forwards,
        num_blocks=usage.num_blocks,
        num_stop_tokens=int(result.record.end_reason in {"eos", "stop_token"}),
        total_s=usage.total_s,
        finish_reason=result.finish_reason,
        executor=result.record.executor,
        dtype=result.record.dtype,
    )


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, verified rate with its 95 % interval, and TPF as ratio of sums and as a distribution over requests.

    `tpf_total` and `tpf_denoise` are ratios of sums; `tpf_total_per_request` holds mean and quantiles of the ratio.
    `tpf_total_orl` counts as ORL's published tables seem to: no stop token, and one commit a block, run or not.
    """
    num, passed = len(outcomes), sum(o.passed for o in outcomes)
    tokens = np.array([o.completion_tokens for o in outcomes], dtype=np.float64)
    steps = np.array([o.num_denoise_steps for o in outcomes], dtype=np.float64)
    forwards = steps + np.array([o.num_commit_forwards for o in outcomes], dtype=np.float64)
    seconds = np.array([o.total_s for o in outcomes], dtype=np.float64)
    num_stop_tokens, num_blocks = sum(o.num_stop_tokens for o in outcomes), sum(o.num_blocks for o in outcomes)
    low, high = wilson_interval(passed, num)
    return {
        "num": num,
        "verified": passed,
        "verified_rate": passed / num if num else 0.0,
        "interval_95": [low, high],
        "tpf_total": float(tokens.sum() / max(1.0, forwards.sum())),
        "tpf_total_orl": float((tokens.sum() - num_stop_tokens) / max(1.0, steps.sum() + num_blocks)),
        "tpf_denoise": float(tokens.sum() / max(1.0, steps.sum())),
        "tpf_total_per_request": _distribution(tokens / np.maximum(forwards, 1)),
        "completion_tokens": _distribution(tokens),
        "empty_share": float(np.mean(tokens <= 1)) if num else 0.0,  # nothing but the stop token
        "cut_share": float(np.mean([o.finish_reason == "length" for o in outcomes])) if num else 0.0,
        "tokens_per_second": float(tokens.sum() / max(1e-9, seconds.sum())),
        "total_s": _distribution(seconds),
        "by_length": _by_length(tokens, forwards, seconds),
    }


def by_task(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """What tables show: the summaries of every task, and of all of them together, one a row of a report's results."""
    rows = {task: [row["tasks"][task] for row in results] for task in results[0]["tasks"]}
    return rows | {"all": [row["all"] for row in results]}


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
