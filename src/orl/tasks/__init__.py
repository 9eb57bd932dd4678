"""Tasks: random-access streams of problems with exact verifiers, held-out problems kept apart by prompt text.

Importing this package is cheap: reasoning-gym is loaded when a problem is first made. Sandbox and tokenizer are
modules of their own (`orl.tasks.sandbox`, `orl.tasks.tokenizer`).

**Source:** ours, over reasoning-gym 0.1.25 where it has the task.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from dlmrt.errors import nearest
from orl.errors import UnknownTaskError
from orl.tasks.arithmetic import CHAIN_SUM, EQUATIONS, LEG_COUNTING
from orl.tasks.lists import NUMBER_FILTERING, NUMBER_SORTING
from orl.tasks.python_functions import PythonFunctionsTask
from orl.tasks.spelling import LETTER_COUNTING, SPELL_BACKWARD
from orl.tasks.types import Problem, Task, Verdict, answer_of, split_of
from orl.tasks.word_problems import WORD_PROBLEMS

__all__ = ["TASKS", "Problem", "Task", "Verdict", "answer_of", "get_task", "split_of", "task_names"]

TASKS: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {
        "word_problems": lambda: WORD_PROBLEMS,
        "chain_sum": lambda: CHAIN_SUM,
        "equations": lambda: EQUATIONS,
        "leg_counting": lambda: LEG_COUNTING,
        "number_sorting": lambda: NUMBER_SORTING,
        "number_filtering": lambda: NUMBER_FILTERING,
        "letter_counting": lambda: LETTER_COUNTING,
        "spell_backward": lambda: SPELL_BACKWARD,
        "python_functions": PythonFunctionsTask,
    }
)


def task_names() -> list[str]:
    """List the registered task names in their fixed order."""
    return list(TASKS)


def get_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        UnknownTaskError: No such task; the message names the nearest one.
    """
    if name not in TASKS:
        raise UnknownTaskError(f"unknown task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]()
