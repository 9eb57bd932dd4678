"""Row-wise kernels against numpy: norm, quantise, SwiGLU, scaled add, embedding rows; odd widths, poisoned rows.

Legend: as native.
"""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest
from native import (
    BF16,
    F32,
    INT8,
    Array,
    EmbedArgs,
    GateArgs,
    Operand,
    RmsNormArgs,
    Rows,
    ScaleArgs,
    ScaledAddArgs,
    SoftCapArgs,
    call,
    float_source,
    library,
    operand,
    pack,
    ptr,
    round_bf16,
    runnable,
    to_bf16,
)

DTYPES = (F32, BF16, INT8)
EPS = 1e-6


def norm(x: Array, weight: Array) -> Array:
    """RMSNorm in float64."""
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(1, keepdims=True) + EPS) * weight


def close(rows: Rows, expected: Array) -> None:
    """The operand holds `expected` up to its format's rounding."""
    if rows.dtype == INT8:
        scales = np.maximum(np.abs(expected).max(1), 1e-8) / 127
        np.testing.assert_allclose(rows.scales, scales, rtol=1e-5)
        assert np.abs(rows.values() * rows.scales[:, None] - expected).max() <= scales.max() * 0.501
    else:
        # a value next to a rounding boundary may fall to either side of it
        np.testing.assert_allclose(rows.values(), expected, rtol=5e-6 if rows.dtype == F32 else 5e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 24, 77, 256])
def test_rms_norm(isa: str, dtype: int, width: int, rng: np.random.Generator) -> None:
    m = 13
    x, weight = rng.standard_normal((m, width), dtype=np.float32) * 3, rng.standard_normal(width, dtype=np.float32)
    outs = []
    for threads in (1, 3):
        plain, rows = np.empty((m, width), np.float32), Rows(dtype, m, width)
        call("rms_norm", isa, RmsNormArgs(ptr(x), ptr(weight), EPS, m, width, ptr(plain), rows.operand), threads)
        np.testing.assert_allclose(plain, norm(x, weight), rtol=2e-5, atol=1e-6)
        close(rows, norm(x, weight))
        outs.append((plain, rows.cells.copy()))
    assert (outs[0][0] == outs[1][0]).all()
    assert (operand(isa, dtype, outs[0][0]).values() == rows.values()).all(), "fused and separate quantisation agree"


def test_rms_norm_without_operand(isa: str, rng: np.random.Generator) -> None:
    x, weight, plain = (
        rng.standard_normal((2, 24), dtype=np.float32),
        np.ones(24, np.float32),
        np.empty((2, 24), np.float32),
    )
    call("rms_norm", isa, RmsNormArgs(ptr(x), ptr(weight), EPS, 2, 24, ptr(plain), Operand()))
    np.testing.assert_allclose(plain, norm(x, weight), rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 24, 77, 256])
