"""Spellings of config.json per architecture: what each family's released files say, as one flat set of keys.

A reader takes the parsed config.json and returns it with Qwen3's key names at the top level, sections `moe` and
`sliding` where the family has them, and the built-in row of its diffusion section: what released files leave unsaid.
Readers know keys and refuse declared features that the family's model file does not compute; sizes and contradictions
are the business of `dlmrt.models.config`. No value is converted: one of another type than its key wants is refused by
name (`dlmrt.models.typed`).

Conversions of Qwen, where the rows of one table differ in everything but the weights' shapes:

    SDAR, TraDo     SDARForCausalLM             blocks of 4 and more on a grid from position 0, no shift
    I-DLM           SDARForCausalLM             the same name with blocks of 1 to 3: causal, logit shift 1
    dLLM A2D        A2DQwen{2,3}LMHeadModel     grid from the prompt's end; the file does not say the block
    Fast-dLLM v2    Fast_dLLM_QwenForCausalLM   Qwen2.5, blocks of `bd_size` in sub-blocks, logit shift 1

Left out on purpose: class defaults of the upstream code where they differ from the released values; a missing key of
that kind is refused, since both readings would load.

Source: config files and classes named in docs/design.md: SDAR (JetAstra/SDAR c2041a8), I-DLM (its model configs, as
read in NVIDIA-NeMo/Automodel 36044ad), A2D and LLaDA2.x (ZHZisZZ/dllm ca17675; sglang 0.5.23 for LLaDA2.2), Fast-dLLM
v2 (Efficient-Large-Model/Fast_dLLM_v2_7B as sglang 0.5.23 reads it), DiffusionGemma (transformers 5.24.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dlmrt.errors import CheckpointError, UnsupportedModelError
from dlmrt.models.typed import checked, section_of, shown

Raw = Mapping[str, Any]
Reader = Callable[[Raw, str], tuple[dict[str, Any], dict[str, Any] | None]]

MOST_LAYERS = 10_000  # the config is walked layer by layer before the weights are looked at
# First ids behind the tokenizers of Qwen3 and Qwen2.5, where conversions put their mask.
_QWEN3_MASK, _QWEN2_MASK = 151_669, 151_665
_LARGEST_IDLM_BLOCK = 3  # trained with strides of 1 to 3; SDAR's smallest block is 4
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


def whole(raw: Raw, key: str, source: str) -> int:
    """The whole number under `key`, refused when absent or anything else."""
    number: int = checked(int, need(raw, key, source), f"{source}: {key}")
    return number


def _or_whole(raw: Raw, key: str, source: str, default: int) -> int:
    return default if raw.get(key) is None else whole(raw, key, source)


def _real(raw: Raw, key: str, source: str) -> float:
    number: float = checked(float, need(raw, key, source), f"{source}: {key}")
    return number


def refuse_other(raw: Raw, wanted: Mapping[str, Any], source: str, architecture: str) -> None:
    """Refuse a declared feature whose value is not the one that is implemented; absent and null mean that one."""
    for key, value in wanted.items():
        given = raw.get(key)
        if given is not None and (type(given) is not type(value) or given != value):
            raise UnsupportedModelError(
                f"{source}: {key}={shown(given)} is not implemented for {architecture} (only {value!r})"
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


def read_qwen2(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Qwen2 and Qwen2.5, auto-regressive likewise; their files do not mention the biases that they have."""
    wanted = {"attention_bias": True, "hidden_act": "silu", "use_sliding_window": False}
    refuse_other(raw, wanted, source, str(raw["architectures"][0]))
    _refuse_partial_rope(raw, source)
    return {**raw, "has_qkv_bias": True}, None


