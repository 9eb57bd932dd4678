"""Who of several ranks lives, and what each one does: a few words in their rendezvous store, renewed by a thread.

A rank that dies closes its connections, which the others' collectives notice at once, but not whose it was; a rank that
hangs is noticed by nobody. Both show here as words that are not renewed. Silence is counted in the reader's own beats,
not in clock time: when the whole machine was suspended, nobody is accused.

Source: ours.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dlmrt.errors import DeviceError

BEAT_S = 0.25
SUSPECT_S = 3.0  # of silence, when something has failed and one who is to blame is looked for
_NUM_LINES = 4  # last lines of a rank that a report repeats


class Pulse:
    """Renews this rank's words and watches the others'.

    Args:
        store: a torch.distributed store that nobody else uses from this process.
        limit_s: silence after which a rank is given up.
        on_loss: called once, from the thread, with the report when a rank is given up or has failed.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, limit_s: float, on_loss: Callable[[str], None] | None = None
    ) -> None:
        self.store, self.rank, self.size, self.limit_s = store, rank, size, limit_s
        self._suspect_s = min(SUSPECT_S, limit_s)
        self.doing = "starting"  # written by whoever does it
        self.place = (0, 0)  # command, collective in it: who is behind keeps the others waiting
        self.on_loss = on_loss
        self._state = "lives"
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._beats = 0
        self._others: dict[int, dict[str, Any]] = {}  # last words of each
        self._quiet = dict.fromkeys(self._ranks(), 0)  # beats of ours since they were renewed
        self._lost_store: str | None = None
        self._end = threading.Event()
        self._lock = threading.Lock()  # of the store
        self._thread = threading.Thread(target=self._run, name="dlmrt-pulse", daemon=True)
        self._thread.start()

    def note(self, line: str) -> None:
        """Keep a line that a report about this rank will repeat."""
        self._lines.append(line)

    def fail(self, reason: str) -> None:
        """Last words: this rank ends because of `reason`."""
        self._leave("failed", reason)

    def close(self) -> None:
        """This rank leaves in good order."""
        self._leave("left", "")

    def report(self) -> str:
        """Who is to blame for a failed collective, after waiting for silence to show; ends with the way out."""
        # Silence shows in beats, which a loaded machine makes late; a thread that makes no more is not waited for.
        until, last_time = self._beats + (self._suspect_s + 1) / BEAT_S, time.monotonic() + 3 * (self._suspect_s + 1)
        while (
            not (self._failed() or self._silent(self._suspect_s))
            and self._beats < until and time.monotonic() < last_time
        ):  # fmt: skip
            if self._lost_store:
                break
            time.sleep(BEAT_S)
            if threading.current_thread() is self._thread:  # whose beats nobody else makes
                self._try_beat()
        # One that has failed may be the victim of one that is silent; whoever left in order was told to.
        suspects = self._silent(self._suspect_s) or self._failed()
        if self._lost_store is not None and not suspects:
            return f"rank 0 of {self.size}, or the store that it keeps, is gone ({self._lost_store}); start all again"
        if not suspects:
            places = {rank: tuple(words["place"]) for rank, words in self._others.items()} | {self.rank: self.place}
            last = min(places.values())
            suspects = [rank for rank, place in places.items() if place == last and rank != self.rank]
        if not suspects:
            return f"the other {self.size - 1} ranks wait for rank {self.rank}, at {self.doing}; start all again"
        return f"{'; '.join(map(self._account, suspects))}; start all again"

    def meet(self, name: str, value: str, patience_s: float) -> list[str]:
        """Wait until all ranks have come to `name`; what each of them brought.

        Raises:
            DeviceError: one is lost, or does not begin to live within `patience_s`.
        """
        self.doing = f"waiting at {name!r}"
        try:
            found = self._brought(name, value, patience_s)
            if self.rank == 0:  # whose end may be that of the store
                self._brought(f"{name}, seen", "", patience_s)
            else:
                with self._lock:
                    self.store.set(f"{name}, seen.{self.rank}", "")
        except DeviceError:
            raise
        except RuntimeError as error:
            self._lose_store(error)
            raise DeviceError(self.report()) from error
        return found

    def _brought(self, name: str, value: str, patience_s: float) -> list[str]:
        with self._lock:
            self.store.set(f"{name}.{self.rank}", value)
        until = time.monotonic() + patience_s
        keys = [f"{name}.{rank}" for rank in range(self.size)]
        while True:
            with self._lock:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                if not missing:
                    return [self.store.get(key).decode() for key in keys]
            if lost := [rank for rank in (*self._silent(self.limit_s), *self._failed()) if rank in missing]:
                raise DeviceError(f"{'; '.join(map(self._account, lost))}; start all again")
            unborn = [rank for rank in missing if rank not in self._others]
            if unborn and time.monotonic() > until:
                raise DeviceError(
                    f"rank {unborn[0]} of {self.size} did not join within {patience_s:.0f} s; start all again"
                )
            time.sleep(BEAT_S / 5)

    def _ranks(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _run(self) -> None:
        self._try_beat()  # a rank that dies at once is one that the others know
        while not self._end.wait(BEAT_S):
            self._try_beat()
            lost = self._silent(self.limit_s) or self._failed()
            if (lost or self._lost_store) and self.on_loss is not None:
                on_loss, self.on_loss = self.on_loss, None
                on_loss(self.report())
            if self._lost_store:
                return

    def _try_beat(self) -> None:
        try:
            self._beat()
        except RuntimeError as error:
            self._lose_store(error)

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            words = {
                "beats": self._beats, "state": self._state, "doing": self.doing, "place": self.place,
                "lines": list(self._lines),
            }  # fmt: skip
            self.store.set(f"pulse.{self.rank}", json.dumps(words))
            for rank in self._ranks():
                known = self._others.get(rank)
                if known is None and not self.store.check([f"pulse.{rank}"]):
                    continue
                words = json.loads(self.store.get(f"pulse.{rank}"))
                is_new = known is None or words["beats"] != known["beats"]
                self._quiet[rank] = 0 if is_new else self._quiet[rank] + 1
                self._others[rank] = words

    def _lose_store(self, error: RuntimeError) -> None:
        """The store is gone, and whoever kept it."""
        self._lost_store = str(error).splitlines()[0][:200] or type(error).__name__

    def _leave(self, state: str, reason: str) -> None:
        if self._state != "lives":
            return
        self._state = state
        if reason:
            self._lines.append(reason)
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            self._beat()
        except RuntimeError:  # nobody is left to be told
            return

    def _silent(self, seconds: float) -> list[int]:
        return [
            rank for rank, beats in self._quiet.items()
            if beats * BEAT_S > seconds and self._others[rank]["state"] == "lives"
        ]  # fmt: skip

    def _failed(self) -> list[int]:
        return [rank for rank, words in self._others.items() if words["state"] == "failed"]

    def _account(self, rank: int) -> str:
        quiet_s = self._quiet[rank] * BEAT_S
        how = "lives, but the others wait for it"
        if self._others[rank]["state"] == "failed":
            how = "has failed"
        elif quiet_s > self._suspect_s:
            how = f"has not been heard of for {quiet_s:.1f} s"
        return f"rank {rank} of {self.size} {how}; it was at: {self._words(rank)}"

    def _words(self, rank: int) -> str:
        words = self._others.get(rank, {"doing": "nothing yet", "lines": []})
        lines = f" (its last lines: {' | '.join(words['lines'])})" if words["lines"] else ""
        return f"{words['doing']}{lines}"
