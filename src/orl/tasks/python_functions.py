"""Write a small Python function from a description; judged by running it on hidden inputs in the sandbox.

A problem is a shape (a chain of steps over a number, a list or a string; a branch; two arguments; a loop) filled with
random steps, constants and names. Each step carries three independent things: the phrase of the prompt, the line of
the gold response, and a reference closure that computes the expected outputs. The child process is given the inputs
only; expected outputs stay with the parent, so that a response cannot read them. Steps that compare with a constant
come first in a chain, where the inputs are sure to lie on both sides of it.

**Source:** ours; reasoning-gym has no task of this kind.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from orl.tasks.sandbox import run_python
from orl.tasks.types import OK, Draft, Problem, Verdict, answer_of, draw_problem, fail

FUNCTION_NAMES = (
    "f g h solve compute apply convert change process make build work step run update result answer calc transform"
).split()
NUMBER_NAMES = "x n a k m num value number".split()
LIST_NAMES = "xs nums items values data numbers".split()
STRING_NAMES = "s t text word name line".split()
PAIR_NAMES = (("a", "b"), ("x", "y"), ("m", "n"), ("p", "q"))
FRAGMENTS = "ab xy ok no go hi ing er re un".split()
LABELS = (("yes", "no"), ("big", "small"), ("in", "out"), ("good", "bad"), ("left", "right"), ("on", "off"))
LETTERS = "aeionrst"
WORDS = "banana stone return notion arrest tree iris a seat orientation train sos".split()
TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class PythonFunctionsDifficulty:
    """Length of the functions."""

    min_steps: int = 1  # fewest steps in a chain
    max_steps: int = 2  # most steps in a chain
    max_constant: int = 9  # largest constant in arithmetic steps


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a chain.

    Example:
        Step(phrase="adds 3", line="x = x + 3", reference=<closure>, edges=())
    """

    phrase: str  # verb phrase of the prompt
    line: str  # gold line, with the argument's name in it
    reference: Callable[[Any], Any]  # what the step does
    edges: tuple[int, ...] = ()  # input values around the step's constant, for tests that tell neighbours apart
    kind: str = ""  # steps of one kind do not share a chain: together they would leave little to test


@dataclass(frozen=True, kw_only=True)
class Function:
    """A described function with its gold text and its reference."""

    prompt: str  # user message text
    gold: str  # gold response text
    name: str  # function name
    reference: Callable[..., Any]  # independent implementation
    calls: tuple[tuple[Any, ...], ...]  # hidden inputs


def number_step(rng: Random, v: str, difficulty: PythonFunctionsDifficulty, is_first: bool) -> Step:
    """Draw a step from number to number."""
    k = rng.randint(2, difficulty.max_constant)
    limit = rng.randint(3, 20)
    steps = [
        Step(phrase=f"adds {k}", line=f"{v} = {v} + {k}", reference=lambda x: x + k),
        Step(phrase=f"subtracts {k}", line=f"{v} = {v} - {k}", reference=lambda x: x - k),
        Step(phrase=f"multiplies by {k}", line=f"{v} = {v} * {k}", reference=lambda x: x * k),
        Step(
            phrase=f"divides by {k} rounding down", line=f"{v} = {v} // {k}", reference=lambda x: x // k, kind="divide"
        ),
        Step(phrase=f"takes the remainder by {k}", line=f"{v} = {v} % {k}", reference=lambda x: x % k, kind="divide"),
        Step(phrase="squares it", line=f"{v} = {v} * {v}", reference=lambda x: x**2),
        Step(phrase="flips the sign", line=f"{v} = -{v}", reference=lambda x: 0 - x),
        Step(phrase="takes the absolute value", line=f"{v} = abs({v})", reference=lambda x: x if x >= 0 else 0 - x),
    ]
    if is_first:
        edges = (limit - 1, limit, limit + 1)
        steps += [
            Step(
                phrase=f"limits it to at most {limit}",
                line=f"{v} = min({v}, {limit})",
                reference=lambda x: limit if x > limit else x,
                edges=edges,
            ),
            Step(
                phrase=f"raises it to at least {limit}",
                line=f"{v} = max({v}, {limit})",
                reference=lambda x: limit if x < limit else x,
                edges=edges,
            ),
        ]
    return rng.choice(steps)


