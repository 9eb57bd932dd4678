"""Prediction of one step: numbers against a float64 computation, filters against recorded vectors, bans, draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dlmrt.decode.sampling import banned_ids, filter_mask, predict
from dlmrt.errors import NonFiniteError
from dlmrt.testing import MASK, VOCAB_SIZE, tiny_config
from dlmrt.types import Sampling

GREEDY = Sampling(temperature=1.0, is_greedy=True, seed=0)
NONE = np.array([], dtype=np.int32)
VECTORS = load_file(Path(__file__).parents[2] / "data" / "vectors" / "llada2_filters.safetensors")


def random_logits(seed: int, rows: int, vocab_size: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab_size)) * scale).astype(np.float32)


@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]))
def test_numbers_equal_a_plain_computation(seed: int, temperature: float) -> None:
    logits = random_logits(seed, 5, 37)
    banned = np.array([3, 36], dtype=np.int32)
    prediction = predict(
        logits, Sampling(temperature=temperature, is_greedy=True, seed=0), banned, block=0, step=0, with_probs=True
    )
    scaled = (logits / np.float32(temperature)).astype(np.float64)
    scaled[:, banned] = -np.inf
    probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    entropy = -(probs * np.log(np.where(probs > 0, probs, 1))).sum(axis=1)
    np.testing.assert_array_equal(prediction.token_L, probs.argmax(axis=1))
    np.testing.assert_allclose(prediction.confidence_L, probs.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(prediction.entropy_L, entropy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(prediction.probs_LV, probs, atol=1e-6)


def test_argmax_takes_the_first_of_equal_ids() -> None:
    logits = np.zeros((1, 9), dtype=np.float32)
    logits[0, [4, 7]] = 2.0
    assert predict(logits, GREEDY, NONE, block=0, step=0).token_L.tolist() == [4]
    assert predict(logits, GREEDY, np.array([4], dtype=np.int32), block=0, step=0).token_L.tolist() == [7]


@pytest.mark.parametrize("vocab_size", [11, 2048, 9000])
def test_a_row_does_not_depend_on_others(vocab_size: int) -> None:
    """Row invariance, also across the sizes at which numpy buffers reductions."""
    logits = random_logits(0, 9, vocab_size)
    sampling = Sampling(temperature=0.8, is_greedy=False, seed=5, top_k=40, top_p=0.9, min_p=0.01)
    whole = predict(logits, sampling, NONE, block=1, step=2, with_probs=True)
    for rows in (slice(0, 1), slice(0, 4), slice(0, 8)):
        part = predict(logits[rows], sampling, NONE, block=1, step=2, with_probs=True)
        for name in ("argmax_L", "token_L", "confidence_L", "argmax_confidence_L", "entropy_L", "probs_LV"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])


def test_draws_are_made_only_for_open_slots_and_do_not_depend_on_which() -> None:
    logits = random_logits(1, 12, 50, scale=0.5)
    sampling = Sampling(temperature=1.0, is_greedy=False, seed=9)
    everything = predict(logits, sampling, NONE, block=0, step=0)
    is_open = np.arange(12) % 3 == 0
    some = predict(logits, sampling, NONE, block=0, step=0, open_L=is_open)
    np.testing.assert_array_equal(some.token_L[is_open], everything.token_L[is_open])
    np.testing.assert_array_equal(some.token_L[~is_open], some.argmax_L[~is_open])
    assert (everything.token_L != everything.argmax_L).any()


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_logits(2, 3, 20)
    before = logits.copy()
    predict(logits, GREEDY, np.array([1], dtype=np.int32), block=0, step=0)
    np.testing.assert_array_equal(logits, before)


def test_banned_ids_are_never_drawn() -> None:
    """K12, K20: the mask id and ids beyond the tokenizer's are out at any temperature."""
    config = tiny_config(vocab_size=320)
    banned = banned_ids(config, range(VOCAB_SIZE))
    assert banned.tolist() == [MASK, *range(VOCAB_SIZE, 320)]
    logits = np.zeros((64, 320), dtype=np.float32)
    logits[:, [300, MASK]] = 50.0
    for step in range(20):
        sampling = Sampling(temperature=2.0, is_greedy=False, seed=step)
        prediction = predict(logits, sampling, banned, block=0, step=step, with_probs=True)
        assert not np.isin(prediction.token_L, banned).any() and not np.isin(prediction.argmax_L, banned).any()
        assert prediction.probs_LV is not None and (prediction.probs_LV[:, banned] == 0).all()


