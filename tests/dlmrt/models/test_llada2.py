"""LLaDA2 against the official remote code and sglang's routers: stored logits, hidden states, routes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dlmrt.checkpoint.load import load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.eager.executor import EagerDenoiser, dense_logits
from dlmrt.models import llada2
from dlmrt.ops import eager

GATE = 1e-4
BLOCKS = {"block_size": 8, "mask_token_id": 511}
MODELS = {
    "llada2_tiny": BLOCKS,
    "llada2_blockroute_indel": BLOCKS,
    "llada2_hd128_bf16": {"block_size": 32, "mask_token_id": 511},
}
CASES = [("llada2_tiny", "fwd0"), ("llada2_tiny", "fwd1"), ("llada2_blockroute_indel", "fwd0"),
         ("llada2_hd128_bf16", "fwd0")]  # fmt: skip


def ids_of(expected, name):
    return expected[name].raw().astype(np.int32)


def block_causal(length, block):
    rows = np.arange(length) // block
    return rows[None] <= rows[:, None]


def open_model(oracle, name):
    folder = oracle(name, **MODELS[name])
    return open_checkpoint(folder), read_tensors(folder / "expected.safetensors")


@pytest.mark.parametrize(("name", "case"), CASES)
def test_logits_equal_the_reference(oracle, name, case):
    checkpoint, expected = open_model(oracle, name)
    ids, block = ids_of(expected, f"{case}.input_ids"), checkpoint.config.diffusion.canvas_length
    params = load_params(checkpoint, dtype="float32")
    got = dense_logits(params, checkpoint.config, ids, block_causal(len(ids), block))
    assert np.abs(got - to_float32(expected[f"{case}.logits"])).max() <= GATE


@pytest.mark.parametrize(("name", "case"), CASES)
def test_cached_logits_equal_the_reference(oracle, name, case):
    checkpoint, expected = open_model(oracle, name)
    ids, block = ids_of(expected, f"{case}.input_ids"), checkpoint.config.diffusion.canvas_length
    denoiser = EagerDenoiser(load_params(checkpoint, dtype="float32"), checkpoint.config)
    rows = []
    for start in range(0, len(ids), block):
        rows.append(denoiser.forward(ids[start : start + block], None, None))
        denoiser.extend(ids[start : start + block])
    assert np.abs(np.concatenate(rows) - to_float32(expected[f"{case}.cached_logits"])).max() <= GATE


class Recording:
    """The eager operations, with a list of what some of them returned."""

    def __init__(self):
        self.hidden, self.routes, self.keys = [], [], []

    def __getattr__(self, name):
        return getattr(eager, name)

    def route_sigmoid(self, *args, **options):
        self.routes.append(eager.route_sigmoid(*args, **options))
        return self.routes[-1]

    def rms_norm(self, x, weight, **options):
        self.hidden.append(x)
        return eager.rms_norm(x, weight, **options)

    def qkv_packed(self, *args, **options):
        q, k, v = eager.qkv_packed(*args, **options)
        self.keys.append((k, v))
        return q, k, v


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llada2_tiny", "llada2_blockroute_indel", "llada2_hd128_bf16"])
def test_inner_values_equal_the_reference(oracle, name):
    """Hidden states after each layer, keys after rotation, values, routes; expert order is not compared."""
    checkpoint, expected = open_model(oracle, name)
    config = checkpoint.config
    ids = torch.from_numpy(ids_of(expected, "debug.input_ids").astype(np.int64))
    attend = eager.MaskedAttention(torch.from_numpy(block_causal(len(ids), config.diffusion.canvas_length)))
    ops = Recording()
    llada2.forward(ops, load_params(checkpoint, dtype="float32"), config, ids, torch.arange(len(ids)), attend)
    for layer_idx in range(config.num_layers):
        for got, kind in zip(ops.keys[layer_idx], "kv", strict=True):
            wanted = to_float32(expected[f"debug.{kind}.{layer_idx}"])
            np.testing.assert_allclose(got.transpose(0, 1).numpy(), wanted, atol=2e-5)
        after = ops.hidden[2 * layer_idx + 2]  # the next layer's first norm, or the final one
        np.testing.assert_allclose(after.numpy(), to_float32(expected[f"debug.hidden.{layer_idx + 1}"]), atol=5e-5)
    for number, (experts, weights) in enumerate(ops.routes):
        layer_idx = config.moe.num_dense_layers + number
        wanted_experts = expected[f"debug.topk_ids.{layer_idx}"].raw()
        order, wanted_order = experts.numpy().argsort(-1), wanted_experts.argsort(-1)
        assert (
            np.take_along_axis(experts.numpy(), order, -1) == np.take_along_axis(wanted_experts, wanted_order, -1)
        ).all()
        wanted = np.take_along_axis(to_float32(expected[f"debug.topk_w.{layer_idx}"]), wanted_order, -1)
        np.testing.assert_allclose(np.take_along_axis(weights.numpy(), order, -1), wanted, atol=1e-5)


@torch.inference_mode()
def test_bf16_stays_within_the_reference_distance(oracle):
    """Rows whose experts are the reference's, as other rows may differ by whole units; `expert_bias` stays float32."""
    checkpoint, expected = open_model(oracle, "llada2_hd128_bf16")
    config, params = checkpoint.config, load_params(checkpoint)
    bias = [name for name in params if name.endswith("expert_bias")]
    assert bias and all(params[name].dtype == torch.float32 for name in bias)
    assert params[llada2.EMBEDDING].dtype == torch.bfloat16
    ids = torch.from_numpy(ids_of(expected, "fwd0.input_ids").astype(np.int64))
    ops = Recording()
    attend = eager.MaskedAttention(torch.from_numpy(block_causal(len(ids), 32)))
    hidden = llada2.forward(ops, params, config, ids, torch.arange(len(ids)), attend)
    got = llada2.head(eager, params, config, hidden).float().numpy()
    ours = np.sort(ops.routes[0][0].numpy(), axis=-1)
    agrees = expected["fwd0.routing_agrees"].raw() & (
        ours == np.sort(expected["fwd0.topk_ids.1_bf16"].raw(), axis=-1)
    ).all(axis=-1)
    assert agrees.mean() > 0.8
    for name in ("logits", "logits_bf16"):
        wanted = to_float32(expected[f"fwd0.{name}"])[agrees]
        relative = np.linalg.norm(got[agrees] - wanted) / np.linalg.norm(wanted)
        print(f"{name}: {relative:.4f} over {agrees.sum()} of {len(agrees)} rows")
        assert relative <= 0.03


