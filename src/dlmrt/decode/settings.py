"""Settings of one request made concrete: request > generation_config.json > built-in of the commit rule.

`resolve` is the only place where a default is chosen and a value is checked, so what it returns (`ResolvedDecode`) can
be printed, recorded and handed to any executor as it is. Overriding one value keeps all others. A request value that
has no effect under the rule in use is refused; a value of the file that the rule does not use is dropped, since the
request may have chosen another rule than the file's author had in mind. At temperature 0 filters and seed are accepted:
the argmax passes every filter, and no draw is made.

generation_config.json is read in two spellings: upstream's top-level keys (`max_new_tokens`, `temperature`,
`sampler_config.entropy_bound`, ...; keys of other programs are left alone) and our own section `diffusion`, whose keys
are `DecodeConfig`'s and where an unknown key is an error.

Left out: aliases of other engines' option names; the command line and the server translate them before they get here.

Source: ours; upstream keys from transformers 5.24.0 models/diffusion_gemma and JetAstra/SDAR c2041a8; built-in numbers
are LLaDA2.1's `generate` (joint_threshold), DiffusionGemma's generation_config.json (entropy_bound) and Fast-dLLM v2's
model card (sub_blocks).
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlmrt.decode.indel import EditIds
from dlmrt.errors import CheckpointError, UnknownOptionError, UsageError, nearest
from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.typed import checked, section_of, shown
from dlmrt.types import DecodeConfig

RULE_FIELDS: dict[str, tuple[str, ...]] = {
    "threshold": ("threshold", "min_commit", "max_denoising_steps"),
    "joint_threshold": ("threshold", "edit_threshold", "max_post_edit_steps", "min_commit", "max_denoising_steps"),
    "joint_threshold_indel": ("threshold", "edit_threshold", "max_post_edit_steps", "max_denoising_steps"),
    "entropy_bound": (
        "entropy_bound", "t_min", "t_max", "stop_entropy", "stability_threshold", "max_denoising_steps",
    ),
    "steps": ("max_denoising_steps",),
    "sub_blocks": ("threshold", "sub_block_length", "min_commit", "max_denoising_steps"),
}  # fmt: skip

_BUILT_IN: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.9},
    "joint_threshold": {"threshold": 0.95, "edit_threshold": 0.9, "max_post_edit_steps": 16},
    "joint_threshold_indel": {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edit_steps": 16},
    "entropy_bound": {
        "entropy_bound": 0.1, "t_min": 0.4, "t_max": 0.8, "stop_entropy": 0.005, "stability_threshold": 1,
        "max_denoising_steps": 48, "temperature": 1.0,
    },
    "steps": {},
    "sub_blocks": {"threshold": 0.9},
}  # fmt: skip
_SUB_BLOCK = 8  # of rule sub_blocks, where the canvas is not shorter
_COMMON: dict[str, Any] = {
    "min_commit": 1, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 1024,
}  # fmt: skip

_UPSTREAM = ("temperature", "top_k", "top_p", "min_p", "max_denoising_steps", "t_min", "t_max", "stability_threshold")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")

_INTEGERS: dict[str, tuple[int, int]] = {
    "canvas_length": (1, 1 << 24),  # the slot field of the random counter has 24 bits
    "max_post_edit_steps": (0, 1 << 16),
    "min_commit": (1, 1 << 24),
    "sub_block_length": (1, 1 << 24),
    "max_denoising_steps": (1, 1 << 24),
    "stability_threshold": (0, 1 << 16),
    "top_k": (0, 1 << 31),
    "seed": (0, (1 << 64) - 1),
    "noise_seed": (0, (1 << 64) - 1),
    "max_tokens": (1, 1 << 31),
}
_FLOATS: dict[str, tuple[float, float]] = {
    "threshold": (0.0, 1.0),
    "edit_threshold": (0.0, 1.0),
    "entropy_bound": (0.0, 1e9),
    "t_min": (1e-3, 1e3),
    "t_max": (1e-3, 1e3),
    "stop_entropy": (0.0, 1e9),
    "temperature": (0.0, 1e3),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class ResolvedDecode:
    """All settings of one request, concrete. A field that the rule does not use holds a neutral value.

    Example: ``ResolvedDecode(commit_rule="threshold", threshold=0.9, canvas_length=32, max_denoising_steps=32, ...)``.
    """

    commit_rule: str
    canvas_length: int
    max_denoising_steps: int  # the last allowed step decides every slot that is still open
    threshold: float = 1.0
    edit_threshold: float | None = None  # None: no edits
    max_post_edit_steps: int = 0
    min_commit: int = 1
    sub_block_length: int = 0
    entropy_bound: float = 0.0
    t_min: float = 1.0
    t_max: float = 1.0
    stop_entropy: float = 0.0
    stability_threshold: int = 1
    temperature: float  # 0: argmax; entropy_bound: factor of the schedule, where 0 keeps the schedule and takes argmax
    top_k: int
    top_p: float
    min_p: float
    seed: int
    noise_seed: int
    max_tokens: int
    eos_token_ids: frozenset[int]  # of the checkpoint; empty with ignore_eos
    stop_token_ids: frozenset[int]  # of the request
    stop: tuple[str, ...]
    use_residual: bool
    edit_ids: EditIds | None = None  # joint_threshold_indel: ids of the checkpoint

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are argmax; then nothing depends on `seed`."""
        return self.temperature == 0

    @property
    def noise_key(self) -> int:
        """Key of the NOISE stream: fixed at temperature 0, so that one prompt gives one text whatever the seed."""
        return self.noise_seed if self.is_greedy else self.seed

    def step_temperature(self, step: int) -> float:
        """Temperature that divides the logits of `step`, hence of its confidences, entropies and residual."""
        if self.commit_rule != "entropy_bound":
            return self.temperature or 1.0
        remaining = (self.max_denoising_steps - step) / self.max_denoising_steps  # 1 at the first step, 1/N at the last
        return (self.t_min + (self.t_max - self.t_min) * remaining) * (self.temperature or 1.0)

    def as_dict(self) -> dict[str, Any]:
        """The settings in effect, for printing: fields of other rules are absent, sets are sorted lists."""
        others = {field for fields in RULE_FIELDS.values() for field in fields} - set(RULE_FIELDS[self.commit_rule])
        others.add("edit_ids")  # the checkpoint's, not a choice
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in others}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}


