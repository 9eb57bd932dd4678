"""Rates of answered prompts: tokens per second and tokens per forward, each under the name of its formula.

Per answer: N completion tokens (the stop token counts, padding does not), S denoising forwards, C commit forwards,
seconds from the request to the last token. A run's ratio of sums and the distribution of per-answer ratios differ and
are both given; there are no peaks.

Source: definitions of docs/benchmarks.md; Wilson's interval: E. B. Wilson, JASA 22 (1927).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from measure import quantile


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered prompt. Example: ``Answer(num_tokens=41, seconds=0.02, num_denoise_steps=9, ...)``."""

    num_tokens: int  # N
    seconds: float
    num_denoise_steps: int = 0  # S; 0 for auto-regressive models
    num_commit_forwards: int = 0  # C
    num_blocks: int = 0
    ends_with_stop: bool = False  # the last token is a stop token
    passed: bool | None = None  # verified; None: not judged


def tps_e2e(answers: Sequence[Answer]) -> dict[str, float]:
    """N / seconds: quantiles and mean over answers, and `run`, the ratio of sums."""
    values = [answer.num_tokens / answer.seconds for answer in answers]
    run = sum(answer.num_tokens for answer in answers) / sum(answer.seconds for answer in answers)
    return _distribution(values) | {"p99": quantile(values, 0.99), "run": run}


def tpf_total(answers: Sequence[Answer]) -> dict[str, float]:
    """N / (S + C), as `tps_e2e`."""
    values = [answer.num_tokens / (answer.num_denoise_steps + answer.num_commit_forwards) for answer in answers]
    forwards = sum(answer.num_denoise_steps + answer.num_commit_forwards for answer in answers)
    return _distribution(values) | {"run": sum(answer.num_tokens for answer in answers) / forwards}


def tpf_denoise(answers: Sequence[Answer]) -> float:
    """N / S, ratio of sums."""
    return sum(answer.num_tokens for answer in answers) / sum(answer.num_denoise_steps for answer in answers)


def tpf_total_orl(answers: Sequence[Answer]) -> float:
    """(N - stop tokens) / (S + blocks), ratio of sums: how ORL's demo counts."""
    tokens = sum(answer.num_tokens - answer.ends_with_stop for answer in answers)
    return tokens / sum(answer.num_denoise_steps + answer.num_blocks for answer in answers)


def wilson(num_passed: int, num: int) -> tuple[float, float]:
    """95 % interval of a rate."""
    z, rate = 1.959964, num_passed / num
    middle = (rate + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(rate * (1 - rate) / num + z * z / (4 * num * num))
    return middle - half, middle + half


def summarise(answers: Sequence[Answer]) -> dict[str, Any]:
    """All rates that these answers have."""
    lengths = [float(answer.num_tokens) for answer in answers]
    summary: dict[str, Any] = {"num": len(answers), "num_tokens": _distribution(lengths), "tps_e2e": tps_e2e(answers)}
    if all(answer.num_denoise_steps for answer in answers):
        summary |= {
            "tpf_total": tpf_total(answers),
            "tpf_denoise": tpf_denoise(answers),
            "tpf_total_orl": tpf_total_orl(answers),
        }
    judged = [answer.passed for answer in answers if answer.passed is not None]
    if judged:
        low, high = wilson(sum(judged), len(judged))
        summary |= {"verified_rate": sum(judged) / len(judged), "verified_interval": [low, high]}
    return summary


def _distribution(values: Sequence[float]) -> dict[str, float]:
    shares = {"p10": 0.1, "median": 0.5, "p90": 0.9}
    return {"mean": sum(values) / len(values)} | {name: quantile(values, share) for name, share in shares.items()}
