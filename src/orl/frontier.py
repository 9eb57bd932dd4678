"""Accuracy against tokens per forward over a decode knob, and what one model gains on another at equal accuracy.

One knob proves nothing: a model can look faster at a threshold because it has become surer of itself and wrong. So each
model is swept over the same knobs and prompts, and models are compared at *matched accuracy*: F(a) is the most tokens
per forward that a curve reaches with accuracy at least a, on the straight lines between its Pareto points; it is read
at a* = the baseline's best accuracy minus a tolerance (half a point).

Intervals: percentile bootstrap over prompts, with the same resampled prompts for every model
(paired) and with a* taken anew in each resample, so that the choice of the baseline's best knob is part of the
uncertainty. A resample in which a model does not reach a* counts as 0 tokens per forward for it.

Legend: K knobs, P prompts, R resamples.

Source: ours; the half point is the criterion of ORL's project page (arXiv 2610.20687). Percentile bootstrap: B. Efron,
R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from orl.errors import ReportError
from orl.evaluate import SCHEMA as EVALUATE_SCHEMA
from orl.evaluate import Setting

SCHEMA = "orl.frontier/1"
TOLERANCE = 0.005
NUM_RESAMPLES = 2000
ALL = "all"  # name of the row over every task, as in reports

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One model's answers: K settings of the decode knob over P prompts."""

    model: str
    settings: tuple[str, ...]
    keys: tuple[str, ...]  # settings' keys: equal options, equal key
    prompts: tuple[str, ...]  # digests
    tasks: tuple[str, ...]  # of each prompt
    passed_KP: Float
    tokens_KP: Float
    forwards_KP: Float  # denoise and commit
    seconds_KP: Float

    @classmethod
    def of(cls, model: str, report: Mapping[str, Any]) -> Sweep:
        """The sweep in a report of `orl.evaluate.evaluate`.

        Raises:
            ReportError: it is another document, or one of a version that kept no single answers.
        """
        if report.get("schema") != EVALUATE_SCHEMA:
            raise ReportError(
                f"{model} is a document of schema {report.get('schema')!r}, not {EVALUATE_SCHEMA!r}; evaluate it again"
            )
        rows = report["results"]

        def table(name: str) -> Float:
            return np.array([row["answers"][name] for row in rows], dtype=np.float64)

        return cls(
            model=model,
            settings=tuple(row["setting"] for row in rows),
            keys=tuple(Setting(name="", options=row["options"]).key for row in rows),
            prompts=tuple(report["prompts"]["digest"]),
            tasks=tuple(report["prompts"]["task"]),
            passed_KP=table("passed"),
            tokens_KP=table("completion_tokens"),
            forwards_KP=table("num_denoise_steps") + table("num_commit_forwards"),
            seconds_KP=table("total_s"),
        )

    def select(self, prompts: Sequence[int]) -> Sweep:
        """The same sweep over the prompts with these places."""
        chosen = list(prompts)
        return Sweep(
            model=self.model, settings=self.settings, keys=self.keys,
            prompts=tuple(self.prompts[i] for i in chosen), tasks=tuple(self.tasks[i] for i in chosen),
            passed_KP=self.passed_KP[:, chosen], tokens_KP=self.tokens_KP[:, chosen],
            forwards_KP=self.forwards_KP[:, chosen], seconds_KP=self.seconds_KP[:, chosen],
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Points of a sweep in each resample."""

    accuracy_RK: Float
    tpf_RK: Float
    speed_RK: Float  # tokens per second

    @classmethod
    def of(cls, sweep: Sweep, counts_RP: Float) -> Curves:
        """The points when prompt p counts `counts_RP[r, p]` times."""
        tokens = counts_RP @ sweep.tokens_KP.T
        return cls(
            accuracy_RK=counts_RP @ sweep.passed_KP.T / counts_RP.sum(axis=1, keepdims=True),
            tpf_RK=tokens / np.maximum(counts_RP @ sweep.forwards_KP.T, 1.0),
            speed_RK=tokens / np.maximum(counts_RP @ sweep.seconds_KP.T, 1e-9),
        )


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Where each resample's curve crosses an accuracy; 0 where it does not reach it."""

    tpf_R: Float
    speed_R: Float
    is_edge_R: npt.NDArray[np.bool_]  # no knob as fast is too inaccurate: the curve may go on


def matched(curves: Curves, floor_R: Float) -> Matched:
    """F(floor) of each resample, and the speed at that point; a floor of NaN is reached by no curve."""
    accuracy, tpf = curves.accuracy_RK, curves.tpf_RK
    rows = np.arange(len(tpf))
    is_enough = accuracy >= floor_R[:, None] - 1e-12  # sums in another order must not lose a point
    left = _best(is_enough, tpf, accuracy)
    # What lies right of it is less accurate than the floor; its next Pareto point is the most accurate of these.
    is_right = tpf > tpf[rows, left][:, None]
    right = np.where(is_right.any(axis=1), _best(is_right, accuracy, tpf), left)
    drop = accuracy[rows, left] - accuracy[rows, right]
    share = np.divide(accuracy[rows, left] - floor_R, drop, out=np.zeros_like(drop), where=drop > 0).clip(0, 1)
    reaches = is_enough.any(axis=1)
    goes_on = ~(~is_enough & (tpf >= tpf[rows, left][:, None])).any(axis=1)

    def between(values: Float) -> Float:
        low, high = values[rows, left], values[rows, right]
        return np.where(reaches, low + (high - low) * share, 0.0)

    return Matched(tpf_R=between(tpf), speed_R=between(curves.speed_RK), is_edge_R=reaches & goes_on)


def _best(allowed_RK: npt.NDArray[np.bool_], first_RK: Float, second_RK: Float) -> npt.NDArray[np.intp]:
    """Per row the allowed place with the largest `first`, among equals the largest `second`; 0 where none is."""
    first = np.where(allowed_RK, first_RK, -np.inf)
    ties = allowed_RK & (first == first.max(axis=1, keepdims=True))
    return np.asarray(np.argmax(np.where(ties, second_RK, -np.inf), axis=1))


def matched_tpf(points: Sequence[tuple[float, float]], accuracy: float) -> float | None:
    """F(accuracy) of a curve of (accuracy, tokens per forward); None where it does not reach that."""
    accuracies, tpfs = (np.array([column], dtype=np.float64) for column in zip(*points, strict=True))
    found = matched(Curves(accuracy_RK=accuracies, tpf_RK=tpfs, speed_RK=tpfs), np.array([accuracy]))
    return float(found.tpf_R[0]) or None


def floor_of(curves: Curves, tolerance: float) -> Float:
    """a* of a baseline in each resample (see `accuracy_floor`)."""
    return np.array([accuracy_floor(best, tolerance) for best in curves.accuracy_RK.max(axis=1).tolist()])


def accuracy_floor(best: float, tolerance: float) -> float:
    """a* of a baseline whose best accuracy is `best`: never 0, which every curve reaches, however wrong.

    NaN, which no one can match, where the baseline verifies nothing.
    """
    if not best > 0:
        return math.nan
    return best - tolerance if best > tolerance else best


def pareto(accuracy_K: Float, tpf_K: Float) -> list[int]:
    """Places of the points that no other point equals or beats in both, from slow to fast."""
    order = np.lexsort((accuracy_K, tpf_K))[::-1]
    found: list[int] = []
    for i in order.tolist():
        if not found or accuracy_K[i] > accuracy_K[found[-1]]:
            found.append(i)
    return found[::-1]


def resample(num_prompts: int, *, num_resamples: int, seed: int) -> Float:
    """How often each prompt counts, [1 + R, P]; row 0 is the sample itself."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    drawn = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples)
    return np.concatenate([np.ones((1, num_prompts)), drawn]).astype(np.float64)


def interval(values: Float) -> list[float]:
    """95 % percentile interval of resampled values."""
    return [float(v) for v in np.percentile(values, [2.5, 97.5])]


def frontier_report(
    sweeps: Sequence[Sweep], *, tolerance: float = TOLERANCE, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Curves of every model, and each one at the accuracy of the first; JSON-ready.

    Raises:
        ReportError: the models were swept over other settings or prompts than the first.
    """
    first = sweeps[0]
    for sweep in sweeps[1:]:
        if (sweep.keys, sweep.prompts) != (first.keys, first.prompts):
            raise ReportError(
                f"{sweep.model} and {first.model} were swept over different settings or prompts; sweep them together"
            )
    names = dict.fromkeys(first.tasks)
    places: dict[str, Sequence[int]] = {ALL: range(len(first.prompts))}
    if len(names) > 1:
        places |= {name: [i for i, task in enumerate(first.tasks) if task == name] for name in names}
    found: dict[str, Any] = {}
    for name, chosen in places.items():
        counts = resample(len(chosen), num_resamples=num_resamples, seed=seed)
        found[name] = _compare_curves([sweep.select(chosen) for sweep in sweeps], counts, tolerance)
    return {
        "schema": SCHEMA, "baseline": first.model, "tolerance": tolerance, "num_prompts": len(first.prompts),
        "num_resamples": num_resamples, "bootstrap_seed": seed, "tasks": found,
    }  # fmt: skip


def _compare_curves(sweeps: Sequence[Sweep], counts: Float, tolerance: float) -> dict[str, Any]:
    curves = [Curves.of(sweep, counts) for sweep in sweeps]
    floor = floor_of(curves[0], tolerance)
    at_floor = [matched(curve, floor) for curve in curves]
    rows = {}
    for sweep, curve, match in zip(sweeps, curves, at_floor, strict=True):
        efficient = pareto(curve.accuracy_RK[0], curve.tpf_RK[0])
        rows[sweep.model] = {
            "points": [
                {
                    "setting": setting,
                    "verified_rate": float(curve.accuracy_RK[0, k]),
                    "verified_rate_95": interval(curve.accuracy_RK[1:, k]),
                    "tpf_total": float(curve.tpf_RK[0, k]),
                    "tpf_total_95": interval(curve.tpf_RK[1:, k]),
                    "tokens_per_second": float(curve.speed_RK[0, k]),
                    "tokens_per_second_95": interval(curve.speed_RK[1:, k]),
                    "is_pareto": k in efficient,
                }
                for k, setting in enumerate(sweep.settings)
            ],
            "at_matched_accuracy": _at_matched(match, at_floor[0]),
        }
    return {"matched_accuracy": None if math.isnan(floor[0]) else float(floor[0]), "models": rows}


def _at_matched(match: Matched, base: Matched) -> dict[str, Any]:
    """TPF and speed at the floor; null where the model does not reach it."""
    tpf_ratio, speed_ratio = (
        np.divide(mine, theirs, out=np.zeros_like(mine), where=theirs > 0)
        for mine, theirs in ((match.tpf_R, base.tpf_R), (match.speed_R, base.speed_R))
    )
    is_reached = bool(match.tpf_R[0] > 0)
    return {
        "is_reached": is_reached,
        "reached_share": float((match.tpf_R[1:] > 0).mean()),  # of the resamples
        "is_edge": bool(match.is_edge_R[0]),
        "tpf_total": float(match.tpf_R[0]) if is_reached else None,
        "tpf_total_95": interval(match.tpf_R[1:]),
        "tokens_per_second": float(match.speed_R[0]) if is_reached else None,
        "tokens_per_second_95": interval(match.speed_R[1:]),
        "tpf_ratio": float(tpf_ratio[0]) if is_reached else None,
        "tpf_ratio_95": interval(tpf_ratio[1:]),
        "speed_ratio": float(speed_ratio[0]) if is_reached else None,
        "speed_ratio_95": interval(speed_ratio[1:]),
        "verdict": verdict(interval(tpf_ratio[1:]), neutral=1.0),
    }


def verdict(interval_95: Sequence[float], *, neutral: float) -> str:
    """Where the interval of a difference or ratio lies: "higher", "lower", or "overlap" when it holds `neutral`."""
    low, high = interval_95
    return "higher" if low > neutral else "lower" if high < neutral else "overlap"


def compare(first: Sweep, second: Sweep, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> dict[str, Any]:
    """Paired difference of `second` to `first` at each setting that both have, over the prompts that both answered.

    Raises:
        ReportError: they share no setting or no prompt.
    """
    places = {digest: i for i, digest in enumerate(second.prompts)}
    common = [digest for digest in first.prompts if digest in places]
    keys = [key for key in first.keys if key in second.keys]
    if not common or not keys:
        raise ReportError(
            f"{first.model} and {second.model} have {len(common)} prompts and {len(keys)} settings in common; evaluate "
            "both with the same --setting, --task and --problems"
        )
    own = {digest: i for i, digest in enumerate(first.prompts)}
    counts = resample(len(common), num_resamples=num_resamples, seed=seed)
    left = Curves.of(first.select([own[d] for d in common]), counts)
    right = Curves.of(second.select([places[d] for d in common]), counts)
    rows = []
    for key in keys:
        i, j = first.keys.index(key), second.keys.index(key)
        rate = right.accuracy_RK[:, j] - left.accuracy_RK[:, i]
        tpf = right.tpf_RK[:, j] / np.maximum(left.tpf_RK[:, i], 1e-9)
        rows.append(
            {
                "setting": first.settings[i],
                "verified_rate": [float(left.accuracy_RK[0, i]), float(right.accuracy_RK[0, j])],
                "difference": float(rate[0]),
                "difference_95": interval(rate[1:]),
                "accuracy": verdict(interval(rate[1:]), neutral=0.0),
                "tpf_total": [float(left.tpf_RK[0, i]), float(right.tpf_RK[0, j])],
                "tpf_ratio": float(tpf[0]),
                "tpf_ratio_95": interval(tpf[1:]),
                "tpf": verdict(interval(tpf[1:]), neutral=1.0),
            }
        )
    return {
        "models": [first.model, second.model], "num_prompts": len(common), "num_resamples": num_resamples,
        "prompts_left_out": [len(first.prompts) - len(common), len(second.prompts) - len(common)],
        "settings_left_out": [len(first.keys) - len(keys), len(second.keys) - len(keys)],
        "results": rows,
    }  # fmt: skip
