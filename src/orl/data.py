"""The data stream: problems by number -> token ids -> packed sequences, resumable at any step.

Problem number n fixes its task, its text and its noise, so the stream's whole state is a few integers. Pools of
problems are packed together; a step takes the next bins. A problem that does not fit a packed sequence is left out and
counted, since a rare long one must not end a run of hours.

Source: ours.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlmrt.checkpoint.save import TOKENIZER_FILES
from dlmrt.decode.text import TextCodec
from orl.errors import RecipeError
from orl.packing import DATA_STREAM, Example, Noise, Rows, generator, pack, problem_rows
from orl.recipe import DataSection, ObjectiveSection
from orl.tasks import get_task, task_names
from orl.tasks.tokenizer import END_TOKEN, MIN_VOCAB_SIZE, train_tokenizer, write_tokenizer
from orl.tasks.types import Problem
from orl.tasks.wordings import reword


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Tasks and their shares. Example: ``Mixture(tasks=("chain_sum", "equations"), shares=(0.75, 0.25))``."""

    tasks: tuple[str, ...]
    shares: tuple[float, ...]  # sum 1
    has_many_wordings: bool = False  # of gold workings

    @classmethod
    def of(cls, data: DataSection) -> Mixture:
        """The mixture a recipe names; all tasks in equal shares when it names none.

        Raises:
            UnknownTaskError: a name that is not registered.
            RecipeError: another number of weights than of tasks.
        """
        tasks = data.tasks or tuple(task_names())
        for task in tasks:
            get_task(task)
        weights = np.array(data.weights or [1.0] * len(tasks), dtype=np.float64)
        if len(weights) != len(tasks):
            raise RecipeError(f"data.weights has {len(weights)} entries for {len(tasks)} tasks; give one a task")
        return cls(
            tasks=tasks, shares=tuple((weights / weights.sum()).tolist()), has_many_wordings=data.wordings == "many"
        )

    def problem(self, number: int, seed: int) -> Problem:
        """Problem `number` of the training stream."""
        choice = generator(seed, number, DATA_STREAM).choice(len(self.tasks), p=self.shares)
        return self.task_problem(self.tasks[int(choice)], number)

    def task_problem(self, task: str, index: int) -> Problem:
        """Problem `index` of one task's train split, in the mixture's wordings."""
        problem = get_task(task).problem(index, "train")
        return reword(problem) if self.has_many_wordings else problem


def prepare_tokenizer(data: DataSection, folder: Path, *, source: Path | None = None) -> None:
    """Write the tokenizer that the recipe asks for into `folder`, unless it is there.

    Args:
        source: folder whose tokenizer is copied; None trains one.

    Raises:
        RecipeError: `source` has no tokenizer, or `data.vocab_size` is too small for one.
    """
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")  # a killed process must not leave half a tokenizer behind
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if source is not None:
        if not (source / "tokenizer.json").exists():
            raise RecipeError(f"{source} has no tokenizer.json; give a folder that has one")
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)
    else:
        if data.vocab_size < MIN_VOCAB_SIZE:
            raise RecipeError(f"data.vocab_size is {data.vocab_size}; it must be at least {MIN_VOCAB_SIZE}")
        mixture, indices = Mixture.of(data), range(data.tokenizer_problems)
        problems = (mixture.task_problem(task, index) for task in mixture.tasks for index in indices)
        write_tokenizer(train_tokenizer(problems, vocab_size=data.vocab_size), partial)
    os.rename(partial, folder)


def encode_problem(codec: TextCodec, problem: Problem, number: int, *, stop_id: int) -> Example:
    """Prompt through the chat template, response with the stop token; special text in either stays text."""
    prompt = codec.encode_messages([{"role": "user", "content": problem.prompt}])
    response = codec.tokenizer.encode(problem.response, add_special_tokens=False).ids
    return Example(number=number, prompt_ids=tuple(prompt), response_ids=(*response, stop_id))


class PackedStream:
    """Endless packed sequences; `state()` and `restore()` make it resumable."""

    def __init__(
        self, data: DataSection, objective: ObjectiveSection, noise: Noise, codec: TextCodec, seed: int
    ) -> None:
        self.data, self.objective, self.noise, self.codec, self.seed = data, objective, noise, codec, seed
        self.mixture = Mixture.of(data)
        stop_id = codec.tokenizer.token_to_id(END_TOKEN)
        assert stop_id is not None, "model_config has checked it"
        self.stop_id: int = stop_id
        self.pool_idx, self.offset = 0, 0
        self.num_left_out = 0  # problems of finished pools that did not fit
        self._pool: tuple[list[Rows], int] | None = None  # bins of the current pool, problems left out of it

    def state(self) -> dict[str, int]:
        """Position of the stream: pool number, bins of it already taken, problems left out before it."""
        return {"pool_idx": self.pool_idx, "offset": self.offset, "num_left_out": self.num_left_out}

    def restore(self, state: dict[str, int]) -> None:
        """Go to a position that `state()` gave."""
        self.pool_idx, self.offset, self._pool = state["pool_idx"], state["offset"], None
        self.num_left_out = state.get("num_left_out", 0)  # absent from states of early versions

    def take(self, num_bins: int) -> list[Rows]:
        """The next `num_bins` packed sequences.

        Raises:
            RecipeError: no problem of a pool fits `data.pack_tokens`.
        """
        taken: list[Rows] = []
        while len(taken) < num_bins:
            if self._pool is None:
                self._pool = self._pack(self.pool_idx)
            bins, left_out = self._pool
            part = bins[self.offset : self.offset + num_bins - len(taken)]
            taken += part
            self.offset += len(part)
            if self.offset == len(bins):
                self.pool_idx, self.offset, self._pool = self.pool_idx + 1, 0, None
                self.num_left_out += left_out
        return taken

    def _pack(self, pool_idx: int) -> tuple[list[Rows], int]:
        size, length = self.data.pool_problems, self.data.pack_tokens
        numbers = range(pool_idx * size, (pool_idx + 1) * size)
        examples = [
            encode_problem(self.codec, self.mixture.problem(n, self.seed), n, stop_id=self.stop_id) for n in numbers
        ]
        problems = [problem_rows(e, self.objective, self.noise, self.seed) for e in examples]
        fitting = [rows for rows in problems if len(rows.ids) <= length]
        if not fitting:
            shortest = min(len(rows.ids) for rows in problems)
            raise RecipeError(
                f"the shortest problem of {size} needs {shortest} rows and data.pack_tokens is {length}; raise it"
            )
        bins = pack(fitting, length)
        # First-fit decreasing leaves long problems in front: shuffle, so that steps are alike.
        order = generator(self.seed, pool_idx, DATA_STREAM).permutation(len(bins))
        return [bins[i] for i in order], size - len(fitting)


def held_out(mixture: Mixture, num_problems: int) -> Sequence[Problem]:
    """The first `num_problems` held-out problems of every task, tasks in turn."""
    return [get_task(task).problem(index, "heldout") for index in range(num_problems) for task in mixture.tasks]
