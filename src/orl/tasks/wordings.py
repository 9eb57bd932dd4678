"""Gold workings in many wordings, as answers collected from many hands are.

A task writes each working in one way, so that a model has nothing to choose. Here every line of a working takes one of
several forms, drawn line by line: what a line says is unchanged, its words, its order and its length are not. A
model trained on such answers cannot know the form of a line before it has begun, and slots of later lines stay
uncertain until earlier ones stand. Answers after the mark, and tasks whose answer is one text, keep their form.

Source: ours.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from orl.tasks.types import ANSWER_MARK, Problem, derive_seed

# The words are whole tokens of the vocabulary of dlmrt-tiny: one that falls into pieces invites answers such as "4ow",
# half a number and half a "Now".
# Forms of a line "left = right" without words.
_EQUATION_FORMS: tuple[Callable[[str, str], str], ...] = (
    lambda left, right: f"{left} = {right}",
    lambda left, right: f"{left} is {right}.",
    lambda left, right: f"Find {left} = {right}",
    lambda left, right: f"Together {left} equals {right}",
    lambda left, right: f"There {left} makes {right}.",
    lambda left, right: f"The result of {left} is {right}.",
)
# Forms of any other line, and of the last equals sign in it.
_TEXT_FORMS = ("{}", "Find: {}", "To solve this: {}", "The following step: {}")
_EQUALS = (" = ", " is ", " equals ")
_ENDINGS: tuple[Callable[[str], str], ...] = (
    lambda answer: "",
    lambda answer: f"The answer: {answer}\n",
    lambda answer: f"The final answer is {answer}.\n",
    lambda answer: f"There is the answer: {answer}\n",
)


def reword(problem: Problem) -> Problem:
    """`problem` with its gold response in wordings drawn from its number; unchanged where it has no working."""
    working, mark, answer = problem.response.rpartition(f"\n{ANSWER_MARK} ")
    if not mark:
        return problem
    rng = Random(derive_seed(f"{problem.task} wordings", problem.index, problem.split, 0))
    lines = [_reword_line(line, rng) for line in working.splitlines()]
    ending = rng.choice(_ENDINGS)(answer)
    return replace(problem, response="\n".join([*lines, f"{ending}{ANSWER_MARK} {answer}"]))


def _reword_line(line: str, rng: Random) -> str:
    left, equals, right = line.rpartition(" = ")
    if equals and not any(c.isalpha() or c == "=" for c in left + right):
        return rng.choice(_EQUATION_FORMS)(left, right)
    if equals:
        line = f"{left}{rng.choice(_EQUALS)}{right}"
    return rng.choice(_TEXT_FORMS).format(line)
