"""Spellings of config.json per architecture: what each family's released files say, as one flat set of keys.

A reader takes the parsed config.json and returns it with Qwen3's key names at the top level, sections `moe` and
`sliding` where the family has them, and the built-in row of its diffusion section: what released files leave unsaid.
Readers know keys and refuse declared features that the family's model file does not compute; sizes and contradictions
are the business of `dlmrt.models.config`.

Left out on purpose: class defaults of the upstream code where they differ from the released values; a missing key of
that kind is refused, since both readings would load.

Source: config files and classes named in docs/design.md: SDAR (JetAstra/SDAR c2041a8), LLaDA2.x (inclusionAI, as stored
in ZHZisZZ/dllm ca17675; sglang 0.5.23 for 2.2), DiffusionGemma (transformers 5.24.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dlmrt.errors import CheckpointError, UnsupportedModelError
from dlmrt.models.typed import section_of

Raw = Mapping[str, Any]
Reader = Callable[[Raw, str], tuple[dict[str, Any], dict[str, Any] | None]]

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_GEMMA_ROPE = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def need(raw: Raw, key: str, source: str) -> Any:
    """The value of `key`, refused when absent."""
    if raw.get(key) is None:
        raise CheckpointError(f"{source} has no {key!r}; add it, it is never guessed")
    return raw[key]


def refuse_other(raw: Raw, wanted: Mapping[str, Any], source: str, architecture: str) -> None:
    """Refuse a declared feature whose value is not the one that is implemented; absent and null mean that one."""
    for key, value in wanted.items():
        if raw.get(key, value) not in (value, None):
            raise UnsupportedModelError(
                f"{source}: {key}={raw[key]!r} is not implemented for {architecture} (only {value!r})"
            )


def _refuse_partial_rope(raw: Raw, source: str) -> None:
    section = {**section_of(raw, "rope_scaling", source), **section_of(raw, "rope_parameters", source)}
    for given in (raw, section):
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{source}: partial_rotary_factor is not implemented for this architecture")


def read_qwen3(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Qwen3, an ordinary auto-regressive model unless config.json has a `diffusion` section."""
    wanted = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    refuse_other(raw, wanted, source, str(raw["architectures"][0]))
    _refuse_partial_rope(raw, source)
    return dict(raw), None


