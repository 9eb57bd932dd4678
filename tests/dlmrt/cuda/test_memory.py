"""What a model holds of the device's memory: what is refused, what a refusal leaves, which programs are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs_cuda import assert_same, draw_params, fast, make_cuda, make_eager, request_for, slow, small_config

from dlmrt.cuda import programs
from dlmrt.cuda.weights import Packed, weight_bytes
from dlmrt.errors import DeviceError, OutOfMemoryError
from dlmrt.program import store
from dlmrt.program.nodes import Buffer

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("small_chunks")]

PROMPT = np.arange(3, 7, dtype=np.int32)
CANVAS = np.arange(11, 15, dtype=np.int32)
FEW = {"max_tokens": 4, "temperature": 0, "max_denoising_steps": 2}


@pytest.fixture
def config():
    return replace(small_config(), max_position_embeddings=1 << 16)


@pytest.fixture
def limit(monkeypatch):
    """Sets how many bytes are available."""
    return lambda count: monkeypatch.setattr(programs, "available_bytes", lambda device: count)


def test_a_refused_request_leaves_room_for_the_next_one(config, limit, runners):
    params = draw_params(config)
    denoiser, small = make_cuda(config, params), request_for(config, PROMPT, **FEW)
    limit(1_000_000)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=r"the model needs [\d,]{9,} bytes .* of memory, 1,000,000 "):
            fast(denoiser, request_for(config, PROMPT, **FEW | {"max_tokens": 40_000}))
    assert_same(fast(denoiser, small), slow(make_eager(config, params), small))
    assert denoiser._store.capacity == 1024


def test_a_refused_extension_leaves_the_context_as_it_was(config, limit):
    denoiser = make_cuda(config, draw_params(config))
    denoiser.extend(PROMPT)
    expected = denoiser.forward(CANVAS, None, None)
    limit(1_000_000)
    with pytest.raises(OutOfMemoryError, match="the model needs"):
        denoiser.extend(np.zeros(30_000, dtype=np.int32))
    assert denoiser.context_length == len(PROMPT)
    np.testing.assert_array_equal(denoiser.forward(CANVAS, None, None), expected)


def test_a_context_is_not_rounded_up_past_what_fits(config, limit):
    """1100 positions: 2048 would be rounder."""
    denoiser = make_cuda(config, draw_params(config))
    denoiser.extend(PROMPT)
    expected = denoiser.forward(CANVAS, None, None)
    layer = config.attention(0)
    limit(600 * (2 * layer.num_kv_heads * layer.head_dim * 4 + layer.head_dim * 4))  # the cache and the rotary tables
    denoiser._store.reserve(1100, len(PROMPT))
    np.testing.assert_array_equal(denoiser.forward(CANVAS, None, None), expected)
    assert denoiser._store.capacity == 1536


@pytest.mark.parametrize("place", ["_load_weights", "_grow_context", "_replace_arena", "_bind"])
def test_what_the_device_refuses_in_spite_of_its_numbers_leaves_the_engine_usable(config, monkeypatch, place):
    """Free memory may lie in pieces; whatever was replaced by then, the context keeps what it held."""
    denoiser = make_cuda(config, draw_params(config))
    denoiser.extend(PROMPT)
    expected = denoiser.forward(CANVAS, None, None)

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(denoiser._store, place, refuse)
        patch.setattr(denoiser._store, "_arena_bytes", lambda: 0)
        with pytest.raises(DeviceError, match="does not fit the device: CUDA out of memory. Tried to allocate 2.00"):
            denoiser.extend(np.zeros(1100, dtype=np.int32))
    assert denoiser.context_length == len(PROMPT) and denoiser._store.capacity == 1024
    np.testing.assert_array_equal(denoiser.forward(CANVAS, None, None), expected)


def test_few_programs_are_kept_and_the_oldest_leaves_with_its_graph(monkeypatch, runners):
    monkeypatch.setattr(store, "MAX_PROGRAMS", 3)
    config = small_config()
    denoiser = make_cuda(config, draw_params(config))
    denoiser._store._drop_programs(0)
    denoiser._store._replace_arena(1 << 20)  # for all of them: a larger one would drop all that are there
    closed = []
    kinds = [{}, {"temperature": 0.5}, {"commit_rule": "steps"}, {}, {"commit_rule": "joint_threshold"}]
    for settings in kinds:
        fast(denoiser, request_for(config, PROMPT, **{"temperature": 0, **FEW, "max_denoising_steps": 1, **settings}))
        closed.append([runner.driver.is_closed for runner in runners if runner.mode == "loop"])
    assert closed == [[False], [False] * 2, [False] * 3, [False] * 3, [False, True, False, False]]


def test_packed_weights_are_counted_with_their_scales():
    nvfp4 = Packed(
        values=torch.zeros(3, 8, 32, dtype=torch.uint8), scales=torch.zeros(3, 8, 4).to(torch.float8_e4m3fn),
        shared=torch.zeros(3, 8),
    )  # fmt: skip
    fp8 = Packed(values=torch.zeros(8, 64).to(torch.float8_e4m3fn), scales=torch.zeros(8))
    for held, dtype, shape in ((nvfp4, "nvfp4", (3, 8, 64)), (fp8, "fp8", (8, 64))):
        tensors = (held.values, held.scales, held.shared)
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        assert weight_bytes(Buffer(name="w", kind="weight", dtype=dtype, shape=shape)) == size
