"""Sums over GPUs in Triton's interpreter: ranks are buffers of one process, whose announcements come one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl

from dlmrt.cuda.comm import Mapped, Peers, SymmetricSum
from dlmrt.cuda.kernels import comm, head
from dlmrt.cuda.tiles import power_of_two
from dlmrt.errors import OutOfMemoryError

pytestmark = pytest.mark.timeout(900)  # the interpreter is slow, and slower where it shares a machine
BYTES = 4096  # of one rank's part
NAMES = ("meet", "put_terms", "sum_terms", "take_logits", "put_statistics", "merge_ranks")


class Ranks:
    """Control blocks of ranks that see one another's memory, and what they do, one after the other."""

    def __init__(self, size: int, limit: int = 3) -> None:
        self.size = size
        memory = [torch.zeros(16 * size + 2 * (1 << 20), dtype=torch.uint8) for _ in range(size)]
        places = [each.data_ptr() for each in memory]
        mapped = Mapped(buffers=[place + 16 * size for place in places], pads=places, owner=memory)
        shared = SimpleNamespace(allocate=lambda _: None, agree=lambda reason: reason, map=lambda _: mapped)
        self.peers = [Peers(rank, size, torch.device("cpu"), memory=shared, limit=limit) for rank in range(size)]
        for peers in self.peers:
            peers.reserve(BYTES)

    def put(self, rank, values, *, dtype=tl.float32):
        rows, width = values.shape
        comm.put_terms[(rows, 1)](
            self.peers[rank].control, values, values, torch.tensor([rows], dtype=torch.int32), M=rows, D=width,
            BD=power_of_two(width), S=0, P=self.size, HAS_X=True, TDT=dtype,
        )  # fmt: skip

    def meet(self, rank, *, flag=None, **half):
        """What is agreed."""
        control, agreed = self.peers[rank].control, torch.full((1,), -1, dtype=torch.int32)
        given = torch.tensor([flag or 0], dtype=torch.int32)
        comm.meet[(1,)](
            control, given, agreed, P=self.size, HAS_FLAG=flag is not None, IS_DEVICE=False, **half
        )  # fmt: skip
        return int(agreed)

    def meet_all(self, flags=None):
        """All tell, then all wait."""
        flags = flags or [None] * self.size
        for rank, flag in enumerate(flags):
            self.meet(rank, flag=flag, WAITS=False)
        return [self.meet(rank, flag=flag, TELLS=False) for rank, flag in enumerate(flags)]

    def sum(self, rank, rows, width, *, x=None, weight=None, has_norm=False):
        total, normed, operand = (torch.full((rows, width), 7.0) for _ in range(3))
        comm.sum_terms[(rows,)](
            self.peers[rank].control, total if x is None else x, total if weight is None else weight, total, normed,
            operand, torch.tensor([rows], dtype=torch.int32), M=rows, eps=1e-6, D=width, DP=power_of_two(width),
            P=self.size, TDT=tl.float32, HAS_X=x is not None, HAS_WEIGHT=weight is not None, HAS_TOTAL=True,
            HAS_Y=has_norm, HAS_OPERAND=has_norm, NVFP4=False,
        )  # fmt: skip
        return total, normed, operand


def draw(size, rows, width, seed=0):
    generator = torch.Generator().manual_seed(size + seed)
    return [torch.randn(rows, width, generator=generator) for _ in range(size)]


@pytest.mark.parametrize(("size", "rows", "width"), [(2, 3, 32), (4, 5, 37), (8, 1, 16)])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(size, rows, width):
    ranks = Ranks(size)
    for number in range(3):
        terms = draw(size, rows, width, seed=number)
        for rank, term in enumerate(terms):
            ranks.put(rank, term)
        ranks.meet_all()
        expected = torch.zeros(rows, width)
        for term in terms:
            expected = expected + term
        for rank in range(size):
            total, *_ = ranks.sum(rank, rows, width)
            assert torch.equal(total, expected)  # to the bit
            ranks.peers[rank].check()


def test_a_rank_that_is_quick_overwrites_nothing_that_a_slow_one_still_reads():
    """It puts its next part and tells of it before the slow one has read; further it cannot go."""
    ranks, (first, second) = Ranks(2, limit=0), (draw(2, 2, 16), draw(2, 2, 16, seed=1))
    for rank in range(2):
        ranks.put(rank, first[rank])
        ranks.meet(rank, flag=1 - rank, WAITS=False)
    assert ranks.meet(0, flag=1, TELLS=False) == 1
    assert torch.equal(ranks.sum(0, 2, 16)[0], first[0] + first[1])
    ranks.put(0, second[0])
    ranks.meet(0, flag=0, WAITS=False)
    assert ranks.meet(1, flag=0, TELLS=False) == 1  # what rank 0 said at this meeting, not at the next one
    assert torch.equal(ranks.sum(1, 2, 16)[0], first[0] + first[1])
    ranks.put(1, second[1])
    ranks.meet(1, flag=1, WAITS=False)
    assert [ranks.meet(rank, flag=0, TELLS=False) for rank in range(2)] == [0, 0]
    assert torch.equal(ranks.sum(1, 2, 16)[0], second[0] + second[1])