def read_sdar(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """SDAR, TraDo and I-DLM on Qwen3. The hub's SDAR files lack block and mask; I-DLM's have them."""
    canonical, _ = read_qwen3(raw, source)
    if _or_whole(raw, "block_size", source, default=4) <= _LARGEST_IDLM_BLOCK:
        return canonical, {
            "noise": "mask", "mask_token_id": _QWEN3_MASK, "logit_shift": 1, "in_block_attention": "causal",
            "context_attention": "causal", "block_anchor": "prompt_end",
        }  # fmt: skip
    return canonical, {
        "canvas_length": 4, "noise": "mask", "mask_token_id": _QWEN3_MASK, "context_attention": "block_causal",
        "block_anchor": "position_zero",
    }  # fmt: skip


def read_a2d_qwen3(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A2D of dLLM on Qwen3, trained as bd3lm."""
    canonical, _ = read_qwen3(raw, source)
    return canonical, _a2d_row(raw, source) | {"mask_token_id": _QWEN3_MASK}


def read_a2d_qwen2(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A2D of dLLM on Qwen2.5, trained as bd3lm."""
    canonical, _ = read_qwen2(raw, source)
    return canonical, _a2d_row(raw, source) | {"mask_token_id": _QWEN2_MASK}


def _a2d_row(raw: Raw, source: str) -> dict[str, Any]:
    """Checkpoints trained as mdlm have the same spelling and see the whole sequence, so the block is never guessed."""
    given = section_of(raw, "diffusion", source)
    if all(section.get(key) is None for section, key in ((raw, "block_size"), (given, "canvas_length"))):
        raise CheckpointError(
            f"{source}: the file of an A2D checkpoint does not say how it was trained; add the block, e.g. "
            '"block_size": 32, if as bd3lm; as mdlm, where every position sees all others, it is not supported'
        )
    return {"noise": "mask", "context_attention": "block_causal", "block_anchor": "prompt_end"}


def read_fast_dllm(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fast-dLLM v2, a conversion of Qwen2.5."""
    canonical, _ = read_qwen2(raw, source)
    return canonical, {
        "canvas_length": _or_whole(raw, "bd_size", source, default=32), "noise": "mask", "mask_token_id": _QWEN2_MASK,
        "logit_shift": 1, "context_attention": "block_causal", "block_anchor": "position_zero",
        "commit_rule": "sub_blocks",
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
    width = whole(raw, "moe_intermediate_size", source)
    # 0 stands for "as wide as the routed experts", as in the upstream code.
    shared = _or_whole(raw, "moe_shared_expert_intermediate_size", source, default=0)
    moe = {
        "num_experts": whole(raw, "num_experts", source),
        "num_experts_per_token": whole(raw, "num_experts_per_tok", source),
        "intermediate_size": width,
        "shared_intermediate_size": shared or width * whole(raw, "num_shared_experts", source),
        "num_dense_layers": whole(raw, "first_k_dense_replace", source),
        "num_groups": whole(raw, "n_group", source),
        "num_kept_groups": whole(raw, "topk_group", source),
        "scaling_factor": _real(raw, "routed_scaling_factor", source),
        "expert_capacity": raw.get("expert_capacity"),
    }
    canonical = {
        **raw,
        "moe": moe,
        # generate's default: both 156892
        "eos_token_id": raw.get("pad_token_id") if raw.get("eos_token_id") is None else raw["eos_token_id"],
        "rope_parameters": {"rope_theta": raw["rope_theta"], "partial_rotary_factor": _rotary_share(raw, source)},
    }
    ids = {key: raw[key] for key in ("delete_token_id", "split_token_id") if raw.get(key) is not None}
    return canonical, {
        "canvas_length": 32, "noise": "mask", "mask_token_id": 156895, "context_attention": "block_causal",
        "block_anchor": "position_zero", "commit_rule": "joint_threshold_indel" if ids else "joint_threshold", **ids,
    }  # fmt: skip


def _rotary_share(raw: Raw, source: str) -> float:
    if raw.get("partial_rotary_factor") is not None:
        return _real(raw, "partial_rotary_factor", source)
    head_dim = whole(raw, "head_dim", source)
    if head_dim <= 0:
        raise CheckpointError(f"{source}: head_dim is {head_dim}; it must be positive")
    return whole(raw, "rotary_dim", source) / head_dim


def read_diffusion_gemma(raw: Raw, source: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """DiffusionGemma's text part in both spellings: `global_head_dim`, or `per_layer_config`, which wins."""
    need(raw, "text_config", source)
    text = section_of(raw, "text_config", source)
    wanted = {
        "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
    }  # fmt: skip
    for section in (raw, text):
        refuse_other(section, wanted, source, "DiffusionGemmaForBlockDiffusion")
    ropes = section_of(text, "rope_parameters", source) or _GEMMA_ROPE
    moe = {
        "num_experts": whole(text, "num_experts", source),
        "num_experts_per_token": whole(text, "top_k_experts", source),
        "intermediate_size": whole(text, "moe_intermediate_size", source),
    }
    outer = {key: raw.get(key) for key in ("architectures", "dtype", "torch_dtype", "diffusion", "canvas_length")}
    eos = text.get("eos_token_id") if raw.get("eos_token_id") is None else raw["eos_token_id"]
    canonical = {
        **text,
        **{key: value for key, value in outer.items() if value is not None},
        "eos_token_id": eos,
        "tie_word_embeddings": True,
        "rope_parameters": section_of(ropes, _SLIDING, source),
        "moe": moe,
        "sliding": _gemma_layers(text, source) | {"full_rope": section_of(ropes, _FULL, source)},
        "logit_softcap": text.get("final_logit_softcapping", 30.0),
    }
    width = whole(text, "intermediate_size", source)
    adapter = _or_whole(text, "self_conditioning_size", source, default=0) or width
    return canonical, {
        "noise": "uniform", "commit_rule": "entropy_bound",
        "residual": {"kind": "gated_mlp", "scale_embedding": True, "intermediate_size": adapter},
    }  # fmt: skip


def _gemma_layers(text: Raw, source: str) -> dict[str, Any]:
    """Window, and which layers are full with what heads; the last layer always is."""
    num_layers = whole(text, "num_hidden_layers", source)
    if not 0 < num_layers <= MOST_LAYERS:
        raise CheckpointError(f"{source}: num_hidden_layers is {num_layers}; it must be within [1, {MOST_LAYERS}]")
    kinds = text.get("layer_types") or [_SLIDING if (i + 1) % 6 else _FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise UnsupportedModelError(
            f"{source}: layer_types must name {num_layers} layers, each {_FULL!r} or {_SLIDING!r}"
        )
    full = tuple(i for i, kind in enumerate(kinds) if kind == _FULL or i == num_layers - 1)
    heads = whole(text, "num_key_value_heads", source)
    shapes = {
        (
            _or_whole(text, "global_head_dim", source, default=512),
            _or_whole(text, "num_global_key_value_heads", source, default=heads),
        )
    }
    if text.get("per_layer_config") is not None:
        overrides = section_of(text, "per_layer_config", source)
        if set(overrides) != {str(i) for i in full}:
            raise UnsupportedModelError(f"{source}: per_layer_config must name the full-attention layers {list(full)}")
        width = whole(text, "head_dim", source)
        layers = [section_of(overrides, layer, f"{source}: per_layer_config") for layer in overrides]
        shapes = {
            (_or_whole(layer, "head_dim", source, width), _or_whole(layer, "num_key_value_heads", source, heads))
            for layer in layers
        }
    if len(shapes) != 1:
        raise UnsupportedModelError(f"{source}: full-attention layers of different head sizes are not implemented")
    head_dim, num_kv_heads = shapes.pop()
    return {
        "window": whole(text, "sliding_window", source), "full_layers": full, "full_head_dim": head_dim,
        "full_num_kv_heads": num_kv_heads,
    }  # fmt: skip


READERS: dict[str, Reader] = {
    "A2DQwen2LMHeadModel": read_a2d_qwen2,
    "A2DQwen3LMHeadModel": read_a2d_qwen3,
    "DiffusionGemmaForBlockDiffusion": read_diffusion_gemma,
    "Fast_dLLM_QwenForCausalLM": read_fast_dllm,
    "LLaDA2MoeModelLM": read_llada2,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "SDARForCausalLM": read_sdar,
}