def with_overrides(config: DecodeConfig | None, overrides: Mapping[str, Any]) -> DecodeConfig:
    """`config` with `overrides` on top; `config` itself stays as it is.

    Raises:
        UnknownOptionError: an override is not a field of DecodeConfig.
    """
    names = [f.name for f in dataclasses.fields(DecodeConfig)]
    for name in overrides:
        if name not in names:
            raise UnknownOptionError(f"unknown decode option {name!r}{nearest(name, names)}")
    if not isinstance(config, DecodeConfig | None):
        raise UsageError(f"the settings are a {type(config).__name__}; pass a DecodeConfig, or keyword arguments")
    return dataclasses.replace(config or DecodeConfig(), **overrides)


def resolve(config: DecodeConfig, model: ModelConfig, generation_defaults: Mapping[str, Any]) -> ResolvedDecode:
    """Make every setting of `config` concrete for `model`.

    Args:
        generation_defaults: parsed generation_config.json of the checkpoint, or an empty mapping.

    Raises:
        UsageError: a value is out of range, contradicts another, or has no effect here; the message names the field.
        CheckpointError: the same for a value of generation_config.json.
    """
    diffusion = model.diffusion
    if diffusion is None:
        raise UsageError("config.json has no 'diffusion' section: an auto-regressive checkpoint; convert it first")
    section = _file_section(generation_defaults)
    rule = _rule(config, section, diffusion)
    asked = {name: _plain(getattr(config, name)) for name in (*_INTEGERS, *_FLOATS)}
    asked = {name: value for name, value in asked.items() if value is not None}
    from_file = _file_values(generation_defaults, section, rule)
    _check_ranges(asked, UsageError, "")
    _check_ranges(from_file, CheckpointError, "generation_config.json: ")
    _refuse_without_effect(asked, rule)
    noise_seed = asked.pop("noise_seed", 0)

    values = {**_COMMON, **_BUILT_IN[rule], **from_file, **asked}
    values["canvas_length"] = _canvas_length(asked, diffusion)
    _finish_steps(values, rule, asked)
    if rule == "entropy_bound" and values["t_min"] > values["t_max"]:
        raise UsageError(f"t_min {values['t_min']} is above t_max {values['t_max']}; the schedule falls towards t_min")
    if noise_seed and diffusion.noise == "mask":
        raise UsageError("noise_seed has no effect: this checkpoint has mask noise; leave it out")
    if noise_seed and values["temperature"] > 0:
        raise UsageError("noise_seed has no effect at temperature > 0, where the seed varies the noise; leave it out")
    if "seed" not in values:
        # 53 bits, so that a reported seed survives JSON readers that hold numbers as doubles.
        values["seed"] = 0 if values["temperature"] == 0 else secrets.randbits(53)
    used = {f.name for f in dataclasses.fields(ResolvedDecode)} - {f for fields in RULE_FIELDS.values() for f in fields}
    used |= set(RULE_FIELDS[rule])
    return ResolvedDecode(
        commit_rule=rule,
        eos_token_ids=frozenset() if _flag(config, "ignore_eos") else _eos_ids(model, generation_defaults),
        stop_token_ids=_stop_ids(config, model),
        stop=_stop_strings(config),
        use_residual=_flag(config, "use_residual"),
        noise_seed=noise_seed,
        edit_ids=_edit_ids(rule, diffusion),
        **{name: value for name, value in values.items() if name in used},
    )


