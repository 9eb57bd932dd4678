"""LLaDA2.x: a mixture of experts over Qwen3-like attention, block-causal, with partial rotary embedding.

2.0 and 2.1 route by groups of experts, 2.2 by blocks of rows that share a bounded set of experts
(`MoeConfig.expert_capacity`). Rows of one call start on a block of the grid, so that block routing sees whole blocks.
The residual adapter is ORL's; released checkpoints have none.

Legend: T rows, D hidden_size, E experts, z the residual (soft embedding of the previous step).

Source: LLaDA2.0/2.1 as stored in ZHZisZZ/dllm ca17675 dllm/pipelines/llada2, llada21; block routing of 2.2: eq. 1 of
its report as sglang 0.5.23 srt/models/llada2.py computes it (the bias counts, ties go to the lower expert).
"""

from __future__ import annotations

from collections.abc import Mapping

from dlmrt.models import layers
from dlmrt.models.config import ModelConfig
from dlmrt.models.layers import ADAPTER, Rename, adapter_shapes, has_residual
from dlmrt.ops.spec import Attend, Ops, Tensor

__all__ = [
    "ADAPTER", "CONTEXT_DIFFERS", "EMBEDDING", "FLOAT32", "HEAD", "JOINS_EXPERTS", "RENAMES", "ROUTER",
    "STOP_TOKENS", "UNQUANTIZED", "adapter_shapes", "forward", "has_residual", "head", "soft_embedding",
    "tensor_shapes",
]  # fmt: skip

EMBEDDING = "model.word_embeddings.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_PREFIX = r"(?:model\.language_model\.|model\.)"
RENAMES = (
    Rename(
        pattern=rf"{_PREFIX}(layers\..*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight",
        target=r"model.\1.\3_proj",
        index=2,
    ),
    Rename(pattern=r"model\.language_model\.((?!layers\..*\.experts\.\d).*)", target=r"model.\1"),
    Rename(pattern=r"model\.lm_head\.weight", target=HEAD),
    Rename(pattern=r".*\.inv_freq|v_head\..*", target=None),
)
JOINS_EXPERTS = False
STOP_TOKENS = ("<|role_end|>",)
UNQUANTIZED = r"\.mlp\.gate\.weight$|residual_adapter"
ROUTER = ".mlp.gate.weight"
CONTEXT_DIFFERS = False
FLOAT32 = (".expert_bias",)  # selects experts: rounded, it reroutes


