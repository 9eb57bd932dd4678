"""LLaDA2 and DiffusionGemma on the cpu executor: logits of the references, the eager executor's numbers, its loops."""

from __future__ import annotations

import dataclasses
import threading

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

from dlmrt.checkpoint.load import load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.cpu import _native
from dlmrt.cpu.executor import load_denoiser
from dlmrt.decode.engine import make_denoiser
from dlmrt.errors import NonFiniteError
from dlmrt.models.config import ResidualConfig
from dlmrt.testing import tiny_config

GATE = 1e-4
CHANGES = {"llada2_tiny": {"block_size": 8, "mask_token_id": 511}}  # what the file's configuration does not say
LLADA2 = {"llada2_tiny": 8, "llada2_blockroute_indel": 8, "llada2_hd128_bf16": 32}
LLADA2_CASES = [("llada2_tiny", "fwd0"), ("llada2_tiny", "fwd1"), ("llada2_blockroute_indel", "fwd0"),
                ("llada2_hd128_bf16", "fwd0")]  # fmt: skip
GEMMA_CASES = [("dgemma_tiny", prompt) for prompt in ("prompt5", "prompt15", "prompt16", "prompt17", "prompt40")]
GEMMA_CASES += [("dgemma_hd256_bf16", "prompt20"), ("dgemma_hd256_bf16", "prompt44")]


def ids_of(expected, name):
    return expected[name].raw().astype(np.int32)


def softmax(logits):
    values = np.exp(logits - logits.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)


def draw_ids(rng, count, vocab_size=500):
    return rng.integers(0, vocab_size, count).astype(np.int32)


@pytest.fixture(scope="module")
def configs(oracle):
    """Configurations of both families by name, tiny, with the options that decide what a layer computes."""
    llada2 = open_checkpoint(oracle("llada2_tiny", block_size=8, mask_token_id=511)).config
    gemma = open_checkpoint(oracle("dgemma_tiny")).config

    def diffusion(config, **fields):
        return dataclasses.replace(config, diffusion=dataclasses.replace(config.diffusion, **fields))

    def moe(config, **fields):
        return dataclasses.replace(config, moe=dataclasses.replace(config.moe, **fields))

    return {
        "llada2": llada2,
        "llada2_block_routing": moe(llada2, expert_capacity=4),
        "llada2_no_shared_expert": moe(llada2, shared_intermediate_size=0, num_experts_per_token=1),
        "llada2_adapter": diffusion(llada2, residual=with_adapter("masked")),
        "llada2_causal": diffusion(llada2, in_block_attention="causal", context_attention="causal"),
        "gemma": gemma,
        "gemma_causal": diffusion(gemma, in_block_attention="causal"),
        "gemma_plain": diffusion(gemma, residual=ResidualConfig()),
    }


@pytest.fixture(scope="module")
def models(configs):
    """Name -> (config, eager, cpu), made once."""
    made = {}

    def get(name):
        if name not in made:
            config = configs[name]
            params = draw_params(config, seed=len(made))
            made[name] = config, make_eager(config, params), make_cpu(config, params)
        return made[name]

    return get


NAMES = ("llada2", "llada2_block_routing", "llada2_no_shared_expert", "llada2_adapter", "llada2_causal", "gemma",
         "gemma_causal", "gemma_plain")  # fmt: skip


@pytest.mark.parametrize(("name", "case"), LLADA2_CASES)
def test_llada2_logits_equal_the_reference(oracle, name, case):
    checkpoint = open_checkpoint(oracle(name, block_size=LLADA2[name], mask_token_id=511))
    expected, block = read_tensors(checkpoint.folder / "expected.safetensors"), LLADA2[name]
    denoiser, rows = load_denoiser(checkpoint, dtype="float32", num_threads=1), []
    ids = ids_of(expected, f"{case}.input_ids")
    for start in range(0, len(ids), block):
        rows.append(denoiser.forward(ids[start : start + block], None, None))
        denoiser.extend(ids[start : start + block])
    assert np.abs(np.concatenate(rows) - to_float32(expected[f"{case}.cached_logits"])).max() <= GATE


