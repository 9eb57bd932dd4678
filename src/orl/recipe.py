"""Recipes: one TOML file a run, read into frozen dataclasses; unknown keys are refused with the nearest name.

The dataclass is the truth: its defaults are the documented defaults, a recipe overrides some, `--set section.key=value`
overrides a recipe. The resolved recipe is saved beside every output, so that a run can be repeated from its folder.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from dlmrt.errors import nearest
from orl.errors import RecipeError
from orl.precision import ComputeType
from orl.trackers import TrackerName

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Shape of a model trained from scratch (Qwen3 backbone, tied embeddings)."""

    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10_000.0
    canvas_length: int = 32
    logit_shift: int = 0  # 1: keep the auto-regressive head's offset, which a small model converts with least loss
    residual_intermediate_size: int = 512  # width of the residual adapter; 0: no residual pathway

    def __post_init__(self) -> None:
        check_range(self, "residual_intermediate_size", 0)
        check_range(self, "canvas_length", 1)
        check_range(self, "logit_shift", 0, 1)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Which tasks, in which shares, and the tokenizer made from them."""

    tasks: tuple[str, ...] = ()  # names of orl.tasks; empty: all
    weights: tuple[float, ...] = ()  # share of each task, same order; empty: equal
    wordings: Literal["one", "many"] = "one"  # of the gold workings, see orl.tasks.wordings
    vocab_size: int = 2048
    tokenizer: str = ""  # folder of an existing tokenizer; empty: train one on the train split
    tokenizer_problems: int = 2000  # problems per task that the tokenizer is trained on
    pack_tokens: int = 384  # rows of one packed sequence; longer problems are left out and counted
    pool_problems: int = 128  # problems that are packed together

    def __post_init__(self) -> None:
        check_range(self, "pack_tokens pool_problems tokenizer_problems", 1)
        if any(not 0 <= weight < math.inf for weight in self.weights) or (self.weights and not sum(self.weights)):
            raise RecipeError(f"weights are {list(self.weights)}; give shares of at least 0, one of them above")


@dataclass(frozen=True, kw_only=True)
class ObjectiveSection:
    """What is learned. The diffusion objectives keep next-token loss on the clean copy."""

    kind: Literal["mask", "uniform", "ar"] = "mask"
    copies: int = 2  # noisy copies of a response; 2 with kind mask are complementary
    loss_weight: Literal["flat", "elbo"] = "flat"  # mask: 1 or 1/t for each masked token
    t_min: float = 0.02  # least noise level
    ar_weight: float = 0.5  # factor of the next-token loss on the clean copy
    prompt_weight: float = 0.0  # share of that loss on prompt tokens
    self_conditioning_p: float = 0.5  # share of micro-batches that get z from a first pass
    tail_weight: float = 0.1  # weight of canvas slots right of the stop token

    def __post_init__(self) -> None:
        check_range(self, "copies", 1)
        check_range(self, "ar_weight prompt_weight tail_weight", 0)
        check_range(self, "self_conditioning_p", 0, 1)
        check_range(self, "t_min", 1e-6, 1)
        if self.loss_weight == "elbo" and self.kind != "mask":
            raise RecipeError(f"loss_weight 'elbo' has no effect with kind {self.kind!r}; use 'flat', or kind 'mask'")


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """Muon for the matrices of the layers, AdamW for embedding and norms; cosine schedule to `lr_end_ratio` of each."""

    steps: int = 2000
    bins_per_step: int = 16  # packed sequences a step
    bins_per_micro: int = 8  # packed sequences a forward
    muon_lr: float = 6e-3  # RMS-matched to AdamW's
    adamw_lr: float = 3e-3
    lr_end_ratio: float = 0.05
    warmup_steps: int = 50
    weight_decay: float = 0.02
    grad_clip: float = 1.0
    max_skipped_steps: int = 10  # steps in a row without a usable gradient that end the run

    def __post_init__(self) -> None:
        check_range(self, "steps bins_per_step bins_per_micro max_skipped_steps", 1)
        check_range(self, "muon_lr adamw_lr warmup_steps weight_decay", 0)
        check_range(self, "lr_end_ratio", 0, 1)
        check_range(self, "grad_clip", 1e-9)


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where and how the run lives."""

    seed: int = 0
    init: str = ""  # checkpoint folder to start from (its tokenizer is taken too); empty: random
    dtype: ComputeType = "auto"  # of forwards; auto: bfloat16 where the hardware multiplies it, else float32
    num_threads: int = 0  # 0: torch's choice
    save_every_s: float = 120.0
    tracker: TrackerName = "none"  # also tensorboard, trackio or wandb, each with its own package
    eval_every_steps: int = 500
    eval_problems: int = 8  # held-out problems per task during training

    def __post_init__(self) -> None:
        check_range(self, "seed num_threads save_every_s", 0)
        check_range(self, "eval_every_steps eval_problems", 1)


