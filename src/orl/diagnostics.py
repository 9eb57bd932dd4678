"""What the rollouts of one update say about the policy: verified rate, contraction, calibration, variety, lengths.

Tokens per forward is never read alone: a model that becomes sure of wrong tokens decodes faster too. Beside it stand
the verified rate, the calibration error over undecided slots, and the share of decided tokens that stayed.

Source: definitions in docs/design.md (training); ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from orl.retain import Judged, repeated_share
from orl.rollout import BlockTrajectory

NUM_BINS = 15  # of the calibration error


def rollout_report(judged: Sequence[Judged], *, rho: float) -> dict[str, Any]:
    """Figures over all answers of an update, kept or not; `rho` is the contraction that is asked for."""
    results = [item.trajectory.result for item in judged]
    blocks = [block for item in judged for block in item.trajectory.blocks]
    num_tokens = np.array([result.usage.completion_tokens for result in results])
    forwards = sum(result.usage.num_forwards for result in results)
    numbers = {item.trajectory.number for item in judged}
    kept = [item for item in judged if item.dropped is None]
    passed = np.array([item.verdict.passed for item in judged])
    ratios = np.array([ratio for block in blocks for ratio in contraction_ratios(block)])
    confidence, is_right = calibration_pairs(blocks)
    return {
        "num_answers": len(judged),
        "verified_rate": float(passed.mean()),
        "kept_share": len(kept) / len(judged),
        "coverage": len({item.trajectory.number for item in kept}) / len(numbers),
        "dropped": dict(Counter(item.dropped for item in judged if item.dropped is not None)),
        "tpf_total": float(num_tokens.sum() / max(1, forwards)),
        "steps_per_block": _mean([len(block.canvas_KL) for block in blocks]),
        "contraction_ratio": float(np.median(ratios)) if len(ratios) else None,
        "contracted_share": float((ratios <= 1 - rho).mean()) if len(ratios) else None,
        "acceptance_precision": acceptance_precision(blocks),
        "calibration_error": calibration_error(confidence, is_right),
        "tokens_verified": _mean(num_tokens[passed]),
        "tokens_failed": _mean(num_tokens[~passed]),
        "distinct_2": distinct_n([result.token_ids for result in results], 2),
        "repeated_4": _mean([repeated_share(result.token_ids) for result in results]),
        "num_generated_tokens": int(num_tokens.sum()),
        "num_kept_tokens": sum(item.trajectory.result.usage.completion_tokens for item in kept),
    }


def contraction_ratios(block: BlockTrajectory) -> Iterator[float]:
    """Mean entropy over open slots of a step over that of the step before, where both have open slots of the answer.

    Only of pairs at one temperature: a temperature that falls would contract entropies by itself.
    """
    is_open_KL = block.is_unresolved_KL & block.is_answer_L
    means = [float(h[u].mean()) if u.any() else 0.0 for h, u in zip(block.entropy_KL, is_open_KL, strict=True)]
    for step in range(1, len(means)):
        is_comparable = block.temperature_K[step] == block.temperature_K[step - 1]
        if is_comparable and means[step - 1] > 0 and is_open_KL[step].any():
            yield means[step] / means[step - 1]


def acceptance_precision(blocks: Sequence[BlockTrajectory]) -> float | None:
    """Share of decided tokens of the answer that are the final ones; 1 where decided slots never change."""
    num_accepted = num_final = 0
    for block in blocks:
        after_KL = np.vstack([block.canvas_KL[1:], block.ids_L[None]])  # what a step's decisions look like after it
        accepted_KL = block.committed_KL & block.is_answer_L
        num_accepted += int(accepted_KL.sum())
        num_final += int((accepted_KL & (after_KL == block.ids_L)).sum())
    return num_final / num_accepted if num_accepted else None


def calibration_pairs(blocks: Sequence[BlockTrajectory]) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.bool_]]:
    """Confidence of the argmax at every open slot of the answer in every step, and whether it is the final id."""
    confidence, is_right = [np.zeros(0, dtype=np.float32)], [np.zeros(0, dtype=np.bool_)]
    for block in blocks:
        is_open_KL = block.is_unresolved_KL & block.is_answer_L
        confidence.append(block.confidence_KL[is_open_KL])
        is_right.append((block.argmax_KL == block.ids_L)[is_open_KL])
    return np.concatenate(confidence), np.concatenate(is_right)


def calibration_error(confidence: npt.NDArray[np.floating], is_right: npt.NDArray[np.bool_]) -> float | None:
    """Expected calibration error over equal bins: mean |share right - mean confidence|, weighted by bin size."""
    if not len(confidence):
        return None
    bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=is_right - confidence.astype(np.float64), minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def distinct_n(answers: Sequence[Sequence[int]], n: int) -> float | None:
    """Distinct n-grams over all n-grams of all answers."""
    grams = [tuple(ids[i : i + n]) for ids in answers for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def _mean(values: Sequence[float] | npt.NDArray[np.integer]) -> float | None:
    return float(np.mean(values)) if len(values) else None
