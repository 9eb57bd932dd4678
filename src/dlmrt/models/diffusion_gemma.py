"""DiffusionGemma, text part: Gemma layers with a causal encoder pass over final ids and a decoder pass over a canvas.

Both passes share every weight but the scalar at the end of each layer. The decoder pass also takes the previous step's
prediction (self-conditioning, the residual pathway of this family) and normalises its input, with or without one. The
dense MLP and the experts run side by side on the same rows, each with norms of its own.

Legend: T rows, D hidden_size, E experts, z the residual (soft embedding of the previous step).

Left out on purpose: images; vision tensors are skipped by name.

Source: transformers 5.24.0 models/diffusion_gemma (compared in tests/dlmrt/models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dlmrt.models import layers
from dlmrt.models.config import ModelConfig
from dlmrt.models.layers import Rename, has_residual
from dlmrt.ops.spec import Attend, Ops, Tensor

__all__ = [
    "ADAPTER", "CONTEXT_DIFFERS", "EMBEDDING", "FLOAT32", "HEAD", "JOINS_EXPERTS", "RENAMES", "ROUTER",
    "STOP_TOKENS", "UNQUANTIZED", "adapter_shapes", "forward", "has_residual", "head", "soft_embedding",
    "tensor_shapes",
]  # fmt: skip

DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
EMBEDDING = DECODER + "embed_tokens.weight"
HEAD = "lm_head.weight"  # always the embedding
FINAL_NORM = DECODER + "norm.weight"
ADAPTER = DECODER + "self_conditioning."
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2",
)  # fmt: skip

# Encoder tensors are the decoder's own, stored twice by some files, but for the layers' scalars.
_SHARED = r"model\.(?:decoder|encoder\.language_model)\."
RENAMES = (
    Rename(
        pattern=rf"{_SHARED}(layers\..*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight",
        target=DECODER + r"\1.\3_proj", index=2,
    ),
    Rename(pattern=rf"{_SHARED}(layers\..*\.experts)\.gate_up_proj", target=DECODER + r"\1.gate_proj", part=(0, 2)),
    Rename(pattern=rf"{_SHARED}(layers\..*\.experts)\.gate_up_proj", target=DECODER + r"\1.up_proj", part=(1, 2)),
    Rename(
        pattern=r"model\.encoder\.language_model\.((?!.*\.layer_scalar$|.*\.experts\.(?:\d|gate_up_proj)).*)",
        target=DECODER + r"\1",
    ),
    Rename(pattern=r"model\.encoder\.(?:vision_tower|embed_vision)\..*", target=None),
)  # fmt: skip
JOINS_EXPERTS = True
STOP_TOKENS = ("<turn|>",)
UNQUANTIZED = r"\.router\.|self_conditioning"
ROUTER = ".router.proj.weight"
CONTEXT_DIFFERS = True
FLOAT32 = ()


def tensor_shapes(config: ModelConfig) -> layers.Shapes:
    """Name -> shape of every tensor; experts are stacked, gate and up apart, whatever the file joins (`RENAMES`)."""
    moe = config.moe
    assert moe is not None
    d, e, f, width = config.hidden_size, moe.num_experts, moe.intermediate_size, config.intermediate_size
    shapes: layers.Shapes = {EMBEDDING: (config.vocab_size, d), FINAL_NORM: (d,)}
    for layer_idx in range(config.num_layers):
        p = f"{DECODER}layers.{layer_idx}."
        attention = config.attention(layer_idx)
        h, rows = attention.head_dim, attention.num_kv_heads * attention.head_dim
        shapes |= {f"{p}{name}.weight": (d,) for name in _NORMS}
        shapes |= {
            p + "layer_scalar": (1,),
            f"{ENCODER}layers.{layer_idx}.layer_scalar": (1,),
            p + "self_attn.q_proj.weight": (config.num_heads * h, d),
            p + "self_attn.k_proj.weight": (rows, d),
            p + "self_attn.o_proj.weight": (d, config.num_heads * h),
            p + "self_attn.q_norm.weight": (h,),
            p + "self_attn.k_norm.weight": (h,),
            p + "mlp.gate_proj.weight": (width, d),
            p + "mlp.up_proj.weight": (width, d),
            p + "mlp.down_proj.weight": (d, width),
            p + "router.proj.weight": (e, d),
            p + "router.scale": (d,),
            p + "router.per_expert_scale": (e,),
            p + "experts.gate_proj": (e, f, d),
            p + "experts.up_proj": (e, f, d),
            p + "experts.down_proj": (e, d, f),
        }
        if attention.window is not None:
            shapes[p + "self_attn.v_proj.weight"] = (rows, d)
    return shapes | adapter_shapes(config)


def adapter_shapes(config: ModelConfig) -> layers.Shapes:
    """Tensors of the self-conditioning module, which is this family's residual adapter."""
    if not has_residual(config):
        return {}
    assert config.diffusion is not None
    d, inner = config.hidden_size, config.diffusion.residual.intermediate_size
    return {
        ADAPTER + "pre_norm.weight": (d,),
        ADAPTER + "gate_proj.weight": (inner, d),
        ADAPTER + "up_proj.weight": (inner, d),
        ADAPTER + "down_proj.weight": (d, inner),
    }


