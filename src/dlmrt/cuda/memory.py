"""Where a program's buffers lie on the device: scalars in one block, scratch in one arena, states on their own.

Scalars have slots of 16 bytes in one tensor with a mirror in pinned host memory, so a request's parameters are one
copy and every address has the same alignment. The cancel flag alone lies in mapped host memory: kernels read it
while the host may write it. The ring of records is mapped host memory too.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlmrt.cuda.kernels.ring import HEADER
from dlmrt.program.nodes import Buffer, maximum

SLOT = 16  # bytes of a scalar

# Types without arithmetic in torch are kept as their bits.
STORAGE = {
    "float64": torch.float64, "int64": torch.int64, "uint64": torch.int64, "float32": torch.float32,
    "int32": torch.int32, "uint32": torch.int32, "bfloat16": torch.bfloat16, "bool": torch.uint8,
    "uint8": torch.uint8,
}  # fmt: skip


def available_bytes(device: torch.device) -> int | None:
    """Memory that tensors on `device` may still take, None without a device."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def pinned(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed host bytes that `device` can read and write."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def view_of(buffer: Buffer, memory: Tensor) -> Tensor:
    """The leading bytes of `memory` as `buffer`, row-major at its largest size."""
    shape = tuple(maximum(dim) for dim in buffer.shape) or (1,)
    return memory[: buffer.num_bytes].view(STORAGE[buffer.dtype]).view(shape)


class Scalars:
    """The scalars of one program.

    Args:
        on_host: name of the scalar that the host may write while a program runs, if there is one.
    """

    def __init__(self, buffers: Iterable[Buffer], device: torch.device, *, on_host: str) -> None:
        ordered = list(buffers)
        self._host = pinned(SLOT * max(len(ordered), 1), device)
        self._device = self._host.to(device, copy=True)
        shared = pinned(SLOT, device)
        self.tensors: dict[str, Tensor] = {}
        self._mirrors: dict[str, npt.NDArray[np.generic]] = {}
        for at, buffer in enumerate(ordered):
            is_shared = buffer.name == on_host
            host = shared if is_shared else self._host[SLOT * at : SLOT * (at + 1)]
            self.tensors[buffer.name] = view_of(buffer, host if is_shared else self._device[SLOT * at :])
            self._mirrors[buffer.name] = host.numpy().view(np.dtype(buffer.dtype))[:1]

    def __contains__(self, name: str) -> bool:
        return name in self._mirrors

    def set(self, **values: int | float) -> None:
        """Write numbers into the mirror; `upload` brings them to the device."""
        for name, value in values.items():
            self._mirrors[name][0] = value

    def upload(self) -> None:
        """Bring all scalars to the device, those that kernels wrote included."""
        self._device.copy_(self._host)

    def read(self, name: str) -> int:
        """The present value on the device; waits for it."""
        return int(self.tensors[name])


class Ring:
    """The host's side of `dlmrt.cuda.kernels.ring`."""

    def __init__(self, device: torch.device) -> None:
        self.control = torch.zeros(4, dtype=torch.int64, device=device)
        self._bytes = pinned(0, device)
        self._device, self.num_slots, self._slot_bytes, self.num_read = device, 0, 0, 0

    def reset(self, num_slots: int, record_bytes: int) -> None:
        """Forget all records; make room for `num_slots` of `record_bytes`."""
        slot_bytes = -(-(HEADER + record_bytes) // 16) * 16
        if num_slots * slot_bytes > len(self._bytes):
            self._bytes = pinned(num_slots * slot_bytes, self._device)
        self._bytes.zero_()
        self.num_slots, self._slot_bytes, self.num_read = num_slots, slot_bytes, 0
        address = self._bytes.data_ptr()  # pinned memory has one address for both sides
        self.control.copy_(torch.tensor([address, num_slots, slot_bytes, 0]))

    def take(self) -> bytes | None:
        """The next record, None if it is not there yet."""
        begin = self.num_read % self.num_slots * self._slot_bytes
        slot = self._bytes.numpy()[begin : begin + self._slot_bytes]
        if int(slot[:4].view(np.int32)[0]) != self.num_read + 1:
            return None
        self.num_read += 1
        return slot[HEADER:].tobytes()