def test_silu_mul(isa: str, dtype: int, width: int, rng: np.random.Generator) -> None:
    m, ld = 9, 2 * width + 5
    both = rng.standard_normal((m, ld), dtype=np.float32) * 4
    both[0, 0], both[1, 0] = 300, -300  # exp saturates
    gate, up = both[:, :width].astype(np.float64), both[:, width : 2 * width].astype(np.float64)
    expected = gate / (1 + np.exp(-np.clip(gate, -100, 100))) * up
    rows = Rows(dtype, m, width)
    work = both.copy()
    call("gate_rows", isa, GateArgs(ptr(work), work.ctypes.data + 4 * width, ld, m, rows.operand), 2)
    close(rows, expected)
    assert (work[:, width:] == both[:, width:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul(isa: str, dtype: int, rng: np.random.Generator) -> None:
    m, width = 9, 77
    both = rng.standard_normal((m, 2 * width), dtype=np.float32) * 4
    both[0, 0], both[1, 0], both[2, 0] = 300, -300, -9
    gate, up = both[:, :width].astype(np.float64), both[:, width:].astype(np.float64)
    expected = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    rows, work = Rows(dtype, m, width), both.copy()
    call("gate_rows", isa, GateArgs(ptr(work), work.ctypes.data + 4 * width, 2 * width, m, rows.operand, 1), 2)
    close(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gelu", [0, 1])
def test_products_by_columns_are_those_by_rows(isa: str, dtype: int, is_gelu: int, rng: np.random.Generator) -> None:
    """Byte for byte, however the columns are divided; a row that is not a number stays one."""
    for m, width in ((1, 16), (9, 77), (11, 256)):
        both = rng.standard_normal((m, 2 * width), dtype=np.float32) * 4
        both[m - 1, width - 1] = np.nan
        expected, work = Rows(dtype, m, width), both.copy()
        args = GateArgs(ptr(work), work.ctypes.data + 4 * width, 2 * width, m, expected.operand, is_gelu)
        call("gate_rows", isa, args, 1)
        for threads in (1, 2, 3, 5):
            rows, divided = Rows(dtype, m, width), both.copy()
            args = GateArgs(ptr(divided), divided.ctypes.data + 4 * width, 2 * width, m, rows.operand, is_gelu)
            call("gate_columns", isa, args, threads)
            assert (rows.cells == expected.cells).all()
            assert (rows.scales.view(np.uint32) == expected.scales.view(np.uint32)).all()
            assert (divided.view(np.uint32) == work.view(np.uint32)).all()


def test_scale_and_soft_cap(isa: str, rng: np.random.Generator) -> None:
    x, factor = rng.standard_normal((5, 27), dtype=np.float32) * 40, np.array([0.3], np.float32)
    scaled, capped = x.copy(), x.copy()
    call("scale", isa, ScaleArgs(ptr(scaled), ptr(factor), 5, 27), 2)
    assert (scaled == x * factor).all()
    call("soft_cap", isa, SoftCapArgs(ptr(capped), 30.0, 5, 27), 3)
    np.testing.assert_allclose(capped, 30 * np.tanh(x.astype(np.float64) / 30), atol=1e-5)


def test_rms_norm_without_weight(isa: str, rng: np.random.Generator) -> None:
    x, plain = rng.standard_normal((3, 40), dtype=np.float32), np.empty((3, 40), np.float32)
    call("rms_norm", isa, RmsNormArgs(ptr(x), None, EPS, 3, 40, ptr(plain), Operand()))
    np.testing.assert_allclose(plain, norm(x, np.ones(40, np.float32)), rtol=2e-5)


def test_scaled_add_skips_rows(isa: str, rng: np.random.Generator) -> None:
    x, delta = rng.standard_normal((2, 5, 27), dtype=np.float32)
    where = np.array([1, 0, 1, 0, 0], np.uint8)
    for mask in (None, where):
        out = x.copy()
        call("scaled_add", isa, ScaledAddArgs(ptr(out), ptr(delta), ptr(mask), 0.5, 5, 27), 2)
        took = np.ones(5, bool) if mask is None else mask.astype(bool)
        assert (out[~took] == x[~took]).all()
        np.testing.assert_allclose(out[took], (x + 0.5 * delta)[took], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [1, 16, 27, 64])
def test_embed(isa: str, width: int, rng: np.random.Generator) -> None:
    table = rng.standard_normal((11, width), dtype=np.float32)
    ids = np.array([10, 0, 3, 3], np.int32)
    for dtype, memory, expected in ((F32, table, table), (BF16, to_bf16(table), round_bf16(table))):
        out = np.full((4, width), np.nan, np.float32)
        call("embed", isa, EmbedArgs(dtype, ptr(memory), ptr(ids), 4, width, ptr(out)), 3)
        assert (out == expected[ids]).all()
        call("embed", isa, EmbedArgs(dtype, ptr(memory), ptr(ids), 4, width, ptr(out), 0.7), 2)
        assert (out == expected[ids] * np.float32(0.7)).all()


@pytest.mark.parametrize("width", [1, 16, 27, 64])
def test_embed_from_the_panels_of_a_packed_table(isa: str, width: int, rng: np.random.Generator) -> None:
    table = rng.standard_normal((37, width), dtype=np.float32)
    ids = np.array([36, 0, 17, 17], np.int32)
    for dtype, memory, expected in ((F32, table, table), (BF16, to_bf16(table), round_bf16(table))):
        packed = pack(dtype, [float_source(memory)], width)
        panel_bytes = int(library().dlmrt_panel_bytes(dtype, 0, width))
        for scale in (1.0, 0.7):
            out = np.full((4, width), np.nan, np.float32)
            call(
                "embed",
                isa,
                EmbedArgs(dtype, packed.weight.panels, ptr(ids), 4, width, ptr(out), scale, panel_bytes),
                3,
            )
            assert (out == expected[ids] * np.float32(scale)).all()


def test_embed_from_int8_panels(isa: str, rng: np.random.Generator) -> None:
    table = rng.standard_normal((37, 27), dtype=np.float32)
    ids = np.array([36, 0, 17, 17], np.int32)
    packed, out = pack(INT8, [float_source(table)], 27), np.full((4, 27), np.nan, np.float32)
    panel_bytes = int(library().dlmrt_panel_bytes(INT8, C.c_int64(0), C.c_int64(27)))
    args = (INT8, packed.weight.panels, ptr(ids), 4, 27, ptr(out), 0.5, panel_bytes, packed.weight.column_scale)
    call("embed", isa, EmbedArgs(*args), 3)
    scale = np.abs(table).max(1, keepdims=True) / np.float32(127)
    np.testing.assert_allclose(out, (0.5 * scale * np.rint(table / scale))[ids], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_poison_stays_in_its_row(isa: str, bad: float, rng: np.random.Generator) -> None:
    """K11: a non-finite value makes its row's scale non-finite, and leaves the others' bytes alone."""
    x = rng.standard_normal((9, 40), dtype=np.float32)
    good = operand(isa, INT8, x)
    x[4, 37] = bad
    poisoned = operand(isa, INT8, x)
    assert not np.isfinite(poisoned.scales[4])
    assert (np.delete(poisoned.values(), 4, 0) == np.delete(good.values(), 4, 0)).all()
    weight, rows = np.ones(40, np.float32), Rows(INT8, 9, 40)
    call("rms_norm", isa, RmsNormArgs(ptr(x), ptr(weight), EPS, 9, 40, None, rows.operand))
    assert np.isfinite(rows.scales).tolist() == [i != 4 for i in range(9)]


def test_fp32_results_are_equal_on_all_instruction_sets(rng: np.random.Generator) -> None:
    """Reductions over sixteen virtual lanes, one tree, fused where written: the same bytes everywhere."""
    x, weight = rng.standard_normal((5, 77), dtype=np.float32) * 9, rng.standard_normal(77, dtype=np.float32)
    results = []
    for isa in runnable():
        plain, rows, gate = np.empty_like(x), Rows(F32, 5, 77), x.copy()
        call("rms_norm", isa, RmsNormArgs(ptr(x), ptr(weight), EPS, 5, 77, ptr(plain), Operand()))
        call("gate_rows", isa, GateArgs(ptr(gate), ptr(x), 77, 5, rows.operand))
        results.append(np.concatenate([plain, rows.values()]))
    for other in results[1:]:
        assert (other == results[0]).all()
