"""Staircase kernels against the dense mask: intervals, tiles, FlexAttention, Triton (interpreted, and compiled)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.eager.executor import canvas_visible, context_visible
from dlmrt.models.config import DiffusionConfig
from dlmrt.ops.eager import scaled_dot_product
from orl.attention import Canvases, StaircaseAttention, staircase
from orl.kernels.flex import FlexStaircase
from orl.kernels.intervals import Intervals, Tiles
from orl.packing import CLEAN

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (make peers)"
)


def diffusion(*, length: int = 4, context: str = "causal", in_block: str = "bidirectional") -> DiffusionConfig:
    return DiffusionConfig(
        canvas_length=length, noise="mask", mask_token_id=3, context_attention=context, in_block_attention=in_block,
        block_anchor="position_zero",
    )  # fmt: skip


def layout_of(responses: Sequence[tuple[int, Sequence[tuple[int, int]]]], *, length: int, grid: int = 0) -> list:
    """Layout of responses given as (clean rows, [(start of canvas, copies)])."""
    found, row = [], 0
    for num_clean, groups in responses:
        first, canvases = row + num_clean, []
        for start, count in groups:
            canvases.append(Canvases(start=start, first_row=first, count=count))
            first += count * length
        found.append((row, num_clean, grid, tuple(canvases)))
        row = first
    return found


RAGGED = [(7, [(3, 2), (7, 1)]), (0, [(0, 1)]), (18, [(2, 1), (6, 3), (18, 2)])]


def mask_of(layout: list, config: DiffusionConfig, *, grid: int = 0) -> torch.Tensor:
    """The dense staircase of `orl.attention`, from its own description of rows."""
    segment, copy, positions, starts = [], [], [], []
    for number, (_, num_clean, _, canvases) in enumerate(layout):
        rows = [(CLEAN, p, 0) for p in range(num_clean)]
        state = 0
        for group in canvases:
            for _ in range(group.count):
                rows += [(state, group.start + i, group.start) for i in range(config.canvas_length)]
                state += 1
        segment += [number] * len(rows)
        copy += [row[0] for row in rows]
        positions += [row[1] for row in rows]
        starts += [row[2] for row in rows]
    return staircase(*map(torch.tensor, (segment, copy, positions, starts)), config, grid=grid)


responses = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3)),
    min_size=1, max_size=4,
)  # fmt: skip


@pytest.mark.parametrize("context", ["causal", "block_causal"])
@pytest.mark.parametrize("in_block", ["bidirectional", "causal"])
@settings(max_examples=40, deadline=None)
@given(found=responses, grid=st.integers(0, 3))
def test_dense_rule_intervals_and_decoding_show_the_same(context: str, in_block: str, found, grid: int):
    """All combinations of both kinds of attention, on any grid: the three say who sees whom in their own ways."""
    config = diffusion(context=context, in_block=in_block)
    layout = layout_of([(n, [(min(4 * b, n), c) for b, c in groups]) for n, groups in found], length=4, grid=grid)
    dense = mask_of(layout, config, grid=grid).numpy()
    assert np.array_equal(Intervals.of(layout, config).dense(), dense)
    for first, num_clean, _, canvases in layout:
        positions = torch.arange(num_clean)
        clean = context_visible(config, positions, positions, grid=grid)
        assert np.array_equal(dense[first : first + num_clean, first : first + num_clean], clean.numpy())
        for group in canvases:
            canvas = canvas_visible(config, group.start, 4, window=None)
            expected = np.ones((4, group.start + 4), dtype=bool) if canvas is None else canvas.numpy()
            for row in range(group.first_row, group.first_row + 4 * group.count, 4):
                keys = [*range(first, first + group.start), *range(row, row + 4)]
                assert np.array_equal(dense[row : row + 4, keys], expected)
                assert dense[row : row + 4].sum() == expected.sum()


@settings(max_examples=60, deadline=None)
@given(responses, st.integers(1, 9), st.integers(1, 9))
def test_tiles_visit_every_visible_pair_and_meet_in_both_directions(found, query_tile: int, key_tile: int):
    layout = layout_of([(n, [(min(4 * b, n), c) for b, c in groups]) for n, groups in found], length=4)
    intervals = Intervals.of(layout, diffusion())
    tiles = Tiles.of(intervals, query_tile=query_tile, key_tile=key_tile)
    met = {
        (int(q), key)
        for key in range(len(tiles.offsets_K) - 1)
        for q in tiles.queries[tiles.offsets_K[key] : tiles.offsets_K[key + 1]]
    }
    visited = {
        (q, n // key_tile)
        for q, bounds in enumerate(tiles.bounds_Q4.tolist())
        for low, high in (bounds[:2], bounds[2:])
        for n in range(low, high, key_tile)
    }
    assert met == visited
    assert {(q // query_tile, k // key_tile) for q, k in zip(*np.nonzero(intervals.dense()), strict=True)} <= visited


def rows(num_rows: int, heads: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, heads, width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def outputs(attend, num_rows: int) -> list[torch.Tensor]:
    """Output and the three gradients under 4 heads over 2 of width 12."""
    q, k, v = rows(num_rows, 4, 12, 0), rows(num_rows, 2, 12, 1), rows(num_rows, 2, 12, 2)
    out = attend(0, q, k, v)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)))
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("context", ["causal", "block_causal"])
def test_flex_attention_and_the_cpu_path_equal_the_dense_mask(context: str):
    """FlexAttention has no backward on the CPU; that of the CPU path is compared."""
    config = diffusion(context=context)
    layout = layout_of(RAGGED, length=4)
    mask = mask_of(layout, config)
    dense = outputs(lambda i, q, k, v: scaled_dot_product(q, k, v, mask), len(mask))
    for expected, found in zip(dense, outputs(StaircaseAttention(layout, config), len(mask)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        q, k, v = rows(len(mask), 4, 12, 0), rows(len(mask), 2, 12, 1), rows(len(mask), 2, 12, 2)
        flex = FlexStaircase([Intervals.of(layout, config)], device="cpu")(0, q.detach(), k.detach(), v.detach())
    torch.testing.assert_close(flex, dense[0], rtol=1e-5, atol=1e-5)


def test_masks_lie_where_the_rows_do():
    attend = StaircaseAttention(layout_of(RAGGED, length=4), diffusion(in_block="causal"), device="meta")
    masks = [*attend.visible_clean, *attend.visible_canvas.values()]
    assert {mask.device.type for mask in masks} == {"meta"}
    q, k, v = (rows(7 + 12 + 4 + 18 + 24, heads, 12, 0).to("meta") for heads in (4, 2, 2))
    assert attend(0, q, k, v).device.type == "meta"


INTERPRETED = """
from dlmrt.testing import interpret_kernels
interpret_kernels()
import torch
from test_kernels import RAGGED, diffusion, layout_of, mask_of, outputs
from dlmrt.ops.eager import scaled_dot_product
from orl.kernels import triton_staircase
from orl.kernels.intervals import Intervals
for context, in_block, tile in (("causal", "bidirectional", 16), ("block_causal", "bidirectional", 32),
                                ("causal", "causal", 16)):
    triton_staircase.QUERY_TILE = triton_staircase.KEY_TILE = tile
    config = diffusion(context=context, in_block=in_block)
    layout = layout_of(RAGGED, length=4)
    mask = mask_of(layout, config)
    expected = outputs(lambda i, q, k, v: scaled_dot_product(q, k, v, mask), len(mask))
    attend = triton_staircase.TritonStaircase([Intervals.of(layout, config)], device="cpu")
    for want, got in zip(expected, outputs(attend, len(mask)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
print("equal")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from orl.kernels import triton_staircase as kernels
SHARED = 227 * 1024
tensors = {
    "_forward": "q k v low high bounds out lse",
    "_backward_q": "q k v low high bounds grad lse delta grad_q",
    "_backward_kv": "q k v low high offsets queries grad lse delta grad_k grad_v",
}
kinds = {name: "*i32" for name in "low high bounds offsets queries".split()} | {"lse": "*fp32", "delta": "*fp32"}
for name, pointers in tensors.items():
    for width in (64, 128):
        signature = {p: kinds.get(p, "*bf16") for p in pointers.split()}
        signature |= {"scale": "fp32", "num_rows": "i32", "N": "i32", "G": "i32"}
        sizes = kernels._sizes(width)
        signature |= dict.fromkeys(sizes, "constexpr")
        source = ASTSource(fn=getattr(kernels, name), signature=signature, constexprs=sizes)
        built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
        assert built.asm["cubin"], name
        assert built.metadata.shared <= SHARED, (name, width, built.metadata.shared)
        print(name, width, built.metadata.shared)
"""


def run_script(script: str, folder: Path) -> str:
    """Run `script` beside a copy of this file: what is interpreted in a process cannot be compiled in it."""
    (folder / "test_kernels.py").write_text(Path(__file__).read_text())
    (folder / "script.py").write_text(script)
    sources = Path(__file__).parents[2] / "src"
    inherited = os.environ.get("PYTHONPATH", "")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")], capture_output=True, text=True, check=False,
        env={**variables, "PYTHONPATH": f"{sources}{os.pathsep}{inherited}", "TRITON_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_triton
@pytest.mark.timeout(900)  # the interpreter is slow, and slower where it shares a machine
def test_triton_kernels_equal_the_dense_mask_in_value_and_gradient(tmp_path: Path):
    """Interpreted on the CPU in fp32: ragged responses, odd head width, grouped heads, three kinds of attention."""
    assert run_script(INTERPRETED, tmp_path) == "equal\n"


@needs_triton
@pytest.mark.timeout(900)
def test_triton_kernels_compile_for_hopper_within_its_shared_memory(tmp_path: Path):
    assert run_script(COMPILED, tmp_path).count("\n") == 6
