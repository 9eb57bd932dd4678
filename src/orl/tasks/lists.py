"""List tasks over small integers: sorting and filtering.

Filtering works with one comparison a line, sorting answers directly. The sorting prompt keeps only the first line of
reasoning-gym's, whose format instructions are three times as long as the problem, and drops the ".0" of its numbers.

**Source:** items from reasoning-gym `number_sorting`, `number_filtering`; workings ours.
"""

from dataclasses import dataclass

from orl.tasks.gym import Entry, GymTask, Written


@dataclass(frozen=True, kw_only=True)
class NumberSortingDifficulty:
    """Size of a list to sort."""

    min_numbers: int = 3  # shortest list
    max_numbers: int = 4  # longest list
    min_decimals: int = 0  # decimal places
    max_decimals: int = 0  # decimal places
    min_value: float = 0.0  # smallest number
    max_value: float = 99.0  # largest number


def write_number_sorting(entry: Entry, difficulty: NumberSortingDifficulty) -> Written:
    """Answer with the sorted list."""
    facts = entry["metadata"]
    numbers = ", ".join(_whole(text) for text in facts["original_numbers"])
    prompt = f"Sort these numbers in {facts['direction']} order, as a list of strings: {numbers}"
    return Written(prompt=prompt, response=str([_whole(text) for text in facts["sorted_numbers"]]))


def _whole(text: str) -> str:
    return str(int(float(text)))


@dataclass(frozen=True, kw_only=True)
class NumberFilteringDifficulty:
    """Size of a list to filter."""

    min_numbers: int = 3  # shortest list
    max_numbers: int = 4  # longest list
    min_decimals: int = 0  # decimal places
    max_decimals: int = 0  # decimal places
    min_value: float = 0.0  # smallest number
    max_value: float = 99.0  # largest number


def write_number_filtering(entry: Entry, difficulty: NumberFilteringDifficulty) -> Written:
    """Say what is kept, compare each number with the limit, then give the list.

    Without the first line each label would be the parity of three facts (verb, side, comparison), which a small model
    guesses at for a long time; the line makes it two steps of two facts each.
    """
    facts = entry["metadata"]
    action, _, side = facts["operation"].partition("_")
    limit = int(facts["filter_value"])
    kept = {"keep_larger": ">", "remove_smaller": ">=", "keep_smaller": "<", "remove_larger": "<="}[facts["operation"]]
    lines = [f"keep {kept} {limit}"]
    for text in facts["original_numbers"]:
        number = int(text)
        sign = "<" if number < limit else ">" if number > limit else "="
        is_matched = sign == ("<" if side == "smaller" else ">")
        lines.append(f"{text} {sign} {limit}: {'keep' if is_matched == (action == 'keep') else 'remove'}")
    return Written(prompt=entry["question"], response="\n".join([*lines, f"#### {entry['answer']}"]))


NUMBER_SORTING = GymTask(
    name="number_sorting",
    description="Sort a few small integers in ascending or descending order.",
    dataset="number_sorting",
    difficulty=NumberSortingDifficulty(),
    write=write_number_sorting,
)
NUMBER_FILTERING = GymTask(
    name="number_filtering",
    description="Keep or remove the numbers of a list on one side of a limit.",
    dataset="number_filtering",
    difficulty=NumberFilteringDifficulty(),
    write=write_number_filtering,
)
