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
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dlmrt.cuda.kernels import matmul
from dlmrt.cuda.launches import Launch, Packed, bind
from dlmrt.cuda.lower import bounded, lower
from dlmrt.cuda.memory import STORAGE
from dlmrt.models.config import DiffusionConfig, ModelConfig, MoeConfig, ResidualConfig, RopeConfig, SlidingConfig
from dlmrt.program.forwards import Formats, record_canvas
from dlmrt.program.loop import LoopOptions, record_loop
from dlmrt.program.nodes import Kernel, maximum, walk

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync"
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip

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


LLADA2 = replace(
    QWEN3_4B, architecture="LLaDA2MoeModelLM", hidden_size=2048, intermediate_size=5120, num_layers=2, num_heads=16,
    num_kv_heads=4, vocab_size=157_184, tie_word_embeddings=False, rope=RopeConfig(partial_rotary_factor=0.5),
    moe=MoeConfig(
        num_experts=256, num_experts_per_token=8, intermediate_size=512, shared_intermediate_size=512,
        num_dense_layers=1, num_groups=8, num_kept_groups=4, scaling_factor=2.5,
    ),
    diffusion=DiffusionConfig(
        canvas_length=32, noise="mask", mask_token_id=156_895, context_attention="block_causal",
        block_anchor="position_zero",
    ),
)  # fmt: skip
GEMMA = replace(
    QWEN3_4B, architecture="DiffusionGemmaForBlockDiffusion", hidden_size=2816, intermediate_size=2112, num_layers=2,
    num_heads=16, num_kv_heads=8, head_dim=256, vocab_size=262_144, logit_softcap=30.0,
    moe=MoeConfig(num_experts=128, num_experts_per_token=8, intermediate_size=704),
    sliding=SlidingConfig(
        window=1024, full_layers=(1,), full_head_dim=512, full_num_kv_heads=2,
        full_rope=RopeConfig(theta=1e6, kind="proportional", partial_rotary_factor=0.25),
    ),
    diffusion=DiffusionConfig(
        canvas_length=256, noise="uniform", commit_rule="entropy_bound",
        residual=ResidualConfig(kind="gated_mlp", intermediate_size=2112, scale_embedding=True),
    ),
)  # fmt: skip
BF16 = Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16")
CASES = {  # options of the loop by name of the program; each adds kernels or constants that the others lack
    "qwen3": (QWEN3_4B, {"commit_rule": "threshold", "use_residual": True}),
    "qwen3 drawn": (QWEN3_4B, {"commit_rule": "joint_threshold", "is_greedy": False}),
    "qwen3 steps": (QWEN3_4B, {"commit_rule": "steps"}),
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
    mlp = {f"model.layers.0.mlp.{part}_proj.weight": "nvfp4" for part in ("gate", "up", "down")}
    packed = replace(BF16, named=mlp)
    yield "qwen3 nvfp4", lower(record_canvas(QWEN3_4B, packed, capacity=8192, max_rows=32), QWEN3_4B).program


def packed_launches():
    """Kernels of formats that no program holds yet, at a projection of Qwen3-4B."""
    m, n, k = 32, 9728, 2560

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    common = {"part": empty(1, m, n), "rows": empty(1, dtype=torch.int32), "M": m, "N": n, "K": k, "PER": k, "BM": m}
    x, e4m3 = empty(m, k, dtype=torch.bfloat16), torch.float8_e4m3fn
    for block in (0, 128):
        yield Launch(
            op="matmul_fp8", kernel=matmul.matmul_fp8, grid=(1,), options={"num_warps": 4, "num_stages": 3},
            arguments={"x": x, "weight": empty(n, k, dtype=e4m3), "scales": empty(n), "BN": 64, "BK": 128,
                       "BLOCK": block, "CDT": tl.bfloat16, **common},
        )  # fmt: skip
    codes, scales = (empty(n, k // 2, dtype=torch.uint8), empty(n, k // 16, dtype=e4m3))
    yield Launch(
        op="matmul_nvfp4_both", kernel=matmul.matmul_nvfp4_both, grid=(1,), options={"num_warps": 4},
        arguments={"codes_x": codes, "scales_x": scales, "codes": codes, "block_scales": scales, "shared": empty(n),
                   "BN": 128, "BK": 128, **common},
    )  # fmt: skip


def launches(capability):
    """Every launch with the name of its program; the block-scaled products need sm_100 or later."""
    for name, program in programs():
        places = {buffer: place(buffer) for buffer in program.buffers()}
        for node in walk(program.body):
            if isinstance(node, Kernel):
                yield name, bind(node, places, capability=capability)
    for launch in packed_launches():
        if capability >= 100 or launch.op != "matmul_nvfp4_both":
            yield "formats", launch


def place(buffer):
    """A tensor without memory where the executor would put `buffer`."""
    shape = tuple(maximum(dim) for dim in buffer.shape) or (1,)

    def empty(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    if buffer.dtype == "nvfp4":
        n, k = shape
        return Packed(
            values=empty((n, k // 2), torch.uint8), scales=empty((n, k // 16), torch.float8_e4m3fn),
            shared=empty((n,), torch.float32),
        )  # fmt: skip
    if buffer.kind == "weight" and not buffer.name.startswith("rope."):
        return Packed(values=empty(shape, STORAGE[buffer.dtype]))
    return empty((4,), torch.int64) if buffer.name == "ring" else empty(shape, STORAGE[buffer.dtype])


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
        for name, launch in launches(capability):
            if (wanted and launch.op not in wanted) or (key := str(key_of(launch))) in seen:
                continue
            seen.add(key)
            compiled = compile_launch(launch, capability)
            ptx = compiled.asm["ptx"]
            result = {
                "sm": capability, "program": name, "op": launch.op, "shared": compiled.metadata.shared,
                "mma": sorted(set(re.findall(MMA, ptx))), "is_native_fp4": "mxf4nvf4" in ptx,
                "has_ftz_product": bool(re.search(r"mul\.(rn\.)?ftz", ptx)),
                "has_release": "st.release.sys" in ptx, **resources(compiled.asm["cubin"]),
            }  # fmt: skip
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(numbers or [90, 100, 120], [word for word in sys.argv[1:] if not word.isdigit()])
