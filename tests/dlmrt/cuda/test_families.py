"""Every family on the cuda executor equals torch: prompt and canvas forward, then a second canvas behind a commit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs_cuda import draw_params, make_cuda, make_eager, small_config
from stand_in import GraphRunner

import dlmrt.cuda.executor
from dlmrt.cuda import programs
from dlmrt.cuda.runners import Launches
from dlmrt.models.config import DiffusionConfig, MoeConfig, ResidualConfig, RopeConfig, SlidingConfig

MASK = small_config().diffusion.mask_token_id
MOE = MoeConfig(
    num_experts=8, num_experts_per_token=2, intermediate_size=12, shared_intermediate_size=8, num_dense_layers=1,
    num_groups=4, num_kept_groups=2, scaling_factor=2.5,
)  # fmt: skip
LLADA2 = replace(
    small_config(context_attention="block_causal", block_anchor="position_zero"), architecture="LLaDA2MoeModelLM",
    num_layers=2, tie_word_embeddings=False, rope=RopeConfig(partial_rotary_factor=0.5), moe=MOE,
)  # fmt: skip
GEMMA = replace(
    small_config(), architecture="DiffusionGemmaForBlockDiffusion", num_layers=2, num_kv_heads=1, logit_softcap=8.0,
    moe=MoeConfig(num_experts=8, num_experts_per_token=2, intermediate_size=12),
    sliding=SlidingConfig(
        window=5, full_layers=(1,), full_head_dim=16, full_num_kv_heads=2,
        full_rope=RopeConfig(theta=1e6, kind="proportional", partial_rotary_factor=0.25),
    ),
    diffusion=DiffusionConfig(
        canvas_length=4, noise="uniform", commit_rule="entropy_bound",
        residual=ResidualConfig(kind="gated_mlp", intermediate_size=24, alpha=1.0, scale_embedding=True),
    ),
)  # fmt: skip
FAMILIES = {
    "llada2, groups of experts": LLADA2,
    "llada2, experts by block": replace(LLADA2, moe=replace(MOE, expert_capacity=3)),
    "diffusion_gemma": GEMMA,
    "qwen2, biases": replace(small_config(), has_qkv_bias=True),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(dlmrt.cuda.executor, "MAX_ROWS", 4)
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: Launches(steps))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_forwards_equal_torch(name):
    config = FAMILIES[name]
    params = draw_params(config)
    mine, reference = make_cuda(config, params), make_eager(config, params)
    canvas = np.array([7, 3, 250, 9], dtype=np.int32)
    z = None
    if mine.has_residual:
        probs = torch.softmax(torch.randn(4, config.vocab_size), -1).numpy()
        z = reference.soft_embedding(probs)
        assert np.allclose(mine.soft_embedding(probs), z, atol=1e-5)
    for each in (mine, reference):
        each.extend(np.arange(8, dtype=np.int32))
    got, wanted = mine.forward(canvas, z, None), reference.forward(canvas, z, None)
    assert np.allclose(got, wanted, atol=2e-4 * np.abs(wanted).max()), np.abs(got - wanted).max()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_loop_of_every_family_is_captured_as_it_is_listed(name, monkeypatch):
    from test_lower import calls

    from dlmrt.cuda.lower import bounded, lower
    from dlmrt.cuda.weights import Packed
    from dlmrt.program.forwards import Formats
    from dlmrt.program.loop import LoopOptions, record_loop

    config = FAMILIES[name]
    options = LoopOptions(
        canvas_length=4, prefill_chunk=16, commit_rule=config.diffusion.commit_rule, is_greedy=False,
        use_residual=config.diffusion.residual.kind != "none",
    )  # fmt: skip
    program = record_loop(config, Formats(), options, capacity=512)
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: GraphRunner(steps))
    params = {key: Packed(values=values) for key, values in draw_params(config).items()}
    store = programs.ProgramStore(config, params, device=torch.device("cpu"), mode="loop")
    store.reserve(512, 0)
    runner = store.get("it", lambda: program).runner
    assert runner.driver.tree(runner.graph.graph) == calls(bounded(lower(program, config).program).body)
