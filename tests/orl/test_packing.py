"""Rows of problems and packed sequences: what is predicted, with which weight, and that packing changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orl.errors import DataError
from orl.packing import (
    CLEAN,
    COIN_STREAM,
    DATA_STREAM,
    NOISE_STREAM,
    PAD,
    Example,
    Noise,
    Rows,
    balance,
    generator,
    pack,
    pack_shares,
    problem_rows,
)
from orl.recipe import ObjectiveSection

MASK, PADDING, STOP = 3, 0, 2
NOISE = Noise(canvas_length=8, mask_token_id=MASK, pad_token_id=PADDING, random_ids=np.arange(4, 60, dtype=np.int32))
UNIFORM = replace(NOISE, mask_token_id=None)

ids = st.integers(4, 59)
prompts = st.lists(ids, min_size=1, max_size=12).map(tuple)
responses = st.lists(ids, max_size=30).map(lambda tokens: (*tokens, STOP))
examples = st.builds(Example, number=st.integers(0, 10_000), prompt_ids=prompts, response_ids=responses)
objectives = st.builds(
    ObjectiveSection,
    kind=st.sampled_from(["mask", "uniform", "ar"]),
    copies=st.integers(1, 4),
    ar_weight=st.sampled_from([0.0, 0.5, 1.0]),
    prompt_weight=st.sampled_from([0.0, 0.25]),
    tail_weight=st.sampled_from([0.0, 0.125, 1.0]),
)


def rows_of(example: Example, objective: ObjectiveSection, seed: int = 0) -> Rows:
    return problem_rows(example, objective, NOISE if objective.kind == "mask" else UNIFORM, seed)


def take(rows: Rows, keep: np.ndarray) -> Rows:
    return Rows(**{f.name: getattr(rows, f.name)[keep] for f in fields(Rows)})


def assert_same(first: Rows, second: Rows, *, but: Sequence[str] = ()) -> None:
    for f in fields(Rows):
        if f.name not in but:
            np.testing.assert_array_equal(getattr(first, f.name), getattr(second, f.name), err_msg=f.name)


@settings(max_examples=50)
@given(example=examples, objective=objectives)
def test_clean_rows_predict_the_next_token_with_the_documented_weights(example: Example, objective: ObjectiveSection):
    rows = rows_of(example, objective)
    clean = take(rows, rows.copy == CLEAN)
    text = example.prompt_ids + example.response_ids
    factor = 1.0 if objective.kind == "ar" else objective.ar_weight
    assert tuple(clean.ids) == text
    assert clean.positions.tolist() == list(range(len(text)))
    assert not clean.is_unresolved.any()
    for position in range(len(text) - 1):
        assert clean.targets[position] == text[position + 1]
        in_prompt = position + 1 < len(example.prompt_ids)
        assert clean.weights[position] == np.float32(factor * (objective.prompt_weight if in_prompt else 1.0))
    assert clean.weights[-1] == 0


@settings(max_examples=50)
@given(example=examples, objective=objectives)
def test_noisy_rows_lie_in_whole_canvases_behind_the_prompt_and_predict_their_own_position(
    example: Example, objective: ObjectiveSection
):
    rows = rows_of(example, objective)
    assert set(np.unique(rows.copy)) == {CLEAN, *(range(objective.copies) if objective.kind != "ar" else ())}
    start, num = len(example.prompt_ids), len(example.response_ids)
    length = -(-num // 8) * 8
    for copy in range(objective.copies if objective.kind != "ar" else 0):
        noisy = take(rows, rows.copy == copy)
        assert noisy.positions.tolist() == list(range(start, start + length))
        assert noisy.block_start.tolist() == [start + slot // 8 * 8 for slot in range(length)]
        assert tuple(noisy.targets[:num]) == example.response_ids
        assert (noisy.targets[num:] == PADDING).all()
        resolved = ~noisy.is_unresolved
        assert (noisy.ids[resolved] == noisy.targets[resolved]).all()
        if objective.kind == "mask":
            assert (noisy.ids[noisy.is_unresolved] == MASK).all()
        else:
            assert np.isin(noisy.ids[noisy.is_unresolved], UNIFORM.random_ids).all()
    assert MASK not in rows.ids[rows.copy == CLEAN]


@settings(max_examples=50)
@given(example=examples, objective=objectives, logit_shift=st.integers(0, 1))
def test_each_target_is_predicted_by_the_row_that_the_decoder_reads(
    example: Example, objective: ObjectiveSection, logit_shift: int
):
    """Itself, or with logit_shift 1 the slot before it in its own canvas, the last clean row for a canvas's first."""
    noise = replace(NOISE if objective.kind == "mask" else UNIFORM, logit_shift=logit_shift)
    rows = problem_rows(example, objective, noise, 0)
    for at in range(len(rows.ids)):
        by = rows.predicted_by[at]
        if rows.copy[at] == CLEAN or not logit_shift:
            assert by == at
        elif rows.positions[at] == rows.block_start[at]:
            assert rows.copy[by] == CLEAN
            assert rows.positions[by] == rows.block_start[at] - 1
        else:
            assert by == at - 1
            assert (rows.copy[by], rows.block_start[by]) == (rows.copy[at], rows.block_start[at])


