"""Tasks over reasoning-gym datasets: its generator and its scorer, our short prompt and worked response.

reasoning-gym seeds each item with `Random(seed + index)`, so a dataset opened with seed 0 is a random-access stream
over all integers and a derived seed is simply its index. Its scorers are lenient in places (word problems ignore a
minus sign, number sorting allows an error of 1, spelling ignores case), so a response passes only when the scorer
gives exactly 1.0 *and* the answer equals the canonical text. This is the only file that imports reasoning-gym.

**Source:** reasoning-gym 0.1.25 (Apache-2.0), `reasoning_gym/dataset.py`, `reasoning_gym/factory.py`; texts ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

from orl.tasks.types import OK, Draft, Problem, Verdict, answer_of, draw_problem, fail

Entry = Mapping[str, Any]  # a reasoning-gym item: "question", "answer", "metadata"


@cache
def open_dataset(dataset: str, settings: tuple[tuple[str, Any], ...] = ()) -> Any:
    """Open a reasoning-gym dataset with seed 0; imports reasoning-gym on first use because that takes a second."""
    from reasoning_gym.factory import create_dataset

    return create_dataset(dataset, seed=0, **dict(settings))


def legs_of(animal: str) -> int:
    """Look up the number of legs that reasoning-gym gives an animal."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return int(ANIMALS[animal])


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a task makes of a reasoning-gym entry."""

    prompt: str  # user message text
    response: str  # gold response text; `answer_of(response)` is the canonical answer


@dataclass(frozen=True, kw_only=True)
class GymTask:
    """A task whose items and scores come from reasoning-gym."""

    name: str  # task name
    description: str  # one line for people
    dataset: str  # reasoning-gym dataset name
    difficulty: Any  # frozen dataclass; see `gym_settings`
    write: Callable[[Entry, Any], Written | None]  # (entry, difficulty) -> text, None to skip
    draw: Callable[[Any, int, Any], Entry] | None = None  # (dataset, seed, difficulty)

    @cached_property
    def source(self) -> Any:
        """The opened reasoning-gym dataset."""
        return open_dataset(self.dataset, gym_settings(self.difficulty))

    def problem(self, index: int, split: str = "train") -> Problem:
        """Make problem number `index` of a split."""
        return draw_problem(self.name, index, split, self._draft)

    def verify(self, problem: Problem, response: str) -> Verdict:
        """Pass iff the answer is the canonical text and reasoning-gym's own scorer gives 1.0."""
        answer = answer_of(response)
        if not answer:
            return fail("no answer")
        entry = problem.metadata["entry"]
        if answer != answer_of(problem.response) or self.source.score_answer(answer, entry=entry) != 1.0:
            return fail(f"wrong answer: {answer}")
        return OK

    def _draft(self, seed: int) -> Draft | None:
        entry = self.source[seed] if self.draw is None else self.draw(self.source, seed, self.difficulty)
        written = self.write(entry, self.difficulty)
        if written is None:
            return None
        return Draft(prompt=written.prompt, response=written.response, metadata={"entry": entry})


def gym_settings(difficulty: Any) -> tuple[tuple[str, Any], ...]:
    """Turn a difficulty into dataset settings: its fields, less those that begin with `our_`."""
    return tuple((key, value) for key, value in asdict(difficulty).items() if not key.startswith("our_"))
