"""The folder of a training run: metrics, resolved recipe, resumable state.

State is written to a temporary folder, flushed to disk and renamed, newest last, two kept: after `kill -9`, a power cut
or a full disk at any moment the newest complete state is still there, and a damaged one is set aside. Tensors are
safetensors, the rest JSON; nothing is pickled. `metrics.jsonl` is cut back to what it held when the resumed state was
saved, so a resumed run's file reads like a straight run's.

One process at a time: the folder is locked until the process that opened it ends, however it ends.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from orl.errors import RecipeError, RunFolderError
from orl.ranks import TrainRanks
from orl.recipe import build, differences, dump_recipe, read_toml
from orl.trackers import Watched, open_tracker

logger = logging.getLogger(__name__)

Recipe = TypeVar("Recipe")

_KEEP = 2
_NUM_LINES = "num_metrics"  # in state.json: lines of metrics.jsonl when it was saved
_locks: dict[Path, int] = {}  # descriptors, open while this process lives: closing one would give the lock away


class RunFolder:
    """One run's folder; made on first use.

    Raises:
        RunFolderError: another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.states = path / "state"
        self.metrics = path / "metrics.jsonl"
        self.states.mkdir(parents=True, exist_ok=True)
        _lock(path)
        self._watched = Watched(None)

    def watch(self, recipe: Any, step: int) -> None:
        """Send later lines to the tracker that the recipe names, too.

        Raises:
            MissingDependencyError: its package is not installed.
        """
        config = dataclasses.asdict(recipe)
        self._watched = Watched(open_tracker(recipe.run.tracker, self.path, config=config, step=step))

    def close(self) -> None:
        """End the tracker's run; the folder stays locked until the process ends."""
        self._watched.close()

    def check_recipe(self, recipe: Any) -> None:
        """Save the resolved recipe, or refuse to go on with another one; keys that are new since count as defaults.

        Raises:
            RunFolderError: the folder belongs to a run with another recipe.
        """
        path = self.path / "recipe.resolved.toml"
        if not path.exists():
            _write(path, dump_recipe(recipe))
            return
        try:
            saved = build(type(recipe), read_toml(path), where=str(path))
        except RecipeError as error:
            raise RunFolderError(f"{error}; take another --run-dir or remove the folder") from error
        if changes := differences(saved, recipe):
            what = "; ".join(changes)
            raise RunFolderError(
                f"{self.path} holds a run with another recipe ({what}); take another --run-dir or remove the folder"
            )

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one JSON line to metrics.jsonl; numbers that are not finite become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")
        self._watched.log(finite)

    def save_state(self, step: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        """Write the state of `step` atomically and drop all but the newest two.

        Tensors of a step that is there stay, since they are a function of the step; the rest of it is replaced.

        Raises:
            RunFolderError: the disk refused; states that were there are untouched.
        """
        target, partial = self.states / f"step_{step:08d}", self.states / ".partial"
        num_lines = self.metrics.read_bytes().count(b"\n") if self.metrics.exists() else 0
        state = json.dumps({"step": step, _NUM_LINES: num_lines, **extra})
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while saving
        try:
            if target.exists():
                _write(target / "state.json", state)
                return
            partial.mkdir()
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / "tensors.safetensors")
            (partial / "state.json").write_text(state, encoding="utf-8")
            for path in (*partial.iterdir(), partial):
                _sync(path)
            partial.rename(target)
            _sync(self.states)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunFolderError(
                f"cannot save step {step} in {self.states}: {error}; free space and run the same command to go on from "
                "the state before"
            ) from error
        for old in self._complete()[:-_KEEP]:
            shutil.rmtree(old)

    def load_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Newest state that can be read as (tensors, extra), None for a new run; metrics after it are cut off.

        Raises:
            RunFolderError: there are states and none can be read.
        """
        folders = self._complete()
        for folder in reversed(folders):
            try:
                extra = json.loads((folder / "state.json").read_text(encoding="utf-8"))
                step = int(extra["step"])
                tensors = load_file(folder / "tensors.safetensors")
            except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
                logger.warning("%s is damaged (%s); trying the state before it", folder, error)
                continue
            for damaged in folders[folders.index(folder) + 1 :]:  # else they would count as the newest ones
                aside = damaged.with_name(f".damaged_{damaged.name}")
                shutil.rmtree(aside, ignore_errors=True)
                damaged.rename(aside)
            self._cut_metrics(step, extra.pop(_NUM_LINES, None))
            return tensors, extra
        if folders:
            raise RunFolderError(f"no state in {self.states} can be read; remove the folder to start the run again")
        self._cut_metrics(-1)
        return None

    def _complete(self) -> list[Path]:
        return sorted(p for p in self.states.iterdir() if p.name.startswith("step_"))

    def _cut_metrics(self, step: int, num_lines: int | None = None) -> None:
        """Keep lines up to `step`, of the first `num_lines` if the state tells: it may be older than its evaluation."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines()[:num_lines]:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a process that was killed
            if entry["step"] <= step:
                kept.append(line)
        _write(self.metrics, "".join(line + "\n" for line in kept))


def _lock(folder: Path) -> None:
    """Hold `folder` for this process; a record lock, so that the kernel frees it after `kill -9` too."""
    folder = folder.resolve()
    if folder in _locks:
        return
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunFolderError(
            f"another process trains in {folder}; wait for it, stop it, or take another --run-dir"
        ) from error
    _locks[folder] = descriptor


def _write(path: Path, text: str) -> None:
    """Replace the file `path` as a whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    _sync(partial)
    partial.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderRun(ABC, Generic[Recipe]):
    """A run with its folder, which rank 0 alone opens. A context manager: at its end all that was opened is closed.

    Raises:
        RunFolderError: the folder is open elsewhere, or belongs to a run with another recipe.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, ranks: TrainRanks | None = None) -> None:
        self.recipe, self.path = recipe, run_dir
        self.ranks = ranks or TrainRanks()
        self.folder: RunFolder | None = None
        with ExitStack() as opened:  # closes what is open where a later part fails
            if self.ranks.is_main:
                self.folder = RunFolder(run_dir)
                opened.callback(self.folder.close)
                self.folder.check_recipe(recipe)
            self._set_up(self.ranks, opened)
            self._opened = opened.pop_all()

    @abstractmethod
    def _set_up(self, ranks: TrainRanks, opened: ExitStack) -> None:
        """Make the rest of the run; what has to be closed goes into `opened`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line of metrics."""
        if self.folder:
            self.folder.log(entry)
