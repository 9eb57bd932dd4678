"""Check the cuda executor on a GPU: numbers, three ways to run a loop, costs, ring, cancellation. At most 8 minutes.

    python benchmarks/gpu_check.py [--only env,while] [--out FOLDER] [--budget 460]

Runs from a source tree with torch >= 2.11 and the triton and cuda-bindings that come with it; no extension is built.
Each section is a process with a time limit, so that a hang, a crash or a sticky device error costs one section. They
stand in the order of what they decide. Results go to gpu_check.json beside a table on stdout; the last line is JSON.
Models have random weights, so texts mean nothing; sizes are those of the named models.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))  # a source tree will do

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from dlmrt.decode.loop import BlockEvent, LoopRequest, StepEvent, decode  # noqa: E402
from dlmrt.decode.native import run_loop  # noqa: E402
from dlmrt.decode.sampling import banned_ids  # noqa: E402
from dlmrt.decode.settings import resolve  # noqa: E402
from dlmrt.models.config import DiffusionConfig, ModelConfig, ResidualConfig, RopeConfig  # noqa: E402
from dlmrt.models.families import family_of  # noqa: E402
from dlmrt.types import DecodeConfig  # noqa: E402

Result = dict[str, Any]

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM", hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=262, max_position_embeddings=2048, rms_norm_eps=1e-6, rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=True, eos_token_ids=(261,), pad_token_id=None, bos_token_id=None, dtype="float32",
    diffusion=DiffusionConfig(canvas_length=8, noise="mask", mask_token_id=256),
)  # fmt: skip
QWEN3_4B = replace(
    TINY, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=151_936, max_position_embeddings=8192, rope=RopeConfig(theta=1e6), eos_token_ids=(151_645,),
    dtype="bfloat16", diffusion=DiffusionConfig(canvas_length=32, noise="mask", mask_token_id=151_669),
)  # fmt: skip
UNIFORM = DiffusionConfig(
    canvas_length=8, noise="uniform", logit_shift=1, commit_rule="entropy_bound",
    residual=ResidualConfig(kind="gated_mlp", intermediate_size=64, alpha=0.3),
)  # fmt: skip
SCENARIOS: dict[str, tuple[DiffusionConfig, dict[str, Any]]] = {
    "threshold": (TINY.diffusion, {"temperature": 0, "threshold": 0.3}),  # type: ignore[dict-item]
    "joint_threshold, sampled": (
        DiffusionConfig(canvas_length=8, noise="mask", mask_token_id=256, block_anchor="position_zero",
                        context_attention="block_causal"),
        {"temperature": 0.9, "seed": 11, "commit_rule": "joint_threshold", "threshold": 0.2, "edit_threshold": 0.1,
         "max_post_edit_steps": 2},
    ),
    "entropy_bound, filtered, residual": (
        UNIFORM, {"temperature": 0.8, "seed": 5, "entropy_bound": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    ),
    "steps": (TINY.diffusion, {"temperature": 0, "commit_rule": "steps"}),  # type: ignore[dict-item]
}  # fmt: skip


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


def request_for(config: ModelConfig, num_prompt: int, **settings: Any) -> LoopRequest:
    """A request with a fixed prompt."""
    assert config.diffusion is not None
    banned = banned_ids(config, range(config.vocab_size))
    return LoopRequest(
        prompt_S=(np.arange(num_prompt, dtype=np.int32) * 7 + 3) % 250, diffusion=config.diffusion, banned=banned,
        settings=resolve(DecodeConfig(**settings), config, {}),
        allowed=np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), banned),
    )  # fmt: skip


def make(config: ModelConfig, params: dict[str, Tensor], mode: str) -> Any:
    """The executor under test."""
    from dlmrt.cuda.executor import CudaDenoiser

    return CudaDenoiser(params, config, dtype=config.dtype, mode=mode)


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
    for turn in range(warm_ups + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if turn >= warm_ups:
            times.append(time.perf_counter() - begin)
    return statistics.median(times), max(times) - min(times)


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
    """Exact turns of a captured loop, 0 among them; cost of one turn."""
    from dlmrt.cuda.graph import Region
    from dlmrt.cuda.kernels import loop
    from dlmrt.cuda.launches import Launch
    from dlmrt.cuda.runners import WholeGraph

    more, left, goes_on, ends = (torch.ones(1, dtype=torch.int32, device="cuda") for _ in range(4))
    arguments = {"more_blocks": more, "blocks_left": left, "goes_on": goes_on, "ends": ends}
    launch = Launch(op="bound_launch", kernel=loop.bound_launch, grid=(1,), arguments=arguments)
    graph = WholeGraph((Region(is_loop=True, flag=goes_on, name="goes_on", body=(launch,)),))
    is_exact, seconds = True, {}
    for turns in (0, 1, 1000, 10_000):

        def run(turns: int = turns) -> None:
            left.fill_(turns)
            goes_on.fill_(int(turns > 0))
            graph.run()

        seconds[turns], _ = timed(run)
        is_exact &= int(left) == 0 and int(goes_on) == 0
    per_turn = (seconds[10_000] - seconds[1000]) / 9000
    return {"ok": is_exact, "us_per_turn_of_two_kernels": 1e6 * per_turn, "us_launch": 1e6 * seconds[1]}


def tiny_models() -> Result:
    """Loop, step and off make the decisions of the slow loop in torch; a second run and small launches too."""
    from dlmrt.cuda import executor
    from dlmrt.eager.executor import EagerDenoiser

    result: Result = {"ok": True}
    for name, (diffusion, settings) in SCENARIOS.items():
        config = replace(TINY, diffusion=diffusion)
        params = draw_params(config, "cpu")
        request = request_for(config, 37, max_tokens=40, **{"max_denoising_steps": 6, **settings})
        wanted = decisions(decode(EagerDenoiser(params, config), request))
        for mode in ("off", "step", "loop"):
            denoiser = make(config, params, mode)
            runs = [decisions(run_loop(denoiser, request)) for _ in range(2)]
            executor.MIN_SLOTS = 9
            runs.append(decisions(run_loop(denoiser, request)))
            executor.MIN_SLOTS = 64
            is_equal = all(run == wanted for run in runs)
            result[f"{name}, {mode}"] = is_equal
            result["ok"] &= is_equal
    return result


def forwards() -> Result:
    """Logits of a bfloat16 model with real head and vocabulary sizes against float32 over the same weights."""
    from dlmrt.eager.executor import EagerDenoiser

    result: Result = {"ok": True}
    for length in (1, 32, 256):
        diffusion = DiffusionConfig(canvas_length=length, noise="mask", mask_token_id=256)
        config = replace(
            QWEN3_4B, num_layers=2, hidden_size=1024, intermediate_size=3072, num_heads=16, vocab_size=32_000,
            eos_token_ids=(1,), diffusion=diffusion,
        )  # fmt: skip
        params = draw_params(config, "cpu")
        denoiser, reference = (
            make(config, params, "step"),
            EagerDenoiser({name: values.float() for name, values in params.items()}, config),
        )
        for context in (0, 5, 700):
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
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source))
    return 2 * source.numel() / seconds


def qwen3_4b() -> Result:
    """Step times of Qwen3-4B's shapes at canvas 32 and 256: whole loop, step graphs, single launches."""
    result: Result = {"ok": True, "bandwidth_gb_s": bandwidth() / 1e9}
    for length in (32, 256):
        diffusion = DiffusionConfig(canvas_length=length, noise="mask", mask_token_id=151_669)
        config = replace(QWEN3_4B, diffusion=diffusion)
        params = draw_params(config, "cuda")
        num_bytes = sum(values.numel() * values.element_size() for values in params.values())
        texts = {}
        for mode in ("loop", "step", "off"):
            denoiser = make(config, params, mode)

            def run(num_blocks: int, denoiser: Any = denoiser, length: int = length, config: Any = config) -> list[Any]:
                request = request_for(
                    config, 512, max_tokens=length * num_blocks, temperature=0, commit_rule="steps",
                    max_denoising_steps=16, ignore_eos=True,
                )  # fmt: skip
                return decisions(run_loop(denoiser, request))

            texts[mode] = run(2)
            short, _ = timed(lambda: run(1), repeats=3)
            long, spread = timed(lambda: run(3), repeats=3)
            forwards_between = 2 * 17  # two blocks of 16 steps and a commit forward
            per_forward = (long - short) / forwards_between
            result[f"canvas {length}, {mode}, ms a forward"] = 1e3 * per_forward
            result[f"canvas {length}, {mode}, spread ms"] = 1e3 * spread
            if mode == "loop":
                share = num_bytes / per_forward / (result["bandwidth_gb_s"] * 1e9)
                result[f"canvas {length}, share of bandwidth"] = share
            del denoiser
            torch.cuda.empty_cache()
        result["ok"] &= texts["loop"] == texts["step"] == texts["off"]
        del params
        torch.cuda.empty_cache()
    return result


