"""Packing: several problems in one row of fixed length, with clean and noisy rows and no leakage between them.

A problem contributes its clean rows (prompt and response once) and, for the diffusion objectives, noisy copies of the
response cut into canvases. Four integers a row (segment, copy, position, block start) say everything about visibility
(`orl.attention`), so a packed sequence computes exactly what its problems would compute alone.

Fixed row length keeps shapes static; first-fit decreasing over a pool fills them to about 95 %. The noise of a problem
depends on (seed, problem number) alone, not on its neighbours or the bin it fell into, so packing cannot change it.

Legend: T rows of a packed sequence, C noisy copies, L canvas length.

Source: layout of block diffusion training, [clean ; noisy], as in kuleshov-group/bd3lms 1c3e8f43; complementary masks
as in NVlabs/Fast-dLLM v2 (arXiv 2509.26328); ours otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from dlmrt.types import Bool, Float32, Int32
from orl.errors import DataError
from orl.recipe import ObjectiveSection

# Streams of `generator`. The task of problem n and the order of pool n draw from one: the same numbers, but what they
# decide does not meet.
DATA_STREAM, NOISE_STREAM, COIN_STREAM, ROLLOUT_STREAM, STATES_STREAM = 0, 1, 2, 3, 4

CLEAN = -1  # value of `copy` on clean rows
PAD = -2  # and on padding rows


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenised problem. Example: 31 prompt ids, 44 response ids whose last is the stop token."""

    number: int  # position in the data stream; keys the noise
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # stop token included


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one problem or one packed sequence; every array has length T."""

    problem: Int32  # number of the problem in the data stream; -1 on padding
    ids: Int32  # input ids
    positions: Int32
    segment: Int32  # place of the problem within the packed sequence; -1 on padding
    copy: Int32  # CLEAN, PAD, or number of the noisy copy
    block_start: Int32  # first position of the row's canvas; 0 on clean rows
    targets: Int32  # id that the row stands for: the next token on clean rows, the slot's own on noisy ones
    predicted_by: Int32  # row whose logits predict `targets`: itself, or with logit_shift 1 the one before the slot
    weights: Float32  # factor of the row's cross-entropy; 0: no loss
    is_unresolved: Bool  # noisy rows whose id is noise


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What noise needs to know of the model."""

    canvas_length: int
    mask_token_id: int | None
    pad_token_id: int  # fills the last canvas right of the stop token
    logit_shift: int = 0  # 1: the row before a slot predicts it, the last clean row before a canvas its first slot
    random_ids: Int32  # ids that uniform noise draws from
    is_grid_at_zero: bool = False  # blocks start at multiples of the canvas length, not where the prompt ends


def generator(seed: int, number: int, stream: int, index: int = 0) -> np.random.Generator:
    """Counter-based random numbers of (seed, number, stream, index).

    Streams of one number are independent. Drawing the task and the noise of a problem from one and the same sequence
    would tie them together: each task would see its own narrow band of noise levels.
    """
    return np.random.Generator(np.random.Philox(key=[seed, number], counter=[0, 0, index, stream]))


def problem_rows(example: Example, objective: ObjectiveSection, noise: Noise, seed: int) -> Rows:
    """Clean rows, then the noisy copies, of one problem.

    Raises:
        DataError: the text holds the mask token, which would be trained as a hole.
    """
    clean = np.array(example.prompt_ids + example.response_ids, dtype=np.int32)
    start, total = len(example.prompt_ids), len(clean)
    if noise.mask_token_id is not None and noise.mask_token_id in clean:
        raise DataError(
            f"problem {example.number} holds the mask token id {noise.mask_token_id}; encode its text as ordinary text"
        )
    # Clean row i predicts i + 1; the last row predicts nothing.
    weights = np.full(total, objective.prompt_weight, dtype=np.float32)
    weights[max(0, start - 1) :] = 1.0
    weights[-1:] = 0.0
    if objective.kind != "ar":
        weights *= objective.ar_weight
    rows = [
        Rows(
            problem=np.full(total, example.number, dtype=np.int32),
            ids=clean,
            positions=np.arange(total, dtype=np.int32),
            segment=np.zeros(total, dtype=np.int32),
            copy=np.full(total, CLEAN, dtype=np.int32),
            block_start=np.zeros(total, dtype=np.int32),
            targets=np.append(clean[1:], 0)[:total].astype(np.int32),
            predicted_by=np.arange(total, dtype=np.int32),
            weights=weights,
            is_unresolved=np.zeros(total, dtype=np.bool_),
        )
    ]
    if objective.kind != "ar":
        rows += _noisy_copies(example, objective, noise, seed, first_row=total)
    return concatenate(rows)


