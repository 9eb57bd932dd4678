"""Counter-based random numbers: vectors, counter contract, distributions; rotary scaling against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dlmrt.models.config import RopeConfig
from dlmrt.ops.numerics import NOISE, SAMPLE, gumbel, philox, rope_inv_freq, uniform_ids

SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, [0, 0, 0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2**64 - 1, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0_A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(key: int, counter: list[int], words: list[int]) -> None:
    """Random123's vectors of philox4x32-10, alone and as rows of a larger array."""
    assert philox(key, np.array(counter, dtype=np.uint32)).tolist() == words
    rows = philox(key, np.array([[1, 2, 3, 4], counter, [0, 0, 0, 9]], dtype=np.uint32))
    assert rows.dtype == np.uint32 and rows[1].tolist() == words


@given(seed=SEEDS, block=st.integers(0, 1000), step=st.integers(0, 300), length=st.integers(1, 40))
def test_noise_contract(seed: int, block: int, step: int, length: int) -> None:
    """Slot s takes word s % 4 of counter (s // 4, step, block, NOISE), whatever the length of the canvas."""
    allowed = np.array([5, 6, 9, 200, 201], dtype=np.int32)
    ids = uniform_ids(seed, block=block, step=step, length=length, allowed=allowed)
    for slot in {0, length // 2, length - 1}:
        word = int(philox(seed, np.array([slot // 4, step, block, NOISE]))[slot % 4])
        assert ids[slot] == allowed[word * len(allowed) >> 32]


@given(seed=SEEDS, slot=st.integers(0, 2**24 - 1), vocab_size=st.integers(1, 33))
def test_sample_contract(seed: int, slot: int, vocab_size: int) -> None:
    """Id v takes word v % 4 of counter (v // 4, step, block, SAMPLE | slot << 8); a row does not depend on others."""
    slots = np.array([3, slot, 0], dtype=np.int32)
    noise = gumbel(seed, block=7, step=2, slots_R=slots, vocab_size=vocab_size)
    assert noise.shape == (3, vocab_size) and np.isfinite(noise).all()
    last = vocab_size - 1
    word = int(philox(seed, np.array([last // 4, 2, 7, SAMPLE | slot << 8]))[last % 4])
    assert noise[1, last] == -np.log(-np.log1p(-(word + 0.5) * 2.0**-32))
    alone = gumbel(seed, block=7, step=2, slots_R=slots[1:2], vocab_size=vocab_size + 5)
    np.testing.assert_array_equal(alone[0, :vocab_size], noise[1])


def test_streams_blocks_steps_and_seeds_differ() -> None:
    allowed = np.arange(1 << 20, dtype=np.int32)
    draws = {
        tuple(uniform_ids(seed, block=block, step=step, length=8, allowed=allowed).tolist())
        for seed in (0, 1, 1 << 32) for block in (0, 1) for step in (0, 1)
    }  # fmt: skip
    assert len(draws) == 12


def test_uniform_ids_are_uniform() -> None:
    ids = uniform_ids(1, block=0, step=0, length=60_000, allowed=np.arange(6, dtype=np.int32))
    counts = np.bincount(ids, minlength=6)
    assert (abs(counts - 10_000) < 5 * np.sqrt(10_000 * 5 / 6)).all()


def test_gumbel_max_draws_from_softmax() -> None:
    probs = np.array([0.5, 0.25, 0.15, 0.1])
    noise = gumbel(3, block=0, step=0, slots_R=np.arange(20_000, dtype=np.int32), vocab_size=4)
    counts = np.bincount((np.log(probs) + noise).argmax(axis=1), minlength=4)
    assert (abs(counts - 20_000 * probs) < 5 * np.sqrt(20_000 * probs * (1 - probs))).all()


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (RopeConfig(theta=1e6), {"rope_type": "default"}),
        (RopeConfig(theta=1e6, kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=8192),
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0},
        ),
        (
            RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=32768),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, RopeConfig) else "",
)  # fmt: skip
def test_rope_scaling(rope: RopeConfig, scaling: dict[str, float | str]) -> None:
    """K31: declared scaling changes phases as the public formulas say; K32: fp32 tables tell 256 from 257."""
    inv_freq, factor = rope_inv_freq(rope, 64)
    if rope.kind == "default":
        np.testing.assert_allclose(inv_freq, 1e6 ** (-np.arange(0, 64, 2) / 64), rtol=1e-6)
        return
    config = Qwen3Config(
        head_dim=64, hidden_size=256, num_attention_heads=4, max_position_embeddings=40960,
        rope_parameters={"rope_theta": rope.theta, **scaling},
    )  # fmt: skip
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope.kind](config, "cpu")
    np.testing.assert_allclose(inv_freq, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(expected_factor)
    assert (np.cos(8192 * inv_freq) != np.cos(8192 * rope_inv_freq(RopeConfig(theta=rope.theta), 64)[0])).any()
    assert (np.float32(256) * inv_freq != np.float32(257) * inv_freq).all()
