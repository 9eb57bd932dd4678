"""Workings in many wordings say the same."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orl.data import Mixture
from orl.recipe import DataSection
from orl.tasks import answer_of, get_task
from orl.tasks.types import Problem
from orl.tasks.wordings import reword

WORKED = ("word_problems", "chain_sum", "equations", "leg_counting")


def numbers(line: str) -> Counter[str]:
    return Counter(re.findall(r"\d+", line))


def problem_with(working: list[str], *, index: int = 0) -> Problem:
    response = "\n".join([*working, "#### 7"])
    return Problem(task="any", prompt="p", response=response, index=index, split="train", metadata={})


@pytest.mark.parametrize("name", WORKED)
def test_an_answer_stays_right_and_lines_keep_their_numbers(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = get_task(name)
    for index in range(30):
        problem = task.problem(index)
        worded = reword(problem)
        assert task.verify(problem, worded.response).passed
        assert answer_of(worded.response) == answer_of(problem.response)
        before, after = problem.response.splitlines()[:-1], worded.response.splitlines()
        assert [numbers(line) for line in before] == [numbers(line) for line in after[: len(before)]]
        assert (worded.prompt, worded.metadata) == (problem.prompt, problem.metadata)


@given(left=st.from_regex(r"[0-9]{1,3} [-+*/] [0-9]{1,3}", fullmatch=True), right=st.integers(0, 999))
def test_an_equation_is_one_line_with_both_sides(left: str, right: int) -> None:
    for index in range(8):
        line, *rest = reword(problem_with([f"{left} = {right}"], index=index)).response.splitlines()
        assert left in line and str(right) in line and rest[-1] == "#### 7"


def test_every_form_is_drawn_and_a_number_has_one_wording() -> None:
    drawn = {reword(problem_with(["1 + 2 = 3"], index=index)).response for index in range(300)}
    assert len(drawn) == 24  # 6 forms of the line x 4 endings
    text = {reword(problem_with(["Ann has 1 + 2 = 3 cats."], index=i)).response.split("\n")[0] for i in range(300)}
    assert len(text) == 12 and "The following step: Ann has 1 + 2 equals 3 cats." in text
    assert reword(problem_with(["1 + 2 = 3"], index=5)) == reword(problem_with(["1 + 2 = 3"], index=5))


def test_an_answer_without_a_working_is_left_alone() -> None:
    pytest.importorskip("reasoning_gym")
    for name in ("spell_backward", "python_functions", "number_sorting"):
        problem = get_task(name).problem(3)
        assert reword(problem) is problem


def test_a_stream_of_problems_is_reworded_where_the_recipe_says_so() -> None:
    pytest.importorskip("reasoning_gym")
    plain = Mixture.of(DataSection(tasks=WORKED)).problem(4, seed=0)
    many = Mixture.of(DataSection(tasks=WORKED, wordings="many")).problem(4, seed=0)
    assert many == reword(plain) != plain
