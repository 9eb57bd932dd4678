"""Ranks that must decide alike: which errors are everybody's, and how tensors are summed. Groups are stand-ins."""

from __future__ import annotations

import pickle
import sys
import threading
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
from torch.distributed import HashStore

from dlmrt.errors import CheckpointError, DlmrtError, NonFiniteError, UsageError
from dlmrt.parallel.group import Group
from dlmrt.parallel.lead import LeadingDenoiser, obey
from dlmrt.parallel.pulse import Pulse


class Commands:
    """A group whose rank 0 sends `reset` twice and then nothing; keeps what fails."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.sent = [pickle.dumps((number, "reset", "reset", {})) for number in (1, 2)] + [b""]
        self.loss: str | None = None

    def do(self, what: str, *, number: int = 0) -> None:
        self.what = what

    def command(self, payload: bytes | None) -> bytes:
        return self.sent.pop(0)

    def fail(self, error: Exception) -> None:
        self.loss = str(error)


class Part:
    """A part whose every call raises `error`."""

    dtype, vocab_size, has_residual = "float32", 10, False

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def reset(self) -> None:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("error", [UsageError("too long"), NonFiniteError("NaN")])
def test_errors_that_every_rank_meets_end_the_call_alone(error):
    part, group = Part(error), Commands()
    obey(part, group)
    assert part.calls == 2
    with pytest.raises(type(error)):
        LeadingDenoiser(part, Commands()).reset()


@pytest.mark.parametrize("error", [CheckpointError("the file was changed"), DlmrtError("?"), MemoryError("no memory")])
def test_an_error_of_one_rank_alone_is_a_loss(error):
    with pytest.raises(type(error)):
        obey(Part(error), Commands())
    group = Commands()
    with pytest.raises(type(error)):
        LeadingDenoiser(Part(error), group).reset()
    assert group.loss == str(error)


@pytest.mark.parametrize("error", [None, AttributeError("no rendezvous"), RuntimeError("no peer access. Really")])
def test_ranks_sum_through_symmetric_memory_together_or_not_at_all(monkeypatch, caplog, error):
    """Rank 1 of 3 may have none; nobody waits for a rank that goes another way."""

    class SymmetricSum:
        def __init__(self, device: int, larger: object, *, timeout_s: float) -> None:
            if device == 1 and error is not None:
                raise error

    module = ModuleType("dlmrt.cuda.comm")
    module.SymmetricSum = SymmetricSum
    monkeypatch.setitem(sys.modules, "dlmrt.cuda.comm", module)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", ModuleType("symmetric"))
    store, found = HashStore(), {}
    pulses = [Pulse(store, rank, 3, limit_s=60) for rank in range(3)]

    def connect(rank: int) -> None:
        group = SimpleNamespace(
            device=rank, _gathered_sum=None, _timeout=timedelta(seconds=60), pulse=pulses[rank],
            _all_can=lambda what, problem: Group._all_can(group, what, problem),
        )  # fmt: skip
        found[rank] = Group._symmetric_sum(group)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for pulse in pulses:
        pulse.close()
    assert [found[rank] is None for rank in range(3)] == [error is not None] * 3
    if error is not None:
        problem = str(error).partition(". ")[0]
        assert f"rank 1 cannot map symmetric memory ({problem}): sums go through nccl" in caplog.text


def test_a_rank_without_the_package_keeps_all_from_it(monkeypatch):
    """What is missing on one rank shows before the others wait in a rendezvous."""
    monkeypatch.setitem(sys.modules, "dlmrt.cuda.comm", None)
    asked = []

    def all_can(what: str, problem: str) -> bool:
        asked.append((what, bool(problem)))
        return False

    assert Group._symmetric_sum(SimpleNamespace(_all_can=all_can)) is None
    assert asked == [("import symmetric memory", True)]
