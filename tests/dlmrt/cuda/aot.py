"""Compile every kernel of the cuda executor for sm_90a, sm_100a and sm_120a and print what came out, one JSON a line.

A program of its own, since kernels that were defined for the interpreter cannot be compiled: `python aot.py [sm ...]
[operation ...]`. Programs are those of three families, whose matrices and experts are kept in every format.
Arguments are what the executor binds for programs of real shapes: launches are made over tensors without memory, so
tiles, types and constants are those of a run, and pointers and sizes are known to be multiples of 16, as they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlmrt.checkpoint.policy import quantized_files
from dlmrt.cuda.launches import Packed, bind
from dlmrt.cuda.lower import bounded, lower
from dlmrt.cuda.memory import STORAGE
from dlmrt.models.config import DiffusionConfig, ResidualConfig
from dlmrt.models.families import family_of
from dlmrt.program.forwards import Formats, record_canvas
from dlmrt.program.loop import LoopOptions, record_loop
from dlmrt.program.nodes import Kernel, maximum, walk

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync"
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_shapes import GEMMA_26B, LLADA2_MINI, QWEN3_4B  # noqa: E402

# One layer of each kind is enough.
QWEN3 = replace(
    QWEN3_4B, num_layers=1, diffusion=replace(
        QWEN3_4B.diffusion, residual=ResidualConfig(kind="gated_mlp", intermediate_size=2560)
    ),
)  # fmt: skip
UNIFORM = replace(
    QWEN3,
    diffusion=DiffusionConfig(canvas_length=256, noise="uniform", logit_shift=1, commit_rule="entropy_bound"),
)
LLADA2 = replace(LLADA2_MINI, num_layers=2)
GEMMA = replace(GEMMA_26B, num_layers=2, sliding=replace(GEMMA_26B.sliding, full_layers=(1,)))
BF16 = Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16")
CASES = {  # options of the loop by name of the program; each adds kernels or constants that the others lack
    "qwen3": (QWEN3, {"commit_rule": "threshold", "use_residual": True}),
    "qwen3 drawn": (QWEN3, {"commit_rule": "joint_threshold", "is_greedy": False}),
    "qwen3 steps": (QWEN3, {"commit_rule": "steps"}),
    "qwen3 uniform": (UNIFORM, {"commit_rule": "entropy_bound", "is_greedy": False, "is_filtered": True}),
    "qwen3 given": (UNIFORM, {"commit_rule": "entropy_bound", "num_given": (4, 48)}),
    "qwen3 sub_blocks": (
        replace(QWEN3_4B, diffusion=replace(QWEN3_4B.diffusion, logit_shift=1)), {"commit_rule": "sub_blocks"}
    ),
    "llada2 edits": (
        replace(LLADA2, diffusion=replace(LLADA2.diffusion, delete_token_id=156_930, split_token_id=156_931)),
        {"commit_rule": "joint_threshold_indel", "num_remembered": 64},
    ),
    "llada2": (LLADA2, {"commit_rule": "threshold"}),
    "llada2 by block": (
        replace(LLADA2, moe=replace(LLADA2.moe, expert_capacity=64)), {"commit_rule": "threshold"}
    ),
    "diffusion_gemma": (GEMMA, {"commit_rule": "entropy_bound", "is_greedy": False, "use_residual": True}),
}  # fmt: skip


def programs():
    """Programs that together hold every kernel, by name."""
    for name, (config, changes) in CASES.items():
        options = LoopOptions(canvas_length=config.diffusion.canvas_length, prefill_chunk=512, **changes)
        yield name, bounded(lower(record_loop(config, BF16, options, capacity=8192), config).program)
    for name, config in (("qwen3", QWEN3), ("llada2", LLADA2), ("diffusion_gemma", GEMMA)):
        for kept, is_both in (("fp8", False), ("nvfp4", False), ("nvfp4", True)):
            files = quantized_files(config, family_of(config).tensor_shapes(config), "linears").values()
            named = {source: kept for file in files for source in file.sources}
            program = record_canvas(config, replace(BF16, named=named), capacity=8192, max_rows=32)
            lowered = lower(program, config, has_nvfp4_operands=is_both).program
            yield f"{name}, {kept}{' operands' if is_both else ''}", lowered


def launches(capability):
    """Every launch with the name of its program; the block-scaled products need sm_100 or later."""
    for name, program in programs():
        if capability < 100 and name.endswith("operands"):
            continue
        for scale_block in (0, 128) if "fp8" in name else (0,):
            places = {buffer: place(buffer, scale_block) for buffer in program.buffers()}
            for node in walk(program.body):
                if isinstance(node, Kernel):
                    yield name, bind(node, places, capability=capability)


def place(buffer, scale_block):
    """A tensor without memory where the executor would put `buffer`."""
    shape = tuple(maximum(dim) for dim in buffer.shape) or (1,)

    def empty(shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    if buffer.dtype == "nvfp4":
        *stack, k = shape
        return Packed(
            values=empty((*stack, k // 2), torch.uint8), scales=empty((*stack, k // 16), torch.float8_e4m3fn),
            shared=empty(stack),
        )  # fmt: skip
    if buffer.dtype == "fp8":
        scales = shape[:-1] if scale_block == 0 else (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        return Packed(values=empty(shape, torch.float8_e4m3fn), scales=empty(scales), scale_block=scale_block)
    if buffer.kind == "weight" and not buffer.name.startswith("rope."):
        return Packed(values=empty(shape, STORAGE[buffer.dtype]))
    return empty((4,), torch.int64) if buffer.name == "ring" else empty(shape, STORAGE[buffer.dtype])


def compile_launch(launch, capability):
    """The compiled kernel of `launch` for one architecture."""
    signature, constants, attributes = {}, {}, {}
    arguments = dict(launch.arguments) | launch.condition(None if launch.flag is None else 0)
    libraries = {"extern_libs": arguments.pop("extern_libs")} if launch.flag is not None else {}
    for at, parameter in enumerate(launch.kernel.params):
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = parameter.annotation_type or ("fp32" if isinstance(value, float) else "i32")
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options) | libraries)


def resources(cubin):
    """Registers, stack and local memory in bytes, as cuobjdump states them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return {name: int(found[name]) for name in ("REG", "STACK", "LOCAL")}


