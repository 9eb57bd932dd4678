"""The models whose shapes the cuda executor is checked and timed with, as configurations for random weights.

Source: Qwen3-4B and LLaDA2.1-mini from their public configuration files; DiffusionGemma-26B-A4B from a public copy of
its configuration, sizes of its tensors cross-checked.
"""

from __future__ import annotations

from dlmrt.models.config import DiffusionConfig, ModelConfig, MoeConfig, ResidualConfig, RopeConfig, SlidingConfig

QWEN3_4B = ModelConfig(
    architecture="Qwen3ForCausalLM", hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=8192, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6), tie_word_embeddings=True, eos_token_ids=(151_645,), pad_token_id=None,
    bos_token_id=None, dtype="bfloat16",
    diffusion=DiffusionConfig(canvas_length=32, noise="mask", mask_token_id=151_669),
)  # fmt: skip
LLADA2_MINI = ModelConfig(
    architecture="LLaDA2MoeModelLM", hidden_size=2048, intermediate_size=5120, num_layers=20, num_heads=16,
    num_kv_heads=4, head_dim=128, vocab_size=157_184, max_position_embeddings=8192, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=6e5, partial_rotary_factor=0.5), tie_word_embeddings=False, eos_token_ids=(156_892,),
    pad_token_id=None, bos_token_id=None, dtype="bfloat16",
    moe=MoeConfig(
        num_experts=256, num_experts_per_token=8, intermediate_size=512, shared_intermediate_size=512,
        num_dense_layers=1, num_groups=8, num_kept_groups=4, scaling_factor=2.5,
    ),
    diffusion=DiffusionConfig(
        canvas_length=32, noise="mask", mask_token_id=156_895, context_attention="block_causal",
        block_anchor="position_zero",
    ),
)  # fmt: skip
GEMMA_26B = ModelConfig(
    architecture="DiffusionGemmaForBlockDiffusion", hidden_size=2816, intermediate_size=2112, num_layers=30,
    num_heads=16, num_kv_heads=8, head_dim=256, vocab_size=262_144, max_position_embeddings=8192, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0), tie_word_embeddings=True, eos_token_ids=(1, 106), pad_token_id=0, bos_token_id=2,
    dtype="bfloat16", logit_softcap=30.0,
    moe=MoeConfig(num_experts=128, num_experts_per_token=8, intermediate_size=704),
    sliding=SlidingConfig(
        window=1024, full_layers=(5, 11, 17, 23, 29), full_head_dim=512, full_num_kv_heads=2,
        full_rope=RopeConfig(theta=1e6, kind="proportional", partial_rotary_factor=0.25),
    ),
    diffusion=DiffusionConfig(
        canvas_length=256, noise="uniform", commit_rule="entropy_bound",
        residual=ResidualConfig(kind="gated_mlp", intermediate_size=2112, alpha=1.0, scale_embedding=True),
    ),
)  # fmt: skip
