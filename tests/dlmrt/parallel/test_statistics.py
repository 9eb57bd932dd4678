"""Predictions of a divided vocabulary equal those of a whole one: ties, banned ids, odd sizes, filters, draws."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.decode import sampling as whole
from dlmrt.errors import NonFiniteError
from dlmrt.ops import numerics
from dlmrt.parallel.layout import share
from dlmrt.parallel.statistics import gumbel, predict
from dlmrt.types import Sampling


class Threads:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._box = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def of(self, rank: int):
        return dataclasses.make_dataclass("One", [], namespace={"gather": lambda _, x: self._gather(rank, x)})()

    def _gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._box[rank] = x
        self._barrier.wait()
        found = torch.stack(self._box)
        self._barrier.wait()
        return found

    def run(self, function) -> list:
        """What ``function(rank, group)`` returns or raises, for each rank."""
        found = [None] * len(self._box)

        def one(rank: int) -> None:
            try:
                found[rank] = function(rank, self.of(rank))
            except NonFiniteError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def predict_divided(logits, how, banned, size, *, open_L=None):
    vocab_size = logits.shape[1]
    is_banned = torch.zeros(vocab_size, dtype=torch.bool)
    is_banned[torch.from_numpy(banned).long()] = True

    def one(rank, group):
        own = slice(share(vocab_size, rank, size).start, share(vocab_size, rank, size).stop)
        return predict(
            torch.from_numpy(logits[:, own]), own.start, group, how, is_banned[own], vocab_size=vocab_size, block=1,
            step=2, open_L=open_L,
        )  # fmt: skip

    return Threads(size).run(one)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), vocab_size=st.integers(9, 500), size=st.sampled_from([2, 3, 4]),
    spread=st.sampled_from([0.01, 1.0, 5.0]), has_ties=st.booleans(), is_greedy=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 2.0]), top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.0]), min_p=st.sampled_from([0.0, 0.05]),
    share_open=st.sampled_from([0.0, 0.7, 1.0]),
)  # fmt: skip
def test_a_divided_vocabulary_predicts_what_a_whole_one_does(
    seed, vocab_size, size, spread, has_ties, is_greedy, temperature, top_k, top_p, min_p, share_open
):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((5, vocab_size)) * spread).astype(np.float32)
    logits = np.round(logits) if has_ties else logits
    banned = np.sort(rng.choice(vocab_size, rng.integers(0, vocab_size // 2), replace=False)).astype(np.int32)
    how = Sampling(
        temperature=temperature, is_greedy=is_greedy, seed=seed << 20 | 5, top_k=top_k, top_p=top_p, min_p=min_p
    )
    open_L = rng.random(5) < share_open
    wanted = whole.predict(logits, how, banned, block=1, step=2, open_L=open_L, with_probs=True)
    found = predict_divided(logits, how, banned, size, open_L=open_L)
    for ours, _ in found:
        np.testing.assert_array_equal(ours.argmax_L, wanted.argmax_L)
        np.testing.assert_array_equal(ours.token_L, wanted.token_L)
        for name in ("argmax_confidence_L", "confidence_L", "entropy_L"):
            np.testing.assert_allclose(getattr(ours, name), getattr(wanted, name), rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(getattr(ours, name), getattr(found[0][0], name))  # to the bit
    np.testing.assert_allclose(np.concatenate([probs for _, probs in found], 1), wanted.probs_LV, atol=1e-6)


def test_ties_go_to_the_lowest_id_also_across_ranks():
    logits = np.zeros((1, 7), dtype=np.float32)
    for banned, expected in (([], 0), ([0, 1, 2], 3), ([0, 1, 2, 3, 4], 5)):
        how = Sampling(temperature=1.0, is_greedy=True, seed=0)
        for prediction, _ in predict_divided(logits, how, np.array(banned, dtype=np.int32), 3):
            assert prediction.argmax_L.tolist() == [expected]
            assert prediction.confidence_L[0] == np.float32(1 / (7 - len(banned)))
            assert prediction.entropy_L[0] == pytest.approx(np.log(7 - len(banned)), abs=1e-6)


def test_a_nucleus_wider_than_what_is_asked_for_first_is_complete():
    """Flat logits: the nucleus takes most of 1000 ids, and equal ones of a later rank come behind."""
    logits = np.zeros((2, 1000), dtype=np.float32)
    how = Sampling(temperature=1.0, is_greedy=False, seed=11, top_p=0.9)
    wanted = whole.predict(logits, how, np.array([], dtype=np.int32), block=1, step=2)
    for prediction, _ in predict_divided(logits, how, np.array([], dtype=np.int32), 4):
        np.testing.assert_array_equal(prediction.token_L, wanted.token_L)
        assert (prediction.token_L <= 900).all()


def test_numbers_that_cannot_be_used_are_reported_by_every_rank():
    logits = np.zeros((3, 9), dtype=np.float32)
    logits[1, 8] = np.nan  # the last rank's
    how = Sampling(temperature=1.0, is_greedy=True, seed=0)
    for error in predict_divided(logits, how, np.array([], dtype=np.int32), 2):
        assert isinstance(error, NonFiniteError)
        assert "block 1, step 2, slots [1]" in str(error)


@pytest.mark.parametrize(("first", "count"), [(0, 101), (51, 50), (5, 7), (33, 1), (64, 0)])
def test_noise_of_a_run_of_ids_is_that_of_all(first, count):
    slots, seed = np.array([0, 7, 31], dtype=np.int32), 0xFEDCBA9876543210
    wanted = numerics.gumbel(seed, block=3, step=5, slots_R=slots, vocab_size=101)[:, first : first + count]
    found = gumbel(seed, torch.from_numpy(slots), first, count, block=3, step=5)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-14)
