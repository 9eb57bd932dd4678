"""One denoising step, 32 rows behind 256 cached tokens, against every CPU peer: `python benchmarks/cpu_step.py SHAPE`.

What is compared: dlmrt's step inside its own loop, head, statistics and commit included, by number format; the same
step in torch, eager and compiled; llama.cpp's forward of 32 tokens with all logits, which leaves the statistics out. A
forward of one token in llama.cpp tells how many tokens a forward must bring for a diffusion model to be the faster one.

Weights are random. All runtimes take turns in one run, see `measure` and `child`.

Source: ours; targets from docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from child import RUNTIMES, children
from conditions import conditions, num_cpus
from measure import Check, Turn, document, publish, ratio, row, take_turns
from peers import gguf_model, llama_command, llama_version
from shapes import CACHE, CANVAS, CONTEXT, MAX_POSITIONS, SHAPES, checkpoint_of

DTYPES = ("int8", "bfloat16", "nvfp4", "int4", "float32")
MAIN = ("dlmrt int8", "dlmrt bfloat16")  # compared with every peer
TORCH_MODES = ("eager", "compile", "autotune")
LLAMA_KINDS = ("q4_k_m", "q8_0")
PEER_STEPS = {"tiny": 30, "135m": 4, "270m": 4, "0.6b": 3}  # a turn; enough for a few tenths of a second
OWN_REPEATS = {"tiny": 5, "135m": 1, "270m": 1, "0.6b": 1}

# shape -> (subject, peer, greatest ratio)
LIMITS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "tiny": (
        ("dlmrt int8", "torch compile", 0.30),
        ("dlmrt int8", "torch autotune", 0.30),
        ("dlmrt int8", "torch eager", 0.20),
    ),
    "0.6b": (
        ("dlmrt int8", "torch compile", 0.50),
        ("dlmrt int8", "torch autotune", 0.50),
        ("dlmrt int8", "torch eager", 0.35),
        ("dlmrt int8", "llama.cpp q4_k_m", 0.35),
        ("dlmrt nvfp4", "dlmrt int8", 1.3),
        ("dlmrt bfloat16", "dlmrt int8", 1.7),
    ),
}


def commands(shape: str, names: Sequence[str], *, num_threads: int) -> dict[str, list[str]]:
    """Commands of the runtimes that take turns, by name."""
    result = {}
    for name in names:
        kind, _, option = name.partition(" ")
        if kind == "dlmrt":
            folder, dtype = checkpoint_of(shape, option)
            script, arguments = "dlmrt_loop.py", [str(folder), "cpu", dtype]
        elif kind == "torch":
            script, arguments = "torch_step.py", [shape, option]
        else:
            folder, _ = checkpoint_of(shape)
            model = gguf_model(folder, CACHE / shape, option, num_threads=num_threads)
            result[name] = llama_command(model, num_threads=num_threads, positions=MAX_POSITIONS)
            continue
        result[name] = ["python", str(RUNTIMES / script), *arguments, str(num_threads)]
    return result


def request_of(name: str, shape: str) -> tuple[object, ...]:
    """What a runtime is asked for one turn."""
    if name.startswith("dlmrt"):
        return "step", CONTEXT, OWN_REPEATS[shape]
    if name.startswith("torch"):
        return "step", PEER_STEPS[shape]
    return "forward", CANVAS, CONTEXT, PEER_STEPS[shape]


def checks_of(shape: str, turns: Mapping[str, Sequence[Turn]]) -> list[Check]:
    """Ratios with targets, those of int8 and bfloat16 to every peer, and of all other formats to int8."""
    limits = {(subject, peer): limit for subject, peer, limit in LIMITS.get(shape, ())}
    pairs = list(limits) + [(a, b) for a in MAIN for b in turns if not b.startswith("dlmrt")]
    pairs += [(name, MAIN[0]) for name in turns if name.startswith("dlmrt") and name != MAIN[0]]
    return [
        ratio(shape, turns, subject, peer, limit=limits.get((subject, peer)))
        for subject, peer in dict.fromkeys(pairs) if subject in turns and peer in turns
    ]  # fmt: skip


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [f"dlmrt {dtype}" for dtype in DTYPES] + [f"torch {mode}" for mode in TORCH_MODES]
    names += [f"llama.cpp {kind}" for kind in LLAMA_KINDS]
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--max-seconds", type=float, default=180.0, help="of the rounds; starting comes on top")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="runtimes that take part")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    circumstances = conditions(num_threads=args.threads, shape=list(SHAPES[args.shape]), rows=CANVAS, context=CONTEXT)
    skipped: list[str] = []
    runtimes = commands(args.shape, args.only, num_threads=args.threads)
    with children(runtimes, num_threads=args.threads, skipped=skipped) as started:
        calls = {name: partial(child.turn, *request_of(name, args.shape)) for name, child in started.items()}
        for name in [name for name in started if name.startswith("llama")]:
            calls[f"{name}, 1 token"] = partial(started[name].turn, "forward", 1, CONTEXT, 4 * PEER_STEPS[args.shape])
            circumstances["llama.cpp"] = llama_version()
        turns = take_turns(calls, num_rounds=args.rounds, max_s=args.max_seconds)
    rows = [row(args.shape, name, taken, unit="s") for name, taken in turns.items()]
    publish(
        document(
            f"cpu_step_{args.shape}", conditions=circumstances, rows=rows, checks=checks_of(args.shape, turns),
            skipped=skipped,
        ),
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