def _plain(value: Any) -> Any:
    """A numpy number as Python's own, which records and JSON can hold; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _flag(config: DecodeConfig, name: str) -> bool:
    """A switch of the request; None: its default. Text such as "false" would be true."""
    value = _plain(getattr(config, name))
    if value is None:
        value = DecodeConfig.__dataclass_fields__[name].default
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value)}; it must be true or false")
    return value


def _rule(config: DecodeConfig, section: Mapping[str, Any], diffusion: DiffusionConfig) -> str:
    given: list[tuple[str, Any, type[UsageError] | type[CheckpointError]]] = [
        ("", config.commit_rule, UsageError),
        ("generation_config.json: ", section.get("commit_rule"), CheckpointError),
        ("config.json: ", diffusion.commit_rule, CheckpointError),
    ]
    source, rule, error = next(entry for entry in given if entry[1] is not None)
    if not isinstance(rule, str) or rule not in RULE_FIELDS:
        hint = nearest(rule if isinstance(rule, str) else "", RULE_FIELDS)
        raise error(f"{source}unknown commit_rule {shown(rule)}{hint}")
    return rule


def _file_section(defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `diffusion` section of generation_config.json: `commit_rule`, its fields, sampling and `max_tokens`."""
    section = section_of(defaults, "diffusion", "generation_config.json")
    names = {"commit_rule", "max_tokens", *_SAMPLING, *(field for fields in RULE_FIELDS.values() for field in fields)}
    for name in section:
        if name not in names:
            raise CheckpointError(f"generation_config.json: unknown key {name!r} in 'diffusion'{nearest(name, names)}")
    return section


