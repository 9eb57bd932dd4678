"""Progress bars and tables for people: stderr only, silent when it is not a terminal.

Source: ours, on rich.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from orl.evaluate import by_task

if TYPE_CHECKING:
    from orl.pretrain import Progress as TrainingProgress
    from orl.train import UpdateProgress


class CountBar:
    """A bar over a known number of items."""

    def __init__(self, total: int, title: str, *, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._progress.add_task(title, total=total, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, count: int = 1) -> None:
        """Count items done."""
        self._progress.advance(self._task, count)


class TrainingBar(CountBar):
    """Steps, loss, rows per second and time left of a training run."""

    def __init__(self, num_steps: int, *, enabled: bool) -> None:
        super().__init__(num_steps, "train", enabled=enabled)

    def update(self, progress: TrainingProgress) -> None:
        """Show the newest report."""
        minutes = progress.seconds_left / 60
        note = f"loss {progress.loss:.4f}  {progress.rows_per_s:,.0f} rows/s  {minutes:.0f} min of training left"
        self._progress.update(self._task, completed=progress.step, note=note)


class UpdateBar(CountBar):
    """Updates, loss, verified rate, tokens per forward and time left of On-Policy Residual Learning."""

    def __init__(self, num_updates: int, *, enabled: bool) -> None:
        super().__init__(num_updates, "train", enabled=enabled)

    def update(self, progress: UpdateProgress) -> None:
        """Show the newest report."""
        note = f"loss {progress.loss:.4f}"
        if progress.verified_rate is not None:
            note += f"  verified {progress.verified_rate:.3f}  tpf {progress.tpf_total:.2f}"
        note += f"  {progress.seconds_left / 60:.0f} min left"
        self._progress.update(self._task, completed=progress.update, note=note)


def settings_table(report: dict[str, Any]) -> str:
    """Verified rate @ TPF (ratio of sums) of every task under every setting, as plain text."""
    results = report["results"]
    rows = by_task(results)
    width = max(map(len, rows)) + 2
    names = [r["setting"] if len(r["setting"]) <= 26 else r["setting"][:25] + "~" for r in results]
    lines = ["verified rate @ tpf_total", " " * width + "".join(f"{name:>28}" for name in names)]
    for task, cells in rows.items():
        texts = (f"{cell['verified_rate']:.3f} @{cell['tpf_total']:6.2f}" for cell in cells)
        lines.append(f"{task:<{width}}" + "".join(f"{text:>28}" for text in texts))
    return "\n".join(lines)


def frontier_table(report: Mapping[str, Any]) -> str:
    """Every model's points over all tasks, and each task at matched accuracy, as plain text."""
    over_all = report["tasks"]["all"]
    width = max(len(p["setting"]) for row in over_all["models"].values() for p in row["points"]) + 2
    lines = []
    for model, row in over_all["models"].items():
        lines += [f"{model}", f"  {'setting':<{width}}{'verified':>26}{'tpf_total':>26}{'tokens/s':>12}"]
        for point in row["points"]:
            rate = _with_interval(point["verified_rate"], point["verified_rate_95"], 3)
            tpf = _with_interval(point["tpf_total"], point["tpf_total_95"], 2)
            mark = " *" if point["is_pareto"] else ""
            lines.append(f"  {point['setting']:<{width}}{rate:>26}{tpf:>26}{point['tokens_per_second']:>12.1f}{mark}")
    criterion = f"best of {report['baseline']} minus {100 * report['tolerance']:g} points"
    method = f"{report['num_prompts']} prompts, paired bootstrap of {report['num_resamples']}"
    lines += ["", f"at matched accuracy: {criterion} ({method})"]
    width = max(map(len, report["tasks"])) + 2
    for task, body in report["tasks"].items():
        for model, row in body["models"].items():
            lines.append(f"  {task:<{width}}{_matched(model, body['matched_accuracy'], row['at_matched_accuracy'])}")
    return "\n".join(lines)


def _matched(model: str, accuracy: float | None, row: Mapping[str, Any]) -> str:
    if accuracy is None:
        return f"{model}: the baseline verifies nothing"
    if not row["is_reached"]:
        return f"{model}: does not reach {accuracy:.3f} (in {100 * row['reached_share']:.0f} % of resamples it does)"
    edge = ", the fastest knob: sweep further" if row["is_edge"] else ""
    tpf = _with_interval(row["tpf_total"], row["tpf_total_95"], 2)
    ratio = _with_interval(row["tpf_ratio"], row["tpf_ratio_95"], 3)
    return f"{model}: tpf_total {tpf} at {accuracy:.3f}, ratio {ratio} {row['verdict']}{edge}"


def comparison_table(found: Mapping[str, Any]) -> str:
    """Paired differences at every common setting, as plain text."""
    first, second = found["models"]
    lines = [f"{second} against {first}: {found['num_prompts']} common prompts"]
    for what in ("prompts", "settings"):
        if any(alone := found[f"{what}_left_out"]):
            lines.append(f"  left out: {alone[0]} {what} that only {first} has, {alone[1]} that only {second} has")
    for row in found["results"]:
        difference = _with_interval(100 * row["difference"], [100 * v for v in row["difference_95"]], 1, sign="+")
        ratio = _with_interval(row["tpf_ratio"], row["tpf_ratio_95"], 3)
        lines.append(
            f"  {row['setting']}: verified {difference} points ({row['accuracy']}), tpf x {ratio} ({row['tpf']})"
        )
    return "\n".join(lines)


def _with_interval(value: float, interval: Sequence[float], digits: int, *, sign: str = "") -> str:
    low, high = interval
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
