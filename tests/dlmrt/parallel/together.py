"""``python together.py SIZE FUNCTION [ARGUMENT ...]``: run a function of `cases` in SIZE processes, which are forks.

The imports are paid for once. Each process is told its place as torchrun tells it; rank 0's output is the program's.
Exit status: 0 when every process ended with 0.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cpu")]

import cases  # noqa: E402  behind the path


def main() -> int:
    size, name, *arguments = int(sys.argv[1]), *sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            status = 1
            try:
                getattr(cases, name)(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main())
