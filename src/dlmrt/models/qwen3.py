"""Qwen3 and Qwen2 with the options of `DiffusionConfig`: QwenDLM, SDAR, A2D, I-DLM and Fast-dLLM v2 are settings of it.

The functions take the operations as their first argument and weights as a mapping from Hugging Face tensor names, so
the same text runs in torch, trains, and is recorded for the native executors. Visibility, positions and the cache live
in `attend`; nothing here knows whether a row is prompt or canvas.

Legend: T rows, D hidden_size, F intermediate_size, V vocab_size, z the residual (soft embedding of the previous step).

Source: transformers 5.24.0 models/qwen3 and models/qwen2 for the backbones; the residual pathway is ORL's
(`dlmrt.models.layers`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dlmrt.models import layers
from dlmrt.models.config import ModelConfig
from dlmrt.models.layers import ADAPTER, adapter_shapes, has_residual
from dlmrt.ops.spec import Attend, Ops, Tensor

__all__ = [
    "ADAPTER", "CONTEXT_DIFFERS", "EMBEDDING", "FLOAT32", "HEAD", "JOINS_EXPERTS", "RENAMES", "ROUTER",
    "STOP_TOKENS", "UNQUANTIZED", "adapter_shapes", "forward", "has_residual", "head", "soft_embedding",
    "tensor_shapes",
]  # fmt: skip

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
RENAMES = ()
JOINS_EXPERTS = False
STOP_TOKENS = ()
UNQUANTIZED = r"residual_adapter"
ROUTER = ""
CONTEXT_DIFFERS = False
FLOAT32 = ()


def tensor_shapes(config: ModelConfig) -> layers.Shapes:
    """Name -> shape of every tensor the checkpoint must hold, no more and no fewer."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: layers.Shapes = {EMBEDDING: (config.vocab_size, d), FINAL_NORM: (d,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, d)
    for layer_idx in range(config.num_layers):
        p = f"model.layers.{layer_idx}."
        shapes |= {
            p + "input_layernorm.weight": (d,),
            p + "self_attn.q_proj.weight": (config.num_heads * h, d),
            p + "self_attn.k_proj.weight": (config.num_kv_heads * h, d),
            p + "self_attn.v_proj.weight": (config.num_kv_heads * h, d),
            p + "self_attn.o_proj.weight": (d, config.num_heads * h),
            p + "post_attention_layernorm.weight": (d,),
            p + "mlp.gate_proj.weight": (f, d),
            p + "mlp.up_proj.weight": (f, d),
            p + "mlp.down_proj.weight": (d, f),
        }
        if config.has_qkv_bias:
            shapes |= {
                p + "self_attn.q_proj.bias": (config.num_heads * h,),
                p + "self_attn.k_proj.bias": (config.num_kv_heads * h,),
                p + "self_attn.v_proj.bias": (config.num_kv_heads * h,),
            }
        else:
            shapes |= {p + "self_attn.q_norm.weight": (h,), p + "self_attn.k_norm.weight": (h,)}
    return shapes | adapter_shapes(config)


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
    q, k, v = _qkv(ops, params, config, p + "self_attn.", h, positions)
    x = ops.add(x, ops.linear(ops.attention(attend, layer_idx, q, k, v), params[p + "self_attn.o_proj.weight"]))
    h = ops.rms_norm(x, params[p + "post_attention_layernorm.weight"], eps=eps)
    mlp = [params[f"{p}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
    return ops.add(x, ops.gated_mlp(h, *mlp))


def _qkv(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, p: str, h: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wq, wk, wv = (params[f"{p}{name}_proj.weight"] for name in ("q", "k", "v"))
    if config.has_qkv_bias:
        bq, bk, bv = (params[f"{p}{name}_proj.bias"] for name in ("q", "k", "v"))
        return ops.qkv_biased(h, wq, wk, wv, bq, bk, bv, positions, head_dim=config.head_dim, rope=config.rope)
    return ops.qkv(
        h, wq, wk, wv, params[p + "q_norm.weight"], params[p + "k_norm.weight"], positions, head_dim=config.head_dim,
        rope=config.rope, eps=config.rms_norm_eps,
    )  # fmt: skip


def head(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, hidden: Tensor) -> Tensor:
    """Logits [T, V] of normalised hidden states [T, D]."""
    return ops.linear(hidden, params[EMBEDDING if config.tie_word_embeddings else HEAD])


def soft_embedding(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, probs: Tensor) -> Tensor:
    """The residual z [T, D] of next-step input: probs [T, V] times the input embedding."""
    return ops.soft_embedding(probs, params[EMBEDDING], scale=layers.embedding_scale(config))
