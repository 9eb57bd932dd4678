"""``python together.py JOB ...``: functions of `cases` in several processes each, which are forks.

A job is SIZE:FUNCTION[:ARGUMENT...]. The imports are paid for once; jobs run side by side. Each process is told its
place as torchrun tells it. Lines of output begin with job and rank; the last line of a process is its exit status.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cpu")]

import cases  # noqa: E402  behind the path

from dlmrt.testing import free_port  # noqa: E402


def main() -> None:
    children = {}
    for job in sys.argv[1:]:
        size, name, *arguments = job.split(":")
        os.environ |= {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(int(size)):
            label = f"{name} {' '.join(arguments)}"[:20].strip() + f" {rank} of {size}: "
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                run(writer, getattr(cases, name), arguments)
            os.close(writer)
            children[child] = label, reader
    for child, (label, reader) in children.items():
        status = end_of(child)
        with os.fdopen(reader, errors="replace") as output:
            for line in output:
                print(label + line, end="")
        print(f"{label}status {status}", flush=True)


def run(writer: int, function, arguments: list[str]) -> None:
    """Run `function` in this process, its output going to `writer`, and end."""
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    status = 1
    try:
        function(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_of(child: int) -> int:
    """Exit status of a child; one that has been stopped is waited for no longer."""
    status = os.waitpid(child, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
