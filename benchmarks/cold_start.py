"""Process start to the first words: `python benchmarks/cold_start.py [MODEL]`.

`dlmrt generate` is started as a user starts it, and the clock stops at the first byte on its standard output, which is
the text of the first block. Files are in the page cache. Beside it: Python alone, `import dlmrt`, and, where the
checkpoint can be read by them, the first token of llama.cpp and of transformers in a process that loads the same shape.

Source: ours.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from child import RUNTIMES, Child, environment
from conditions import conditions, num_cpus
from dlmrt.checkpoint.hub import embedded_models, resolve
from measure import Turn, Watch, check, document, publish, row, take_turns
from peers import gguf_model, llama_command, llama_version
from shapes import CACHE, MAX_POSITIONS

LIMIT_S = 0.5
PROMPT = "State the final answer to the following arithmetic problem: 12 + 35 - 7 ="
FIRST_BLOCK = "dlmrt generate, first block"


def first_byte(command: list[str], *, num_threads: int) -> Turn:
    """From the start of `command` to its first byte of output, or to its end if there is none."""
    with Watch() as watch:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment(num_threads),
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[-4:])} ended with status {process.returncode}")
    return watch.turn(seconds)


def first_token(command: list[str], *, num_threads: int) -> Turn:
    """From the start of a runtime to its first token behind a short prompt."""
    with Watch() as watch, Child(command, num_threads=num_threads, is_paused=False) as child:
        child.ask("answer", 1, 1, 0, *range(10, 40))
        seconds = time.perf_counter() - child.began
    return watch.turn(seconds)


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=next(iter(embedded_models()), None))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    if args.model is None:
        parser.error("no model is embedded; name one")
    threads, folder = args.threads, resolve(args.model)
    group = Path(args.model).name
    circumstances = conditions(num_threads=threads, model=group)

    def start(*words: str) -> Callable[[], Turn]:
        return lambda: first_byte([sys.executable, *words], num_threads=threads)

    calls = {
        "python alone": start("-c", ""),
        "import dlmrt.decode.engine": start("-c", "import dlmrt.decode.engine"),
        FIRST_BLOCK: start("-m", "dlmrt", "generate", args.model, PROMPT),
    }
    if not args.without_peers:
        model = gguf_model(folder, CACHE / group, "bf16", num_threads=threads)
        llama = llama_command(model, num_threads=threads, positions=MAX_POSITIONS)
        hugging = ["python", str(RUNTIMES / "transformers_generate.py"), str(folder), "bfloat16", str(threads)]
        calls["llama.cpp bf16, first token"] = lambda: first_token(llama, num_threads=threads)
        calls["transformers bf16, first token"] = lambda: first_token(hugging, num_threads=threads)
        circumstances["llama.cpp"] = llama_version()
    turns = take_turns(calls, num_rounds=args.rounds)
    rows = [row(group, name, taken, unit="s") for name, taken in turns.items()]
    quiet = [turn.value for turn in turns[FIRST_BLOCK] if turn.is_quiet] or [t.value for t in turns[FIRST_BLOCK]]
    publish(
        document(
            "cold_start", conditions=circumstances, rows=rows,
            checks=[check(group, f"{FIRST_BLOCK} (seconds)", quiet, limit=LIMIT_S)],
        ),
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
