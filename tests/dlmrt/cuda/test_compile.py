"""Kernels compile ahead of time within the shared memory of an architecture, without spills, to the instructions meant.

Here the hot kernels in every format, for the architecture with the least shared memory, and products of two NVFP4
operands for the one that is particular about their tiles; DLMRT_TEST_CUDA_MATRIX=all compiles every kernel of three
families in every format for sm_90a, sm_100a and sm_120a (`aot.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from dlmrt.cuda.graph import SET_CONDITION
from dlmrt.cuda.launches import FLAGS
from dlmrt.cuda.tiles import SHARED_BYTES

pytestmark = pytest.mark.timeout(3600)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
IS_ALL = os.environ.get("DLMRT_TEST_CUDA_MATRIX") == "all"
PRODUCTS = ("matmul", "matmul_nvfp4_both", "matmul_experts", "attention", "head_stats", "soft_embedding")
HOT = ("matmul_nvfp4_both", "matmul_experts", "attention", "publish", "finish_step")
STACK_BYTES = 16  # that a kernel off the hot path may keep in memory


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the compiler says of each kernel."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    found = []
    for wanted in [[]] if IS_ALL else [["120", *HOT], ["100", "matmul_nvfp4_both"]]:
        command = [sys.executable, str(Path(__file__).parent / "aot.py"), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found += [json.loads(line) for line in done.stdout.splitlines()]
    return found


def test_every_kernel_fits_and_uses_the_instructions_that_it_is_made_for(compiled):
    assert {*HOT} <= {kernel["kernel"] for kernel in compiled}
    assert {kernel["format"] for kernel in compiled if kernel["kernel"] == "matmul_experts"} == {
        "float",
        "fp8",
        "nvfp4",
    }
    for kernel in compiled:
        is_router = kernel["kernel"] == "matmul" and not kernel["mma"]  # its product is float32
        is_hot = kernel["kernel"] in PRODUCTS and not is_router
        assert kernel["shared"] <= SHARED_BYTES[kernel["sm"]], kernel
        assert kernel["LOCAL"] == 0 and kernel["STACK"] <= (0 if is_hot else STACK_BYTES), kernel
        assert kernel["mma"] or not is_hot, kernel
        assert kernel["kernel"] != "publish" or kernel["has_release"], kernel
        assert kernel["sets_condition"] == (kernel["op"] in FLAGS), kernel
        assert kernel["format"] != "nvfp4" or not kernel["has_ftz_product"], "a subnormal factor would be flushed"
        assert kernel["kernel"] != "matmul_nvfp4_both" or kernel["is_native_fp4"], kernel


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", "sm_120a"])
def test_the_kernel_that_sets_a_condition_assembles(architecture, tmp_path):
    """The driver compiles its PTX for the card at hand; an assembler without a driver says now whether it can."""
    source, out = tmp_path / "set_condition.ptx", tmp_path / "set_condition.cubin"
    source.write_bytes(SET_CONDITION.strip())
    name = "ptxas" if architecture == "sm_90a" else "ptxas-blackwell"
    command = [str(TOOLS / name), f"-arch={architecture}", "-o", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"cudaGraphSetConditional" in out.read_bytes(), "the symbol that the driver resolves"
