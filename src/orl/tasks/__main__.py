"""Print sample problems for people to look at: `python -m orl.tasks --show 2 --task chain_sum`."""

import argparse

from orl.tasks import get_task, task_names


def main() -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(prog="python -m orl.tasks", description="Print sample problems.")
    parser.add_argument("--show", type=int, default=1, metavar="N", help="problems per task (default: %(default)s)")
    parser.add_argument("--task", choices=task_names(), help="one task only (default: all)")
    parser.add_argument("--split", choices=("train", "heldout"), default="train", help="(default: %(default)s)")
    arguments = parser.parse_args()
    for name in [arguments.task] if arguments.task else task_names():
        task = get_task(name)
        print(f"=== {name}: {task.description}")
        for index in range(arguments.show):
            problem = task.problem(index, arguments.split)
            print(f"--- {name} {arguments.split} {index}\n{problem.prompt}\n>>>\n{problem.response}")


if __name__ == "__main__":
    main()