def _noisy_copies(
    example: Example, objective: ObjectiveSection, noise: Noise, seed: int, *, first_row: int
) -> Iterator[Rows]:
    rng = generator(seed, example.number, NOISE_STREAM)
    length, start = noise.canvas_length, len(example.prompt_ids)
    num_blocks = -(-len(example.response_ids) // length)
    targets = np.full(num_blocks * length, noise.pad_token_id, dtype=np.int32)
    targets[: len(example.response_ids)] = example.response_ids
    base = np.where(np.arange(len(targets)) < len(example.response_ids), 1.0, objective.tail_weight).astype(np.float32)
    positions = start + np.arange(len(targets), dtype=np.int32)
    block_start = (positions - (positions - start) % length).astype(np.int32)
    level: Float32 = np.empty(0, dtype=np.float32)
    is_noise: Bool = np.empty(0, dtype=np.bool_)
    for copy in range(objective.copies):
        if objective.kind == "mask" and copy % 2 == 1:
            # The complement: every token is predicted exactly once a pair.
            level, is_noise = (1 - level).astype(np.float32), ~is_noise
        else:
            level = np.repeat(rng.uniform(objective.t_min, 1.0, size=num_blocks).astype(np.float32), length)
            is_noise = rng.random(len(targets)) < level
        weights: npt.NDArray[np.floating] = base
        if objective.kind == "mask":
            assert noise.mask_token_id is not None
            ids = np.where(is_noise, noise.mask_token_id, targets)
            weights = base * is_noise
            if objective.loss_weight == "elbo":
                weights = weights / np.maximum(level, objective.t_min)
        else:
            ids = np.where(is_noise, rng.choice(noise.random_ids, size=len(targets)), targets)
        predicted_by = first_row + copy * len(targets) + np.arange(len(targets))
        if noise.logit_shift:
            assert start, "slot 0 is predicted by the token before it; chat templates write at least one"
            # Clean rows come first and row = position there.
            predicted_by = np.where(positions == block_start, block_start - 1, predicted_by - 1)
        yield Rows(
            problem=np.full(len(targets), example.number, dtype=np.int32),
            ids=ids.astype(np.int32),
            positions=positions,
            segment=np.zeros(len(targets), dtype=np.int32),
            copy=np.full(len(targets), copy, dtype=np.int32),
            block_start=block_start,
            targets=targets,
            predicted_by=predicted_by.astype(np.int32),
            weights=weights.astype(np.float32),
            is_unresolved=is_noise,
        )


def concatenate(rows: Sequence[Rows]) -> Rows:
    """Rows one after another; segments keep their numbers."""
    return Rows(**{f.name: np.concatenate([getattr(r, f.name) for r in rows]) for f in fields(Rows)})


def pack(problems: Sequence[Rows], length: int) -> list[Rows]:
    """First-fit decreasing of whole problems into sequences of exactly `length` rows.

    Raises:
        DataError: a problem is longer than `length`.
    """
    bins: list[list[Rows]] = []
    room: list[int] = []
    for rows in sorted(problems, key=lambda r: -len(r.ids)):
        size = len(rows.ids)
        if size > length:
            raise DataError(f"a problem needs {size} rows and pack_tokens is {length}; raise data.pack_tokens")
        idx = next((i for i, free in enumerate(room) if free >= size), None)
        if idx is None:
            bins.append([])
            room.append(length)
            idx = len(bins) - 1
        bins[idx].append(rows)
        room[idx] -= size
    return [_fill(content, length) for content in bins]


def _fill(content: list[Rows], length: int) -> Rows:
    numbered, used = [], 0
    for i, rows in enumerate(content):
        segment = np.full(len(rows.ids), i, dtype=np.int32)
        numbered.append(replace(rows, segment=segment, predicted_by=rows.predicted_by + np.int32(used)))
        used += len(rows.ids)
    free = length - used
    zeros = np.zeros(free, dtype=np.int32)
    padding = Rows(
        problem=np.full(free, -1, dtype=np.int32),
        ids=zeros,
        positions=zeros,
        segment=np.full(free, -1, dtype=np.int32),
        copy=np.full(free, PAD, dtype=np.int32),
        block_start=zeros,
        targets=zeros,
        predicted_by=np.arange(used, length, dtype=np.int32),
        weights=np.zeros(free, dtype=np.float32),
        is_unresolved=np.zeros(free, dtype=np.bool_),
    )
    return concatenate([*numbered, padding])


@dataclass(frozen=True, kw_only=True)
class Share:
    """Some states of one response that go into one micro-batch. Example: ``Share(response=3, states=(0, 1, 2))``."""

    response: int
    states: tuple[int, ...]


def pack_shares(
    num_clean: Sequence[int], num_states: Sequence[int], *, canvas_length: int, budget: int
) -> list[list[Share]]:
    """Put every state of every response into exactly one micro-batch of about `budget` rows, longest responses first.

    A response whose rows exceed the budget is cut into shares that repeat its clean rows; a share with a single state
    may still be longer than the budget.

    Args:
        num_clean: clean rows of each response.
        num_states: states of each response, at least one.
    """
    shares: list[tuple[int, Share]] = []  # with their rows
    for response, (clean, states) in enumerate(zip(num_clean, num_states, strict=True)):
        per_share = max(1, (budget - clean) // canvas_length)
        for first in range(0, states, per_share):
            chosen = tuple(range(first, min(first + per_share, states)))
            shares.append((clean + len(chosen) * canvas_length, Share(response=response, states=chosen)))
    bins: list[list[Share]] = []
    room: list[int] = []
    for size, share in sorted(shares, key=lambda item: (-item[0], item[1].response)):
        idx = next((i for i, free in enumerate(room) if free >= size), None)
        if idx is None:
            bins.append([])
            room.append(budget)
            idx = len(bins) - 1
        bins[idx].append(share)
        room[idx] -= size
    return bins


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal items to ranks, the costliest first, each to the rank with the least so far; indices per rank."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for idx in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = totals.index(min(totals))
        ranks[rank].append(idx)
        totals[rank] += costs[idx]
    return ranks
