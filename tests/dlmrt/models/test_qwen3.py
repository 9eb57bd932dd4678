"""The Qwen3 backbone against transformers: stored reference logits, and live on random tiny configs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dlmrt.checkpoint.load import load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.save import config_to_json
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.eager.executor import dense_logits
from dlmrt.models import qwen3
from dlmrt.models.config import ResidualConfig, RopeConfig

RESIDUAL = ResidualConfig(kind="gated_mlp", alpha=0.5, intermediate_size=24)
MODELS = ("qwen3_bd_tiny", "qwen3_hd128_tied_bf16")


def mask(kind, length):
    """Bool [S, S] of a mask kind of the reference data, e.g. block_causal.B4 or causal_context_bidir_canvas.P29."""
    name, *parts = kind.split(".")
    value = {part[0]: int(part[1:]) for part in parts}
    rows, keys = np.arange(length)[:, None], np.arange(length)[None]
    if name == "causal":
        return keys <= rows
    if name == "full":
        return np.ones((length, length), bool)
    if name == "block_causal":
        return keys // value["B"] <= rows // value["B"]
    if name == "block_causal_from_prompt_end":
        offset = -value["P"] % value["B"]
        return (keys + offset) // value["B"] <= (rows + offset) // value["B"]
    assert name == "causal_context_bidir_canvas"
    return np.where(rows >= value["P"], True, keys <= rows)


CASES = [
    (MODELS[0], "causal"),
    (MODELS[0], "full"),
    (MODELS[0], "block_causal.B4"),
    (MODELS[0], "block_causal.B8"),
    (MODELS[0], "causal_context_bidir_canvas.P29"),
    (MODELS[0], "block_causal_from_prompt_end.B8.P29"),
    (MODELS[1], "causal"),
    (MODELS[1], "block_causal.B4"),
    (MODELS[1], "block_causal.B16"),
    (MODELS[1], "causal_context_bidir_canvas.P29"),
]


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_logits_equal_the_reference_for_every_mask(data, model, kind):
    checkpoint = open_checkpoint(data / model)
    expected = read_tensors(data / model / "expected.safetensors")
    ids = expected["input_ids"].raw().astype(np.int32)
    got = dense_logits(load_params(checkpoint, dtype="float32"), checkpoint.config, ids, mask(kind, len(ids)))
    difference = np.abs(got - to_float32(expected[f"fwd.{kind}.logits"])).max()
    print(f"{model} {kind}: {difference:.1e}")
    assert difference <= 1e-4


def test_no_reference_case_is_left_out(data):
    stored = {
        (model, name.removeprefix("fwd.").removesuffix(".logits"))
        for model in MODELS
        for name in read_tensors(data / model / "expected.safetensors")
        if name.startswith("fwd.") and name.endswith(".logits")
    }
    assert stored == set(CASES)


@pytest.mark.parametrize("kind", ["causal", "block_causal.B4", "block_causal.B16"])
def test_bf16_logits_stay_within_the_reference_distance(data, kind):
    checkpoint = open_checkpoint(data / MODELS[1])
    expected = read_tensors(data / MODELS[1] / "expected.safetensors")
    ids = expected["input_ids"].raw().astype(np.int32)
    got = dense_logits(load_params(checkpoint), checkpoint.config, ids, mask(kind, len(ids)))
    exact, bf16 = (to_float32(expected[f"fwd.{kind}.{name}"]) for name in ("logits", "logits_bf16"))
    relative = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    to_bf16 = np.abs(got - bf16).max()
    print(f"{kind}: {relative:.4f} of the fp32 norm, max {to_bf16:.1e} to the reference's bf16")
    assert relative <= 0.03


def live(config, params):
    """transformers' model of the same config and weights."""
    raw = {key: value for key, value in config_to_json(config).items() if key != "architectures"}
    classes = (Qwen2Config, Qwen2ForCausalLM) if config.has_qkv_bias else (Qwen3Config, Qwen3ForCausalLM)
    model = classes[1](classes[0](**raw, attn_implementation="eager")).to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(params, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model


SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "one key head": {"num_heads": 5, "num_kv_heads": 1, "head_dim": 6},
    "odd head counts": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 10, "hidden_size": 20},
    "no grouping": {"num_heads": 3, "num_kv_heads": 3, "num_layers": 1},
    "linear": {"rope": RopeConfig(theta=10_000.0, kind="linear", factor=4.0)},
    "llama3": {
        "rope": RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_position_embeddings=64,
                           low_freq_factor=1.0, high_freq_factor=4.0),
    },
    "yarn": {"rope": RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=64)},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "has_qkv_bias": True},
    "qwen2 tied": {
        "architecture": "Qwen2ForCausalLM", "has_qkv_bias": True, "tie_word_embeddings": True, "num_heads": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["causal", "block_causal.B4"])
@torch.inference_mode()
def test_random_models_equal_transformers(make_config, make_params, shape, kind):
    """K29, K31: tied and untied heads, grouped and odd head counts, declared rope scaling."""
    config = make_config(**SHAPES[shape])
    params = make_params(config, seed=3)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, 37).astype(np.int32)
    visible = mask(kind, len(ids))
    bias = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min)[None, None]
    wanted = live(config, params)(torch.from_numpy(ids)[None].long(), attention_mask=bias).logits[0].numpy()
    got = dense_logits(params, config, ids, visible)
    assert np.abs(wanted).max() > 1
    assert np.abs(got - wanted).max() <= 1e-4


@torch.inference_mode()
def test_head_follows_the_tie_flag(make_config, make_params):
    """K29: an untied head that is a permuted embedding gives permuted logits, the tied twin the embedding's."""
    tied, untied = make_config(tie_word_embeddings=True), make_config()
    params = make_params(tied)
    permutation = torch.randperm(tied.vocab_size, generator=torch.Generator().manual_seed(1))
    ids = np.arange(9, dtype=np.int32)
    visible = mask("causal", 9)
    from_embedding = dense_logits(params, tied, ids, visible)
    head = {**params, qwen3.HEAD: params[qwen3.EMBEDDING][permutation]}
    np.testing.assert_array_equal(dense_logits(head, untied, ids, visible), from_embedding[:, permutation])


def test_residual_of_zero_is_no_residual(make_config, make_params):
    config = make_config(diffusion={"residual": RESIDUAL})
    params = make_params(config)
    ids, visible = np.arange(8, dtype=np.int32), mask("full", 8)
    zero = np.zeros((8, config.hidden_size), np.float32)
    without = dense_logits(params, config, ids, visible)
    np.testing.assert_array_equal(dense_logits(params, config, ids, visible, residual_SD=zero), without)
    ones = zero + 1
    nowhere = np.zeros(8, bool)
    np.testing.assert_array_equal(
        dense_logits(params, config, ids, visible, residual_SD=ones, where_S=nowhere), without
    )
    assert np.abs(dense_logits(params, config, ids, visible, residual_SD=ones) - without).max() > 0.1
