"""Head statistics, sampling and soft embedding against numpy.

Legend: as native.
"""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass, field

import numpy as np
import pytest
from native import (
    BANNED_LOGIT,
    BF16,
    F32,
    HEAD_TILE,
    INT8,
    Array,
    GumbelKey,
    HeadArgs,
    HeadMergeArgs,
    HeadPartials,
    Packed,
    ProbabilitiesArgs,
    Rows,
    SoftEmbeddingArgs,
    call,
    float_source,
    linear,
    operand,
    pack,
    ptr,
    round_bf16,
    runnable,
    to_bf16,
)

from dlmrt.ops.numerics import SAMPLE, gumbel


@dataclass
class Head:
    """Results of one head call; partial buffers are filled with garbage beforehand."""

    isa: str
    packed: Packed
    rows: Rows
    threads: int = 1
    softcap: float = 0.0
    temperature: float | None = None
    banned: tuple[int, ...] = ()
    keys: list[GumbelKey] | None = None
    logits: Array = field(init=False)

    def __post_init__(self) -> None:
        m, v = self.rows.rows, self.packed.weight.n
        tiles, stride = -(-v // HEAD_TILE), -(-m // 16) * 16
        f = lambda *shape: np.full(shape, np.nan, np.float32)  # noqa: E731
        i = lambda *shape: np.full(shape, -77, np.int32)  # noqa: E731
        parts = [f(tiles, stride) for _ in range(3)] + [i(tiles, stride), f(tiles, stride), f(tiles, stride),
                 i(tiles, stride)]  # fmt: skip
        addresses = [ptr(p) for p in parts]
        if self.keys is None:
            addresses[4:] = [None] * 3
        partials = HeadPartials(stride, *addresses)
        self.logits = f(m, v)
        words = np.zeros(-(-v // 32), np.uint32)
        for b in self.banned:
            words[b // 32] |= np.uint32(1 << b % 32)
        temperature = None if self.temperature is None else np.array([self.temperature], np.float32)
        keys = None if self.keys is None else (GumbelKey * m)(*self.keys)
        args = HeadArgs(
            self.packed.weight, self.rows.operand, m, self.softcap, ptr(temperature),
            ptr(words) if self.banned else None, None if keys is None else C.addressof(keys), partials,
            ptr(self.logits), v,
        )  # fmt: skip
        call("head_stats", self.isa, args, self.threads)
        self.argmax, self.max, self.lse, self.entropy = i(m), f(m), f(m), f(m)
        self.sample, self.sample_logit, self.confidence = i(m), f(m), f(m)
        drawn = (ptr(self.sample), ptr(self.sample_logit)) if keys is not None else (None, None)
        merge = HeadMergeArgs(partials, m, v, ptr(self.argmax), ptr(self.max), ptr(self.lse), ptr(self.entropy),
                              *drawn, ptr(self.confidence))  # fmt: skip
        call("head_merge", self.isa, merge, self.threads)

    def everything(self) -> list[Array]:
        return [self.logits, self.argmax, self.max, self.lse, self.entropy, self.confidence, self.sample]


def key(seed: int, step: int, block: int, slot: int) -> GumbelKey:
    return GumbelKey((C.c_uint32 * 2)(seed & 0xFFFFFFFF, seed >> 32), step, block, SAMPLE | slot << 8)


def make(
    rng: np.random.Generator, m: int, v: int, d: int = 32, dtype: int = F32, spread: float = 1.0
) -> tuple[Packed, Array]:
    w = rng.standard_normal((v, d), dtype=np.float32) * np.float32(spread / d**0.5)
    return pack(dtype, [float_source(w)], d), rng.standard_normal((m, d), dtype=np.float32) * 3


def check(head: Head, logits: Array) -> None:
    """Statistics agree with float64 ones of the same logits."""
    x = logits.astype(np.float64)
    top = x.max(1, keepdims=True)
    e = np.exp(x - top)
    z = e.sum(1)
    assert (head.argmax == logits.argmax(1)).all()
    assert (head.max == logits.max(1)).all()
    np.testing.assert_allclose(head.lse, np.log(z) + top[:, 0], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(head.confidence, 1 / z, rtol=1e-6)
    live = np.where(x > -1e29, x - top, 0.0)
    np.testing.assert_allclose(head.entropy, np.log(z) - (live * e).sum(1) / z, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", [F32, BF16, INT8])
@pytest.mark.parametrize("v", [5, 16, 130, 320, 1111])
def test_statistics(isa: str, dtype: int, v: int, rng: np.random.Generator) -> None:
    packed, x = make(rng, 19, v, dtype=dtype, spread=3)
    rows = operand(isa, dtype, x)
    head = Head(isa, packed, rows)
    assert (head.logits == linear(isa, packed, rows)).all()
    check(head, head.logits)
    for threads in (2, 3, 5):
        for a, b in zip(head.everything(), Head(isa, packed, rows, threads).everything(), strict=True):
            assert np.array_equal(a, b, equal_nan=True)
    alone = Head(isa, packed, operand(isa, dtype, x[7:8]))
    for a, b in zip(head.everything()[:-1], alone.everything()[:-1], strict=True):
        assert (a[7] == b[0]).all(), "statistics of a row depend on the other rows"


def test_ties_go_to_the_lower_id(isa: str, rng: np.random.Generator) -> None:
    w = np.ones((400, 16), np.float32)
    w[[13, 150, 399]] = 2
    head = Head(isa, pack(F32, [float_source(w)], 16), operand(isa, F32, np.ones((3, 16), np.float32)), 3)
    assert (head.argmax == 13).all()


def test_flat_logits_are_finite(isa: str) -> None:
    """K09: flat logits give entropy log V and probability 1 / V."""
    head = Head(
        isa,
        pack(F32, [float_source(np.zeros((320, 16), np.float32))], 16),
        operand(isa, F32, np.ones((1, 16), np.float32)),
    )
    np.testing.assert_allclose([head.entropy[0], head.lse[0]], np.log(320), rtol=1e-6)
    assert head.argmax[0] == 0


def test_banned_temperature_softcap(isa: str, rng: np.random.Generator) -> None:
    """K12: ids past the tokenizer's vocabulary never win, whatever their logit."""
    v, banned = 320, (300, 7, *range(310, 320))
    packed, x = make(rng, 9, v, spread=5)
    rows = operand(isa, F32, x)
    raw = linear(isa, packed, rows)
    hot = raw / np.float32(0.7)
    hot[:, banned] = BANNED_LOGIT
    head = Head(isa, packed, rows, 2, temperature=0.7, banned=banned)
    assert (head.logits == hot).all()
    check(head, hot)
    assert not np.isin(head.argmax, banned).any()
    capped = Head(isa, packed, rows, softcap=4.0, banned=banned)
    expected = 4 * np.tanh(raw.astype(np.float64) / 4)
    expected[:, banned] = BANNED_LOGIT
    np.testing.assert_allclose(capped.logits, expected, rtol=1e-5, atol=2e-6)
    check(capped, capped.logits)


def test_a_fully_banned_tile_is_no_harm(isa: str, rng: np.random.Generator) -> None:
    packed, x = make(rng, 2, 384, spread=3)
    head = Head(isa, packed, operand(isa, F32, x), 3, banned=tuple(range(128, 256)))
    check(head, head.logits)


def test_poisoned_row_shows_and_stays_alone(isa: str, rng: np.random.Generator) -> None:
    """K11: the loop's check for non-finite statistics sees the row; the others do not change."""
    packed, x = make(rng, 5, 300)
    keys = [key(1, 0, 0, i) for i in range(5)]
    good = Head(isa, packed, operand(isa, F32, x), 2, keys=keys)
    x[3, 4] = np.nan
    bad = Head(isa, packed, operand(isa, F32, x), 2, keys=keys)
    assert not np.isfinite(bad.lse[3])
    assert 0 <= bad.argmax[3] < 300
    assert 0 <= bad.sample[3] < 300
    for a, b in zip(good.everything(), bad.everything(), strict=True):
        assert (np.delete(a, 3, 0) == np.delete(b, 3, 0)).all()


def test_one_poisoned_logit_poisons_the_statistics(isa: str, rng: np.random.Generator) -> None:
    """K11: a NaN that is not the maximum must not be lost in it."""
    w = rng.standard_normal((300, 16), dtype=np.float32)
    w[200, 3] = np.nan
    head = Head(isa, pack(F32, [float_source(w)], 16), operand(isa, F32, np.ones((2, 16), np.float32)))
    for statistic in (head.lse, head.entropy, head.confidence):
        assert np.isnan(statistic).all()


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("at", [5, 200, 299])
def test_a_logit_that_is_not_finite_shows_unless_its_id_is_banned(isa: str, value: float, at: int) -> None:
    """Also -inf, which would be lost among the exponentials; in a whole tile, a last one and one with banned ids."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((300, 16), dtype=np.float32)
    w[at, 3] = value
    packed, rows = pack(F32, [float_source(w)], 16), operand(isa, F32, np.ones((2, 16), np.float32))
    for settings in ({}, {"temperature": 0.7}, {"banned": (6, 201)}):
        assert np.isnan(Head(isa, packed, rows, **settings).lse).all()
    check(banned := Head(isa, packed, rows, banned=(at,)), banned.logits)


def test_a_sure_row_keeps_the_digits_of_its_doubt(isa: str) -> None:
    """Entropy and log-sum-exp come from the mass of the other ids, not from 1 + that mass."""
    w = np.zeros((300, 16), np.float32)
    w[17] = 1
    head = Head(isa, pack(F32, [float_source(w)], 16), operand(isa, F32, np.full((1, 16), 20 / 16, np.float32)))
    others = 299 * np.exp(-20.0)
    np.testing.assert_allclose(head.lse[0] - 20, np.log1p(others), atol=2e-6)
    np.testing.assert_allclose(head.entropy[0], np.log1p(others) + 20 * others / (1 + others), rtol=1e-4)


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_sample_equals_numpy_gumbel_max(isa: str, spread: float, rng: np.random.Generator) -> None:
    """The counter contract of dlmrt.ops.numerics; pruning never changes a draw; threads do not either."""
    m, v, seed, step, block = 21, 1111, 0x123456789ABCDEF0, 3, 5
    packed, x = make(rng, m, v, spread=spread)
    rows, banned = operand(isa, F32, x), (0, 1000)
    slots = rng.permutation(64)[:m].astype(np.int32)
    keys = [key(seed, step, block, int(s)) for s in slots]
    head = Head(isa, packed, rows, temperature=0.8, banned=banned, keys=keys)
    scores = head.logits.astype(np.float64) + gumbel(seed, block=block, step=step, slots_R=slots, vocab_size=v)
    best = np.sort(scores, axis=1)
    clear = best[:, -1] - best[:, -2] > 1e-4  # nearer ones are ties within fp32 rounding
    assert clear.sum() >= m - 1
    assert (head.sample == scores.argmax(1))[clear].all()
    assert (head.sample_logit == head.logits[np.arange(m), head.sample]).all()
    for threads in (2, 3):
        again = Head(isa, packed, rows, threads, temperature=0.8, banned=banned, keys=keys)
        assert (again.sample == head.sample).all()


def test_samples_follow_the_softmax(rng: np.random.Generator) -> None:
    v, draws = 6, 4000
    packed, x = make(rng, 1, v)
    isa = runnable()[0]
    rows = operand(isa, F32, np.repeat(x, draws, 0))
    head = Head(isa, packed, rows, 2, keys=[key(9, 0, 0, i) for i in range(draws)])
    p = np.exp(head.logits[0].astype(np.float64) - head.lse[0])
    counts = np.bincount(head.sample, minlength=v)
    chi_square = ((counts - draws * p) ** 2 / (draws * p)).sum()
    assert chi_square < 20.5, "beyond the 99.9 % quantile of 5 degrees of freedom"


def test_samples_are_equal_on_all_instruction_sets(rng: np.random.Generator) -> None:
    packed, x = make(rng, 9, 700)
    keys = [key(1, 2, 3, i) for i in range(9)]
    heads = [Head(isa, packed, operand(isa, F32, x), keys=keys) for isa in runnable()]
    for other in heads[1:]:
        for a, b in zip(heads[0].everything(), other.everything(), strict=True):
            assert np.array_equal(a, b)


def soft(isa: str, head: Head, dtype: int, table: Array, scale: float, threads: int = 1) -> Array:
    """z [M, D] from a head's logits."""
    m, v, d = head.rows.rows, head.packed.weight.n, table.shape[1]
    memory = to_bf16(table) if dtype == BF16 else table
    probs = Rows(dtype, m, v)
    call("probabilities", isa, ProbabilitiesArgs(ptr(head.logits), v, m, ptr(head.lse), probs.operand), threads)
    out = np.full((m, d), np.nan, np.float32)
    call("soft_embedding", isa, SoftEmbeddingArgs(probs.operand, ptr(memory), m, d, scale, ptr(out)), threads)
    return out


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("v", "d"), [(5, 3), (130, 16), (333, 40), (301, 96)])
def test_soft_embedding(isa: str, dtype: int, v: int, d: int, rng: np.random.Generator) -> None:
    packed, x = make(rng, 11, v)
    table = rng.standard_normal((v, d), dtype=np.float32)
    head = Head(isa, packed, operand(isa, F32, x), banned=(2,))
    z = soft(isa, head, dtype, table, 1.5)
    p = np.exp(head.logits.astype(np.float64) - head.lse.astype(np.float64)[:, None])
    exact = 1.5 * p @ (round_bf16(table) if dtype == BF16 else table).astype(np.float64)
    np.testing.assert_allclose(z, exact, atol=1e-5 if dtype == F32 else 1e-2)
    for threads in (2, 3):
        assert (soft(isa, head, dtype, table, 1.5, threads) == z).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_soft_embedding_of_one_certain_id_is_its_row(isa: str, dtype: int, rng: np.random.Generator) -> None:
    """K37: a one-hot distribution gives the ordinary embedding."""
    table = round_bf16(rng.standard_normal((40, 24), dtype=np.float32))
    w = np.zeros((40, 16), np.float32)
    w[17] = 100
    head = Head(isa, pack(F32, [float_source(w)], 16), operand(isa, F32, np.ones((2, 16), np.float32)))
    assert (soft(isa, head, dtype, table, 1.0)[1] == table[17]).all()
