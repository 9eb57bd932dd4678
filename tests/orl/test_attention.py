"""The staircase against a slow double loop that follows the text of its module."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.models.config import DiffusionConfig
from orl.attention import staircase
from orl.packing import CLEAN, PAD, Rows, pack, problem_rows
from orl.recipe import ObjectiveSection

CANVAS = 4
FAMILIES = {
    "auto-regressive": None,
    "causal context": DiffusionConfig(canvas_length=CANVAS, noise="uniform"),
    "causal inside": DiffusionConfig(canvas_length=CANVAS, noise="uniform", in_block_attention="causal"),
    "block-causal": DiffusionConfig(
        canvas_length=CANVAS, noise="uniform", context_attention="block_causal", block_anchor="position_zero"
    ),
    "block-causal, causal inside": DiffusionConfig(
        canvas_length=CANVAS, noise="uniform", context_attention="block_causal", block_anchor="position_zero",
        in_block_attention="causal",
    ),
}  # fmt: skip


def slow_staircase(rows: np.ndarray, diffusion: DiffusionConfig | None) -> np.ndarray:
    """rows [T, 4]: segment, copy, position, block start."""
    visible = np.zeros((len(rows), len(rows)), dtype=bool)
    is_causal_inside = diffusion is not None and diffusion.in_block_attention == "causal"
    is_block_causal = (
        diffusion is not None and diffusion.context_attention == "block_causal" and not is_causal_inside
    )  # fmt: skip
    for at, (segment_q, copy_q, position_q, start_q) in enumerate(rows):
        for to, (segment_k, copy_k, position_k, start_k) in enumerate(rows):
            if copy_q == PAD or copy_k == PAD:
                visible[at, to] = at == to
            elif segment_q != segment_k:
                continue
            elif copy_q == CLEAN and copy_k == CLEAN:
                not_later = (
                    position_k // CANVAS <= position_q // CANVAS if is_block_causal else position_k <= position_q
                )
                visible[at, to] = not_later
            elif copy_q != CLEAN and copy_k == CLEAN:
                visible[at, to] = position_k < start_q
            elif copy_q != CLEAN and copy_k != CLEAN:
                is_same = copy_q == copy_k and start_q == start_k
                visible[at, to] = is_same and (not is_causal_inside or position_k <= position_q)
    return visible


def fast_staircase(rows: np.ndarray, diffusion: DiffusionConfig | None) -> np.ndarray:
    segment, copy, positions, block_start = (torch.from_numpy(np.ascontiguousarray(column))[None] for column in rows.T)
    return staircase(segment, copy, positions, block_start, diffusion)[0].numpy()


def describe(rows: Rows) -> np.ndarray:
    return np.stack([rows.segment, rows.copy, rows.positions, rows.block_start], axis=-1)


row = st.builds(
    lambda segment, copy, position: (
        (-1, PAD, 0, 0) if copy == PAD
        else (segment, copy, position, 0 if copy == CLEAN else position // CANVAS * CANVAS)
    ),
    st.integers(0, 2), st.sampled_from([PAD, CLEAN, CLEAN, 0, 1]), st.integers(0, 11),
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(rows=st.lists(row, min_size=1, max_size=24))
def test_any_rows_in_any_order(rows: list[tuple[int, ...]], family: str):
    array = np.array(rows, dtype=np.int32)
    np.testing.assert_array_equal(fast_staircase(array, FAMILIES[family]), slow_staircase(array, FAMILIES[family]))


@pytest.mark.parametrize("kind", ["mask", "uniform", "ar"])
def test_packed_problems(make_examples, tiny_noise, kind: str):
    objective = ObjectiveSection(kind=kind)
    problems = [problem_rows(example, objective, tiny_noise, 0) for example in make_examples(6)]
    for bin_ in pack(problems, 160):
        rows = describe(bin_)
        visible = fast_staircase(rows, FAMILIES["causal context"])
        np.testing.assert_array_equal(visible, slow_staircase(rows, FAMILIES["causal context"]))
        assert visible.any(axis=1).all()  # K26: a row that saw nothing would be NaN


def test_answer_is_hidden_from_the_rows_that_predict_it():
    """A noisy row sees its canvas and the clean text before that, nothing that holds its own answer."""
    text = [(0, CLEAN, position, 0) for position in range(12)]
    canvas = [(0, 0, position, 8) for position in range(8, 12)]
    other_copy = [(0, 1, position, 8) for position in range(8, 12)]
    visible = fast_staircase(np.array(text + canvas + other_copy, dtype=np.int32), FAMILIES["causal context"])
    for at in range(12, 16):
        assert np.flatnonzero(visible[at]).tolist() == [*range(8), *range(12, 16)]
    assert not visible[:12, 12:].any()
