"""Check the cuda executor on a GPU: numbers, three ways to run a loop, costs, ring, cancellation. At most 8 minutes.

    python benchmarks/gpu_check.py [--only env,while] [--out FOLDER] [--budget 460]
    python benchmarks/gpu_check.py --dry

Runs from a source tree with torch >= 2.11 and the triton and cuda-bindings that come with it; no extension is built.
Each section is a process with a time limit, so that a hang, a crash or a sticky device error costs one section. They
stand in the order of what they decide; those that time nothing run side by side. Results go to gpu_check.json beside a
table on stdout; the last line is JSON. Models have random weights, so texts mean nothing; sizes are those of the named
models. --dry runs the sections that need no device in Triton's interpreter, at sizes that it can bear: a check of this
script, whose times say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))  # a source tree will do

from dlmrt.testing import interpret_kernels  # noqa: E402

IS_DRY = "--dry" in sys.argv
if IS_DRY:
    interpret_kernels()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import dlmrt.decode.loop  # noqa: E402
import dlmrt.decode.native  # noqa: E402
import dlmrt.program.denoiser  # noqa: E402
from dlmrt.checkpoint.policy import quantized_files  # noqa: E402
from dlmrt.decode.loop import BlockEvent, LoopRequest, StepEvent, decode  # noqa: E402
from dlmrt.decode.native import run_loop  # noqa: E402
from dlmrt.decode.sampling import banned_ids  # noqa: E402
from dlmrt.decode.settings import resolve  # noqa: E402
from dlmrt.models.config import DiffusionConfig, ModelConfig, ResidualConfig, RopeConfig  # noqa: E402
from dlmrt.models.families import family_of  # noqa: E402
from dlmrt.program.forwards import Formats  # noqa: E402
from dlmrt.types import DecodeConfig  # noqa: E402
from gpu_shapes import GEMMA_26B, LLADA2_MINI, QWEN3_4B  # noqa: E402

DEVICE = "cpu" if IS_DRY else "cuda"
MODES = ("off",) if IS_DRY else ("off", "step", "loop")
CANVAS = 4 if IS_DRY else 8  # of tiny models

Result = dict[str, Any]

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM", hidden_size=64, intermediate_size=96, num_layers=1 if IS_DRY else 2, num_heads=4,
    num_kv_heads=2, head_dim=16, vocab_size=262, max_position_embeddings=8192, rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0), tie_word_embeddings=True, eos_token_ids=(261,), pad_token_id=None,
    bos_token_id=None, dtype="float32",
    diffusion=DiffusionConfig(canvas_length=CANVAS, noise="mask", mask_token_id=256),
)  # fmt: skip


def shrunk(config: ModelConfig) -> ModelConfig:
    """A family at a size that takes no time: its layers of each kind, few experts, float32."""
    diffusion, moe = config.diffusion, config.moe
    assert diffusion is not None
    width = diffusion.residual.intermediate_size and 64
    diffusion = replace(
        diffusion, canvas_length=CANVAS, mask_token_id=diffusion.mask_token_id and 256,
        residual=replace(diffusion.residual, intermediate_size=width),
    )  # fmt: skip
    moe = moe and replace(
        moe, num_experts=8, num_experts_per_token=2, intermediate_size=32, num_groups=moe.num_groups and 4,
        shared_intermediate_size=moe.shared_intermediate_size and 32, num_kept_groups=moe.num_kept_groups and 2,
    )  # fmt: skip
    sliding = config.sliding and replace(
        config.sliding, window=5, full_layers=(1,), full_head_dim=32, full_num_kv_heads=2
    )
    return replace(
        TINY, architecture=config.architecture, num_layers=2, tie_word_embeddings=config.tie_word_embeddings,
        logit_softcap=config.logit_softcap, rope=config.rope, moe=moe, sliding=sliding, diffusion=diffusion,
    )  # fmt: skip


def uniform_of(length: int) -> DiffusionConfig:
    """Uniform noise, shifted logits and a residual."""
    return DiffusionConfig(
        canvas_length=length, noise="uniform", logit_shift=1, commit_rule="entropy_bound",
        residual=ResidualConfig(kind="gated_mlp", intermediate_size=64, alpha=0.3),
    )  # fmt: skip


SCENARIOS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "threshold": (TINY, {"temperature": 0, "threshold": 0.3}),
    "joint_threshold, sampled": (
        replace(TINY, diffusion=DiffusionConfig(
            canvas_length=CANVAS, noise="mask", mask_token_id=256, block_anchor="position_zero",
            context_attention="block_causal",
        )),
        {"temperature": 0.9, "seed": 11, "commit_rule": "joint_threshold", "threshold": 0.2, "edit_threshold": 0.1,
         "max_post_edit_steps": 2},
    ),
    "entropy_bound, filtered, residual": (
        replace(TINY, diffusion=uniform_of(CANVAS)),
        {"temperature": 0.8, "seed": 5, "entropy_bound": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ),
    "steps": (TINY, {"temperature": 0, "commit_rule": "steps"}),
}  # fmt: skip
FAMILIES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llada2": (shrunk(LLADA2_MINI), {"temperature": 0, "threshold": 0.3}),
    "diffusion_gemma": (shrunk(GEMMA_26B), {"temperature": 0.9, "seed": 3, "entropy_bound": 1.0}),
}


def draw_params(config: ModelConfig, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Random weights whose predictions are spread over confidences."""
    generator = torch.Generator(device).manual_seed(seed)
    family, dtype = family_of(config), getattr(torch, config.dtype)
    params: dict[str, Tensor] = {}
    for name, shape in family.tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator, device=device)
        scale = 0.7 if name == family.EMBEDDING else shape[-1] ** -0.5
        params[name] = ((1 + 0.2 * values) if len(shape) == 1 else values * scale).to(dtype)
    return params