def test_the_skip_stream_and_the_norm_are_those_of_the_operations():
    from dlmrt.ops import eager

    ranks, terms = Ranks(2), draw(2, 3, 37)
    x, weight = torch.randn(3, 37), torch.randn(37)
    for rank, term in enumerate(terms):
        ranks.put(rank, term)
    ranks.meet_all()
    total, normed, operand = ranks.sum(1, 3, 37, x=x, weight=weight, has_norm=True)
    assert torch.equal(total, x + terms[0] + terms[1])
    np.testing.assert_allclose(normed, eager.rms_norm(total, weight, eps=1e-6), rtol=1e-5, atol=1e-6)
    assert torch.equal(operand, normed)


@pytest.mark.parametrize("flag", [0, 1])
def test_all_ranks_act_on_the_flag_of_rank_0(flag):
    assert Ranks(3).meet_all([flag, 1 - flag, 1]) == [flag] * 3


def test_a_rank_that_does_not_come_is_named_and_nothing_of_the_others_is_used():
    ranks, terms = Ranks(3), draw(3, 2, 16)
    ranks.meet_all()
    for rank in (0, 2):
        ranks.put(rank, terms[rank])
        ranks.meet(rank, flag=0, WAITS=False)
    assert ranks.meet(0, flag=0, TELLS=False) == 1  # cancelled
    total, normed, _ = ranks.sum(0, 2, 16, x=torch.ones(2, 16), has_norm=True)
    assert not total.any() and not normed.any()
    with pytest.raises(RuntimeError, match="rank 1 of 3 did not come"):
        ranks.peers[0].check()
    ranks.meet(1, flag=0, WAITS=False)
    assert ranks.meet(0, flag=0) == 1  # too late: it stays so
    with pytest.raises(RuntimeError, match="rank 1 of 3 did not come"):
        ranks.peers[0].check()


def test_a_sum_of_tensors_of_torch_takes_the_same_way(monkeypatch):
    ranks, terms = Ranks(1), draw(1, 6, 37)
    total = SymmetricSum(ranks.peers[0], larger=lambda x: x * 0)
    assert torch.equal(total(terms[0].reshape(2, 3, 37)), terms[0].reshape(2, 3, 37))
    monkeypatch.setattr("dlmrt.cuda.comm.SUM_BYTES", 16)
    assert not total(terms[0]).any()  # too large: the other way


