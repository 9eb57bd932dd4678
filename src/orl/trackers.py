"""Metrics of a run for people to watch: TensorBoard, trackio or wandb, beside the metrics.jsonl that is always written.

metrics.jsonl is the record; a tracker is a copy, so one that fails while the run goes on is named once and dropped.

Source: ours, over the trackers' own packages; none of them is a dependency.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from dlmrt.errors import MissingDependencyError

logger = logging.getLogger(__name__)

TrackerName = Literal["none", "tensorboard", "trackio", "wandb"]
PROJECT = "orl"


class Tracker(Protocol):
    """What takes the numbers of a step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Take the numbers of one line of metrics."""
        ...

    def close(self) -> None:
        """Write what is held back."""
        ...


class _TensorBoard:
    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Hosted:
    """trackio or wandb, which share one interface; a run folder is one run of project `orl`, also after a resume."""

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project=PROJECT, **options)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


def _trackio(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    import trackio

    return _Hosted(trackio, {"name": run_dir.name, "config": dict(config), "resume": "allow"})


def _wandb(run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    import wandb

    options = {"id": run_dir.name, "name": run_dir.name, "dir": str(run_dir), "resume": "allow", "config": dict(config)}
    return _Hosted(wandb, options)


def open_tracker(name: TrackerName, run_dir: Path, *, config: Mapping[str, Any], step: int) -> Tracker | None:
    """The tracker of a run, None for "none".

    Args:
        config: the resolved recipe.
        step: last step that stands; a run that is resumed writes later ones again.

    Raises:
        MissingDependencyError: its package is not installed.
    """
    try:
        if name == "tensorboard":
            return _TensorBoard(run_dir, step + 1)
        if name == "trackio":
            return _trackio(run_dir, config)
        return _wandb(run_dir, config) if name == "wandb" else None
    except ImportError as error:
        raise MissingDependencyError(
            f"run.tracker is {name!r} and its package is not installed ({error}); pip install {name}, or leave the key "
            "out"
        ) from error


class Watched:
    """A tracker that cannot end the run.

    Args:
        tracker: None watches nothing.
    """

    def __init__(self, tracker: Tracker | None) -> None:
        self._tracker = tracker

    def log(self, entry: Mapping[str, Any]) -> None:
        """Pass on the numbers of one line of metrics."""
        if self._tracker is None:
            return
        try:
            self._tracker.log({k: v for k, v in flat(entry) if k != "step"}, int(entry["step"]))
        except Exception as error:
            logger.warning("the tracker failed (%s); metrics.jsonl goes on without it", error)
            self._tracker = None

    def close(self) -> None:
        """End the tracker's run."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.close()
        except Exception as error:
            logger.warning("the tracker failed at its end (%s); metrics.jsonl is whole", error)


def flat(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Finite numbers of a nested entry. Example: ``{"eval": {"a": {"tpf_total": 2.0}}}`` gives eval/a/tpf_total."""
    for key, value in entry.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)
