"""The eager executor: its cache is exact for every visibility; shift and residual land where they should."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.checkpoint.load import load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.eager.executor import EagerDenoiser, dense_logits, load_denoiser
from dlmrt.errors import UsageError
from dlmrt.models import qwen3
from dlmrt.models.config import ResidualConfig
from dlmrt.types import Denoiser

GATE = 1e-5
RESIDUAL = ResidualConfig(kind="gated_mlp", alpha=0.5, intermediate_size=24)
VISIBILITIES = {
    "causal context, bidirectional canvas": {},
    "block-causal": {"context_attention": "block_causal", "block_anchor": "position_zero"},
    "causal canvas": {"in_block_attention": "causal"},
}


def dense_mask(diffusion, num_context, length):
    """The mask that a context and one canvas behind it stand for, written out position by position."""
    causal_block = diffusion.in_block_attention == "causal"
    block = diffusion.canvas_length
    visible = np.zeros((length, length), bool)
    for row in range(length):
        for key in range(length):
            if row >= num_context:
                visible[row, key] = key <= row if causal_block else True
            elif diffusion.context_attention == "block_causal" and not causal_block:
                visible[row, key] = key // block <= row // block
            else:
                visible[row, key] = key <= row
    return visible


def ids_of(config, length, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).astype(np.int32)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_cached_equals_dense(make_config, make_params, visibility, shift):
    """K21, K24: prefill in chunks, commit blocks, denoise in between; each forward equals the pass without a cache."""
    config = make_config(diffusion={**VISIBILITIES[visibility], "logit_shift": shift})
    params = make_params(config)
    ids = ids_of(config, 28)
    denoiser = EagerDenoiser(params, config)
    assert isinstance(denoiser, Denoiser) and denoiser.name == "eager" and denoiser.dtype == "float32"
    worst = 0.0
    for start, end in ((0, 8), (8, 12), (12, 16), (16, 24)):
        denoiser.extend(ids[start:end])
        assert denoiser.context_length == end
        canvas = ids_of(config, 4, seed=end)
        mask = dense_mask(config.diffusion, end, end + 4)
        dense = dense_logits(params, config, np.concatenate((ids[:end], canvas)), mask)
        for _ in range(2):
            got = denoiser.forward(canvas, None, None)
            worst = max(worst, np.abs(got - dense[end - shift : end + 4 - shift]).max())
            assert got.shape == (4, config.vocab_size) and got.dtype == np.float32
    print(f"{visibility}, shift {shift}: {worst:.1e}")
    assert worst <= GATE


@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=6), shift=st.integers(0, 1))
@settings(max_examples=15, deadline=None)
def test_chunks_of_prefill_do_not_matter(make_config, make_params, cuts, shift):
    """K27 without a window: any chunking of the prompt gives the logits of one chunk."""
    config = make_config(diffusion={"logit_shift": shift})
    whole, parts = (EagerDenoiser(make_params(config), config) for _ in range(2))
    ids, canvas = ids_of(config, sum(cuts)), ids_of(config, 4, seed=1)
    whole.extend(ids)
    for start, cut in zip(np.cumsum([0, *cuts]), cuts, strict=False):
        parts.extend(ids[start : start + cut])
    assert np.abs(whole.forward(canvas, None, None) - parts.forward(canvas, None, None)).max() <= GATE


@pytest.mark.parametrize("block", [4, 8])
def test_cached_blocks_equal_the_reference(data, block):
    """The stored block-causal logits, block by block through the cache."""
    folder = data / "qwen3_bd_tiny"
    checkpoint = open_checkpoint(folder)
    expected = read_tensors(folder / "expected.safetensors")
    ids = expected["input_ids"].raw().astype(np.int32)
    params = load_params(checkpoint, dtype="float32")
    config = with_block(checkpoint.config, block)
    denoiser = EagerDenoiser(params, config)
    rows = []
    for start in range(0, len(ids), block):
        rows.append(denoiser.forward(ids[start : start + block], None, None))
        denoiser.extend(ids[start : start + block])
    for name in ("logits", "cached_logits"):
        difference = np.abs(np.concatenate(rows) - to_float32(expected[f"fwd.block_causal.B{block}.{name}"])).max()
        print(f"block_causal.B{block} {name}: {difference:.1e}")
        assert difference <= 1e-4


@pytest.mark.parametrize("model", ["qwen3_bd_tiny", "qwen3_hd128_tied_bf16"])
def test_canvas_behind_a_causal_context_equals_the_reference(data, make_config, model):
    folder = data / model
    checkpoint = open_checkpoint(folder)
    expected = read_tensors(folder / "expected.safetensors")
    ids = expected["input_ids"].raw().astype(np.int32)
    config = with_block(checkpoint.config, len(ids) - 29, make_config().diffusion)
    denoiser = EagerDenoiser(load_params(checkpoint, dtype="float32"), config)
    denoiser.extend(ids[:29])
    got = denoiser.forward(ids[29:], None, None)
    difference = np.abs(got - to_float32(expected["fwd.causal_context_bidir_canvas.P29.logits"])[29:]).max()
    print(f"{model}: {difference:.1e}")
    assert difference <= 1e-4


def with_block(config, block, diffusion=None):
    diffusion = dataclasses.replace(diffusion or config.diffusion, canvas_length=block)
    return dataclasses.replace(config, diffusion=diffusion)


@pytest.mark.parametrize("shift", [0, 1])
def test_shift_of_a_converted_model(make_config, make_params, shift):
    """K17: slot i is filled from the auto-regressive model's row i - 1, and only with logit_shift 1."""
    config = make_config(diffusion={"logit_shift": shift, "in_block_attention": "causal"})
    params = make_params(config)
    ids = ids_of(config, 17)
    auto_regressive = dense_logits(params, config, ids, np.tril(np.ones((17, 17), bool)))
    denoiser = EagerDenoiser(params, config)
    denoiser.extend(ids[:9])
    got = denoiser.forward(ids[9:], None, None)
    assert np.abs(got - auto_regressive[9 - shift : 17 - shift]).max() <= GATE
    assert np.abs(got - auto_regressive[8 + shift : 16 + shift]).max() > 1


