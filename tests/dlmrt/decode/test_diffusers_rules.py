"""Rules against diffusers' BlockRefinementScheduler, live: the same logits, step after step, on masked blocks.

Its quota of a step is `min_commit`, an editing threshold that is not positive means no edits, and its edits are kept on
decided slots of an unfinished block, as LLaDA2.1's are.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.decode.rules import RULES, start_block
from dlmrt.decode.sampling import predict
from dlmrt.decode.settings import resolve
from dlmrt.testing import tiny_config
from dlmrt.types import DecodeConfig, Sampling

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed", allow_module_level=True)

from diffusers.schedulers.scheduling_block_refinement import BlockRefinementScheduler

VOCAB, MASK = 12, 11


def our_step(rule, fields, length, state, logits):
    chosen = resolve(DecodeConfig(commit_rule=rule, canvas_length=length, **fields), tiny_config(), {})
    sampling = Sampling(temperature=1.0, is_greedy=True, seed=0)
    guess = predict(logits, sampling, np.array([MASK], dtype=np.int32), block=0, step=state.step)
    return RULES[rule](chosen, state, guess)


@given(data=st.data())
@settings(max_examples=60)
def test_steps_are_the_schedulers(data):
    length = data.draw(st.integers(1, 10), label="length")
    quota = data.draw(st.integers(1, length), label="quota")
    pinned = data.draw(st.integers(0, length - 1), label="pinned")
    threshold = data.draw(st.sampled_from([0.3, 0.6, 0.95]), label="threshold")
    editing = data.draw(st.sampled_from([None, 0.3, 0.6]), label="editing")
    sharpness = data.draw(st.sampled_from([1.0, 4.0]), label="sharpness")
    random = np.random.default_rng(data.draw(st.integers(0, 2**31), label="seed"))
    rule, fields = "threshold", {"threshold": threshold, "min_commit": quota, "max_denoising_steps": 100}
    if editing is not None:
        rule, fields = "joint_threshold", {**fields, "edit_threshold": editing, "max_post_edit_steps": 3}

    scheduler = BlockRefinementScheduler(block_length=length, num_inference_steps=1)
    scheduler.set_timesteps(100, block_length=length)
    scheduler._transfer_schedule = torch.full((100,), quota)  # every step owes the same
    canvas = np.full(length, MASK, dtype=np.int32)
    canvas[:pinned] = random.integers(0, MASK, pinned)
    state, sample = start_block(canvas, pinned), torch.from_numpy(canvas).long()[None]
    prompt_mask = torch.arange(length) < pinned
    while not state.is_done:
        logits = (sharpness * random.standard_normal((length, VOCAB))).astype(np.float32)
        logits[:, MASK] = -1e9  # which their decoder would go on with for ever
        theirs = scheduler.step(
            torch.from_numpy(logits)[None], state.step, sample, mask_token_id=MASK, threshold=threshold,
            editing_threshold=editing, prompt_mask=prompt_mask,
        )  # fmt: skip
        state = our_step(rule, fields, length, state, logits)
        sample = theirs.prev_sample
        np.testing.assert_array_equal(state.canvas_L, sample[0].numpy())
        committed = (theirs.transfer_index | theirs.editing_transfer_index)[0].numpy()
        np.testing.assert_array_equal(state.committed_L, committed)


@pytest.mark.parametrize(("length", "steps"), [(32, 32), (32, 5), (7, 3), (4, 4)])
def test_quota_of_rule_steps(length, steps):
    """Without a threshold the scheduler decides a fixed number each step: rule `steps`."""
    scheduler = BlockRefinementScheduler(block_length=length, threshold=2.0)
    scheduler.set_timesteps(steps, block_length=length)
    state = start_block(np.full(length, MASK, dtype=np.int32), 0)
    sample = torch.full((1, length), MASK)
    random = np.random.default_rng(length)
    while not state.is_done:
        logits = random.standard_normal((length, VOCAB)).astype(np.float32)
        logits[:, MASK] = -1e9
        sample = scheduler.step(torch.from_numpy(logits)[None], state.step, sample, mask_token_id=MASK).prev_sample
        state = our_step("steps", {"max_denoising_steps": steps}, length, state, logits)
        np.testing.assert_array_equal(state.canvas_L, sample[0].numpy())
    assert state.step == steps
