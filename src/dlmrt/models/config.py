"""ModelConfig: what a checkpoint's config.json says, with built-in rows per architecture.

A family of diffusion language models on one backbone differs by `DiffusionConfig` alone; model code reads these fields
and never the architecture's name. Order of belief: config.json's `diffusion` section, upstream keys that mean the
same (`block_size`, `canvas_length`, `mask_token_id`), the built-in row of the architecture. What none of them says is
refused with the key to add: a guessed mask id or shift trains or decodes garbage without an error.

Source: ours; upstream keys from the public config files named in docs/design.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from dlmrt.errors import CheckpointError, UnsupportedModelError
from dlmrt.models.typed import build, check_types, checked, section_of, shown
from dlmrt.models.upstream import MOST_LAYERS, READERS, need

Noise = Literal["mask", "uniform"]
InBlockAttention = Literal["bidirectional", "causal"]
ContextAttention = Literal["causal", "block_causal"]
BlockAnchor = Literal["prompt_end", "position_zero"]
ResidualKind = Literal["none", "gated_mlp"]
ResidualWhere = Literal["all", "masked"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """The residual pathway: how the previous step's prediction enters the next step (ORL, eq. of the input)."""

    kind: ResidualKind = "none"  # none: no pathway; gated_mlp: e = E[x] + alpha * down(act(gate n(z)) * up n(z))
    where: ResidualWhere = "all"  # canvas rows that receive it: all, or only those that hold the mask token
    alpha: float = 1.0  # factor of the adapter's output
    scale_embedding: bool = False  # multiply the soft embedding by sqrt(hidden_size) (Gemma)
    intermediate_size: int = 0  # width of the adapter; 0 when kind is none


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What makes a backbone a diffusion language model.

    Example: ``DiffusionConfig(canvas_length=32, noise="mask", mask_token_id=3)``.
    """

    canvas_length: int  # positions denoised together (the block)
    noise: Noise  # undecided positions hold the mask token, or fresh uniform ids
    mask_token_id: int | None = None  # required for noise="mask", absent for "uniform"
    logit_shift: int = 0  # 0: row i predicts position i; 1: row i - 1 does
    in_block_attention: InBlockAttention = "bidirectional"
    context_attention: ContextAttention = "causal"  # how committed tokens see each other
    block_anchor: BlockAnchor = "prompt_end"  # where the block grid starts
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    commit_rule: str = "threshold"  # default rule of decode.rules
    delete_token_id: int | None = None  # predicted where a position is to go; only with rule joint_threshold_indel
    split_token_id: int | None = None  # predicted where a position is missing before this one; likewise


# Next-token prediction as the smallest diffusion model: a canvas of one slot, filled by the last committed row. A
# checkpoint says so in its `diffusion` section; without a section nothing is guessed.
AUTOREGRESSIVE = DiffusionConfig(canvas_length=1, noise="uniform", logit_shift=1, in_block_attention="causal")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and the declared scaling. Frequencies are always computed in float64."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    partial_rotary_factor: float = 1.0  # share of a head that turns: its first part; proportional: of the frequencies
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts. Example: ``MoeConfig(num_experts=256, num_experts_per_token=8, intermediate_size=512)``."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # width of one expert
    shared_intermediate_size: int = 0  # width of the expert that every token takes; 0: none
    num_dense_layers: int = 0  # leading layers without experts
    num_groups: int = 1  # a token picks from its best groups of neighbouring experts only
    num_kept_groups: int = 1
    expert_capacity: int | None = None  # experts that one block may use; groups are then not used
    scaling_factor: float = 1.0  # of the routed experts' sum


@dataclass(frozen=True, kw_only=True)
class SlidingConfig:
    """Layers with a window among layers that see everything, which may have heads of another size."""

    window: int  # positions that a row of a sliding layer sees, itself included
    full_layers: tuple[int, ...]  # all others slide
    full_head_dim: int
    full_num_kv_heads: int
    full_rope: RopeConfig


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Attention of one layer."""

    head_dim: int
    num_kv_heads: int
    rope: RopeConfig
    window: int | None  # None: no limit


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and conventions of one checkpoint. Sizes are counts, ids are token ids."""

    architecture: str  # architectures[0] of config.json
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]  # any of them ends an answer
    pad_token_id: int | None
    bos_token_id: int | None
    dtype: str  # dtype the checkpoint declares: float32 | bfloat16 | float16
    diffusion: DiffusionConfig | None  # None: an ordinary auto-regressive checkpoint
    moe: MoeConfig | None = None
    sliding: SlidingConfig | None = None  # None: every layer sees everything
    logit_softcap: float | None = None  # logits are cap * tanh(logits / cap)
    has_qkv_bias: bool = False  # Qwen2: q, k and v have biases, q and k no norm

    def attention(self, layer_idx: int) -> LayerAttention:
        """Heads, rotary embedding and window of one layer."""
        sliding = self.sliding
        if sliding is not None and layer_idx in sliding.full_layers:
            return LayerAttention(
                head_dim=sliding.full_head_dim, num_kv_heads=sliding.full_num_kv_heads, rope=sliding.full_rope,
                window=None,
            )  # fmt: skip
        window = None if sliding is None else sliding.window
        return LayerAttention(head_dim=self.head_dim, num_kv_heads=self.num_kv_heads, rope=self.rope, window=window)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 keys and values that one committed token keeps, also where it is behind a window."""
        layers = map(self.attention, range(self.num_layers))
        return 2 * 2 * sum(layer.num_kv_heads * layer.head_dim for layer in layers)


