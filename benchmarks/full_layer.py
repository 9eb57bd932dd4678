"""One layer of each kind of the published models at full size: `python benchmarks/full_layer.py [MODEL] [FORMAT]`.

Whole models do not fit most machines; a layer does. A model of that one layer, random weights and a small vocabulary
runs canvas forwards behind a context on the cpu executor; time and memory are those of the layer, the small head aside.
All experts hold the same matrix, packed each for itself, so that nothing is kept twice; rows are routed by random
routers.

Source: ours; sizes from the configuration files in tests/data/configs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from child import ROOT
from conditions import conditions, num_cpus
from dlmrt.cpu.executor import FORMATS, CpuDenoiser
from dlmrt.cpu.weights import Param, Quantized
from dlmrt.models.config import ModelConfig, parse_config, read_json
from dlmrt.models.families import family_of
from dlmrt.ops.formats import quantize_nvfp4
from dlmrt.program.forwards import Formats
from load_memory import memory_of
from measure import Watch, document, publish, row

CONFIGS = ROOT / "tests" / "data" / "configs"
VOCABULARY, CONTEXT, POSITIONS = 1024, 256, 1024


def layers_of(model: str) -> dict[str, ModelConfig]:
    """Kind of layer -> a model of one such layer."""
    raw = read_json(CONFIGS / f"{model}.json")
    if model == "qwen3-4b":
        raw["diffusion"] = {"canvas_length": 32, "noise": "mask", "mask_token_id": VOCABULARY - 1}
    config = parse_config(raw)
    assert config.diffusion is not None
    mask = None if config.diffusion.mask_token_id is None else VOCABULARY - 1
    small = replace(
        config, num_layers=1, vocab_size=VOCABULARY, eos_token_ids=(), pad_token_id=None, bos_token_id=None,
        max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        diffusion=replace(config.diffusion, mask_token_id=mask),
    )  # fmt: skip
    if config.sliding is not None:
        return {
            "sliding": replace(small, sliding=replace(config.sliding, full_layers=())),
            "full": replace(small, sliding=replace(config.sliding, full_layers=(0,))),
        }
    if config.moe is not None:
        return {
            "dense": replace(small, moe=replace(config.moe, num_dense_layers=1)),
            "experts": replace(small, moe=replace(config.moe, num_dense_layers=0)),
        }
    return {"dense": small}


class SameExpert:
    """A stack whose every matrix is the same one."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def __getitem__(self, index: int) -> Any:
        return self.matrix


def draw(config: ModelConfig, kind: str) -> tuple[dict[str, Param], Formats]:
    """Random bfloat16 weights, in `kind` where that is nvfp4, and what the executor is to make of them.

    Experts are in NVFP4 alone, as released files have it; in a model without experts every matrix of a layer is.
    """
    rng, params, named = np.random.default_rng(0), {}, {}
    family, rank = family_of(config), 2 if config.moe is None else 3
    for name, shape in family.tensor_shapes(config).items():
        values = rng.standard_normal(shape[-2:], dtype=np.float32)
        values = 1 + 0.1 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)
        params[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        if len(shape) == rank and kind == "nvfp4" and name not in (family.EMBEDDING, family.HEAD):
            codes, scales, shared = quantize_nvfp4(values)
            named[name] = kind
            params[name] = Quantized(
                format=kind, shape=shape[-2:], codes=codes, block_scales=scales.view(np.uint8), multiplier=float(shared)
            )
        if len(shape) == 3:
            params[name] = SameExpert(params[name])
    return params, replace(FORMATS["bfloat16" if kind == "nvfp4" else kind], named=named)


def measure(config: ModelConfig, kind: str, *, threads: int, rounds: int) -> tuple[list[Any], Mapping[str, float]]:
    """Canvas forwards in turn; CPU seconds of one, seconds of loading, peak memory above what was there before."""
    rng = np.random.default_rng(1)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
    before = memory_of(os.getpid())["VmRSS"]
    began = time.perf_counter()
    params, formats = draw(config, kind)
    denoiser = CpuDenoiser(params, config, dtype=kind, num_threads=threads, formats=formats)
    loading = time.perf_counter() - began
    denoiser.extend(rng.integers(0, VOCABULARY - 1, CONTEXT).astype(np.int32))
    assert config.diffusion is not None
    canvas = rng.integers(0, VOCABULARY - 1, config.diffusion.canvas_length).astype(np.int32)
    turns, cpu = [], []
    for _ in range(rounds):
        with Watch() as watch:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            logits = denoiser.forward(canvas, None, None)
            seconds = time.perf_counter() - begin
        cpu.append(time.process_time() - cpu_begin)
        assert np.isfinite(logits).all()
        turns.append(watch.turn(seconds))
    peak = memory_of(os.getpid())["VmHWM"] - before
    return turns, {
        "least_cpu_seconds": min(cpu), "seconds_to_draw_and_pack": round(loading, 2), "peak_bytes": peak,
    }  # fmt: skip


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ("llada2.1-mini", "diffusiongemma-26b-a4b", "qwen3-4b")
    parser.add_argument("model", nargs="?", choices=models, help="default: all")
    parser.add_argument("format", nargs="?", choices=("bfloat16", "int8", "nvfp4"), help="default: all")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    circumstances = conditions(num_threads=args.threads, context=CONTEXT, vocabulary=VOCABULARY)
    rows, details = [], {}
    for model in [args.model] if args.model else models:
        for layer, config in layers_of(model).items():
            has_nvfp4 = layer != "dense" or config.moe is None
            kinds = ("bfloat16", "int8", "nvfp4") if has_nvfp4 else ("bfloat16", "int8")
            for kind in [kind for kind in kinds if args.format in (None, kind)]:
                turns, memory = measure(config, kind, threads=args.threads, rounds=args.rounds)
                name = f"{layer} layer, {kind}"
                rows.append(row(model, name, turns, unit="s"))
                details[f"{model}, {name}"] = memory
    publish(document("full_layer", conditions=circumstances, rows=rows, checks=[], details=details), save=args.save)


if __name__ == "__main__":
    main()
