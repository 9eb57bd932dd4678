"""What number formats cost in answers: `python benchmarks/cpu_accuracy.py [MODEL]`.

The same held-out prompts are answered by MODEL in each format with its own settings, and verified. Beside the rates:
the error of the logits against float32 over the same canvases, as root mean square over that of the logits themselves
(each row less its mean), and how often the best token is the same. Nothing is timed.

Source: ours; targets from docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conditions import conditions, num_cpus
from cpu_loop import problems
from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.hub import embedded_models, resolve
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.decode.engine import Engine, make_denoiser, with_stop_tokens
from dlmrt.decode.text import TextCodec
from dlmrt.types import Denoiser, Float32, Int32, Message
from measure import Check, check, document, publish, quantile
from orl.tasks import get_task
from orl.tasks.types import Problem
from rates import Answer, summarise
from shapes import CACHE

DTYPES = ("bfloat16", "int8", "nvfp4")
LIMIT_POINTS = 1.0  # of the verified rate, below bfloat16
NUM_STATES = 48  # prompts whose logits are compared
NUM_DRAWS = 2000  # of the bootstrap over prompts


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=next(iter(embedded_models()), None))
    parser.add_argument("--prompts", type=int, default=200, help="of each task")
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    if args.model is None:
        parser.error("no model is embedded; name one")
    folder, chosen = resolve(args.model), problems(args.prompts)
    group = Path(args.model).name
    circumstances = conditions(
        num_threads=args.threads, model=group, prompts_per_task=args.prompts, split="heldout", states=NUM_STATES
    )
    answers = {dtype: answer_all(folder, dtype, chosen, num_threads=args.threads) for dtype in DTYPES}
    exact = logits_of(folder, "float32", chosen, num_threads=args.threads)
    checks = [rate_check(group, dtype, answers[dtype], answers[DTYPES[0]]) for dtype in DTYPES[1:]]
    for dtype in DTYPES:
        checks += logits_checks(group, dtype, logits_of(folder, dtype, chosen, num_threads=args.threads), exact)
    details = {f"{group} {dtype}": _untimed(summarise(told)) for dtype, told in answers.items()}
    publish(document("cpu_accuracy", conditions=circumstances, rows=[], checks=checks, details=details), save=args.save)


def denoiser_of(folder: Path, dtype: str, *, num_threads: int) -> Denoiser:
    """The model in `dtype`; 4-bit formats are written to files of their own, as `dlmrt quantize` does."""
    if dtype == "nvfp4":
        weights = max(file.stat().st_mtime_ns for file in folder.glob("*.safetensors"))
        folder, source = CACHE / f"{folder.name}-{dtype}-{weights}", folder
        if not folder.exists():
            convert_checkpoint(folder, open_checkpoint(source), format="nvfp4", policy="linears")
        dtype = "auto"
    return make_denoiser(open_checkpoint(folder), executor="cpu", dtype=dtype, num_threads=num_threads)


def answer_all(folder: Path, dtype: str, chosen: Sequence[Problem], *, num_threads: int) -> list[Answer]:
    """One judged answer a problem."""
    engine, answers = engine_of(folder, denoiser_of(folder, dtype, num_threads=num_threads)), []
    for problem in chosen:
        result = engine.generate([Message(role="user", content=problem.prompt)])
        usage = result.usage
        answers.append(
            Answer(
                num_tokens=usage.completion_tokens, seconds=usage.total_s, num_denoise_steps=usage.num_denoise_steps,
                num_commit_forwards=usage.num_commit_forwards, num_blocks=usage.num_blocks,
                ends_with_stop=result.finish_reason == "stop",
                passed=get_task(problem.task).verify(problem, result.text).passed,
            )
        )  # fmt: skip
    return answers


def engine_of(folder: Path, denoiser: Denoiser) -> Engine:
    """An engine over `denoiser` with tokenizer and settings of `folder`."""
    checkpoint, codec = open_checkpoint(folder), TextCodec.from_folder(folder)
    return Engine(denoiser, with_stop_tokens(checkpoint.config, codec), codec, checkpoint.generation)


def logits_of(folder: Path, dtype: str, chosen: Sequence[Problem], *, num_threads: int) -> Float32:
    """Logits [states * L, V]: behind each prompt a canvas of masks, then one whose first half holds the gold answer."""
    denoiser, codec = denoiser_of(folder, dtype, num_threads=num_threads), TextCodec.from_folder(folder)
    diffusion = open_checkpoint(folder).config.diffusion
    assert diffusion is not None
    fill = 0 if diffusion.mask_token_id is None else diffusion.mask_token_id
    rows = []
    for problem in chosen[:NUM_STATES]:
        denoiser.reset()
        prompt = codec.encode_messages([Message(role="user", content=problem.prompt)])
        denoiser.extend(np.array(prompt, dtype=np.int32))
        canvas: Int32 = np.full(diffusion.canvas_length, fill, dtype=np.int32)
        rows.append(denoiser.forward(canvas, None, None))
        known = codec.encode(problem.response)[: diffusion.canvas_length // 2]
        canvas[: len(known)] = known
        rows.append(denoiser.forward(canvas, None, None))
    return np.concatenate(rows)


def rate_check(group: str, dtype: str, told: Sequence[Answer], base: Sequence[Answer]) -> Check:
    """Points of verified rate that `dtype` loses, with the quartiles of a bootstrap over prompts."""
    lost = 100 * np.array([int(bool(b.passed)) - int(bool(a.passed)) for a, b in zip(told, base, strict=True)])
    draws = np.random.default_rng(0).integers(0, len(lost), (NUM_DRAWS, len(lost)))
    means = lost[draws].mean(1).tolist()
    return Check(
        group=group, what=f"{DTYPES[0]} - {dtype}: verified rate, points", value=float(lost.mean()),
        q25=quantile(means, 0.25), q75=quantile(means, 0.75), num=len(lost), limit=LIMIT_POINTS,
    )  # fmt: skip


def logits_checks(group: str, dtype: str, logits: Float32, exact: Float32) -> list[Check]:
    """Error of each row and share of rows whose best token differs."""
    spread = np.sqrt(np.var(exact, axis=1))
    errors = np.sqrt(np.mean((logits - exact) ** 2, axis=1)) / spread
    differs = [float(np.mean(part)) for part in np.array_split(logits.argmax(1) != exact.argmax(1), NUM_STATES)]
    return [
        check(group, f"{dtype}: error of logits / their spread, float32 as reference", errors.tolist()),
        Check(
            group=group, what=f"{dtype}: rows with another best token than float32", value=float(np.mean(differs)),
            q25=quantile(differs, 0.25), q75=quantile(differs, 0.75), num=len(differs),
        ),
    ]  # fmt: skip


def _untimed(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "tps_e2e"}


if __name__ == "__main__":
    main()