def key_of(launch):
    """What makes two launches one compiled kernel; of a product's sizes only whether they are whole tiles."""
    values = {
        name: value.dtype if isinstance(value, torch.Tensor) else value for name, value in launch.arguments.items()
    }
    if "BN" in values:
        for size, tile in (("M", "BM"), ("N", "BN"), ("K", "BK"), ("KD", "BK"), ("V", "BN"), ("PER", "BK")):
            if size in values:
                values[size] = values[size] % values[tile] == 0
    return launch.kernel, tuple(sorted(values.items(), key=str)), tuple(launch.options.items())


def main(capabilities, wanted):
    for capability in capabilities:
        seen = set()
        for name, launch in launches(capability):
            if (wanted and not {launch.op, launch.kernel.fn.__name__} & set(wanted)) or (
                key := str(key_of(launch))
            ) in seen:
                continue
            seen.add(key)
            compiled = compile_launch(launch, capability)
            ptx = compiled.asm["ptx"]
            result = {
                "sm": capability, "program": name, "op": launch.op, "kernel": launch.kernel.fn.__name__,
                "format": launch.arguments.get("FORMAT"), "shared": compiled.metadata.shared,
                "mma": sorted(set(re.findall(MMA, ptx))), "is_native_fp4": "mxf4nvf4" in ptx,
                "has_ftz_product": bool(re.search(r"mul\.(rn\.)?ftz", ptx)),
                "has_release": "st.release.sys" in ptx, "sets_condition": "cudaGraphSetConditional" in ptx,
                **resources(compiled.asm["cubin"]),
            }  # fmt: skip
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers or [90, 100, 120], [word for word in sys.argv[1:] if not word.isdigit()])