@pytest.mark.parametrize("reason_of_another", ["", "rank 1 has no 8 bytes"])
def test_memory_is_mapped_once_all_ranks_have_allocated_theirs(reason_of_another):
    """And on none if one has no room, which all then know; what was there stays."""
    calls, room = [], []

    def allocate(num_bytes):
        calls.append("allocate")
        if num_bytes > room[-1]:
            raise RuntimeError("CUDA out of memory. Tried to allocate too much")
        return num_bytes

    def agree(reason):
        calls.append("agree")
        return reason or reason_of_another * (len(room) > 1)

    def map_all(own):
        calls.append("map")
        return Mapped(buffers=[own, own], pads=[1, 2], owner=own)

    memory = SimpleNamespace(allocate=allocate, agree=agree, map=map_all)
    peers = Peers(0, 2, torch.device("cpu"), memory=memory, limit=3)
    room.append(1 << 22)
    peers.reserve(BYTES)
    peers.reserve(BYTES)  # there is room already
    assert calls == ["allocate", "agree", "map"]
    before = peers.control.clone()
    room.append((1 << 22) if reason_of_another else 0)
    with pytest.raises(OutOfMemoryError, match=reason_of_another or "rank 0 has no 4,194,304 bytes .* memory[)]$"):
        peers.reserve((1 << 20) + 1)
    assert calls[3:] == ["allocate", "agree"] and peers.num_bytes == 1 << 20 and torch.equal(peers.control, before)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_statistics_of_ranks_are_those_of_all_ids(is_sampled):
    """Also ties, which go to the lowest id, and a rank all of whose ids are banned."""
    size, rows, vocab, width, generator = 3, 5, 101, 16, torch.Generator().manual_seed(3)
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(vocab, width, generator=generator)
    weight[90], weight[50], weight[70] = weight[10], weight[40], weight[40]
    x[1], x[2] = 9 * weight[10], 9 * weight[40]
    banned = torch.zeros(4, dtype=torch.int32)
    for token in range(67, 101):  # those of the last rank
        banned[token // 32] |= (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)
    for bans in (torch.zeros_like(banned), banned):
        (whole,) = statistics([range(vocab)], x, weight, bans, is_sampled=is_sampled)
        parts = [range(vocab * rank // size, vocab * (rank + 1) // size) for rank in range(size)]
        for found in statistics(parts, x, weight, bans, is_sampled=is_sampled):
            for name in ("argmax", "token", "is_finite_row"):
                assert torch.equal(found[name], whole[name]), name
            for name in ("argmax_confidence", "confidence", "entropy", "log_sum_exp", "max_logit"):
                np.testing.assert_allclose(found[name], whole[name], rtol=2e-5, atol=2e-5, err_msg=name)
    weight[80, 0] = float("nan")
    for bans, is_usable in ((torch.zeros_like(banned), False), (banned, True)):  # of a banned id it is nobody's
        for found in statistics(parts, x, weight, bans, is_sampled=is_sampled):
            assert found["is_finite_row"].tolist() == [is_usable] * rows


def statistics(parts, x, weight, banned, *, is_sampled):
    """What each rank finds whose ids are `parts`; of one part: by the kernels without ranks."""
    size, rows = len(parts), len(x)
    ranks, count = Ranks(size), torch.tensor([rows], dtype=torch.int32)
    is_drawn = torch.tensor([1, 1, 0, 1, 1], dtype=torch.uint8)
    results = []
    for rank, ids in enumerate(parts):
        tiles = -(-(len(ids) + ids.start % 4) // 32)
        names = ("tile_max", "tile_sum", "tile_weighted", "tile_score", "tile_sample_logit")
        made = {name: torch.zeros(tiles, rows) for name in names}
        made |= {name: torch.zeros(tiles, rows, dtype=torch.int32) for name in ("tile_argmax", "tile_sample")}
        head.head_stats[(tiles, 1)](
            x=x, weight=weight[ids.start : ids.stop].contiguous(), banned=banned, temperature=torch.tensor([0.7]),
            seed=torch.tensor([11]), step=torch.tensor([2], dtype=torch.int32),
            block_idx=torch.tensor([1], dtype=torch.int32), logits=made["tile_max"], rows=count, cap=0.0,
            first=ids.start, M=rows, V=len(ids), K=x.shape[1], BM=16, BN=32, BK=16, HAS_CAP=False,
            IS_SAMPLED=is_sampled, HAS_LOGITS=False, CDT=tl.float32, **made,
        )  # fmt: skip
        sizes = {"M": rows, "T": tiles, "TP": power_of_two(tiles), "IS_SAMPLED": is_sampled}
        result = {name: torch.zeros(rows) for name in ("argmax_confidence", "confidence", "entropy", "log_sum_exp",
                                                       "max_logit")}  # fmt: skip
        result |= {name: torch.zeros(rows, dtype=torch.int32) for name in ("argmax", "token")}
        result |= {"is_finite_row": torch.zeros(rows, dtype=torch.uint8)}
        results.append(result)
        if size == 1:
            head.head_merge[(rows,)](**made, **result, is_drawn=is_drawn, rows=count, **sizes)
            return results
        head.put_statistics[(rows,)](ranks=ranks.peers[rank].control, **made, rows=count, P=size, **sizes)
    ranks.meet_all()
    for rank, result in enumerate(results):
        head.merge_ranks[(rows,)](
            ranks=ranks.peers[rank].control, is_drawn=is_drawn, **result, rows=count, M=rows, P=size,
            PP=power_of_two(size), IS_SAMPLED=is_sampled,
        )  # fmt: skip
    return results


def test_logits_of_ranks_are_put_side_by_side():
    ranks, logits = Ranks(3), torch.randn(4, 101)
    firsts = torch.tensor([0, 33, 67, 101])
    for rank in range(3):
        ranks.put(rank, logits[:, firsts[rank] : firsts[rank + 1]].contiguous())
    ranks.meet_all()
    found = torch.zeros(4, 101)
    comm.take_logits[(4, 4)](
        ranks.peers[1].control, firsts, found, torch.tensor([4], dtype=torch.int32), V=101, BV=32, P=3
    )  # fmt: skip
    assert torch.equal(found, logits)


@pytest.mark.timeout(300)
def test_kernels_compile_and_order_their_memory(tmp_path):
    """For sm_90a, sm_100a and sm_120a; a number is written behind a fence and read before what it announces."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(Path(__file__).parent / "aot_comm.py"), "90", "100", "120"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(kernel["kernel"], kernel["sm"]) for kernel in compiled] == [
        (name, sm) for sm in (90, 100, 120) for name in NAMES
    ]
    for kernel in compiled:
        is_meeting = kernel["kernel"] == "meet"
        assert (kernel["fence"], kernel["store"], kernel["acquire"] > 0) == (is_meeting, 8 * is_meeting, is_meeting)
        assert kernel["clock"] > 0 or not is_meeting, kernel
        assert kernel["is_fence_first"] or not is_meeting, kernel


def test_symmetric_memory_has_what_is_asked_of_it():
    """Names only: rendezvous needs GPUs."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    assert callable(symmetric.empty) and callable(symmetric.rendezvous)
    assert {"buffer_ptrs", "signal_pad_ptrs"} <= set(dir(_SymmetricMemory))
