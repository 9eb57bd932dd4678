"""Fixtures of the cpu executor's tests; without the native module they are skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from dlmrt.testing import tiny_config

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("dlmrt.cpu._native") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def config():
    return tiny_config()
