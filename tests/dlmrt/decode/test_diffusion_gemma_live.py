"""The loop against `generate()` of transformers' DiffusionGemma, live on random weights with its draws recorded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dlmrt.decode.engine import make_denoiser
from dlmrt.decode.loop import GivenDraws

STEPS, BOUND, CANVAS = 6, 3.0, 8


def generate(model, prompt, monkeypatch, **options):
    """Ids behind the prompt, and per canvas the noise of each step and the draws of each step."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    noise, draws = [], []
    randint, multinomial = torch.randint, torch.multinomial

    def recorded_randint(*args, **kwargs):
        ids = randint(*args, **kwargs)
        if len(noise) == len(draws) == 0 or len(noise[-1]) == len(draws[-1]) + 1:  # two in a row: a new canvas
            noise.append([])
            draws.append([])
        noise[-1].append(ids.flatten().numpy().astype(np.int32))
        return ids

    def recorded_multinomial(*args, **kwargs):
        ids = multinomial(*args, **kwargs)
        draws[-1].append(ids.flatten().numpy().astype(np.int32))
        return ids

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", recorded_randint)
        patch.setattr(torch, "multinomial", recorded_multinomial)
        out = model.generate(
            torch.tensor(prompt)[None], sampler_config=EntropyBoundSamplerConfig(entropy_bound=BOUND),
            max_denoising_steps=STEPS, pad_token_id=0, **options,
        )  # fmt: skip
    return getattr(out, "sequences", out)[0, len(prompt) :].tolist(), noise, draws


def padded(canvases):
    """Rows of all steps of all canvases, int32 [N, S, L]; zeros where a canvas took fewer steps."""
    rows = np.zeros((len(canvases), STEPS, CANVAS), dtype=np.int32)
    for block, steps in enumerate(canvases):
        rows[block, : len(steps)] = steps
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("num_prompt", [5, 12, 30])  # the window is 12
@pytest.mark.parametrize(("stability", "confidence"), [(1, 0.005), (0, 4.0)])
def test_generate_is_token_identical(
    live_diffusion_gemma, run_loop, executor, monkeypatch, num_prompt, stability, confidence
):
    """K14: also for prompts longer than the window, canvases that stop early, and an EOS."""
    model, checkpoint = live_diffusion_gemma
    torch.manual_seed(num_prompt)
    prompt = np.random.default_rng(num_prompt).integers(3, 199, num_prompt).tolist()
    given = {
        "max_new_tokens": 3 * CANVAS, "t_min": 0.4, "t_max": 0.8, "stability_threshold": stability,
        "confidence_threshold": confidence, "eos_token_id": [1, 7],
    }  # fmt: skip
    wanted, noise, draws = generate(model, prompt, monkeypatch, **given)
    recorded = GivenDraws(token_NSL=padded(draws), noise_NSL=padded([canvas[:STEPS] for canvas in noise]))
    config = dataclasses.replace(checkpoint.config, eos_token_ids=(1, 7))
    generation = given | {"max_denoising_steps": STEPS, "sampler_config": {"entropy_bound": BOUND}}
    denoiser = make_denoiser(
        dataclasses.replace(checkpoint, config=config), executor=executor, dtype="float32", num_threads=1
    )
    run = run_loop(denoiser, config, prompt, generation, recorded)
    assert run.answer == wanted[: len(run.answer)] and set(wanted[len(run.answer) :]) <= {0}
    assert run.steps_per_block == [len(canvas) for canvas in draws]
    if confidence > 1:
        assert min(run.steps_per_block) < STEPS  # the early stop is among the cases
