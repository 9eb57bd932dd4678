"""Where scratch lies: offsets in one arena, reused as soon as a buffer is dead, and what a program needs in bytes.

A scratch buffer lives from the node that writes it first to the node that touches it last; if one of them stands inside
a While and the other before it, it lives through the whole While, since the next turn may read it. Inside a span
(`Kernel.span`) threads are apart by up to the next kernel that waits, so a buffer lives through all kernels between two
such ones. Buffers that live at the same time never share a byte. Placement is greedy by size: the largest first, each
at the lowest offset where it fits between those already placed. The peak is reported beside its lower bound, the
largest sum of what lives at one moment.

Source: greedy by size as in Pisarchyk and Lee, "Efficient memory management for deep neural net inference"
(arXiv 2001.03288), section 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlmrt.program.nodes import Buffer, Kernel, Node, Program, Rows

ALIGNMENT = 64  # bytes: a cache line and the widest vector


@dataclass(frozen=True, kw_only=True)
class Interval:
    """First and last node, by listing position, at which a buffer holds something that is needed."""

    first: int
    last: int

    def overlaps(self, other: Interval) -> bool:
        """Whether both are alive at some node."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placement of a program's scratch."""

    offsets: Mapping[Buffer, int]
    intervals: Mapping[Buffer, Interval]
    num_bytes: int  # of the arena
    lower_bound: int  # no placement needs less

    def describe(self) -> str:
        """One line for listings and errors."""
        return f"{len(self.offsets)} buffers in {self.num_bytes:,} bytes (at least {self.lower_bound:,})"


def plan(program: Program) -> Plan:
    """Place every scratch buffer of `program`."""
    intervals = _Liveness(program).widened()
    offsets: dict[Buffer, int] = {}
    for buffer in sorted(intervals, key=lambda b: (-_aligned(b), intervals[b].first)):
        offsets[buffer] = _lowest_gap(buffer, intervals, offsets)
    return Plan(
        offsets=offsets,
        intervals=intervals,
        num_bytes=max((offset + _aligned(buffer) for buffer, offset in offsets.items()), default=0),
        lower_bound=_lower_bound(intervals),
    )


class _Liveness:
    """Intervals over the listing positions of a program."""

    def __init__(self, program: Program) -> None:
        self.intervals: dict[Buffer, Interval] = {}
        self._position = 0
        self._phases: dict[int, Interval] = {}  # by position of a node in a span: what threads run without waiting
        self._scan(program.body, loops=())

    def widened(self) -> dict[Buffer, Interval]:
        """Intervals of which each end covers the whole phase that it lies in."""

        def widen(interval: Interval) -> Interval:
            first, last = (self._phases.get(end) for end in (interval.first, interval.last))
            return Interval(first=first.first if first else interval.first, last=last.last if last else interval.last)

        return {buffer: widen(interval) for buffer, interval in self.intervals.items()}

    def _scan(self, body: tuple[Node, ...], *, loops: tuple[int, ...]) -> None:
        """Visit `body`; `loops` holds the positions at which the enclosing Whiles begin, outermost first."""
        phase: list[int] = []  # positions since the last wait
        before_it: Node | None = None
        for node in body:
            position = self._position
            self._position += 1
            if isinstance(node, Kernel) and node.span is not None:
                is_next = isinstance(before_it, Kernel) and before_it.span == node.span and not node.waits
                phase = [*phase, position] if is_next else [position]
                self._phases |= dict.fromkeys(phase, Interval(first=phase[0], last=position))
            before_it = node
            if isinstance(node, Kernel):
                for buffer in (*node.inputs.values(), *node.outputs.values()):
                    self._touch(buffer, position)
                continue
            self._touch(node.flag, position)
            before = set(self.intervals)
            self._scan(node.body, loops=(*loops, position))
            end = self._position - 1
            for buffer in before:
                if self.intervals[buffer].last > position:  # used inside, written before
                    self.intervals[buffer] = Interval(first=self.intervals[buffer].first, last=end)

    def _touch(self, buffer: Buffer, position: int) -> None:
        for dim in buffer.shape:
            if isinstance(dim, Rows):
                self._touch(dim.count, position)
        if buffer.kind == "scratch":
            known = self.intervals.get(buffer)
            self.intervals[buffer] = Interval(first=known.first if known else position, last=position)


def _aligned(buffer: Buffer) -> int:
    return -(-max(buffer.num_bytes, 1) // ALIGNMENT) * ALIGNMENT


def _lowest_gap(buffer: Buffer, intervals: Mapping[Buffer, Interval], offsets: Mapping[Buffer, int]) -> int:
    """Lowest offset at which `buffer` meets no placed buffer that is alive with it."""
    neighbours = sorted(
        (offset, offset + _aligned(other))
        for other, offset in offsets.items()
        if intervals[other].overlaps(intervals[buffer])
    )
    low = 0
    for begin, end in neighbours:
        if begin - low >= _aligned(buffer):
            break
        low = max(low, end)
    return low


def _lower_bound(intervals: Mapping[Buffer, Interval]) -> int:
    changes: dict[int, int] = {}
    for buffer, interval in intervals.items():
        changes[interval.first] = changes.get(interval.first, 0) + _aligned(buffer)
        changes[interval.last + 1] = changes.get(interval.last + 1, 0) - _aligned(buffer)
    alive = peak = 0
    for position in sorted(changes):
        alive += changes[position]
        peak = max(peak, alive)
    return peak