def ring_and_cancel() -> Result:
    """Records arrive while the loop runs; a cancel flag ends it within two blocks."""
    config = replace(TINY, max_position_embeddings=8192)
    denoiser = make(config, draw_params(config, "cpu"), "loop")
    request = request_for(config, 9, max_tokens=1600, temperature=0, threshold=0.0)
    list(run_loop(denoiser, request))
    begin, arrivals = time.perf_counter(), []
    for event in run_loop(denoiser, request, wants_steps=True):
        if isinstance(event, BlockEvent):
            arrivals.append(time.perf_counter() - begin)
    request = request_for(config, 9, max_tokens=4000, temperature=0, threshold=0.0)
    blocks = 0
    cancelled_at = 0.0
    for event in run_loop(denoiser, request, wants_steps=True):
        if isinstance(event, BlockEvent):
            blocks += 1
            if blocks == 5:
                request.cancel.set()
                cancelled_at = time.perf_counter()
    stop_ms = 1e3 * (time.perf_counter() - cancelled_at)
    return {
        "ok": arrivals[0] < 0.25 * arrivals[-1] and blocks <= 7, "first_ms": 1e3 * arrivals[0],
        "last_ms": 1e3 * arrivals[-1], "blocks_before_the_end": blocks, "cancel_to_end_ms": stop_ms,
    }  # fmt: skip


