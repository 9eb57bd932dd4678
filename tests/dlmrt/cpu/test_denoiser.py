"""Forwards of the cpu executor against the eager one, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from pairs import draw_params, make_cpu, make_eager, with_adapter

from dlmrt.errors import DeviceError, UsageError
from dlmrt.models.config import ResidualConfig, RopeConfig
from dlmrt.testing import MASK, tiny_config

CONFIGS = {
    "plain": {},
    "residual": {"residual": with_adapter()},
    "residual_masked": {"residual": with_adapter("masked")},
    "shift": {"diffusion": {"logit_shift": 1}},
    "causal_block": {"diffusion": {"in_block_attention": "causal"}},
    "block_causal": {"diffusion": {"context_attention": "block_causal", "block_anchor": "position_zero"}},
    "untied": {"tie_word_embeddings": False},
    "scaled_soft_embedding": {
        "residual": ResidualConfig(kind="gated_mlp", intermediate_size=24, alpha=0.3, scale_embedding=True)
    },
    "odd_sizes": {
        "hidden_size": 27, "intermediate_size": 35, "num_heads": 3, "num_kv_heads": 1, "head_dim": 10,
        "vocab_size": 263,
    },
    "yarn": {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=32)},
    "biased": {"architecture": "Qwen2ForCausalLM", "has_qkv_bias": True},
    "one_layer": {"num_layers": 1},
    "half_rotary": {"rope": RopeConfig(partial_rotary_factor=0.5)},
}  # fmt: skip


@pytest.fixture(params=sorted(CONFIGS))
def pair(request):
    """(config, eager, cpu) of one configuration."""
    config = tiny_config(**CONFIGS[request.param])
    params = draw_params(config)
    return config, make_eager(config, params), make_cpu(config, params, num_threads=2)


def draw_ids(rng, count, vocab_size=250):
    return rng.integers(0, vocab_size, count).astype(np.int32)


def test_logits_and_soft_embedding_equal_eager(pair, rng):
    config, eager, cpu = pair
    for denoiser in (eager, cpu):
        denoiser.reset()
    for turn in range(3):
        ids = draw_ids(rng, 24)
        canvas = draw_ids(rng, 8)
        canvas[rng.integers(0, 8, 3)] = MASK
        for denoiser in (eager, cpu):
            denoiser.extend(ids)
            assert denoiser.context_length == 24 * (turn + 1)
        logits = eager.forward(canvas, None, None)
        np.testing.assert_allclose(cpu.forward(canvas, None, None), logits, rtol=1e-4, atol=2e-5)
        if config.diffusion.residual.kind == "none":
            continue
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        z = eager.soft_embedding(probs)
        np.testing.assert_allclose(cpu.soft_embedding(probs), z, rtol=1e-4, atol=1e-5)
        for where in (None, rng.random(8) < 0.5):
            mixed = eager.forward(canvas, z, where)
            assert not np.allclose(mixed, logits, atol=1e-3)
            np.testing.assert_allclose(cpu.forward(canvas, z, where), mixed, rtol=1e-4, atol=2e-5)


def test_truncate_then_extend_equals_a_straight_context(pair, rng):
    _, _, cpu = pair
    ids, other, canvas = draw_ids(rng, 40), draw_ids(rng, 16), draw_ids(rng, 8)
    cpu.reset()
    cpu.extend(np.concatenate((ids[:24], other)))
    straight = cpu.forward(canvas, None, None)
    cpu.reset()
    cpu.extend(ids)
    cpu.truncate(24)
    cpu.extend(other)
    np.testing.assert_array_equal(cpu.forward(canvas, None, None), straight)


def test_canvases_of_any_length(config, rng):
    params = draw_params(config)
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    for length in (1, 3, 7, 17, 40):
        canvas = draw_ids(rng, length)
        np.testing.assert_allclose(
            cpu.forward(canvas, None, None), eager.forward(canvas, None, None), rtol=1e-4, atol=2e-5
        )


def test_a_row_does_not_depend_on_the_others(config, rng):
    """Row invariance: causal rows give the same bytes alone, among others, and for any number of threads."""
    causal = tiny_config(diffusion={"in_block_attention": "causal"})
    params = draw_params(causal)
    ids, canvas = draw_ids(rng, 30), draw_ids(rng, 16)
    expected = None
    for threads in (1, 2, 3):
        cpu = make_cpu(causal, params, num_threads=threads)
        cpu.extend(ids)
        logits = cpu.forward(canvas, None, None)
        expected = logits if expected is None else expected
        np.testing.assert_array_equal(logits, expected)
        for length in (1, 5, 9):
            np.testing.assert_array_equal(cpu.forward(canvas[:length], None, None), expected[:length])


def test_a_context_that_grows_keeps_its_contents(rng):
    """Past 1024 positions the caches are replaced; K05: what was committed before must still be seen."""
    config = tiny_config(max_position_embeddings=4096, diffusion={"logit_shift": 1})
    params = draw_params(config)
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    canvas = draw_ids(rng, 8)
    for count in (1000, 600, 1):
        ids = draw_ids(rng, count)
        eager.extend(ids)
        cpu.extend(ids)
        np.testing.assert_allclose(
            cpu.forward(canvas, None, None), eager.forward(canvas, None, None), rtol=1e-3, atol=1e-4
        )
    cpu.truncate(900)
    eager.truncate(900)
    np.testing.assert_allclose(cpu.forward(canvas, None, None), eager.forward(canvas, None, None), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.02), ("int8", 0.06)])
def test_smaller_types_stay_near_fp32(dtype, limit, rng):
    config = tiny_config(hidden_size=128, intermediate_size=256, num_layers=4, residual=with_adapter())
    params = draw_params(config)
    exact, cpu = make_eager(config, params), make_cpu(config, params, dtype=dtype)
    ids, canvas = draw_ids(rng, 40), draw_ids(rng, 8)
    for denoiser in (exact, cpu):
        denoiser.extend(ids)
    expected, logits = exact.forward(canvas, None, None), cpu.forward(canvas, None, None)
    assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < limit
    probs = np.full((8, config.vocab_size), 1 / config.vocab_size, dtype=np.float32)
    z, z_near = exact.soft_embedding(probs), cpu.soft_embedding(probs)
    assert np.linalg.norm(z - z_near) / np.linalg.norm(z) < 0.02


def test_bfloat16_weights_are_read_as_bits(config, rng):
    params = draw_params(config)
    bits = {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in params.items()}
    rounded = {name: (values.astype(np.uint32) << 16).view(np.float32) for name, values in bits.items()}
    canvas = draw_ids(rng, 8)
    for dtype in ("float32", "bfloat16", "int8"):
        from_bits, from_floats = (make_cpu(config, p, dtype=dtype).forward(canvas, None, None) for p in (bits, rounded))
        np.testing.assert_array_equal(from_bits, from_floats)


def test_soft_embedding_of_one_hot_rows_is_the_lookup(config, rng):
    """K37, for every weight format."""
    config = tiny_config(residual=with_adapter())
    params = draw_params(config)
    ids = draw_ids(rng, 8)
    probs = np.zeros((8, config.vocab_size), dtype=np.float32)
    probs[np.arange(8), ids] = 1
    table = params["model.embed_tokens.weight"][ids]
    for dtype in ("float32", "bfloat16", "int8"):
        z = make_cpu(config, params, dtype=dtype).soft_embedding(probs)
        np.testing.assert_allclose(z, table, rtol=0 if dtype == "float32" else 2**-8)


def test_instruction_sets_agree(config, rng):
    from dlmrt.cpu import _native

    params, canvas = draw_params(config), draw_ids(rng, 8)
    results = [
        make_cpu(config, params, isa=isa).forward(canvas, None, None) for isa in _native.runnable_instruction_sets()
    ]
    for logits in results[1:]:
        np.testing.assert_allclose(logits, results[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(DeviceError, match="DLMRT_CPU_ISA: unknown instruction set 'avx9000'; possible here: "):
        make_cpu(config, params, isa="avx9000")


def test_what_cannot_be_done_is_refused(config, rng):
    cpu = make_cpu(config, draw_params(config))
    with pytest.raises(UsageError, match=r"token ids must lie within 0\.\.261; got 5\.\.262"):
        cpu.extend(np.array([5, 262], dtype=np.int32))
    with pytest.raises(UsageError, match="no residual pathway"):
        cpu.forward(draw_ids(rng, 8), np.zeros((8, 32), dtype=np.float32), None)
    with pytest.raises(UsageError, match="cannot truncate a context of 0 tokens to 3"):
        cpu.truncate(3)
    with pytest.raises(UsageError, match="num_threads is 0"):
        make_cpu(config, draw_params(config), num_threads=0)
    shifted = tiny_config(diffusion={"logit_shift": 1})
    with pytest.raises(UsageError, match="commit one token first"):
        make_cpu(shifted, draw_params(shifted)).forward(draw_ids(rng, 8), None, None)
    blocks = tiny_config(diffusion={"context_attention": "block_causal", "block_anchor": "position_zero"})
    cpu = make_cpu(blocks, draw_params(blocks))
    cpu.extend(draw_ids(rng, 13))
    with pytest.raises(UsageError, match="would end at 13, inside a block of 8"):
        cpu.extend(draw_ids(rng, 8))


def test_memory_is_refused_before_it_is_allocated(config, monkeypatch):
    from dlmrt.cpu import memory

    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000)
    with pytest.raises(
        DeviceError, match=r"the model needs [\d,]+ bytes .* 10,000 \(0.00 GiB\) are available; free memory"
    ):
        make_cpu(config, draw_params(config))
