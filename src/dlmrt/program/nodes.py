"""What a program is made of: buffers, kernels over them, and the two nodes that carry a loop.

A program is recorded once and run for every request. Whatever changes from request to request (lengths, thresholds,
seeds, flags) therefore lives in a buffer, never in a node: attributes are constants of the model. The one thing a shape
may leave open is a number of rows, `Rows`, whose maximum is known when memory is planned and whose value is read from a
scalar buffer when the program runs.

Left out on purpose: views, broadcasting and dynamic memory. A buffer has one name, one place and one size.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["weight", "state", "scratch", "scalar"]
Value = int | float | str | bool

ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2,
    "int8": 1, "bool": 1, "uint8": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffer:
    """A place in memory; identity is what counts, names are for people and for binding.

    Example: ``Buffer(name="canvas", kind="state", dtype="int32", shape=(32,))``.
    """

    name: str
    kind: Kind  # weight: read only; state: lives on between runs; scratch: planned; scalar: one number
    dtype: str  # of `ITEM_BYTES`, or a packed weight format
    shape: tuple[Dim, ...]
    layout: str = "rows"  # row-major; anything else is an executor's own order and gives `layout_bytes`
    layout_bytes: int | None = None
    present: Buffer | None = None  # flag: 0 while the buffer stands for "absent"; None: always present

    @property
    def num_bytes(self) -> int:
        """Size at the largest number of rows."""
        if self.layout_bytes is not None:
            return self.layout_bytes
        return math.prod(maximum(dim) for dim in self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A number of rows that is known when the program runs. Example: ``Rows(symbol="T", maximum=512, count=rows)``."""

    symbol: str
    maximum: int
    count: Buffer  # scalar int32


Dim = int | Rows


def maximum(dim: Dim) -> int:
    """The largest value that `dim` takes."""
    return dim.maximum if isinstance(dim, Rows) else dim


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """One operation. A buffer that is both input and output is updated in place.

    Neighbours of one `span` compute rows apart from each other: every thread runs all of them for its own rows, without
    waiting for the others, except before a kernel that `waits`, which may read what they wrote.
    """

    op: str
    inputs: Mapping[str, Buffer]
    outputs: Mapping[str, Buffer]
    attributes: Mapping[str, Value] = field(default_factory=dict)
    span: int | None = None  # None: threads divide the operation as it likes and all end before the next one begins
    waits: bool = False  # only in a span


@dataclass(frozen=True, kw_only=True, eq=False)
class While:
    """Runs `body` as long as `flag` is not 0; the flag is read before every turn."""

    flag: Buffer
    body: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class If:
    """Runs `body` once unless `flag` is 0."""

    flag: Buffer
    body: tuple[Node, ...]


Node = Kernel | While | If


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A recorded program. Its buffers are those that its nodes name."""

    name: str
    body: tuple[Node, ...]

    def buffers(self) -> list[Buffer]:
        """Every buffer once, in order of first use; row counts and presence flags included."""
        seen: dict[Buffer, None] = {}
        for node in walk(self.body):
            used = [*node.inputs.values(), *node.outputs.values()] if isinstance(node, Kernel) else [node.flag]
            for buffer in used:
                seen |= dict.fromkeys(dim.count for dim in buffer.shape if isinstance(dim, Rows))
                seen[buffer] = None
        return list(seen)


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """All nodes in the order in which they are listed, a While or If before its body."""
    for node in body:
        yield node
        if not isinstance(node, Kernel):
            yield from walk(node.body)
