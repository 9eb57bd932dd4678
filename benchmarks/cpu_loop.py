"""The whole loop, and whole answers: `python benchmarks/cpu_loop.py [MODEL] [--ar-model MODEL]`.

1. Requests of the 8 x 256 shape, random weights, four positions a step: the native loop against the same loop driven
   from Python step by step over the same kernels, and against the eager loop in torch.
2. Held-out prompts answered by MODEL with its own settings: native, stepwise, eager; against an auto-regressive model
   of the same shape and tokenizer in llama.cpp and in transformers. Tokens per second count from the request to the
   last token; all start from token ids, the auto-regressive models return ids, dlmrt also makes the text.

With --ar-model, the auto-regressive answers end where that model ends them, and are verified too. Without it the peers
run MODEL's own weights, which say nothing when read causally, for as many tokens as MODEL's answer has: speed only.

Source: ours; targets and formulas from docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from child import RUNTIMES, Child, children
from conditions import conditions, num_cpus
from dlmrt.checkpoint.hub import embedded_models, resolve
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.decode.text import TextCodec
from dlmrt.types import Message
from measure import Check, Row, Turn, Watch, document, publish, ratio, row, take_turns
from orl.tasks import get_task
from orl.tasks.types import Problem
from peers import gguf_model, llama_command, llama_version
from rates import Answer, summarise
from shapes import CACHE, MAX_POSITIONS, checkpoint_of

TASKS = (  # those that dlmrt-tiny was trained for last
    "word_problems", "chain_sum", "equations", "leg_counting", "spell_backward", "python_functions",
)  # fmt: skip
WHOLE_LIMIT = 0.2  # native loop / eager loop on the 8 x 256 shape
LLAMA_KINDS = ("bf16", "q8_0", "q4_k_m")
DTYPES = ("bfloat16", "int8")
REPEATS = 3  # of a prompt in one turn; the first warms up
MOST_TOKENS = 256  # of an auto-regressive answer that does not end


def main() -> None:
    """Parse, run both parts, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=next(iter(embedded_models()), None))
    parser.add_argument("--ar-model", help="trained auto-regressive checkpoint of the same shape and tokenizer")
    parser.add_argument("--prompts", type=int, default=5, help="of each task")
    parser.add_argument("--rounds", type=int, default=11, help="of the requests of part 1")
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    threads, skipped = args.threads, []
    circumstances = conditions(num_threads=threads, model=args.model and Path(args.model).name)
    rows, checks = requests(num_rounds=args.rounds, num_threads=threads, skipped=skipped)
    details: dict[str, Any] = {}
    if args.model is None:
        skipped.append("answers: no model is embedded or named")
    else:
        circumstances |= {
            "llama.cpp": llama_version(), "tasks": TASKS, "prompts_per_task": args.prompts, "split": "heldout",
            "has_ar_model": args.ar_model is not None,
        }  # fmt: skip
        answers = Answers(resolve(args.model), args.ar_model and resolve(args.ar_model), num_threads=threads)
        more_rows, more_checks, details = answers.measure(problems(args.prompts), skipped)
        rows, checks = rows + more_rows, checks + more_checks
    publish(
        document(
            "cpu_loop" if args.model is None else f"cpu_loop_{Path(args.model).name}", conditions=circumstances,
            rows=rows, checks=checks, skipped=skipped, details=details,
        ),
        save=args.save,
    )  # fmt: skip


def requests(*, num_rounds: int, num_threads: int, skipped: list[str]) -> tuple[list[Row], list[Check]]:
    """Part 1."""
    group, folder = "tiny", str(checkpoint_of("tiny")[0])
    runtimes = {f"dlmrt {dtype}": dlmrt_command(folder, "cpu", dtype, num_threads) for dtype in DTYPES}
    runtimes["eager bfloat16"] = dlmrt_command(folder, "eager", "bfloat16", num_threads)
    with children(runtimes, num_threads=num_threads, skipped=skipped) as started:
        calls = {}
        for name, child in started.items():
            for how in ("whole", "stepwise") if name.startswith("dlmrt") else ("whole",):
                repeats = 4 if name.startswith("dlmrt") else 1
                calls[f"{name} {how}"] = partial(child.turn, "loop", how, 64, 2, repeats)
        turns = take_turns(calls, num_rounds=num_rounds)
    rows = [row(group, name, taken, unit="s a request") for name, taken in turns.items()]
    pairs = [(f"dlmrt {d} whole", f"dlmrt {d} stepwise", None) for d in DTYPES]
    pairs += [(f"dlmrt {d} whole", "eager bfloat16 whole", WHOLE_LIMIT) for d in DTYPES]
    checks = [ratio(group, turns, a, b, limit=limit) for a, b, limit in pairs if a in turns and b in turns]
    return rows, checks


