"""The embedded checkpoint: decisions of trained weights, and how far the smaller types are from fp32 on them."""

from __future__ import annotations

import numpy as np
import pytest

from dlmrt.decode.engine import Engine

MODEL = "dlmrt-tiny"
PROMPTS = [
    *(
        f"State the final answer to the following arithmetic problem: {a} + {b} - {c} ="
        for a, b, c in ((12, 35, 7), (4, 9, 3))
    ),
    *(
        f"Robin has {a} stickers. Robin buys {b} more and gives away {c}. How many stickers does Robin have now?"
        for a, b, c in ((23, 14, 9), (40, 2, 12))
    ),
]
SETTINGS = {"greedy": {}, "drawn": {"temperature": 0.7, "seed": 3}, "low_threshold": {"threshold": 0.6}}


@pytest.fixture(scope="module")
def engines():
    """One engine for each (executor, dtype)."""
    kinds = (("eager", "float32"), ("cpu", "float32"), ("cpu", "bfloat16"), ("cpu", "int8"))
    return {kind: Engine.load(MODEL, executor=kind[0], dtype=kind[1], num_threads=1) for kind in kinds}


def ask(engine, prompt, **settings):
    return engine.generate([{"role": "user", "content": prompt}], max_tokens=48, record=True, **settings)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_fp32_decides_as_eager_does(engines, name):
    """Up to the first tie: two confidences, or one and the threshold, within the rounding of two implementations.

    The residual feeds each step's rounding into the next one and multiplies it up to twofold, in either executor.
    """
    settings, num_equal = SETTINGS[name], 0
    for prompt in PROMPTS:
        ours, theirs = (ask(engines[executor, "float32"], prompt, **settings) for executor in ("cpu", "eager"))
        threshold = theirs.record.settings["threshold"]
        for one, other in zip(ours.record.states, theirs.record.states, strict=False):
            np.testing.assert_array_equal(one.canvas_L, other.canvas_L)
            np.testing.assert_allclose(one.entropy_L, other.entropy_L, atol=5e-3)
            if not np.array_equal(one.committed_L, other.committed_L):
                assert is_tie(engines["eager", "float32"], theirs, other, threshold)
                break
        else:
            assert ours.token_ids == theirs.token_ids
            assert [f.num_finalised for f in ours.record.forwards] == [f.num_finalised for f in theirs.record.forwards]
            num_equal += 1
    assert num_equal >= len(PROMPTS) - 1


def is_tie(engine, result, state, threshold):
    """Whether a confidence of `state` lies within rounding of the threshold, or of another slot's."""
    confidence = np.sort(probabilities(engine, result, state).max(axis=1)[state.is_unresolved_L])
    return min(np.abs(confidence - threshold).min(), np.diff(confidence).min(initial=1.0)) < 1e-3


def probabilities(engine, result, state):
    """What `engine` predicts for the canvas and residual of a recorded state."""
    context = list(result.record.prompt_token_ids)
    for block in result.record.blocks[: state.block_idx]:
        context += block.tolist()
    logits = engine.logits(context, state.canvas_L.tolist(), state.residual_LD)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("dtype", "least_agreement", "largest_error"), [("bfloat16", 0.98, 0.005), ("int8", 0.95, 0.03)]
)
def test_smaller_types_stay_within_their_error(engines, dtype, least_agreement, largest_error):
    """Teacher-forced on states of the fp32 run: argmax agreement and mean error of the best probability."""
    exact, smaller = engines["cpu", "float32"], engines["cpu", dtype]
    agreement, errors = [], []
    for prompt in PROMPTS:
        result = ask(exact, prompt)
        for state in result.record.states[::3]:
            expected, found = (probabilities(engine, result, state) for engine in (exact, smaller))
            is_open = state.is_unresolved_L
            agreement.append((expected.argmax(axis=1) == found.argmax(axis=1))[is_open])
            errors.append(np.abs(expected.max(axis=1) - found.max(axis=1))[is_open])
    assert np.concatenate(agreement).mean() >= least_agreement
    assert np.concatenate(errors).mean() <= largest_error
