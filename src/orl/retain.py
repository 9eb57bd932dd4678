"""Which answers train: verified ones, ended by the model itself, that do not repeat themselves or one another.

A failed answer gives no gradient. Dropping failures alone can starve the prompts that the model fails for ever, so the
share of prompts with a kept answer (coverage) is counted beside the share of verified answers.

Source: the verifier gate of ORL (arXiv 2610.20687, project page); the filters are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orl.rollout import RolloutRequest, Trajectory
from orl.tasks import get_task
from orl.tasks.types import Problem, Verdict
from orl.train_recipe import KeepSection


@dataclass(frozen=True, kw_only=True)
class Judged:
    """An answer with its verdict, and why it does not train."""

    problem: Problem
    trajectory: Trajectory
    verdict: Verdict
    dropped: str | None  # None: it trains; else failed, unfinished, repetitive, duplicate or surplus


def judge(requests: Sequence[RolloutRequest], trajectories: Sequence[Trajectory], section: KeepSection) -> list[Judged]:
    """Verify every answer and choose those that train, at most `section.max_per_prompt` a prompt."""
    kept_by_prompt: dict[int, list[tuple[int, ...]]] = {}
    judged = []
    for request, trajectory in zip(requests, trajectories, strict=True):
        verdict = get_task(request.problem.task).verify(request.problem, trajectory.result.text)
        kept = kept_by_prompt.setdefault(request.number, [])
        dropped = _why_dropped(trajectory, verdict, kept, section)
        if dropped is None:
            kept.append(trajectory.result.token_ids)
        judged.append(Judged(problem=request.problem, trajectory=trajectory, verdict=verdict, dropped=dropped))
    return judged


def shared_part(item: Judged) -> Judged:
    """What other processes need of `item`: residuals, nearly all of its bytes, only where it trains."""
    if item.dropped is None:
        return item
    blocks = tuple(replace(block, residual_NLD=None) for block in item.trajectory.blocks)
    return replace(item, trajectory=replace(item.trajectory, blocks=blocks))


def _why_dropped(
    trajectory: Trajectory, verdict: Verdict, kept: Sequence[tuple[int, ...]], section: KeepSection
) -> str | None:
    ids = trajectory.result.token_ids
    if not verdict.passed:
        return "failed"
    if trajectory.result.record.end_reason not in ("eos", "stop_token"):
        return "unfinished"
    if repeated_share(ids) > section.max_repeated_share:
        return "repetitive"
    if ids in kept:
        return "duplicate"
    if section.max_per_prompt and len(kept) >= section.max_per_prompt:
        return "surplus"
    return None


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """1 - distinct n-grams / n-grams of `ids`; 0 for fewer than n ids."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