DTYPES = ("float32", "bfloat16", "float16")  # that a checkpoint may declare
# Keys that each kind of rope reads; a key of another kind, or one that nobody reads, would be ignored.
_ROPE_KEYS: dict[str, set[str]] = {
    "default": {"partial_rotary_factor"},
    "proportional": {"partial_rotary_factor"},
    "linear": {"partial_rotary_factor", "factor"},
    "llama3": {
        "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    },
    "yarn": {
        "partial_rotary_factor", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "attention_factor",
    },
}  # fmt: skip

# Recognised so that the refusal can say more than "unknown".
_NOT_YET = ("LLaDAModelLM", "DreamModel", "NemotronLabsDiffusionModel", "SDARMoeForCausalLM")


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises:
        CheckpointError: the file is absent, not JSON, or contradicts itself.
        UnsupportedModelError: the architecture or a declared feature is not implemented.
    """
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; a checkpoint folder in Hugging Face layout is needed")
    return parse_config(read_json(path), source=str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the JSON file `path` of a checkpoint.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, names a key twice, or holds something else.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise CheckpointError(f"{path} is not a file; download the checkpoint again")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); download the checkpoint again") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object; download the file again")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook for `json.loads`: one of two equal keys would be dropped without a word."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return result


def parse_config(raw: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """Build a ModelConfig from the parsed `raw` config.json; `source` names it in errors.

    Raises:
        CheckpointError: a needed key is absent, has a value of the wrong type, or contradicts another one.
        UnsupportedModelError: the architecture or a declared feature is not implemented.
    """
    try:
        return _parse(raw, source)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{source} has a value of the wrong type ({error}); compare it with the original model's file"
        ) from error


def _parse(raw: Mapping[str, Any], source: str) -> ModelConfig:
    architectures = raw.get("architectures") or []
    if not architectures:
        raise CheckpointError(f'{source} has no \'architectures\'; add e.g. "architectures": ["Qwen3ForCausalLM"]')
    architecture = str(architectures[0])
    if architecture not in READERS:
        known = ", ".join(sorted(READERS))
        seen = "is recognised but not supported yet" if architecture in _NOT_YET else "is not a known architecture"
        raise UnsupportedModelError(
            f"{source}: {architecture} {seen}; supported: {known}. A conversion of Qwen3 under another name "
            "(QwenDLM) can be read as Qwen3ForCausalLM with a 'diffusion' section"
        )
    canonical, builtin = READERS[architecture](raw, source)
    return _build(canonical, builtin, source)


# Field of ModelConfig -> key of config.json, where it has one of its own.
_FILE_KEYS = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}  # fmt: skip
_NEEDED = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size", "max_position_embeddings",
    "rms_norm_eps",
)  # fmt: skip
_OPTIONAL = (
    "num_kv_heads", "head_dim", "tie_word_embeddings", "pad_token_id", "bos_token_id", "logit_softcap", "has_qkv_bias",
)  # fmt: skip


def _build(raw: Mapping[str, Any], builtin: Mapping[str, Any] | None, source: str) -> ModelConfig:
    """ModelConfig of canonical keys (see `dlmrt.models.upstream`)."""
    hints = get_type_hints(ModelConfig)
    keys = {name: _FILE_KEYS.get(name, name) for name in (*_NEEDED, *_OPTIONAL)}
    for name in _NEEDED:
        need(raw, keys[name], source)
    values = {
        name: checked(hints[name], raw[key], f"{source}: {key}")
        for name, key in keys.items()
        if raw.get(key) is not None
    }
    eos, sliding, moe = raw.get("eos_token_id"), raw.get("sliding"), raw.get("moe")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if sliding is not None:
        full_rope = _parse_rope({"rope_parameters": sliding["full_rope"]}, source)
        sliding = build(SlidingConfig, {**sliding, "full_rope": full_rope}, source, section="sliding")
    dtype = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    defaults = {
        "num_kv_heads": values["num_heads"],
        "head_dim": values["hidden_size"] // max(values["num_heads"], 1),
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    config = ModelConfig(
        architecture=str(raw["architectures"][0]),
        rope=_parse_rope(raw, source),
        eos_token_ids=checked(hints["eos_token_ids"], eos_ids, f"{source}: eos_token_id"),
        dtype=checked(hints["dtype"], "float32" if dtype is None else dtype, f"{source}: dtype"),
        diffusion=_parse_diffusion(raw, builtin, source),
        moe=None if moe is None else build(MoeConfig, moe, source, section="moe"),
        sliding=sliding,
        **(defaults | values),
    )
    check_config(config, source)
    return config


def _parse_rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    """Rope from `rope_theta` + `rope_scaling`, or from transformers 5's `rope_parameters`, which wins."""
    section = {**section_of(raw, "rope_scaling", source), **section_of(raw, "rope_parameters", source)}
    kind = section.pop("rope_type", None) or section.pop("type", None) or "default"
    section.pop("type", None)
    if kind not in get_args(RopeKind):
        supported = ", ".join(get_args(RopeKind))
        raise UnsupportedModelError(f"{source}: rope_type {shown(kind)} is not implemented; supported: {supported}")
    theta = section.pop("rope_theta", None)
    given = {key: value for key, value in section.items() if value is not None}
    ignored = set(section) - _ROPE_KEYS[kind]
    if ignored:
        name = min(ignored)
        raise UnsupportedModelError(f"{source}: rope key {name!r} is not implemented for rope_type {kind!r}")
    if kind not in ("default", "proportional") and "factor" not in given:
        raise CheckpointError(f"{source}: rope_type {kind!r} needs 'factor'")
    if kind in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", need(raw, "max_position_embeddings", source))
    theta = need(raw, "rope_theta", source) if theta is None else theta
    return build(RopeConfig, {**given, "theta": theta, "kind": kind}, source, section="rope")


def _parse_diffusion(raw: Mapping[str, Any], builtin: Mapping[str, Any] | None, source: str) -> DiffusionConfig | None:
    if raw.get("diffusion") is None and builtin is None:
        return None
    builtin, section = builtin or {}, section_of(raw, "diffusion", source)
    block = raw.get("block_size") if raw.get("canvas_length") is None else raw["canvas_length"]
    upstream = {"canvas_length": block, "mask_token_id": raw.get("mask_token_id")}
    merged = {**builtin, **{k: v for k, v in upstream.items() if v is not None}, **section}
    residual = {**section_of(builtin, "residual", source), **section_of(section, "residual", f"{source}: diffusion")}
    for key in ("canvas_length", "noise"):
        if merged.get(key) is None:
            raise CheckpointError(f"{source}: 'diffusion' has no {key!r}; add it, it is never guessed")
    merged["residual"] = build(ResidualConfig, residual, source, section="diffusion.residual")
    return build(DiffusionConfig, merged, source, section="diffusion")


def check_config(config: ModelConfig, source: str) -> None:
    """Refuse values that contradict each other."""
    check_types(config, source)
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    for name in (*sizes, "max_position_embeddings"):
        if getattr(config, name) <= 0:
            raise CheckpointError(f"{source}: {name} is {getattr(config, name)}; it must be positive")
    if config.num_layers > MOST_LAYERS:
        raise CheckpointError(f"{source}: num_layers is {config.num_layers}; at most {MOST_LAYERS} are supported")
    if config.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise UnsupportedModelError(f"{source}: dtype {config.dtype!r} is not implemented; supported: {known}")
    if not 0 <= config.rms_norm_eps < 1:
        raise CheckpointError(f"{source}: rms_norm_eps is {config.rms_norm_eps}; it must be within [0, 1)")
    _check_ids(config, source)
    for layer in {config.attention(layer_idx) for layer_idx in range(config.num_layers)}:
        _check_rope(layer.rope, source)
        _check_attention(config, layer, source)
    if config.moe is not None:
        _check_moe(config.moe, source)
    diffusion = config.diffusion
    if diffusion is None:
        return
    if diffusion.residual.kind == "none" and diffusion.residual.intermediate_size:
        raise CheckpointError(f"{source}: residual.intermediate_size has no effect with residual.kind 'none'; set 0")
    if diffusion.residual.kind != "none" and diffusion.residual.intermediate_size <= 0:
        raise CheckpointError(
            f"{source}: residual.kind {diffusion.residual.kind!r} needs a positive residual.intermediate_size"
        )
    if not 1 <= diffusion.canvas_length <= config.max_position_embeddings:
        raise CheckpointError(
            f"{source}: canvas_length {diffusion.canvas_length} is not within 1..{config.max_position_embeddings}"
        )
    if diffusion.logit_shift not in (0, 1):
        raise CheckpointError(f"{source}: logit_shift {diffusion.logit_shift}; known: 0, 1")
    _check_edit_ids(config, diffusion, source)
    mask = diffusion.mask_token_id
    if diffusion.noise == "mask":
        if mask is None:
            raise CheckpointError(f"{source}: noise 'mask' needs 'mask_token_id'; add it, it is never guessed")
        if not 0 <= mask < config.vocab_size:
            raise CheckpointError(f"{source}: mask_token_id {mask} is outside the table of {config.vocab_size} rows")
        taken = {
            "eos_token_id": config.eos_token_ids,
            "pad_token_id": (config.pad_token_id,),
            "bos_token_id": (config.bos_token_id,),
        }
        for name, ids in taken.items():
            if mask in ids:
                raise CheckpointError(
                    f"{source}: mask_token_id {mask} equals {name}; the mask must be a token of its own"
                )
    elif mask is not None:
        raise CheckpointError(f"{source}: noise 'uniform' has no mask token; remove 'mask_token_id'")


def _check_ids(config: ModelConfig, source: str) -> None:
    """Special ids are rows of the table: any other id could neither be predicted nor end an answer."""
    ids = {"eos_token_id": config.eos_token_ids, "pad_token_id": (config.pad_token_id,),
           "bos_token_id": (config.bos_token_id,)}  # fmt: skip
    for name, given in ids.items():
        for token in given:
            if token is not None and not 0 <= token < config.vocab_size:
                raise CheckpointError(
                    f"{source}: {name} {token} is outside the table of {config.vocab_size} rows; correct or remove it"
                )


def _check_rope(rope: RopeConfig, source: str) -> None:
    positive = {"rope_theta": rope.theta, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        positive["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "yarn" and rope.attention_factor is not None:
        positive["attention_factor"] = rope.attention_factor
    for name, value in positive.items():
        if value <= 0:
            raise CheckpointError(f"{source}: rope: {name} is {value}; it must be positive")
    low, high = (rope.low_freq_factor, rope.high_freq_factor) if rope.kind == "llama3" else (1.0, 2.0)
    names = "low_freq_factor, high_freq_factor"
    if rope.kind == "yarn":
        low, high, names = rope.beta_slow, rope.beta_fast, "beta_slow, beta_fast"
    if not 0 < low < high:
        raise CheckpointError(f"{source}: rope: {names} are {low}, {high}; they must be positive and rise")


def _check_attention(config: ModelConfig, layer: LayerAttention, source: str) -> None:
    if layer.head_dim <= 0 or layer.num_kv_heads <= 0 or config.num_heads % layer.num_kv_heads:
        raise CheckpointError(
            f"{source}: {config.num_heads} heads do not divide into {layer.num_kv_heads} key/value heads"
        )
    if layer.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim {layer.head_dim} is odd; rotary embedding needs pairs")
    share = layer.rope.partial_rotary_factor
    if not 0 < share <= 1 or int(layer.head_dim * share) % 2:
        raise CheckpointError(
            f"{source}: partial_rotary_factor {share} of head_dim {layer.head_dim} is not an even part of it"
        )
    if layer.window is not None and layer.window < 2:
        raise CheckpointError(
            f"{source}: sliding_window {layer.window} shows a row nothing but itself; give at least 2"
        )


def _check_moe(moe: MoeConfig, source: str) -> None:
    optional = ("shared_intermediate_size", "num_dense_layers", "expert_capacity")
    for item in dataclasses.fields(moe):
        value = getattr(moe, item.name)
        if item.name not in optional and value <= 0:
            raise CheckpointError(f"{source}: moe.{item.name} is {value}; it must be positive")
    if moe.num_experts % moe.num_groups or moe.num_kept_groups > moe.num_groups:
        raise CheckpointError(
            f"{source}: {moe.num_experts} experts, {moe.num_groups} groups of which {moe.num_kept_groups} are kept do "
            "not fit together"
        )
    available = moe.num_experts // moe.num_groups * moe.num_kept_groups
    if moe.expert_capacity is not None:
        available = moe.expert_capacity
    if not moe.num_experts_per_token <= available <= moe.num_experts:
        raise CheckpointError(
            f"{source}: {moe.num_experts_per_token} experts a token of {available} admitted of {moe.num_experts} do "
            "not fit together; each number must be within the next"
        )


def _check_edit_ids(config: ModelConfig, diffusion: DiffusionConfig, source: str) -> None:
    ids = (diffusion.delete_token_id, diffusion.split_token_id)
    if ids == (None, None):
        return
    if None in ids or diffusion.noise != "mask":
        raise CheckpointError(f"{source}: delete_token_id and split_token_id come together, and with noise 'mask'")
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size or token == diffusion.mask_token_id:
            raise CheckpointError(
                f"{source}: the edit id {token!r} is not an id of its own within the table of {config.vocab_size} rows"
            )
