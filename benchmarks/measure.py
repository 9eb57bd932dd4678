"""Timing on cores that other processes also use: things are timed in turn, and ratios within a round are the result.

Medians of separate runs differ by a quarter on a shared machine; the ratio of two things timed a second apart repeats
within about 5 %. So every runtime takes one turn a round, the order is reversed from round to round (A B, B A, ...), a
ratio is formed within each round, and the median of these is reported with its quartiles. A turn during which other
processes took more than `TOLERANCE` of a core, by /proc/stat, is dropped.

Left out on purpose: clock frequencies and temperatures; Linux only.

Source: ours; quantiles by linear interpolation as in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCHEMA = "dlmrt.benchmark/1"
RESULTS = Path(__file__).parent / "results"
TOLERANCE = 0.12  # of one core that others may take during a turn
MIN_QUIET = 3  # undisturbed rounds below which all rounds are used and the row says so

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One timed turn. Example: ``Turn(value=0.071, others=0.02, wall_s=0.36)``."""

    value: float  # what was measured, for instance seconds a step
    others: float  # cores that other processes took meanwhile; 0.5: half of one
    wall_s: float  # length of the turn

    @property
    def is_quiet(self) -> bool:
        """Whether others stayed below the tolerance; /proc/stat counts in ticks, so short turns get two of them."""
        return self.others <= TOLERANCE + 2 * _TICK_S / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Row:
    """Distribution of one measured quantity."""

    group: str  # what is comparable: a shape, a model
    name: str
    unit: str
    median: float
    q25: float
    q75: float
    least: float
    num: int  # rounds used
    num_dropped: int  # disturbed ones
    is_quiet: bool  # at least MIN_QUIET undisturbed rounds


@dataclass(frozen=True, kw_only=True)
class Check:
    """A ratio, or a value with a limit; lower is better unless `is_floor`."""

    group: str
    what: str  # "A / B": value of A divided by that of B
    value: float
    q25: float
    q75: float
    num: int
    limit: float | None = None  # None: reported without a target
    is_floor: bool = False  # the limit is a least value: a share of a peak, a rate

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.is_floor else self.value <= self.limit


class Watch:
    """Tells what others took of the machine while this process, children that it waits for, and `pid` worked.

    Example:
        with Watch(child.pid) as watch: ...
        watch.others, watch.wall_s
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self.wall_s = self.others = 0.0

    def __enter__(self) -> Self:
        self._busy, self._own, self._began = _machine_cpu_s(), self._own_cpu_s(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_s = time.perf_counter() - self._began
        taken = _machine_cpu_s() - self._busy - (self._own_cpu_s() - self._own)
        self.others = max(0.0, taken) / self.wall_s

    def _own_cpu_s(self) -> float:
        own = sum(os.times()[:4])
        return own if self._pid is None else own + process_cpu_s(self._pid)

    def turn(self, value: float) -> Turn:
        """What was measured during the watch."""
        return Turn(value=value, others=self.others, wall_s=self.wall_s)


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _machine_cpu_s() -> float:
    """CPU time that everybody used since boot, and what the hypervisor gave to other guests."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def take_turns(
    runtimes: Mapping[str, Callable[[], Turn]], *, num_rounds: int, max_s: float = 120.0, rest_s: float = 0.05
) -> dict[str, list[Turn]]:
    """Time `runtimes` in turn; index i of every list belongs to round i.

    Args:
        num_rounds: undisturbed rounds wanted; at most twice as many are run.
        max_s: no round is begun after this time, once MIN_QUIET rounds are there.
        rest_s: pause before each turn, in which what the last runtime woke goes back to sleep.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in runtimes}
    began, num_quiet = time.monotonic(), 0
    for number in range(2 * num_rounds):
        if num_quiet >= num_rounds or (number >= MIN_QUIET and time.monotonic() - began > max_s):
            break
        for name in list(runtimes)[:: 1 if number % 2 == 0 else -1]:
            time.sleep(rest_s)
            turns[name].append(runtimes[name]())
        num_quiet += all(done[-1].is_quiet for done in turns.values())
    return turns


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics, as numpy's default; `share` within [0, 1]."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def row(group: str, name: str, turns: Sequence[Turn], *, unit: str) -> Row:
    """Distribution over the undisturbed turns, or over all where there are too few."""
    quiet = [turn.value for turn in turns if turn.is_quiet]
    is_quiet = len(quiet) >= MIN_QUIET
    used = quiet if is_quiet else [turn.value for turn in turns]
    return Row(
        group=group, name=name, unit=unit, median=quantile(used, 0.5), q25=quantile(used, 0.25),
        q75=quantile(used, 0.75), least=min(used), num=len(used), num_dropped=len(turns) - len(used),
        is_quiet=is_quiet,
    )  # fmt: skip


def ratio(
    group: str, turns: Mapping[str, Sequence[Turn]], subject: str, peer: str, *, limit: float | None = None
) -> Check:
    """Median and quartiles of subject / peer, formed within each round in which both were undisturbed."""
    pairs = list(zip(turns[subject], turns[peer], strict=True))
    quiet = [(a, b) for a, b in pairs if a.is_quiet and b.is_quiet]
    ratios = [a.value / b.value for a, b in (quiet if len(quiet) >= MIN_QUIET else pairs)]
    return check(group, f"{subject} / {peer}", ratios, limit=limit)


def check(
    group: str, what: str, values: Sequence[float], *, limit: float | None = None, is_floor: bool = False
) -> Check:
    """Median and quartiles of `values` against an upper limit, or a lower one with `is_floor`."""
    low, middle, high = (quantile(values, share) for share in (0.25, 0.5, 0.75))
    return Check(
        group=group, what=what, value=middle, q25=low, q75=high, num=len(values), limit=limit, is_floor=is_floor
    )


def document(
    name: str, *, conditions: Mapping[str, Any], rows: Sequence[Row], checks: Sequence[Check],
    skipped: Sequence[str] = (), details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One result as JSON-ready data.

    Args:
        skipped: what was not measured, each with the reason.
        details: numbers of this benchmark that fit neither rows nor checks.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "conditions": dict(conditions),
        "rows": [asdict(item) for item in rows],
        "checks": [{**asdict(item), "is_met": item.is_met} for item in checks],
        "skipped": list(skipped),
        "details": dict(details or {}),
    }


def publish(result: Mapping[str, Any], *, save: bool) -> None:
    """Table on stderr, the document as the last line of stdout, and with `save` as results/<name>.json."""
    for item in result["rows"]:
        note = "" if item["is_quiet"] else "  NOT QUIET"
        spread = f"{item['q25']:.4g} .. {item['q75']:.4g}"
        print(f"{item['group']:<10} {item['name']:<34} {item['median']:.4g} {item['unit']} ({spread}){note}",
              file=sys.stderr)  # fmt: skip
    for item in result["checks"]:
        bound = ">=" if item["is_floor"] else "<="
        verdict = "met" if item["is_met"] else "MISSED"
        target = "" if item["limit"] is None else f"  target {bound} {item['limit']:g}: {verdict}"
        spread = f"{item['q25']:.3g} .. {item['q75']:.3g}"
        print(f"{item['group']:<10} {item['what']:<60} {item['value']:.3g} ({spread}){target}", file=sys.stderr)
    for text in result["skipped"]:
        print(f"skipped: {text}", file=sys.stderr)
    if save:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(result, indent=1, ensure_ascii=True) + "\n"
        (RESULTS / f"{result['name']}.json").write_text(text, encoding="ascii")
    print(json.dumps(result), flush=True)
