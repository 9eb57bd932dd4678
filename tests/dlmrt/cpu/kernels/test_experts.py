"""Routing and the products of experts: rules by hand in numpy, formats, row and thread invariance, poisoned rows.

Legend: as native; E experts, T choices of a row.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from native import (
    BF16,
    F32,
    INT8,
    NVFP4,
    Array,
    CombineArgs,
    ExpertLinearArgs,
    GatherArgs,
    GroupArgs,
    RouteSigmoidArgs,
    RouteSoftmaxArgs,
    Rows,
    Source,
    Weight,
    aligned,
    call,
    float_source,
    library,
    linear,
    operand,
    pack,
    ptr,
    runnable,
)
from test_linear import NvFp4

FORMATS = {F32: F32, BF16: BF16, INT8: INT8, NVFP4: INT8}  # weight -> operand


def best(values: Array, count: int) -> Array:
    """Indices of the highest, the lower of equals first."""
    return np.argsort(-values, kind="stable")[:count]


def route_sigmoid(logits: Array, bias: Array, top_k: int, threads: int = 1, **rule: int) -> tuple[Array, Array]:
    """Chosen experts and weights [M, T]."""
    m, e = logits.shape
    rule = {"groups": 1, "kept_groups": 1, "capacity": 0, "block_length": 1} | rule
    chosen, weights = np.full((m, top_k), -1, np.int32), np.zeros((m, top_k), np.float32)
    args = RouteSigmoidArgs(
        ptr(logits), ptr(bias), m, e, top_k, rule["groups"], rule["kept_groups"], rule["capacity"],
        rule["block_length"], 2.5, ptr(chosen), ptr(weights),
    )  # fmt: skip
    call("route_sigmoid", "", args, threads)
    return chosen, weights


def expected_route(logits: Array, bias: Array, top_k: int, admitted: Callable[[Array, int], Array]) -> None:
    """Compares with the rule in float64; `admitted` gives the experts that a row may take."""
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    ranked = (scores + bias).astype(np.float32)
    for row in range(len(logits)):
        allowed = admitted(ranked, row)
        values = np.where(np.isin(np.arange(len(bias)), allowed), ranked[row], -np.inf)
        yield row, np.sort(best(values, top_k)), scores[row]


@pytest.mark.parametrize(("groups", "kept_groups"), [(1, 1), (8, 4), (4, 2), (16, 3)])
def test_groups_limit_the_choice(groups: int, kept_groups: int, rng: np.random.Generator) -> None:
    """K33: the bias selects and does not weigh."""
    logits = rng.standard_normal((37, 64), dtype=np.float32)
    bias = rng.standard_normal(64).astype(np.float32) * 0.3

    def admitted(ranked: Array, row: int) -> Array:
        pairs = np.sort(ranked[row].reshape(groups, -1), axis=1)[:, -2:].sum(1)
        return np.flatnonzero(np.isin(np.arange(64) // (64 // groups), best(pairs, kept_groups)))

    chosen, weights = route_sigmoid(logits, bias, 6, 3, groups=groups, kept_groups=kept_groups)
    for row, experts, scores in expected_route(logits, bias, 6, admitted):
        assert chosen[row].tolist() == experts.tolist()
        np.testing.assert_allclose(weights[row], 2.5 * scores[experts] / scores[experts].sum(), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 13, 37])
def test_blocks_share_their_experts(rows: int, rng: np.random.Generator) -> None:
    """The last block has the rows that are left."""
    logits = rng.standard_normal((rows, 32), dtype=np.float32)
    bias = rng.standard_normal(32).astype(np.float32) * 0.3

    def admitted(ranked: Array, row: int) -> Array:
        return best(ranked[row // 8 * 8 : row // 8 * 8 + 8].max(0), 10)

    chosen, _ = route_sigmoid(logits, bias, 4, 2, capacity=10, block_length=8)
    for row, experts, _ in expected_route(logits, bias, 4, admitted):
        assert chosen[row].tolist() == experts.tolist()


def test_ties_go_to_the_lower_expert_and_one_choice_is_not_normalised() -> None:
    flat, bias = np.zeros((3, 8), np.float32), np.zeros(8, np.float32)
    for rule in ({}, {"groups": 4, "kept_groups": 2}, {"capacity": 5, "block_length": 2}):
        assert route_sigmoid(flat, bias, 3, **rule)[0].tolist() == [[0, 1, 2]] * 3
    assert route_sigmoid(flat, bias, 1)[1].tolist() == [[1.25]] * 3


def test_softmax_router(rng: np.random.Generator) -> None:
    logits, scales = rng.standard_normal((9, 16), dtype=np.float32), rng.random(16).astype(np.float32)
    chosen, weights = np.full((9, 3), -1, np.int32), np.zeros((9, 3), np.float32)
    args = RouteSoftmaxArgs(ptr(logits), ptr(scales), 9, 16, 3, 0.5, ptr(chosen), ptr(weights))
    call("route_softmax", "", args, 2)
    probs = np.exp(logits.astype(np.float64) * 0.5)
    for row in range(9):
        experts = np.sort(best(probs[row], 3))
        assert chosen[row].tolist() == experts.tolist()
        expected = probs[row, experts] / probs[row, experts].sum() * scales[experts]
        np.testing.assert_allclose(weights[row], expected, rtol=1e-5)


def test_poisoned_rows_choose_experts_that_exist(rng: np.random.Generator) -> None:
    """K11: a row of NaN takes as many experts as any other, its weights are NaN, other rows keep their bytes."""
    logits, bias = rng.standard_normal((9, 16), dtype=np.float32), np.zeros(16, np.float32)
    rules = ({}, {"groups": 4, "kept_groups": 2}, {"capacity": 6, "block_length": 4})
    good = [route_sigmoid(logits, bias, 3, **rule) for rule in rules]
    logits[4] = np.nan
    for rule, (chosen, weights) in zip(rules, good, strict=True):
        got, poisoned = route_sigmoid(logits, bias, 3, **rule)
        assert (np.diff(got) > 0).all() and got.min() >= 0 and got.max() < 16
        assert np.isnan(poisoned[4]).all()
        others = [row for row in range(9) if not (rule.get("capacity") and row // 4 == 1) and row != 4]
        assert (got[others] == chosen[others]).all() and (poisoned[others] == weights[others]).all()


@dataclass
class Stack:
    """Experts' matrices packed side by side, and each by itself."""

    weight: Weight
    panel_stride: int
    column_stride: int
    single: list
    memory: tuple


