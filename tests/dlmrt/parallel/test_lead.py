"""Ranks that must decide alike: which errors are everybody's, and how tensors are summed. Groups are stand-ins."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
from torch.distributed import HashStore

from dlmrt.errors import CheckpointError, DlmrtError, NonFiniteError, OutOfMemoryError, UsageError
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


@pytest.mark.parametrize("error", [UsageError("too long"), NonFiniteError("NaN"), OutOfMemoryError("too much")])
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


def connected(monkeypatch, symmetric_peers: Callable[..., object]) -> list[SimpleNamespace]:
    """Three groups that have connected their memory, which `symmetric_peers` maps for each."""
    module = ModuleType("dlmrt.cuda.comm")
    module.symmetric_peers, module.SymmetricSum = symmetric_peers, lambda peers, larger: "sum"
    monkeypatch.setitem(sys.modules, "dlmrt.cuda.comm", module)
    store = HashStore()
    groups = [
        SimpleNamespace(
            rank=rank, device=rank, peers=None, _symmetric=None, _gathered_sum=None, _timeout=timedelta(seconds=60),
            pulse=Pulse(store, rank, 3, limit_s=60), _num_agreements=0, guarded=lambda kind: nullcontext(),
        )
        for rank in range(3)
    ]  # fmt: skip
    for group in groups:
        for name in ("agree", "_import_memory", "_map_memory"):
            setattr(group, name, Group.__dict__[name].__get__(group))
    threads = [threading.Thread(target=Group._connect_memory, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for group in groups:
        group.pulse.close()
    return groups


@pytest.mark.parametrize("error", [None, AttributeError("no rendezvous"), RuntimeError("no peer access. Really")])
def test_ranks_sum_through_symmetric_memory_together_or_not_at_all(monkeypatch, caplog, error):
    """Rank 1 of 3 may have none; nobody waits for a rank that goes another way."""

    def symmetric_peers(device: int, agree: object, *, timeout_s: float) -> str:
        if device == 1 and error is not None:
            raise error
        return "peers"

    groups = connected(monkeypatch, symmetric_peers)
    wanted = ("peers", "sum") if error is None else (None, None)
    assert [(group.peers, group._symmetric) for group in groups] == [wanted] * 3
    if error is not None:
        cause = str(error).partition(". ")[0]
        assert f"(cannot map it; rank 1: {cause}): sums go through nccl" in caplog.text


def test_a_rank_that_cannot_allocate_keeps_all_from_the_rendezvous(monkeypatch, caplog):
    """Which all must enter together: they agree before it, and all have the reason of the one that has no room."""
    entered = []

    def symmetric_peers(device: int, agree: Callable[[str], str], *, timeout_s: float) -> None:
        if reason := agree("rank 1 has no 8 bytes" if device == 1 else ""):
            raise OutOfMemoryError(reason)
        entered.append(device)

    groups = connected(monkeypatch, symmetric_peers)
    assert not entered and [group.peers for group in groups] == [None] * 3
    assert caplog.text.count("(cannot map it; rank 1 has no 8 bytes): sums go through nccl") == 3


def test_a_rank_without_the_package_keeps_all_from_it(monkeypatch):
    """What is missing on one rank shows before the others wait in a rendezvous."""
    asked = []

    def agree(reason: str) -> str:
        asked.append(reason)
        return reason

    group = SimpleNamespace(rank=1, agree=agree, _import_memory=Group._import_memory, _map_memory=None)
    monkeypatch.setitem(sys.modules, "dlmrt.cuda.comm", None)
    Group._connect_memory(group)
    assert group.peers is None and [reason.partition(":")[0] for reason in asked] == ["rank 1"]
