"""Compile the kernels that GPUs add up through for the given architectures; one JSON a line. See `aot` for the others.

A program of its own, since kernels that were defined for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlmrt.cuda.kernels import comm

SIGNATURES = {
    "meet": (
        comm.meet, {"pads": "*i64", "status": "*i32", "number": "i32", "rank": "i32", "limit": "i32"},
        {"IS_DEVICE": True},
    ),
    "sum_terms": (
        comm.sum_terms,
        {"buffers": "*i64", "x": "*bf16", "weight": "*bf16", "total": "*bf16", "y": "*bf16", "status": "*i32",
         "eps": "fp32"},
        {"D": 5120, "DP": 8192, "P": 8, "HAS_X": True, "HAS_NORM": True},
    ),
}  # fmt: skip

for capability in map(int, sys.argv[1:]):
    for name, (kernel, types, constants) in SIGNATURES.items():
        signature = types | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        ptx = compiled.asm["ptx"]
        result = {
            "sm": capability, "kernel": name, "shared": compiled.metadata.shared,
            "release": ptx.count("st.release.sys"), "acquire": ptx.count("ld.acquire.sys"),
            "fence": ptx.count("fence.acq_rel.sys"),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
