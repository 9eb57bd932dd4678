"""A runtime in a process of its own that works only while it has the turn.

Two thread pools that spin side by side on the same cores slow each other down several times over, so every runtime
lives in its own process and is stopped (SIGSTOP) whenever another one has the turn: a stopped process cannot spin.

The parent sends one line of words, the child answers with one line of JSON. `serve` is the child's side for runtimes
in Python; others speak the protocol themselves. A child first says that it is ready, after loading and warming up.

Source: ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from measure import Turn, Watch

ROOT = Path(__file__).resolve().parents[1]
RUNTIMES = ROOT / "benchmarks" / "runtimes"


class ChildError(RuntimeError):
    """A runtime ended or refused; the message holds the last line it wrote to stderr."""


class Child:
    """A runtime process, stopped between turns.

    Args:
        command: what to run; "python" as its first word stands for this interpreter.
        num_threads: given to the runtime's libraries through the environment; runtimes also set it themselves.
        is_paused: whether it is stopped between turns.
    """

    def __init__(self, command: Sequence[str], *, num_threads: int, is_paused: bool = True) -> None:
        words = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
        self._is_paused = is_paused
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment(num_threads)
        )
        self.pid = self._process.pid
        try:
            self.hello = self._read()  # what it says of itself: versions, formats
        except ChildError:
            self.close()
            raise
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, *words: object) -> dict[str, Any]:
        """Give it the turn for one request."""
        self._continue()
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self._process.stdin.flush()
        reply = self._read()
        self._stop()
        return reply

    def turn(self, *words: object) -> Turn:
        """As `ask`; the turn's value is the reply's `value`."""
        with Watch(self.pid) as watch:
            reply = self.ask(*words)
        return watch.turn(float(reply["value"]))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise ChildError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with status {self._process.returncode}"

    def _stop(self) -> None:
        if self._is_paused:
            os.kill(self.pid, signal.SIGSTOP)

    def _continue(self) -> None:
        if self._is_paused:
            os.kill(self.pid, signal.SIGCONT)


def environment(num_threads: int) -> dict[str, str]:
    """The environment of runtimes: this process's, with one thread count for every library."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "DLMRT_NUM_THREADS")
    return {
        **os.environ, **dict.fromkeys(names, str(num_threads)), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


@contextmanager
def children(
    commands: Mapping[str, Sequence[str]], *, num_threads: int, skipped: list[str]
) -> Iterator[dict[str, Child]]:
    """Start the runtimes one after the other; those that cannot run are left out and named in `skipped`."""
    started: dict[str, Child] = {}
    try:
        for name, command in commands.items():
            began = time.monotonic()
            try:
                started[name] = Child(command, num_threads=num_threads)
            except (ChildError, OSError) as error:
                skipped.append(f"{name}: {error}")
            print(f"{name}: {time.monotonic() - began:.1f} s to start", file=sys.stderr, flush=True)
        yield started
    finally:
        for child in started.values():
            child.close()


class Channel:
    """The child's side. Made first of all: from then on, what libraries print to stdout goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="ascii")
        os.dup2(2, 1)

    def serve(self, handlers: Mapping[str, Callable[..., Mapping[str, Any]]], **hello: object) -> None:
        """Say hello, then answer requests until stdin ends."""
        self._say(hello)
        for line in sys.stdin:
            name, *words = line.split()
            try:
                self._say(handlers[name](*words))
            except Exception as error:
                self._say({"error": f"{type(error).__name__}: {error}".splitlines()[0]})

    def _say(self, reply: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(reply) + "\n")
        self._out.flush()
