"""Deletions and splits: what they do to a block, and the promises of the rule whatever the model says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.decode.indel import EditIds, apply_edits, best_other
from dlmrt.decode.rules import indel_step, start_block
from dlmrt.decode.sampling import predict
from dlmrt.decode.settings import resolve
from dlmrt.errors import UsageError
from dlmrt.testing import tiny_config
from dlmrt.types import DecodeConfig, Sampling

MASK, DELETE, SPLIT = 9, 7, 8
IDS = EditIds(mask=MASK, delete=DELETE, split=SPLIT)
EDITS = {"mask_token_id": MASK, "delete_token_id": DELETE, "split_token_id": SPLIT, "context_attention": "block_causal",
         "block_anchor": "position_zero", "commit_rule": "joint_threshold_indel", "canvas_length": 6}  # fmt: skip
CONFIG = tiny_config(diffusion=EDITS, vocab_size=10, eos_token_ids=(0,), pad_token_id=0)


def edit(tokens, canvas, num_pinned=0, original=None):
    original_L = np.array([True] * len(canvas) if original is None else original)
    token_L, canvas_L = np.array(tokens, np.int32), np.array(canvas, np.int32)
    ids_L, moved_L = apply_edits(token_L, canvas_L, original_L, np.arange(len(canvas)) < num_pinned, IDS)
    return ids_L.tolist(), moved_L.tolist()


def test_delete_pulls_the_rest_left_and_fills_with_new_masks():
    ids, original = edit([1, DELETE, 3, MASK], [1, 2, 3, MASK], original=[False, False, False, True])
    assert ids == [1, 3, MASK, MASK] and original == [False, False, True, False]


def test_split_puts_a_new_mask_before_the_old_token_and_cuts_the_end():
    ids, original = edit([1, SPLIT, 3, 4], [1, 2, 3, 4])
    assert ids == [1, MASK, 2, 3] and original == [True, False, True, True]


def test_the_prompt_stays():
    ids, _ = edit([DELETE, SPLIT, DELETE, 4], [1, 2, 3, 4], num_pinned=2)
    assert ids == [1, 2, 4, MASK]


def test_best_other_skips_what_is_excluded():
    given = [-4.0, 0.0, -1.0, -2.0, -np.inf]
    logits = np.array(given, np.float32)
    assert [best_other(logits, excluded, 9) for excluded in ((), (1,), (1, 2), (1, 2, 3))] == [1, 2, 3, 0]
    assert best_other(logits, range(4), 9) == 9  # what is left is banned
    assert logits.tolist() == given


@given(
    seed=st.integers(0, 1000), num_pinned=st.integers(0, 5), threshold=st.floats(0, 1), edit_threshold=st.floats(0, 1),
    budget=st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_promises(seed, num_pinned, threshold, edit_threshold, budget):
    """The prompt stays, the step cap holds, and no special id is left, for a model that says anything."""
    resolved = resolve(
        DecodeConfig(threshold=threshold, edit_threshold=edit_threshold, max_post_edit_steps=budget), CONFIG, {}
    )
    rng = np.random.default_rng(seed)
    canvas_L = np.full(6, MASK, np.int32)
    canvas_L[:num_pinned] = np.arange(num_pinned)
    state = start_block(canvas_L, num_pinned)
    while not state.is_done:
        logits = rng.normal(0, 3, (6, 10)).astype(np.float32)
        logits[:, [DELETE, SPLIT]] += 2
        sampling = Sampling(temperature=1.0, is_greedy=True, seed=0)
        prediction = predict(logits, sampling, np.array([MASK]), block=0, step=state.step, with_probs=True)
        before, state = state, indel_step(resolved, state, prediction)
        assert state.committed_L.any() or not before.is_open_L.any()
        assert not state.committed_L[:num_pinned].any()
        assert state.canvas_L[:num_pinned].tolist() == list(range(num_pinned)) and len(state.canvas_L) == 6
        assert (state.is_open_L == (state.canvas_L == MASK)).all()
        assert state.step <= resolved.max_denoising_steps == 6 + budget + 1
    assert not np.isin(state.answer_L, (MASK, DELETE, SPLIT)).any()


def test_a_checkpoint_without_edit_ids_is_refused():
    with pytest.raises(UsageError, match="delete_token_id"):
        resolve(DecodeConfig(commit_rule="joint_threshold_indel"), tiny_config(), {})


def test_settings_of_the_rule_are_printed_without_the_ids():
    shown = resolve(DecodeConfig(), CONFIG, {}).as_dict()
    assert shown["commit_rule"] == "joint_threshold_indel" and shown["threshold"] == 0.5 and "edit_ids" not in shown