def list_step(rng: Random, v: str, difficulty: PythonFunctionsDifficulty, is_first: bool) -> Step:
    """Draw a step from list of numbers to list of numbers."""
    k = rng.randint(2, difficulty.max_constant)
    few = rng.randint(1, 3)
    steps = [
        Step(phrase=f"adds {k} to each", line=f"{v} = [i + {k} for i in {v}]", reference=lambda x: [y + k for y in x]),
        Step(
            phrase=f"multiplies each by {k}",
            line=f"{v} = [i * {k} for i in {v}]",
            reference=lambda x: [y * k for y in x],
        ),
        Step(phrase="reverses it", line=f"{v} = {v}[::-1]", reference=lambda x: list(reversed(x))),
        Step(phrase="sorts it", line=f"{v} = sorted({v})", reference=sorted),
    ]
    if is_first:
        limit = rng.randint(2, 12)
        edges = (limit - 1, limit, limit + 1)
        steps += [
            Step(
                phrase=f"keeps those above {limit}",
                line=f"{v} = [i for i in {v} if i > {limit}]",
                reference=lambda x: [y for y in x if y >= limit + 1],
                edges=edges,
                kind="choose",
            ),
            Step(
                phrase=f"keeps those below {limit}",
                line=f"{v} = [i for i in {v} if i < {limit}]",
                reference=lambda x: [y for y in x if y <= limit - 1],
                edges=edges,
                kind="choose",
            ),
            Step(
                phrase="keeps the even ones",
                line=f"{v} = [i for i in {v} if i % 2 == 0]",
                reference=lambda x: [y for y in x if not y & 1],
                kind="choose",
            ),
            Step(
                phrase="keeps the odd ones",
                line=f"{v} = [i for i in {v} if i % 2 == 1]",
                reference=lambda x: [y for y in x if y & 1],
                kind="choose",
            ),
            Step(
                phrase=f"keeps the first {few}",
                line=f"{v} = {v}[:{few}]",
                reference=lambda x: [y for place, y in enumerate(x) if place < few],
                kind="choose",
            ),
            Step(
                phrase=f"drops the first {few}",
                line=f"{v} = {v}[{few}:]",
                reference=lambda x: [y for place, y in enumerate(x) if place >= few],
                kind="choose",
            ),
        ]
    return rng.choice(steps)


def string_step(rng: Random, v: str, difficulty: PythonFunctionsDifficulty, is_first: bool) -> Step:
    """Draw a step from string to string."""
    few, fragment = rng.randint(2, 3), rng.choice(FRAGMENTS)
    old, new = rng.sample(LETTERS, 2)
    steps = [
        Step(phrase="reverses it", line=f"{v} = {v}[::-1]", reference=lambda x: "".join(reversed(x))),
        Step(
            phrase=f'adds "{fragment}" at the end',
            line=f'{v} = {v} + "{fragment}"',
            reference=lambda x: "".join([x, fragment]),
        ),
        Step(
            phrase=f'adds "{fragment}" at the start',
            line=f'{v} = "{fragment}" + {v}',
            reference=lambda x: "".join([fragment, x]),
        ),
        Step(phrase=f"repeats it {few} times", line=f"{v} = {v} * {few}", reference=lambda x: "".join([x] * few)),
        Step(
            phrase=f"keeps the first {few} letters", line=f"{v} = {v}[:{few}]", reference=lambda x: x[0:few], kind="cut"
        ),
        Step(
            phrase=f"drops the first {few} letters",
            line=f"{v} = {v}[{few}:]",
            reference=lambda x: x[few : len(x)],
            kind="cut",
        ),
        Step(
            phrase=f'replaces "{old}" with "{new}"',
            line=f'{v} = {v}.replace("{old}", "{new}")',
            reference=lambda x: "".join(new if letter == old else letter for letter in x),
        ),
    ]
    # Last, so that no step of lower-case letters works on capitals.
    if not is_first:
        steps.append(Step(phrase="makes it upper case", line=f"{v} = {v}.upper()", reference=lambda x: x.upper()))
    return rng.choice(steps)


