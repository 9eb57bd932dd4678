"""The loop's own operations: prefill chunks, canvases, commit rules, settling, noise. One program each.

Numbered steps are those of dlmrt.decode.loop, rules those of dlmrt.decode.rules, which these equal slot for slot:
comparisons in the same precision, ties to the lower slot. Ranks are counted by comparing all pairs of slots in
chunks, so there is no sort. Kernels that compute a flag of the loop hand it over to a captured graph
(`dlmrt.cuda.kernels.condition`).

Legend: L canvas slots (LP the power of two from L on).

Source: ours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dlmrt.cuda.kernels.condition import hand_over
from dlmrt.cuda.kernels.head import is_set

NONE = tl.constexpr(2147483647)
GOES_ON, EOS, STOP_TOKEN, MAX_TOKENS, CANCELLED, NON_FINITE = (tl.constexpr(i) for i in range(6))  # END_REASONS
PAIRS = tl.constexpr(32)  # slots compared with all others at once
WIDE = tl.constexpr(1024)  # words of sets of ids in one turn


@triton.jit
def is_cancelled(cancel):
    """The host sets the flag while the loop runs: never from a cache."""
    return tl.load(cancel, volatile=True) != 0


@triton.jit
def committed_visible(positions, num_prefill, end, BLOCK: tl.constexpr):
    """Positions that committed rows at `positions` see when `end` exist: whole blocks, or all before (BLOCK 0).

    The prefill ends where a block does; what stands before the first whole block is a block of its own.
    """
    if BLOCK == 0:
        visible = positions + 1
    else:
        grid = num_prefill % BLOCK
        whole = (tl.maximum(positions - grid, 0) // BLOCK + 1) * BLOCK + grid
        visible = tl.minimum(end, tl.where(positions < grid, grid, whole))
    return visible


@triton.jit
def noise(slots, step, block, allowed, num_allowed, key, MASK: tl.constexpr):
    """What open slots hold: the mask, or ids of the noise stream."""
    if MASK >= 0:
        ids = tl.zeros_like(slots) + MASK
    else:
        group = (slots // 4).to(tl.uint32)
        zero = tl.zeros_like(group)
        w0, w1, w2, w3 = tl.philox(tl.load(key), group, zero + step.to(tl.uint32), zero + block.to(tl.uint32), zero)
        at = slots % 4
        word = tl.where(at == 0, w0, tl.where(at == 1, w1, tl.where(at == 2, w2, w3)))
        index = (word.to(tl.uint64) * tl.load(num_allowed).to(tl.uint64)) >> 32
        ids = tl.load(allowed + index.to(tl.int64))
    return ids


@triton.jit(do_not_specialize=["handle"])
def start_request(
    num_prompt, num_prefill, cancel, context, num_prefill_forwards, more_prefill, more_blocks, block_idx, num_pinned,
    num_answer, end_reason, handle: tl.int64 = 0, SETS: tl.constexpr = False,
):  # fmt: skip
    """Step 1, before the first chunk."""
    zero = tl.load(num_prefill) * 0
    tl.store(context, zero)
    tl.store(num_prefill_forwards, zero)
    tl.store(block_idx, zero)
    tl.store(num_answer, zero.to(tl.int64))
    tl.store(end_reason, zero + GOES_ON)
    tl.store(more_blocks, zero + 1)
    tl.store(num_pinned, tl.load(num_prompt) - tl.load(num_prefill))
    is_wanted = (tl.load(num_prefill) > 0) & (is_cancelled(cancel) == 0)
    hand_over(more_prefill, is_wanted.to(tl.int32), handle, SETS)


@triton.jit
def prefill_chunk(
    prompt, context, num_prefill, chunk_rows, ids, positions, visible, CHUNK: tl.constexpr, CP: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step 1: the rows of the next chunk."""
    begin, prefill = tl.load(context), tl.load(num_prefill)
    # The first chunk ends where a block of ALIGN rows does, as all later ones then do.
    first = prefill % ALIGN
    size = tl.where((begin == 0) & (first > 0), CHUNK - ALIGN + first, CHUNK)
    count = tl.minimum(size, prefill - begin)
    i = tl.arange(0, CP)
    place = begin + i
    tl.store(chunk_rows, count)
    tl.store(ids + i, tl.load(prompt + place, mask=i < count, other=0), mask=i < count)
    tl.store(positions + i, place, mask=i < count)
    tl.store(visible + i, committed_visible(place, prefill, begin + count, BLOCK), mask=i < count)


