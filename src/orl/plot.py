"""Pictures of a frontier report: accuracy against tokens per forward, a panel for all tasks and one for each.

Drawn with matplotlib (the `plot` extra) on its object interface, so that no global state of a notebook is touched.
The same report gives the same SVG bytes: no date, fixed ids.

Left out on purpose: styles and options; the report holds every number for other tools.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlmrt.errors import MissingDependencyError

_COLUMNS = 3
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for the colour-blind
_MARKERS = "osD^vP"


def write_plots(report: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write `stem`.svg and `stem`.png of a report of `orl.frontier.frontier_report`; return their paths.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("plots need matplotlib; install dlmrt[plot]") from error
    tasks = report["tasks"]
    columns = min(_COLUMNS, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (task, body) in zip(axes, tasks.items(), strict=False):
        _draw(axis, task, body)
    for axis in axes[len(tasks) :]:
        axis.remove()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside upper center", ncols=len(labels))
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    with mpl.rc_context({"svg.hashsalt": "orl", "svg.fonttype": "none"}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths


def _draw(axis: Any, task: str, body: Mapping[str, Any]) -> None:
    """One panel: every knob with its intervals, a line through the Pareto points, the matched accuracy."""
    for i, (model, row) in enumerate(body["models"].items()):
        color, marker = _COLORS[i % len(_COLORS)], _MARKERS[i % len(_MARKERS)]
        points = row["points"]
        x, y = [p["tpf_total"] for p in points], [100 * p["verified_rate"] for p in points]
        bars = {
            "xerr": _lengths(x, [p["tpf_total_95"] for p in points]),
            "yerr": _lengths(y, [[100 * bound for bound in p["verified_rate_95"]] for p in points]),
        }
        axis.errorbar(x, y, **bars, fmt=marker, color=color, ms=4, elinewidth=0.7, alpha=0.55)
        line = sorted((p["tpf_total"], 100 * p["verified_rate"]) for p in points if p["is_pareto"])
        axis.plot(*zip(*line, strict=True), color=color, marker=marker, ms=4, lw=1.5, label=model)
    if body["matched_accuracy"] is not None:
        axis.axhline(100 * body["matched_accuracy"], color="0.5", lw=0.8, ls="--")
    axis.set_title(task, fontsize=10)
    axis.set_xlabel("tokens per forward (total)")
    axis.set_ylabel("verified %")
    axis.grid(alpha=0.25)


def _lengths(values: list[float], intervals: list[list[float]]) -> list[list[float]]:
    """Lengths of error bars below and above; a percentile interval need not hold the value itself."""
    return [
        [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)],
    ]
