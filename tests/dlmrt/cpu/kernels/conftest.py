"""Fixtures of the kernel tests: one build a session, every instruction set this machine runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

if not (shutil.which("cmake") and shutil.which("ninja") and (shutil.which("g++") or shutil.which("c++"))):
    collect_ignore_glob = ["test_*.py"]
else:
    import native

    def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
        """Tests with an `isa` argument run once per instruction set."""
        if "isa" in metafunc.fixturenames:
            metafunc.parametrize("isa", native.runnable())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
