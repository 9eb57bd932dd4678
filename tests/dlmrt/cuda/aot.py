"""Compile every kernel of the cuda executor for sm_90a, sm_100a and sm_120a and print what came out, one JSON a line.

A program of its own, since kernels that were defined for the interpreter cannot be compiled: `python aot.py [sm ...]`.
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

from dlmrt.cuda.launches import Packed, bind
from dlmrt.cuda.lower import bounded, lower
from dlmrt.cuda.memory import STORAGE
from dlmrt.models.config import DiffusionConfig, ModelConfig, ResidualConfig, RopeConfig
from dlmrt.program.forwards import Formats, record_canvas
from dlmrt.program.loop import LoopOptions, record_loop
from dlmrt.program.nodes import Kernel, maximum, walk

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync"
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
NARROW = "num_warps", "num_stages"

QWEN3_4B = ModelConfig(
    architecture="Qwen3ForCausalLM", hidden_size=2560, intermediate_size=9728, num_layers=1, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=8192, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6), tie_word_embeddings=True, eos_token_ids=(1,), pad_token_id=None, bos_token_id=None,
    dtype="bfloat16",
    diffusion=DiffusionConfig(
        canvas_length=32, noise="mask", mask_token_id=151_669, residual=ResidualConfig(
            kind="gated_mlp", intermediate_size=2560
        ),
    ),
)  # fmt: skip
UNIFORM = replace(
    QWEN3_4B,
    diffusion=DiffusionConfig(canvas_length=256, noise="uniform", logit_shift=1, commit_rule="entropy_bound"),
)


def programs():
    """Programs that together hold every kernel, by name."""
    bf16 = Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16")
    greedy = LoopOptions(canvas_length=32, prefill_chunk=512, commit_rule="threshold", use_residual=True)
    drawn = LoopOptions(canvas_length=32, prefill_chunk=512, commit_rule="joint_threshold", is_greedy=False)
    steps = LoopOptions(canvas_length=32, prefill_chunk=512, commit_rule="steps")
    filtered = LoopOptions(
        canvas_length=256, prefill_chunk=512, commit_rule="entropy_bound", is_greedy=False, is_filtered=True
    )
    yield "qwen3 loop", QWEN3_4B, bounded(lower(record_loop(QWEN3_4B, bf16, greedy, capacity=8192), QWEN3_4B).program)
    yield "qwen3 drawn", QWEN3_4B, bounded(lower(record_loop(QWEN3_4B, bf16, drawn, capacity=8192), QWEN3_4B).program)
    yield "qwen3 steps", QWEN3_4B, bounded(lower(record_loop(QWEN3_4B, bf16, steps, capacity=8192), QWEN3_4B).program)
    yield "qwen3 uniform", UNIFORM, bounded(lower(record_loop(UNIFORM, bf16, filtered, capacity=8192), UNIFORM).program)
    yield "qwen3 canvas", QWEN3_4B, lower(record_canvas(QWEN3_4B, bf16, capacity=8192, max_rows=32), QWEN3_4B).program


def place(buffer):
    """A tensor without memory where the executor would put `buffer`."""
    shape = tuple(maximum(dim) for dim in buffer.shape) or (1,)
    if buffer.kind == "weight" and not buffer.name.startswith("rope."):
        return Packed(values=torch.empty(shape, dtype=STORAGE[buffer.dtype], device="meta"))
    if buffer.name == "ring":
        return torch.empty(4, dtype=torch.int64, device="meta")
    return torch.empty(shape, dtype=STORAGE[buffer.dtype], device="meta")


def compile_launch(launch, capability):
    """The compiled kernel of `launch` for one architecture."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


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
    """What makes two launches one compiled kernel."""
    values = {
        name: value.dtype if isinstance(value, torch.Tensor) else value for name, value in launch.arguments.items()
    }
    return launch.kernel, tuple(sorted(values.items(), key=str)), tuple(launch.options.items())


def main(capabilities, wanted):
    for capability in capabilities:
        seen = set()
        for name, _, program in programs():
            places = {buffer: place(buffer) for buffer in program.buffers()}
            for node in walk(program.body):
                if not isinstance(node, Kernel) or (wanted and node.op not in wanted):
                    continue
                launch = bind(node, places, capability=capability)
                if (key := str(key_of(launch))) in seen:
                    continue
                seen.add(key)
                compiled = compile_launch(launch, capability)
                ptx = compiled.asm["ptx"]
                result = {
                    "sm": capability, "program": name, "op": node.op, "shared": compiled.metadata.shared,
                    "mma": sorted(set(re.findall(MMA, ptx))), "is_native_fp4": "mxf4nvf4" in ptx,
                    "has_ftz_product": bool(re.search(r"mul\.(rn\.)?ftz", ptx)),
                    "has_release": "st.release.sys" in ptx, **resources(compiled.asm["cubin"]),
                }  # fmt: skip
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers or [90, 100, 120], [word for word in sys.argv[1:] if not word.isdigit()])
