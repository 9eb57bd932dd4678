"""Answers of a long evaluation, kept one by one: a killed sweep goes on where it stopped.

One JSON-lines file a model. Its first line says of which checkpoint (by content), seed and executor the answers are;
every other line is one judged answer under one setting. More settings, tasks or problems extend the file; another
checkpoint, seed or executor is refused, since its answers must not be mixed with these.

Left out on purpose: a lock; two processes that sweep into one folder at the same time are not told apart.

Source: ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TextIO

import dlmrt
from orl.errors import AnswerLogError
from orl.evaluate import Outcome, Setting, prompt_digest
from orl.tasks.types import Problem

SCHEMA = "orl.answers/1"


class AnswerLog:
    """The answers in `path`, which is made on first use. A context manager.

    Args:
        identity: what all answers have in common (see `identity_of`).

    Raises:
        AnswerLogError: the file holds answers with another identity, or is no such file.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.known: dict[tuple[str, str], Outcome] = {}  # by setting key and prompt digest
        self._header = {"schema": SCHEMA, **identity}
        self._file: TextIO | None = None
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # the rest is the line of a process that was killed while writing
        lines = whole.splitlines()
        try:
            header = json.loads(lines[0]) if lines else self._header
            entries = [json.loads(line) for line in lines[1:]]
            self.known = {(e["setting"], e["prompt"]): Outcome(**e["outcome"]) for e in entries}
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerLogError(f"{self.path} cannot be read ({error}); remove it to start the sweep again") from error
        if changed := _differences(header, self._header):
            raise AnswerLogError(
                f"{self.path} holds answers made otherwise ({changed}); take another --out or remove the file"
            )
        if len(whole) != len(text):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists() or not self.path.stat().st_size
        self._file = self.path.open("a", encoding="utf-8")
        if is_new:
            self._write(self._header)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, setting: Setting, problem: Problem, outcome: Outcome) -> None:
        """Keep one answer; it is in the file when this returns."""
        digest = prompt_digest(problem)
        self.known[setting.key, digest] = outcome
        self._write({"setting": setting.key, "prompt": digest, "outcome": asdict(outcome)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        assert self._file is not None, "AnswerLog is used as a context manager"
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def identity_of(folder: Path, *, seed: int, executor: str, dtype: str, num_threads: int | None) -> dict[str, Any]:
    """What answers of the checkpoint in `folder` depend on beside prompt and setting."""
    return {
        "checkpoint": checkpoint_digest(folder), "seed": seed, "executor": executor, "dtype": dtype,
        "num_threads": num_threads, "dlmrt": dlmrt.__version__,
    }  # fmt: skip


def checkpoint_digest(folder: Path) -> str:
    """Digest over names and bytes of a checkpoint's files; reads all of them, about a second a gigabyte."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(_files(folder)):
        with path.open("rb") as file:
            total.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return total.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for pattern in ("*.json", "*.safetensors", "*.jinja"):
        yield from folder.glob(pattern)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {old.get(key)} against {new[key]}" for key in new if old.get(key) != new[key])
