"""Values of JSON files: the declared type or a refusal that names the key, whatever a file holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.errors import CheckpointError
from dlmrt.models.typed import LARGEST, build, check_types, section_of, shown


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int = 0
    share: float = 0.0
    switch: bool = False
    word: str = ""
    kind: Literal["mask", "uniform"] = "mask"
    ids: tuple[int, ...] = ()
    token: int | None = None
    inner: Inner = Inner()


GOOD = {
    "count": [0, -3, LARGEST], "share": [0, 1, 2.5, -1e-9], "switch": [True, False], "word": ["", "x"],
    "kind": ["mask", "uniform"], "ids": [[], [1, 2], (3,)], "token": [None, 0], "inner": [Inner(width=4)],
}  # fmt: skip
BAD = {
    "count": ["5", 4.0, 4.7, True, None, LARGEST + 1, 10**4000, float("nan"), [], {}],
    "share": ["0.5", True, None, float("nan"), float("inf"), 1e308, 10**4000, []],
    "switch": ["false", 0, 1, None, []], "word": [5, None, []], "kind": ["mosk", "", 0, None, [], ["mask"]],
    "ids": [5, "12", [1.0], [True], ["1"], [None], {}], "token": ["5", 1.0, False, []], "inner": [{}, None, 5],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_the_declared_type_passes(name: str) -> None:
    for value in GOOD[name]:
        built = build(Outer, {name: value}, "file")
        found = getattr(built, name)
        assert found == (tuple(value) if name == "ids" else value)
        assert type(found) is float or name != "share"
        check_types(built, "file")


@pytest.mark.parametrize("name", BAD)
def test_any_other_type_is_refused_with_its_key(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(CheckpointError, match=rf"file: part\.{name} is .*; it must be "):
            build(Outer, {name: value}, "file", section="part")


def test_types_of_nested_instances_are_checked_too() -> None:
    with pytest.raises(CheckpointError, match="source: inner: width is 'x'"):
        check_types(Outer(inner=Inner(width="x")), "source")  # type: ignore[arg-type]


def test_near_misses_are_named() -> None:
    with pytest.raises(CheckpointError, match="unknown key 'cuont' in 'part'; did you mean 'count'"):
        build(Outer, {"cuont": 1}, "file", section="part")
    with pytest.raises(CheckpointError, match="must be one of mask, uniform; did you mean 'mask'"):
        build(Outer, {"kind": "masc"}, "file")


def test_sections() -> None:
    assert section_of({}, "a", "f") == section_of({"a": None}, "a", "f") == {} and section_of({"a": {"b": 1}}, "a", "f")
    for value in (False, 0, "", [], "x", 5):
        with pytest.raises(CheckpointError, match="f: a is"):
            section_of({"a": value}, "a", "f")


@given(value=st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=50))
def test_shown_is_short(value: Any) -> None:
    assert len(shown(value)) <= 60


def test_shown_survives_what_has_no_text() -> None:
    assert shown(10**5000) == "a huge number" and shown([10**5000]) == "a list" and shown(2**64) == str(2**64)
