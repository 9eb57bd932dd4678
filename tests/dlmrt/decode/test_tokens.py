"""Log-probabilities: recorded for every id of an answer under every rule, with and without a stream of tokens."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from dlmrt.decode import engine as engine_module
from dlmrt.decode.engine import Engine
from dlmrt.decode.rules import RULES
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.errors import UsageError
from dlmrt.models.config import ResidualConfig
from dlmrt.testing import MASK, byte_codec, scripted_engine, tiny_config
from dlmrt.types import TokensEvent

EXECUTORS = ["eager", "cpu"] if importlib.util.find_spec("dlmrt.cpu._native") else ["eager"]
RESIDUAL = ResidualConfig(kind="gated_mlp", intermediate_size=24)
EDITS = {"delete_token_id": 5, "split_token_id": 6}


def engine_of(executor, make_params, rule):
    noise = "uniform" if rule == "entropy_bound" else "mask"
    section = {"noise": noise} | (EDITS if rule == "joint_threshold_indel" else {})
    config = tiny_config(diffusion=section, residual=RESIDUAL)
    params = make_params(config, seed=2)
    if executor == "eager":
        return Engine(EagerDenoiser(params, config), config, byte_codec())
    from dlmrt.cpu.executor import CpuDenoiser

    arrays = {name: tensor.numpy() for name, tensor in params.items()}
    return Engine(CpuDenoiser(arrays, config, num_threads=1), config, byte_codec())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_id_has_one(make_params, executor, rule, temperature):
    """The distribution is that of the step that last changed the slot, tempered and without banned ids."""
    options = {"max_tokens": 16, "ignore_eos": True, "commit_rule": rule, "temperature": temperature, "seed": 3}
    if rule not in ("steps", "entropy_bound"):
        options["threshold"] = 0.2
    with engine_of(executor, make_params, rule) as engine:
        recorded = engine.generate("abc", record=True, **options)
        events = list(engine.stream("abc", tokens=True, num_top_logprobs=262, **options))
    assert len(recorded.record.logprobs) == len(recorded.token_ids) == 16
    blocks = [event for event in events if isinstance(event, TokensEvent)]
    streamed = [logprob for block in blocks for logprob in block.logprobs]
    assert events[-1].token_ids == recorded.token_ids and not events[-1].record.logprobs
    for token, one, other in zip(recorded.token_ids, recorded.record.logprobs, streamed, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3 and one.logprob <= 0
        top = dict(other.top)
        assert abs(top[token] - other.logprob) < 1e-3  # the whole distribution agrees with the number
        assert (MASK not in top or rule == "entropy_bound") and abs(sum(map(np.exp, top.values())) - 1) < 1e-4


def test_a_canvas_that_cannot_fit_is_refused_before_it_is_made(monkeypatch):
    """K70: bytes needed and available are named; nothing of the size of the canvas is allocated."""
    gibibyte = 2**30
    monkeypatch.setattr(engine_module, "available_bytes", lambda: gibibyte)

    def never(*args):
        raise AssertionError("the denoiser was asked")

    config = tiny_config(max_position_embeddings=1 << 24)
    engine, denoiser = scripted_engine(never, config=config)
    needed = (1 << 20) * config.vocab_size * 36
    with pytest.raises(UsageError, match=f"canvas_length 1048576 needs {needed:,} bytes .* {gibibyte:,}"):
        engine.stream("hi", canvas_length=1 << 20, max_tokens=1)
    assert not denoiser.forwarded and not denoiser.extended
    monkeypatch.setattr(engine_module, "available_bytes", lambda: None)  # where the system does not say
    with pytest.raises(AssertionError, match="was asked"):
        list(engine.stream("hi", canvas_length=1 << 10, max_tokens=1))
