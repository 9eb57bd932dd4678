"""What the residual z is: softmax over the ids that can be emitted times the embedding, wherever it is computed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from dlmrt.decode.engine import Engine
from dlmrt.decode.sampling import banned_ids, predict
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models import qwen3
from dlmrt.models.config import ResidualConfig
from dlmrt.ops.eager import emittable_probs
from dlmrt.testing import MASK, byte_codec, tiny_config
from dlmrt.types import Sampling

NUM_PADDED = 40  # rows of the head that the tokenizer has no token for
RESIDUAL = ResidualConfig(kind="gated_mlp", intermediate_size=24)
EXECUTORS = ["eager", "cpu"] if importlib.util.find_spec("dlmrt.cpu._native") else ["eager"]


def config_of(noise):
    codec = byte_codec()
    vocab_size = codec.vocab_size + NUM_PADDED
    return codec, tiny_config(residual=RESIDUAL, diffusion={"noise": noise}, vocab_size=vocab_size)


def denoiser_of(executor, params, config):
    if executor == "eager":
        return EagerDenoiser(params, config)
    from dlmrt.cpu.executor import CpuDenoiser

    return CpuDenoiser({name: tensor.numpy() for name, tensor in params.items()}, config, num_threads=1)


@pytest.mark.parametrize("noise", ["mask", "uniform"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_z_that_a_step_consumes(make_params, noise, temperature):
    """Ids that no answer can hold have no share, and T is the step's; the native loop feeds the same."""
    codec, config = config_of(noise)
    params = make_params(config)
    params["model.norm.weight"] = params["model.norm.weight"] * 0.1  # flat predictions, in which all ids have a share
    rule = {"commit_rule": "steps", "max_denoising_steps": 4}
    runs = {}
    for executor in EXECUTORS:
        with Engine(denoiser_of(executor, params, config), config, codec) as engine:
            runs[executor] = engine.generate(
                "abc", max_tokens=16, ignore_eos=True, record=True, temperature=temperature, seed=5, **rule
            )
            if executor == "eager":
                logits = [
                    engine.logits(codec.encode("abc"), state.canvas_L, state.residual_LD)
                    for state in runs["eager"].record.states[:3]
                ]
    states = runs["eager"].record.states
    banned = torch.zeros(config.vocab_size, dtype=torch.bool)
    banned[torch.from_numpy(banned_ids(config, codec.known_ids)).long()] = True
    assert int(banned.sum()) == NUM_PADDED + (noise == "mask")
    assert states[0].residual_LD is None and states[1].step == 1
    for state, before in zip(states[1:3], logits, strict=False):
        if state.step == 0:  # another block
            continue
        probs = emittable_probs(torch.from_numpy(before), banned, temperature=temperature or 1.0)
        assert probs[:, banned].sum() == 0
        wanted = (probs @ params[qwen3.EMBEDDING]).numpy()
        np.testing.assert_allclose(state.residual_LD, wanted, atol=2e-5)
        over_all = (torch.from_numpy(before) / (temperature or 1.0)).softmax(-1) @ params[qwen3.EMBEDDING]
        assert np.abs(over_all.numpy() - wanted).max() > 1e-2  # the other meaning is another z
    for run in runs.values():
        assert run.token_ids == runs["eager"].token_ids
        for state, reference in zip(run.record.states, states, strict=True):
            if reference.residual_LD is not None:
                np.testing.assert_allclose(state.residual_LD, reference.residual_LD, atol=2e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_training_and_decoding_share_the_distribution(temperature):
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal((5, 50))).astype(np.float32)
    banned = np.array([0, 7, 49], dtype=np.int32)
    mask = torch.zeros(50, dtype=torch.bool)
    mask[torch.from_numpy(banned).long()] = True
    ours = predict(
        logits, Sampling(temperature=temperature, is_greedy=True, seed=0), banned, block=0, step=0, with_probs=True
    )
    theirs = emittable_probs(torch.from_numpy(logits), mask, temperature=temperature)
    np.testing.assert_allclose(ours.probs_LV, theirs.numpy(), atol=1e-6)
    assert (theirs[:, mask] == 0).all() and (ours.probs_LV[:, banned] == 0).all()
    assert torch.equal(emittable_probs(torch.from_numpy(logits), None), torch.from_numpy(logits).softmax(-1))


def test_the_mask_has_no_share():
    """The mask's row of the table never enters z, however probable the model finds it."""
    logits = torch.zeros(1, 10)
    logits[0, 3] = 20.0
    banned = torch.arange(10) == 3
    assert float(emittable_probs(logits, banned)[0, 3]) == 0 and MASK in banned_ids(tiny_config(), range(262))