def test_shift_needs_a_token_before_the_canvas(make_config, make_params):
    config = make_config(diffusion={"logit_shift": 1})
    denoiser = EagerDenoiser(make_params(config), config)
    with pytest.raises(UsageError, match="commit one token first"):
        denoiser.forward(ids_of(config, 4), None, None)


@pytest.mark.parametrize("shift", [0, 1])
def test_truncate_equals_a_shorter_prompt(make_config, make_params, shift):
    """K25, K28: canvas forwards leave nothing behind, and rolling back equals never having gone on."""
    config = make_config(diffusion={"logit_shift": shift})
    params = make_params(config)
    ids, canvas = ids_of(config, 20), ids_of(config, 4, seed=2)
    cold, warm = EagerDenoiser(params, config), EagerDenoiser(params, config)
    cold.extend(ids[:9])
    warm.extend(ids[:9])
    wanted = cold.forward(canvas, None, None)
    warm.forward(ids_of(config, 4, seed=3), None, None)
    warm.extend(ids[9:])
    warm.truncate(9)
    assert warm.context_length == 9
    np.testing.assert_array_equal(warm.forward(canvas, None, None), wanted)
    warm.reset()
    warm.extend(ids[:9])
    np.testing.assert_array_equal(warm.forward(canvas, None, None), wanted)
    for length in (-1, 10):
        with pytest.raises(UsageError, match="truncate"):
            warm.truncate(length)


def test_block_causal_context_grows_by_whole_blocks(make_config, make_params):
    config = make_config(diffusion=VISIBILITIES["block-causal"])
    denoiser = EagerDenoiser(make_params(config), config)
    denoiser.extend(ids_of(config, 8))
    with pytest.raises(UsageError, match="inside a block of 4"):
        denoiser.truncate(6)
    denoiser.extend(ids_of(config, 3))
    with pytest.raises(UsageError, match="inside a block of 4"):
        denoiser.extend(ids_of(config, 1))


