"""Imports point down, the core runs without torch, and importing it is cheap."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "starlette", "uvicorn", "matplotlib")

# Imports every module of dlmrt while torch, and what is not a core dependency, cannot be imported.
WITHOUT_TORCH = """
import importlib, pkgutil, sys

BLOCKED = (
    "torch", "transformers", "safetensors", "starlette", "uvicorn", "prometheus_client", "reasoning_gym",
)

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import dlmrt
names = [m.name for m in pkgutil.walk_packages(dlmrt.__path__, "dlmrt.", onerror=lambda name: None)]
for name in names:
    if name == "dlmrt.__main__" or name == "dlmrt.ops.eager" or name.startswith("dlmrt.eager."):
        continue
    if name.startswith("dlmrt.parallel.") and name not in ("dlmrt.parallel.ranks", "dlmrt.parallel.layout"):
        continue
    if name.startswith("dlmrt.cuda.") and name != "dlmrt.cuda.device":
        continue
    importlib.import_module(name)
    print(name)
"""

IMPORT_BUDGET, HELP_BUDGET = 90, 380  # modules

IMPORT = "import sys, dlmrt; print(len(sys.modules))"
HELP = """
import contextlib, io, runpy, sys
sys.argv = ["dlmrt", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    runpy.run_module("dlmrt", run_name="__main__")
print(len(sys.modules))
"""


def test_import_rules_hold(run_python, root):
    lint = Path(sys.executable).parent / "lint-imports"
    done = run_python(str(lint), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_core_module_imports_without_torch(run_python):
    done = run_python("-c", WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    for name in ("dlmrt.cli", "dlmrt.decode.loop", "dlmrt.checkpoint.load", "dlmrt.models.qwen3", "dlmrt.ops.numerics"):
        assert name in imported


@pytest.mark.parametrize("module", ["dlmrt", "dlmrt.cli", "orl", "orl.cli"])
def test_import_loads_nothing_heavy(run_python, module):
    done = run_python("-c", f"import sys, {module}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert module in loaded
    assert not loaded & {*HEAVY, "trackio", "wandb", "huggingface_hub", "jinja2", "tokenizers"}


def test_the_product_does_not_depend_on_transformers(root):
    """K35: no hook of transformers can change under us; its models are read from their files, and tests compare."""
    sources = [*(root / "src").rglob("*.py"), root / "pyproject.toml"]
    importing = [
        str(path) for path in sources if re.search(r"^\s*(import|from) transformers\b", path.read_text(), re.M)
    ]
    assert len(sources) > 50
    assert not importing
    required = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = {name: list(needs) for name, needs in required["optional-dependencies"].items() if name != "dev"}
    assert not [
        need for needs in [required["dependencies"], *extras.values()] for need in needs if "transformers" in need
    ]


@pytest.mark.parametrize(("script", "budget"), [(IMPORT, IMPORT_BUDGET), (HELP, HELP_BUDGET)], ids=["import", "help"])
def test_start_up_loads_few_modules(run_python, script, budget):
    """What start-up costs, counted: seconds belong to benchmarks/cold_start.py."""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= budget
