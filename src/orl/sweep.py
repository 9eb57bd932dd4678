"""Sweeping several models over the same decode settings and prompts, resumably.

Models run one after the other, each through the engine a user runs; answers go to one log a model in the sweep's
folder (`orl.answer_log`).

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlmrt.checkpoint.hub import resolve
from dlmrt.decode.engine import Engine
from dlmrt.errors import UsageError
from dlmrt.models.config import load_config
from dlmrt.types import GenerateResult
from orl.answer_log import AnswerLog, identity_of
from orl.evaluate import Outcome, Setting, evaluate, kind_of, prompt_digest
from orl.progress import CountBar
from orl.tasks.types import Problem

# Knob, settings that go with it, and values from conservative to fast, by the checkpoint's kind.
DEFAULT_SWEEPS = {
    "mask": ("threshold=0.99,0.95,0.9,0.8,0.7,0.6,0.5,0.4,0.3", "commit_rule=threshold"),
    "uniform": ("entropy_bound=0.02,0.05,0.1,0.2,0.4,0.8,1.6,3.2", "commit_rule=entropy_bound"),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every model of a sweep is asked, and how."""

    problems: tuple[Problem, ...]
    settings: tuple[Setting, ...]  # empty: the default sweep of the models' kind
    seed: int
    executor: str
    dtype: str
    num_threads: int | None


def named_models(arguments: Sequence[str]) -> dict[str, str]:
    """Name -> model of ``NAME=MODEL`` or ``MODEL``; a folder called "model" takes the name of its run.

    Raises:
        UsageError: two models of one name.
    """
    found: dict[str, str] = {}
    for argument in arguments:
        name, equals, model = argument.partition("=")
        if not equals:
            path = Path(argument)
            name, model = path.parent.name if path.name == "model" and path.parent.name else path.name, argument
        if not name or "/" in name or name in found:
            raise UsageError(f"{argument!r} has no name of its own; write NAME={model or 'MODEL'}")
        found[name] = model
    return found


def sweep_settings(sweep: str, fixed: str, settings: Sequence[str]) -> list[Setting]:
    """Settings of ``KEY=V,V,...`` (each with those of `fixed`), then the ones spelled out; names are the knob's value.

    Raises:
        UsageError: no value, `fixed` without a sweep, or a setting twice.
    """
    if fixed and not sweep:
        raise UsageError("--fixed goes with --sweep; give --sweep KEY=VALUE,VALUE")
    found = []
    if sweep:
        key, _, values = sweep.partition("=")
        if not values:
            raise UsageError(f"--sweep {sweep!r} has no values; write --sweep KEY=VALUE,VALUE")
        found = [
            Setting.parse(f"{key}={v}:" + ",".join(filter(None, (f"{key}={v}", fixed)))) for v in values.split(",")
        ]
    found += [Setting.parse(text) for text in settings]
    keys = [setting.key for setting in found]
    for setting in found:
        if keys.count(setting.key) > 1:
            raise UsageError(f"setting {setting.name!r} is there twice; every point of a sweep must differ")
    return found


def sweep_models(
    models: Mapping[str, str], plan: Plan, folder: Path, *, show_progress: bool = False
) -> dict[str, dict[str, Any]]:
    """Report of `orl.evaluate.evaluate` by model name; answers already in `folder` are not asked for again.

    Raises:
        UsageError: models of different kinds without settings that all of them know.
        AnswerLogError: the folder holds answers of another checkpoint, seed or executor.
    """
    places = {name: resolve(model) for name, model in models.items()}
    if not plan.settings:
        plan = replace(plan, settings=_default_settings(places))
    logs = {
        name: AnswerLog(
            folder / f"answers_{name}.jsonl",
            identity_of(place, seed=plan.seed, executor=plan.executor, dtype=plan.dtype, num_threads=plan.num_threads),
        )
        for name, place in places.items()
    }  # all of them before the first answer: a refusal must not come after an hour
    return {name: _sweep(name, places[name], plan, log, show_progress) for name, log in logs.items()}


def _default_settings(places: Mapping[str, Path]) -> tuple[Setting, ...]:
    kinds = {name: kind_of(load_config(place)) for name, place in places.items()}
    if len(set(kinds.values())) > 1 or "ar" in kinds.values():
        found = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise UsageError(f"there is no default sweep for these models ({found}); give --sweep or --setting for all")
    return tuple(sweep_settings(*DEFAULT_SWEEPS[next(iter(kinds.values()))], ()))


def _sweep(name: str, place: Path, plan: Plan, log: AnswerLog, show_progress: bool) -> dict[str, Any]:
    total = len(plan.problems) * len(plan.settings)
    with (
        log,
        CountBar(total, name, enabled=show_progress) as bar,
        Engine.load(place, executor=plan.executor, dtype=plan.dtype, num_threads=plan.num_threads) as engine,
    ):
        digests = list(map(prompt_digest, plan.problems))
        bar.advance(sum((setting.key, digest) in log.known for setting in plan.settings for digest in digests))

        def on_answer(setting: Setting, problem: Problem, result: GenerateResult, outcome: Outcome) -> None:
            log.append(setting, problem, outcome)
            bar.advance()

        report = evaluate(engine, plan.problems, plan.settings, seed=plan.seed, known=log.known, on_answer=on_answer)
    report["conditions"]["model"] = name
    return report
