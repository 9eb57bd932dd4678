"""The loop against recorded `generate()` runs of DiffusionGemma in transformers, with its random draws fed back in."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dlmrt.checkpoint.load import open_checkpoint, to_float32
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.decode.engine import make_denoiser
from dlmrt.decode.loop import GivenDraws

CANVAS = 16


@pytest.fixture(scope="module")
def checkpoint(data):
    return open_checkpoint(data / "dgemma_tiny")


def draws_of(case, expected):
    """Draws and noise of every step: what an open slot holds before a step is the noise of the step before it."""
    canvas_index, steps = expected["canvas_index"].raw(), case["steps_per_canvas"]
    tokens, noise = (np.zeros((len(steps), max(steps), CANVAS), dtype=np.int32) for _ in range(2))
    for block, num_steps in enumerate(steps):
        rows = np.flatnonzero(canvas_index == block)
        tokens[block, :num_steps] = expected["draws"].raw()[rows]
        noise[block, 0] = expected["canvas_in"].raw()[rows[0]]
        noise[block, 1:num_steps] = expected["noise"].raw()[rows[:-1]]
    return GivenDraws(token_NSL=tokens, noise_NSL=noise)


def generation_of(given):
    """The reference's arguments as a generation_config.json, so that its keys are read as well."""
    names = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold", "eos_token_id",
             "max_new_tokens")  # fmt: skip
    return {name: given[name] for name in names} | {"sampler_config": {"entropy_bound": given["entropy_bound"]}}


@pytest.mark.parametrize("number", range(9))
def test_generate(data, checkpoint, run_loop, executor, number):
    """Free running: every canvas, accepted set, argmax and stop follows from the recorded draws alone (K14)."""
    case = json.loads((data / "dgemma_tiny" / "cases.json").read_text())["generate"][number]
    stored = read_tensors(data / "dgemma_tiny" / "expected.safetensors")
    expected = {name.partition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(case["key"])}
    denoiser = make_denoiser(checkpoint, executor=executor, dtype="float32", num_threads=1)
    generation, given = generation_of(case["params"]), draws_of(case, expected)
    run = run_loop(denoiser, checkpoint.config, case["prompt"], generation, given)

    assert run.answer == case["tokens"][: len(run.answer)]
    assert set(case["tokens"][len(run.answer) :]) <= {case["params"]["pad_token_id"]}  # what follows EOS
    assert run.steps_per_block == case["steps_per_canvas"] and len(run.steps) == case["decoder_forwards"]
    np.testing.assert_array_equal(run.trace, expected["canvas_in"].raw())
    np.testing.assert_array_equal([step.after.committed_L for step in run.steps], expected["accepted"].raw())
    np.testing.assert_array_equal([step.prediction.argmax_L for step in run.steps], expected["argmax"].raw())
    entropy = np.array([step.prediction.entropy_L for step in run.steps])
    assert np.abs(entropy - to_float32(expected["entropy"])).max() < (2e-5 if executor == "eager" else 5e-5)