@pytest.mark.parametrize(("name", "prompt"), GEMMA_CASES)
def test_diffusion_gemma_logits_equal_the_reference(oracle, name, prompt):
    """Without and with self-conditioning, and behind a second canvas; prompts around and beyond the window."""
    checkpoint, expected = open_checkpoint(oracle(name)), read_tensors(oracle(name) / "expected.safetensors")
    denoiser = load_denoiser(checkpoint, dtype="float32", num_threads=1)
    denoiser.extend(ids_of(expected, f"{prompt}.input_ids"))
    canvas = ids_of(expected, f"{prompt}.canvas")
    z = denoiser.soft_embedding(softmax(to_float32(expected[f"{prompt}.logits"]) / np.float32(0.8)))
    got = {"logits": denoiser.forward(canvas, None, None), "logits_selfcond": denoiser.forward(canvas, z, None)}
    denoiser.extend(ids_of(expected, f"{prompt}.committed"))
    got["logits_canvas2"] = denoiser.forward(ids_of(expected, f"{prompt}.canvas2"), None, None)
    for key, logits in got.items():
        assert np.abs(logits - to_float32(expected[f"{prompt}.{key}"])).max() <= GATE, key


@pytest.mark.parametrize("name", NAMES)
def test_forwards_equal_eager(models, name, rng):
    """Contexts that grow over the window, canvases with and without a residual on all or some rows."""
    config, eager, cpu = models(name)
    block = config.diffusion.canvas_length
    for denoiser in (eager, cpu):
        denoiser.reset()
    for _ in range(3):
        ids, canvas = draw_ids(rng, 2 * block), draw_ids(rng, block)
        for denoiser in (eager, cpu):
            denoiser.extend(ids)
        logits = eager.forward(canvas, None, None)
        np.testing.assert_allclose(cpu.forward(canvas, None, None), logits, rtol=1e-4, atol=2e-4)
        if config.diffusion.residual.kind == "none":
            continue
        z = eager.soft_embedding(softmax(logits))
        np.testing.assert_allclose(cpu.soft_embedding(softmax(logits)), z, rtol=1e-4, atol=1e-4)
        for where in (None, rng.random(block) < 0.5):
            mixed = eager.forward(canvas, z, where)
            np.testing.assert_allclose(cpu.forward(canvas, z, where), mixed, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llada2_causal", "gemma_causal"])
def test_a_row_does_not_depend_on_the_others(configs, name, rng):
    """Row invariance: the same bytes alone, among others, in one chunk or several, for any number of threads."""
    config = configs[name]
    params = draw_params(config)
    ids, canvas = draw_ids(rng, 40), draw_ids(rng, 16)
    for dtype in ("float32", "int8"):
        expected = None
        for threads in (1, 3):
            cpu = make_cpu(config, params, num_threads=threads, dtype=dtype)
            cpu.extend(ids)
            logits = cpu.forward(canvas, None, None)
            expected = logits if expected is None else expected
            np.testing.assert_array_equal(logits, expected)
        cpu = make_cpu(config, params, dtype=dtype)
        cpu.extend(ids)
        for length in (1, 5, 9):
            np.testing.assert_array_equal(cpu.forward(canvas[:length], None, None), expected[:length])
        cpu.reset()
        for part in np.split(ids, [16, 24]):
            cpu.extend(part)
        np.testing.assert_array_equal(cpu.forward(canvas, None, None), expected)


@pytest.mark.parametrize("name", ["llada2", "gemma"])
def test_instruction_sets_agree(configs, name, rng):
    config = configs[name]
    params, ids, canvas, results = draw_params(config), draw_ids(rng, 40), draw_ids(rng, 8), []
    for isa in _native.runnable_instruction_sets():
        cpu = make_cpu(config, params, isa=isa)
        cpu.extend(ids)
        results.append(cpu.forward(canvas, None, None))
    for logits in results[1:]:
        np.testing.assert_allclose(logits, results[0], rtol=1e-4, atol=1e-4)


SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 11}, {"temperature": 1.0, "seed": 12, "top_k": 30})
RULES = {
    "llada2": {"commit_rule": "joint_threshold", "threshold": 0.02, "edit_threshold": 0.012, "max_post_edit_steps": 3},
    "llada2_block_routing": {"commit_rule": "threshold", "threshold": 0.02},
    "llada2_adapter": {"commit_rule": "steps", "max_denoising_steps": 3},
    "gemma": {"commit_rule": "entropy_bound", "max_denoising_steps": 5, "entropy_bound": 10.0, "stop_entropy": 1.0},
    "gemma_plain": {"commit_rule": "threshold", "threshold": 0.02},
}