def test_router_formula_by_hand():
    """K33: the bias selects and does not weigh; weights are normalised, then scaled."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    identity, bias = torch.eye(4), torch.tensor([5.0, 0.0, 0.0, 0.0])
    options = {"top_k": 2, "capacity": None, "block_length": 4, "scaling_factor": 2.5}
    experts, weights = eager.route_sigmoid(logits, identity, bias, num_groups=1, num_kept_groups=1, **options)
    assert experts.tolist() == [[0, 3]]
    first, last = 0.5, 1 / (1 + np.exp(-3.0))
    np.testing.assert_allclose(
        weights.numpy(), [[2.5 * first / (first + last), 2.5 * last / (first + last)]], rtol=1e-6
    )
    # Two groups of two: without a bias the second group's sum wins, so expert 0 cannot be reached.
    experts, _ = eager.route_sigmoid(logits, identity, 0 * bias, num_groups=2, num_kept_groups=1, **options)
    assert experts.tolist() == [[3, 2]]
    experts, _ = eager.route_sigmoid(logits, identity, bias, num_groups=2, num_kept_groups=1, **options)
    assert experts.tolist() == [[0, 1]]
    one, weight = eager.route_sigmoid(
        logits, identity, 0 * bias, num_groups=1, num_kept_groups=1, **(options | {"top_k": 1})
    )
    assert one.tolist() == [[3]] and weight.item() == pytest.approx(2.5 * last)


def test_group_router_equals_the_reference(data):
    stored = read_tensors(data / "vectors" / "llada2_router_and_filters.safetensors")
    x, weight, bias = (
        torch.from_numpy(to_float32(stored[f"llada2_group_router.{name}"])) for name in ("x", "weight", "expert_bias")
    )
    experts, weights = eager.route_sigmoid(
        x, weight, bias, top_k=8, num_groups=8, num_kept_groups=4, capacity=None, block_length=32, scaling_factor=2.5
    )
    wanted = stored["llada2_group_router.topk_ids"].raw()
    order, wanted_order = experts.numpy().argsort(-1), wanted.argsort(-1)
    assert (np.take_along_axis(experts.numpy(), order, -1) == np.take_along_axis(wanted, wanted_order, -1)).all()
    np.testing.assert_allclose(
        np.take_along_axis(weights.numpy(), order, -1),
        np.take_along_axis(to_float32(stored["llada2_group_router.topk_weights"]), wanted_order, -1), atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["block_route", "block_route_tail", "block_route_ties"])
def test_block_router_equals_the_reference(data, name):
    """Exact ties go to the lower expert, and a ragged last block uses the rows that it has."""
    stored = read_tensors(data / "vectors" / "llada22_block_routing.safetensors")
    block, capacity, top_k = stored[f"{name}.block_size_capacity_topk"].raw().tolist()
    logits = torch.from_numpy(to_float32(stored[f"{name}.router_logits"]))
    experts, weights = eager.route_sigmoid(
        logits, torch.eye(logits.shape[1]), torch.from_numpy(to_float32(stored[f"{name}.expert_bias"])), top_k=top_k,
        num_groups=1, num_kept_groups=1, capacity=capacity, block_length=block, scaling_factor=1.0,
    )  # fmt: skip
    wanted = stored[f"{name}.topk_ids"].raw()
    order, wanted_order = experts.numpy().argsort(-1), wanted.argsort(-1)
    assert (np.take_along_axis(experts.numpy(), order, -1) == np.take_along_axis(wanted, wanted_order, -1)).all()
    np.testing.assert_allclose(
        np.take_along_axis(weights.numpy(), order, -1),
        np.take_along_axis(to_float32(stored[f"{name}.topk_weights_before_scaling"]), wanted_order, -1), atol=1e-6,
    )  # fmt: skip
    for number, start in enumerate(range(0, len(logits), block)):
        used = set(experts[start : start + block].flatten().tolist())
        assert used <= set(stored[f"{name}.admitted_ids"].raw()[number].tolist()) and len(used) <= capacity


@torch.inference_mode()
def test_tied_scores_go_to_the_lower_expert():
    x, zeros = torch.zeros(5, 4), torch.zeros(6, 4)
    experts, _ = eager.route_softmax(x, torch.ones(4), zeros, torch.ones(6), top_k=3, eps=1e-6)
    assert experts.tolist() == [[0, 1, 2]] * 5
    for capacity in (None, 4):
        experts, _ = eager.route_sigmoid(
            x, zeros, torch.zeros(6), top_k=3, num_groups=2, num_kept_groups=2, capacity=capacity, block_length=2,
            scaling_factor=1.0,
        )  # fmt: skip
        assert experts.tolist() == [[0, 1, 2]] * 5


@torch.inference_mode()
def test_moe_equals_all_experts_summed():
    """Dense sum over all experts, most with weight 0, and any leading axes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 6, generator=generator)
    gate, up = (torch.randn(4, 3, 6, generator=generator) for _ in range(2))
    down = torch.randn(4, 6, 3, generator=generator)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(10)]).reshape(2, 5, 2)
    weights = torch.rand(2, 5, 2, generator=generator)
    dense = torch.zeros(2, 5, 4).scatter(-1, experts, weights)
    wanted = sum(
        dense[..., e, None] * (torch.nn.functional.silu(x @ gate[e].T) * (x @ up[e].T) @ down[e].T) for e in range(4)
    )
    np.testing.assert_allclose(eager.moe(x, experts, weights, gate, up, down, activation="silu"), wanted, atol=1e-5)


def test_residual_of_zero_is_no_residual(oracle):
    """ORL's adapter on a LLaDA2 backbone: absent and zero residuals agree, others change the logits."""
    checkpoint, _ = open_model(oracle, "llada2_tiny")
    residual = dataclasses.replace(checkpoint.config.diffusion.residual, kind="gated_mlp", intermediate_size=24)
    diffusion = dataclasses.replace(checkpoint.config.diffusion, residual=residual)
    config = dataclasses.replace(checkpoint.config, diffusion=diffusion)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in llada2.tensor_shapes(config).items()
    }
    denoiser = EagerDenoiser(params, config)
    canvas, zero = np.arange(8, dtype=np.int32), np.zeros((8, config.hidden_size), np.float32)
    without = denoiser.forward(canvas, None, None)
    np.testing.assert_array_equal(denoiser.forward(canvas, zero, None), without)
    assert np.abs(denoiser.forward(canvas, zero + 1, None) - without).max() > 1e-3
