"""Names of decode settings: `DecodeConfig`'s own, the spellings of other engines, and the types of their values.

Files, command line and server accept all of them; two spellings of one setting that disagree are refused. Ranges are
checked where the settings are used (dlmrt.decode.settings), types here.

Left out on purpose: spellings whose meaning differs between engines or that name another quantity, e.g. a total
number of steps. `confidence_threshold` is the commit threshold, as everywhere except in DiffusionGemma's
`stopping_config`, where it is `stop_entropy`.

Source: ours; aliases as read in SGLang 0.5.23, vLLM 0.33.0, lmdeploy 0.18.0, transformers 5.24.0, diffusers 0.42.1.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from dlmrt.errors import UnknownOptionError, UsageError, nearest
from dlmrt.types import DecodeConfig

ALIASES = {
    "canvas_length": ("block_size", "block_length", "dllm_block_length"),
    "threshold": ("confidence_threshold", "accept_threshold", "dynamic_threshold", "dllm_confidence_threshold"),
    "edit_threshold": ("editing_threshold",),
    "max_post_edit_steps": ("max_post_steps",),
    "min_commit": ("num_to_transfer", "minimal_topk"),
    "sub_block_length": ("small_block_size", "sub_block_size"),
    "max_denoising_steps": (
        "steps",
        "denoising_steps",
        "num_denoising_steps",
        "num_inference_steps",
        "dllm_denoising_steps",
    ),
    "entropy_bound": ("eb_threshold", "sampler_config.entropy_bound"),
    "t_min": ("temperature_schedule.t_min",),
    "t_max": ("temperature_schedule.t_max",),
    "stop_entropy": ("stopping_config.confidence_threshold",),
    "stability_threshold": ("stopping_config.stability_threshold",),
    "max_tokens": ("max_new_tokens", "max_completion_tokens"),
}
# Keys by which other engines choose the commit rule, and their names for ours.
RULE_KEYS = ("dllm_algorithm", "dllm_unmasking_strategy", "unmasking_strategy", "diffusion_sampler")
RULE_ALIASES = {
    "LowConfidence": "threshold",
    "JointThreshold": "joint_threshold",
    "JointThresholdInDel": "joint_threshold_indel",
    "Gemma4Renoise": "entropy_bound",
    "low_confidence_dynamic": "threshold",
    "low_confidence_static": "steps",
    "confidence-threshold": "threshold",
    "entropy-bound": "entropy_bound",
}
SETTINGS = tuple(field.name for field in dataclasses.fields(DecodeConfig))
CANONICAL = {name: name for name in SETTINGS} | {alias: name for name, known in ALIASES.items() for alias in known}
CANONICAL |= dict.fromkeys(RULE_KEYS, "commit_rule")
_TYPES = typing.get_type_hints(DecodeConfig)


def is_tuple(name: str) -> bool:
    """Whether the setting holds several values."""
    return typing.get_origin(_TYPES[name]) is tuple


def scalar_type(name: str) -> type:
    """The setting's type without `None` and without the tuple around it."""
    hint = _TYPES[name]
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return typing.cast(type, typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint)


def canonical_settings(raw: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Map keys (aliases, nested sections) to field names of `DecodeConfig` and check the types of their values.

    A value of None leaves the setting to the checkpoint. `source` names the origin in messages.

    Raises:
        UsageError: a value has a wrong type, or two spellings disagree.
        UnknownOptionError: a key that no setting has.
    """
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    settings: dict[str, Any] = {}
    for key, value in flat.items():
        name = CANONICAL.get(key)
        if name is None:
            raise UnknownOptionError(f"{source}: unknown decode setting {key!r}{nearest(key, CANONICAL)}")
        if value is None:
            continue
        checked = _checked(name, value, f"{source}: {key}")
        checked = RULE_ALIASES.get(checked, checked) if name == "commit_rule" else checked
        if settings.setdefault(name, checked) != checked:
            raise UsageError(
                f"{source}: {name} is given twice, {settings[name]!r} and {checked!r}; remove one spelling"
            )
    return settings


def _checked(name: str, value: Any, where: str) -> Any:
    kind = scalar_type(name)
    if is_tuple(name):
        values = value if isinstance(value, list) else [value]
        return tuple(_checked_scalar(kind, item, where) for item in values)
    return _checked_scalar(kind, value, where)


def _checked_scalar(kind: type, value: Any, where: str) -> Any:
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{where} is {value!r}; it must be {words[kind]}")
    return value
