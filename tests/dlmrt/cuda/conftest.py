"""Fixtures of the cuda executor's tests: kernels run in Triton's interpreter; without triton they are skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from dlmrt.testing import tiny_config

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_[!t]*.py"]  # test_triton.py says so


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def config():
    return tiny_config()
