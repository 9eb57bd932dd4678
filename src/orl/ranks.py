"""Processes that train one model together: who this one is, and the few things they tell each other.

Started by torchrun (``torchrun --nproc-per-node 8 -m orl pretrain recipe.toml``), which also ends all of them within
seconds when one dies and prints which one and how. Without it a run is one process, and everything here is a no-op.

Rank 0 alone reads and writes the run's folder, decides when to save or stop, and reports. gloo on CPUs, nccl on GPUs.

Left out on purpose: going on with fewer processes; the run is started again from its last state.

Source: ours, on torch.distributed; `dlmrt.parallel.ranks` says which process this is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlmrt.parallel.ranks import Ranks

T = TypeVar("T")

# Rank 0 may evaluate for a long time while the others wait in a collective; torchrun notices deaths, not this.
_PATIENCE = timedelta(hours=12)


@dataclass(frozen=True, kw_only=True)
class TrainRanks:
    """Place of this process among those of the run. Example: ``TrainRanks(rank=1, size=8, device="cuda:1")``."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process owns the run's folder and reports."""
        return self.rank == 0

    def from_main(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))  # a state is larger than what a GPU has left
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.size > 1:
            dist.barrier()

    def rounds(self, items: Sequence[T]) -> Iterator[tuple[T, bool]]:
        """This rank's items, one a round, as many for every rank: (item, whether it is its own and counts)."""
        for first in range(0, len(items), self.size):
            dealt = items[first : first + self.size]
            yield dealt[min(self.rank, len(dealt) - 1)], self.rank < len(dealt)


def is_main_process() -> bool:
    """Whether this process reports, known before it has joined the others.

    Raises:
        UsageError: what torchrun left in the environment contradicts itself.
    """
    return not Ranks.read().is_follower


@contextmanager
def joined() -> Iterator[TrainRanks]:
    """The processes that torchrun started, or this one alone.

    Raises:
        UsageError: what torchrun left in the environment contradicts itself.
    """
    place, device = Ranks.read(), "cpu"
    if place.size == 1:
        yield TrainRanks()
        return
    if torch.cuda.is_available():
        device = f"cuda:{place.local_rank}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=_PATIENCE)
    try:
        yield TrainRanks(rank=place.rank, size=place.size, device=device)
    finally:
        dist.destroy_process_group()
