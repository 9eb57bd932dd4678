"""Values of a JSON file as fields of a dataclass: checked against the annotations, never converted.

`int("5")`, `int(4.7)` and `bool("false")` all succeed and mean something else than the file; a list where a word is
expected fails only where somebody looks it up. So a value has the type that its field declares, or is refused with the
key and what it must be. A whole number stands for a float, nothing else for anything else. Ranges that depend on other
fields are the business of the caller.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from dlmrt.errors import CheckpointError, nearest

T = TypeVar("T")
LARGEST = 2**31 - 1  # sizes, positions and ids are 32-bit numbers in every executor


def build(cls: type[T], values: Mapping[str, Any], source: str, *, section: str = "") -> T:
    """`cls` from `values`, whose keys are its fields; `section` is the path in front of them in messages.

    Raises:
        CheckpointError: an unknown key, or a value of another type than its field.
    """
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise CheckpointError(f"{source}: unknown key {key!r} in {section or 'it'!r}{nearest(str(key), hints)}")
    prefix = f"{section}." if section else ""
    return cls(**{key: checked(hints[key], value, f"{source}: {prefix}{key}") for key, value in values.items()})


def check_types(instance: Any, source: str) -> None:
    """Refuse fields of a dataclass, and of those in it, that hold another type than they declare."""
    for name, hint in typing.get_type_hints(type(instance)).items():
        checked(hint, getattr(instance, name), f"{source}: {name}")


def section_of(raw: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    """The object under `key`, {} when it is absent or null."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: {key} is {shown(value)}; it must be an object with keys")
    return value


def checked(hint: Any, value: Any, where: str) -> Any:
    """`value` if it has the type `hint` (int, float, bool, str, Literal, dataclass, tuple of one, or optional)."""
    is_optional = isinstance(hint, types.UnionType)
    if is_optional:
        if value is None:
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise CheckpointError(f"{where} is {shown(value)}; it must be a list")
        return tuple(checked(typing.get_args(hint)[0], item, where) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(value, typing.cast(type, hint)):
        check_types(value, where)
        return value
    wanted = _complaint(hint, value)
    if wanted:
        raise CheckpointError(f"{where} is {shown(value)}; it must be {wanted}{' or null' if is_optional else ''}")
    return float(value) if hint is float else value


def _complaint(hint: Any, value: Any) -> str:
    """What `value` must be, empty when it is."""
    if hint is int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_whole and abs(value) <= LARGEST else f"a whole number of at most {LARGEST}"
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # The bound is that of float32, which every executor computes in.
        return "" if is_number and abs(value) < 2.0**127 else "a finite number"
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        return "" if any(type(value) is type(choice) and value == choice for choice in choices) else (
            f"one of {', '.join(map(str, choices))}" + (nearest(value, choices) if isinstance(value, str) else "")
        )  # fmt: skip
    kind = {bool: "true or false", str: "text"}.get(hint, f"of type {hint.__name__}")
    return "" if isinstance(value, hint) else kind


def shown(value: Any) -> str:
    """`value` for a message: short, whatever a hostile file holds."""
    if isinstance(value, int) and abs(value) > 1 << 80:
        return "a huge number"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a huge number, or lists without end, inside
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
