"""Sums over the GPUs of one request through torch's symmetric memory; the kernels are in `dlmrt.cuda.kernels.comm`.

One process per GPU, all within reach of each other's memory (NVLink or PCIe peers). Terms that do not fit the buffers,
those of long prefills, go another way: there, bandwidth counts and not latency.

Not yet run on several GPUs; see docs/gpu.md.

Source: ours, on torch.distributed._symmetric_memory (torch 2.11 and later).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dlmrt.cuda.kernels import comm
from dlmrt.cuda.tiles import power_of_two

BUFFER_BYTES = 4 << 20  # of one rank's terms; two of these take turns
POLLS_A_SECOND = 1_000_000  # of a place in one's own memory, roughly: about 1 us each


class SymmetricSum:
    """Callable: the sum of every rank's tensor in their order, in float32, rounded once.

    Args:
        device: this rank's GPU.
        larger: what sums tensors that do not fit.
        timeout_s: how long a kernel waits for another rank, roughly.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory, or torch lacks the support.
    """

    def __init__(self, device: torch.device, larger: Callable[[Tensor], Tensor], *, timeout_s: float) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._larger, self._rank, self._size = larger, dist.get_rank(), dist.get_world_size()
        self._limit = round(timeout_s * POLLS_A_SECOND)
        self._buffer = symmetric.empty(2 * BUFFER_BYTES, dtype=torch.uint8, device=device)
        group = dist.group.WORLD
        assert group is not None, "the ranks have joined"
        handle = symmetric.rendezvous(self._buffer, group)
        self._handle = handle  # keeps the others' memory mapped
        self._buffers = [
            torch.tensor([start + turn * BUFFER_BYTES for start in handle.buffer_ptrs], device=device)
            for turn in range(2)
        ]
        self._pads = torch.tensor(list(handle.signal_pad_ptrs), device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._number = 0

    def __call__(self, x: Tensor) -> Tensor:
        """The sum, enqueued on the current stream; `check` tells whether the others came."""
        if x.numel() * x.element_size() > BUFFER_BYTES or not x.numel():
            return self._larger(x)
        self._number += 1
        turn, width = self._number % 2, x.shape[-1]
        own = self._buffer[turn * BUFFER_BYTES :][: x.numel() * x.element_size()].view(x.dtype)
        own.copy_(x.reshape(-1))
        comm.meet[(self._size,)](
            self._pads, self._status, self._number, self._rank, self._limit, IS_DEVICE=True, num_warps=1
        )
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        comm.sum_terms[(x.numel() // width,)](
            self._buffers[turn], total, total, total, total, self._status, 0.0, D=width, DP=power_of_two(width),
            P=self._size, HAS_X=False, HAS_NORM=False,
        )  # fmt: skip
        return total

    def check(self) -> None:
        """Wait for what is enqueued.

        Raises:
            RuntimeError: a rank did not come in time; no sum since the last check can be used.
        """
        late = int(self._status.item())
        if late:
            raise RuntimeError(f"rank {late - 1} did not send its terms in time")
