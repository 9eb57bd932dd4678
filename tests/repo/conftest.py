"""Where the repository is, and child processes that see its packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Run the interpreter of the tests in a child process with our packages on its path."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": ""}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )

    return run
