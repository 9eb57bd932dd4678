"""Grade-school word problems with worked answers, from a chosen few of the GSM-Symbolic templates.

The templates were picked by measurement (300 samples each): at most about 50 words of prompt and of working, whole
numbers, no percentages or fractions, products with one small factor. Samples with a number above `our_max_number`
anywhere in the working are skipped, which keeps the arithmetic of the chosen templates in one range.

**Source:** reasoning-gym 0.1.25 `arithmetic/gsm_symbolic` (templates after Mirzadeh et al., arXiv 2410.05229);
choice of templates ours.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from orl.tasks.gym import Entry, GymTask, Written
from orl.tasks.types import ANSWER_MARK


@dataclass(frozen=True, kw_only=True)
class WordProblemsDifficulty:
    """Which templates, and how large their numbers."""

    our_templates: tuple[int, ...] = (6, 31, 39, 43, 48, 54, 57, 62, 72)  # template numbers
    our_max_number: int = 60  # largest number in prompt or working


def draw_word_problem(dataset: Any, seed: int, difficulty: WordProblemsDifficulty) -> Entry:
    """Draw a template and fill it; the dataset's own index would draw from all templates."""
    rng = Random(seed)
    template = rng.choice(difficulty.our_templates)
    entry: dict[str, Any] = dataset.generators[template](rng, 1.0)
    entry["metadata"]["template"] = template
    return entry


def write_word_problem(entry: Entry, difficulty: WordProblemsDifficulty) -> Written | None:
    """Keep the template's own working when it ends in the right answer and its numbers are small."""
    working, mark, final = entry["metadata"]["answer_cot"].rpartition(ANSWER_MARK)
    question = entry["question"].strip()
    if not mark or final.strip() != entry["answer"] or not entry["answer"].isdigit():
        return None
    numbers = re.findall(r"\d+(?:[.,]\d+)*", question + working)
    if not all(number.isdigit() and int(number) <= difficulty.our_max_number for number in numbers):
        return None
    lines = [line.strip() for line in working.splitlines() if line.strip()]
    return Written(prompt=question, response="\n".join([*lines, f"{ANSWER_MARK} {entry['answer']}"]))


WORD_PROBLEMS = GymTask(
    name="word_problems",
    description="Solve a two- to four-step word problem with small whole numbers.",
    dataset="gsm_symbolic",
    difficulty=WordProblemsDifficulty(),
    write=write_word_problem,
    draw=draw_word_problem,
)
