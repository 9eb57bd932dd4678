"""DiffusionGemma against transformers: stored logits and caches, and live on a random tiny config."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from dlmrt.checkpoint.load import load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models import diffusion_gemma
from dlmrt.models.config import load_config, parse_config
from dlmrt.ops import eager

GATE = 1e-4
CASES = [("dgemma_tiny", prompt) for prompt in ("prompt5", "prompt15", "prompt16", "prompt17", "prompt40")]
CASES += [("dgemma_hd256_bf16", "prompt20"), ("dgemma_hd256_bf16", "prompt44")]


def ids_of(expected, name):
    return expected[name].raw().astype(np.int32)


def softmax(logits):
    return torch.from_numpy(logits).softmax(-1).numpy()


def committed_prompt(oracle, name, prompt, dtype="float32"):
    checkpoint, expected = open_checkpoint(oracle(name)), read_tensors(oracle(name) / "expected.safetensors")
    denoiser = EagerDenoiser(load_params(checkpoint, dtype=dtype), checkpoint.config)
    denoiser.extend(ids_of(expected, f"{prompt}.input_ids"))
    return denoiser, expected


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_logits_equal_the_reference(oracle, name, prompt):
    """Without and with self-conditioning, and for a second canvas behind a committed one; prompts around the window."""
    denoiser, expected = committed_prompt(oracle, name, prompt)
    canvas = ids_of(expected, f"{prompt}.canvas")
    first = to_float32(expected[f"{prompt}.logits"])
    z = denoiser.soft_embedding(softmax(first / np.float32(0.8)))
    got = {"logits": denoiser.forward(canvas, None, None), "logits_selfcond": denoiser.forward(canvas, z, None)}
    denoiser.extend(ids_of(expected, f"{prompt}.committed"))
    got["logits_canvas2"] = denoiser.forward(ids_of(expected, f"{prompt}.canvas2"), None, None)
    for key, logits in got.items():
        difference = np.abs(logits - to_float32(expected[f"{prompt}.{key}"])).max()
        print(f"{name} {prompt} {key}: {difference:.1e}")
        assert difference <= GATE


@pytest.mark.parametrize(
    ("name", "prompt"), [case for case in CASES if case[1] in ("prompt40", "prompt15", "prompt44")]
)
def test_cache_equals_the_reference(oracle, name, prompt):
    """Keys and values of the encoder pass; the reference's sliding layers keep the last window - 1 of them."""
    denoiser, expected = committed_prompt(oracle, name, prompt)
    for layer_idx in range(denoiser.config.num_layers):
        for kind, cache in (("k", denoiser._keys), ("v", denoiser._values)):
            stored = expected.get(f"{prompt}.encoder_{kind}.{layer_idx}")
            if stored is None:
                continue
            wanted = to_float32(stored)
            got = cache[layer_idx][0, -wanted.shape[1] :].transpose(0, 1).numpy()
            np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_both_spellings_of_the_config_mean_the_same(oracle):
    """`global_head_dim` of the hub, `per_layer_config` of a re-save; the latter wins where both are given."""
    folder = oracle("dgemma_tiny")
    ours, hub = (json.loads((folder / name).read_text()) for name in ("config.json", "config_hub_spelling.json"))
    assert parse_config(ours) == parse_config(hub)
    both = {**hub, "text_config": {**hub["text_config"], "per_layer_config": {"3": {"head_dim": 64}}}}
    layer = parse_config(both).attention(3)
    assert (layer.head_dim, layer.num_kv_heads) == (64, 2)


@pytest.mark.parametrize("prompt_length", [63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_of_prefill_do_not_matter_around_the_window(oracle, prompt_length, chunk):
    """K27"""
    config = load_config(oracle("dgemma_tiny"))
    config = dataclasses.replace(config, sliding=dataclasses.replace(config.sliding, window=64), num_layers=4)
    params = load_params(open_checkpoint(oracle("dgemma_tiny")))
    ids = np.random.default_rng(prompt_length).integers(0, config.vocab_size, prompt_length).astype(np.int32)
    canvas = np.arange(16, dtype=np.int32)
    whole, parts = EagerDenoiser(params, config), EagerDenoiser(params, config)
    whole.extend(ids)
    for start in range(0, prompt_length, chunk):
        parts.extend(ids[start : start + chunk])
    np.testing.assert_allclose(parts.forward(canvas, None, None), whole.forward(canvas, None, None), atol=4e-5)


@pytest.mark.parametrize("prompt", ["prompt20", "prompt44"])
def test_bf16_stays_within_the_reference_distance(oracle, prompt):
    denoiser, expected = committed_prompt(oracle, "dgemma_hd256_bf16", prompt, dtype="bfloat16")
    got = denoiser.forward(ids_of(expected, f"{prompt}.canvas"), None, None)
    wanted = to_float32(expected[f"{prompt}.logits"])
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) <= 0.06


@torch.inference_mode()
def test_router_equals_the_reference(data):
    stored = read_tensors(data / "vectors" / "dgemma_router.safetensors")
    x, scale, proj, expert_scale = (
        torch.from_numpy(to_float32(stored[f"dgemma_router.{name}"]))
        for name in ("x", "scale", "proj", "per_expert_scale")
    )
    experts, weights = eager.route_softmax(x, scale, proj, expert_scale, top_k=8, eps=1e-6)
    np.testing.assert_array_equal(experts.numpy(), stored["dgemma_router.topk_ids"].raw())
    np.testing.assert_allclose(weights.numpy(), to_float32(stored["dgemma_router.topk_weights"]), atol=1e-5)


def test_soft_embedding_of_one_hot_rows_is_the_embedding(oracle):
    """K37"""
    denoiser, _ = committed_prompt(oracle, "dgemma_tiny", "prompt5")
    ids = torch.tensor([0, 3, 511])
    probs = torch.nn.functional.one_hot(ids, denoiser.vocab_size).float().numpy()
    table = denoiser._params[diffusion_gemma.EMBEDDING]
    wanted = eager.embed(table, ids, scale=denoiser.config.hidden_size**0.5).numpy()
    np.testing.assert_array_equal(denoiser.soft_embedding(probs), wanted)


@torch.inference_mode()
@pytest.mark.parametrize("num_prompt", [3, 11, 12, 13, 30])
def test_random_model_equals_transformers(live_diffusion_gemma, num_prompt):
    """Through our loader: save_pretrained's files, skipped vision tensors, the re-saved spelling of the config."""
    from transformers import DynamicCache

    model, checkpoint = live_diffusion_gemma
    denoiser = EagerDenoiser(load_params(checkpoint), checkpoint.config)
    rng = np.random.default_rng(num_prompt)
    prompt, canvas, decided = (rng.integers(0, 199, size).astype(np.int32) for size in (num_prompt, 8, 8))
    cache = DynamicCache(config=model.config.get_text_config())

    def reference(new_ids, selfcond):
        out = model(
            input_ids=torch.from_numpy(new_ids)[None].long(), decoder_input_ids=torch.from_numpy(canvas)[None].long(),
            self_conditioning_logits=selfcond, cache=cache,
        )  # fmt: skip
        return out.logits

    wanted = reference(prompt, None)
    denoiser.extend(prompt)
    got = denoiser.forward(canvas, None, None)
    assert np.abs(got).max() > 1 and np.abs(got - wanted[0].numpy()).max() <= GATE
    z = denoiser.soft_embedding((wanted[0] / 0.7).softmax(-1).numpy())
    wanted = reference(decided, wanted / 0.7)
    denoiser.extend(decided)
    assert np.abs(denoiser.forward(canvas, z, None) - wanted[0].numpy()).max() <= GATE