def forward(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, ids: Tensor, positions: Tensor, attend: Attend,
    *, z: Tensor | None = None, where: Tensor | None = None, is_context: bool = False,
) -> Tensor:  # fmt: skip
    """Final hidden states [T, D] of rows `ids` [T] at `positions` [T]; see `dlmrt.models.families.Family`."""
    eps = config.rms_norm_eps
    x = ops.embed(params[EMBEDDING], ids, scale=math.sqrt(config.hidden_size))
    if not is_context:
        if z is not None:
            assert config.diffusion is not None
            adapter = [params[f"{ADAPTER}{name}.weight"] for name in ("pre_norm", "gate_proj", "up_proj", "down_proj")]
            x = ops.residual_mix(
                x, z, where, *adapter, alpha=config.diffusion.residual.alpha, eps=eps, activation="gelu_tanh",
                is_product_fp32=True,
            )  # fmt: skip
        x = ops.rms_norm(x, None, eps=eps)
    for layer_idx in range(config.num_layers):
        x = layers.run_layer(_layer, ops, params, config, layer_idx, x, positions, attend, is_context)
    return ops.rms_norm(x, params[FINAL_NORM], eps=eps, is_product_fp32=True)


def _layer(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, layer_idx: int, x: Tensor, positions: Tensor,
    attend: Attend, is_context: bool,
) -> Tensor:  # fmt: skip
    p = f"{DECODER}layers.{layer_idx}."
    h = _norm(ops, params, config, p + "input_layernorm", x)
    h = _attention(ops, params, config, layer_idx, h, positions, attend)
    x = ops.add(x, _norm(ops, params, config, p + "post_attention_layernorm", h))
    x = ops.add(x, _feed_forward(ops, params, config, p, x))
    side = ENCODER if is_context else DECODER
    return ops.scale(x, params[f"{side}layers.{layer_idx}.layer_scalar"])


def _norm(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, name: str, x: Tensor) -> Tensor:
    return ops.rms_norm(x, params[name + ".weight"], eps=config.rms_norm_eps, is_product_fp32=True)


def _attention(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, layer_idx: int, h: Tensor, positions: Tensor,
    attend: Attend,
) -> Tensor:  # fmt: skip
    """Unscaled attention; full layers have no value projection."""
    p = f"{DECODER}layers.{layer_idx}.self_attn."
    layer = config.attention(layer_idx)
    q, k, v = ops.qkv_normed(
        h, params[p + "q_proj.weight"], params[p + "k_proj.weight"],
        None if layer.window is None else params[p + "v_proj.weight"], params[p + "q_norm.weight"],
        params[p + "k_norm.weight"], positions, head_dim=layer.head_dim, rope=layer.rope, eps=config.rms_norm_eps,
    )  # fmt: skip
    return ops.linear(ops.attention(attend, layer_idx, q, k, v, scale=1.0), params[p + "o_proj.weight"])


def _feed_forward(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, p: str, x: Tensor) -> Tensor:
    """The dense MLP plus the experts, whose router reads the rows before any norm."""
    moe = config.moe
    assert moe is not None
    dense = ops.gated_mlp(
        _norm(ops, params, config, p + "pre_feedforward_layernorm", x),
        *(params[f"{p}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")), activation="gelu_tanh",
    )  # fmt: skip
    experts, weights = ops.route_softmax(
        x, params[p + "router.scale"], params[p + "router.proj.weight"], params[p + "router.per_expert_scale"],
        top_k=moe.num_experts_per_token, eps=config.rms_norm_eps,
    )  # fmt: skip
    routed = ops.moe(
        _norm(ops, params, config, p + "pre_feedforward_layernorm_2", x), experts, weights,
        *(params[f"{p}experts.{name}_proj"] for name in ("gate", "up", "down")), activation="gelu_tanh",
    )  # fmt: skip
    both = ops.add(
        _norm(ops, params, config, p + "post_feedforward_layernorm_1", dense),
        _norm(ops, params, config, p + "post_feedforward_layernorm_2", routed),
    )
    return _norm(ops, params, config, p + "post_feedforward_layernorm", both)


def head(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, hidden: Tensor) -> Tensor:
    """Logits [T, V] of normalised hidden states [T, D]."""
    logits = ops.linear(hidden, params[EMBEDDING])
    return logits if config.logit_softcap is None else ops.soft_cap(logits, cap=config.logit_softcap)


def soft_embedding(ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, probs: Tensor) -> Tensor:
    """The residual z [T, D] of next-step input: probs [T, V] times the scaled input embedding."""
    return ops.soft_embedding(probs, params[EMBEDDING], scale=layers.embedding_scale(config))
