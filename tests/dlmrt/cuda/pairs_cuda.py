"""Tiny models on the cuda executor, in Triton's interpreter with loops on the stand-in driver, beside the slow loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dlmrt.cuda.executor import CudaDenoiser
from dlmrt.decode.loop import BlockEvent, LoopRequest, StepEvent, decode
from dlmrt.decode.native import run_loop
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import resolve
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models.config import DiffusionConfig, MoeConfig, ResidualConfig, RopeConfig, SlidingConfig
from dlmrt.models.families import family_of
from dlmrt.testing import tiny_config
from dlmrt.types import DecodeConfig


def small_config(**diffusion):
    """One layer, two heads that share keys, canvases of four: as few programs as the interpreter needs."""
    config = tiny_config()
    return replace(
        config, num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=262,
        diffusion=replace(config.diffusion, canvas_length=4, **diffusion),
    )  # fmt: skip


UNIFORM_SHIFTED = {"noise": "uniform", "mask_token_id": None, "logit_shift": 1}
ADAPTER = ResidualConfig(kind="gated_mlp", intermediate_size=24, where="masked", alpha=0.3)
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


def draw_params(config, seed=0):
    """Random weights; predictions are spread over confidences, not saturated at 1."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in family_of(config).tensor_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        params[name] = 1 + 0.2 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)
        if name == family_of(config).EMBEDDING:
            params[name] = 0.7 * values
    return {name: torch.from_numpy(values) for name, values in params.items()}


def make_cuda(config, params, formats=None):
    return CudaDenoiser(params, config, dtype="float32", device="cpu", mode="loop", formats=formats)


def make_eager(config, params):
    return EagerDenoiser(params, config)


def request_for(config, prompt, **settings):
    """A loop request with `settings` of DecodeConfig."""
    banned = banned_ids(config, range(config.vocab_size))
    return LoopRequest(
        prompt_S=np.asarray(prompt, dtype=np.int32), settings=resolve(DecodeConfig(**settings), config, {}),
        diffusion=config.diffusion, banned=banned,
        allowed=np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), banned),
    )  # fmt: skip


def fast(denoiser, request):
    return list(run_loop(denoiser, request, keeps_residual=True))


def slow(denoiser, request):
    return list(decode(denoiser, request))


def assert_same(fast_events, slow_events):
    """Token for token, forward for forward; statistics to float32 rounding."""
    assert [type(event) for event in fast_events] == [type(event) for event in slow_events]
    for mine, other in zip(fast_events, slow_events, strict=True):
        if isinstance(mine, StepEvent):
            for name in ("canvas_L", "is_unresolved_L", "committed_L"):
                assert np.array_equal(getattr(mine.state, name), getattr(other.state, name)), name
            assert np.array_equal(mine.after.canvas_L, other.after.canvas_L)
            assert np.array_equal(mine.prediction.token_L, other.prediction.token_L)
            for name in ("confidence_L", "argmax_confidence_L", "entropy_L"):
                assert np.allclose(getattr(mine.prediction, name), getattr(other.prediction, name), atol=2e-5), name
            assert (mine.state.residual_LD is None) == (other.state.residual_LD is None)
            if mine.state.residual_LD is not None:
                assert np.allclose(mine.state.residual_LD, other.state.residual_LD, atol=2e-5)
        elif isinstance(mine, BlockEvent):
            assert mine.answer == other.answer and mine.end_reason == other.end_reason
            assert [counts(f) for f in mine.forwards] == [counts(f) for f in other.forwards]
        else:
            assert mine == other


def counts(forward):
    return forward.kind, forward.step, forward.num_rows, forward.num_finalised, forward.num_edits
