"""Tiny random models in both executors, one request through either loop, and the comparison of what came out."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from dlmrt.decode.loop import BlockEvent, LoopRequest, PrefillEvent, StepEvent, decode
from dlmrt.decode.native import run_loop
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import resolve
from dlmrt.models.config import ResidualConfig
from dlmrt.models.families import family_of
from dlmrt.types import DecodeConfig


def draw_params(config, seed=0):
    """Random weights as float32 arrays; predictions are spread over confidences, not saturated at 1."""
    rng = np.random.default_rng(seed)
    params, family = {}, family_of(config)
    for name, shape in family.tensor_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        params[name] = 1 + 0.2 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)
        if name == family.EMBEDDING:
            params[name] = 0.7 * values
    return params


def with_adapter(where="all"):
    """A residual pathway whose adapter moves predictions without making rounding errors grow from step to step."""
    return ResidualConfig(kind="gated_mlp", intermediate_size=24, where=where, alpha=0.3)


def make_eager(config, params):
    """The eager executor over the same weights."""
    import torch

    from dlmrt.eager.executor import EagerDenoiser

    return EagerDenoiser({name: torch.from_numpy(values) for name, values in params.items()}, config)


def make_cpu(config, params, **options):
    """The cpu executor over the same weights."""
    from dlmrt.cpu.executor import CpuDenoiser

    return CpuDenoiser(params, config, **{"num_threads": 1, **options})


def request_for(config, prompt, *, watch=None, cancel=None, stop=(), **settings):
    """A loop request with `settings` of DecodeConfig."""
    banned = banned_ids(config, range(config.vocab_size))
    request = LoopRequest(
        prompt_S=np.asarray(prompt, dtype=np.int32),
        settings=resolve(DecodeConfig(**settings), config, {}),
        diffusion=config.diffusion, banned=banned,
        allowed=np.setdiff1d(np.arange(config.vocab_size, dtype=np.int32), banned), watch=watch,
    )  # fmt: skip
    return request if cancel is None else replace(request, cancel=cancel)


def slow(denoiser, request):
    """Events of the readable loop."""
    return list(decode(denoiser, request))


def fast(denoiser, request, **options):
    """Events of the native loop."""
    return list(run_loop(denoiser, request, keeps_residual=True, **options))


def assert_same(slow_events, fast_events, *, rtol=1e-4):
    """Decisions exactly, statistics within rounding."""
    assert [type(event) for event in fast_events] == [type(event) for event in slow_events]
    for ours, theirs in zip(fast_events, slow_events, strict=True):
        if isinstance(ours, PrefillEvent):
            assert ours == theirs
        elif isinstance(ours, BlockEvent):
            assert (ours.block_idx, ours.start, ours.answer, ours.end_reason) == (
                theirs.block_idx, theirs.start, theirs.answer, theirs.end_reason)  # fmt: skip
            np.testing.assert_array_equal(ours.ids_L, theirs.ids_L)
            assert [without_entropy(f) for f in ours.forwards] == [without_entropy(f) for f in theirs.forwards]
            for one, other in zip(ours.forwards, theirs.forwards, strict=True):
                assert one.mean_entropy == pytest.approx(other.mean_entropy, abs=rtol)
        else:
            assert_same_step(ours, theirs, rtol)


def assert_same_step(ours, theirs, rtol):
    for field in dataclasses.fields(ours.state):
        if field.name not in ("residual_LD", "entropy_L"):
            np.testing.assert_array_equal(
                getattr(ours.state, field.name), getattr(theirs.state, field.name), field.name
            )
    for field in dataclasses.fields(ours.after):
        if field.name != "history":  # of the rule alone, it never leaves a native loop
            mine, other = getattr(ours.after, field.name), getattr(theirs.after, field.name)
            np.testing.assert_array_equal(mine, other, field.name)
    assert ours.num_settled == theirs.num_settled
    for name in ("argmax_L", "token_L"):
        np.testing.assert_array_equal(getattr(ours.prediction, name), getattr(theirs.prediction, name), name)
    for name in ("argmax_confidence_L", "confidence_L", "entropy_L"):
        np.testing.assert_allclose(
            getattr(ours.prediction, name), getattr(theirs.prediction, name), rtol=rtol, atol=rtol / 10
        )
    assert (ours.state.residual_LD is None) == (theirs.state.residual_LD is None)
    if ours.state.residual_LD is not None:
        np.testing.assert_allclose(ours.state.residual_LD, theirs.state.residual_LD, atol=10 * rtol)


def without_entropy(forward):
    return dataclasses.replace(forward, mean_entropy=0.0)


def assert_bit_equal(some, others):
    assert len(some) == len(others)
    for a, b in zip(some, others, strict=True):
        if isinstance(a, StepEvent):
            for one, other in ((a.state, b.state), (a.after, b.after), (a.prediction, b.prediction)):
                for field in dataclasses.fields(one):
                    np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name)
        elif isinstance(a, BlockEvent):
            assert (a.answer, a.forwards, a.end_reason) == (b.answer, b.forwards, b.end_reason)