@pytest.mark.parametrize("name", ["llada2", "llada2_block_routing", "llada2_adapter", "gemma_plain"])
def test_native_loop_equals_the_readable_one(models, name, rng):
    """Prompts shorter and longer than the window and than a prefill chunk; over several blocks or canvases."""
    config, eager, cpu = models(name)
    for sampling, length in zip(SAMPLINGS, (5, 50, 560), strict=True):
        request = request_for(config, draw_ids(rng, length), max_tokens=40, **RULES[name], **sampling)
        assert_same(slow(eager, request), fast(cpu, request))


def test_native_loop_with_self_conditioning_equals_the_readable_one(oracle, rng):
    """As above, on the reference's weights: drawn ones double rounding errors from step to step."""
    checkpoint = open_checkpoint(oracle("dgemma_tiny"))
    eager, cpu = make_eager(checkpoint.config, load_numpy(checkpoint)), load_denoiser(checkpoint, num_threads=1)
    for sampling, length in zip(SAMPLINGS, (5, 21, 50), strict=True):
        request = request_for(checkpoint.config, draw_ids(rng, length), max_tokens=40, **RULES["gemma"], **sampling)
        assert_same(slow(eager, request), fast(cpu, request), rtol=1e-3)


@pytest.mark.parametrize(("name", "dtype"), [("llada2", "int8"), ("gemma", "bfloat16"), ("gemma_plain", "int8")])
def test_threads_that_share_rows_give_the_same_bytes(configs, name, dtype, rng):
    """Of the layers, what is no mixture of experts; windows, gelu and values from keys included."""
    config = configs[name]
    config = dataclasses.replace(config, diffusion=dataclasses.replace(config.diffusion, canvas_length=32))
    params = draw_params(config)
    one, two = (make_cpu(config, params, dtype=dtype, num_threads=count) for count in (1, 2))
    request = request_for(config, draw_ids(rng, 21), max_tokens=70, max_denoising_steps=5)
    for _ in range(2):
        assert_bit_equal(fast(one, request), fast(two, request))


@pytest.mark.parametrize("name", ["llada2", "gemma"])
def test_a_request_does_not_see_the_one_before(configs, name, rng):
    """K05: the second, shorter request gives the bytes of a fresh engine."""
    config = configs[name]
    params = draw_params(config)
    used = make_cpu(config, params)
    for _ in range(5):
        settings = {"max_tokens": 20, **RULES[name]}
        fast(used, request_for(config, draw_ids(rng, 60), **settings))
        request = request_for(config, draw_ids(rng, int(rng.integers(1, 40))), **settings)
        assert_bit_equal(fast(used, request), fast(make_cpu(config, params), request))


@pytest.mark.parametrize("name", ["llada2_tiny", "dgemma_tiny"])
def test_auto_takes_the_native_executor(oracle, name):
    checkpoint = open_checkpoint(oracle(name, **CHANGES.get(name, {})))
    assert make_denoiser(checkpoint, executor="auto", dtype="auto", num_threads=1).name == "cpu"


