"""The loop against recorded `generate()` runs of DiffusionGemma in transformers, with its random draws fed back in."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dlmrt.checkpoint.load import load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.decode import loop
from dlmrt.eager.executor import EagerDenoiser


@pytest.fixture(scope="module")
def model(data):
    checkpoint = open_checkpoint(data / "dgemma_tiny")
    return EagerDenoiser(load_params(checkpoint), checkpoint.config), checkpoint.config


def generation_of(given):
    """The reference's arguments as a generation_config.json, so that its keys are read as well."""
    names = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold", "eos_token_id",
             "max_new_tokens")  # fmt: skip
    return {name: given[name] for name in names} | {"sampler_config": {"entropy_bound": given["entropy_bound"]}}


@pytest.mark.parametrize("number", range(9))
def test_generate(data, model, run_loop, monkeypatch, number):
    """Free running: every canvas, accepted set, argmax and stop follows from the recorded draws alone (K14)."""
    denoiser, config = model
    case = json.loads((data / "dgemma_tiny" / "cases.json").read_text())["generate"][number]
    stored = read_tensors(data / "dgemma_tiny" / "expected.safetensors")
    expected = {name.partition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(case["key"])}
    canvas_index = expected["canvas_index"].raw()
    rows = [np.flatnonzero(canvas_index == block) for block in range(len(case["steps_per_canvas"]))]

    def recorded_draw(*args, block, step, **options):
        prediction = predict(*args, block=block, step=step, **options)
        return dataclasses.replace(prediction, token_L=expected["draws"].raw()[rows[block][step]])

    def recorded_noise(seed, *, block, step, length, allowed):
        row = rows[block][step - 1] if step else rows[block][0]
        return expected["noise" if step else "canvas_in"].raw()[row].copy()

    predict = loop.predict
    monkeypatch.setattr(loop, "predict", recorded_draw)
    monkeypatch.setattr(loop, "uniform_ids", recorded_noise)
    run = run_loop(denoiser, config, case["prompt"], generation_of(case["params"]))

    assert run.answer == case["tokens"][: len(run.answer)]
    assert set(case["tokens"][len(run.answer) :]) <= {case["params"]["pad_token_id"]}  # what follows EOS
    assert run.steps_per_block == case["steps_per_canvas"] and len(run.steps) == case["decoder_forwards"]
    np.testing.assert_array_equal(run.trace, expected["canvas_in"].raw())
    np.testing.assert_array_equal([step.after.committed_L for step in run.steps], expected["accepted"].raw())
    np.testing.assert_array_equal([step.prediction.argmax_L for step in run.steps], expected["argmax"].raw())
    entropy = np.array([step.prediction.entropy_L for step in run.steps])
    assert np.abs(entropy - to_float32(expected["entropy"])).max() < 2e-5
