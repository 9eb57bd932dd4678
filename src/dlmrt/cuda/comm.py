"""What the kernels of one rank know of the other ranks' GPUs; the kernels are in `dlmrt.cuda.kernels.comm`.

`Peers` is the control block that kernels read: addresses of the ranks' memory, the count of meetings, the rank that did
not come. Kernels find the addresses there when they run, so memory may grow under programs that are captured already.
`SymmetricSum` is the same protocol for one tensor at a time, for forwards that run in torch.

One process per GPU, all within reach of each other's memory (NVLink or PCIe peers).

Not yet run on several GPUs; see docs/gpu.md.

Source: ours, on torch.distributed._symmetric_memory (torch 2.11 and later).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton.language as tl
from torch import Tensor

from dlmrt.cuda.kernels import comm
from dlmrt.cuda.tiles import power_of_two
from dlmrt.errors import OutOfMemoryError

SUM_BYTES = 4 << 20  # of one rank's terms in a sum of tensors of torch; larger ones go another way
GRAIN = 1 << 20  # bytes by which buffers grow
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """Memory of all ranks as this one sees it."""

    buffers: Sequence[int]  # address of each rank's memory
    pads: Sequence[int]  # of each rank's words, zeroed: 2 of int64 for each rank
    owner: Any  # keeps it mapped


class Memory(Protocol):
    """Memory that ranks read of each other. All but `allocate` is called by all ranks together."""

    def allocate(self, num_bytes: int) -> Any:
        """This rank's part. Raises RuntimeError if there is none."""

    def agree(self, reason: str) -> str:
        """Wait until nobody uses any memory: the reason of the first rank that has one, empty if none has."""

    def map(self, own: Any) -> Mapped:
        """The parts of all ranks, which have allocated theirs."""


class Peers:
    """One rank's place among the GPUs of one model.

    Args:
        limit: how long a kernel waits for another rank, in nanoseconds; without a device in polls.
    """

    def __init__(self, rank: int, size: int, device: torch.device, *, memory: Memory, limit: int) -> None:
        self.rank, self.size = rank, size
        self.num_bytes = 0  # of one rank's part
        self.control = torch.zeros(comm.PADS + 3 * size, dtype=torch.int64, device=device)
        self.control[comm.LIMIT], self.control[comm.RANK] = limit, rank
        self._memory, self._mapped = memory, Mapped(buffers=(), pads=(), owner=None)

    def agree(self, reason: str) -> str:
        """See `Memory.agree`."""
        return self._memory.agree(reason)

    def reserve(self, num_bytes: int) -> None:
        """Make room for parts of `num_bytes`; all ranks ask for the same, and nothing is running.

        Mapping is done together, so whether all can take part is known before.

        Raises:
            OutOfMemoryError: on all ranks, if one has no room; all stays as it was.
        """
        if num_bytes <= self.num_bytes:
            return
        num_bytes, own, reason = -(-num_bytes // GRAIN) * GRAIN, None, ""
        try:
            own = self._memory.allocate(2 * num_bytes)
        except (AttributeError, RuntimeError) as error:  # of another torch, or no memory
            cause = str(error).partition(". ")[0]
            reason = f"rank {self.rank} has no {2 * num_bytes:,} bytes for what ranks tell each other ({cause})"
        if reason := self.agree(reason):
            raise OutOfMemoryError(reason)
        self._mapped, self.num_bytes = self._memory.map(own), num_bytes
        turns = [address + turn * num_bytes for turn in range(2) for address in self._mapped.buffers]
        self.control[comm.PADS :] = torch.tensor([*self._mapped.pads, *turns], device=self.control.device)

    def check(self) -> None:
        """Wait for what is enqueued.

        Raises:
            RuntimeError: a rank did not come in time; nothing computed since the last check can be used.
        """
        late = int(self.control[comm.STATUS])
        if late:
            raise RuntimeError(f"rank {late - 1} of {self.size} did not come to a meeting of the GPUs in time")


class SymmetricMemory:
    """Implements `Memory` for the processes of torch's default group.

    Args:
        agree: the first reason that a rank has, waiting for all without a limit: one that compiles kernels is not late.
    """

    def __init__(self, device: torch.device, agree: Callable[[str], str]) -> None:
        self._device, self._agree = device, agree

    def allocate(self, num_bytes: int) -> Tensor:
        """See `Memory`."""
        return symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def agree(self, reason: str) -> str:
        """See `Memory`."""
        torch.cuda.synchronize(self._device)
        return self._agree(reason)

    def map(self, own: Tensor) -> Mapped:
        """See `Memory`."""
        group = dist.group.WORLD
        assert group is not None, "the ranks have joined"
        handle = symmetric.rendezvous(own, group)
        return Mapped(buffers=list(handle.buffer_ptrs), pads=list(handle.signal_pad_ptrs), owner=(own, handle))


def symmetric_peers(device: torch.device, agree: Callable[[str], str], *, timeout_s: float) -> Peers:
    """The peers of this process, all of whose group are there.

    Args:
        agree: as in `SymmetricMemory`.
        timeout_s: how long a kernel waits for another rank.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory, or torch lacks the support.
    """
    memory = SymmetricMemory(device, agree)
    peers = Peers(dist.get_rank(), dist.get_world_size(), device, memory=memory, limit=round(timeout_s * 1e9))
    peers.reserve(SUM_BYTES)
    return peers


class SymmetricSum:
    """Callable: the sum of every rank's tensor in their order, in float32, rounded once.

    Args:
        larger: what sums tensors that do not fit, those of long prefills: there bandwidth counts and not latency.
    """

    def __init__(self, peers: Peers, larger: Callable[[Tensor], Tensor]) -> None:
        self._peers, self._larger = peers, larger
        self._rows: dict[int, Tensor] = {}  # numbers of rows on the device

    def __call__(self, x: Tensor) -> Tensor:
        """The sum, enqueued on the current stream; `Peers.check` tells whether the others came."""
        if x.numel() * x.element_size() > SUM_BYTES or not x.numel():
            return self._larger(x)
        x, ranks, width = x.contiguous(), self._peers.control, x.shape[-1]
        count, block = x.numel() // width, min(1024, power_of_two(width))
        if count not in self._rows:
            self._rows[count] = torch.tensor([count], dtype=torch.int32, device=x.device)
        rows, is_device = self._rows[count], x.device.type == "cuda"
        sizes: dict[str, Any] = {"M": count, "D": width, "P": self._peers.size, "TDT": DTYPES[x.dtype]}
        comm.put_terms[(count, -(-width // block))](ranks, x, x, rows, BD=block, S=0, HAS_X=True, **sizes)
        comm.meet[(1,)](ranks, ranks, ranks, P=self._peers.size, HAS_FLAG=False, IS_DEVICE=is_device, num_warps=1)
        total = torch.empty_like(x)
        comm.sum_terms[(count,)](
            ranks, x, x, total, total, total, rows, eps=0.0, DP=power_of_two(width), HAS_X=False, HAS_WEIGHT=False,
            HAS_TOTAL=True, HAS_Y=False, HAS_OPERAND=False, NVFP4=False, **sizes,
        )  # fmt: skip
        return total