def tensor_shapes(config: ModelConfig) -> layers.Shapes:
    """Name -> shape of every tensor; experts are stacked, which a file may hold one by one (`RENAMES`)."""
    moe = config.moe
    assert moe is not None
    d, h, e, f = config.hidden_size, config.head_dim, moe.num_experts, moe.intermediate_size
    shapes: layers.Shapes = {EMBEDDING: (config.vocab_size, d), FINAL_NORM: (d,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, d)
    for layer_idx in range(config.num_layers):
        p = f"model.layers.{layer_idx}."
        shapes |= {
            p + "input_layernorm.weight": (d,),
            p + "attention.query_key_value.weight": ((config.num_heads + 2 * config.num_kv_heads) * h, d),
            p + "attention.query_layernorm.weight": (h,),
            p + "attention.key_layernorm.weight": (h,),
            p + "attention.dense.weight": (d, config.num_heads * h),
            p + "post_attention_layernorm.weight": (d,),
        }
        if layer_idx < moe.num_dense_layers:
            shapes |= _mlp_shapes(p + "mlp.", d, config.intermediate_size)
            continue
        shapes |= {
            p + "mlp.gate.weight": (e, d),
            p + "mlp.gate.expert_bias": (e,),
            p + "mlp.experts.gate_proj": (e, f, d),
            p + "mlp.experts.up_proj": (e, f, d),
            p + "mlp.experts.down_proj": (e, d, f),
        }
        if moe.shared_intermediate_size:
            shapes |= _mlp_shapes(p + "mlp.shared_experts.", d, moe.shared_intermediate_size)
    return shapes | adapter_shapes(config)


def _mlp_shapes(prefix: str, d: int, f: int) -> layers.Shapes:
    return {
        prefix + "gate_proj.weight": (f, d), prefix + "up_proj.weight": (f, d), prefix + "down_proj.weight": (d, f),
    }  # fmt: skip


def forward(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, ids: Tensor, positions: Tensor, attend: Attend,
    *, z: Tensor | None = None, where: Tensor | None = None, is_context: bool = False,
) -> Tensor:  # fmt: skip
    """Final hidden states [T, D] of rows `ids` [T] at `positions` [T]; see `dlmrt.models.families.Family`."""
    x = layers.mix_residual(ops, params, config, ops.embed(params[EMBEDDING], ids), z, where)
    for layer_idx in range(config.num_layers):
        x = layers.run_layer(_layer, ops, params, config, layer_idx, x, positions, attend)
    return ops.rms_norm(x, params[FINAL_NORM], eps=config.rms_norm_eps)


def _layer(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, layer_idx: int, x: Tensor, positions: Tensor,
    attend: Attend,
) -> Tensor:  # fmt: skip
    eps, p = config.rms_norm_eps, f"model.layers.{layer_idx}."
    h = ops.rms_norm(x, params[p + "input_layernorm.weight"], eps=eps)
    q, k, v = ops.qkv_packed(
        h, params[p + "attention.query_key_value.weight"], params[p + "attention.query_layernorm.weight"],
        params[p + "attention.key_layernorm.weight"], positions, num_heads=config.num_heads,
        head_dim=config.head_dim, rope=config.rope, eps=eps,
    )  # fmt: skip
    x = ops.add(x, ops.linear(ops.attention(attend, layer_idx, q, k, v), params[p + "attention.dense.weight"]))
    h = ops.rms_norm(x, params[p + "post_attention_layernorm.weight"], eps=eps)
    return ops.add(x, _feed_forward(ops, params, config, p + "mlp.", layer_idx, h))


def _feed_forward(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, prefix: str, layer_idx: int, h: Tensor
) -> Tensor:
    """The MLP of a leading layer, or routed experts plus the shared one, which is not scaled."""
    moe, diffusion = config.moe, config.diffusion
    assert moe is not None and diffusion is not None
    if layer_idx < moe.num_dense_layers:
        return _gated_mlp(ops, params, prefix, h)
    experts, weights = ops.route_sigmoid(
        h, params[prefix + "gate.weight"], params[prefix + "gate.expert_bias"], top_k=moe.num_experts_per_token,
        num_groups=moe.num_groups, num_kept_groups=moe.num_kept_groups, capacity=moe.expert_capacity,
        block_length=diffusion.canvas_length, scaling_factor=moe.scaling_factor,
    )  # fmt: skip
    stacks = [params[f"{prefix}experts.{name}_proj"] for name in ("gate", "up", "down")]
    routed = ops.moe(h, experts, weights, *stacks, activation="silu")
    if not moe.shared_intermediate_size:
        return routed
    return ops.add(routed, _gated_mlp(ops, params, prefix + "shared_experts.", h))


def _gated_mlp(ops: Ops, params: Mapping[str, Tensor], prefix: str, h: Tensor) -> Tensor:
    return ops.gated_mlp(h, *(params[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down")))


def head(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, hidden: Tensor) -> Tensor:
    """Logits [T, V] of normalised hidden states [T, D]."""
    return ops.linear(hidden, params[EMBEDDING if config.tie_word_embeddings else HEAD])


def soft_embedding(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, probs: Tensor) -> Tensor:
    """The residual z [T, D] of next-step input: probs [T, V] times the input embedding."""
    return ops.soft_embedding(probs, params[EMBEDDING], scale=layers.embedding_scale(config))
