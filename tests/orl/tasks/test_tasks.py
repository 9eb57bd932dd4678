"""Every task: gold passes, everything else fails, streams are deterministic, splits never share a prompt."""

import ast
import pickle
import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orl.errors import OrlError, SplitExhaustedError, UnknownTaskError
from orl.tasks import TASKS, Problem, answer_of, get_task, split_of, task_names
from orl.tasks.arithmetic import CHAIN_SUM, ChainSumDifficulty
from orl.tasks.types import SPLITS
from orl.tasks.word_problems import WORD_PROBLEMS, WordProblemsDifficulty

pytest.importorskip("reasoning_gym")
GYM_TASKS = [name for name in TASKS if name != "python_functions"]


def problems(name: str, split: str = "train", count: int = 100) -> list[Problem]:
    """The first problems of a stream."""
    task = get_task(name)
    return [task.problem(index, split) for index in range(count)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", TASKS)
def test_gold_passes(name: str, split: str) -> None:
    task = get_task(name)
    for problem in problems(name, split):
        verdict = task.verify(problem, problem.response)
        assert verdict.passed and verdict.reason == "ok", (problem, verdict)


@pytest.mark.parametrize("name", TASKS)
def test_streams_are_deterministic_and_random_access(name: str) -> None:
    for split in SPLITS:
        forward = problems(name, split, 20)
        task = replace(get_task(name))  # a fresh instance, read backwards
        backward = [task.problem(index, split) for index in reversed(range(20))]
        assert forward == backward[::-1]
        assert [(problem.index, problem.split, problem.task) for problem in forward] == [
            (index, split, name) for index in range(20)
        ]
    assert len({problem.prompt for problem in problems(name)}) > 90
    assert task.problem(10**12).prompt


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_prompt(name: str) -> None:
    train = {problem.prompt for problem in problems(name, "train", 300)}
    heldout = {problem.prompt for problem in problems(name, "heldout", 60)}
    assert not train & heldout
    assert {split_of(prompt) for prompt in train} == {"train"}
    assert {split_of(prompt) for prompt in heldout} == {"heldout"}


def test_split_of_is_frozen() -> None:
    """A changed hash would move held-out prompts into training sets made earlier."""
    assert [number for number in range(64) if split_of(f"prompt {number}") == "heldout"] == [14, 22]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("response", ["", "   \n", "####", "text\n####   \n", "#### \n5"])
def test_no_answer(name: str, response: str) -> None:
    task = get_task(name)
    verdict = task.verify(task.problem(0), response)
    assert (verdict.passed, verdict.reason) == (False, "no answer")


@pytest.mark.parametrize("name", GYM_TASKS)
def test_wrong_padded_and_hostile_answers_fail(name: str) -> None:
    task = get_task(name)
    for problem in problems(name, count=20):
        answer = answer_of(problem.response)
        hostile = [
            *(f"#### {text}" for text in _near_misses(answer)),
            f"{answer}\n{answer}",
            f"The answer is {answer}",
            f"{problem.response}\n#### I am not sure",
            f"{problem.response}\n####",
            "####".join(["", "0", "none"]),
            problem.prompt,
            "1.0",
            "None",
            "\0",
            "\ud800",
            "9" * 5000,
        ]
        for response in hostile:
            if answer_of(response) != answer:
                assert not task.verify(problem, response).passed, (problem, response)


def _near_misses(answer: str) -> Iterable[str]:
    yield from (f"-{answer}", f"+{answer}", f"0{answer}", f"{answer}.0", f"{answer}.", f"${answer}", f"{answer} legs")
    yield from (f"{answer} {answer}", f"{answer}, 0", f"[{answer}]", f"'{answer}'", f"{answer}%", f"({answer})")
    yield from (answer.lower() + " ", answer.swapcase(), answer[::-1] + "x", answer.replace("'", ""))
    yield answer.replace("'", '"')
    if answer.isdigit():
        yield from (str(int(answer) + 1), str(int(answer) - 1), f"{answer}e0", f"{answer}/1", "\u0661")
    if answer.startswith("['"):
        numbers = ast.literal_eval(answer)
        for place, number in enumerate(numbers):
            yield str([*numbers[:place], str(int(number) + 1), *numbers[place + 1 :]])
            yield str(numbers[:place] + numbers[place + 1 :])
        yield str(numbers[::-1]) + "#"
        yield str([int(number) for number in numbers])


@pytest.mark.parametrize("name", GYM_TASKS)
def test_bare_answer_passes(name: str) -> None:
    """The working is not judged: the answer alone, or after any text and the mark, is enough."""
    task = get_task(name)
    for problem in problems(name, count=10):
        answer = answer_of(problem.response)
        assert task.verify(problem, answer).passed
        assert task.verify(problem, f"#### 1\nsome text\n####{answer}  \nmore text").passed


@pytest.mark.parametrize("name", GYM_TASKS)
def test_workings_are_true(name: str) -> None:
    """Every `a + b = c` chain of a gold response holds, and the scorer's answer is ours."""
    for problem in problems(name, count=100):
        text = re.sub(r"[$\u00a3\u20ac]", "", problem.response)
        for left, right in re.findall(r"((?:\d+ ?[-+*/x] ?)+\d+) ?= ?(\d+)", text):
            assert _value(left) == int(right), (left, right, problem.response)
        for line in re.findall(r"^\d+ [<>=] \d+(?=: )", problem.response, flags=re.MULTILINE):
            assert eval(line.replace(" = ", " == ")), line


def _value(expression: str) -> Fraction:
    return eval(re.sub(r"(\d+)", r"Fraction(\1)", expression.replace("x", "*")))


def test_verdict_reasons_are_short() -> None:
    task = get_task("chain_sum")
    problem = task.problem(0)
    wrong = str(int(problem.metadata["entry"]["answer"]) + 1)
    assert task.verify(problem, f"#### {wrong}").reason == f"wrong answer: {wrong}"
    assert len(task.verify(problem, "x" * 10_000).reason) <= 120


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_only_the_canonical_answer_passes(text: str) -> None:
    task = get_task("number_filtering")
    problem = task.problem(3)
    assert task.verify(problem, text).passed == (answer_of(text) == answer_of(problem.response))


@given(st.text(max_size=40), st.text(max_size=40))
def test_answer_is_one_stripped_line_after_the_last_mark(before: str, after: str) -> None:
    answer = answer_of(f"{before}####{after}")
    assert "####" not in answer and "\n" not in answer and answer == answer.strip()


def test_word_problem_templates_are_all_used_and_easy() -> None:
    seen = {problem.metadata["entry"]["metadata"]["template"] for problem in problems("word_problems", count=400)}
    assert seen == set(WordProblemsDifficulty().our_templates)
    for problem in problems("word_problems", count=200):
        assert len(problem.prompt.split()) <= 70 and len(problem.response.split()) <= 70
        assert max(map(int, re.findall(r"\d+", problem.response))) <= 99


def test_difficulty_can_be_tuned() -> None:
    hard = replace(CHAIN_SUM, difficulty=ChainSumDifficulty(min_terms=5, max_terms=5, our_max_total=10_000))
    assert all(hard.problem(index).response.count("=") == 4 for index in range(20))
    one = replace(WORD_PROBLEMS, difficulty=WordProblemsDifficulty(our_templates=(43,)))
    assert all(" fewer " in one.problem(index).prompt for index in range(5))


def test_an_exhausted_split_is_an_error() -> None:
    impossible = replace(CHAIN_SUM, difficulty=ChainSumDifficulty(our_max_total=-1))
    with pytest.raises(SplitExhaustedError, match="widen its difficulty"):
        impossible.problem(0)


def test_bad_arguments_are_errors() -> None:
    task = get_task("chain_sum")
    with pytest.raises(ValueError, match="'train' or 'heldout'"):
        task.problem(0, "test")
    with pytest.raises(ValueError, match="zero or more"):
        task.problem(-1)


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UnknownTaskError, match="did you mean 'chain_sum'") as caught:
        get_task("chainsum")
    assert isinstance(caught.value, (OrlError, ValueError))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(UnknownTaskError, match=r"known: .*word_problems"):
        get_task("zzzz")


def test_registry_and_problems_pickle() -> None:
    assert task_names() == list(TASKS) and len(task_names()) == 9
    for name in TASKS:
        task = get_task(name)
        assert (task.name, bool(task.description)) == (name, True)
        problem = task.problem(0)
        assert pickle.loads(pickle.dumps(problem)) == problem
