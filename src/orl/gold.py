"""States without rollouts: gold answers with random corruption, as in continued supervised fine-tuning.

The counterpart of `orl.rollout` for the arm that trains on gold answers with as many rows, and for prompts on which no
answer was verified. Blocks lie where the decoder puts them, the prompt's last partial block pinned in front of the
answer where its grid begins at position 0. Nothing was decoded, so there is no step before and no recorded entropy:
cross-entropy falls on every open slot. The residual comes from a first pass of the current model (`self_condition`),
for half of the answers.

Source: two-pass self-conditioning as in Chen et al., arXiv 2208.04202; ours otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.ops import eager as ops
from dlmrt.ops.spec import Ops
from dlmrt.types import Int32
from orl.losses import log_probs
from orl.packing import NOISE_STREAM, Example, Noise, Share, generator
from orl.replay import ReplayBatch, ReplayResponse, ReplayState, packed_logits
from orl.shard import run_with

_LEAST_LEVEL = 0.02  # of noise


def gold_response(
    example: Example, noise: Noise, *, seed: int, response_idx: int, states_per_block: int
) -> ReplayResponse:
    """`states_per_block` corrupted copies of every block of the answer, at noise levels drawn uniformly.

    Args:
        response_idx: copies of one answer draw different noise.
    """
    length, prompt = noise.canvas_length, np.array(example.prompt_ids, dtype=np.int32)
    num_pinned = len(prompt) % length if noise.is_grid_at_zero else 0
    start = len(prompt) - num_pinned
    written = np.concatenate([prompt[start:], np.array(example.response_ids, dtype=np.int32)])
    targets = np.full(-(-len(written) // length) * length, noise.pad_token_id, dtype=np.int32)
    targets[: len(written)] = written
    rng = generator(seed, example.number, NOISE_STREAM, response_idx)
    return ReplayResponse(
        number=example.number,
        clean_S=np.concatenate([prompt[:start], targets[:-length]]),
        grid=start % length,
        states=tuple(
            _corrupted(
                targets[at : at + length], noise, rng, start=start + at, num_pinned=max(0, num_pinned - at),
                num_written=len(written) - at,
            )
            for at in range(0, len(targets), length)
            for _ in range(states_per_block)
        ),
    )  # fmt: skip


def _corrupted(
    targets_L: Int32, noise: Noise, rng: np.random.Generator, *, start: int, num_pinned: int, num_written: int
) -> ReplayState:
    """One canvas: `num_pinned` slots of the prompt, noise over the rest, padding right of `num_written` slots."""
    length = len(targets_L)
    slots = np.arange(length)
    is_free_L = slots >= num_pinned
    is_noise_L = is_free_L & (rng.random(length) < rng.uniform(_LEAST_LEVEL, 1.0))
    fill = noise.mask_token_id if noise.mask_token_id is not None else rng.choice(noise.random_ids, size=length)
    is_open_L = is_noise_L & (slots < num_written)
    return ReplayState(
        start=start,
        canvas_L=np.where(is_noise_L, fill, targets_L).astype(np.int32),
        residual_LD=None,
        is_unresolved_L=is_noise_L,
        targets_L=targets_L,
        is_open_L=is_open_L,
        is_gated_L=is_open_L,
        is_anchored_L=is_free_L & ~is_open_L,
        own_entropy_L=None,
        source_entropy_L=None,
        source_entropy=None,
    )


@torch.no_grad()
def self_condition(
    params: Mapping[str, Tensor], config: ModelConfig, responses: Sequence[ReplayResponse], *, banned: Tensor
) -> Iterator[ReplayResponse]:
    """The same responses, every second one with residuals from a first pass of the current model.

    Args:
        banned: bool [V], ids that may not be predicted.
    """
    for at, response in enumerate(responses):
        if at % 2 or not family_of(config).has_residual(config):
            yield response
            continue
        everything = replace(
            response, states=tuple(replace(s, is_anchored_L=np.ones_like(s.is_open_L)) for s in response.states)
        )
        share = Share(response=0, states=tuple(range(len(response.states))))
        batch = ReplayBatch([everything], [1.0], [share], config, device=str(banned.device))
        z = run_with(params, partial(_first_pass, batch=batch, banned=banned))
        residuals = torch.unflatten(z, 0, (len(response.states), -1)).numpy()
        states = tuple(replace(s, residual_LD=r) for s, r in zip(response.states, residuals, strict=True))
        yield replace(response, states=states)


def _first_pass(params: Mapping[str, Tensor], *, batch: ReplayBatch, banned: Tensor) -> Tensor:
    """Soft embedding float32 [R, D] of the current model's prediction, without a residual."""
    probs = log_probs(packed_logits(params, batch), banned).exp()
    z: Tensor = family_of(batch.config).soft_embedding(cast(Ops, ops), params, batch.config, probs)
    return z.float().cpu()