class RandomParams(Mapping[str, Any]):
    """Weights of a large model, drawn on the device when they are asked for and held by nobody.

    Args:
        format: "" for the config's type, or the format of the matrices that a quantised file holds: experts where there
            are any, else all but embedding and head.
    """

    def __init__(self, config: ModelConfig, format: str) -> None:
        self._shapes, self._config = family_of(config).tensor_shapes(config), config
        files = quantized_files(config, self._shapes, None).values() if format else ()
        self.kept = {source: format for file in files for source in file.sources}

    def __getitem__(self, name: str) -> Any:
        from dlmrt.cuda.weights import Packed

        shape, family = self._shapes[name], family_of(self._config)
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
        scale = 0.7 if name == family.EMBEDDING else shape[-1] ** -0.5
        if self.kept.get(name) == "nvfp4":
            codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=generator, device=DEVICE)
            ones = torch.ones(*shape[:-1], shape[-1] // 16, device=DEVICE).to(torch.float8_e4m3fn)
            shared = torch.full(shape[:-1], scale / 2.9, device=DEVICE)  # 2.9: root mean square of all codes
            return Packed(values=codes.to(torch.uint8), scales=ones, shared=shared)
        values = torch.randn(shape, generator=generator, device=DEVICE, dtype=getattr(torch, self._config.dtype))
        if self.kept.get(name) == "fp8":
            return Packed(values=values.to(torch.float8_e4m3fn), scales=torch.full(shape[:-1], scale, device=DEVICE))
        return (1 + 0.2 * values) if len(shape) == 1 else values * scale

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def bytes_a_forward(self, rows: int) -> float:
        """What a forward over `rows` reads of the weights, experts as often as evenly spread choices hit them."""
        total, family = 0.0, family_of(self._config)
        for name, shape in self._shapes.items():
            if name == family.EMBEDDING and not self._config.tie_word_embeddings:
                continue
            bits = {"nvfp4": 4.5, "fp8": 8.0}.get(self.kept.get(name, ""), 16.0)
            share = 1.0
            if len(shape) == 3 and self._config.moe is not None:
                moe = self._config.moe
                share = 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** rows
            total += share * bits / 8 * float(np.prod(shape))
        return total


def request_for(config: ModelConfig, num_prompt: int, **settings: Any) -> LoopRequest:
    """A request with a fixed prompt."""
    assert config.diffusion is not None
    banned = banned_ids(config, range(config.vocab_size))
    return LoopRequest(
        prompt_S=(np.arange(num_prompt, dtype=np.int32) * 7 + 3) % 250, diffusion=config.diffusion, banned=banned,
        settings=resolve(DecodeConfig(**settings), config, {}),
        allowed=np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), banned),
    )  # fmt: skip


