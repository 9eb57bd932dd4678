"""Sums over GPUs in Triton's interpreter: ranks are buffers of one process, whose announcements come one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlmrt.cuda.kernels import comm
from dlmrt.cuda.tiles import power_of_two


def addresses(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def announce(pads, number, rank):
    comm.announce[(len(pads),)](addresses(pads), number, rank, P=len(pads), IS_DEVICE=False)


def sum_terms(terms, pads, *, number, rank=0, x=None, weight=None, limit=3):
    rows, width = terms[0].shape
    total, normed, status = torch.zeros(rows, width), torch.zeros(rows, width), torch.zeros(1, dtype=torch.int32)
    comm.sum_terms[(rows,)](
        addresses(terms), addresses(pads), total if x is None else x, total if weight is None else weight, total,
        normed, status, number, rank, limit, 1e-6, D=width, DP=power_of_two(width), P=len(terms), HAS_X=x is not None,
        HAS_NORM=weight is not None, IS_DEVICE=False,
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
        announce(pads, 1, rank)
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
        announce(pads, 7, rank)
    total, normed, status = sum_terms(terms, pads, number=7, x=x, weight=weight)
    assert status == 0
    assert torch.equal(total, x + terms[0] + terms[1])
    np.testing.assert_allclose(normed, eager.rms_norm(total, weight, eps=1e-6), rtol=1e-5, atol=1e-6)


def test_a_rank_that_does_not_come_is_named_and_nothing_is_written():
    terms, pads = make(3, 2, 16)
    announce(pads, 4, 0)
    announce(pads, 3, 1)  # an older number does not count
    announce(pads, 4, 2)
    total, _, status = sum_terms(terms, pads, number=4)
    assert status == 2  # rank 1
    assert not total.any()


def test_symmetric_memory_has_what_is_asked_of_it():
    """Names only: rendezvous needs GPUs."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._C._distributed_c10d import _SymmetricMemory

    from dlmrt.cuda.comm import SymmetricSum

    assert callable(symmetric.empty) and callable(symmetric.rendezvous) and callable(SymmetricSum)
    assert {"buffer_ptrs", "signal_pad_ptrs"} <= set(dir(_SymmetricMemory))
