"""Progress bars and tables for people: stderr only, silent when it is not a terminal.

Source: ours, on rich.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

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
    rows = {task: [r["tasks"][task] for r in results] for task in results[0]["tasks"]}
    rows["all"] = [r["all"] for r in results]
    width = max(map(len, rows)) + 2
    names = [r["setting"] if len(r["setting"]) <= 26 else r["setting"][:25] + "~" for r in results]
    lines = ["verified rate @ tpf_total", " " * width + "".join(f"{name:>28}" for name in names)]
    for task, cells in rows.items():
        texts = (f"{cell['verified_rate']:.3f} @{cell['tpf_total']:6.2f}" for cell in cells)
        lines.append(f"{task:<{width}}" + "".join(f"{text:>28}" for text in texts))
    return "\n".join(lines)
