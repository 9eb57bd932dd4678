"""Commit rules: which slots of a block one denoising step decides. Pure functions over the arrays of one block.

A rule takes the block's state and the step's prediction and returns the next state. All rules share three promises:
a step with open slots decides at least one; the last allowed step (`max_denoising_steps`) decides every open slot, so
flat logits cannot spin; pinned slots (the prompt's part of a block) are never open, edited or counted.

    threshold        open slots with confidence > threshold, strictly; the `min_commit` most confident if fewer pass
    joint_threshold  threshold, and in the same step decided slots whose argmax differs with confidence >
                     edit_threshold; a full block goes on until a step changes nothing or `max_post_edit_steps` steps
                     were spent on it
    joint_threshold_indel  joint_threshold whose predictions may also delete slots and split off new ones (decode.indel)
    entropy_bound    all slots at once: those of lowest entropy whose cumulative entropy, less their own, stays within
                     the bound hold the prediction, all others noise, nothing is sticky; ends when the argmax canvas
                     repeats and the mean entropy is below stop_entropy, and leaves the argmax canvas
    steps            a fixed number each step: canvas_length // steps, one more in the first canvas_length % steps
    sub_blocks       threshold within runs of sub_block_length slots, one run after the other. Behind shifted logits the
                     loop has decided slot 0 before the first step (`decode.loop`, step 2)

Ties go to the lower slot. All rules work for mask and uniform noise: what an open slot contains is the loop's business.
Edits follow the argmax, never a draw: at temperature > 0 draws would differ from decided ids for ever.

Legend: L canvas slots.

Source: joint_threshold: LLaDA2.1 `generate` (ZHZisZZ/dllm ca17675), steps 2-6; entropy_bound: transformers 5.24.0
models/diffusion_gemma and arXiv 2505.24857; threshold and steps: JetAstra/SDAR c2041a8 generate.py; sub_blocks:
Fast-dLLM v2 (arXiv 2509.26328) without its cache of unfinished blocks, which is not exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dlmrt.decode.indel import EditHistory, apply_edits, best_other
from dlmrt.decode.settings import ResolvedDecode
from dlmrt.types import Bool, Float32, Int32, Prediction


@dataclass(frozen=True, kw_only=True)
class BlockState:
    """One block between two steps."""

    canvas_L: Int32  # ids handed to the denoiser next; open slots still hold what they held
    answer_L: Int32  # ids the block leaves if it ends here
    is_open_L: Bool  # not decided
    is_pinned_L: Bool  # prompt
    committed_L: Bool  # decided (entropy_bound: accepted) or edited by the last step
    changed_L: Bool  # answer_L was set or changed by the last step
    num_edits: int = 0  # of the last step
    step: int = 0  # steps taken
    num_full_steps: int = 0  # joint_threshold: steps that began with nothing open (indel: with no original mask)
    num_repeats: int = 0  # entropy_bound: steps in a row that repeated the argmax canvas
    is_done: bool = False
    history: EditHistory | None = None  # joint_threshold_indel, from its first step on


Rule = Callable[[ResolvedDecode, BlockState, Prediction], BlockState]


def start_block(canvas_L: Int32, num_pinned: int) -> BlockState:
    """State before the first step of a block whose first `num_pinned` slots are prompt."""
    is_pinned_L = np.arange(len(canvas_L)) < num_pinned
    nothing_L = np.zeros(len(canvas_L), dtype=bool)
    return BlockState(
        canvas_L=canvas_L, answer_L=canvas_L, is_open_L=~is_pinned_L, is_pinned_L=is_pinned_L,
        committed_L=nothing_L, changed_L=nothing_L,
    )  # fmt: skip


def best(score_L: Float32, is_open_L: Bool, count: int) -> Bool:
    """The `count` open slots of highest score (all, if fewer are open); ties go to the lower slot."""
    order = np.argsort(np.where(is_open_L, -score_L, np.inf), kind="stable")
    chosen_L = np.zeros(len(score_L), dtype=bool)
    chosen_L[order[: min(count, int(is_open_L.sum()))]] = True
    return chosen_L


def above_threshold(confidence_L: Float32, is_open_L: Bool, *, threshold: float, min_commit: int) -> Bool:
    """Open slots with confidence > threshold; the `min_commit` best instead if fewer pass."""
    chosen_L = is_open_L & (confidence_L > np.float32(threshold))
    return chosen_L if chosen_L.sum() >= min_commit else best(confidence_L, is_open_L, min_commit)


def within_entropy_bound(entropy_L: Float32, is_free_L: Bool, *, bound: float) -> Bool:
    """Free slots accepted in ascending entropy while the sum of those before stays within `bound`; the first always."""
    free = np.flatnonzero(is_free_L)
    order = free[np.argsort(entropy_L[free], kind="stable")]
    entropies = entropy_L[order].astype(np.float64)
    before = np.concatenate(([0.0], np.cumsum(entropies)[:-1]))
    accepted_L = np.zeros(len(entropy_L), dtype=bool)
    accepted_L[order[before <= bound]] = True
    return accepted_L


def step_quota(canvas_length: int, num_steps: int, step: int) -> int:
    """Slots that step `step` of `num_steps` decides; they sum to `canvas_length`."""
    return canvas_length // num_steps + (step < canvas_length % num_steps)


def threshold_step(settings: ResolvedDecode, state: BlockState, prediction: Prediction) -> BlockState:
    """Rules `threshold` and `joint_threshold`: the former is the latter without edits."""
    is_last = state.step + 1 >= settings.max_denoising_steps
    chosen_L = state.is_open_L if is_last else above_threshold(
        prediction.confidence_L, state.is_open_L, threshold=settings.threshold, min_commit=settings.min_commit
    )  # fmt: skip
    edited_L = np.zeros_like(chosen_L)
    if settings.edit_threshold is not None:
        differs_L = ~state.is_open_L & ~state.is_pinned_L & (prediction.argmax_L != state.canvas_L)
        edited_L = differs_L & (prediction.argmax_confidence_L > np.float32(settings.edit_threshold))
    canvas_L = np.where(chosen_L, prediction.token_L, np.where(edited_L, prediction.argmax_L, state.canvas_L))
    was_full = not state.is_open_L.any()
    is_full = not (state.is_open_L & ~chosen_L).any()
    num_full_steps = state.num_full_steps + was_full
    is_settled = settings.edit_threshold is None or num_full_steps >= settings.max_post_edit_steps
    is_settled |= was_full and not edited_L.any()
    return replace(
        state,
        canvas_L=canvas_L,
        answer_L=canvas_L,
        is_open_L=state.is_open_L & ~chosen_L,
        committed_L=chosen_L | edited_L,
        changed_L=chosen_L | edited_L,
        num_edits=int(edited_L.sum()),
        step=state.step + 1,
        num_full_steps=num_full_steps,
        is_done=is_last or (is_full and is_settled),
    )


def indel_step(settings: ResolvedDecode, state: BlockState, prediction: Prediction) -> BlockState:
    """Rule `joint_threshold_indel`. The step that spends the budget, or the last one, writes no special id."""
    assert prediction.logits_LV is not None and settings.edit_ids is not None and settings.edit_threshold is not None
    history = state.history or EditHistory(is_original_L=state.is_open_L)
    original_L, is_open_L, budget = (
        history.is_original_L & state.is_open_L,
        state.is_open_L,
        settings.max_post_edit_steps,
    )
    num_full_steps = state.num_full_steps + (not original_L.any())
    is_final = num_full_steps >= max(budget, 1) or state.step + 1 >= settings.max_denoising_steps
    chosen_L = is_open_L
    if original_L.any() and not is_final:
        # At least one original mask is among them: only so many others are open.
        needed = 1 + int((is_open_L & ~original_L).sum())
        chosen_L = above_threshold(prediction.confidence_L, is_open_L, threshold=settings.threshold, min_commit=needed)
        if budget == 0 and not (original_L & ~chosen_L).any():
            is_final, chosen_L = True, is_open_L
    differs_L = ~is_open_L & ~state.is_pinned_L & (prediction.argmax_L != state.canvas_L)
    edited_L = differs_L & (prediction.argmax_confidence_L > np.float32(settings.edit_threshold))
    written_L = chosen_L | edited_L
    token_L = np.where(chosen_L, prediction.token_L, np.where(edited_L, prediction.argmax_L, state.canvas_L))
    ids = settings.edit_ids
    changing = np.flatnonzero(written_L & (token_L != state.canvas_L))
    if is_final:
        for at in np.flatnonzero(written_L & np.isin(token_L, (ids.mask, ids.delete, ids.split))):
            token_L[at] = best_other(prediction.logits_LV[at], (ids.mask, ids.delete, ids.split), int(token_L[at]))
    elif len(changing) and tuple(state.canvas_L.tolist()) in history.seen:
        # Seen before: it would go round for ever, so the least certain slot tries an id that it has not had.
        confidence_L = np.where(chosen_L, prediction.confidence_L, prediction.argmax_confidence_L)
        slot = int(changing[confidence_L[changing].argmin()])
        token_L[slot] = best_other(prediction.logits_LV[slot], history.written.get(slot, ()), int(token_L[slot]))
    canvas_L, is_original_L = token_L, history.is_original_L
    if (written_L & np.isin(token_L, (ids.delete, ids.split))).any():
        canvas_L, is_original_L = apply_edits(token_L, state.canvas_L, is_original_L, state.is_pinned_L, ids)
    return replace(
        state,
        canvas_L=canvas_L,
        answer_L=canvas_L,
        is_open_L=~state.is_pinned_L & (canvas_L == ids.mask),
        committed_L=written_L,
        changed_L=canvas_L != state.canvas_L,
        num_edits=int(edited_L.sum()),
        step=state.step + 1,
        num_full_steps=num_full_steps,
        is_done=is_final or not written_L.any(),
        history=history.after(state.canvas_L, written_L, token_L, is_original_L),
    )


def quota_step(settings: ResolvedDecode, state: BlockState, prediction: Prediction) -> BlockState:
    """Rule `steps`. A prompt part only ends the block earlier; the quota follows the canvas length of this request."""
    is_last = state.step + 1 >= settings.max_denoising_steps
    quota = step_quota(settings.canvas_length, settings.max_denoising_steps, state.step)
    chosen_L = state.is_open_L if is_last else best(prediction.confidence_L, state.is_open_L, quota)
    canvas_L = np.where(chosen_L, prediction.token_L, state.canvas_L)
    is_open_L = state.is_open_L & ~chosen_L
    return replace(
        state, canvas_L=canvas_L, answer_L=canvas_L, is_open_L=is_open_L, committed_L=chosen_L, changed_L=chosen_L,
        step=state.step + 1, is_done=not is_open_L.any(),
    )  # fmt: skip


def sub_blocks_step(settings: ResolvedDecode, state: BlockState, prediction: Prediction) -> BlockState:
    """Rule `sub_blocks`. Some slot is open: a block of one slot is not begun by the loop."""
    is_last = state.step + 1 >= settings.max_denoising_steps
    run_L = np.arange(len(state.canvas_L)) // settings.sub_block_length
    in_turn_L = state.is_open_L & (run_L == run_L[state.is_open_L.argmax()])
    chosen_L = state.is_open_L if is_last else above_threshold(
        prediction.confidence_L, in_turn_L, threshold=settings.threshold, min_commit=settings.min_commit
    )  # fmt: skip
    # What the loop decided before the first step counts as this step's, whose row 0 says the same.
    given_L = ~state.is_open_L & ~state.is_pinned_L & (state.step == 0)
    canvas_L = np.where(chosen_L, prediction.token_L, state.canvas_L)
    is_open_L = state.is_open_L & ~chosen_L
    return replace(
        state, canvas_L=canvas_L, answer_L=canvas_L, is_open_L=is_open_L, committed_L=chosen_L | given_L,
        changed_L=chosen_L | given_L, step=state.step + 1, is_done=not is_open_L.any(),
    )  # fmt: skip


def entropy_bound_step(settings: ResolvedDecode, state: BlockState, prediction: Prediction) -> BlockState:
    """Rule `entropy_bound`. Stability k means k further equal argmax canvases, so 1 needs two equal ones in a row."""
    free_L = ~state.is_pinned_L
    accepted_L = within_entropy_bound(prediction.entropy_L, free_L, bound=settings.entropy_bound)
    answer_L = np.where(free_L, prediction.argmax_L, state.canvas_L)
    is_first = state.step == 0
    changed_L = free_L if is_first else answer_L != state.answer_L
    num_repeats = 0 if changed_L.any() else state.num_repeats + 1
    is_sure = float(prediction.entropy_L[free_L].mean(dtype=np.float64)) < settings.stop_entropy
    is_last = state.step + 1 >= settings.max_denoising_steps
    is_done = is_last or (is_sure and num_repeats >= settings.stability_threshold)
    return replace(
        state,
        canvas_L=answer_L if is_done else np.where(accepted_L, prediction.token_L, state.canvas_L),
        answer_L=answer_L,
        is_open_L=free_L & ~accepted_L & (not is_done),
        committed_L=accepted_L,
        changed_L=changed_L,
        step=state.step + 1,
        num_repeats=num_repeats,
        is_done=is_done,
    )


RULES: dict[str, Rule] = {
    "threshold": threshold_step,
    "joint_threshold": threshold_step,
    "joint_threshold_indel": indel_step,
    "entropy_bound": entropy_bound_step,
    "steps": quota_step,
    "sub_blocks": sub_blocks_step,
}


def is_sticky(settings: ResolvedDecode) -> bool:
    """Whether a decided slot keeps its id, so that a decided prefix may be shown or end the answer within the block."""
    return settings.commit_rule != "entropy_bound" and settings.edit_threshold is None
