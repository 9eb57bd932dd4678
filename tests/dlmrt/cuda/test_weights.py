"""Weights of quantised files on the cuda executor: codes are kept, and what they multiply to is what they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs_cuda import FAMILIES, draw_params, make_cuda, make_eager, small_config

import dlmrt.program.denoiser
from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.cuda import lower, programs
from dlmrt.cuda.executor import FORMATS
from dlmrt.cuda.runners import Launches
from dlmrt.cuda.weights import FileParams, Packed, join, kept_formats, stack

MOE = replace(FAMILIES["llada2, groups of experts"].moe, intermediate_size=16, shared_intermediate_size=16)
MODELS = {
    "qwen3": replace(small_config(), tie_word_embeddings=False, head_dim=16),
    "llada2": replace(FAMILIES["llada2, groups of experts"], head_dim=16, moe=MOE),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Operands stay float32: the interpreter's bfloat16 is wrong."""
    monkeypatch.setattr(dlmrt.program.denoiser, "MAX_ROWS", 4)
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: Launches(steps))
    monkeypatch.setattr(lower, "operand_type", lambda dtype: "float32")


def quantized(folder, config, format, **options):
    """A checkpoint whose matrices, experts included, are stored in `format`."""
    save_checkpoint(folder / "plain", config, draw_params(config))
    original = open_checkpoint(folder / "plain")
    convert_checkpoint(folder / format, original, format=format, policy="linears", **options)
    return open_checkpoint(folder / format)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "format"), [("qwen3", "nvfp4"), ("llada2", "nvfp4"), ("llada2", "fp8")])
def test_matrices_and_experts_keep_their_codes_and_multiply_to_what_they_stand_for(tmp_path, name, format):
    checkpoint = quantized(tmp_path, MODELS[name], format)
    config, weights = checkpoint.config, checkpoint.weights()
    kept = kept_formats(weights, config)
    assert (set(kept.values()) == {format} and "model.layers.0.self_attn.q_proj.weight" in kept) or name == "llada2"
    assert any("mlp" in key for key in kept) and not any("head" in key or "embed" in key for key in kept)
    params = FileParams(weights, kept)
    assert isinstance(params[next(iter(kept))], Packed)
    mine = make_cuda(config, params, formats=replace(FORMATS["float32"], named=kept))
    exact = make_eager(config, load_params(checkpoint, dtype="float32"))
    ids, canvas = np.arange(4, dtype=np.int32), np.array([7, 3, 250, 9], dtype=np.int32)
    for each in (mine, exact):
        each.extend(ids)
    got, wanted = mine.forward(canvas, None, None), exact.forward(canvas, None, None)
    assert np.allclose(got, wanted, atol=2e-4 * np.abs(wanted).max()), np.abs(got - wanted).max()


def test_a_matrix_that_is_fused_with_one_of_another_format_becomes_floats(tmp_path):
    checkpoint = quantized(tmp_path, MODELS["qwen3"], "nvfp4", ignore=["*k_proj"])
    weights = checkpoint.weights()
    kept = kept_formats(weights, checkpoint.config)
    assert not any(part in name for name in kept for part in ("q_proj", "k_proj", "v_proj"))
    assert isinstance(FileParams(weights, kept)["model.layers.0.self_attn.q_proj.weight"], torch.Tensor)


def test_fused_and_stacked_parts_keep_their_rows_scales_and_factors_together():
    def part(rows, factor):
        codes = torch.arange(rows * 16, dtype=torch.uint8).view(rows, 16) + int(factor)
        return Packed(
            values=codes, scales=torch.ones(rows, 2).to(torch.float8_e4m3fn), shared=torch.full((rows,), factor)
        )

    gates, ups = [part(3, 1.0), part(3, 2.0)], [part(5, 3.0), part(5, 4.0)]
    both = join([stack(gates), stack(ups)], "nvfp4", torch.device("cpu"))
    assert both.values.shape == (2, 8, 16) and both.scales.shape == (2, 8, 2)
    assert torch.equal(both.values[1, 3:], ups[1].values) and torch.equal(both.values[0, :3], gates[0].values)
    assert both.shared.tolist() == [[1.0] * 3 + [3.0] * 5, [2.0] * 3 + [4.0] * 5]
    rows = [Packed(values=torch.zeros(n, 4).to(torch.float8_e4m3fn), scales=torch.full((n,), 1.0 * n)) for n in (2, 3)]
    assert join(rows, "fp8", torch.device("cpu")).scales.tolist() == [2.0, 2.0, 3.0, 3.0, 3.0]
    square = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    blocks = [Packed(values=square, scales=torch.full((2, 2), factor), scale_block=128) for factor in (1.0, 2.0)]
    assert join(blocks, "fp8", torch.device("cpu")).scales[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
