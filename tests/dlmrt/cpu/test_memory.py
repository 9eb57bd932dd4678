"""What a model holds of the memory: how much there is, what is refused, and what a refusal leaves."""

from __future__ import annotations

import numpy as np
import pytest
from pairs import assert_bit_equal, draw_params, fast, make_cpu, request_for

from dlmrt.cpu import memory, programs
from dlmrt.errors import DeviceError
from dlmrt.program import store
from dlmrt.testing import tiny_config

PROMPT = np.arange(3, 24, dtype=np.int32)


@pytest.fixture
def long_config():
    return tiny_config(max_position_embeddings=1 << 16)


@pytest.fixture
def limit(monkeypatch):
    """Sets how many bytes are available."""
    return lambda count: monkeypatch.setattr(memory, "available_bytes", lambda: count)


def test_a_refused_request_leaves_room_for_the_next_one(long_config, limit):
    cpu = make_cpu(long_config, draw_params(long_config))
    small = request_for(long_config, PROMPT, max_tokens=20)
    expected = fast(cpu, small)
    limit(1_000_000)
    for _ in range(2):
        with pytest.raises(DeviceError, match="the model needs"):
            fast(cpu, request_for(long_config, PROMPT, max_tokens=40_000))
    assert_bit_equal(fast(cpu, small), expected)
    assert cpu._store.capacity == 1024


def test_a_refused_extension_leaves_the_context_as_it_was(long_config, limit, rng):
    cpu = make_cpu(long_config, draw_params(long_config))
    canvas = rng.integers(0, 250, 8).astype(np.int32)
    cpu.extend(PROMPT)
    expected = cpu.forward(canvas, None, None)
    limit(1_000_000)
    with pytest.raises(DeviceError, match="the model needs"):
        cpu.extend(np.zeros(30_000, dtype=np.int32))
    assert cpu.context_length == len(PROMPT)
    np.testing.assert_array_equal(cpu.forward(canvas, None, None), expected)
    cpu.extend(PROMPT)
    assert cpu.context_length == 2 * len(PROMPT)


def test_a_context_is_not_rounded_up_past_what_fits(long_config, limit, rng):
    """1100 positions: 2048 would be rounder."""
    cpu = make_cpu(long_config, draw_params(long_config))
    cpu.extend(PROMPT)
    canvas = rng.integers(0, 250, 8).astype(np.int32)
    expected = cpu.forward(canvas, None, None)
    layers = map(long_config.attention, range(long_config.num_layers))
    position = sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in layers)
    limit(600 * position)
    cpu.extend(rng.integers(0, 250, 1079).astype(np.int32))
    assert cpu._store.capacity == 1152
    cpu.truncate(len(PROMPT))
    np.testing.assert_array_equal(cpu.forward(canvas, None, None), expected)


def test_few_programs_are_kept_and_the_oldest_leaves(config, monkeypatch):
    monkeypatch.setattr(store, "MAX_PROGRAMS", 5)
    cpu = make_cpu(config, draw_params(config))
    expected = {}
    for length in (4, 8, 16, 24, 32, 4, 8):
        events = fast(cpu, request_for(config, PROMPT, max_tokens=20, canvas_length=length))
        assert_bit_equal(events, expected.setdefault(length, events))
        assert len(cpu._store._programs) <= 5
    assert [key[1].canvas_length for key in cpu._store._programs] == [16, 24, 32, 4, 8]


def test_the_ring_is_counted_before_it_is_made(config, limit):
    cpu = make_cpu(config, draw_params(config))
    canvas = 64
    fast(cpu, request_for(config, PROMPT, max_tokens=20))  # the arena is there
    limit(programs.RING_SLOTS * 20 * canvas)
    with pytest.raises(DeviceError, match="the model needs"):
        fast(cpu, request_for(config, PROMPT, max_tokens=200, canvas_length=canvas))


def test_a_value_that_is_no_number_stays_none_in_bfloat16(config):
    """Rounding alone carries the NaN 0x7fffffff on to 0."""
    params = draw_params(config)
    params["model.embed_tokens.weight"].view(np.uint32)[5, 3] = 0x7FFFFFFF
    logits = make_cpu(config, params, dtype="bfloat16").forward(np.full(8, 5, dtype=np.int32), None, None)
    assert np.isnan(logits).all()


def test_the_control_groups_of_the_process_limit_memory(tmp_path, monkeypatch):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    inner = groups / "outer" / "inner"
    (proc / "self").mkdir(parents=True)
    inner.mkdir(parents=True)
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_GROUPS", groups)
    assert memory.available_bytes() is None
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 90 kB\n")
    (proc / "self" / "cgroup").write_text("1:name=systemd:/other\n0::/outer/inner\n")
    assert memory.available_bytes() == 90 * 1024
    for folder, limit, used in ((inner, "max", "700"), (inner.parent, "5000", "4000"), (groups, "9000", "8500")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 1000\nactive_file 500\n")
    assert memory.available_bytes() == 9000 - 8500 + 1500
    (inner / "memory.max").write_text("800\n")
    (inner / "memory.stat").write_text("anon 700\ninactive_file 30\nactive_file 20\n")
    assert memory.available_bytes() == 800 - 700 + 50