def read_sdar(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """SDAR and TraDo: Qwen3 with blocks on a grid from position 0. The hub's config.json lacks block and mask."""
    canonical, _ = read_qwen3(raw, source)
    return canonical, {
        "canvas_length": 4, "noise": "mask", "mask_token_id": 151669, "context_attention": "block_causal",
        "block_anchor": "position_zero",
    }  # fmt: skip


def read_llada2(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """LLaDA2.0 and 2.1, and 2.2 by its `expert_capacity` and edit ids."""
    wanted = {
        "hidden_act": "silu", "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True, "norm_head": False,
        "score_function": "sigmoid", "norm_topk_prob": True, "moe_router_enable_expert_bias": True,
        "use_sliding_window": False, "rope_scaling": None,
    }  # fmt: skip
    for key in ("use_bias", "rope_theta"):  # the class defaults are not the released values
        need(raw, key, source)
    refuse_other(raw, wanted, source, "LLaDA2MoeModelLM")
    width = int(need(raw, "moe_intermediate_size", source))
    shared = raw.get("moe_shared_expert_intermediate_size") or width * int(need(raw, "num_shared_experts", source))
    moe = {
        "num_experts": int(need(raw, "num_experts", source)),
        "num_experts_per_token": int(need(raw, "num_experts_per_tok", source)),
        "intermediate_size": width,
        "shared_intermediate_size": int(shared),
        "num_dense_layers": int(need(raw, "first_k_dense_replace", source)),
        "num_groups": int(need(raw, "n_group", source)),
        "num_kept_groups": int(need(raw, "topk_group", source)),
        "scaling_factor": float(need(raw, "routed_scaling_factor", source)),
        "expert_capacity": raw.get("expert_capacity"),
    }
    pad = raw.get("pad_token_id")
    canonical = {
        **raw,
        "moe": moe,
        "eos_token_id": pad
        if raw.get("eos_token_id") is None
        else raw["eos_token_id"],  # generate's default: both 156892
        "rope_parameters": {"rope_theta": raw["rope_theta"], "partial_rotary_factor": _rotary_share(raw, source)},
    }
    ids = {key: raw[key] for key in ("delete_token_id", "split_token_id") if raw.get(key) is not None}
    return canonical, {
        "canvas_length": 32, "noise": "mask", "mask_token_id": 156895, "context_attention": "block_causal",
        "block_anchor": "position_zero", "commit_rule": "joint_threshold_indel" if ids else "joint_threshold", **ids,
    }  # fmt: skip


def _rotary_share(raw: Raw, source: str) -> float:
    if raw.get("partial_rotary_factor") is not None:
        return float(raw["partial_rotary_factor"])
    return float(need(raw, "rotary_dim", source) / need(raw, "head_dim", source))


def read_diffusion_gemma(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """DiffusionGemma's text part in both spellings: `global_head_dim`, or `per_layer_config`, which wins."""
    text = need(raw, "text_config", source)
    wanted = {
        "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
    }  # fmt: skip
    for section in (raw, text):
        refuse_other(section, wanted, source, "DiffusionGemmaForBlockDiffusion")
    ropes = text.get("rope_parameters") or _GEMMA_ROPE
    moe = {
        "num_experts": int(need(text, "num_experts", source)),
        "num_experts_per_token": int(need(text, "top_k_experts", source)),
        "intermediate_size": int(need(text, "moe_intermediate_size", source)),
    }
    outer = {key: raw.get(key) for key in ("architectures", "dtype", "torch_dtype", "diffusion", "canvas_length")}
    eos = text.get("eos_token_id") if raw.get("eos_token_id") is None else raw["eos_token_id"]
    canonical = {
        **text,
        **{key: value for key, value in outer.items() if value is not None},
        "eos_token_id": eos,
        "tie_word_embeddings": True,
        "rope_parameters": ropes.get(_SLIDING),
        "moe": moe,
        "sliding": _gemma_layers(text, source) | {"full_rope": ropes.get(_FULL)},
        "logit_softcap": text.get("final_logit_softcapping", 30.0),
    }
    adapter = int(text.get("self_conditioning_size") or need(text, "intermediate_size", source))
    return canonical, {
        "noise": "uniform", "commit_rule": "entropy_bound",
        "residual": {"kind": "gated_mlp", "scale_embedding": True, "intermediate_size": adapter},
    }  # fmt: skip


def _gemma_layers(text: Raw, source: str) -> dict[str, Any]:
    """Window, and which layers are full with what heads; the last layer always is."""
    num_layers = int(need(text, "num_hidden_layers", source))
    kinds = text.get("layer_types") or [_SLIDING if (i + 1) % 6 else _FULL for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {_FULL, _SLIDING}:
        raise UnsupportedModelError(
            f"{source}: layer_types must name {num_layers} layers, each {_FULL!r} or {_SLIDING!r}"
        )
    full = tuple(i for i, kind in enumerate(kinds) if kind == _FULL or i == num_layers - 1)
    heads = int(need(text, "num_key_value_heads", source))
    default = (int(text.get("global_head_dim") or 512), int(text.get("num_global_key_value_heads") or heads))
    overrides = text.get("per_layer_config")
    shapes = {default}
    if overrides is not None:
        given = {int(layer): values for layer, values in overrides.items()}
        if set(given) != set(full):
            raise UnsupportedModelError(f"{source}: per_layer_config must name the full-attention layers {list(full)}")
        width = int(need(text, "head_dim", source))
        shapes = {
            (int(given[i].get("head_dim") or width), int(given[i].get("num_key_value_heads") or heads)) for i in full
        }
    if len(shapes) != 1:
        raise UnsupportedModelError(f"{source}: full-attention layers of different head sizes are not implemented")
    head_dim, num_kv_heads = shapes.pop()
    return {
        "window": int(need(text, "sliding_window", source)), "full_layers": full, "full_head_dim": head_dim,
        "full_num_kv_heads": num_kv_heads,
    }  # fmt: skip


READERS: dict[str, Reader] = {
    "DiffusionGemmaForBlockDiffusion": read_diffusion_gemma,
    "LLaDA2MoeModelLM": read_llada2,
    "Qwen3ForCausalLM": read_qwen3,
    "SDARForCausalLM": read_sdar,
}