def test_padding_is_banned_where_it_is_no_end() -> None:
    """K12: in a mask model; where it ends the answer, or noise is uniform, it stays. So are holes of the vocabulary."""
    pad, known = 7, set(range(VOCAB_SIZE))
    assert banned_ids(tiny_config(pad_token_id=pad), known).tolist() == [pad, MASK]
    assert banned_ids(tiny_config(pad_token_id=pad, eos_token_ids=(pad,)), known).tolist() == [MASK]
    assert banned_ids(tiny_config(pad_token_id=pad, diffusion={"noise": "uniform"}), known).tolist() == []
    assert banned_ids(tiny_config(pad_token_id=None), known).tolist() == [MASK]
    assert banned_ids(tiny_config(vocab_size=300), known - {65} | {290}).tolist() == [
        65, MASK, *range(VOCAB_SIZE, 290), *range(291, 300),
    ]  # fmt: skip
    # An EOS id without a token still ends the answer: it is never shown.
    assert 299 not in banned_ids(tiny_config(vocab_size=300, eos_token_ids=(299,)), known)


def test_logits_that_overflow_when_tempered_are_not_finite() -> None:
    """K11: argmax over NaN would answer with the first id."""
    logits = random_logits(0, 4, 10)
    logits[1, 3] = 3e38
    cold = Sampling(temperature=1e-3, is_greedy=False, seed=0)
    with pytest.raises(NonFiniteError, match=r"slots \[1\]"):
        predict(logits, cold, NONE, block=0, step=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_name_block_step_and_slot(value: float) -> None:
    """K11"""
    logits = random_logits(0, 4, 10)
    logits[2, 5] = value
    with pytest.raises(NonFiniteError, match=r"block 3, step 7, slots \[2\]"):
        predict(logits, GREEDY, NONE, block=3, step=7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_logit_of_a_banned_id_may_be_anything(value: float) -> None:
    logits = random_logits(0, 4, 10)
    expected = predict(logits, GREEDY, np.array([5], dtype=np.int32), block=3, step=7)
    logits[2, 5] = value
    found = predict(logits, GREEDY, np.array([5], dtype=np.int32), block=3, step=7)
    np.testing.assert_array_equal(found.entropy_L, expected.entropy_L)
    np.testing.assert_array_equal(found.argmax_L, expected.argmax_L)


@pytest.mark.parametrize("name", sorted(name for name in VECTORS if name.endswith(".probs")))
def test_filters_equal_the_official_ones(name: str) -> None:
    temperature, top_k, top_p = name.removeprefix("filters.").removesuffix(".probs").split("_")
    scaled = VECTORS["filters.logits"] / np.float32(temperature[1:])
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    kept = filter_mask(
        weights, top_k=0 if top_k == "kNone" else int(top_k[1:]), top_p=1.0 if top_p == "pNone" else float(top_p[1:]),
        min_p=0.0,
    )  # fmt: skip
    probs = np.where(kept, weights, 0) / np.where(kept, weights, 0).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(kept, VECTORS[name] > 0)
    np.testing.assert_allclose(probs, VECTORS[name], atol=1e-7)


def test_filters_keep_ties_and_at_least_one() -> None:
    weights = np.array([[1.0, 0.5, 0.5, 0.25, 0.0]], dtype=np.float32)
    assert filter_mask(weights, top_k=2, top_p=1.0, min_p=0.0)[0].tolist() == [True, True, True, False, False]
    assert filter_mask(weights, top_k=0, top_p=1e-6, min_p=0.0)[0].tolist() == [True, False, False, False, False]
    assert filter_mask(weights, top_k=0, top_p=1.0, min_p=0.5)[0].tolist() == [True, True, True, False, False]
    assert filter_mask(weights, top_k=0, top_p=1.0, min_p=1.0)[0].tolist() == [True, False, False, False, False]
    assert filter_mask(weights, top_k=99, top_p=1.0, min_p=0.0)[0].tolist() == [True, True, True, True, False]


@given(seed=st.integers(0, 500), top_k=st.integers(0, 12), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1))
def test_drawn_ids_pass_the_filters(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(seed, 4, 12, scale=1.0)
    sampling = Sampling(temperature=1.0, is_greedy=False, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    token = predict(logits, sampling, NONE, block=0, step=0).token_L
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert filter_mask(weights, top_k=top_k, top_p=top_p, min_p=min_p)[np.arange(4), token].all()
