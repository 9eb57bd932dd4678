"""The torch operations against formulas written out in numpy, and rotary phases against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dlmrt.models.config import RopeConfig
from dlmrt.ops import eager
from dlmrt.ops.numerics import rope_inv_freq

HEAD_DIM = 16
ROPES = {
    "default": (RopeConfig(theta=1e6), {"rope_type": "default"}),
    "linear": (RopeConfig(theta=1e4, kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=2048),
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0},
    ),
    "yarn": (
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=2048),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ),
    "yarn with its own factor": (
        RopeConfig(theta=1e4, kind="yarn", factor=2.0, original_max_position_embeddings=4096, beta_fast=16.0,
                   beta_slow=2.0, attention_factor=0.9),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0,
         "beta_slow": 2.0, "attention_factor": 0.9},
    ),
}  # fmt: skip


def reference_rotary(rope, section):
    config = Qwen3Config(
        head_dim=HEAD_DIM, num_attention_heads=1, hidden_size=HEAD_DIM, max_position_embeddings=16384,
        rope_parameters={**section, "rope_theta": rope.theta},
    )  # fmt: skip
    return config, Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_follows_the_declared_formula(kind):
    """K31: cos and sin at position 8192 as transformers computes them; each scaling differs from none."""
    rope, section = ROPES[kind]
    config, rotary = reference_rotary(rope, section)
    if section["rope_type"] in ROPE_INIT_FUNCTIONS:
        wanted, factor = ROPE_INIT_FUNCTIONS[section["rope_type"]](config, "cpu")
    else:
        wanted, factor = rotary.inv_freq, rotary.attention_scaling
    inv_freq, our_factor = rope_inv_freq(rope, HEAD_DIM)
    np.testing.assert_allclose(inv_freq, wanted.numpy(), rtol=3e-6)
    assert our_factor == pytest.approx(factor, rel=1e-12)
    positions = torch.tensor([[0, 1, 255, 8192]])
    cos, sin = rotary(torch.zeros(1), positions)
    unit = torch.zeros(4, 1, HEAD_DIM)
    unit[..., : HEAD_DIM // 2] = 1.0  # rotating (1, 0) gives (cos, sin)
    got = eager.rotate(unit, positions[0], rope=rope)[:, 0]
    # Phases of some thousand radians keep about 1e-3 of fp32: the tables may differ by that and no more.
    np.testing.assert_allclose(got[:, : HEAD_DIM // 2], cos[0, :, : HEAD_DIM // 2], atol=3e-3)
    np.testing.assert_allclose(got[:, HEAD_DIM // 2 :], sin[0, :, : HEAD_DIM // 2], atol=3e-3)
    if kind != "default":
        unscaled = eager.rotate(unit, positions[0], rope=RopeConfig(theta=rope.theta))[:, 0]
        assert (unscaled[-1] - got[-1]).abs().max() > 0.1


def test_rotary_phases_stay_fp32_in_a_bf16_model():
    """K32: at position 4095 a bf16 input is turned by the fp32 angle; positions 256 and 257 stay different."""
    rope = RopeConfig(theta=1e4)
    positions = torch.tensor([256, 257, 4095])
    unit = torch.zeros(3, 1, HEAD_DIM, dtype=torch.bfloat16)
    unit[..., : HEAD_DIM // 2] = 1.0
    got = eager.rotate(unit, positions, rope=rope)[:, 0]
    assert got.dtype == torch.bfloat16
    phase = positions.double()[:, None] / 1e4 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM).double()
    exact = torch.cat((phase.cos(), phase.sin()), dim=-1)
    assert (got.double() - exact).abs().max() <= 2**-8 + 1e-3  # rounding of the result to bf16, nothing more
    assert (got[0] != got[1]).any()


@pytest.mark.parametrize("where", [None, "some"])
def test_residual_mix_by_hand(where):
    rng = np.random.default_rng(0)
    x, z, gate, up, down, norm = (
        rng.standard_normal(shape) for shape in ((5, 8), (5, 8), (12, 8), (12, 8), (8, 12), (8,))
    )
    keep = np.array([True, False, True, True, False]) if where else np.ones(5, bool)
    normed = norm * z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6)
    a = normed @ gate.T
    wanted = x + 0.5 * keep[:, None] * ((a / (1 + np.exp(-a)) * (normed @ up.T)) @ down.T)
    t = [torch.from_numpy(v).float() for v in (x, z, norm, gate, up, down)]
    got = eager.residual_mix(t[0], t[1], torch.from_numpy(keep) if where else None, *t[2:], alpha=0.5, eps=1e-6)
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, math.sqrt(8)])
def test_soft_embedding_of_one_hot_is_the_lookup(dtype, scale):
    """K37 for the formats that exist: a one-hot row gives exactly the embedding of its id, times the scale."""
    table = torch.randn(11, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = torch.tensor([3, 0, 10, 3])
    soft = eager.soft_embedding(torch.nn.functional.one_hot(ids, 11).float(), table, scale=scale)
    torch.testing.assert_close(soft, eager.embed(table, ids) * scale, rtol=0, atol=0)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (5, 1), (9, 3)])
def test_attention_by_hand(heads, groups):
    """Grouped heads: query head n reads key/value head n // (N / G); invisible keys have no weight."""
    rng = np.random.default_rng(heads)
    rows, keys, width = 7, 11, 6
    q, k, v = (rng.standard_normal((n, h, width)) for n, h in ((rows, heads), (keys, groups), (keys, groups)))
    visible = rng.random((rows, keys)) < 0.6
    visible[:, 0] = True
    wanted = np.empty((rows, heads, width))
    for n in range(heads):
        scores = q[:, n] @ k[:, n * groups // heads].T / math.sqrt(width)
        weights = np.where(visible, np.exp(scores), 0)
        wanted[:, n] = weights / weights.sum(-1, keepdims=True) @ v[:, n * groups // heads]
    t = [torch.from_numpy(a).float()[None] for a in (q, k, v)]
    got = eager.scaled_dot_product(*t, torch.from_numpy(visible))
    np.testing.assert_allclose(got[0].numpy(), wanted.reshape(rows, -1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blind", ["one row", "whole sample"])
def test_rows_that_see_nothing_stay_finite(dtype, blind):
    """K26: a fully padded block leaves outputs and gradients finite, and the other rows as they were."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, 4, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    visible = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    seeing = eager.MaskedAttention(visible)(0, q, k, v)
    blinded = visible.clone()
    blinded[1, slice(5, 6) if blind == "one row" else slice(None)] = False
    out = eager.MaskedAttention(blinded)(0, q, k, v)
    out.square().sum().backward()
    assert out.isfinite().all() and all(t.grad.isfinite().all() for t in (q, k, v))
    torch.testing.assert_close(out[0], seeing[0])


def test_norm_statistics_are_fp32():
    """bf16 squares lose the mean: the result equals the fp32 norm rounded once."""
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).bfloat16() * 30
    weight = torch.ones(256, dtype=torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(eager.rms_norm(x, weight, eps=1e-6), exact.to(torch.bfloat16))
