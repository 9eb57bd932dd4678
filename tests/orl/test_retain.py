"""Which answers train, and what the diagnostics say: on answers written by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.types import GenerateResult, RequestRecord, Usage
from orl.diagnostics import (
    acceptance_precision,
    calibration_error,
    calibration_pairs,
    contraction_ratios,
    distinct_n,
    rollout_report,
)
from orl.retain import judge, repeated_share, shared_part
from orl.rollout import BlockTrajectory, RolloutRequest, Trajectory
from orl.tasks import get_task
from orl.train_recipe import KeepSection

PROBLEMS = [get_task("spell_backward").problem(n) for n in range(3)]


def block(*, num_answer: int = 3, **changes: Any) -> BlockTrajectory:
    """Slots 0-3, answer in 0-2, three steps: slot 0 is decided first, then 1 and 2; slot 3 stays open."""
    fields: dict[str, Any] = {
        "start": 10, "ids_L": np.array([7, 8, 9, 3]), "num_pinned": 0, "num_answer": num_answer,
        "canvas_KL": np.array([[3, 3, 3, 3], [7, 3, 3, 3], [7, 8, 3, 3]]),
        "is_unresolved_KL": np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]], dtype=bool),
        "committed_KL": np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=bool),
        "entropy_KL": np.array([[0.1, 0.4, 1.0, 9.0], [0.0, 0.2, 0.4, 9.0], [0.0, 0.0, 0.3, 9.0]], dtype=np.float32),
        "argmax_KL": np.array([[7, 8, 5, 0], [7, 8, 5, 0], [7, 8, 9, 0]]),
        "confidence_KL": np.array([[0.9, 0.8, 0.4, 0.1], [1, 0.9, 0.6, 0.1], [1, 1, 0.7, 0.1]], dtype=np.float32),
        "temperature_K": np.ones(3, dtype=np.float32), "kept_steps": (0,), "residual_NLD": None,
    }  # fmt: skip
    return BlockTrajectory(**{**fields, **changes})


def answer(number: int, text: str, ids: Sequence[int] = (7, 8, 9), end_reason: str = "eos") -> Trajectory:
    usage = Usage(
        prompt_tokens=10, completion_tokens=len(ids), num_prefill_forwards=1, num_denoise_steps=3,
        num_commit_forwards=0, num_blocks=1, num_edits=0, prefill_s=0, decode_s=0, time_to_first_block_s=0, total_s=0,
    )  # fmt: skip
    record = RequestRecord(
        seed=0, executor="scripted", dtype="float32", commit_rule="threshold", end_reason=end_reason, forwards=(),
        num_blocks=1, num_cached_prompt_tokens=0, settings={}, prompt_token_ids=(1,),
    )  # fmt: skip
    result = GenerateResult(text=text, token_ids=tuple(ids), finish_reason="stop", usage=usage, record=record)
    return Trajectory(number=number, response_idx=0, seed=0, policy_version=0, result=result, blocks=(block(),))


def judged(answers: Sequence[Trajectory], section: KeepSection) -> list[Any]:
    requests = [RolloutRequest(problem=PROBLEMS[a.number], number=a.number, response_idx=0) for a in answers]
    return judge(requests, answers, section)


def test_only_verified_finished_distinct_answers_train_up_to_the_cap():
    gold = [problem.response for problem in PROBLEMS]
    answers = [
        answer(0, "wrong"),
        answer(0, gold[0], (1, 2, 3)),
        answer(0, gold[0], (1, 2, 3)),
        answer(0, gold[0], (1, 2, 4)),
        answer(0, gold[0], (1, 2, 5)),
        answer(1, gold[1], (1, 2, 3), end_reason="max_tokens"),
        answer(1, gold[1], (5, 5, 5, 5, 5, 5, 5)),
        answer(2, gold[2], (1, 2, 3)),
    ]
    found = judged(answers, KeepSection(max_per_prompt=2))
    wanted = ["failed", None, "duplicate", None, "surplus", "unfinished", "repetitive", None]
    assert [item.dropped for item in found] == wanted
    assert [item.verdict.passed for item in found] == [False] + [True] * 7
    assert [item.dropped for item in judged(answers, KeepSection(max_per_prompt=0))][4] is None


def test_residuals_of_dropped_answers_do_not_travel():
    gold = PROBLEMS[0].response
    residual = np.zeros((1, 4, 2), dtype=np.float32)
    answers = [
        dataclasses.replace(answer(0, text), blocks=(block(kept_steps=(0, 1), residual_NLD=residual),))
        for text in ("wrong", gold)
    ]
    dropped, kept = found = judged(answers, KeepSection())
    assert shared_part(kept) is kept
    assert shared_part(dropped).trajectory.blocks[0].residual_NLD is None
    report = rollout_report(found, rho=0.25)
    assert rollout_report(list(map(shared_part, found)), rho=0.25) == report


def test_report_counts_coverage_and_kept_share():
    gold = [problem.response for problem in PROBLEMS]
    answers = [answer(0, "wrong"), answer(0, gold[0]), answer(1, "wrong"), answer(2, gold[2], (1, 2, 3, 4, 5))]
    report = rollout_report(judged(answers, KeepSection()), rho=0.25)
    assert (report["num_answers"], report["verified_rate"], report["kept_share"]) == (4, 0.5, 0.5)
    assert report["coverage"] == pytest.approx(2 / 3)
    assert report["dropped"] == {"failed": 2}
    assert report["tpf_total"] == pytest.approx((3 + 3 + 3 + 5) / 12)
    assert (report["tokens_verified"], report["tokens_failed"]) == (4.0, 3.0)
    assert (report["num_generated_tokens"], report["num_kept_tokens"]) == (14, 8)
    assert (report["steps_per_block"], report["acceptance_precision"]) == (3.0, 1.0)


def test_contraction_reads_open_slots_of_the_answer_only():
    """Means 0.5, 0.3, 0.3: slot 3 lies right of the end."""
    assert list(contraction_ratios(block())) == pytest.approx([0.6, 1.0])
    assert list(contraction_ratios(block(num_answer=2))) == pytest.approx([0.2 / 0.25])
    assert list(contraction_ratios(block(temperature_K=np.array([0.8, 0.6, 0.6])))) == pytest.approx([1.0])


def test_calibration_and_precision_by_hand():
    confidence, is_right = calibration_pairs([block()])
    np.testing.assert_allclose(confidence, [0.9, 0.8, 0.4, 0.9, 0.6, 0.7], rtol=1e-6)
    assert is_right.tolist() == [True, True, False, True, False, True]
    # Bins of 1/15: 0.9 twice, the others alone.
    assert calibration_error(confidence, is_right) == pytest.approx((0.2 + 0.2 + 0.4 + 0.6 + 0.3) / 6, rel=1e-5)
    assert calibration_error(np.zeros(0), np.zeros(0, dtype=bool)) is None
    changed = block(canvas_KL=np.array([[3, 3, 3, 3], [6, 3, 3, 3], [7, 8, 3, 3]]))
    assert acceptance_precision([changed]) == pytest.approx(2 / 3)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repeated_share_and_distinct_n_are_complements_for_one_answer(ids: list[int], n: int):
    distinct = distinct_n([ids], n)
    assert 0 <= repeated_share(ids, n) < 1
    assert distinct is None or distinct == pytest.approx(1 - repeated_share(ids, n))
    assert (distinct is None) == (len(ids) < n)
