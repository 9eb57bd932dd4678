"""q/k norm, rotary phases, paged cache and attention against float64, in every row arrangement that once went wrong.

Legend: as native; G kv heads, P positions.
"""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass

import numpy as np
import pytest
from native import (
    BF16,
    F32,
    Array,
    AttentionArgs,
    KvCache,
    QkvArgs,
    Rows,
    aligned,
    call,
    library,
    ptr,
    round_bf16,
    runnable,
)

EPS = 1e-6


@dataclass
class Layer:
    """One attention layer with its cache; memory starts as NaN."""

    dtype: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 64
    num_pages: int = 6
    rotary_dim: int | None = None
    has_norm: bool = True
    scale: float = 0.0
    is_v_normed: bool = False
    is_v_from_k: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.cache = KvCache(self.dtype, self.page_size, self.num_kv_heads, self.head_dim, None)
        self.pages = aligned(self.num_pages * int(library().dlmrt_kv_page_bytes(C.byref(self.cache))))
        self.cache.pages = ptr(self.pages)
        self.rotary_dim = self.rotary_dim or self.head_dim
        half, positions = self.rotary_dim // 2, self.num_pages * self.page_size
        angle = np.arange(positions)[:, None] * 1e4 ** -(np.arange(half) / half)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.q_norm, self.k_norm = rng.standard_normal((2, self.head_dim), dtype=np.float32)
        self.keys = np.zeros((positions, self.num_kv_heads, self.head_dim))  # what the cache should hold
        self.values = np.zeros_like(self.keys)

    @property
    def width(self) -> int:
        return (self.num_heads + (2 - self.is_v_from_k) * self.num_kv_heads) * self.head_dim

    def rounded(self, x: Array) -> Array:
        return round_bf16(x).astype(np.float64) if self.dtype == BF16 else x.astype(np.float64)

    def reference(self, qkv: Array, positions: Array) -> Array:
        """Stores keys and values of the float64 copy; returns scaled q [M, heads, H]."""
        heads = qkv.astype(np.float64).reshape(len(qkv), -1, self.head_dim)
        q, k, v = np.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        if self.is_v_from_k:
            v = k
        if self.is_v_normed:
            v = v / np.sqrt((v**2).mean(-1, keepdims=True) + EPS)
        if self.has_norm:
            q, k = (
                t / np.sqrt((t**2).mean(-1, keepdims=True) + EPS) * w for t, w in ((q, self.q_norm), (k, self.k_norm))
            )
        q, k = (self.rotate(t, positions) for t in (q, k))
        self.keys[positions], self.values[positions] = self.rounded(k), self.rounded(v)
        return self.rounded(q * (self.scale or self.head_dim**-0.5))

    def rotate(self, x: Array, positions: Array) -> Array:
        assert self.rotary_dim is not None
        half = self.rotary_dim // 2
        c, s = (t[positions].astype(np.float64)[:, None] for t in (self.cos, self.sin))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)

    def project(self, isa: str, qkv: Array, positions: Array, threads: int = 1) -> Rows:
        """Run the kernel; all q operands one after another."""
        m, group = len(qkv), self.num_heads // self.num_kv_heads
        per_head = Rows(self.dtype, m * group, self.head_dim)
        memory = aligned(per_head.cells.size * self.num_kv_heads)
        norms = (ptr(self.q_norm), ptr(self.k_norm)) if self.has_norm else (None, None)
        args = QkvArgs(
            ptr(qkv), qkv.shape[1], m, self.num_heads, self.rotary_dim, *norms, EPS, ptr(self.cos), ptr(self.sin),
            ptr(positions), ptr(memory), self.cache, self.scale, self.is_v_normed, self.is_v_from_k,
        )  # fmt: skip
        call("qk_norm_rope_store", isa, args, threads)
        per_head.cells = memory
        return per_head

    def q_values(self, q: Rows, kv_head: int) -> Array:
        """[M, heads of the group, H] of one kv head."""
        size = q.cells.size // self.num_kv_heads
        part = Rows(q.dtype, q.rows, q.width)
        part.cells = q.cells[kv_head * size : (kv_head + 1) * size]
        return part.values().reshape(-1, self.num_heads // self.num_kv_heads, self.head_dim)

    def attend(
        self, isa: str, q: Rows, visible: Array, threads: int = 1, chunk: int = 256, first: Array | None = None
    ) -> Array:
        m = len(visible)
        out = np.full((m, self.num_heads * self.head_dim + 3), 7.0, np.float32)
        args = AttentionArgs(
            ptr(q.cells), self.cache, m, self.num_heads, chunk, ptr(visible), ptr(out), out.shape[1], ptr(first)
        )
        call("attention", isa, args, threads)
        assert (out[:, -3:] == 7.0).all()
        return out[:, :-3].copy()

    def softmax(self, q: Array, visible: Array, first: Array | None = None) -> Array:
        """float64 attention [M, heads * H]."""
        out = np.zeros(q.shape)
        for m, n in enumerate(visible):
            seen = slice(0 if first is None else first[m], n)
            for h in range(self.num_heads):
                g = h // (self.num_heads // self.num_kv_heads)
                s = self.keys[seen, g] @ q[m, h]
                p = np.exp(s - s.max(initial=-np.inf))
                out[m, h] = p @ self.values[seen, g] / max(p.sum(), 1e-300)
        return out.reshape(len(q), -1)


def filled(layer: Layer, context: int, m: int, seed: int = 0) -> tuple[Array, Array]:
    """Fill the cache with `context` positions; returns projections of m more rows and their positions."""
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((context + m, layer.width), dtype=np.float32)
    positions = np.arange(context + m, dtype=np.int32)
    if context:
        layer.project(runnable()[0], qkv[:context], positions[:context], 2)
        layer.reference(qkv[:context], positions[:context])
    return np.ascontiguousarray(qkv[context:]), np.ascontiguousarray(positions[context:])


TOLERANCE = {F32: 2e-5, BF16: 2e-2}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head_dim", [2, 16, 24, 64, 80, 128, 256])
def test_projection_is_split_normed_rotated_stored(isa: str, dtype: int, head_dim: int) -> None:
    layer = Layer(dtype, 4, 2, head_dim)
    qkv, positions = filled(layer, 0, 11)
    positions = positions + 60  # crosses a page
    expected = layer.reference(qkv, positions)
    q = layer.project(isa, qkv, positions, 2)
    got = np.concatenate([layer.q_values(q, g) for g in range(2)], axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5 if dtype == F32 else 1e-2, atol=1e-5 if dtype == F32 else 1e-2)
    again = layer.project(isa, qkv, positions, 3)
    assert (again.cells == q.cells).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("has_norm", "rotary_dim"), [(False, None), (True, 32), (False, 16)])
