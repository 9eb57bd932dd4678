"""What ranks tell each other: sums and gathers inside a forward, commands of rank 0 between forwards.

Sums are made in the order of the ranks from all ranks' terms (one-shot), so every rank has the same bits and a run
repeats itself. gloo carries everything on CPUs; on GPUs tensors go through symmetric memory where it can be had
(`dlmrt.cuda.comm`), else through nccl, and commands still through gloo.

A collective that does not end within the time-out, or whose partner is gone, raises an error that names the rank.

Source: ours, on torch.distributed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dlmrt.errors import DeviceError, OutOfMemoryError
from dlmrt.parallel.pulse import Pulse
from dlmrt.parallel.ranks import Ranks

if TYPE_CHECKING:
    from dlmrt.cuda.comm import Peers, SymmetricSum

logger = logging.getLogger(__name__)

JOIN_S = 120.0  # that processes have to start, torch's import included
_POLL_S = 1e-4  # between two looks at whether all have come
_IDLE = timedelta(days=300)  # followers wait for the next command; whether the leader lives, the pulse tells


class Group:
    """The ranks that run one model.

    Args:
        ranks: place of this process.
        timeout_s: for one collective.
        on_loss: called from a thread with the report when a rank is lost; None: the next collective raises.

    Raises:
        DeviceError: the others did not come, or this rank has no GPU of its own.
    """

    def __init__(
        self, ranks: Ranks, *, timeout_s: float, on_loss: Callable[[str], None] | None = None
    ) -> None:  # fmt: skip
        self.rank, self.size = ranks.rank, ranks.size
        self.device = _device(ranks)
        self._number = self._num_collectives = 0  # of commands, and of collectives in this one
        self._doing = "starting"
        self.loss: str | None = None  # report of a rank that is gone
        self._on_loss = on_loss
        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_S))))
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"rank {self.rank} of {self.size} could not join the others within {JOIN_S:.0f} s "
                f"({_first_line(error)}); start them with torchrun"
            ) from error
        words = store.clone()  # the thread must not wait for what another one asks
        words.set_timeout(timedelta(seconds=timeout_s))  # whoever keeps the store may hang, too
        self.pulse = Pulse(PrefixStore("dlmrt", words), self.rank, self.size, limit_s=timeout_s, on_loss=self._lose)
        self._store = PrefixStore("torch", store)
        self._timeout = timedelta(seconds=timeout_s)
        self._commands: Any = None
        self._num_agreements = 0
        self.peers: Peers | None = None  # on GPUs that read each other's memory
        self._symmetric: SymmetricSum | None = None  # sums through it

    def connect(self) -> None:
        """Open the connections that tensors and commands go through."""
        with self.guarded("connecting"):
            backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )
            self._commands = dist.new_group(backend="gloo", timeout=_IDLE)
            if self.device.type == "cuda":
                self._connect_memory()

    def do(self, what: str, *, number: int = 0) -> None:
        """Say what this rank does now, for reports: command `number`, or what comes before all commands."""
        self._doing, self._number, self._num_collectives = what, number, 0
        self.pulse.doing, self.pulse.place = what, (number, 0)

    def gather(self, x: Tensor) -> Tensor:
        """`x` of every rank [P, ...] in their order; shapes are equal."""
        with self.guarded("gather"):
            if self.peers is not None:
                self.peers.check()  # what is gathered was made of sums
            return self._gathered(x)

    def sum(self, x: Tensor) -> Tensor:
        """Sum of every rank's `x` in their order, in fp32, rounded once; the same bits on every rank."""
        with self.guarded("sum"):
            return self._gathered_sum(x) if self._symmetric is None else self._symmetric(x)

    def command(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others wait for them as long as rank 0 lives."""
        with self.guarded("command"):
            sent = bytearray(payload or b"")
            length = torch.tensor([len(sent)])
            dist.broadcast(length, src=0, group=self._commands)
            body = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.empty(0, dtype=torch.uint8)
            body = body if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(body, src=0, group=self._commands)
            return body.numpy().tobytes()

    def assemble(self) -> None:
        """Wait until all ranks have come here, however long one takes that lives, to compile kernels for example."""
        with self.guarded("assembly"):
            work = dist.barrier(group=self._commands, async_op=True)
            while not work.is_completed():
                if self.loss is not None:
                    raise DeviceError(self.loss)
                time.sleep(_POLL_S)
            work.wait()

    def agree(self, reason: str) -> str:
        """The first reason that a rank has for not going on, empty if none has; waits for all ranks that live."""
        with self.guarded("agreement"):
            self._num_agreements += 1
            return next(filter(None, self.pulse.meet(f"agreement {self._num_agreements}", reason, JOIN_S)), "")

    def fail(self, error: Exception) -> None:
        """This rank cannot go on; the others are told why."""
        self.loss = self.loss or f"rank {self.rank} of {self.size} has failed: {error}"
        self.pulse.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave in good order."""
        self.pulse.close()
        if self._commands is not None:
            dist.destroy_process_group()
            self._commands = None

    def _lose(self, report: str) -> None:
        self.loss = report
        if self._on_loss is None:
            logger.error("%s", report)
        else:
            self._on_loss(report)

    @contextmanager
    def guarded(self, kind: str) -> Iterator[None]:
        """What ranks do together; errors of torch and of meetings of GPUs as ours, with the rank that is to blame."""
        if self.loss is not None:
            raise DeviceError(self.loss)
        self._num_collectives += 1
        self.pulse.doing = f"{self._doing}, {kind} {self._num_collectives}"
        self.pulse.place = (self._number, self._num_collectives)
        try:
            yield
        except DeviceError:
            raise
        except RuntimeError as error:
            self.loss = self.loss or f"{self.pulse.report()} [rank {self.rank}, {kind}: {_first_line(error)}]"
            raise DeviceError(self.loss) from error

    def _gathered_sum(self, x: Tensor) -> Tensor:
        first, *others = self._gathered(x).float()
        total: Tensor = first
        for term in others:
            total = total + term
        return total.to(x.dtype)

    def _gathered(self, x: Tensor) -> Tensor:
        found = x.new_empty(self.size, x.numel())
        if x.numel():
            dist.all_gather(list(found), x.reshape(-1))
        return found.reshape(self.size, *x.shape)

    def _connect_memory(self) -> None:
        """One-shot sums through symmetric memory on all ranks; or, with a logged reason, on none.

        Ranks that sum in different ways would wait for each other for ever. They agree before each step that all must
        take together, and once more behind the last one.
        """
        for what, attempt in (("import", self._import_memory), ("map", self._map_memory)):
            reason = ""
            try:
                attempt()
            except OutOfMemoryError as error:
                reason = str(error)
            except (ImportError, AttributeError, RuntimeError) as error:
                reason = f"rank {self.rank}: {_first_line(error)}"
            if reason := self.agree(reason):
                logger.warning("no symmetric memory (cannot %s it; %s): sums go through nccl", what, reason)
                self.peers = self._symmetric = None
                return

    @staticmethod
    def _import_memory() -> None:
        import dlmrt.cuda.comm  # noqa: F401  needs Triton, and a private module of torch

    def _map_memory(self) -> None:
        from dlmrt.cuda.comm import SymmetricSum, symmetric_peers

        self.peers = symmetric_peers(self.device, self.agree, timeout_s=self._timeout.total_seconds())
        self._symmetric = SymmetricSum(self.peers, self._gathered_sum)


def _device(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"rank {ranks.rank} has no GPU of its own: this machine has {torch.cuda.device_count()}; start fewer "
            "processes, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def _first_line(error: Exception) -> str:
    """The first sentence of a message of torch, without the place in its sources."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", line).partition(". ")[0][:200] or type(error).__name__
