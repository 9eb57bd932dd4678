"""Ranks that watch each other, as threads over an in-memory store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dlmrt.errors import DeviceError, UsageError
from dlmrt.parallel.lead import _check_agreement
from dlmrt.parallel.pulse import Pulse


@pytest.fixture
def pulses():
    """Make pulses of one store; they end with the test."""
    store, made = HashStore(), []

    def make(size: int, *, limit_s: float = 60, **options) -> list[Pulse]:
        made.extend(Pulse(store, rank, size, limit_s=limit_s, **options) for rank in range(size))
        return made

    yield make
    for pulse in made:
        pulse.close()


def on_each(pulses: list[Pulse], function) -> list:
    """What `function(pulse)` returns or raises, called by a thread for each."""
    found: list = [None] * len(pulses)

    def call(at: int) -> None:
        try:
            found[at] = function(pulses[at])
        except (UsageError, DeviceError) as error:
            found[at] = error

    threads = [threading.Thread(target=call, args=(at,)) for at in range(len(pulses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


def test_ranks_that_agree_meet_and_others_are_refused_by_name(pulses):
    made = pulses(3)
    assert on_each(made, lambda pulse: pulse.meet("here", str(pulse.rank), 30)) == [["0", "1", "2"]] * 3

    def check(pulse: Pulse) -> None:
        mine = {"checkpoint": "abc", "dtype": "bfloat16" if pulse.rank == 2 else "auto"}
        _check_agreement(SimpleNamespace(pulse=pulse), mine)

    for error in on_each(made, check):
        assert isinstance(error, UsageError)
        assert "rank 0 has dtype 'auto' and rank 2 has 'bfloat16'; start all ranks with the same" in str(error)


def test_a_rank_that_never_came_is_named(pulses):
    made = pulses(2)
    with pytest.raises(DeviceError, match=r"rank 2 of 3 did not join within 1 s"):
        Pulse(made[0].store, 0, 3, limit_s=60).meet("somewhere", "", 1.0)


def test_a_rank_that_failed_is_reported_with_its_last_words_to_whoever_watches(pulses):
    heard: list[str] = []
    made = pulses(2, on_loss=heard.append)
    made[1].doing = "command 4, block 0"
    made[1].note("loaded 12 bytes")
    time.sleep(1.0)  # some beats
    made[1].fail("MemoryError: no memory")
    report = made[0].report()
    assert report == (
        "rank 1 of 2 has failed; it was at: command 4, block 0 (its last lines: loaded 12 bytes | "
        "MemoryError: no memory); start all again"
    )
    for _ in range(100):
        if heard:
            break
        time.sleep(0.1)
    assert heard == [report]


def test_one_that_left_in_good_order_is_missed_by_nobody(pulses):
    heard: list[str] = []
    made = pulses(2, on_loss=heard.append)
    time.sleep(1.0)
    made[1].close()
    time.sleep(1.0)
    assert heard == []


def test_of_ranks_that_all_live_the_one_behind_is_named(pulses):
    made = pulses(3)
    for pulse, place in zip(made, [(5, 7), (5, 2), (5, 7)], strict=True):
        pulse.place, pulse.doing = place, f"collective {place[1]}"
    time.sleep(1.0)
    assert made[0].report().startswith("rank 1 of 3 lives, but the others wait for it; it was at: collective 2")
    assert made[1].report() == "the other 2 ranks wait for rank 1, at collective 2; start all again"


def test_with_a_short_time_out_it_is_still_the_silent_rank_that_is_blamed(pulses):
    """The time-out is less than what silence takes to show elsewhere; whoever reports goes on beating meanwhile."""
    heard: list[str] = []
    made = pulses(3, limit_s=1.0, on_loss=heard.append)
    time.sleep(0.6)
    made[1]._end.set()  # it hangs: no beat, no last words
    for _ in range(100):
        if len(heard) == 2:
            break
        time.sleep(0.1)
    assert len(heard) == 2
    assert all(report.startswith("rank 1 of 3 has not been heard of for 1.") for report in heard), heard


def test_one_who_reports_is_not_taken_for_silent(pulses):
    """Rank 0 thinks once that rank 1 is lost; its report takes longer than silence would, and it beats meanwhile."""
    made = pulses(2, limit_s=1.0)
    time.sleep(0.6)
    reports: list[str] = []
    silent, calls = made[0]._silent, []

    def once(seconds: float) -> list[int]:
        calls.append(seconds)
        return [1] if len(calls) == 1 else silent(seconds)

    made[0].on_loss = reports.append
    made[0]._silent = once
    quiet = []
    while not reports and len(quiet) < 100:
        time.sleep(0.1)
        quiet.append(made[1]._quiet[0])
    assert reports
    assert max(quiet) < 6  # 8 beats go by in a report


def test_a_rank_is_known_before_its_second_beat(pulses, monkeypatch):
    """One that dies in its first quarter of a second is named like any other."""
    monkeypatch.setattr("dlmrt.parallel.pulse.BEAT_S", 3600.0)
    first, _ = pulses(2)
    until = time.monotonic() + 10
    while not first.store.check(["pulse.1"]) and time.monotonic() < until:
        time.sleep(0.01)
    assert first.store.check(["pulse.1"])


def test_silence_is_waited_for_where_beats_are_late(pulses):
    """A beat of 0.55 s: the seconds in which silence would show are over before enough beats are."""
    first, other = pulses(2, limit_s=1)
    while 1 not in first._others:
        time.sleep(0.01)
    other._end.set()  # no last words
    beat = first._beat
    first._beat = lambda: (time.sleep(0.3), beat())
    assert "rank 1 of 2 has not been heard of for" in first.report()
