"""Forwards and Muon compute in a type that the hardware multiplies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orl import precision
from orl.optimizers import Muon
from orl.precision import autocast, is_bfloat16

shapes = st.tuples(st.integers(1, 24), st.integers(1, 24))


@pytest.mark.parametrize("native", [True, False])
def test_auto_is_what_the_hardware_multiplies_and_a_named_type_is_kept(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: native)
    assert is_bfloat16("auto", "cpu") is native
    assert is_bfloat16("bfloat16", "cpu") and not is_bfloat16("float32", "cpu")
    with autocast("auto", "cpu"):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if native else torch.float32)


@settings(max_examples=20, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_muon_in_bfloat16_is_torch_s(shape: tuple[int, int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    muon = Muon([ours], lr=0.02, weight_decay=0.1, dtype="bfloat16")
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=rng)
        theirs.grad = ours.grad.clone()
        muon.step()
        reference.step()
    assert torch.equal(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(shape=st.tuples(st.integers(2, 24), st.integers(2, 24)), seed=st.integers(0, 2**31))
def test_muon_in_float32_steps_towards_the_orthogonal_factor(shape: tuple[int, int], seed: int) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    p = torch.nn.Parameter(torch.zeros(shape))
    p.grad = gradient.clone()
    Muon([p], lr=1.0, weight_decay=0.0, dtype="float32").step()
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    step = -p.detach() / (0.2 * max(shape) ** 0.5)
    found = u.T @ step @ v.T  # diagonal: the iteration keeps singular vectors and moves every value to about 1
    large = s > 0.05 * s.max()
    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-3)
    assert ((found.diagonal()[large] > 0.5) & (found.diagonal()[large] < 1.5)).all()
