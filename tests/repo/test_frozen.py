"""Public names and command-line options are frozen: a change must be wanted, and tell users how to migrate.

The lists lie in tests/repo/frozen. When a change is wanted, edit the list by hand and add a line to CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from pathlib import Path

import pytest
import typer

FROZEN = Path(__file__).parent / "frozen"


def _compare(name: str, lines: list[str]) -> None:
    frozen = (FROZEN / name).read_text(encoding="utf-8").splitlines()
    changed = [line for line in difflib.ndiff(frozen, lines) if line[0] in "+-"]
    assert not changed, f"tests/repo/frozen/{name} differs:\n" + "\n".join(changed)


@pytest.mark.parametrize("program", ["dlmrt", "orl"])
def test_command_line_options(program):
    command = typer.main.get_command(importlib.import_module(f"{program}.cli").app)
    lines = []
    for verb, sub in {"": command, **command.commands}.items():
        for parameter in sub.params:
            spellings = [*parameter.opts, *parameter.secondary_opts]
            lines.append(f"{program} {verb} {' '.join(spellings)}".replace("  ", " "))
    _compare(f"options_{program}.txt", lines)


def test_public_names():
    import dlmrt
    from dlmrt import errors, types

    lines = [f"dlmrt.{name}" for name in dlmrt.__all__]
    for name, value in sorted(vars(dlmrt.Engine).items()):
        if not name.startswith("_"):
            function = value.__func__ if isinstance(value, classmethod) else value
            lines.append(f"dlmrt.Engine.{name}({', '.join(inspect.signature(function).parameters)})")
    for name, value in sorted(vars(types).items()):
        if dataclasses.is_dataclass(value):
            lines.append(f"dlmrt.types.{name}({', '.join(field.name for field in dataclasses.fields(value))})")
    for name, value in sorted(vars(errors).items()):
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            lines.append(f"dlmrt.errors.{name}({', '.join(base.__name__ for base in value.__bases__)})")
    _compare("public_names.txt", lines)