@settings(max_examples=50)
@given(example=examples, objective=objectives)
def test_flat_weights_are_one_and_the_tail_weight(example: Example, objective: ObjectiveSection):
    """K54: mask noise counts each masked slot once, uniform noise every slot, right of the stop token tail_weight."""
    rows = rows_of(example, objective)
    in_response = rows.positions < len(example.prompt_ids) + len(example.response_ids)
    wanted = np.where(in_response, 1.0, objective.tail_weight).astype(np.float32)
    if objective.kind == "mask":
        wanted = wanted * rows.is_unresolved
    is_noisy = rows.copy >= 0
    np.testing.assert_array_equal(rows.weights[is_noisy], wanted[is_noisy])


@settings(max_examples=50)
@given(example=examples, t_min=st.sampled_from([0.02, 0.3]))
def test_elbo_weights_are_one_over_the_noise_level_of_the_block(example: Example, t_min: float):
    """K54: 1/t of the copy's own level; that of the complement is 1 - t, not below t_min."""
    objective = ObjectiveSection(kind="mask", loss_weight="elbo", copies=2, t_min=t_min, tail_weight=1.0)
    rows = rows_of(example, objective, seed=7)
    num_blocks = -(-len(example.response_ids) // 8)
    level = np.repeat(generator(7, example.number, NOISE_STREAM).uniform(t_min, 1.0, num_blocks), 8)
    for copy, t in ((0, level), (1, np.maximum(1 - level, t_min))):
        noisy = take(rows, rows.copy == copy)
        np.testing.assert_allclose(noisy.weights, noisy.is_unresolved / t, rtol=1e-5)


@settings(max_examples=50)
@given(example=examples, copies=st.sampled_from([2, 4]), loss_weight=st.sampled_from(["flat", "elbo"]))
def test_complementary_masks_cover_each_response_token_exactly_once_a_pair(
    example: Example, copies: int, loss_weight: str
):
    objective = ObjectiveSection(kind="mask", copies=copies, loss_weight=loss_weight)
    rows = rows_of(example, objective)
    for pair in range(0, copies, 2):
        open_ = [rows.is_unresolved[rows.copy == copy] for copy in (pair, pair + 1)]
        assert (open_[0] ^ open_[1]).all()


def test_uniform_noise_draws_every_text_id_and_no_special_one():
    """K56"""
    objective = ObjectiveSection(kind="uniform", copies=4, t_min=1.0)
    seen = set()
    for number in range(40):
        rows = rows_of(Example(number=number, prompt_ids=(5,), response_ids=(6,) * 31 + (STOP,)), objective)
        seen |= set(rows.ids[rows.is_unresolved].tolist())
    assert seen == set(range(4, 60))


def test_noise_level_does_not_depend_on_what_the_problem_number_chose_before():
    """Task and noise of one number come from independent streams, else every task had its own band of noise."""
    first = np.array(
        [[generator(0, n, s).random() for s in (DATA_STREAM, NOISE_STREAM, COIN_STREAM)] for n in range(1000)]
    )
    correlation = np.corrcoef(first.T) - np.eye(3)
    assert np.abs(correlation).max() < 0.15
    objective = ObjectiveSection(kind="mask", copies=1)
    example = Example(number=0, prompt_ids=(5,), response_ids=(6,) * 7 + (STOP,))
    open_share = [rows_of(replace(example, number=n), objective).is_unresolved.mean() for n in range(1000)]
    assert abs(np.corrcoef(first[:, 0], open_share)[0, 1]) < 0.15


@pytest.mark.parametrize("where", ["prompt", "response"])
def test_mask_id_in_the_text_is_refused(where: str):
    """K56: a mask id in clean rows would be trained as a hole."""
    text = {"prompt_ids": (5, 6), "response_ids": (7, STOP), f"{where}_ids": (5, MASK, STOP)}
    with pytest.raises(DataError, match="problem 4 holds the mask token id 3"):
        rows_of(Example(number=4, **text), ObjectiveSection(kind="mask"))


def test_empty_prompt_and_empty_response_give_rows_without_false_targets():
    """K57: a sample with an empty answer has nothing to predict."""
    for kind in ("mask", "uniform", "ar"):
        rows = rows_of(Example(number=0, prompt_ids=(5, 6, 7), response_ids=()), ObjectiveSection(kind=kind))
        assert rows.weights.sum() == 0
        assert len(rows.ids) == 3
        rows = rows_of(Example(number=0, prompt_ids=(), response_ids=(8, STOP)), ObjectiveSection(kind=kind, copies=1))
        assert rows.weights[0] > 0
        assert rows.targets[0] == STOP


@settings(max_examples=25)
@given(pool=st.lists(examples, min_size=1, max_size=14), objective=objectives, extra=st.integers(0, 90))
def test_packing_keeps_every_problem_whole_exactly_once_and_unchanged(
    pool: list[Example], objective: ObjectiveSection, extra: int
):
    pool = [replace(example, number=number) for number, example in enumerate(pool)]
    alone = [rows_of(example, objective) for example in pool]
    length = max(len(rows.ids) for rows in alone) + extra
    seen = []
    for bin_ in pack(alone, length):
        assert all(len(getattr(bin_, f.name)) == length for f in fields(Rows))
        is_padding = bin_.segment == -1
        assert ((bin_.copy == PAD) == is_padding).all()
        assert ((bin_.problem == -1) == is_padding).all()
        assert (bin_.weights[is_padding] == 0).all()
        for segment in range(bin_.segment.max() + 1):
            part = take(bin_, bin_.segment == segment)
            (number,) = set(part.problem.tolist())
            seen.append(number)
            # Same rows whatever the pool, the bin and the neighbours; references between rows move with them.
            assert_same(part, alone[number], but=["segment", "predicted_by"])
            offset = int(np.flatnonzero(bin_.segment == segment)[0])
            np.testing.assert_array_equal(part.predicted_by - offset, alone[number].predicted_by)
    assert sorted(seen) == list(range(len(pool)))


def test_first_fit_decreasing_fills_bins():
    objective = ObjectiveSection(kind="ar")
    sizes = (6, 4, 7, 3, 5, 5)
    problems = [rows_of(Example(number=n, prompt_ids=(5,) * (s - 1), response_ids=(STOP,)), objective)
                for n, s in enumerate(sizes)]  # fmt: skip
    bins = pack(problems, 10)
    assert [sorted(set(b.problem.tolist()) - {-1}) for b in bins] == [[2, 3], [0, 1], [4, 5]]


def test_problem_longer_than_a_packed_sequence_is_refused():
    rows = rows_of(Example(number=0, prompt_ids=(5,) * 10, response_ids=(STOP,)), ObjectiveSection(kind="ar"))
    with pytest.raises(DataError, match="needs 11 rows and pack_tokens is 10; raise data.pack_tokens"):
        pack([rows], 10)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12),
    budget=st.integers(1, 300),
)
def test_every_state_goes_into_exactly_one_micro_batch_within_the_budget(sizes: list[tuple[int, int]], budget: int):
    num_clean, num_states = [clean for clean, _ in sizes], [states for _, states in sizes]
    bins = pack_shares(num_clean, num_states, canvas_length=8, budget=budget)
    placed = sorted((share.response, state) for shares in bins for share in shares for state in share.states)
    assert placed == [(r, s) for r, states in enumerate(num_states) for s in range(states)]
    for shares in bins:
        rows = sum(num_clean[share.response] + 8 * len(share.states) for share in shares)
        assert rows <= budget or (len(shares) == 1 and len(shares[0].states) == 1)
    assert bins == pack_shares(num_clean, num_states, canvas_length=8, budget=budget)


@given(costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=40), num_ranks=st.integers(1, 6))
def test_ranks_share_all_items_and_differ_by_at_most_the_largest(costs: list[float], num_ranks: int):
    ranks = balance(costs, num_ranks)
    assert sorted(i for rank in ranks for i in rank) == list(range(len(costs)))
    totals = [sum(costs[i] for i in rank) for rank in ranks]
    assert max(totals) - min(totals) <= max(costs) + 1e-9
