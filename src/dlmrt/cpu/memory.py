"""Memory of the cpu executor: aligned arrays by name, rotary tables, and the check that all of it fits.

Source: ours; limits of control groups from the kernel's cgroup-v2 documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlmrt.errors import OutOfMemoryError
from dlmrt.models.config import RopeConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.program.nodes import Buffer, maximum
from dlmrt.program.plan import ALIGNMENT
from dlmrt.program.store import shortage

Bytes = npt.NDArray[np.uint8]

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def aligned(num_bytes: int) -> Bytes:
    """Zeroed bytes that begin on a cache line."""
    raw = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + num_bytes]


def address(array: npt.NDArray[np.generic]) -> int:
    """Where `array` begins."""
    return int(array.ctypes.data)


def array_of(buffer: Buffer, memory: Bytes) -> npt.NDArray[np.generic]:
    """Row-major view of a state's memory at its largest size."""
    shape = tuple(maximum(dim) for dim in buffer.shape)
    return memory[: buffer.num_bytes].view(np.dtype(buffer.dtype)).reshape(shape)


def rope_tables(rope: RopeConfig, head_dim: int, capacity: int) -> tuple[Bytes, Bytes]:
    """Cosines and sines float32 [C, R / 2] as bytes, R of the head's numbers turning.

    Phases are fp32 products, as in the eager executor; their cosines are rounded once, from fp64.
    """
    inv_freq, factor = rope_inv_freq(rope, head_dim)
    phase = np.arange(capacity, dtype=np.float32)[:, None] * inv_freq
    tables = (np.cos(phase.astype(np.float64)), np.sin(phase.astype(np.float64)))
    cos, sin = (_copied(table.astype(np.float32) * np.float32(factor)) for table in tables)
    return cos, sin


def _copied(values: npt.NDArray[np.float32]) -> Bytes:
    memory = aligned(values.nbytes)
    memory[:] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return memory


def check_fits(needed_bytes: int, what: str) -> None:
    """Refuse what would not fit, before anything is allocated.

    Raises:
        OutOfMemoryError: `needed_bytes` are more than the machine or its control group has left.
    """
    if reason := shortage(needed_bytes, available_bytes(), what):
        raise OutOfMemoryError(reason)


def available_bytes() -> int | None:
    """Memory that can be had without swapping, None where the system does not say."""
    limits = list(_left_of_groups())
    meminfo = _PROC / "meminfo"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    return min(limits) if limits else None


def _left_of_groups() -> Iterator[int]:
    """Of each limit on this process's control group and those around it: what is not in use, caches of files aside.

    A group counts its caches as used, and gives them up before it refuses memory.
    """
    lines = _text(_PROC / "self/cgroup").splitlines()
    group = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    for place in (Path(group), *Path(group).parents):
        limit, used, stat = (_text(_GROUPS / place / f"memory.{name}") for name in ("max", "current", "stat"))
        if limit.isdigit() and used.isdigit():
            counts = dict(line.split() for line in stat.splitlines())
            caches = sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file"))
            yield max(int(limit) - int(used) + caches, 0)


def _text(path: Path) -> str:
    """Contents without the last line end, nothing of a file that cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