@triton.jit(do_not_specialize=["handle"])
def finish_chunk(
    chunk_rows, num_prefill, cancel, context, num_prefill_forwards, more_prefill, handle: tl.int64 = 0,
    SETS: tl.constexpr = False,
):  # fmt: skip
    """Step 1, behind a chunk."""
    end = tl.load(context) + tl.load(chunk_rows)
    tl.store(context, end)
    tl.store(num_prefill_forwards, tl.load(num_prefill_forwards) + 1)
    is_more = (end < tl.load(num_prefill)) & (is_cancelled(cancel) == 0)
    hand_over(more_prefill, is_more.to(tl.int32), handle, SETS)


@triton.jit(do_not_specialize=["handle"])
def start_block(
    prompt, num_prompt, num_prefill, num_pinned, context, block_idx, cancel, allowed, num_allowed, noise_key,
    end_reason, canvas, answer, is_open, is_free, positions, visible, commit_visible, step, num_full_steps,
    num_repeats, num_settled, has_residual, is_done, more_steps, L: tl.constexpr, LP: tl.constexpr, BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASK: tl.constexpr, handle: tl.int64 = 0, SETS: tl.constexpr = False,
):  # fmt: skip
    """Steps 2 and 3."""
    i = tl.arange(0, LP)
    is_slot = i < L
    begin, pinned = tl.load(context), tl.load(num_pinned)
    zero = pinned * 0
    is_pinned = i < pinned
    prompt_ids = tl.load(prompt + tl.load(num_prompt) - pinned + i, mask=is_pinned, other=0)
    fresh = noise(i, zero, tl.load(block_idx), allowed, num_allowed, noise_key, MASK)
    ids = tl.where(is_pinned, prompt_ids, fresh)
    tl.store(canvas + i, ids, mask=is_slot)
    tl.store(answer + i, ids, mask=is_slot)
    is_mine = (i >= pinned).to(tl.uint8)
    tl.store(is_open + i, is_mine, mask=is_slot)
    tl.store(is_free + i, is_mine, mask=is_slot)
    place = begin + i
    tl.store(positions + i, place, mask=is_slot)
    if IS_CAUSAL:
        tl.store(visible + i, place + 1, mask=is_slot)
    else:
        tl.store(visible + i, tl.zeros_like(i) + begin + L, mask=is_slot)
    tl.store(commit_visible + i, committed_visible(place, tl.load(num_prefill), begin + L, BLOCK), mask=is_slot)
    tl.store(step, zero)
    tl.store(num_full_steps, zero)
    tl.store(num_repeats, zero)
    tl.store(has_residual, zero)
    tl.store(is_done, zero)
    tl.store(num_settled, pinned)
    stops = is_cancelled(cancel)
    hand_over(more_steps, (stops == 0).to(tl.int32), handle, SETS)
    tl.store(end_reason, tl.where(stops, CANCELLED, tl.load(end_reason)))


@triton.jit(do_not_specialize=["handle"])
def check_first(num_pinned, more_steps, is_first_open, handle: tl.int64 = 0, SETS: tl.constexpr = False):
    """Step 2 behind shifted logits: whether slot 0 is to be decided before the first step."""
    is_wanted = (tl.load(num_pinned) == 0) & (tl.load(more_steps) != 0)
    hand_over(is_first_open, is_wanted.to(tl.int32), handle, SETS)


@triton.jit
def decide_first(
    first_argmax, first_is_finite, canvas, is_open, more_steps, end_reason, is_finite_row, L: tl.constexpr,
    LP: tl.constexpr,
):  # fmt: skip
    """Step 2 behind shifted logits: slot 0 takes the argmax of its row; one that is not finite ends the block."""
    i = tl.arange(0, LP)
    tl.store(canvas, tl.load(first_argmax))
    tl.store(is_open + i, tl.zeros_like(i).to(tl.uint8), mask=i < 1)
    is_finite = tl.load(first_is_finite) != 0
    tl.store(is_finite_row + i, ((i > 0) | is_finite).to(tl.uint8), mask=i < L)
    tl.store(more_steps, tl.where(is_finite, tl.load(more_steps), 0))
    tl.store(end_reason, tl.where(is_finite, tl.load(end_reason), NON_FINITE))


