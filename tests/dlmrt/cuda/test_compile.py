"""The hot kernels compile ahead of time for the architecture with the least shared memory, without spills.

`python tests/dlmrt/cuda/aot.py` compiles every kernel for all three; it takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlmrt.cuda.tiles import SHARED_BYTES

HOT = ("matmul_nvfp4", "attention", "matmul_experts", "publish", "matmul_nvfp4_both")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the compiler says of each kernel."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, str(Path(__file__).parent / "aot.py"), "120", *HOT]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_hot_kernels_fit_sm_120_and_use_the_instructions_they_are_made_for(compiled):
    assert {kernel["op"] for kernel in compiled} == set(HOT)
    for kernel in compiled:
        assert kernel["shared"] <= SHARED_BYTES[120], kernel
        assert kernel["STACK"] == kernel["LOCAL"] == 0, kernel
        assert kernel["op"] == "publish" or kernel["mma"], kernel
        assert kernel["op"] != "publish" or kernel["has_release"], kernel
        assert kernel["op"] != "matmul_nvfp4" or not kernel["has_ftz_product"], "a subnormal factor would be flushed"
        assert kernel["op"] != "matmul_nvfp4_both" or kernel["is_native_fp4"], kernel