def test_residual_enters_where_the_config_says(make_config, make_params):
    """z changes masked rows only, all rows, or the given rows; with a one-hot prediction z is the embedding."""
    everywhere = make_config(diffusion={"residual": RESIDUAL})
    masked = make_config(diffusion={"residual": ResidualConfig(**{**vars(RESIDUAL), "where": "masked"})})
    params = make_params(everywhere)
    canvas = np.array([60, 5, 60, 7], np.int32)
    is_mask = canvas == 60
    all_rows, mask_rows = EagerDenoiser(params, everywhere), EagerDenoiser(params, masked)
    z = all_rows.soft_embedding(np.eye(61, dtype=np.float32)[[3, 4, 5, 6]])
    np.testing.assert_array_equal(z, params[qwen3.EMBEDDING][3:7].numpy())
    assert z.dtype == np.float32 and all_rows.has_residual
    full = np.ones((4, 4), bool)
    for denoiser, given_where, where in (
        (all_rows, None, None), (mask_rows, None, is_mask), (all_rows, ~is_mask, ~is_mask),
    ):  # fmt: skip
        got = denoiser.forward(canvas, z, given_where)
        dense = dense_logits(params, everywhere, canvas, full, residual_SD=z, where_S=where)
        assert np.abs(got - dense).max() <= GATE
    without = all_rows.forward(canvas, None, None)
    np.testing.assert_array_equal(all_rows.forward(canvas, np.zeros_like(z), None), without)
    assert np.abs(all_rows.forward(canvas, z, None) - without).max() > 0.1
    assert np.abs(all_rows.forward(canvas, z, None) - mask_rows.forward(canvas, z, None)).max() > 0.01


@pytest.mark.parametrize("shape", [(4, 31), (3, 32), (32,), (1, 4, 32)])
def test_a_residual_of_another_shape_is_refused(make_config, make_params, shape):
    config = make_config(diffusion={"residual": RESIDUAL})
    denoiser = EagerDenoiser(make_params(config), config)
    denoiser.extend(np.array([1, 2], dtype=np.int32))
    with pytest.raises(UsageError, match=r"it must have \[4, 32\]"):
        denoiser.forward(np.arange(4, dtype=np.int32), np.zeros(shape, dtype=np.float32), None)


def test_residual_without_the_pathway_is_refused(make_config, make_params):
    config = make_config()
    denoiser = EagerDenoiser(make_params(config), config)
    assert not denoiser.has_residual
    with pytest.raises(UsageError, match="no residual pathway"):
        denoiser.forward(ids_of(config, 4), np.zeros((4, 32), np.float32), None)


@pytest.mark.parametrize("bad", [-1, 61])
def test_ids_outside_the_table_are_refused(make_config, make_params, bad):
    config = make_config()
    denoiser = EagerDenoiser(make_params(config), config)
    with pytest.raises(UsageError, match=r"0\.\.60"):
        denoiser.extend(np.array([3, bad], np.int32))
    assert denoiser.context_length == 0


def test_auto_regressive_checkpoint_is_refused(data):
    with pytest.raises(UsageError, match="'diffusion' section"):
        load_denoiser(open_checkpoint(data / "qwen3_hd128_tied_bf16"))


def test_load_denoiser_dtypes(data):
    checkpoint = open_checkpoint(data / "qwen3_bd_tiny")
    ids = np.arange(8, dtype=np.int32)
    exact, rounded = load_denoiser(checkpoint), load_denoiser(checkpoint, dtype="bfloat16", num_threads=1)
    assert (exact.dtype, rounded.dtype) == ("float32", "bfloat16") and torch.get_num_threads() == 1
    wanted, got = exact.forward(ids, None, None), rounded.forward(ids, None, None)
    relative = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert got.dtype == np.float32 and 0 < relative <= 0.05
    with pytest.raises(UsageError, match="did you mean 'float32'"):
        load_denoiser(checkpoint, dtype="float23")
    with pytest.raises(UsageError, match="num_threads"):
        load_denoiser(checkpoint, num_threads=0)


def test_grid_from_the_prompts_end_equals_the_reference(data):
    """dLLM's A2D: blocks are counted from the prompt's end; whatever the chunks of the prefill."""
    folder = data / "qwen3_bd_tiny"
    expected = read_tensors(folder / "expected.safetensors")
    checkpoint = open_checkpoint(folder)
    diffusion = dataclasses.replace(checkpoint.config.diffusion, canvas_length=8, block_anchor="prompt_end")
    denoiser = EagerDenoiser(load_params(checkpoint), dataclasses.replace(checkpoint.config, diffusion=diffusion))
    ids = expected["input_ids"].raw().astype(np.int32)
    wanted = to_float32(expected["fwd.block_causal_from_prompt_end.B8.P29.logits"])
    for chunks in ((29,), (5, 8, 16), (13, 16), (21, 8)):
        denoiser.reset()
        for end in np.cumsum(chunks):
            denoiser.extend(ids[denoiser.context_length : end])
        for start in (29, 37):
            got = denoiser.forward(ids[start : start + 8], None, None)
            assert np.abs(got - wanted[start : start + 8]).max() <= 1e-4
            denoiser.extend(ids[start : start + 8])
        with pytest.raises(UsageError, match="inside a block"):
            denoiser.truncate(30)
