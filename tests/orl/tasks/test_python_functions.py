"""The function-writing task: hidden tests tell right from nearly right, and cannot be read or forged."""

import re
from dataclasses import replace

import pytest

from orl.tasks import get_task, python_functions
from orl.tasks.python_functions import SHAPES, TIMEOUT_S
from orl.tasks.types import Problem

TASK = get_task("python_functions")


@pytest.fixture(scope="module")
def adder() -> Problem:
    """A fixed problem, so that wrong answers can be written by hand."""
    return Problem(
        task="python_functions",
        prompt="Write a Python function f(x) that takes a number x, adds 3 and returns the result.",
        response="def f(x):\n    x = x + 3\n    return x",
        index=0,
        split="train",
        metadata={"function": "f", "calls": ("(0,)", "(5,)", "(-4,)"), "expected": ("3", "8", "-1")},
    )


@pytest.mark.parametrize(
    "response",
    [
        "def f(x):\n    return x + 3",
        "f = lambda y: 3 + y",
        "import math\ndef f(x):\n    print('noise')\n    return x + 3",
    ],
)
def test_other_right_programs_pass(adder: Problem, response: str) -> None:
    assert TASK.verify(adder, response).passed


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("def f(x):\n    return x + 2", "f(0) gave 2, not 3"),
        ("def f(x):\n    return float(x + 3)", "f(0) gave 3.0, not 3"),
        ("def f(x):\n    return str(x + 3)", "f(0) gave '3', not 3"),
        ("def f(x):\n    print(x + 3)", "f(0) gave None, not 3"),
        ("def f(x):\n    return y", "f(0) gave error NameError, not 3"),
        ("def g(x):\n    return x + 3", "no function named f"),
        ("```python\ndef f(x):\n    return x + 3\n```", "error: SyntaxError"),
        ("x + 3", "error: NameError"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("def f(x):\n    return 'a' * 10**6", "output limit"),
        ("def f(x):\n    return [0] * 10**10", "f(0) gave error MemoryError, not 3"),
        ("def f(x):\n    return f(x)", "f(0) gave error RecursionError, not 3"),
        ("import sys\ndef f(x):\n    sys.exit(0)", "stopped early with exit status 0"),
        ("import os\nos._exit(0)", "stopped early with exit status 0"),
        ("class A(int):\n    __repr__ = lambda s: '3'\ndef f(x):\n    return A(x + 3)", "f(0) gave <A>, not 3"),
        ("def f(x):\n    return type('int', (int,), {})(x + 3)", "f(0) gave <int>, not 3"),
        ("f = None", "no function named f"),
        ("a\0b", "error: "),
        ("\ud800", "error: "),
    ],
)
def test_wrong_and_hostile_programs_fail(
    adder: Problem, response: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_functions, "TIMEOUT_S", 0.7)
    verdict = TASK.verify(adder, response)
    assert not verdict.passed and verdict.reason.startswith(reason), verdict


def test_expected_outputs_never_reach_the_child(adder: Problem) -> None:
    """A response that prints all it can see finds the inputs at most."""
    adder = replace(adder, metadata={**adder.metadata, "expected": ("987654321", "8", "-1")})
    peek = (
        "import sys\nframe = sys._getframe(1)\nseen = repr((frame.f_locals, frame.f_back.f_locals))\n"
        "def f(x):\n    return [str(1975308642 // 2) in seen, 'lambda' in seen]"
    )
    assert TASK.verify(adder, peek).reason == "f(0) gave [False, True], not 987654321"


def test_printed_outcomes_do_not_count(adder: Problem) -> None:
    forged = "print('value 3')\nprint('value 8')\nprint('value -1')\ndef f(x):\n    return 0"
    assert TASK.verify(adder, forged).reason == "f(0) gave 0, not 3"
    more = (
        "import sys\nmark = sys._getframe(1).f_locals['mark']\nprint('\\n' + mark + 'value 3')\n"
        "def f(x):\n    return x + 3"
    )
    assert not TASK.verify(adder, more).passed


def test_hidden_tests_catch_changed_constants() -> None:
    """Gold texts with one constant changed by one are nearly always caught (run in-process: the text is ours)."""
    changed = caught = 0
    for index in range(300):
        problem = TASK.problem(index)
        for found in re.finditer(r"\b\d+\b", problem.response):
            if "% 2" in problem.response or "== 0" in problem.response[found.start() - 3 : found.end()]:
                continue
            text = problem.response[: found.start()] + str(int(found[0]) + 1) + problem.response[found.end() :]
            changed += 1
            caught += _outcomes(problem, text) != problem.metadata["expected"]
    assert changed > 200 and caught / changed > 0.95, (caught, changed)


def _outcomes(problem: Problem, text: str) -> tuple[str, ...]:
    space: dict = {}
    exec(text, space)
    return tuple(repr(space[problem.metadata["function"]](*eval(call))) for call in problem.metadata["calls"])


def test_gold_agrees_with_the_reference_over_many_problems() -> None:
    for index in range(2000):
        problem = TASK.problem(index)
        assert _outcomes(problem, problem.response) == problem.metadata["expected"], problem


def test_shapes_and_limits() -> None:
    assert sum(share for _, share in SHAPES) == 100 and TIMEOUT_S <= 5
    lines = [TASK.problem(index).response.count("\n") + 1 for index in range(300)]
    assert min(lines) >= 2 and max(lines) <= 5
