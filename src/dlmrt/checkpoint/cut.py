"""Parts of tensors: what one of several processes reads of a checkpoint.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Runs of one axis of a tensor, one behind the other; `runs` may be empty.

    Example: rows 0 to 7 and 16 to 19 of a matrix are ``Cut(axis=0, runs=((0, 8), (16, 20)))``.
    """

    axis: int  # 0, or 1 for columns of a matrix
    runs: tuple[tuple[int, int], ...]  # (first index, index behind the last)

    @property
    def size(self) -> int:
        """Indices that are taken."""
        return sum(end - begin for begin, end in self.runs)

    def indices(self) -> Iterator[int]:
        """The indices in order."""
        return (index for begin, end in self.runs for index in range(begin, end))

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part of a tensor of `shape`."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def moved(self, offset: int) -> Cut:
        """The same runs, `offset` indices further on."""
        return Cut(axis=self.axis, runs=tuple((begin + offset, end + offset) for begin, end in self.runs))

    def take(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The part of `values`."""
        return np.take(values, np.fromiter(self.indices(), dtype=np.int64, count=self.size), axis=self.axis)
