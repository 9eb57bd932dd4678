"""From logits to one predicted token per slot, with the numbers that commit rules decide by.

Order: banned ids get -inf; logits are divided by the temperature; confidence, entropy and the soft distribution are of
this *tempered, unfiltered* distribution (raw logits at temperature 0); then top-k, top-p and min-p filter what is
drawn. Confidence thus means the same with and without filters.

Every number of a row is computed from that row alone, in an order that does not depend on how many rows there are.
float32 exponentials, float64 sums.

Legend: L canvas slots, R rows (some of the slots), V vocabulary.

Left out: penalties and grammars, which would have to hold on the whole canvas at once.

Source: filter order and tie rules of LLaDA2.1's `_top_k_logits`/`_top_p_logits` as stored in ZHZisZZ/dllm ca17675;
entropy of processed logits as in transformers 5.24.0 models/diffusion_gemma. The draw is Gumbel-max (ours).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from dlmrt.errors import non_finite_error
from dlmrt.models.config import ModelConfig
from dlmrt.ops.numerics import gumbel
from dlmrt.types import Bool, Float32, Int32, Prediction, Sampling


def banned_ids(config: ModelConfig, known_ids: Collection[int]) -> Int32:
    """Ids that may never be predicted or drawn as noise.

    These are the mask token, head rows that the tokenizer has no token for, be they past its vocabulary or in a hole of
    it, and in mask models a padding token that is no EOS id. EOS ids stay, with a token or without: they end the answer
    and are never shown. So does padding that is one; uniform models keep it, as their reference decoders do.
    """
    banned = set(range(config.vocab_size)).difference(known_ids, config.eos_token_ids)
    if config.diffusion is not None and config.diffusion.mask_token_id is not None:
        banned.add(config.diffusion.mask_token_id)
        if config.pad_token_id is not None and config.pad_token_id not in config.eos_token_ids:
            banned.add(config.pad_token_id)
    return np.array(sorted(banned), dtype=np.int32)


def predict(
    logits_LV: Float32, sampling: Sampling, banned: Int32, *, block: int, step: int, with_probs: bool = False,
    open_L: Bool | None = None,
) -> Prediction:  # fmt: skip
    """Predict every slot from its logits, which are left as they are.

    Args:
        with_probs: also return the distribution, for the soft embedding.
        open_L: slots that need a draw; the others get their argmax. None: all.

    Raises:
        NonFiniteError: the logit of an id that is not banned is NaN or infinite, or becomes so when tempered; the
            message names block and step.
    """
    rows = np.arange(len(logits_LV))
    with np.errstate(over="ignore"):
        scaled = logits_LV / np.float32(sampling.temperature)
    scaled[:, banned] = 0  # whatever they are
    if not np.isfinite(scaled).all():
        raise non_finite_error(np.flatnonzero(~np.isfinite(scaled).all(axis=1)).tolist(), block=block, step=step)
    scaled[:, banned] = -np.inf
    argmax_L = scaled.argmax(axis=1)
    scaled -= scaled[rows, argmax_L][:, None]
    weights = np.exp(scaled)  # 1 at the argmax, so a sum of them is never 0
    weights_64 = weights.astype(np.float64)
    total_L = weights_64.sum(axis=1)
    weights_64 *= np.maximum(scaled, np.float32(-1e4))  # 0 * -inf at banned ids would be NaN; e^-1e4 is 0 anyway
    entropy_L = np.maximum(np.log(total_L) - weights_64.sum(axis=1) / total_L, 0.0)
    token_L = argmax_L
    if not sampling.is_greedy:
        drawn = rows if open_L is None else np.flatnonzero(open_L)
        token_L = argmax_L.copy()
        slots_R = drawn.astype(np.int32)
        token_L[drawn] = _draw(scaled[drawn], weights[drawn], sampling, block=block, step=step, slots_R=slots_R)
    return Prediction(
        argmax_L=argmax_L.astype(np.int32),
        argmax_confidence_L=(1.0 / total_L).astype(np.float32),
        token_L=token_L.astype(np.int32),
        confidence_L=(weights[rows, token_L] / total_L).astype(np.float32),
        entropy_L=entropy_L.astype(np.float32),
        probs_LV=(weights / total_L[:, None]).astype(np.float32) if with_probs else None,
        logits_LV=scaled if with_probs else None,
    )


def _draw(
    scaled_RV: Float32, weights_RV: Float32, sampling: Sampling, *, block: int, step: int, slots_R: Int32
) -> npt.NDArray[np.intp]:
    """Gumbel-max over the ids that pass the filters."""
    noise = gumbel(sampling.seed, block=block, step=step, slots_R=slots_R, vocab_size=scaled_RV.shape[1])
    kept = filter_mask(weights_RV, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    token_R: npt.NDArray[np.intp] = np.where(kept, scaled_RV + noise, -np.inf).argmax(axis=1)
    return token_R


def filter_mask(weights_RV: Float32, *, top_k: int, top_p: float, min_p: float) -> Bool:
    """Ids that top-k, then top-p, then min-p leave; at least one a row.

    Args:
        weights_RV: probabilities up to a factor per row, 0 for banned ids.
        top_k: keep the k largest and all that tie with the k-th; 0: all.
        top_p: of what is left, drop ids before which the cumulative share already exceeds it (lower id first on ties).
        min_p: drop ids below this share of the largest weight.
    """
    kept = weights_RV > 0
    if 0 < top_k < weights_RV.shape[1]:
        kth = np.partition(weights_RV, -top_k, axis=1)[:, -top_k]
        kept &= weights_RV >= kth[:, None]
    if top_p < 1.0:
        mass = np.where(kept, weights_RV, 0.0).astype(np.float64)
        order = np.argsort(-mass, axis=1, kind="stable")
        shares = np.take_along_axis(mass, order, axis=1)
        before = np.cumsum(shares, axis=1) - shares
        nucleus = np.empty_like(kept)
        np.put_along_axis(nucleus, order, before <= top_p * mass.sum(axis=1)[:, None], axis=1)
        kept &= nucleus
    if min_p > 0.0:
        kept &= weights_RV >= np.float32(min_p) * weights_RV.max(axis=1)[:, None]
    return kept
