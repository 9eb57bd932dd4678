"""Every family on the cuda executor equals torch: prompt and canvas forward, then a second canvas behind a commit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pairs_cuda import FAMILIES, draw_params, make_cuda, make_eager
from stand_in import GraphRunner

import dlmrt.program.denoiser
from dlmrt.cuda import programs
from dlmrt.cuda.runners import Launches


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(dlmrt.program.denoiser, "MAX_ROWS", 4)
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: Launches(steps))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_forwards_equal_torch(name):
    config = FAMILIES[name]
    params = draw_params(config)
    mine, reference = make_cuda(config, params), make_eager(config, params)
    canvas = np.array([7, 3, 250, 9], dtype=np.int32)
    z = None
    if mine.has_residual:
        probs = torch.softmax(torch.randn(4, config.vocab_size), -1).numpy()
        z = reference.soft_embedding(probs)
        assert np.allclose(mine.soft_embedding(probs), z, atol=1e-5)
    for each in (mine, reference):
        each.extend(np.arange(8, dtype=np.int32))
    got, wanted = mine.forward(canvas, z, None), reference.forward(canvas, z, None)
    assert np.allclose(got, wanted, atol=2e-4 * np.abs(wanted).max()), np.abs(got - wanted).max()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_loop_of_every_family_is_captured_as_it_is_listed(name, monkeypatch):
    from test_cuda_lower import calls

    from dlmrt.cuda.lower import bounded, lower
    from dlmrt.cuda.weights import Packed
    from dlmrt.program.forwards import Formats
    from dlmrt.program.loop import LoopOptions, record_loop

    config = FAMILIES[name]
    options = LoopOptions(
        canvas_length=4, prefill_chunk=16, commit_rule=config.diffusion.commit_rule, is_greedy=False,
        use_residual=config.diffusion.residual.kind != "none",
    )  # fmt: skip
    program = record_loop(config, Formats(), options, capacity=512)
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: GraphRunner(steps))
    params = {key: Packed(values=values) for key, values in draw_params(config).items()}
    store = programs.ProgramStore(config, params, device=torch.device("cpu"), mode="loop")
    store.reserve(512, 0)
    runner = store.get("it", lambda: program).runner
    assert runner.driver.tree(runner.graph.graph) == calls(bounded(lower(program, config).program).body)