@pytest.mark.parametrize("name", ["llada2", "llada2_block_routing"])
def test_a_poisoned_row_fails_its_request_alone(configs, name):
    """K11: a row of NaN is routed to experts that exist, and the next request does not see it."""
    config = configs[name]
    params = draw_params(config)
    params["model.word_embeddings.weight"][77] = np.nan
    cpu = make_cpu(config, params, dtype="int8")
    with pytest.raises(NonFiniteError, match="block 0, step 0"):
        fast(cpu, request_for(config, [5, 77, *range(100, 110)], max_tokens=8))
    good = request_for(config, range(100, 110), max_tokens=8)
    assert_bit_equal(fast(cpu, good), fast(make_cpu(config, params, dtype="int8"), good))


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.02), ("int8", 0.06)])
@pytest.mark.parametrize("name", ["llada2_tiny", "dgemma_tiny"])
def test_smaller_types_stay_near_fp32(oracle, name, dtype, limit, rng):
    """The median row: where rounding sends a row to another expert it differs by whole units, as in any executor."""
    checkpoint = open_checkpoint(oracle(name, **CHANGES.get(name, {})))
    exact = make_eager(checkpoint.config, load_numpy(checkpoint))
    cpu = load_denoiser(checkpoint, dtype=dtype, num_threads=1)
    assert median_error(cpu, exact, rng) < limit


def median_error(denoiser, exact, rng):
    """Relative, of the logits' rows of a canvas behind 64 ids."""
    ids, canvas, results = draw_ids(rng, 64), draw_ids(rng, 16), []
    for each in (exact, denoiser):
        each.extend(ids)
        results.append(each.forward(canvas, None, None))
    return np.median(np.linalg.norm(results[1] - results[0], axis=1) / np.linalg.norm(results[0], axis=1))


@pytest.mark.parametrize(("source", "format", "dialect"), [
    ("llada2_tiny", "nvfp4", "modelopt"), ("llada2_tiny", "nvfp4", "compressed-tensors"),
    ("llada2_tiny", "int8", "compressed-tensors"), ("dgemma_tiny", "nvfp4", "modelopt"),
    ("dgemma_tiny", "int8", "compressed-tensors"),
])  # fmt: skip
def test_quantised_experts_keep_their_codes(oracle, tmp_path, rng, source, format, dialect):
    from dlmrt.checkpoint.convert import convert_checkpoint
    from dlmrt.cpu.weights import FileParams, Stacked, kept_formats

    original = open_checkpoint(oracle(source, **CHANGES.get(source, {})))
    convert_checkpoint(tmp_path / "model", original, format=format, dialect=dialect)
    checkpoint = open_checkpoint(tmp_path / "model")
    weights = checkpoint.weights()
    kept = kept_formats(weights)
    assert set(kept.values()) == {format} and all(".experts." in name for name in kept)
    stack = FileParams(weights, kept)[next(iter(kept))]
    assert isinstance(stack, Stacked) and stack[0].format == format
    exact = make_eager(checkpoint.config, load_numpy(checkpoint))
    denoiser = load_denoiser(checkpoint, num_threads=1)
    assert denoiser.dtype == format
    assert median_error(denoiser, exact, rng) < 0.04
    same, canvas = load_denoiser(checkpoint, dtype="float32", num_threads=1), draw_ids(rng, 16)
    exact.reset()
    np.testing.assert_allclose(same.forward(canvas, None, None), exact.forward(canvas, None, None), atol=GATE)


def load_numpy(checkpoint):
    return {name: values.float().numpy() for name, values in load_params(checkpoint, dtype="float32").items()}


@pytest.mark.parametrize("prompt", [3, 8, 13, 530, 1040])
def test_blocks_on_a_grid_from_the_prompts_end(prompt, rng):
    """Context blocks start where the prompt ends modulo their length, over the bounds of prefill chunks; K05."""
    config = tiny_config(max_position_embeddings=2048, diffusion={"context_attention": "block_causal"})
    params = draw_params(config)
    eager, cpu = make_eager(config, params), make_cpu(config, params)
    ids, canvas = draw_ids(rng, prompt, 250), draw_ids(rng, 8, 250)
    for denoiser in (eager, cpu):
        denoiser.extend(ids)
    for _ in range(2):
        np.testing.assert_allclose(cpu.forward(canvas, None, None), eager.forward(canvas, None, None), atol=5e-5)
        for denoiser in (eager, cpu):
            denoiser.extend(canvas)
    request = request_for(config, ids, max_tokens=20, threshold=0.02, cancel=threading.Event())
    assert_same(slow(eager, request), fast(cpu, request))
