"""Fixtures of the cuda executor's tests: kernels run in Triton's interpreter; without triton they are skipped.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set before any is imported. bfloat16 is wrong in the
interpreter (products, sums and rounding), so everything runs in float32.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from dlmrt.testing import tiny_config

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_[!t]*.py"]  # test_triton.py says so
else:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope):
        """Bounds of `range` are arrays of one number, which numpy 2.4 no longer turns into an int by itself."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def config():
    return tiny_config()