def make(config: ModelConfig, params: Mapping[str, Any], mode: str, kept: Mapping[str, str] | None = None) -> Any:
    """The executor under test; `kept` says which matrices are in a format of their own."""
    from dlmrt.cuda import executor

    if IS_DRY:  # the interpreter visits every program of a grid
        dlmrt.program.denoiser.MAX_ROWS = CANVAS
        dlmrt.decode.loop.PREFILL_CHUNK = dlmrt.decode.native.PREFILL_CHUNK = CANVAS
    formats = Formats(matrix=config.dtype, table=config.dtype, cache=config.dtype, named=dict(kept or {}))
    return executor.CudaDenoiser(params, config, dtype=config.dtype, device=DEVICE, mode=mode, formats=formats)


def decisions(events: Iterable[Any]) -> list[Any]:
    """What a run decided, step by step."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, StepEvent):
            found.append((event.state.canvas_L.tolist(), event.state.committed_L.tolist()))
        elif isinstance(event, BlockEvent):
            found.append((event.answer, event.end_reason, len(event.forwards)))
    return found


def timed(run: Callable[[], object], repeats: int = 5, warm_ups: int = 1) -> tuple[float, float]:
    """Median seconds of `run` and the spread (largest less smallest)."""
    times = []
    for turn in range(1 if IS_DRY else warm_ups + repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        if turn >= warm_ups or IS_DRY:
            times.append(time.perf_counter() - begin)
    return statistics.median(times), max(times) - min(times)


def synchronize() -> None:
    """Wait for the device."""
    if not IS_DRY:
        torch.cuda.synchronize()


# Sections. Each returns what it measured and "ok".


def env() -> Result:
    """Versions, and whether loops in graphs can be captured here."""
    import triton

    from dlmrt.cuda.runners import loop_driver

    _, version = loop_driver().cuDriverGetVersion()
    properties = torch.cuda.get_device_properties(0)
    return {
        "ok": True, "device": properties.name, "capability": torch.cuda.get_device_capability(),
        "memory_gib": properties.total_memory / 2**30, "torch": torch.__version__, "triton": triton.__version__,
        "driver_api": version,
    }  # fmt: skip


def while_loop() -> Result:
    """Exact turns of a captured loop, 0 among them; cost of one turn, with and without a kernel for its condition."""
    from dlmrt.cuda.graph import Region
    from dlmrt.cuda.kernels import loop
    from dlmrt.cuda.launches import Launch
    from dlmrt.cuda.runners import WholeGraph

    more, left, goes_on, ends = (torch.ones(1, dtype=torch.int32, device="cuda") for _ in range(4))
    arguments = {"more_blocks": more, "blocks_left": left, "goes_on": goes_on, "ends": ends}
    launch = Launch(op="bound_launch", kernel=loop.bound_launch, grid=(1,), arguments=arguments, flag=goes_on)
    result: Result = {"ok": True}
    for is_direct in (False, True):
        graph = WholeGraph((Region(is_loop=True, flag=goes_on, name="goes_on", body=(launch,)),), is_direct=is_direct)
        name, seconds = "condition set by the kernel" if is_direct else "by a kernel of its own", {}
        result[f"{name}, as asked"] = graph.is_direct == is_direct  # False: the driver did not load such a kernel
        for turns in (0, 1, 1000, 10_000):

            def run(turns: int = turns, graph: Any = graph) -> None:
                left.fill_(turns)
                goes_on.fill_(int(turns > 0))
                graph.run()

            seconds[turns], _ = timed(run)
            result["ok"] &= int(left) == 0 and int(goes_on) == 0
        result[f"{name}, us a turn"] = 1e6 * (seconds[10_000] - seconds[1000]) / 9000
        result[f"{name}, us a launch"] = 1e6 * seconds[1]
    return result


def equal_decisions(scenarios: Mapping[str, tuple[ModelConfig, dict[str, Any]]]) -> Result:
    """Every mode makes the decisions of the slow loop in torch; a second run and small launches too."""
    from dlmrt.cuda import executor
    from dlmrt.eager.executor import EagerDenoiser

    result: Result = {"ok": True}
    num_prompt, num_tokens, num_steps = (6, 4, 2) if IS_DRY else (37, 40, 6)
    for name, (config, settings) in scenarios.items():
        params = draw_params(config, "cpu")
        request = request_for(
            config, num_prompt, **{"max_tokens": num_tokens, "max_denoising_steps": num_steps} | settings
        )
        wanted = decisions(decode(EagerDenoiser(params, config), request))
        for mode in MODES:
            denoiser = make(config, params, mode)
            runs = [decisions(run_loop(denoiser, request)) for _ in range(1 if IS_DRY else 2)]
            if not IS_DRY:
                executor.MIN_SLOTS = 9
                runs.append(decisions(run_loop(denoiser, request)))
                executor.MIN_SLOTS = 64
            result[f"{name}, {mode}"] = all(run == wanted for run in runs)
            result["ok"] &= result[f"{name}, {mode}"]
    return result


def tiny() -> Result:
    """Every rule, sampling and noise on a tiny Qwen3."""
    return equal_decisions(SCENARIOS)


def families() -> Result:
    """LLaDA2 and DiffusionGemma at a tiny size."""
    return equal_decisions(FAMILIES)


def formats() -> Result:
    """Logits over packed matrices and experts against float32 over what they stand for."""
    from dlmrt.cuda import lower
    from dlmrt.eager.executor import EagerDenoiser

    if IS_DRY:
        lower.operand_type = lambda _: "float32"
    result: Result = {"ok": True}
    for name, config in (("qwen3", TINY), ("llada2", shrunk(LLADA2_MINI)), ("diffusion_gemma", shrunk(GEMMA_26B))):
        for kind in ("fp8", "nvfp4"):
            params = RandomParams(config, kind)
            plain = {key: dequantized(params[key]).float().cpu() for key in params}
            mine, other = make(config, params, MODES[-1], params.kept), EagerDenoiser(plain, config)
            canvas = (np.arange(CANVAS, dtype=np.int32) * 31 + 5) % 250
            for each in (mine, other):
                each.extend(np.arange(CANVAS, dtype=np.int32))
            got, wanted = mine.forward(canvas, None, None), other.forward(canvas, None, None)
            # The median row: where rounding sends a row to another expert it differs by whole units.
            error = np.median(np.abs(got - wanted).max(1)) / np.abs(wanted).max()
            result[f"{name}, {kind}"] = float(error)
            result["ok"] &= bool(error < (1e-3 if IS_DRY else 0.03))
    return result


def dequantized(weight: Any) -> Tensor:
    """Values of a packed or plain weight."""
    if isinstance(weight, Tensor):
        return weight
    if weight.shared is None:
        return weight.values.float() * weight.scales[..., None]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=DEVICE)
    codes = torch.stack((table[(weight.values & 15).long()], table[(weight.values >> 4).long()]), -1).flatten(-2)
    return codes * weight.scales.float().repeat_interleave(16, -1) * weight.shared[..., None]


def forwards() -> Result:
    """Logits of a bfloat16 model with real head and vocabulary sizes against float32 over the same weights."""
    from dlmrt.eager.executor import EagerDenoiser

    result: Result = {"ok": True}
    for length in (CANVAS,) if IS_DRY else (1, 32, 256):
        diffusion = DiffusionConfig(canvas_length=length, noise="mask", mask_token_id=256)
        config = replace(TINY, diffusion=diffusion) if IS_DRY else replace(
            QWEN3_4B, num_layers=2, hidden_size=1024, intermediate_size=3072, num_heads=16, vocab_size=32_000,
            eos_token_ids=(1,), diffusion=diffusion,
        )  # fmt: skip
        params = draw_params(config, "cpu")
        denoiser, reference = (
            make(config, params, "step"),
            EagerDenoiser({name: values.float() for name, values in params.items()}, config),
        )
        for context in (0, 5) if IS_DRY else (0, 5, 700):
            ids = (np.arange(context, dtype=np.int32) * 7 + 3) % 250
            canvas = np.full(length, 256, dtype=np.int32)
            for each in (denoiser, reference):
                each.reset()
                each.extend(ids)
            mine, other = denoiser.forward(canvas, None, None), reference.forward(canvas, None, None)
            error = float(np.abs(mine - other).max() / np.abs(other).max())
            result[f"canvas {length}, context {context}"] = error
            result["ok"] &= error < 0.03
    return result


def bandwidth() -> float:
    """Bytes a second of a large copy, reads and writes counted."""
    source = torch.empty(1 << (20 if IS_DRY else 30), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source))
    return 2 * source.numel() / seconds


def speed(config: ModelConfig, length: int, runs: Mapping[str, tuple[str, ...]]) -> Result:
    """Milliseconds a forward inside the loop, by format of the matrices ("": bfloat16) and mode."""
    assert config.diffusion is not None
    if IS_DRY:
        config, length = shrunk(config), CANVAS
    else:
        config = replace(config, diffusion=replace(config.diffusion, canvas_length=length))
    result: Result = {"ok": True, "bandwidth_gb_s": bandwidth() / 1e9, "canvas": length}
    for kind, modes in runs.items():
        texts = []
        for mode in MODES if IS_DRY else modes:
            seconds, spread, text = time_of(config, kind, mode, length)
            texts.append(text)
            name = f"{kind or config.dtype}, {mode}"
            result[f"{name}, ms a forward"], result[f"{name}, spread ms"] = 1e3 * seconds, 1e3 * spread
            read = RandomParams(config, kind).bytes_a_forward(length)
            result[f"{name}, share of bandwidth"] = read / seconds / (result["bandwidth_gb_s"] * 1e9)
            if not IS_DRY:
                torch.cuda.empty_cache()
        result["ok"] &= all(text == texts[0] for text in texts)
    return result


def time_of(config: ModelConfig, kind: str, mode: str, length: int) -> tuple[float, float, list[Any]]:
    """Seconds of a forward and their spread, and what was decided.

    Two blocks more or less, so that prompt, launch and reading cancel out.
    """
    num_steps = 1 if IS_DRY else 16
    params = RandomParams(config, kind)
    denoiser = make(config, params, mode, params.kept)

    def run(num_blocks: int) -> list[Any]:
        request = request_for(
            config, CANVAS if IS_DRY else 512, max_tokens=length * num_blocks, temperature=0, commit_rule="steps",
            max_denoising_steps=num_steps, ignore_eos=True,
        )  # fmt: skip
        return decisions(run_loop(denoiser, request))

    text = run(2)
    short, _ = timed(lambda: run(1), repeats=3)
    long, spread = timed(lambda: run(3), repeats=3)
    return (long - short) / (2 * (num_steps + 1)), spread, text


def qwen3_4b() -> Result:
    """Canvas 32: whole loop, step graphs, single launches; FP8 and NVFP4 weights."""
    return speed(QWEN3_4B, 32, {"": ("loop", "step", "off"), "nvfp4": ("loop",), "fp8": ("loop",)})


def qwen3_4b_256() -> Result:
    """Canvas 256: whole loop and step graphs."""
    return speed(QWEN3_4B, 256, {"": ("loop", "step")})


def llada2_mini() -> Result:
    """Canvas 32, 256 experts of which 8 are chosen."""
    return speed(LLADA2_MINI, 32, {"nvfp4": ("loop",), "": ("loop",), "fp8": ("loop",)})


def gemma_26b() -> Result:
    """Canvas 256, 128 experts, windows, the whole distribution fed back."""
    return speed(GEMMA_26B, 256, {"nvfp4": ("loop",), "": ("loop",)})


def ring_and_cancel() -> Result:
    """Records arrive while the loop runs; a cancel flag ends it within two blocks."""
    num_tokens = 3 * CANVAS if IS_DRY else 1600
    denoiser = make(TINY, draw_params(TINY, "cpu"), MODES[-1])
    request = request_for(TINY, 9, max_tokens=num_tokens, temperature=0, threshold=0.0)
    if not IS_DRY:
        list(run_loop(denoiser, request))
    begin, arrivals = time.perf_counter(), []
    for event in run_loop(denoiser, request, wants_steps=True):
        if isinstance(event, BlockEvent):
            arrivals.append(time.perf_counter() - begin)
    cancel_after = 1 if IS_DRY else 5
    request = request_for(TINY, 9, max_tokens=4000, temperature=0, threshold=0.0)
    blocks, cancelled_at = 0, 0.0
    for event in run_loop(denoiser, request, wants_steps=True):
        if isinstance(event, BlockEvent):
            blocks += 1
            if blocks == cancel_after:
                request.cancel.set()
                cancelled_at = time.perf_counter()
    stop_ms = 1e3 * (time.perf_counter() - cancelled_at)
    is_early = IS_DRY or arrivals[0] < 0.25 * arrivals[-1]
    return {
        "ok": is_early and blocks <= cancel_after + 2, "first_ms": 1e3 * arrivals[0],
        "last_ms": 1e3 * arrivals[-1], "blocks_before_the_end": blocks, "cancel_to_end_ms": stop_ms,
    }  # fmt: skip


SECTIONS: dict[str, tuple[Callable[[], Result], int]] = {  # limit in seconds
    "env": (env, 60), "while": (while_loop, 60), "tiny": (tiny, 150), "families": (families, 150),
    "formats": (formats, 150), "forwards": (forwards, 90), "ring": (ring_and_cancel, 60), "qwen3_4b": (qwen3_4b, 150),
    "llada2_mini": (llada2_mini, 110), "gemma_26b": (gemma_26b, 120), "qwen3_4b_256": (qwen3_4b_256, 90),
}  # fmt: skip
SIDE_BY_SIDE = ("tiny", "families", "formats", "forwards")  # nothing is timed, and most of it is compiling
NEEDS_DEVICE = ("env", "while")


def run_section(name: str) -> None:
    """Run one section and print its result as one line."""
    try:
        result = SECTIONS[name][0]()
    except Exception as error:  # a report, not a crash: the other sections go on
        result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
    print("RESULT " + json.dumps(result, default=str))


def start(name: str) -> subprocess.Popen[str]:
    """The process of a section."""
    command = [sys.executable, __file__, "--section", name, *(["--dry"] if IS_DRY else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], limit: float) -> Result:
    """The result of a section, whatever became of it."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"ok": False, "error": "time limit"}
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    found: Result = json.loads(lines[-1][7:]) if lines else {"ok": False, "error": err[-2000:]}
    return found