def dlmrt_command(folder: str, executor: str, dtype: str, num_threads: int) -> list[str]:
    """Command of the runtime of dlmrt."""
    return ["python", str(RUNTIMES / "dlmrt_loop.py"), folder, executor, dtype, str(num_threads)]


def problems(num_per_task: int) -> list[Problem]:
    """Held-out problems in an order that does not depend on the tasks."""
    chosen = [get_task(task).problem(index, "heldout") for task in TASKS for index in range(num_per_task)]
    random.Random(42).shuffle(chosen)
    return chosen


class Answers:
    """Part 2.

    Args:
        folder: the diffusion model.
        ar_folder: its trained auto-regressive twin, or None.
    """

    def __init__(self, folder: Path, ar_folder: Path | None, *, num_threads: int) -> None:
        self.folder, self.ar_folder, self.num_threads = folder, ar_folder, num_threads
        self.codec = TextCodec.from_folder(folder)
        self.ends = open_checkpoint(ar_folder).config.eos_token_ids if ar_folder else ()
        self.told: dict[str, list[Answer]] = {}  # by runtime, in the order of the prompts

    def measure(self, chosen: Sequence[Problem], skipped: list[str]) -> tuple[list[Row], list[Check], dict[str, Any]]:
        """One turn a prompt and runtime; ratios are those of seconds a token, formed prompt by prompt."""
        turns: dict[str, list[Turn]] = {}
        with children(self._commands(), num_threads=self.num_threads, skipped=skipped) as started:
            ways = self._ways(started)
            for number, problem in enumerate(chosen):
                ids = self.codec.encode_messages([Message(role="user", content=problem.prompt)])
                num_tokens = len(started[next(iter(started))].ask("answer", "whole", 1, *ids)["ids"])
                for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                    child, how = ways[name]
                    turn = self._turn(name, child, how, ids, num_tokens, problem)
                    turns.setdefault(name, []).append(turn)
        group = self.folder.name
        rows = [row(group, name, taken, unit="s a token") for name, taken in turns.items()]
        own = [name for name in turns if name.endswith("whole")]
        checks = [ratio(group, turns, a, b) for a in own for b in turns if a != b]
        return rows, checks, {name: summarise(answers) for name, answers in self.told.items()}

    def _commands(self) -> dict[str, list[str]]:
        threads, folder = self.num_threads, str(self.folder)
        result = {f"dlmrt {dtype}": dlmrt_command(folder, "cpu", dtype, threads) for dtype in DTYPES}
        result["eager bfloat16"] = dlmrt_command(folder, "eager", "bfloat16", threads)
        ar_folder = self.ar_folder or self.folder
        for kind in LLAMA_KINDS:
            model = gguf_model(ar_folder, CACHE / f"{ar_folder.name}-ar", kind, num_threads=threads)
            result[f"llama.cpp {kind}"] = llama_command(model, num_threads=threads, positions=MAX_POSITIONS)
        for dtype in ("float32", "bfloat16"):
            script = str(RUNTIMES / "transformers_generate.py")
            result[f"transformers {dtype}"] = ["python", script, str(ar_folder), dtype, str(threads)]
        return result

    def _ways(self, started: Mapping[str, Child]) -> dict[str, tuple[Child, str]]:
        """Name -> runtime and how it is to answer: dlmrt's own loop in both ways, "" for other programs."""
        ways: dict[str, tuple[Child, str]] = {}
        for name, child in started.items():
            if name.startswith("dlmrt"):
                ways |= {f"{name} whole": (child, "whole"), f"{name} stepwise": (child, "stepwise")}
            else:
                ways[name] = (child, "whole" if name.startswith("eager") else "")
        return ways

    def _turn(self, name: str, child: Child, how: str, ids: Sequence[int], num_tokens: int, problem: Problem) -> Turn:
        with Watch(child.pid) as watch:
            if how:
                reply = child.ask("answer", how, REPEATS, *ids)
            else:
                most = MOST_TOKENS if self.ends else num_tokens
                reply = child.ask("answer", REPEATS, most, len(self.ends), *self.ends, *ids)
        seconds = statistics.median(reply["seconds"][1:])
        is_judged = bool(how or self.ends)
        text = reply["text"] if how else self.codec.decode([i for i in reply["ids"] if i not in self.ends])
        answer = Answer(
            num_tokens=len(reply["ids"]), seconds=seconds, num_denoise_steps=reply.get("num_denoise_steps", 0),
            num_commit_forwards=reply.get("num_commit_forwards", 0), num_blocks=reply.get("num_blocks", 0),
            ends_with_stop=reply.get("ends_with_stop", False),
            passed=get_task(problem.task).verify(problem, text).passed if is_judged else None,
        )  # fmt: skip
        self.told.setdefault(name, []).append(answer)
        return watch.turn(seconds / answer.num_tokens)


if __name__ == "__main__":
    main()