@dataclass(frozen=True, kw_only=True)
class PretrainRecipe:
    """A whole pre-training run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    optim: OptimSection = field(default_factory=OptimSection)
    run: RunSection = field(default_factory=RunSection)


def check_range(section: Any, names: str, low: float, high: float = math.inf) -> None:
    """Refuse values of fields `names` outside [low, high], infinity and NaN included."""
    for name in names.split():
        value = getattr(section, name)
        if not (low <= value <= high and value < math.inf):
            within = f"at least {low}" if high == math.inf else f"within [{low}, {high}]"
            raise RecipeError(f"{name} is {value}; it must be {within}")


def refuse_change(section: Any, name: str, reason: str) -> None:
    """Refuse another value than the default of field `name`, which has no effect because of `reason`."""
    default = type(section).__dataclass_fields__[name].default
    if getattr(section, name) != default:
        raise RecipeError(f"{name} has no effect, since {reason}; leave it out, or set it to its default {default}")


def load_recipe(path: Path, cls: type[T], overrides: Sequence[str] = ()) -> T:
    """Read the TOML file `path` into `cls`; `overrides` are ``section.key=value`` with TOML values.

    A value that is not TOML is a string, so that words need no quotes.

    Raises:
        RecipeError: unreadable file, unknown section or key, wrong type, value out of range.
    """
    raw = read_toml(path)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise RecipeError(f"--set {override!r} has no '='; write --set section.key=value")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *sections, key = name.strip().split(".")
        target = raw
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise RecipeError(f"--set {override!r}: {section!r} is a value, not a section; write section.key=value")
        target[key] = value
    return build(cls, raw, where=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Content of the TOML file `path`.

    Raises:
        RecipeError: it is absent, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecipeError(f"recipe {path} does not exist; recipes of this project are in recipes/") from error
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}; give a TOML file") from error
    except ValueError as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from error


def build(cls: type[T], raw: Mapping[str, Any], *, where: str) -> T:
    """Make the dataclass `cls` from nested mappings, checking names, types and ranges.

    Raises:
        RecipeError: the message begins with `where`.
    """
    hints = typing.get_type_hints(cls)
    for key in raw:
        if key not in hints:
            raise RecipeError(f"{where}: unknown key {key!r}{nearest(key, hints)}")
    values = {key: _coerce(hints[key], value, f"{where}: {key}") for key, value in raw.items()}
    try:
        return cls(**values)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _coerce(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where} must be a section, not {value!r}; write key = value lines under it")
        return build(typing.cast(type, hint), value, where=where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise RecipeError(f"{where} is {value!r}{nearest(str(value), map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise RecipeError(f"{where} must be a list, not {value!r}")
        return tuple(_coerce(arguments[0], item, where) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # a bool is no int here
        words = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
        raise RecipeError(f"{where} is {value!r}; it must be {words[hint]}")
    return value


def dump_recipe(recipe: Any) -> str:
    """`recipe` as TOML text that `load_recipe` reads back to an equal object (sections of scalars and lists)."""
    lines: list[str] = []
    for section in dataclasses.fields(recipe):
        lines.append(f"[{section.name}]")
        body = getattr(recipe, section.name)
        lines += [f"{f.name} = {_toml(getattr(body, f.name))}" for f in dataclasses.fields(body)]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """JSON of a scalar or list, which TOML shares except that it does not allow a bare DEL in strings."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(old: Any, new: Any) -> list[str]:
    """What differs between two recipes of one class. Example: ``["optim.steps was 100 and is 200"]``."""
    return [
        f"{section}.{key} was {value!r} and is {getattr(getattr(new, section), key)!r}"
        for section, body in dataclasses.asdict(old).items()
        for key, value in body.items()
        if value != getattr(getattr(new, section), key)
    ]