def main() -> None:
    """Run the sections, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of gpu_check.json")
    parser.add_argument("--budget", type=float, default=460, help="seconds for all sections")
    parser.add_argument("--dry", action="store_true", help="in the interpreter, without a device, without limits")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_section(arguments.section)
        return
    wanted = arguments.only.split(",") if arguments.only else list(SECTIONS)
    wanted = [name for name in wanted if not (IS_DRY and name in NEEDS_DEVICE)]
    together = [name for name in wanted if name in SIDE_BY_SIDE and not IS_DRY]
    results: dict[str, Result] = {}
    begin = time.perf_counter()
    for name in wanted:
        if name in results:
            continue
        group = together if name in together else [name]
        left = arguments.budget - (time.perf_counter() - begin)
        if left < 10 and not IS_DRY:
            results[name] = {"ok": False, "error": "no time left"}
            continue
        processes = {each: start(each) for each in group}
        until = time.perf_counter() + left
        for each, process in processes.items():
            limit = min(until - time.perf_counter(), SECTIONS[each][1])
            results[each] = finish(process, 36_000 if IS_DRY else max(limit, 1))
            report(each, results[each])
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / ("gpu_check_dry.json" if IS_DRY else "gpu_check.json")
    file.write_text(json.dumps(results, indent=1, default=str))
    print(json.dumps({name: result["ok"] for name, result in results.items()}))


def report(name: str, result: Result) -> None:
    """Print one section's rows of the table."""
    print(f"{name:<12} {'ok' if result['ok'] else 'FAILED'}", flush=True)
    for key, value in result.items():
        if key not in ("ok", "trace"):
            print(f"    {key:<48} {value:.4g}" if isinstance(value, float) else f"    {key:<48} {value}", flush=True)


if __name__ == "__main__":
    main()
