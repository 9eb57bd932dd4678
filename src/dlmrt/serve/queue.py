"""One slot and a bounded queue before it: first come, first served, and whoever leaves frees the place at once.

The engine runs in one worker thread; its events reach the event loop through the job's queue, so a slow reader holds
memory, never the engine. A job that is cut ends before the engine's next forward. The slot is free when the engine has
stopped, not when the client has read everything. An engine that does not stop in time hangs in a step, for good as far
as anybody can tell: the slot reports it, and whoever runs the server has to end the process.

Source: ours.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

from dlmrt.decode.engine import StreamEvent
from dlmrt.serve.problems import ApiError
from dlmrt.types import CanvasEvent

Cut = Literal["deadline", "disconnect", "shutdown"]
JobEvent = tuple[int, StreamEvent] | Exception | None  # (choice, event); an error or None is the last one

_MAX_PENDING = 1024  # events that wait for a slow reader; canvas events beyond it are dropped, text never is


class Job:
    """One admitted request."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.cut: Cut | None = None
        self.streams: list[Iterator[StreamEvent]] = []  # one per choice, run one after another
        self.num_positions = 0  # of the context that it may fill
        self.events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self.arrived = time.perf_counter()
        self.began: float | None = None  # when the engine took it
        self.is_over = False
        self.has_run = threading.Event()  # the engine has let go of it
        self._loop = asyncio.get_running_loop()

    @property
    def queue_s(self) -> float:
        """Seconds from arrival to the engine."""
        return (self.began if self.began is not None else time.perf_counter()) - self.arrived

    def end(self, reason: Cut) -> None:
        """Cut the running job; the engine returns what is final."""
        self.cut = self.cut or reason
        self.cancel.set()

    def run(self) -> None:
        """Everything the engine has to do; in the worker thread."""
        last: Exception | None = None
        try:
            for choice, stream in enumerate(self.streams):
                for event in stream:
                    if not isinstance(event, CanvasEvent) or self.events.qsize() < _MAX_PENDING:
                        self._put((choice, event))
        except Exception as error:  # whatever it is, the client gets an answer and the next job a clean engine
            last = error
        finally:
            self.streams.clear()
            self.has_run.set()
        self._put(last)

    def _put(self, event: JobEvent) -> None:
        with suppress(RuntimeError):  # the loop is closed: the program was ended by force
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Slot:
    """Lets one job at a time use the engine. All methods belong to the event loop's thread.

    Args:
        max_queue: jobs that may wait.
        step_timeout_s: that a job has to stop after it was cut.
        on_stuck: called when one did not.
    """

    def __init__(self, *, max_queue: int, step_timeout_s: float, on_stuck: Callable[[], None]) -> None:
        self.max_queue = max_queue
        self._step_timeout_s, self._on_stuck = step_timeout_s, on_stuck
        self.is_closed = False
        self.running: Job | None = None
        self._alarm: asyncio.TimerHandle | None = None  # set when the running job is cut
        self._turn = asyncio.Lock()  # wakes waiters in the order of their arrival
        self._tasks: dict[Job, asyncio.Task[None] | None] = {}  # admitted jobs; no task yet while they are prepared
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dlmrt-engine")
        self._mean_s = 1.0  # running mean of the time in the slot

    @property
    def num_waiting(self) -> int:
        """Admitted jobs that are not running."""
        return len(self._tasks) - (self.running is not None)

    def admit(self) -> Job:
        """A place for a new request; `start` or `leave` must follow.

        Raises:
            ApiError: 429 when the queue is full, 503 while shutting down.
        """
        if self.is_closed:
            raise _stopping()
        if len(self._tasks) > self.max_queue:
            raise ApiError(
                429, f"the server answers one request at a time and {self.max_queue} are waiting; try again later",
                code="queue_full", retry_after_s=self._mean_s * len(self._tasks),
            )  # fmt: skip
        job = Job()
        self._tasks[job] = None
        return job

    def start(self, job: Job) -> None:
        """Queue a prepared job; `job.events` will end with None or an error."""
        if job in self._tasks:  # it may have left while it was prepared
            self._tasks[job] = asyncio.create_task(self._run(job))

    def leave(self, job: Job, reason: Cut, error: Exception | None = None) -> None:
        """Take a job out: a running one is cut, a waiting one ends with `error` at once."""
        if job.is_over:
            return
        if job is self.running:
            if not job.cancel.is_set():
                self._alarm = asyncio.get_running_loop().call_later(self._step_timeout_s, self._look, job)
            job.end(reason)
            return
        job.cut, job.is_over = reason, True
        task = self._tasks.pop(job, None)
        if task is not None:
            task.cancel()
        job.events.put_nowait(error)

    def _look(self, job: Job) -> None:
        """Report a job that was cut and still runs."""
        if job is not self.running:
            return
        message = f"a step of the model does not end after {self._step_timeout_s:g} s; the server ends, try again later"
        job.events.put_nowait(ApiError(503, message, code="stuck", retry_after_s=10))
        self._on_stuck()

    def close(self) -> None:
        """Refuse whoever waits and whoever comes; the running job goes on."""
        self.is_closed = True
        for job in list(self._tasks):
            if job is not self.running:
                self.leave(job, "shutdown", _stopping())

    async def _run(self, job: Job) -> None:
        async with self._turn:
            self.running, job.began = job, time.perf_counter()
            try:
                await asyncio.get_running_loop().run_in_executor(self._worker, job.run)
            finally:
                if self._alarm is not None:
                    self._alarm.cancel()  # it would keep the job, with its events, until it is due
                    self._alarm = None
                self._mean_s += 0.2 * (time.perf_counter() - job.began - self._mean_s)
                self.running, job.is_over = None, True
                del self._tasks[job]


def _stopping() -> ApiError:
    return ApiError(503, "the server is shutting down; try again later", code="stopping", retry_after_s=5)