def test_partial_rotation_and_no_norm(isa: str, dtype: int, has_norm: bool, rotary_dim: int | None) -> None:
    layer = Layer(dtype, 2, 1, 64, rotary_dim=rotary_dim, has_norm=has_norm)
    qkv, positions = filled(layer, 20, 5)
    expected = layer.reference(qkv, positions)
    q = layer.project(isa, qkv, positions)
    np.testing.assert_allclose(layer.q_values(q, 0), expected, rtol=1e-2, atol=1e-2)
    visible = np.full(5, 25, np.int32)
    np.testing.assert_allclose(layer.attend(isa, q, visible), layer.softmax(expected, visible), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("m", [1, 4, 7, 32])
@pytest.mark.parametrize("context", [0, 3, 31, 250])
def test_block_sees_context_and_itself(isa: str, dtype: int, m: int, context: int) -> None:
    layer = Layer(dtype, 6, 2, 24)
    qkv, positions = filled(layer, context, m)
    expected = layer.reference(qkv, positions)
    q = layer.project(isa, qkv, positions)
    visible = np.full(m, context + m, np.int32)
    out = layer.attend(isa, q, visible)
    np.testing.assert_allclose(out, layer.softmax(expected, visible), atol=TOLERANCE[dtype])
    for threads in (2, 3, 5):
        assert (layer.attend(isa, q, visible, threads) == out).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_rows_have_their_own_length(isa: str, dtype: int, chunk: int) -> None:
    """Causal rows, in one piece and carried from chunk to chunk; a row equals itself alone, bit for bit."""
    layer = Layer(dtype, 4, 2, 40)
    qkv, positions = filled(layer, 121, 17)
    expected = layer.reference(qkv, positions)
    q = layer.project(isa, qkv, positions)
    visible = positions + 1
    out = layer.attend(isa, q, visible, 2, chunk)
    np.testing.assert_allclose(out, layer.softmax(expected, visible), atol=TOLERANCE[dtype])
    for i in range(17):
        alone = layer.project(isa, qkv[i : i + 1], positions[i : i + 1])
        assert (layer.attend(isa, alone, visible[i : i + 1].copy(), 1, chunk) == out[i]).all(), i


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("is_v_from_k", [False, True])
def test_unscaled_heads_with_normed_values(isa: str, dtype: int, is_v_from_k: bool) -> None:
    layer = Layer(dtype, 4, 2, 40, scale=1.0, is_v_normed=True, is_v_from_k=is_v_from_k)
    qkv, positions = filled(layer, 30, 5)
    expected = layer.reference(qkv, positions)
    q, visible = layer.project(isa, qkv, positions, 2), np.full(5, 35, np.int32)
    limit = TOLERANCE[dtype] * (1 if dtype == F32 else 3)
    np.testing.assert_allclose(layer.attend(isa, q, visible), layer.softmax(expected, visible), atol=limit)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [64, 256])