@triton.jit
def start_step(
    canvas, is_open, step, temperature, t_min, t_max, max_steps, before, was_open, step_temperature, L: tl.constexpr,
    LP: tl.constexpr, HAS_RANGE: tl.constexpr,
):  # fmt: skip
    """Step 4: what the forward consumes, kept for the record, and the temperature of the step."""
    i = tl.arange(0, LP)
    tl.store(before + i, tl.load(canvas + i, mask=i < L, other=0), mask=i < L)
    tl.store(was_open + i, tl.load(is_open + i, mask=i < L, other=0), mask=i < L)
    asked = tl.load(temperature)
    value = tl.where(asked != 0.0, asked, 1.0)
    if HAS_RANGE:
        steps = tl.load(max_steps)
        remaining = (steps - tl.load(step)).to(tl.float64) / steps.to(tl.float64)
        low = tl.load(t_min)
        value = (low + (tl.load(t_max) - low) * remaining) * value
    tl.store(step_temperature, value.to(tl.float32))


@triton.jit
def best(score, is_candidate, i, scores, candidates, count, end, L: tl.constexpr, LP: tl.constexpr):
    """The `count` candidates of highest score before slot `end`.

    `scores` and `candidates` are where the same numbers lie in memory, candidates from `end` on besides.
    """
    rank = tl.zeros((LP,), tl.int32)
    for begin in range(0, LP, PAIRS if LP > PAIRS else LP):
        j = begin + tl.arange(0, PAIRS if LP > PAIRS else LP)
        other = tl.load(scores + j, mask=j < L, other=0.0)
        is_other = (tl.load(candidates + j, mask=j < L, other=0) != 0) & (j < end)
        is_ahead = (other[None, :] > score[:, None]) | ((other[None, :] == score[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((is_other[None, :] & is_ahead).to(tl.int32), 1)
    return is_candidate & (rank < count)


@triton.jit
def commit_threshold(
    argmax, argmax_confidence, token, confidence, was_open, is_free, threshold, min_commit, max_steps, edit_threshold,
    max_post_edit_steps, canvas, answer, is_open, step, num_full_steps, committed, changed, num_edits, is_done,
    L: tl.constexpr, LP: tl.constexpr, IS_EDITED: tl.constexpr,
):  # fmt: skip
    """Step 6, rules `threshold` and `joint_threshold`; `was_open` equals `is_open` when this starts."""
    i = tl.arange(0, LP)
    is_slot = i < L
    opened = tl.load(was_open + i, mask=is_slot, other=0) != 0
    sure = tl.load(confidence + i, mask=is_slot, other=0.0)
    taken = tl.load(step) + 1
    is_last = taken >= tl.load(max_steps)
    passed = opened & (sure > tl.load(threshold))
    wanted = tl.load(min_commit)
    is_enough = tl.sum(passed.to(tl.int32), 0) >= wanted
    forced = best(sure, opened, i, confidence, was_open, wanted, L, L, LP)
    chosen = (is_last & opened) | ((is_last == 0) & ((is_enough & passed) | ((is_enough == 0) & forced)))
    held = tl.load(canvas + i, mask=is_slot, other=0)
    ids = tl.where(chosen, tl.load(token + i, mask=is_slot, other=0), held)
    edited = i < 0
    if IS_EDITED:
        top = tl.load(argmax + i, mask=is_slot, other=0)
        is_editable = (opened == 0) & (tl.load(is_free + i, mask=is_slot, other=0) != 0)
        certainty = tl.load(argmax_confidence + i, mask=is_slot, other=0.0)
        edited = is_editable & (top != held) & (certainty > tl.load(edit_threshold))
        ids = tl.where(edited, top, ids)
    was_full = tl.sum(opened.to(tl.int32), 0) == 0
    stays_open = opened & (chosen == 0)
    is_full = tl.sum(stays_open.to(tl.int32), 0) == 0
    num_changed = tl.sum(edited.to(tl.int32), 0)
    full_steps = tl.load(num_full_steps) + was_full.to(tl.int32)
    is_settled = num_changed >= 0
    if IS_EDITED:
        is_settled = (full_steps >= tl.load(max_post_edit_steps)) | (was_full & (num_changed == 0))
    tl.store(canvas + i, ids, mask=is_slot)
    tl.store(answer + i, ids, mask=is_slot)
    tl.store(is_open + i, stays_open.to(tl.uint8), mask=is_slot)
    tl.store(committed + i, (chosen | edited).to(tl.uint8), mask=is_slot)
    tl.store(changed + i, (chosen | edited).to(tl.uint8), mask=is_slot)
    tl.store(num_edits, num_changed)
    tl.store(num_full_steps, full_steps)
    tl.store(step, taken)
    tl.store(is_done, (is_last | (is_full & is_settled)).to(tl.int32))


@triton.jit
def commit_steps(
    token, confidence, was_open, max_steps, canvas, answer, is_open, step, committed, changed, num_edits, is_done,
    L: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Step 6, rule `steps`."""
    i = tl.arange(0, LP)
    is_slot = i < L
    opened = tl.load(was_open + i, mask=is_slot, other=0) != 0
    sure = tl.load(confidence + i, mask=is_slot, other=0.0)
    taken, steps = tl.load(step), tl.load(max_steps)
    quota = L // steps + (taken < L % steps).to(tl.int32)
    quota = tl.where(taken + 1 >= steps, L, quota)
    chosen = best(sure, opened, i, confidence, was_open, quota, L, L, LP)
    held = tl.load(canvas + i, mask=is_slot, other=0)
    ids = tl.where(chosen, tl.load(token + i, mask=is_slot, other=0), held)
    stays_open = opened & (chosen == 0)
    num_open = tl.sum(stays_open.to(tl.int32), 0)
    tl.store(canvas + i, ids, mask=is_slot)
    tl.store(answer + i, ids, mask=is_slot)
    tl.store(is_open + i, stays_open.to(tl.uint8), mask=is_slot)
    tl.store(committed + i, chosen.to(tl.uint8), mask=is_slot)
    tl.store(changed + i, chosen.to(tl.uint8), mask=is_slot)
    tl.store(num_edits, num_open * 0)
    tl.store(step, taken + 1)
    tl.store(is_done, (num_open == 0).to(tl.int32))


@triton.jit
def commit_sub_blocks(
    token, confidence, was_open, is_free, threshold, min_commit, sub_block_length, max_steps, canvas, answer, is_open,
    step, committed, changed, num_edits, is_done, L: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Step 6, rule `sub_blocks`: slots behind the run of the first open one wait for their turn."""
    i = tl.arange(0, LP)
    is_slot = i < L
    opened = tl.load(was_open + i, mask=is_slot, other=0) != 0
    sure = tl.load(confidence + i, mask=is_slot, other=0.0)
    taken, length = tl.load(step), tl.load(sub_block_length)
    is_last = taken + 1 >= tl.load(max_steps)
    first = tl.min(tl.where(opened, i, L), 0)
    end = (first // length + 1) * length
    in_turn = opened & (i < end)
    passed = in_turn & (sure > tl.load(threshold))
    wanted = tl.load(min_commit)
    is_enough = tl.sum(passed.to(tl.int32), 0) >= wanted
    forced = best(sure, in_turn, i, confidence, was_open, wanted, end, L, LP)
    chosen = (is_last & opened) | ((is_last == 0) & ((is_enough & passed) | ((is_enough == 0) & forced)))
    held = tl.load(canvas + i, mask=is_slot, other=0)
    ids = tl.where(chosen, tl.load(token + i, mask=is_slot, other=0), held)
    stays_open = opened & (chosen == 0)
    num_open = tl.sum(stays_open.to(tl.int32), 0)
    # What was decided before the first step counts as this step's.
    is_given = (taken == 0) & (opened == 0) & (tl.load(is_free + i, mask=is_slot, other=0) != 0)
    tl.store(canvas + i, ids, mask=is_slot)
    tl.store(answer + i, ids, mask=is_slot)
    tl.store(is_open + i, stays_open.to(tl.uint8), mask=is_slot)
    tl.store(committed + i, (chosen | is_given).to(tl.uint8), mask=is_slot)
    tl.store(changed + i, (chosen | is_given).to(tl.uint8), mask=is_slot)
    tl.store(num_edits, num_open * 0)
    tl.store(step, taken + 1)
    tl.store(is_done, (num_open == 0).to(tl.int32))


@triton.jit
def bit_of(ids):
    """The bit of each id in its word of a set of ids."""
    return (tl.zeros_like(ids) + 1) << (ids % 32)


@triton.jit(do_not_specialize=["handle"])
def propose_edits(
    argmax, argmax_confidence, token, confidence, was_open, is_free, banned, threshold, edit_threshold,
    max_post_edit_steps, max_steps, canvas, step, num_full_steps, is_original, seen, tried, wanted, committed, is_other,
    other_banned, needs_other, num_edits, is_done, L: tl.constexpr, LP: tl.constexpr, VOCAB: tl.constexpr,
    MASK: tl.constexpr, DELETE: tl.constexpr, SPLIT: tl.constexpr, handle: tl.int64 = 0, SETS: tl.constexpr = False,
):  # fmt: skip
    """Step 6, rule `joint_threshold_indel`, first part: what each slot wants, and which want another id than that."""
    WORDS: tl.constexpr = (VOCAB + 31) // 32
    i = tl.arange(0, LP)
    is_slot = i < L
    tile = tl.arange(0, WIDE)
    taken = tl.load(step)
    is_first = taken == 0
    for begin in range(0, L * WORDS * is_first.to(tl.int32), WIDE):
        tl.store(tried + begin + tile, tl.zeros_like(tile), mask=begin + tile < L * WORDS)
    opened = tl.load(was_open + i, mask=is_slot, other=0) != 0
    original = tl.load(is_original + i, mask=is_slot, other=0) != 0
    original = (is_first & opened) | ((is_first == 0) & original)
    tl.store(is_original + i, original.to(tl.uint8), mask=is_slot)
    sure = tl.load(confidence + i, mask=is_slot, other=0.0)
    held = tl.load(canvas + i, mask=is_slot, other=0)
    num_open = tl.sum(opened.to(tl.int32), 0)
    num_original = tl.sum((opened & original).to(tl.int32), 0)
    full_steps = tl.load(num_full_steps) + (num_original == 0).to(tl.int32)
    budget = tl.load(max_post_edit_steps)
    is_final = (full_steps >= tl.maximum(budget, 1)) | (taken + 1 >= tl.load(max_steps))
    # At least one original mask is among the chosen ones: only so many others are open.
    selects = (num_original > 0) & (is_final == 0)
    needed = 1 + num_open - num_original
    passed = opened & (sure > tl.load(threshold))
    is_enough = tl.sum(passed.to(tl.int32), 0) >= needed
    forced = best(sure, opened, i, confidence, was_open, needed, L, L, LP)
    picked = (is_enough & passed) | ((is_enough == 0) & forced)
    chosen = (selects & picked) | ((selects == 0) & opened)
    num_left = tl.sum((opened & original & (chosen == 0)).to(tl.int32), 0)
    ends = selects & (budget == 0) & (num_left == 0)
    is_final = is_final | ends
    chosen = chosen | (ends & opened)
    top = tl.load(argmax + i, mask=is_slot, other=0)
    top_sure = tl.load(argmax_confidence + i, mask=is_slot, other=0.0)
    is_editable = (opened == 0) & (tl.load(is_free + i, mask=is_slot, other=0) != 0)
    edited = is_editable & (top != held) & (top_sure > tl.load(edit_threshold))
    wants = tl.where(chosen, tl.load(token + i, mask=is_slot, other=0), tl.where(edited, top, held))
    written = chosen | edited
    tl.store(wanted + i, wants, mask=is_slot)
    tl.store(committed + i, written.to(tl.uint8), mask=is_slot)
    tl.store(num_edits, tl.sum(edited.to(tl.int32), 0))
    tl.store(num_full_steps, full_steps)
    tl.store(is_done, (is_final | (tl.sum(written.to(tl.int32), 0) == 0)).to(tl.int32))
    # The last step writes no id of the three; before it, the least certain slot leaves a canvas that was seen.
    is_special = (wants == MASK) | (wants == DELETE) | (wants == SPLIT)
    was_seen = taken * 0
    for earlier in range(0, taken):
        row = tl.load(seen + earlier * L + i, mask=is_slot, other=0)
        was_seen = was_seen | (tl.sum(((row != held) & is_slot).to(tl.int32), 0) == 0).to(tl.int32)
    tl.store(seen + taken * L + i, held, mask=is_slot)
    changing = written & (wants != held)
    score = tl.where(changing, tl.where(opened, sure, top_sure), float("inf"))
    slot = tl.min(tl.where(changing & (score == tl.min(score, 0)), i, NONE), 0)
    leaves = (is_final == 0) & (was_seen != 0) & (slot < L)
    other = (is_final & written & is_special) | (leaves & (i == slot))
    is_needed = tl.sum(other.to(tl.int32), 0) > 0
    row_words = tried + tl.where(leaves, slot, 0) * WORDS
    num_free = taken * 0
    for begin in range(0, WORDS * is_needed.to(tl.int32), WIDE):
        at = begin + tile
        is_word = at < WORDS
        bits = tl.load(banned + at, mask=is_word, other=0)
        bits = bits | tl.where(leaves, tl.load(row_words + at, mask=is_word, other=0), 0)
        zero = tl.zeros_like(at)
        bits = bits | tl.where(is_final & (at == MASK // 32), bit_of(zero + MASK), 0)
        bits = bits | tl.where(is_final & (at == DELETE // 32), bit_of(zero + DELETE), 0)
        bits = bits | tl.where(is_final & (at == SPLIT // 32), bit_of(zero + SPLIT), 0)
        tl.store(other_banned + at, bits, mask=is_word)
        known = tl.where(at == VOCAB // 32, bit_of(zero + VOCAB) - 1, -1)  # ids of the last word that exist
        num_free += tl.sum((is_word & ((bits ^ -1) & known != 0)).to(tl.int32), 0)
    is_needed = is_needed & (num_free > 0)
    tl.store(is_other + i, (other & is_needed).to(tl.uint8), mask=is_slot)
    hand_over(needs_other, is_needed.to(tl.int32), handle, SETS)


@triton.jit
def apply_edits(
    wanted, other, committed, is_other, is_free, canvas, is_original, tried, step, answer, is_open, changed,
    L: tl.constexpr, LP: tl.constexpr, VOCAB: tl.constexpr, MASK: tl.constexpr, DELETE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Step 6, rule `joint_threshold_indel`, second part: each slot goes where those before it leave it."""
    WORDS: tl.constexpr = (VOCAB + 31) // 32
    i = tl.arange(0, LP)
    is_slot = i < L
    held = tl.load(canvas + i, mask=is_slot, other=0)
    original = tl.load(is_original + i, mask=is_slot, other=0)
    free = tl.load(is_free + i, mask=is_slot, other=0) != 0
    takes_other = tl.load(is_other + i, mask=is_slot, other=0) != 0
    ids = tl.load(wanted + i, mask=is_slot, other=0)
    ids = tl.where(takes_other, tl.load(other + i, mask=is_slot, other=0), ids)
    written = tl.load(committed + i, mask=is_slot, other=0) != 0
    words = tried + i * WORDS + ids // 32
    tl.store(words, tl.load(words, mask=written, other=0) | bit_of(ids), mask=written)
    splits = free & (ids == SPLIT)
    stays = is_slot & ((free & (ids == DELETE)) == 0)
    count = stays.to(tl.int32) + splits.to(tl.int32)
    begin = tl.cumsum(count, 0) - count
    place = begin + splits.to(tl.int32)
    kept = tl.where(free & (splits == 0), ids, held)
    is_rest = is_slot & (i >= tl.sum(count, 0))
    zero = tl.zeros_like(i)
    tl.debug_barrier()  # everything is read before anything moves
    tl.store(canvas + begin, zero + MASK, mask=splits & (begin < L))
    tl.store(is_original + begin, zero.to(tl.uint8), mask=splits & (begin < L))
    tl.store(canvas + place, kept, mask=stays & (place < L))
    tl.store(is_original + place, original, mask=stays & (place < L))
    tl.store(canvas + i, zero + MASK, mask=is_rest)
    tl.store(is_original + i, zero.to(tl.uint8), mask=is_rest)
    tl.debug_barrier()
    now = tl.load(canvas + i, mask=is_slot, other=0)
    tl.store(answer + i, now, mask=is_slot)
    tl.store(changed + i, (now != held).to(tl.uint8), mask=is_slot)
    tl.store(is_open + i, (free & (now == MASK)).to(tl.uint8), mask=is_slot)
    tl.store(step, tl.load(step) + 1)


@triton.jit
def commit_entropy_bound(
    argmax, token, entropy, is_free, entropy_bound, stop_entropy, stability_threshold, max_steps, canvas, answer,
    is_open, step, num_repeats, committed, changed, num_edits, is_done, L: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Step 6, rule `entropy_bound`: a slot is accepted if the entropies ranked before it sum to at most the bound."""
    i = tl.arange(0, LP)
    is_slot = i < L
    free = tl.load(is_free + i, mask=is_slot, other=0) != 0
    mine = tl.load(entropy + i, mask=is_slot, other=0.0)
    before = tl.zeros((LP,), tl.float64)
    for begin in range(0, LP, PAIRS if LP > PAIRS else LP):
        j = begin + tl.arange(0, PAIRS if LP > PAIRS else LP)
        other = tl.load(entropy + j, mask=j < L, other=0.0)
        is_other = tl.load(is_free + j, mask=j < L, other=0) != 0
        is_ahead = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        before += tl.sum(tl.where(is_other[None, :] & is_ahead, other[None, :], 0.0).to(tl.float64), 1)
    accepted = free & (before <= tl.load(entropy_bound))
    held = tl.load(canvas + i, mask=is_slot, other=0)
    old = tl.load(answer + i, mask=is_slot, other=0)
    new = tl.where(free, tl.load(argmax + i, mask=is_slot, other=0), held)
    taken = tl.load(step) + 1
    has_changed = tl.where(taken == 1, free.to(tl.int32), ((new != old) & is_slot).to(tl.int32))
    repeats = tl.where(tl.sum(has_changed, 0) > 0, 0, tl.load(num_repeats) + 1)
    total = tl.sum(tl.where(free, mine, 0.0).to(tl.float64), 0)
    is_sure = total / tl.sum(free.to(tl.int32), 0).to(tl.float64) < tl.load(stop_entropy)
    done = (taken >= tl.load(max_steps)) | (is_sure & (repeats >= tl.load(stability_threshold)))
    drawn = tl.where(accepted, tl.load(token + i, mask=is_slot, other=0), held)
    tl.store(canvas + i, tl.where(done, new, drawn), mask=is_slot)
    tl.store(answer + i, new, mask=is_slot)
    tl.store(is_open + i, (free & (accepted == 0) & (done == 0)).to(tl.uint8), mask=is_slot)
    tl.store(committed + i, accepted.to(tl.uint8), mask=is_slot)
    tl.store(changed + i, has_changed.to(tl.uint8), mask=is_slot)
    tl.store(num_edits, repeats * 0)
    tl.store(step, taken)
    tl.store(num_repeats, repeats)
    tl.store(is_done, done.to(tl.int32))


@triton.jit(do_not_specialize=["handle"])
def settle(
    answer, is_open, is_done, eos, stop, max_tokens, wants_steps, num_settled, num_answer, end_reason, is_continued,
    is_urgent, L: tl.constexpr, LP: tl.constexpr, IS_STICKY: tl.constexpr, handle: tl.int64 = 0,
    SETS: tl.constexpr = False,
):  # fmt: skip
    """Step 7: the decided run grows until an EOS id, a stop id or the length limit, in this order on one slot."""
    i = tl.arange(0, LP)
    is_slot = i < L
    settled, counted = tl.load(num_settled), tl.load(num_answer)
    done = tl.load(is_done) != 0
    end = settled
    if IS_STICKY:
        opened = tl.load(is_open + i, mask=is_slot, other=0) != 0
        end = tl.min(tl.where(opened, i, L), 0)
    end = tl.where(done, L, end)
    goes_on = tl.load(end_reason) == GOES_ON
    is_new = (i >= settled) & (i < end) & goes_on
    ids = tl.load(answer + i, mask=is_new, other=0)
    is_eos, is_stop = is_new & is_set(eos, ids, is_new), is_new & is_set(stop, ids, is_new)
    is_full = is_new & (counted + (i - settled + 1).to(tl.int64) >= tl.load(max_tokens))
    last = tl.min(tl.where(is_eos | is_stop | is_full, i, NONE), 0)
    reason = tl.where(is_full, MAX_TOKENS, GOES_ON)
    reason = tl.where(is_stop, STOP_TOKEN, reason)
    reason = tl.where(is_eos, EOS, reason)
    found = tl.max(tl.where(i == last, reason, GOES_ON), 0)
    reached = tl.where(goes_on, tl.minimum(tl.maximum(end, settled), tl.where(last == NONE, NONE, last + 1)), settled)
    tl.store(num_settled, reached)
    tl.store(num_answer, counted + (reached - settled).to(tl.int64))
    tl.store(end_reason, tl.where(goes_on, found, tl.load(end_reason)))
    continues = (done == 0) & goes_on & (found == GOES_ON)
    hand_over(is_continued, continues.to(tl.int32), handle, SETS)
    tl.store(is_urgent, ((tl.load(wants_steps) != 0) | (continues == 0)).to(tl.int32))


@triton.jit
def renoise(
    is_open, step, block_idx, allowed, num_allowed, noise_key, canvas, L: tl.constexpr, LP: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Step 8."""
    i = tl.arange(0, LP)
    opened = (tl.load(is_open + i, mask=i < L, other=0) != 0) & (i < L)
    fresh = noise(i, tl.load(step), tl.load(block_idx), allowed, num_allowed, noise_key, MASK)
    tl.store(canvas + i, fresh, mask=opened)


@triton.jit
def take_given(given, block_idx, step, where, values, L: tl.constexpr, LP: tl.constexpr, NUM_STEPS: tl.constexpr):
    """Steps 5 and 8 of a recorded run: its row instead of draws or noise."""
    i = tl.arange(0, LP)
    row = given + (tl.load(block_idx) * NUM_STEPS + tl.load(step)) * L
    is_taken = tl.load(where + i, mask=i < L, other=0) != 0
    tl.store(values + i, tl.load(row + i, mask=is_taken, other=0), mask=is_taken)


@triton.jit
def set_flag(flag, VALUE: tl.constexpr):
    """flag = VALUE."""
    tl.store(flag, VALUE)


@triton.jit(do_not_specialize=["handle"])
def finish_step(is_done, is_finite, cancel, end_reason, more_steps, handle: tl.int64 = 0, SETS: tl.constexpr = False):
    """Step 3, before the next forward."""
    reason = tl.load(end_reason)
    done = tl.load(is_done) != 0
    stops = (reason == GOES_ON) & (done == 0) & is_cancelled(cancel)
    reason = tl.where(tl.load(is_finite) == 0, NON_FINITE, tl.where(stops, CANCELLED, reason))
    tl.store(end_reason, reason)
    hand_over(more_steps, ((done == 0) & (reason == GOES_ON)).to(tl.int32), handle, SETS)


@triton.jit(do_not_specialize=["handle"])
def close_block(end_reason, needs_commit, handle: tl.int64 = 0, SETS: tl.constexpr = False):
    """Step 10: no commit forward once the answer has ended."""
    hand_over(needs_commit, (tl.load(end_reason) == GOES_ON).to(tl.int32), handle, SETS)


@triton.jit
def commit_rows(context, L: tl.constexpr):
    """Step 10: the block's rows are context."""
    tl.store(context, tl.load(context) + L)


@triton.jit
def next_block(end_reason, block_idx, num_pinned, more_blocks):
    """Behind a block."""
    tl.store(block_idx, tl.load(block_idx) + 1)
    tl.store(num_pinned, tl.load(block_idx) * 0)
    tl.store(more_blocks, (tl.load(end_reason) == GOES_ON).to(tl.int32))


@triton.jit(do_not_specialize=["handle"])
def bound_launch(more_blocks, blocks_left, goes_on, ends, handle: tl.int64 = 0, SETS: tl.constexpr = False):
    """Whether this launch goes on with another block, and whether the request has ended."""
    left = tl.load(blocks_left) - 1
    more = tl.load(more_blocks) != 0
    tl.store(blocks_left, left)
    hand_over(goes_on, (more & (left > 0)).to(tl.int32), handle, SETS)
    tl.store(ends, (more == 0).to(tl.int32))
