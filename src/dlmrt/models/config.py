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
from typing import Any, Literal, cast, get_args

from dlmrt.errors import CheckpointError, UnsupportedModelError, nearest
from dlmrt.models.upstream import READERS, need

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

    def attention(self, layer_idx: int) -> LayerAttention:
        """Heads, rotary embedding and window of one layer."""
        sliding = self.sliding
        if sliding is not None and layer_idx in sliding.full_layers:
            return LayerAttention(
                head_dim=sliding.full_head_dim, num_kv_heads=sliding.full_num_kv_heads, rope=sliding.full_rope,
                window=None,
            )  # fmt: skip
        window = None if sliding is None else sliding.window
        return LayerAttention(
            head_dim=self.head_dim, num_kv_heads=self.num_kv_heads, rope=self.rope, window=window
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 keys and values that one committed token keeps (a token behind a window counts all the same)."""
        layers = map(self.attention, range(self.num_layers))
        return 2 * 2 * sum(layer.num_kv_heads * layer.head_dim for layer in layers)


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
        CheckpointError: the file cannot be read, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); download the checkpoint again") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object; download the file again")
    return value


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
        raise CheckpointError(f"{source} has no 'architectures'; add e.g. \"architectures\": [\"Qwen3ForCausalLM\"]")
    architecture = str(architectures[0])
    if architecture not in READERS:
        known = ", ".join(sorted(READERS))
        seen = "is recognised but not supported yet" if architecture in _NOT_YET else "is not a known architecture"
        raise UnsupportedModelError(f"{source}: {architecture} {seen}; supported: {known}")
    canonical, builtin = READERS[architecture](raw, source)
    return _build(canonical, builtin, source)


def _build(raw: Mapping[str, Any], builtin: Mapping[str, Any] | None, source: str) -> ModelConfig:
    """ModelConfig of canonical keys (see `dlmrt.models.upstream`)."""
    hidden_size, num_heads = int(need(raw, "hidden_size", source)), int(need(raw, "num_attention_heads", source))
    eos = raw.get("eos_token_id")
    sliding = raw.get("sliding")
    if sliding is not None:
        full_rope = _parse_rope({"rope_parameters": sliding["full_rope"]}, source)
        sliding = SlidingConfig(**{**sliding, "full_rope": full_rope})
    config = ModelConfig(
        architecture=str(raw["architectures"][0]),
        hidden_size=hidden_size,
        intermediate_size=int(need(raw, "intermediate_size", source)),
        num_layers=int(need(raw, "num_hidden_layers", source)),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        vocab_size=int(need(raw, "vocab_size", source)),
        max_position_embeddings=int(need(raw, "max_position_embeddings", source)),
        rms_norm_eps=float(need(raw, "rms_norm_eps", source)),
        rope=_parse_rope(raw, source),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(int(token) for token in (eos if isinstance(eos, list) else [] if eos is None else [eos])),
        pad_token_id=raw.get("pad_token_id"),
        bos_token_id=raw.get("bos_token_id"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        diffusion=_parse_diffusion(raw, builtin, source),
        moe=None if raw.get("moe") is None else MoeConfig(**raw["moe"]),
        sliding=sliding,
        logit_softcap=None if raw.get("logit_softcap") is None else float(raw["logit_softcap"]),
    )
    check_config(config, source)
    return config


def _parse_rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    """Rope from `rope_theta` + `rope_scaling`, or from transformers 5's `rope_parameters`, which wins."""
    section = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind not in get_args(RopeKind):
        supported = ", ".join(get_args(RopeKind))
        raise UnsupportedModelError(f"{source}: rope_type {kind!r} is not implemented; supported: {supported}")
    names = {f.name for f in dataclasses.fields(RopeConfig)} - {"theta", "kind"}
    known = {key: value for key, value in section.items() if key in names and value is not None}
    ignored = set(section) - names - {"rope_type", "type", "rope_theta"}
    if ignored and kind != "default":
        name = min(ignored)
        raise UnsupportedModelError(f"{source}: rope key {name!r} is not implemented for rope_type {kind!r}")
    if kind not in ("default", "proportional") and "factor" not in known:
        raise CheckpointError(f"{source}: rope_type {kind!r} needs 'factor'")
    if kind in ("llama3", "yarn"):
        known.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings") or 0)
    theta = float(section.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    return RopeConfig(theta=theta, kind=cast(RopeKind, kind), **known)


def _parse_diffusion(raw: Mapping[str, Any], builtin: Mapping[str, Any] | None, source: str) -> DiffusionConfig | None:
    section = raw.get("diffusion")
    upstream = {
        "canvas_length": raw.get("canvas_length") or raw.get("block_size"),
        "mask_token_id": raw.get("mask_token_id"),
    }
    if section is None and builtin is None:
        return None
    merged = {**(builtin or {}), **{k: v for k, v in upstream.items() if v is not None}, **(section or {})}
    residual = {**((builtin or {}).get("residual") or {}), **(merged.pop("residual", None) or {})}
    for name, cls, given in (("diffusion", DiffusionConfig, merged), ("diffusion.residual", ResidualConfig, residual)):
        names = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                raise CheckpointError(f"{source}: unknown key {key!r} in {name!r}{nearest(key, names)}")
    for key in ("canvas_length", "noise"):
        if merged.get(key) is None:
            raise CheckpointError(f"{source}: 'diffusion' has no {key!r}; add it, it is never guessed")
    return DiffusionConfig(**merged, residual=ResidualConfig(**residual))


def check_config(config: ModelConfig, source: str) -> None:
    """Refuse values that contradict each other."""
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    for name in (*sizes, "max_position_embeddings"):
        if getattr(config, name) <= 0:
            raise CheckpointError(f"{source}: {name} is {getattr(config, name)}; it must be positive")
    if not (config.rms_norm_eps >= 0 and config.rope.theta > 0 and config.rope.factor > 0):
        raise CheckpointError(f"{source}: rms_norm_eps, rope_theta and the rope factor must be positive numbers")
    for layer in {config.attention(layer_idx) for layer_idx in range(config.num_layers)}:
        _check_attention(config, layer, source)
    if config.moe is not None:
        _check_moe(config.moe, source)
    diffusion = config.diffusion
    if diffusion is None:
        return
    counts = {
        "canvas_length": diffusion.canvas_length,
        "logit_shift": diffusion.logit_shift,
        "mask_token_id": 0 if diffusion.mask_token_id is None else diffusion.mask_token_id,
        "residual.intermediate_size": diffusion.residual.intermediate_size,
    }
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{source}: {name} is {value!r}; it must be a whole number")
    kinds = {
        "noise": Noise,
        "in_block_attention": InBlockAttention,
        "context_attention": ContextAttention,
        "block_anchor": BlockAnchor,
    }
    for name, kind in kinds.items():
        if getattr(diffusion, name) not in get_args(kind):
            raise CheckpointError(f"{source}: {name}={getattr(diffusion, name)!r}; known: {', '.join(get_args(kind))}")
    if diffusion.residual.kind not in get_args(ResidualKind) or diffusion.residual.where not in get_args(ResidualWhere):
        raise CheckpointError(f"{source}: unknown residual kind or place {diffusion.residual}")
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
    if diffusion.context_attention == "block_causal" and diffusion.block_anchor == "prompt_end":
        raise CheckpointError(f"{source}: context_attention block_causal needs block_anchor position_zero")
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
            f"{source}: partial_rotary_factor {share} of head_dim {layer.head_dim} is not an even number within the head"
        )
    if layer.window is not None and layer.window < 2:
        raise CheckpointError(f"{source}: sliding_window {layer.window} shows a row nothing but itself; give at least 2")


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
            f"{source}: {moe.num_experts_per_token} experts a token of {available} admitted of {moe.num_experts} do not "
            "fit together; each number must be within the next"
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
