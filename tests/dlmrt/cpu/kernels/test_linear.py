"""Linear layers: exact arithmetic bit for bit against numpy, row and thread invariance, poisoned rows, odd sizes.

Legend: as native.
"""

from __future__ import annotations

import numpy as np
import pytest
from native import (
    BF16,
    E2M1,
    F32,
    INT4,
    INT8,
    NVFP4,
    Array,
    Packed,
    Rows,
    Source,
    float_source,
    linear,
    operand,
    pack,
    ptr,
    round_bf16,
    runnable,
    to_bf16,
)

ROWS = (*range(1, 10), 16, 37)
SHAPES = ((48, 64), (40, 52), (272, 200), (16, 16), (1, 1), (130, 1030))  # N, K


def activation_codes(x: Array) -> tuple[Array, Array]:
    """Codes int64 [M, K] and scales [M]: s = max(max|x|, 1e-8) / 127, q = rint(x * (1 / s)), in fp32."""
    s = np.maximum(np.abs(x).max(1), np.float32(1e-8)) / np.float32(127)
    return np.rint(x * (np.float32(1) / s)[:, None]).astype(np.int64), s


def weight_codes(w: Array) -> tuple[Array, Array]:
    """Codes int64 [N, K] and scales [N]: s = max|w| / 127, q = rint(w / s)."""
    s = np.abs(w).max(1) / np.float32(127)
    return np.rint(w / np.where(s > 0, s, np.float32(1))[:, None]).astype(np.int64), s


def e4m3(codes: Array) -> Array:
    """fp32 values of non-negative e4m3 codes."""
    exponent, mantissa = codes >> 3, (codes & 7).astype(np.float32)
    return np.where(exponent > 0, (1 + mantissa / 8) * np.exp2(exponent.astype(np.float32) - 7), mantissa / 512).astype(
        np.float32
    )


