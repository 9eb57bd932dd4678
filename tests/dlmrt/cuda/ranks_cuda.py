"""Several ranks in one process: threads whose launches take turns, plain tensors in place of symmetric memory.

The interpreter runs one launch at a time, so a kernel cannot wait for another rank inside its launch: the two halves of
a meeting are two launches, and between them the others come. Whoever has come goes on as far as it can, up to the first
half of the next meeting, while the others still read what belongs to this one.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import contextmanager
from typing import Any

import torch

from dlmrt.cuda.comm import Mapped, Peers
from dlmrt.cuda.launches import Launch
from dlmrt.errors import DeviceError
from dlmrt.parallel.device import DeviceDenoiser
from dlmrt.parallel.layout import Layout
from dlmrt.parallel.lead import LeadingLoop, obey
from dlmrt.program.forwards import Formats

LAUNCH = Launch.run
POLLS = 3  # of a wait that is in vain
PATIENCE_S = 600.0


class Stopped(RuntimeError):
    """A rank that was told to stop."""


class Machine:
    """GPUs that read each other's memory.

    Args:
        stops: rank and number of the meeting to which it does not come.
    """

    def __init__(self, size: int, *, stops: tuple[int, int] | None = None) -> None:
        self.size, self.stops = size, stops
        self.num_meetings, self._num_told = [0] * size, [0] * size
        self._turn = threading.Lock()
        self._come = threading.Condition()
        self._gone: set[int] = set()
        self._barrier = threading.Barrier(size)
        self._shown: list[Any] = [None] * size
        self.limits: dict[int, int] = {}  # bytes of a part that a rank has room for
        self._commands = [queue.SimpleQueue() for _ in range(size)]

    def run(self, launch: Launch, handle: int | None = None) -> None:
        """Stands for `Launch.run`."""
        if launch.op != "meet":
            with self._turn:
                LAUNCH(launch, handle)
            return
        name = threading.current_thread().name
        rank = int(name) if name.isdigit() else 0  # the leader and its thread for the loop have other names
        self.num_meetings[rank] = meeting = self.num_meetings[rank] + 1
        if self.stops == (rank, meeting):
            raise Stopped
        self._half(launch, WAITS=False)
        with self._come:  # for one that is gone the kernel waits in vain
            self._num_told[rank] = meeting
            self._come.notify_all()
            self._come.wait_for(lambda: all(self._num_told[q] >= meeting for q in self._present()), PATIENCE_S)
        self._half(launch, TELLS=False)

    def _present(self) -> set[int]:
        return set(range(self.size)) - self._gone

    def _half(self, launch: Launch, **half: bool) -> None:
        with self._turn:
            launch.kernel[launch.grid](**launch.arguments, **half)

    def exchange(self, rank: int, value):
        """The values of all ranks."""
        self._shown[rank] = value
        self._barrier.wait(PATIENCE_S)
        found = list(self._shown)
        self._barrier.wait(PATIENCE_S)
        return found

    def leave(self, rank: int) -> None:
        """A rank is gone."""
        with self._come:
            self._gone.add(rank)
            self._come.notify_all()
        self._barrier.abort()

    def commands(self, rank: int) -> queue.SimpleQueue:
        """Those that `rank` has yet to read."""
        return self._commands[rank]


class Memory:
    """Memory of all ranks as `rank` sees it; see `dlmrt.cuda.comm.Memory`."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine, self._rank = machine, rank

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """This rank's part."""
        if num_bytes > self._machine.limits.get(self._rank, num_bytes):
            raise RuntimeError("CUDA out of memory. Tried to allocate too much")
        return torch.zeros(16 * self._machine.size + num_bytes, dtype=torch.uint8)

    def agree(self, reason: str) -> str:
        """The first reason."""
        return next(filter(None, self._machine.exchange(self._rank, reason)), "")

    def map(self, own: torch.Tensor) -> Mapped:
        """The parts of all."""
        places = self._machine.exchange(self._rank, own.data_ptr())
        return Mapped(buffers=[place + 16 * self._machine.size for place in places], pads=places, owner=own)


class Group:
    """`dlmrt.parallel.group.Group` as far as parts of programs use it."""

    device = torch.device("cpu")

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.size, self.loss = machine, rank, machine.size, None
        self.num_commands = 0  # that were sent; of a follower also the one that it waits for

    def do(self, what: str, *, number: int = 0) -> None:
        """Nobody asks."""

    def command(self, payload: bytes | None) -> bytes:
        """Rank 0's words."""
        if self.loss is not None:
            raise DeviceError(self.loss)
        self.num_commands += 1
        if self.rank:
            return self.machine.commands(self.rank).get(timeout=PATIENCE_S)
        for other in range(1, self.size):
            self.machine.commands(other).put(payload)
        return payload

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group.gather`."""
        return torch.stack(self.machine.exchange(self.rank, x))

    def assemble(self) -> None:
        """See `Group.assemble`."""
        self.machine.exchange(self.rank, None)

    @contextmanager
    def guarded(self, kind: str):
        """See `Group.guarded`, without a pulse."""
        try:
            yield
        except Stopped:
            raise
        except RuntimeError as error:
            self.loss = str(error)
            raise DeviceError(self.loss) from error

    def fail(self, error: Exception) -> None:
        """See `Group.fail`."""
        self.loss = self.loss or str(error)


def make_part(config, params, group: Group) -> DeviceDenoiser:
    """The rank's part of `params`."""
    layout = Layout(config, group.rank, group.size)
    cuts = layout.cuts()
    parts = {
        name: torch.from_numpy(cuts[name].take(values.numpy())) if name in cuts else values
        for name, values in params.items()
    }
    memory = Memory(group.machine, group.rank)
    peers = Peers(group.rank, group.size, group.device, memory=memory, limit=POLLS)
    return DeviceDenoiser(
        parts, layout, layout.shard(terms="float32"), group, peers, formats=Formats(), dtype="float32", mode="loop"
    )  # fmt: skip


class Ranks:
    """Ranks that run one model until the end of the context, which gives rank 0's denoiser; `parts` are all ranks'."""

    def __init__(self, config, params, machine: Machine) -> None:
        self.parts: list[DeviceDenoiser | None] = [None] * machine.size
        self.errors: list[BaseException | None] = [None] * machine.size
        self._machine, self._config, self._params = machine, config, params
        self._groups = [Group(machine, rank) for rank in range(machine.size)]
        self._threads = [
            threading.Thread(target=self._follow, args=(rank,), name=str(rank), daemon=True)
            for rank in range(1, machine.size)
        ]

    def __enter__(self) -> LeadingLoop:
        for thread in self._threads:
            thread.start()
        self.parts[0] = make_part(self._config, self._params, self._groups[0])
        return LeadingLoop(self.parts[0], self._groups[0])

    def __exit__(self, *error) -> None:
        if error[0] is not None:
            self._machine.leave(0)
        for rank in range(1, self._machine.size):
            self._machine.commands(rank).put(b"")
        for thread in self._threads:
            thread.join()

    def settle(self) -> None:
        """Wait until all have done what rank 0 has told them to do."""
        first, *others = self._groups
        until = time.monotonic() + PATIENCE_S
        while any(other.num_commands <= first.num_commands for other in others):
            assert time.monotonic() < until and not any(self.errors), "a rank hangs or has failed"
            time.sleep(0.01)

    def _follow(self, rank: int) -> None:
        try:
            self.parts[rank] = make_part(self._config, self._params, self._groups[rank])
            obey(self.parts[rank], self._groups[rank])
        except BaseException as error:
            self.errors[rank] = error
            self._machine.leave(rank)