def stacked(dtype: int, sources: list[Source], n: int, k: int) -> Stack:
    group = 16 if dtype == NVFP4 else 0
    single = [pack(dtype, [source], k, group) for source in sources]
    panels, scales, sums = (np.concatenate([np.asarray(s.memory[i]) for s in single]) for i in range(3))
    memory = aligned(panels.size)
    memory[:] = panels
    quantised = dtype in (INT8, NVFP4)
    weight = Weight(
        dtype, group, n, k, ptr(memory), ptr(scales) if quantised else None, ptr(sums) if dtype == INT8 else None
    )
    return Stack(weight, single[0].memory[0].size, -(-n // 16) * 16, single, (memory, scales, sums))


def grouped(chosen: Array, experts: int) -> tuple[Array, Array]:
    """The runs as int32 [2 + 3 E] and places [M, T]."""
    runs, place = np.zeros(2 + 3 * experts, np.int32), np.zeros_like(chosen)
    args = GroupArgs(ptr(chosen), len(chosen), experts, chosen.shape[1], ptr(runs), ptr(place))
    call("group_choices", "", args)
    return runs, place


def product(isa: str, stack: Stack, x: Array, chosen: Array, weights: Array, threads: int = 1) -> Array:
    """Sum over each row's experts of weights * (expert's matrix times the row)."""
    dtype, (m, choices), experts = FORMATS[stack.weight.dtype], chosen.shape, len(stack.single)
    runs, place = grouped(chosen, experts)
    rows = operand(isa, dtype, x, threads)
    most = int(library().dlmrt_expert_rows(C.c_int64(m * choices), C.c_int64(experts)))
    assert runs[1] <= most
    copies, out = Rows(dtype, most, x.shape[1]), np.full((most, stack.weight.n), np.nan, np.float32)
    gather = GatherArgs(rows.operand, copies.operand, choices, ptr(place))
    library().dlmrt_gather_rows(C.byref(gather), C.c_int64(m), threads)
    call(
        "expert_linear", isa,
        ExpertLinearArgs(
            stack.weight, stack.panel_stride, stack.column_stride, stack.column_stride, copies.operand, ptr(runs),
            ptr(out), stack.weight.n,
        ),
        threads,
    )  # fmt: skip
    y = np.full((m, stack.weight.n), np.nan, np.float32)
    call("combine", isa, CombineArgs(ptr(out), ptr(place), ptr(weights), m, choices, stack.weight.n, ptr(y)), threads)
    return y


def draw(dtype: int, rng: np.random.Generator, experts: int, n: int, k: int) -> Stack:
    if dtype == NVFP4:
        return stacked(dtype, [NvFp4(rng, n, k, 0.01 * (e + 1)).source() for e in range(experts)], n, k)
    return stacked(dtype, [float_source(rng.standard_normal((n, k), dtype=np.float32)) for _ in range(experts)], n, k)


def draw_choices(rng: np.random.Generator, m: int, experts: int, choices: int) -> tuple[Array, Array]:
    chosen = np.sort([rng.permutation(experts)[:choices] for _ in range(m)], axis=1).astype(np.int32)
    return np.ascontiguousarray(chosen), rng.random((m, choices), dtype=np.float32)


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize(("n", "k"), [(40, 64), (130, 48)])
def test_experts_are_products_like_any_other(isa: str, dtype: int, n: int, k: int, rng: np.random.Generator) -> None:
    """Bit for bit what each expert gives for each row alone, added in ascending order; any number of threads."""
    stack = draw(dtype, rng, 7, n, k)
    x = rng.standard_normal((21, k), dtype=np.float32)
    chosen, weights = draw_choices(rng, 21, 7, 3)
    got = product(isa, stack, x, chosen, weights)
    for row in range(21):
        rows = operand(isa, FORMATS[dtype], x[row : row + 1])
        expected = np.zeros(n, np.float32)
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            expected = expected + weight * linear(isa, stack.single[expert], rows)[0]
        assert (got[row] == expected).all(), row
    for threads in (2, 3, 5):
        assert (product(isa, stack, x, chosen, weights, threads) == got).all()
    for m in (1, 4, 9):
        assert (product(isa, stack, x[:m].copy(), chosen[:m].copy(), weights[:m].copy()) == got[:m]).all()


def test_only_experts_that_were_hit_are_read(isa: str, rng: np.random.Generator) -> None:
    stack = draw(F32, rng, 5, 32, 32)
    x, weights = rng.standard_normal((6, 32), dtype=np.float32), np.ones((6, 2), np.float32)
    chosen = np.array([[1, 3]] * 6, np.int32)
    good = product(isa, stack, x, chosen, weights)
    size = stack.panel_stride
    for expert in (0, 2, 4):
        stack.memory[0][expert * size : (expert + 1) * size] = 0xFF  # NaN
    assert (product(isa, stack, x, chosen, weights, 2) == good).all()
    runs, _ = grouped(chosen, 5)
    assert runs[:8].tolist() == [2, 16, 1, 0, 6, 3, 8, 6]


def test_a_poisoned_row_stays_alone(isa: str, rng: np.random.Generator) -> None:
    """K11."""
    for dtype in FORMATS:
        stack = draw(dtype, rng, 4, 32, 32)
        x = rng.standard_normal((9, 32), dtype=np.float32)
        chosen, weights = draw_choices(rng, 9, 4, 2)
        good = product(isa, stack, x, chosen, weights)
        x[3] = np.nan
        got = product(isa, stack, x, chosen, weights)
        assert not np.isfinite(got[3]).any()
        assert (np.delete(got, 3, 0) == np.delete(good, 3, 0)).all()


def test_exact_formats_are_equal_on_all_instruction_sets(rng: np.random.Generator) -> None:
    for dtype in (F32, INT8, NVFP4):
        stack = draw(dtype, rng, 4, 48, 64)
        x = rng.standard_normal((12, 64), dtype=np.float32)
        chosen, weights = draw_choices(rng, 12, 4, 2)
        results = [product(isa, stack, x, chosen, weights) for isa in runnable()]
        for other in results[1:]:
            assert (other == results[0]).all()
