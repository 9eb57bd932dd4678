"""Without Triton no kernel of the cuda executor is tested: a skip that shows in the summary."""

from __future__ import annotations

import pytest


def test_kernels_are_tested_here() -> None:
    pytest.importorskip("triton", reason="all tests of the cuda executor need Triton (make peers)")
