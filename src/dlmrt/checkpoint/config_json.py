"""config.json of a ModelConfig, in the keys of each family's own released files plus our `diffusion` section.

The inverse of `dlmrt.models.config.parse_config`: reading it back gives the same ModelConfig.

Source: keys as in transformers 5.24.0 (Qwen3, DiffusionGemma), JetAstra/SDAR and inclusionAI's LLaDA2.x files.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dlmrt.models.config import ModelConfig, RopeConfig


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of `config`; `parse_config` gives `config` back."""
    raw = _WRITERS[config.architecture](config)
    if config.diffusion is not None:
        raw["canvas_length"] = config.diffusion.canvas_length
        raw["diffusion"] = dataclasses.asdict(config.diffusion)
    return raw


def _common(config: ModelConfig) -> dict[str, Any]:
    """Keys that all families have, at the place where they have them."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
    }


def _outer(config: ModelConfig, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [config.architecture],
        "model_type": model_type,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,  # the name before transformers 4.56
    }


def _blocks(config: ModelConfig) -> dict[str, Any]:
    """Upstream's names for the block and the mask."""
    if config.diffusion is None:
        return {}
    return {"block_size": config.diffusion.canvas_length, "mask_token_id": config.diffusion.mask_token_id}


_MODEL_TYPES = {
    "A2DQwen2LMHeadModel": "a2d-qwen2",
    "A2DQwen3LMHeadModel": "a2d-qwen3",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SDARForCausalLM": "sdar",
}


def _qwen3(config: ModelConfig) -> dict[str, Any]:
    return _outer(config, _MODEL_TYPES[config.architecture]) | _common(config) | _blocks(config) | {
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_json(config.rope),
        "hidden_act": "silu",
        "attention_bias": config.has_qkv_bias,
        "use_sliding_window": False,
        "use_cache": True,
    }  # fmt: skip


def _llada2(config: ModelConfig) -> dict[str, Any]:
    moe, diffusion = config.moe, config.diffusion
    assert moe is not None and diffusion is not None
    given = {
        "expert_capacity": moe.expert_capacity, "delete_token_id": diffusion.delete_token_id,
        "split_token_id": diffusion.split_token_id,
    }  # fmt: skip
    return _outer(config, "llada2_moe") | _common(config) | _blocks(config) | {
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
        "rotary_dim": int(config.head_dim * config.rope.partial_rotary_factor),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "num_shared_experts": -(-moe.shared_intermediate_size // moe.intermediate_size),
        "moe_shared_expert_intermediate_size": moe.shared_intermediate_size or None,
        "first_k_dense_replace": moe.num_dense_layers,
        "n_group": moe.num_groups,
        "topk_group": moe.num_kept_groups,
        "routed_scaling_factor": moe.scaling_factor,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "norm_head": False,
        "use_sliding_window": False,
    } | {key: value for key, value in given.items() if value is not None}  # fmt: skip


def _diffusion_gemma(config: ModelConfig) -> dict[str, Any]:
    """The text part. Without a `vision_config` transformers assumes one of its own."""
    moe, sliding, diffusion = config.moe, config.sliding, config.diffusion
    assert moe is not None and sliding is not None and diffusion is not None
    kinds = ["full_attention" if i in sliding.full_layers else "sliding_attention" for i in range(config.num_layers)]
    full = {"head_dim": sliding.full_head_dim, "num_key_value_heads": sliding.full_num_kv_heads}
    ropes = {"sliding_attention": config.rope, "full_attention": sliding.full_rope}
    text = _common(config) | {
        "model_type": "diffusion_gemma_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": "vision",
        "sliding_window": sliding.window,
        "layer_types": kinds,
        "per_layer_config": {str(layer_idx): full for layer_idx in sliding.full_layers},
        "rope_parameters": {kind: _rope_parameters(rope) for kind, rope in ropes.items()},
        "num_experts": moe.num_experts,
        "top_k_experts": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "final_logit_softcapping": config.logit_softcap,
        "self_conditioning_size": diffusion.residual.intermediate_size,
    }
    outer = {"text_config": text, "tie_word_embeddings": True, "eos_token_id": list(config.eos_token_ids) or None}
    return _outer(config, "diffusion_gemma") | outer


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    partial = {} if rope.partial_rotary_factor == 1.0 else {"partial_rotary_factor": rope.partial_rotary_factor}
    return {"rope_theta": rope.theta, "rope_type": rope.kind, **partial}


_WRITERS = {
    "DiffusionGemmaForBlockDiffusion": _diffusion_gemma,
    "LLaDA2MoeModelLM": _llada2,
    **dict.fromkeys(_MODEL_TYPES, _qwen3),
}


def _rope_to_json(rope: RopeConfig) -> dict[str, Any] | None:
    """The keys that belong to the kind: a key of another kind is refused when read back."""
    kind = rope.kind
    keys = {
        "default": (),
        "proportional": (),
        "linear": ("factor",),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    }[kind]
    values = {key: getattr(rope, key) for key in keys}
    return {"rope_type": kind, **{k: v for k, v in values.items() if v is not None}} if keys else None