SECTIONS: dict[str, tuple[Callable[[], Result], int]] = {  # limit in seconds
    "env": (env, 60), "while": (while_loop, 60), "tiny": (tiny_models, 150), "forwards": (forwards, 90),
    "ring": (ring_and_cancel, 60), "qwen3_4b": (qwen3_4b, 180),
}  # fmt: skip


def run_section(name: str) -> None:
    """Run one section and print its result as one line."""
    try:
        result = SECTIONS[name][0]()
    except Exception as error:  # a report, not a crash: the other sections go on
        result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
    print("RESULT " + json.dumps(result, default=str))


def main() -> None:
    """Run the sections, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of gpu_check.json")
    parser.add_argument("--budget", type=float, default=460, help="seconds for all sections")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section:
        run_section(arguments.section)
        return
    wanted = arguments.only.split(",") if arguments.only else list(SECTIONS)
    results: dict[str, Result] = {}
    begin = time.perf_counter()
    for name in wanted:
        left = arguments.budget - (time.perf_counter() - begin)
        if left < 10:
            results[name] = {"ok": False, "error": "no time left"}
            continue
        command = [sys.executable, __file__, "--section", name]
        try:
            limit = min(left, SECTIONS[name][1])
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            results[name] = json.loads(lines[-1][7:]) if lines else {"ok": False, "error": done.stderr[-2000:]}
        except subprocess.TimeoutExpired:
            results[name] = {"ok": False, "error": "time limit"}
        print(f"{name:<10} {'ok' if results[name]['ok'] else 'FAILED'}", flush=True)
        for key, value in results[name].items():
            if key not in ("ok", "trace"):
                print(f"    {key:<48} {value:.4g}" if isinstance(value, float) else f"    {key:<48} {value}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_check.json").write_text(json.dumps(results, indent=1, default=str))
    print(json.dumps({name: result["ok"] for name, result in results.items()}))


if __name__ == "__main__":
    main()
