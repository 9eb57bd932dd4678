"""Predictions from logits whose ids are divided over ranks: what `dlmrt.decode.sampling.predict` says of all of them.

Each rank has the logits of a run of ids. Two rounds of gathering settle a step whatever the vocabulary: the largest
logit with its id, then sums of exponentials, both with numbers of a row and rank only. A draw rides on the second round
(Gumbel noise belongs to an id, so every rank draws among its own); top-k and top-p ask for a third one, with the
heaviest ids of each rank, and top-p for more of them until the nucleus is known to be complete.

Everything is combined in the order of the ranks, which is that of the ids: ties go to the lowest id, and all ranks have
the same result to the bit. Nothing is rounded in between: against one rank with all ids, only the order of float64 sums
differs.

Legend: L canvas slots, R rows that are drawn, W ids of this rank, V vocabulary, P ranks.

Left out: the whole distribution (`Prediction.probs_LV`); who wants to see it gathers the logits.

Source: ours; arithmetic as in dlmrt.decode.sampling.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dlmrt.errors import non_finite_error
from dlmrt.ops.numerics import SAMPLE
from dlmrt.types import Bool, Prediction, Sampling

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF
_FIRST_CANDIDATES = 64  # heaviest ids of a rank that top-p asks for first


class Gather(Protocol):
    """How ranks exchange small tensors; see `dlmrt.parallel.group.Group.gather`."""

    def gather(self, x: Tensor) -> Tensor:
        """`x` of every rank [P, ...], in their order."""


def predict(
    logits_LW: Tensor, first: int, group: Gather, sampling: Sampling, banned_W: Tensor, *, vocab_size: int,
    block: int, step: int, open_L: Bool | None,
) -> tuple[Prediction, Tensor]:  # fmt: skip
    """Predict every slot; returns the prediction, the same on every rank, and this rank's probabilities [L, W].

    Args:
        first: id of this rank's first logit.
        banned_W: bool, ids of this rank that are never predicted.
        open_L: slots that need a draw; the others get their argmax. None: all.

    Raises:
        NonFiniteError: some rank has a logit, of an id that is not banned, that is NaN or infinite or becomes so when
            tempered; raised on every rank.
    """
    rows = torch.arange(len(logits_LW), device=logits_LW.device)
    # Divided by a tensor: torch multiplies by the reciprocal of a number on a GPU.
    scaled = logits_LW.float() / torch.tensor(sampling.temperature, dtype=torch.float32, device=logits_LW.device)
    is_finite = (torch.isfinite(scaled) | banned_W).all(1)
    scaled = scaled.masked_fill(banned_W, -math.inf)
    top = scaled.max(1)
    best = group.gather(torch.stack((top.values.double(), (top.indices + first).double(), is_finite.double())))
    bad = (best[:, 2] == 0).any(0)
    if bool(bad.any()):
        raise non_finite_error(bad.nonzero()[:, 0].tolist(), block=block, step=step)
    winner = best[:, 0].argmax(0)
    peak, argmax_L = best[winner, 0, rows].float(), best[winner, 1, rows].long()
    scaled = scaled - peak[:, None]
    weights = scaled.exp()
    weights_64 = weights.double()
    sums = torch.stack((weights_64.sum(1), (weights_64 * scaled.clamp_min(-1e4)).sum(1)))
    token_L, weight_L = argmax_L, torch.ones_like(peak)
    drawn = rows[:0] if sampling.is_greedy else rows
    if open_L is not None:
        drawn = drawn[torch.from_numpy(open_L).to(rows.device)[drawn]]
    if not len(drawn):
        total, moment = group.gather(sums).sum(0)
    else:
        kept = _kept(weights[drawn], sampling, first, group, vocab_size=vocab_size)
        noise = gumbel(sampling.seed, drawn, first, scaled.shape[1], block=block, step=step)
        draw = torch.where(kept, scaled[drawn] + noise, -math.inf).max(1)
        drawn_weights = weights[drawn, draw.indices].double()
        offers = torch.stack((draw.values, (draw.indices + first).double(), drawn_weights))
        both = group.gather(torch.cat((sums.flatten(), offers.flatten())))
        total, moment = both[:, : sums.numel()].reshape(-1, *sums.shape).sum(0)
        offers = both[:, sums.numel() :].reshape(-1, *offers.shape)
        places = torch.arange(len(drawn), device=rows.device)
        winner = offers[:, 0].argmax(0)
        token_L, weight_L = token_L.clone(), weight_L.clone()
        token_L[drawn] = offers[winner, 1, places].long()
        weight_L[drawn] = offers[winner, 2, places].float()
    entropy_L = (total.log() - moment / total).clamp_min(0.0)
    prediction = Prediction(
        argmax_L=argmax_L.int().cpu().numpy(),
        argmax_confidence_L=(1.0 / total).float().cpu().numpy(),
        token_L=token_L.int().cpu().numpy(),
        confidence_L=(weight_L / total).float().cpu().numpy(),
        entropy_L=entropy_L.float().cpu().numpy(),
    )
    return prediction, (weights / total[:, None]).float()


def _kept(weights_RW: Tensor, sampling: Sampling, first: int, group: Gather, *, vocab_size: int) -> Tensor:
    """Ids of this rank that top-k, then top-p, then min-p leave; see `dlmrt.decode.sampling.filter_mask`."""
    kept = weights_RW > 0
    if 0 < sampling.top_k < vocab_size:
        heaviest = _padded(weights_RW.sort(dim=1, descending=True).values, sampling.top_k)
        kth = torch.cat(tuple(group.gather(heaviest)), 1).sort(dim=1, descending=True).values[:, sampling.top_k - 1]
        kept &= weights_RW >= kth[:, None]
    if sampling.top_p < 1.0:
        kept &= _nucleus(torch.where(kept, weights_RW, 0.0).double(), sampling.top_p, first, group)
    if sampling.min_p > 0.0:
        kept &= weights_RW >= float(np.float32(sampling.min_p))  # the largest weight is 1
    return kept


def _nucleus(mass_RW: Tensor, top_p: float, first: int, group: Gather) -> Tensor:
    """Ids of this rank before the first one, by falling mass, before which more than `top_p` of all mass lies.

    The ranks' heaviest ids are merged; the cut is right once it lies above all that was not sent.
    """
    limit = top_p * group.gather(mass_RW.sum(1)).sum(0)
    width = mass_RW.shape[1]
    ordered = mass_RW.sort(dim=1, descending=True, stable=True)
    count = _FIRST_CANDIDATES
    while True:
        # What is left is at most this; -1: nothing is left.
        rest = ordered.values[:, count - 1] if count < width else torch.full_like(limit, -1.0)
        sent = torch.cat(
            (_padded(ordered.values, count), _padded((ordered.indices + first).double(), count), rest[:, None]), 1
        )
        found = group.gather(sent)
        masses, ids = (torch.cat(tuple(part), 1) for part in (found[..., :count], found[..., count:-1]))
        bound = found[..., -1].amax(0)
        masses, order = masses.sort(dim=1, descending=True, stable=True)
        before = masses.clamp_min(0.0).cumsum(1) - masses.clamp_min(0.0)
        is_dropped = before > limit[:, None]
        at = is_dropped.int().argmax(1, keepdim=True)
        any_dropped = is_dropped.any(1)
        cut_mass = masses.gather(1, at)[:, 0]
        cut_id = ids.gather(1, order.gather(1, at))[:, 0]
        is_known = torch.where(any_dropped, (cut_mass > bound) | (cut_mass <= 0), bound <= 0)
        if bool(is_known.all()):
            break
        count *= 4
    own_ids = first + torch.arange(width, device=mass_RW.device)
    is_before = (mass_RW > cut_mass[:, None]) | ((mass_RW == cut_mass[:, None]) & (own_ids < cut_id[:, None]))
    return is_before | ~any_dropped[:, None]


def _padded(values: Tensor, count: int) -> Tensor:
    """The first `count` columns; -1 where there are fewer."""
    missing = count - values.shape[1]
    return values[:, :count] if missing <= 0 else torch.nn.functional.pad(values, (0, missing), value=-1.0)


def gumbel(seed: int, slots_R: Tensor, first: int, count: int, *, block: int, step: int) -> Tensor:
    """Columns `first` to `first + count` of `dlmrt.ops.numerics.gumbel`, float64 [R, W]."""
    group = torch.arange(first // 4, (first + count + 3) // 4, device=slots_R.device)
    last = SAMPLE | slots_R.long()[:, None] << 8
    counters = tuple(part + torch.zeros_like(last + group) for part in (group, step, block, last))
    words = torch.stack(_philox(seed, counters), -1).flatten(1)[:, first % 4 : first % 4 + count]
    u = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))


def _philox(key: int, counters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`dlmrt.ops.numerics.philox` in int64, whose products wrap as those of unsigned numbers do."""
    key_0, key_1 = key & _LOW_32, key >> 32
    c_0, c_1, c_2, c_3 = counters
    for _ in range(_ROUNDS):
        product_0, product_1 = c_0 * _MULTIPLIERS[0], c_2 * _MULTIPLIERS[1]
        c_0, c_1 = (product_1 >> 32 & _LOW_32) ^ c_1 ^ key_0, product_1 & _LOW_32
        c_2, c_3 = (product_0 >> 32 & _LOW_32) ^ c_3 ^ key_1, product_0 & _LOW_32
        key_0, key_1 = (key_0 + _WEYL[0]) & _LOW_32, (key_1 + _WEYL[1]) & _LOW_32
    return c_0, c_1, c_2, c_3