def draw_steps(
    rng: Random, make: Callable[..., Step], v: str, difficulty: PythonFunctionsDifficulty
) -> tuple[list[Step], Callable[[Any], Any]]:
    """Draw a chain of steps, no two of one kind or phrase, and compose their references."""
    steps: list[Step] = []
    for place in range(rng.randint(difficulty.min_steps, difficulty.max_steps)):
        step = make(rng, v, difficulty, place == 0)
        while any(step.phrase == earlier.phrase or (step.kind and step.kind == earlier.kind) for earlier in steps):
            step = make(rng, v, difficulty, place == 0)
        steps.append(step)

    def reference(x: Any) -> Any:
        for step in steps:
            x = step.reference(x)
        return x

    return steps, reference


def write_chain(
    name: str, arguments: str, kind: str, phrases: list[str], lines: list[str], end: str
) -> tuple[str, str]:
    """Write prompt and gold of a function that works step by step and returns at the end."""
    steps = ", ".join(phrases)
    prompt = f"Write a Python function {name}({arguments}) that takes {kind} {arguments}, {steps} and {end}."
    return prompt, "\n".join([f"def {name}({arguments}):", *(f"    {line}" for line in lines)])


def number_function(rng: Random, difficulty: PythonFunctionsDifficulty) -> Function:
    """A chain over a number."""
    name, v = rng.choice(FUNCTION_NAMES), rng.choice(NUMBER_NAMES)
    steps, reference = draw_steps(rng, number_step, v, difficulty)
    lines = [*(step.line for step in steps), f"return {v}"]
    prompt, gold = write_chain(name, v, "a number", [step.phrase for step in steps], lines, "returns the result")
    inputs = {0, 1, -5, 13, *rng.sample(range(-30, 60), 4), *(edge for step in steps for edge in step.edges)}
    return Function(prompt=prompt, gold=gold, name=name, reference=reference, calls=tuple((x,) for x in sorted(inputs)))


def list_function(rng: Random, difficulty: PythonFunctionsDifficulty) -> Function:
    """A chain over a list, returned whole, summed up or counted."""
    name, v = rng.choice(FUNCTION_NAMES), rng.choice(LIST_NAMES)
    steps, before = draw_steps(rng, list_step, v, difficulty)
    ends: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("returns the result", v, lambda x: x),
        ("returns the sum", f"sum({v})", lambda x: sum(y for y in x)),
    ]
    if len(steps) == 1 and steps[0].kind == "choose":  # other steps leave no trace in a length
        ends.append(("returns the length", f"len({v})", lambda x: sum(1 for _ in x)))
    end, expression, after = rng.choice(ends)
    lines = [*(step.line for step in steps), f"return {expression}"]
    prompt, gold = write_chain(name, v, "a list of numbers", [step.phrase for step in steps], lines, end)
    edges = [edge for step in steps for edge in step.edges]
    calls: list[tuple[list[int]]] = [([],)]
    for length in (1, 3, 5, 7, 8):
        numbers = [*edges, *(rng.randint(-6, 15) for _ in range(length))]
        rng.shuffle(numbers)
        calls.append((numbers,))
    return Function(prompt=prompt, gold=gold, name=name, reference=lambda x: after(before(x)), calls=tuple(calls))


def string_function(rng: Random, difficulty: PythonFunctionsDifficulty) -> Function:
    """A chain over a string, returned whole or measured."""
    name, v = rng.choice(FUNCTION_NAMES), rng.choice(STRING_NAMES)
    steps, before = draw_steps(rng, string_step, v, difficulty)
    letter = rng.choice(LETTERS)
    ends: list[tuple[str, str, Callable[[Any], Any]]] = [("returns the result", v, lambda x: x)] * 2
    ends.append(("returns the length", f"len({v})", lambda x: sum(1 for _ in x)))
    if not any(step.kind == "cut" or "upper" in step.line for step in steps):
        ends.append((f'counts "{letter}"', f'{v}.count("{letter}")', lambda x: sum(y == letter for y in x)))
    end, expression, after = rng.choice(ends)
    lines = [*(step.line for step in steps), f"return {expression}"]
    prompt, gold = write_chain(name, v, "a string", [step.phrase for step in steps], lines, end)
    calls = (("",), *((word,) for word in rng.sample(WORDS, 5)))
    return Function(prompt=prompt, gold=gold, name=name, reference=lambda x: after(before(x)), calls=calls)


