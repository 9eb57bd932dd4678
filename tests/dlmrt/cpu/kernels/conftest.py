"""Fixtures of the kernel tests: one build a session, every instruction set this machine runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers in native.py


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with an `isa` argument run once per instruction set."""
    if "isa" in metafunc.fixturenames:
        from native import runnable

        metafunc.parametrize("isa", runnable())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
