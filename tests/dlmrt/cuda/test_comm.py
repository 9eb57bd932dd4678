"""Sums over GPUs in Triton's interpreter: ranks are buffers of one process, whose announcements come one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlmrt.cuda.kernels import comm
from dlmrt.cuda.tiles import power_of_two


def addresses(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def meet(pads, number, rank, limit=3):
    """Status of `rank` behind its meeting."""
    status = torch.zeros(1, dtype=torch.int32)
    comm.meet[(len(pads),)](addresses(pads), status, number, rank, limit, IS_DEVICE=False)
    return status


def sum_terms(terms, pads, *, number, rank=0, x=None, weight=None):
    rows, width = terms[0].shape
    total, normed, status = torch.zeros(rows, width), torch.zeros(rows, width), meet(pads, number, rank)
    comm.sum_terms[(rows,)](
        addresses(terms), total if x is None else x, total if weight is None else weight, total, normed, status, 1e-6,
        D=width, DP=power_of_two(width), P=len(terms), HAS_X=x is not None, HAS_NORM=weight is not None,
    )  # fmt: skip
    return total, normed, int(status)


def make(size, rows, width):
    generator = torch.Generator().manual_seed(size)
    terms = [torch.randn(rows, width, generator=generator) for _ in range(size)]
    return terms, [torch.zeros(size, dtype=torch.int32) for _ in range(size)]


@pytest.mark.parametrize(("size", "rows", "width"), [(2, 3, 32), (4, 5, 37), (8, 1, 16)])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(size, rows, width):
    terms, pads = make(size, rows, width)
    for rank in range(size):
        meet(pads, 1, rank)
    expected = torch.zeros(rows, width)
    for term in terms:
        expected = expected + term
    for rank in range(size):
        total, _, status = sum_terms(terms, pads, number=1, rank=rank)
        assert status == 0
        assert torch.equal(total, expected)  # to the bit


def test_the_skip_stream_and_the_norm_are_those_of_the_operations():
    from dlmrt.ops import eager

    terms, pads = make(2, 3, 37)
    x, weight = torch.randn(3, 37), torch.randn(37)
    for rank in range(2):
        meet(pads, 7, rank)
    total, normed, status = sum_terms(terms, pads, number=7, x=x, weight=weight)
    assert status == 0
    assert torch.equal(total, x + terms[0] + terms[1])
    np.testing.assert_allclose(normed, eager.rms_norm(total, weight, eps=1e-6), rtol=1e-5, atol=1e-6)


def test_a_rank_that_does_not_come_is_named_and_nothing_is_written():
    terms, pads = make(3, 2, 16)
    meet(pads, 4, 0)
    meet(pads, 3, 1)  # an older number does not count
    meet(pads, 4, 2)
    total, _, status = sum_terms(terms, pads, number=4)
    assert status == 2  # rank 1
    assert not total.any()


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
        (name, sm) for sm in (90, 100, 120) for name in ("meet", "sum_terms")
    ]
    for kernel in compiled:
        is_meeting = kernel["kernel"] == "meet"
        assert (kernel["fence"], kernel["release"], kernel["acquire"] > 0) == (is_meeting, is_meeting, is_meeting)


def test_symmetric_memory_has_what_is_asked_of_it():
    """Names only: rendezvous needs GPUs."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    from dlmrt.cuda.comm import SymmetricSum

    assert callable(symmetric.empty) and callable(symmetric.rendezvous) and callable(SymmetricSum)
    assert {"buffer_ptrs", "signal_pad_ptrs"} <= set(dir(_SymmetricMemory))
