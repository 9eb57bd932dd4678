"""Compile the kernels that GPUs add up through for the given architectures; one JSON a line. See `aot` for the others.

A program of its own, since kernels that were defined for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlmrt.cuda.kernels import comm, head

TILES = {
    "tile_max": "*fp32", "tile_sum": "*fp32", "tile_weighted": "*fp32", "tile_argmax": "*i32", "tile_score": "*fp32",
    "tile_sample": "*i32", "tile_sample_logit": "*fp32",
}  # fmt: skip
PREDICTION = {
    "is_drawn": "*u8", "argmax": "*i32", "argmax_confidence": "*fp32", "token": "*i32", "confidence": "*fp32",
    "entropy": "*fp32", "log_sum_exp": "*fp32", "max_logit": "*fp32", "is_finite_row": "*u8",
}  # fmt: skip
SIGNATURES = {
    "meet": (
        comm.meet, {"ranks": "*i64", "flag": "*i32", "agreed": "*i32"},
        {"P": 8, "HAS_FLAG": True, "IS_DEVICE": True, "TELLS": True, "WAITS": True},
    ),
    "put_terms": (
        comm.put_terms, {"ranks": "*i64", "x": "*fp32", "part": "*fp32", "rows": "*i32"},
        {"M": 32, "D": 5120, "BD": 1024, "S": 4, "P": 8, "HAS_X": True, "TDT": tl.bfloat16},
    ),
    "sum_terms": (
        comm.sum_terms,
        {"ranks": "*i64", "x": "*fp32", "weight": "*bf16", "total": "*fp32", "y": "*fp32", "operand": "*bf16",
         "rows": "*i32", "eps": "fp32"},
        {"M": 32, "D": 5120, "DP": 8192, "P": 8, "TDT": tl.bfloat16, "HAS_X": True, "HAS_WEIGHT": True,
         "HAS_TOTAL": True, "HAS_Y": True, "HAS_OPERAND": True, "NVFP4": False},
    ),
    "take_logits": (
        comm.take_logits, {"ranks": "*i64", "firsts": "*i64", "logits": "*fp32", "rows": "*i32"},
        {"V": 151_936, "BV": 1024, "P": 8},
    ),
    "put_statistics": (
        head.put_statistics, {"ranks": "*i64"} | TILES | {"rows": "*i32"},
        {"M": 32, "T": 149, "TP": 256, "P": 8, "IS_SAMPLED": True},
    ),
    "merge_ranks": (
        head.merge_ranks, {"ranks": "*i64"} | PREDICTION | {"rows": "*i32"},
        {"M": 32, "P": 8, "PP": 8, "IS_SAMPLED": True},
    ),
}  # fmt: skip

for capability in map(int, sys.argv[1:]):
    for name, (kernel, types, constants) in SIGNATURES.items():
        signature = {p: types.get(p, "constexpr") for p in kernel.arg_names}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        options = {"num_warps": 1 if name in ("meet", "merge_ranks") else 8}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        ptx = compiled.asm["ptx"]
        result = {
            "sm": capability, "kernel": name, "shared": compiled.metadata.shared,
            "store": ptx.count("st.relaxed.sys"), "acquire": ptx.count("ld.acquire.sys"),
            "fence": ptx.count("fence.acq_rel.sys"), "clock": ptx.count("%globaltimer"),
            "is_fence_first": 0 <= ptx.find("fence.acq_rel.sys") < ptx.find("st.relaxed.sys"),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