def _file_values(defaults: Mapping[str, Any], section: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """Defaults of the file by canonical name, only those that `rule` uses; null means not given."""
    values = {name: defaults.get(name) for name in _UPSTREAM}
    do_sample = checked(bool | None, defaults.get("do_sample"), "generation_config.json: do_sample")
    if do_sample is False:  # the file asks for argmax, whatever temperature it carries besides
        values |= {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
    values["max_tokens"] = defaults.get("max_new_tokens")
    values["entropy_bound"] = section_of(defaults, "sampler_config", "generation_config.json").get("entropy_bound")
    # One upstream name, two meanings: an entropy for DiffusionGemma, a probability everywhere else.
    values["stop_entropy" if rule == "entropy_bound" else "threshold"] = defaults.get("confidence_threshold")
    values |= {name: value for name, value in section.items() if value is not None}
    used = {*_SAMPLING, "max_tokens", *RULE_FIELDS[rule]}
    return {name: value for name, value in values.items() if value is not None and name in used}


def _check_ranges(values: Mapping[str, Any], error: type[UsageError] | type[CheckpointError], source: str) -> None:
    for name, value in values.items():
        kind, (low, high) = (int, _INTEGERS[name]) if name in _INTEGERS else ((int, float), _FLOATS[name])
        if isinstance(value, bool) or not isinstance(value, kind):
            wanted = "an integer" if kind is int else "a number"
            raise error(f"{source}{name} must be {wanted}, not {shown(value)}")
        if not low <= value <= high:  # NaN fails the comparison
            raise error(f"{source}{name} is {shown(value)}; it must be within [{low}, {high}]")
    if values.get("top_p") == 0:
        raise error(f"{source}top_p is 0 and keeps nothing; use temperature 0 for argmax, 1 for no filter")
    if 0 < values.get("temperature", 0) < 1e-3:
        raise error(f"{source}temperature {values['temperature']} would overflow the logits; use 0 for argmax")


def _refuse_without_effect(asked: Mapping[str, Any], rule: str) -> None:
    for name in asked:
        rules = [other for other, fields in RULE_FIELDS.items() if name in fields]
        if rules and rule not in rules:
            choices = " or ".join(rules)
            raise UsageError(f"{name} has no effect with commit_rule {rule!r}; leave it out, or choose {choices}")


def _canvas_length(asked: Mapping[str, Any], diffusion: DiffusionConfig) -> int:
    length = int(asked.get("canvas_length", diffusion.canvas_length))
    if length != diffusion.canvas_length and diffusion.context_attention == "block_causal":
        raise UsageError(
            f"canvas_length {length} does not fit this checkpoint: its attention is tied to blocks of "
            f"{diffusion.canvas_length}; leave it out"
        )
    return length


def _finish_steps(values: dict[str, Any], rule: str, asked: Mapping[str, Any]) -> None:
    """Built-in step caps and the limits that depend on the canvas length."""
    length = values["canvas_length"]
    if values["min_commit"] > length:
        raise UsageError(f"min_commit is {values['min_commit']}; it must be within [1, {length}], the canvas length")
    if rule == "sub_blocks":
        values.setdefault("sub_block_length", min(_SUB_BLOCK, length))
        if values["sub_block_length"] > length:
            raise UsageError(
                f"sub_block_length is {values['sub_block_length']}; it must be within [1, {length}], the canvas length"
            )
    last = rule == "joint_threshold_indel"  # the step that cleans up
    values.setdefault("max_denoising_steps", length + values.get("max_post_edit_steps", 0) + last)
    if rule == "steps" and values["max_denoising_steps"] > length:
        if "max_denoising_steps" in asked:
            raise UsageError(
                f"max_denoising_steps is {values['max_denoising_steps']}; with commit_rule 'steps' it must be within "
                f"[1, {length}], since each step decides at least one of {length} positions"
            )
        values["max_denoising_steps"] = length


def _edit_ids(rule: str, diffusion: DiffusionConfig) -> EditIds | None:
    if rule != "joint_threshold_indel":
        return None
    mask, delete, split = diffusion.mask_token_id, diffusion.delete_token_id, diffusion.split_token_id
    if mask is None or delete is None or split is None:
        raise UsageError(
            "commit_rule 'joint_threshold_indel' needs a checkpoint with delete_token_id and split_token_id; "
            "choose joint_threshold"
        )
    return EditIds(mask=mask, delete=delete, split=split)


def _eos_ids(model: ModelConfig, defaults: Mapping[str, Any]) -> frozenset[int]:
    """EOS ids of both files: generation_config.json often names more than config.json, never fewer that matter."""
    given = defaults.get("eos_token_id")
    more = given if isinstance(given, list) else [] if given is None else [given]
    ids = checked(tuple[int, ...], more, "generation_config.json: eos_token_id")
    return frozenset(model.eos_token_ids) | frozenset(ids)


def _several(value: Any, name: str) -> tuple[Any, ...]:
    """Values of a setting that holds several; None: none of them."""
    if not isinstance(value, list | tuple | None):
        raise UsageError(f"{name} is {shown(value)}; it must be a list")
    return tuple(map(_plain, value or ()))


def _stop_ids(config: DecodeConfig, model: ModelConfig) -> frozenset[int]:
    ids = _several(config.stop_token_ids, "stop_token_ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < model.vocab_size:
            raise UsageError(
                f"stop_token_ids holds {shown(token)}; ids are integers within [0, {model.vocab_size - 1}]"
            )
        if model.diffusion is not None and token == model.diffusion.mask_token_id:
            raise UsageError(f"stop_token_ids holds the mask token {token}, which no answer can contain; remove it")
    return frozenset(ids)


def _stop_strings(config: DecodeConfig) -> tuple[str, ...]:
    given: Any = config.stop  # callers pass a bare string all the same
    stops = _several([given] if isinstance(given, str) else given, "stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise UsageError(f"stop holds {shown(stop)}; it must hold non-empty strings")
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise UsageError(
                f"stop holds {shown(stop)}, which is not valid Unicode and no answer can contain; remove it"
            )
    return stops
