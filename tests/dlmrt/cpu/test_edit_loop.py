"""Rule `joint_threshold_indel` in the native loop against the readable one: event for event, token for token (fp32)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from pairs import (
    assert_bit_equal,
    assert_same,
    draw_params,
    fast,
    make_cpu,
    make_eager,
    request_for,
    slow,
    with_adapter,
)

import dlmrt.decode.rules
from dlmrt.decode.loop import StepEvent
from dlmrt.decode.native import is_native
from dlmrt.decode.rules import best_other
from dlmrt.program.loop import MAX_HISTORY
from dlmrt.testing import tiny_config

MASK, DELETE, SPLIT = 9, 7, 8
EDITS = {"mask_token_id": MASK, "delete_token_id": DELETE, "split_token_id": SPLIT, "context_attention": "block_causal",
         "block_anchor": "position_zero", "commit_rule": "joint_threshold_indel"}  # fmt: skip
MODELS = {
    "plain": {"diffusion": EDITS},
    "few words": {"diffusion": EDITS, "vocab_size": 14},
    "shift": {"diffusion": EDITS | {"logit_shift": 1}},
    "residual": {"diffusion": EDITS, "residual": with_adapter()},
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7, "seed": 11},
    "filtered": {"temperature": 1.1, "seed": 12, "top_k": 10, "top_p": 0.8, "min_p": 0.02},
}
SETTINGS = [
    {"threshold": 0.02, "edit_threshold": 0.012, "max_post_edit_steps": 3},
    {"threshold": 0.5, "edit_threshold": 0.0},
    {"threshold": 0.02, "edit_threshold": 0.0, "max_post_edit_steps": 0},
    {"threshold": 0.0, "edit_threshold": 0.0, "max_post_edit_steps": 40},
    {"threshold": 0.9, "edit_threshold": 0.3, "max_denoising_steps": 4},
]  # fmt: skip


def edit_params(config, seed, weight):
    """Random weights whose head favours the special ids, positively or negatively."""
    params = draw_params(config, seed=seed)
    head = "lm_head.weight" if "lm_head.weight" in params else "model.embed_tokens.weight"
    params[head][[DELETE, SPLIT]] *= np.float32(weight)
    return params


@pytest.fixture
def looked_again(monkeypatch):
    """How often the readable rule looked for the best of other ids: at the end of a block, or out of a loop."""
    counts = Counter()

    def counting(logits_V, excluded, otherwise):
        counts["end" if excluded == (MASK, DELETE, SPLIT) else "loop"] += 1
        return best_other(logits_V, excluded, otherwise)

    monkeypatch.setattr(dlmrt.decode.rules, "best_other", counting)
    return counts


@pytest.mark.parametrize("name", sorted(MODELS))
def test_native_loop_equals_the_readable_one(name, rng, looked_again):
    config = tiny_config(**MODELS[name])
    edits = Counter()
    for seed, weight in ((0, 1.0), (1, 1.8)):
        params = edit_params(config, seed, weight)
        eager, cpu = make_eager(config, params), make_cpu(config, params)
        for sampling in SAMPLINGS.values():
            for settings in SETTINGS:
                prompt = rng.integers(10, config.vocab_size, int(rng.integers(1, 30)))
                asked = {"max_tokens": int(rng.integers(1, 30)), **settings, **sampling}
                request = request_for(config, prompt, **asked)
                assert is_native(cpu, request)
                events = slow(eager, request)
                assert_same(events, fast(cpu, request))
                for event in events:
                    edits["written"] += event.after.num_edits if isinstance(event, StepEvent) else 0
    assert edits["written"] > 30
    if name == "few words":
        assert looked_again["end"] > 5 and looked_again["loop"] > 5, looked_again


def test_ids_that_a_slot_had_are_all_there_are(rng, looked_again):
    """Five ids may be predicted at all: a slot that goes round has had them all, and keeps what it wants."""
    config = tiny_config(diffusion=EDITS, vocab_size=MASK + 2)
    for seed in range(6):
        params = edit_params(config, seed, 1.2)
        eager, cpu = make_eager(config, params), make_cpu(config, params)
        request = request_for(
            config, [1, 2, 10], max_tokens=13, threshold=0.9, edit_threshold=0.0, max_post_edit_steps=60,
            ignore_eos=True,
        )  # fmt: skip
        assert_same(slow(eager, request), fast(cpu, request))
    assert looked_again["loop"] > 20


def test_a_block_does_not_see_the_history_of_another_request(rng):
    """K05: the second request gives the bytes of a fresh engine."""
    config = tiny_config(diffusion=EDITS)
    params = edit_params(config, 3, 1.8)
    used = make_cpu(config, params)
    for _ in range(10):
        asked = {"threshold": 0.5, "edit_threshold": 0.0, "max_tokens": 20}
        fast(used, request_for(config, rng.integers(10, 250, 20), **asked))
        request = request_for(config, rng.integers(10, 250, int(rng.integers(1, 20))), **asked)
        assert_bit_equal(fast(used, request), fast(make_cpu(config, params), request))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_thread_counts_give_the_same_bytes(dtype, rng):
    config = tiny_config(diffusion=EDITS)
    params = edit_params(config, 3, 1.8)
    one, many = (make_cpu(config, params, num_threads=threads, dtype=dtype) for threads in (1, 3))
    for sampling in SAMPLINGS.values():
        asked = {"threshold": 0.5, "edit_threshold": 0.0, "max_tokens": 30, **sampling}
        request = request_for(config, rng.integers(10, 250, 21), **asked)
        assert_bit_equal(fast(one, request), fast(many, request))


def test_more_steps_than_a_program_remembers_are_driven_step_by_step(rng):
    config = tiny_config(diffusion=EDITS)
    params = edit_params(config, 3, 1.8)
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    for steps, expected in ((MAX_HISTORY, True), (MAX_HISTORY + 1, False)):
        request = request_for(config, rng.integers(10, 250, 9), max_tokens=10, max_denoising_steps=steps)
        assert is_native(cpu, request) == expected
        assert_same(slow(eager, request), fast(cpu, request))