def branch_function(rng: Random, difficulty: PythonFunctionsDifficulty) -> Function:
    """A condition on a number with two outcomes."""
    name, v = rng.choice(FUNCTION_NAMES), rng.choice(NUMBER_NAMES)
    k, divisor = rng.randint(2, 20), rng.randint(3, 9)
    conditions: list[tuple[str, str, Callable[[int], bool]]] = [
        (f"is greater than {k}", f"{v} > {k}", lambda x: x - k > 0),
        (f"is less than {k}", f"{v} < {k}", lambda x: x - k < 0),
        (f"equals {k}", f"{v} == {k}", lambda x: x - k == 0),
        ("is even", f"{v} % 2 == 0", lambda x: not x & 1),
        ("is odd", f"{v} % 2 == 1", lambda x: bool(x & 1)),
        (f"is divisible by {divisor}", f"{v} % {divisor} == 0", lambda x: x // divisor * divisor == x),
        ("is negative", f"{v} < 0", lambda x: abs(x) != x),
    ]
    words, condition, test = rng.choice(conditions)
    outcomes: tuple[Any, ...] = tuple(rng.sample(range(20), 2))
    if rng.random() < 0.5:
        outcomes = rng.choice(LABELS)
    texts = [f'"{outcome}"' if isinstance(outcome, str) else str(outcome) for outcome in outcomes]
    outcome_words = f"{texts[0]} if the number {v} {words} and {texts[1]} otherwise"
    prompt = f"Write a Python function {name}({v}) that returns {outcome_words}."
    gold = f"def {name}({v}):\n    if {condition}:\n        return {texts[0]}\n    return {texts[1]}"
    inputs = {-1, 0, 1, k - 1, k, k + 1, divisor, divisor * 2, divisor * 5, *rng.sample(range(-30, 60), 4)}
    return Function(
        prompt=prompt,
        gold=gold,
        name=name,
        reference=lambda x: outcomes[0] if test(x) else outcomes[1],
        calls=tuple((x,) for x in sorted(inputs)),
    )


def pair_function(rng: Random, difficulty: PythonFunctionsDifficulty) -> Function:
    """Two numbers joined, then a step on the result."""
    name = rng.choice(FUNCTION_NAMES)
    a, b = rng.choice(PAIR_NAMES)
    joins: list[tuple[str, str, Callable[[int, int], int]]] = [
        ("adds them", f"{a} = {a} + {b}", lambda x, y: y + x),
        ("multiplies them", f"{a} = {a} * {b}", lambda x, y: y * x),
        (f"subtracts {b} from {a}", f"{a} = {a} - {b}", lambda x, y: 0 - y + x),
        ("takes the larger", f"{a} = max({a}, {b})", lambda x, y: x if x > y else y),
        ("takes the smaller", f"{a} = min({a}, {b})", lambda x, y: x if x < y else y),
    ]
    phrase, line, join = rng.choice(joins)
    step = number_step(rng, a, difficulty, False)
    prompt, gold = write_chain(
        name, f"{a}, {b}", "two numbers", [phrase, step.phrase], [line, step.line, f"return {a}"], "returns the result"
    )
    calls = ((0, 0), (3, 8), (8, 3), (-4, 7), *((rng.randint(-20, 40), rng.randint(-20, 40)) for _ in range(4)))
    return Function(prompt=prompt, gold=gold, name=name, reference=lambda x, y: step.reference(join(x, y)), calls=calls)


def loop_function(rng: Random, difficulty: PythonFunctionsDifficulty) -> Function:
    """A sum over a range."""
    name, v = rng.choice(FUNCTION_NAMES), rng.choice("n m k num number".split())
    c, start = rng.randint(2, difficulty.max_constant), rng.randint(1, 3)
    terms: list[tuple[str, str, Callable[[int], int]]] = [
        (f"i * {c}", f"i * {c}", lambda i: c * i),
        (f"i + {c}", f"i + {c}", lambda i: c + i),
        (f"i - {c}", f"i - {c}", lambda i: i - c),
        ("i * i", "i * i", lambda i: i**2),
    ]
    words, expression, term = rng.choice(terms)
    prompt = f"Write a Python function {name}({v}) that returns the sum of {words} for i from {start} to {v}."
    gold = (
        f"def {name}({v}):\n    total = 0\n    for i in range({start}, {v} + 1):\n"
        f"        total = total + {expression}\n    return total"
    )

    def reference(last: int) -> int:
        total, i = 0, start
        while i <= last:
            total, i = total + term(i), i + 1
        return total

    return Function(
        prompt=prompt, gold=gold, name=name, reference=reference, calls=tuple((x,) for x in (0, 1, 2, 3, 5, 10))
    )


# Shape and share of the problems; shapes with a larger text space get more.
SHAPES = (
    (number_function, 30),
    (list_function, 25),
    (string_function, 20),
    (branch_function, 10),
    (pair_function, 10),
    (loop_function, 5),
)

# Prints the outcome of every call behind a mark; only plain values are shown, so no class can pose as one.
_HARNESS = """
def _show(value, show=repr, kind=type, join=", ".join):
    if value is None or kind(value) in (int, float, bool, str):
        return show(value)
    if kind(value) in (list, tuple):
        left, right = "[]" if kind(value) is list else "()"
        return left + join([_show(item) for item in value]) + right
    return "<" + kind(value).__name__ + ">"
def _main(source, name, calls, mark, show=_show, write=print, error=Exception):
    space = {{"__name__": "solution"}}
    exec(compile(source, "solution", "exec"), space)
    function = space.get(name)
    if function is None:
        return write(mark + "missing")
    for call in calls:
        try:
            outcome = "value " + show(function(*call()))
        except error as problem:
            outcome = "error " + type(problem).__name__
        write("\\n" + mark + outcome.replace("\\n", " "))
_main({source!r}, {name!r}, [{calls}], {mark!r})
"""


@dataclass(frozen=True, kw_only=True)
class PythonFunctionsTask:
    """The task; see the module text."""

    name: str = "python_functions"  # task name
    description: str = "Write a short Python function, judged by hidden tests in a sandbox."  # one line for people
    difficulty: PythonFunctionsDifficulty = PythonFunctionsDifficulty()  # length of the functions

    def problem(self, index: int, split: str = "train") -> Problem:
        """Make problem number `index` of a split."""
        return draw_problem(self.name, index, split, self._draft)

    def verify(self, problem: Problem, response: str) -> Verdict:
        """Run the response in one sandboxed child and compare all outcomes with the expected ones."""
        source = answer_of(response)
        if not source:
            return fail("no answer")
        facts = problem.metadata
        mark = secrets.token_hex(8) + " "
        calls = ", ".join(f"lambda: {arguments}" for arguments in facts["calls"])
        program = _HARNESS.format(source=source, name=facts["function"], calls=calls, mark=mark)
        result = run_python(program, timeout_s=TIMEOUT_S)
        if result.ended != "exit":
            return fail(result.ended)
        outcomes = [line[len(mark) :] for line in result.stdout.split("\n") if line.startswith(mark)]
        if outcomes == ["missing"]:
            return fail(f"no function named {facts['function']}")
        if len(outcomes) != len(facts["calls"]):
            return fail(_last_error(result.stderr) or f"stopped early with exit status {result.returncode}")
        for arguments, expected, outcome in zip(facts["calls"], facts["expected"], outcomes, strict=True):
            if outcome != f"value {expected}":
                call = facts["function"] + (arguments.replace(",)", ")"))
                return fail(f"{call} gave {outcome.removeprefix('value ')}, not {expected}")
        return OK

    def _draft(self, seed: int) -> Draft:
        rng = Random(seed)
        make = rng.choices([shape for shape, _ in SHAPES], weights=[share for _, share in SHAPES])[0]
        made = make(rng, self.difficulty)
        tests = {
            "function": made.name,
            "calls": tuple(repr(call) for call in made.calls),
            "expected": tuple(repr(made.reference(*call)) for call in made.calls),
        }
        return Draft(prompt=made.prompt, response=made.gold, metadata=tests)


def _last_error(stderr: str) -> str:
    """Find the exception name of a traceback."""
    found = re.findall(r"^(\w+(?:Error|Exception|Interrupt|Exit))\b", stderr, flags=re.MULTILINE)
    return f"error: {found[-1]}" if found else ""
