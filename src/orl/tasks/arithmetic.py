"""Arithmetic tasks with line-structured workings: chain sums, one-step equations, leg counting.

Every working line is local: it uses numbers of the prompt or of the line before it, so that a block of it can be
decoded in parallel once the line before stands. Left out on purpose: negative running totals.

**Source:** items from reasoning-gym `chain_sum`, `simple_equations`, `leg_counting`; workings ours.
"""

import re
from dataclasses import dataclass

from orl.tasks.gym import Entry, GymTask, Written, legs_of


@dataclass(frozen=True, kw_only=True)
class ChainSumDifficulty:
    """Size of a chain sum."""

    min_terms: int = 3  # fewest terms
    max_terms: int = 3  # most terms
    min_digits: int = 1  # fewest digits of a term
    max_digits: int = 2  # most digits of a term
    our_max_total: int = 99  # largest running total; the smallest is 0


def write_chain_sum(entry: Entry, difficulty: ChainSumDifficulty) -> Written | None:
    """Work a chain sum left to right, one running total a line."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if operator == "+" else total - int(term)
        if not 0 <= after <= difficulty.our_max_total:
            return None
        lines.append(f"{total} {operator} {term} = {after}")
        total = after
    return Written(prompt=entry["question"], response="\n".join([*lines, f"#### {total}"]))


@dataclass(frozen=True, kw_only=True)
class EquationsDifficulty:
    """Size of an equation a*x + b = c, a*x - b = c or b - a*x = c."""

    min_terms: int = 2  # terms on the left side
    max_terms: int = 2  # terms on the left side
    min_value: int = 1  # smallest constant, coefficient and solution
    max_value: int = 9  # largest constant, coefficient and solution
    operators: tuple[str, ...] = ("+", "-", "*")  # "*" only lets coefficients in; its weight as an operator is 0
    operators_weights: tuple[float, ...] = (0.5, 0.5, 0.0)  # chances of the operators between terms


_LINEAR = re.compile(r"(?:(\d+) ([-+]) )?(?:(\d+)\*)?([a-z])(?: ([-+]) (\d+))?")


def write_equation(entry: Entry, difficulty: EquationsDifficulty) -> Written | None:
    """Isolate the variable term, then divide; skip equations with a negative right side."""
    left, _, right_text = entry["metadata"]["equation"].partition(" = ")
    found = _LINEAR.fullmatch(left)
    if found is None or not right_text.isdigit():
        return None
    before, before_sign, coefficient, variable, after_sign, after = found.groups()
    if (before is None) == (after is None):
        return None
    right, factor = int(right_text), int(coefficient or 1)
    if after is not None:  # a*x + b = c or a*x - b = c
        inverse = "-" if after_sign == "+" else "+"
        moved, product = f"{right} {inverse} {after}", right - int(after_sign + after)
    elif before_sign == "-":  # b - a*x = c
        moved, product = f"{before} - {right}", int(before) - right
    else:  # b + a*x = c, which the printer normally turns round
        moved, product = f"{right} - {before}", right - int(before)
    solution = entry["answer"]
    if product != factor * int(solution):
        return None
    if factor == 1:
        lines = [f"{variable} = {moved} = {product}"]
    else:
        lines = [
            f"{factor}*{variable} = {moved} = {product}",
            f"{variable} = {product} / {factor} = {solution}",
        ]
    return Written(prompt=entry["question"], response="\n".join([*lines, f"#### {solution}"]))


@dataclass(frozen=True, kw_only=True)
class LegCountingDifficulty:
    """Size of a leg count."""

    min_animals: int = 2  # fewest kinds of animal
    max_animals: int = 3  # most kinds of animal
    min_instances: int = 1  # fewest of a kind
    max_instances: int = 4  # most of a kind
    our_max_total: int = 80  # largest sum of legs


def write_leg_counting(entry: Entry, difficulty: LegCountingDifficulty) -> Written | None:
    """Work out the legs of each kind, then add them up one by one."""
    if int(entry["answer"]) > difficulty.our_max_total:
        return None
    question = entry["question"].strip().rpartition("Now, ")[2]
    listed = question.partition("if you have ")[2].rstrip("?").split(", ")
    lines, products = [], []
    for words, (animal, count) in zip(listed, entry["metadata"]["animals"].items(), strict=True):
        legs = legs_of(animal)
        products.append(count * legs)
        lines.append(f"{words}: {count} * {legs} = {count * legs}")
    total = products[0]
    for product in products[1:]:
        lines.append(f"{total} + {product} = {total + product}")
        total += product
    if str(total) != entry["answer"]:
        return None
    prompt = question[0].upper() + question[1:]
    return Written(prompt=prompt, response="\n".join([*lines, f"#### {total}"]))


CHAIN_SUM = GymTask(
    name="chain_sum",
    description="Add and subtract small numbers left to right.",
    dataset="chain_sum",
    difficulty=ChainSumDifficulty(),
    write=write_chain_sum,
)
EQUATIONS = GymTask(
    name="equations",
    description="Solve a linear equation with small coefficients.",
    dataset="simple_equations",
    difficulty=EquationsDifficulty(),
    write=write_equation,
)
LEG_COUNTING = GymTask(
    name="leg_counting",
    description="Count the legs of a list of animals, kind by kind.",
    dataset="leg_counting",
    difficulty=LegCountingDifficulty(),
    write=write_leg_counting,
)
