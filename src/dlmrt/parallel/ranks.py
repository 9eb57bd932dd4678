"""Which of several processes this one is, as torchrun says in the environment.

Rank 0 leads: it alone has a prompt, an engine and an output. The others follow it (`dlmrt.parallel.lead`).

Source: ours; variables of torch.distributed.run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dlmrt.errors import UsageError

EXECUTOR = "parallel"  # name of the executor whose forwards run on all ranks


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Place of this process among those that run one model. Example: ``Ranks(rank=1, size=4, local_rank=1)``."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of this machine: the number of its GPU

    @property
    def is_follower(self) -> bool:
        """Whether another process leads this one."""
        return self.rank > 0

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Ranks:
        """What torchrun says in `variables`, by default those of the process; without it one process.

        Raises:
            UsageError: the variables contradict each other.
        """
        source = os.environ if variables is None else variables
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = {name: source[name] for name in names if name in source}
        if "WORLD_SIZE" not in given:
            return cls()
        if not all(value.isascii() and value.isdigit() for value in given.values()) or "RANK" not in given:
            raise UsageError(f"{given} do not name a process; start it with torchrun, or unset WORLD_SIZE")
        rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
        if rank >= size:
            raise UsageError(f"RANK={rank} is not one of {size} processes; start them with torchrun")
        return cls(rank=rank, size=size, local_rank=int(given.get("LOCAL_RANK", rank)))


def chosen_executor(name: str, ranks: Ranks) -> str:
    """The executor that `name` means for `ranks`: "auto" is `EXECUTOR` where there are several.

    Raises:
        UsageError: the executor runs in one process, and there are several, or the reverse.
    """
    if ranks.size == 1:
        if name == EXECUTOR:
            raise UsageError(
                f"executor {EXECUTOR!r} runs in several processes; start them, e.g. "
                "torchrun --nproc-per-node 2 -m dlmrt generate ..."
            )
        return name
    if name not in ("auto", EXECUTOR):
        raise UsageError(
            f"executor {name!r} runs in one process and there are {ranks.size}; leave it out, or start without torchrun"
        )
    return EXECUTOR