class NvFp4:
    """Random NVFP4 tensor in a checkpoint's bytes."""

    def __init__(self, rng: np.random.Generator, n: int, k: int, global_scale: float = 0.0123) -> None:
        self.nibbles = rng.integers(0, 16, (n, k)).astype(np.uint8)
        self.nibbles[: min(n, 8)] = np.where(np.arange(min(n, 8))[:, None] & 1, 0xF, 0x7)  # extremes
        self.scales = rng.integers(0, 127, (n, k // 16)).astype(np.uint8)  # every usable code, subnormals included
        self.packed = np.ascontiguousarray(self.nibbles[:, ::2] | self.nibbles[:, 1::2] << 4)
        self.global_scale = np.float32(global_scale)

    def source(self) -> Source:
        n, k = self.nibbles.shape
        source = Source(NVFP4, 0, ptr(self.packed), n, k, None, ptr(self.scales), self.global_scale)
        source.memory = (self.packed, self.scales)
        return source

    def values(self) -> Array:
        """e2m1 * e4m3, exact in fp32."""
        magnitude = E2M1[self.nibbles & 7] * np.where(self.nibbles & 8, np.float32(-1), np.float32(1))
        return magnitude * np.repeat(e4m3(self.scales), 16, axis=1)

    def product(self, codes: Array, scales: Array) -> Array:
        """The exact rule: per block an integer sum times its scale, fp32 adds in ascending order, one last factor."""
        twice = np.rint(E2M1[self.nibbles & 7] * 2).astype(np.int64) * np.where(self.nibbles & 8, -1, 1)
        acc = np.zeros((len(codes), len(twice)), np.float32)
        for b in range(twice.shape[1] // 16):
            block = slice(16 * b, 16 * b + 16)
            sums = (codes[:, block] @ twice[:, block].T).astype(np.float32)
            acc = acc + sums * (e4m3(self.scales[:, b]) * np.float32(0.5))
        return acc * (self.global_scale * scales[:, None])


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_w8a8_equals_numpy_bit_for_bit(isa: str, n: int, k: int, rng: np.random.Generator) -> None:
    w = rng.standard_normal((n, k), dtype=np.float32) * np.float32(0.02)
    x = rng.standard_normal((37, k), dtype=np.float32)
    w[n // 2] = 0
    x[3], x[7] = 1, -1  # extremes: every code +-127
    codes, scales = activation_codes(x)
    q, s = weight_codes(w)
    exact = (codes @ q.T).astype(np.float32) * (s[None, :] * scales[:, None])
    packed = pack(INT8, [float_source(w)], k)
    rows = operand(isa, INT8, x)
    assert (rows.values() == codes).all()
    assert (rows.scales == scales).all()
    assert (linear(isa, packed, rows) == exact).all()
    for m in ROWS:
        for threads in (1, 2, 3, 5):
            assert (linear(isa, packed, operand(isa, INT8, x[:m], threads), threads) == exact[:m]).all(), (m, threads)
    add_to = rng.standard_normal((37, n), dtype=np.float32)
    assert (linear(isa, packed, rows, 2, add_to) == add_to + exact).all()


def test_int8_checkpoint_codes_pass_through(isa: str, rng: np.random.Generator) -> None:
    n, k = 40, 48
    q = rng.integers(-127, 128, (n, k)).astype(np.int8)
    q[0] = -128  # some files use it
    s = rng.random(n, dtype=np.float32)
    x = rng.standard_normal((5, k), dtype=np.float32)
    codes, scales = activation_codes(x)
    packed = pack(INT8, [Source(INT8, 0, ptr(q), n, k, ptr(s), None, 0.0)], k)
    exact = (codes @ q.T.astype(np.int64)).astype(np.float32) * (s[None, :] * scales[:, None])
    assert (linear(isa, packed, operand(isa, INT8, x)) == exact).all()


@pytest.mark.parametrize(("n", "k"), [(48, 64), (40, 48), (272, 208), (16, 16), (130, 1040)])
def test_nvfp4_equals_the_exact_rule(isa: str, n: int, k: int, rng: np.random.Generator) -> None:
    weight = NvFp4(rng, n, k)
    x = rng.standard_normal((37, k), dtype=np.float32)
    x[3], x[7] = 1, -1
    codes, scales = activation_codes(x)
    exact = weight.product(codes, scales)
    packed = pack(NVFP4, [weight.source()], k, group=16)
    for m in ROWS:
        for threads in (1, 2, 3, 5):
            assert (linear(isa, packed, operand(isa, INT8, x[:m]), threads) == exact[:m]).all(), (m, threads)
    float64 = (codes * scales[:, None].astype(np.float64)) @ weight.values().T.astype(np.float64) * weight.global_scale
    assert np.linalg.norm(exact - float64) < 1e-6 * np.linalg.norm(float64)


def test_every_e4m3_scale_decodes(isa: str) -> None:
    """One block a column, all 127 usable codes, under flush-to-zero-proof decoding."""
    n, k = 127, 16
    weight = NvFp4(np.random.default_rng(0), n, k, 1.0)
    weight.scales = np.arange(n, dtype=np.uint8)[:, None].copy()
    x = np.ones((1, k), np.float32)
    codes, scales = activation_codes(x)
    assert (
        linear(isa, pack(NVFP4, [weight.source()], k, group=16), operand(isa, INT8, x)) == weight.product(codes, scales)
    ).all()


def test_fused_nvfp4_keeps_each_global_scale(isa: str, rng: np.random.Generator) -> None:
    """K10: gate and up with different global scales, fused into one weight."""
    gate, up = NvFp4(rng, 40, 64, 0.01), NvFp4(rng, 24, 64, 0.1)
    x = rng.standard_normal((9, 64), dtype=np.float32)
    codes, scales = activation_codes(x)
    fused = linear(isa, pack(NVFP4, [gate.source(), up.source()], 64, group=16), operand(isa, INT8, x), 2)
    assert (fused == np.concatenate([gate.product(codes, scales), up.product(codes, scales)], 1)).all()


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("n", "k"), [(48, 256), (40, 208), (17, 33)])
def test_int4_follows_its_rule(isa: str, n: int, k: int, group: int, rng: np.random.Generator) -> None:
    w = rng.standard_normal((n, k), dtype=np.float32)
    w[0] = 0
    x = rng.standard_normal((37, k), dtype=np.float32)
    x[3] = 1
    codes, scales = activation_codes(x)
    acc = np.zeros((37, n), np.float64)
    for begin in range(0, k, group):
        part = w[:, begin : begin + group]
        s = np.abs(part).max(1) / np.float32(7)
        q = np.rint(part / np.where(s > 0, s, np.float32(1))[:, None]).astype(np.int64)
        acc += (codes[:, begin : begin + group] @ q.T) * s.astype(np.float64)  # near enough to one fma
    packed = pack(INT4, [float_source(w)], k, group=group, threads=2)
    y = linear(isa, packed, operand(isa, INT8, x))
    np.testing.assert_allclose(y, acc * scales[:, None], rtol=2e-6, atol=1e-5 * np.abs(acc * scales[:, None]).max())
    for m in ROWS:
        for threads in (1, 3):
            assert (linear(isa, packed, operand(isa, INT8, x[:m]), threads) == y[:m]).all(), (m, threads)
    assert (linear("portable", packed, operand("portable", INT8, x)) == y).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_float_linear(isa: str, dtype: int, n: int, k: int, rng: np.random.Generator) -> None:
    w = rng.standard_normal((n, k), dtype=np.float32)
    x = rng.standard_normal((37, k), dtype=np.float32)
    packed = pack(dtype, [float_source(w)], k)
    rows = operand(isa, dtype, x)
    y = linear(isa, packed, rows)
    xr, wr = (round_bf16(x), round_bf16(w)) if dtype == BF16 else (x, w)
    assert (rows.values() == xr).all()
    exact = xr.astype(np.float64) @ wr.T.astype(np.float64)
    np.testing.assert_allclose(y, exact, atol=2e-7 * k**0.5 * 8 + 1e-7 * k)
    for m in ROWS:
        for threads in (1, 2, 3, 5):
            assert (linear(isa, packed, operand(isa, dtype, x[:m]), threads) == y[:m]).all(), (m, threads)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_float_linear_equals_portable(isa: str, dtype: int, rng: np.random.Generator) -> None:
    if dtype == BF16 and isa == "avx512bf16":
        pytest.skip("the bf16 instruction rounds its own way")
    w, x = rng.standard_normal((40, 100), dtype=np.float32), rng.standard_normal((9, 100), dtype=np.float32)
    packed = pack(dtype, [float_source(w)], 100)
    assert (
        linear(isa, packed, operand(isa, dtype, x)) == linear("portable", packed, operand("portable", dtype, x))
    ).all()


def test_bf16_sources_pack_like_fp32(isa: str, rng: np.random.Generator) -> None:
    w = round_bf16(rng.standard_normal((40, 64), dtype=np.float32))
    x = rng.standard_normal((3, 64), dtype=np.float32)
    for dtype, kind in ((F32, F32), (BF16, BF16), (INT8, INT8)):
        a, b = (pack(dtype, [float_source(v)], 64) for v in (w, to_bf16(w)))
        assert (a.memory[0] == b.memory[0]).all()
        assert (linear(isa, a, operand(isa, kind, x)) == linear(isa, b, operand(isa, kind, x))).all()


@pytest.mark.parametrize("dtype", [F32, BF16, INT8, NVFP4, INT4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_input_poisons_its_row_only(isa: str, dtype: int, bad: float, rng: np.random.Generator) -> None:
    """K11: int8 codes must not swallow a NaN."""
    n, k = 40, 64
    w = rng.standard_normal((n, k), dtype=np.float32)
    packed: Packed
    if dtype == NVFP4:
        packed = pack(NVFP4, [NvFp4(rng, n, k).source()], k, group=16)
    else:
        packed = pack(dtype, [float_source(w)], k, group=32 if dtype == INT4 else 0)
    kind = dtype if dtype in (F32, BF16) else INT8
    x = rng.standard_normal((9, k), dtype=np.float32)
    good = linear(isa, packed, operand(isa, kind, x))
    x[4, 3] = bad
    poisoned = linear(isa, packed, operand(isa, kind, x), 2)
    assert not np.isfinite(poisoned[4]).any()
    assert (np.delete(poisoned, 4, 0) == np.delete(good, 4, 0)).all()


def test_non_finite_weight_shows(isa: str) -> None:
    w = np.ones((16, 16), np.float32)
    w[5, 2] = np.nan
    y = linear(isa, pack(INT8, [float_source(w)], 16), operand(isa, INT8, np.ones((2, 16), np.float32)))
    assert np.isnan(y[:, 5]).all()
    assert np.isfinite(np.delete(y, 5, 1)).all()


def test_operands_are_equal_on_all_instruction_sets(rng: np.random.Generator) -> None:
    x = rng.standard_normal((9, 77), dtype=np.float32)
    for dtype in (F32, BF16, INT8):
        first, *others = (operand(isa, dtype, x) for isa in runnable())
        for other in others:
            assert (first.values() == other.values()).all()
            assert np.array_equal(first.scales, other.scales, equal_nan=True)


def test_quantised_error_is_as_stated(rng: np.random.Generator) -> None:
    """W8A8 costs about 1.1 % a layer on Gaussian data, bf16 about 0.24 %."""
    w, x = rng.standard_normal((256, 512), dtype=np.float32), rng.standard_normal((16, 512), dtype=np.float32)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    isa = runnable()[0]
    for dtype, most in ((INT8, 0.013), (BF16, 0.003), (F32, 1e-6)):
        y = linear(isa, pack(dtype, [float_source(w)], 512), operand(isa, dtype, x))
        assert np.linalg.norm(y - exact) < most * np.linalg.norm(exact)


def test_rows_helper_reads_what_was_written() -> None:
    assert Rows(INT8, 3, 20).cells.size == 8 * 32
