"""Bytes of published shapes, as computed by hand from their configurations, and of files that are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.checkpoint import footprint
from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.models.config import parse_config


@pytest.fixture
def config_of(data):
    def read(name):
        return parse_config(json.loads((data / "configs" / f"{name}.json").read_text()))

    return read


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llada2.1-mini", 16.256), ("llada2.1-flash", 102.89), ("sdar-4b-chat", 4.411), ("qwen3-4b", 4.022),
     ("diffusiongemma-26b-a4b", 25.25)],
)  # fmt: skip
def test_parameters_of_published_shapes(config_of, name, billions):
    sizes = footprint.float_sizes(config_of(name), "bfloat16")
    assert sum(sizes.values()) / 2e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "rows", "experts", "format", "policy", "gigabytes"),
    [
        ("llada2.1-mini", 32, None, None, None, 20.8),
        ("llada2.1-mini", 32, None, "nvfp4", "experts", 6.76),
        ("llada2.1-mini", 32, 69.5, None, None, 9.57),
        ("llada2.1-mini", 32, 69.5, "nvfp4", "experts", 3.60),
        ("llada2.1-mini", 32, 48, None, None, 7.00),
        ("llada2.1-mini", 32, 48, "nvfp4", "experts", 2.88),
        ("llada2.1-mini", 32, 16.5, "nvfp4", "experts", 1.82),
        ("llada2.1-mini", 1, None, None, None, 2.22),  # 8 of 256 experts: one token at a time
        ("llada2.1-flash", 32, 69.5, None, None, 59.0),
        ("llada2.1-flash", 32, 69.5, "nvfp4", "experts", 20.0),
        ("qwen3-4b", 1, None, None, None, 8.04),
        ("qwen3-4b", 1, None, "nvfp4", "linears", 2.82),
        ("diffusiongemma-26b-a4b", 256, None, None, None, 52.0),
        ("diffusiongemma-26b-a4b", 256, None, "nvfp4", "experts", 19.15),
        ("diffusiongemma-26b-a4b", 256, None, "nvfp4", "linears", 16.8),
    ],
)
def test_bytes_that_a_forward_reads(config_of, name, rows, experts, format, policy, gigabytes):
    config = config_of(name)
    sizes = (
        footprint.float_sizes(config, "bfloat16") if format is None
        else footprint.quantized_sizes(config, format, policy)
    )  # fmt: skip
    read = footprint.read_bytes(config, sizes, rows=rows, experts=experts)
    assert read / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_keys_and_values(config_of):
    kibibytes = {"llada2.1-mini": 40, "llada2.1-flash": 64, "qwen3-4b": 144, "diffusiongemma-26b-a4b": 220}
    for name, per_token in kibibytes.items():
        assert footprint.kv_bytes(config_of(name), 3) == 3 * per_token * 1024
    gemma = config_of("diffusiongemma-26b-a4b")  # 20 KiB of full layers, 200 of those that see 1023 tokens
    assert footprint.kv_bytes(gemma, 8192, is_read=True) == (20 * 8192 + 200 * 1023) * 1024


@settings(max_examples=30)
@given(rows=st.integers(1, 4096))
def test_experts_that_rows_touch(make_config, rows):
    """Between those of one row and all of them, more with more rows, and never more than a block may use."""
    from dlmrt.models.config import MoeConfig

    moe = MoeConfig(num_experts=64, num_experts_per_token=4, intermediate_size=8)
    touched = footprint.touched_experts(make_config(moe=moe), rows)
    assert touched + 1e-9 >= 4 and touched <= 64
    assert footprint.touched_experts(make_config(moe=moe), rows + 1) >= touched
    capped = MoeConfig(num_experts=64, num_experts_per_token=4, intermediate_size=8, expert_capacity=20)
    assert footprint.touched_experts(make_config(moe=capped), rows) == min(touched, 20)


@pytest.mark.parametrize(
    ("name", "format", "policy"),
    [("llada2_tiny", "nvfp4", "experts"), ("llada2_tiny", "int8", "linears"), ("dgemma_tiny", "fp8", "experts")],
)
def test_sizes_are_those_of_the_written_file(tmp_path, oracle, name, format, policy):
    changes = {"block_size": 8, "mask_token_id": 511} if name == "llada2_tiny" else {}
    source = open_checkpoint(oracle(name, **changes))
    held = sum(tensor.num_bytes for name, tensor in source.stored.items() if "vision" not in name)  # not loaded
    assert sum(footprint.stored_sizes(source.weights()).values()) == held
    done = convert_checkpoint(tmp_path / "q", source, format=format, policy=policy)
    sizes = footprint.quantized_sizes(source.config, format, policy)
    assert sum(sizes.values()) == done.num_bytes
    assert footprint.stored_sizes(open_checkpoint(tmp_path / "q").weights()) == sizes


def test_what_a_format_cannot_hold_is_left_out(oracle):
    config = open_checkpoint(oracle("llada2_tiny", block_size=8, mask_token_id=511)).config
    assert footprint.quantized_sizes(config, "int4", "experts") is None  # rows of 64
