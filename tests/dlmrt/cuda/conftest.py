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


@pytest.fixture
def small_chunks(monkeypatch):
    """The interpreter visits every program of a grid, so grids are kept small."""
    import dlmrt.decode.loop
    import dlmrt.decode.native
    import dlmrt.program.denoiser

    for module in (dlmrt.decode.loop, dlmrt.decode.native):
        monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(dlmrt.program.denoiser, "MAX_ROWS", 4)


@pytest.fixture
def runners(monkeypatch):
    """Loops run on the stand-in driver; the runners that were made, in order."""
    from stand_in import GraphRunner

    from dlmrt.cuda import programs
    from dlmrt.cuda.runners import Launches

    made = []

    def make(steps, **_):
        is_loop = any(not hasattr(step, "grid") for step in steps)
        made.append(GraphRunner(steps) if is_loop else Launches(steps))
        return made[-1]

    monkeypatch.setattr(programs, "make_runner", make)
    return made
