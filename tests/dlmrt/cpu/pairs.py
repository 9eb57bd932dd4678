"""Tiny random models in both executors, and one request through either loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dlmrt.decode.loop import LoopRequest, decode
from dlmrt.decode.native import run_loop
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.settings import resolve
from dlmrt.models import qwen3
from dlmrt.models.config import ResidualConfig
from dlmrt.types import DecodeConfig


def draw_params(config, seed=0):
    """Random weights as float32 arrays; predictions are spread over confidences, not saturated at 1."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in qwen3.tensor_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        params[name] = 1 + 0.2 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)
        if name == qwen3.EMBEDDING:
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
