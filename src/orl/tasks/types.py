"""Nouns of the tasks: problem, verdict, task; and the rules that all tasks share (answer, split, stream).

A task is a stateless, random-access stream: `problem(index, split)` depends on nothing but the task name, its
difficulty, the index and the split. Train and held-out cannot share a prompt, because the split is a function of
the prompt text: a draft that falls into the other split is thrown away and the next derived seed is tried.
Left out on purpose: any state, cache of problems or dataset file.

**Source:** ours.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from orl.errors import SplitExhaustedError

SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 32  # one prompt text in 32 belongs to the held-out split
MAX_DRAFTS = 8192  # expected drafts for a held-out problem: 32 divided by the task's acceptance rate
ANSWER_MARK = "####"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt with its gold response and all that its verifier needs.

    Example:
        Problem(task="chain_sum", prompt="State the final answer to the following arithmetic problem: 12 + 35 - 7 =",
                response="12 + 35 = 47\\n47 - 7 = 40\\n#### 40", index=0, split="train", metadata={...})
    """

    task: str  # task name
    prompt: str  # user message text
    response: str  # gold response text, worked where the task has a working
    index: int  # stream index it was made from
    split: str  # "train" or "heldout"
    metadata: Mapping[str, Any]  # what the verifier needs: expected answer, reasoning-gym entry, unit tests


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verifier says of one response.

    Example:
        Verdict(passed=False, reason="wrong answer: 41")
    """

    passed: bool  # whether the response counts as right
    reason: str  # "ok" or a short cause


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A problem before it has an index and a split."""

    prompt: str  # user message text
    response: str  # gold response text
    metadata: Mapping[str, Any]  # becomes `Problem.metadata`


class Task(Protocol):
    """A stream of problems with its verifier."""

    @property
    def name(self) -> str:
        """Task name."""
        ...

    @property
    def description(self) -> str:
        """One line for people."""
        ...

    def problem(self, index: int, split: str = "train") -> Problem:
        """Make problem number `index` of a split."""
        ...

    def verify(self, problem: Problem, response: str) -> Verdict:
        """Judge a response to a problem."""
        ...


OK = Verdict(passed=True, reason="ok")


def fail(reason: str) -> Verdict:
    """Make a failing verdict with a one-line reason of bounded length."""
    line = " ".join(reason.split())
    return Verdict(passed=False, reason=line if len(line) <= 120 else line[:117] + "...")


def answer_of(response: str) -> str:
    """Extract the answer: the line after the last `####`, else the whole response, stripped; "" when there is none."""
    _, mark, tail = response.rpartition(ANSWER_MARK)
    return (tail.split("\n", 1)[0] if mark else response).strip()


def split_of(prompt: str) -> str:
    """Tell the split of a prompt text from a stable hash of it."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0 else "train"


def derive_seed(task: str, index: int, split: str, attempt: int) -> int:
    """Derive the seed of one draft; neighbours in index or attempt are unrelated."""
    key = f"{task}\0{split}\0{index}\0{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def draw_problem(task: str, index: int, split: str, draft: Callable[[int], Draft | None]) -> Problem:
    """Make the problem at (`index`, `split`) from the first derived seed whose draft is accepted.

    Args:
        task: Task name; part of the seed, so that two tasks over one generator differ.
        index: Stream index, zero or more.
        split: "train" or "heldout".
        draft: Makes a draft from a seed, or None when that seed's draft is outside the task's difficulty.

    Raises:
        ValueError: Unknown split or negative index.
        SplitExhaustedError: No accepted draft fell into the split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use 'train' or 'heldout'")
    if index < 0:
        raise ValueError(f"problem index is {index}; use zero or more")
    for attempt in range(MAX_DRAFTS):
        made = draft(derive_seed(task, index, split, attempt))
        if made is not None and split_of(made.prompt) == split:
            return Problem(
                task=task, prompt=made.prompt, response=made.response, index=index, split=split, metadata=made.metadata
            )
    raise SplitExhaustedError(
        f"task {task!r} gave no {split} problem at index {index} in {MAX_DRAFTS} drafts; widen its difficulty"
    )
