"""Public names and command-line options are frozen: a change must be wanted, and tell users how to migrate.

The lists lie in tests/repo/frozen. When a change is wanted, run `python tests/repo/test_frozen.py`, read the difference
and add a line to CHANGELOG.md.
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


def _options(program: str) -> list[str]:
    command = typer.main.get_command(importlib.import_module(f"{program}.cli").app)
    lines = []
    for verb, sub in {"": command, **command.commands}.items():
        for parameter in sub.params:
            words = [program, verb, *parameter.opts, *parameter.secondary_opts]
            lines.append(" ".join(word for word in words if word))
    return lines


def _names() -> list[str]:
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
    return lines


LISTS = {
    "options_dlmrt.txt": lambda: _options("dlmrt"),
    "options_orl.txt": lambda: _options("orl"),
    "public_names.txt": _names,
}


@pytest.mark.parametrize("name", LISTS)
def test_list_is_as_frozen(name):
    frozen = (FROZEN / name).read_text(encoding="utf-8").splitlines()
    changed = [line for line in difflib.ndiff(frozen, LISTS[name]()) if line[0] in "+-"]
    assert not changed, f"tests/repo/frozen/{name} differs:\n" + "\n".join(changed)


if __name__ == "__main__":
    for name, lines in LISTS.items():
        (FROZEN / name).write_text("\n".join(lines()) + "\n", encoding="utf-8")