@pytest.mark.parametrize("window", [1, 5, 16, 33, 100])
def test_rows_see_a_window(isa: str, dtype: int, chunk: int, window: int) -> None:
    """First visible positions that rise row by row, over chunk bounds; a row equals itself alone, bit for bit."""
    layer = Layer(dtype, 4, 2, 40)
    qkv, positions = filled(layer, 121, 17)
    expected = layer.reference(qkv, positions)
    q, visible = layer.project(isa, qkv, positions), positions + 1
    first = np.maximum(positions - window + 1, 0).astype(np.int32)
    out = layer.attend(isa, q, visible, 2, chunk, first)
    np.testing.assert_allclose(out, layer.softmax(expected, visible, first), atol=TOLERANCE[dtype])
    for i in range(0, 17, 3):
        alone = layer.project(isa, qkv[i : i + 1], positions[i : i + 1])
        one = slice(i, i + 1)
        assert (layer.attend(isa, alone, visible[one].copy(), 1, chunk, first[one].copy()) == out[i]).all(), i
    shared = np.full(17, 90, np.int32)  # a canvas: one first position for all rows
    end = np.full(17, 138, np.int32)
    out = layer.attend(isa, q, end, 3, chunk, shared)
    np.testing.assert_allclose(out, layer.softmax(expected, end, shared), atol=TOLERANCE[dtype])
    unbounded = layer.attend(isa, q, visible, 1, chunk, np.zeros(17, np.int32))
    assert (unbounded == layer.attend(isa, q, visible, 1, chunk)).all()


def test_blind_rows_are_zero(isa: str) -> None:
    """K26: a row that sees nothing gives zeros, not NaN, and disturbs nobody."""
    layer = Layer(BF16, 2, 1, 16)
    qkv, positions = filled(layer, 5, 3)
    q = layer.project(isa, qkv, positions)
    both = layer.attend(isa, q, np.array([8, 0, 8], np.int32))
    assert (both[1] == 0).all()
    assert (np.delete(both, 1, 0) == np.delete(layer.attend(isa, q, np.array([8, 8, 8], np.int32)), 1, 0)).all()


def test_a_row_whose_window_lies_behind_all_it_sees_is_zero(isa: str) -> None:
    layer = Layer(BF16, 2, 1, 16)
    qkv, positions = filled(layer, 5, 3)
    q, visible = layer.project(isa, qkv, positions), np.full(3, 8, np.int32)
    out = layer.attend(isa, q, visible, first=np.array([0, 8, 0], np.int32))
    assert (out[1] == 0).all()
    assert (np.delete(out, 1, 0) == np.delete(layer.attend(isa, q, visible), 1, 0)).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("chunk", [1024, 4096])
@pytest.mark.parametrize("end", [1024, 2048, 2080])
def test_score_rows_of_whole_pages_of_memory(isa: str, dtype: int, chunk: int, end: int) -> None:
    """Rows of scores that would lie 4 KiB apart are padded; what they hold is not."""
    layer = Layer(dtype, 4, 1, 16, num_pages=33)
    qkv, positions = filled(layer, end - 3, 3)
    expected = layer.reference(qkv, positions)
    q, visible = layer.project(isa, qkv, positions), positions + 1
    out = layer.attend(isa, q, visible, 1, chunk)
    np.testing.assert_allclose(out, layer.softmax(expected, visible), atol=TOLERANCE[dtype])
    alone = layer.project(isa, qkv[:1], positions[:1])
    assert (layer.attend(isa, alone, visible[:1].copy(), 1, chunk) == out[0]).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_unseen_positions_cannot_poison(isa: str, dtype: int) -> None:
    """K05, K11: stale or poisoned cache contents behind a row's visible length change no bit of it."""
    layer = Layer(dtype, 4, 2, 24)
    qkv, positions = filled(layer, 70, 9)
    q = layer.project(isa, qkv, positions)
    visible = positions + 1
    good = layer.attend(isa, q, visible)
    assert np.isfinite(good).all(), "memory behind the last position is NaN"
    qkv[5] = np.nan
    q = layer.project(isa, qkv, positions)
    poisoned = layer.attend(isa, q, visible, 2)
    assert (poisoned[:5] == good[:5]).all()
    assert np.isnan(poisoned[5:]).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_page_size_changes_nothing(isa: str, dtype: int) -> None:
    outs = []
    for page_size, num_pages in ((64, 6), (128, 3)):
        layer = Layer(dtype, 4, 2, 24, page_size=page_size, num_pages=num_pages)
        qkv, positions = filled(layer, 250, 6)
        q = layer.project(isa, qkv, positions)
        outs.append(layer.attend(isa, q, np.full(6, 256, np.int32)))
    assert (outs[0] == outs[1]).all()


def test_fp32_attention_is_equal_on_all_instruction_sets() -> None:
    outs = []
    for isa in runnable():
        layer = Layer(F32, 4, 2, 24)
        qkv, positions = filled(layer, 100, 6)
        outs.append(layer.attend(isa, layer.project(isa, qkv, positions), positions + 1))
    for other in outs[1:]:
        assert (other == outs[0]).all()
