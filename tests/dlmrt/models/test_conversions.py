"""Spellings of config.json by which conversions of Qwen are released, and the settings that they stand for."""

from __future__ import annotations

import json
import math

import pytest

from dlmrt.checkpoint.config_json import config_to_json
from dlmrt.errors import CheckpointError, UnsupportedModelError
from dlmrt.models.config import DiffusionConfig, parse_config
from dlmrt.models.families import family_of

MASKED_GRID = {"noise": "mask", "context_attention": "block_causal"}
IDLM = {"noise": "mask", "logit_shift": 1, "in_block_attention": "causal"}
SDAR = DiffusionConfig(canvas_length=4, mask_token_id=151669, block_anchor="position_zero", **MASKED_GRID)
A2D, A2D_QWEN2 = (DiffusionConfig(canvas_length=32, mask_token_id=mask, **MASKED_GRID) for mask in (151669, 151665))
FAST = DiffusionConfig(
    canvas_length=32, mask_token_id=151665, block_anchor="position_zero", logit_shift=1, commit_rule="sub_blocks",
    **MASKED_GRID,
)  # fmt: skip

# File, what the user adds to it, diffusion settings, parameters.
TABLE = [
    ("sdar-4b-chat", {}, SDAR, 4_411_424_256),
    ("trado-8b-instruct", {}, SDAR, 8_190_735_360),
    ("i-dlm-8b", {}, DiffusionConfig(canvas_length=2, mask_token_id=151669, **IDLM), 8_190_735_360),
    ("a2d-qwen3-0.6b", {"block_size": 32}, A2D, 596_049_920),
    ("a2d-qwen2.5-0.5b", {"diffusion": {"canvas_length": 32}}, A2D_QWEN2, 494_032_768),
    ("fast-dllm-v2-7b", {}, FAST, 7_615_616_512),
    ("fast-dllm-v2-1.5b", {}, FAST, 1_543_714_304),
]


def raw_config(data, name, **changes):
    return {**json.loads((data / "configs" / f"{name}.json").read_text()), **changes}


@pytest.mark.parametrize(("name", "added", "diffusion", "num_params"), TABLE, ids=[row[0] for row in TABLE])
def test_spelling(data, name, added, diffusion, num_params):
    config = parse_config(raw_config(data, name, **added))
    assert config.diffusion == diffusion
    assert sum(math.prod(shape) for shape in family_of(config).tensor_shapes(config).values()) == num_params
    assert parse_config(config_to_json(config)) == config


@pytest.mark.parametrize("block", [1, 2, 3, 4, 8, 64])
def test_one_architecture_name_for_two_conventions(data, block):
    """I-DLM is released under SDAR's architecture name; only its strides of 1 to 3 tell it apart."""
    diffusion = parse_config(raw_config(data, "sdar-4b-chat", block_size=block)).diffusion
    is_idlm = block <= 3
    assert (diffusion.canvas_length, diffusion.logit_shift) == (block, int(is_idlm))
    assert diffusion.in_block_attention == ("causal" if is_idlm else "bidirectional")


def test_qwendlm_is_qwen3_with_a_section(data):
    """Its own file is not public: uniform noise on a canvas of 256, named by the section that a user adds."""
    section = {"canvas_length": 256, "noise": "uniform", "commit_rule": "entropy_bound"}
    diffusion = parse_config(raw_config(data, "qwen3-4b", diffusion=section)).diffusion
    assert diffusion == DiffusionConfig(canvas_length=256, noise="uniform", commit_rule="entropy_bound")
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM with a 'diffusion' section"):
        parse_config(raw_config(data, "qwen3-4b", architectures=["QwenDLMForDiffusion"]))


def test_plain_qwen2_is_auto_regressive(data):
    config = parse_config(raw_config(data, "fast-dllm-v2-1.5b", architectures=["Qwen2ForCausalLM"]))
    assert config.diffusion is None and config.has_qkv_bias
    assert parse_config(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("a2d-qwen3-0.6b", {}, '"block_size": 32'),
        ("a2d-qwen2.5-0.5b", {"block_size": None}, "mdlm"),
        ("fast-dllm-v2-7b", {"bd_size": 32.0}, r"bd_size is 32\.0"),
        ("fast-dllm-v2-7b", {"bd_size": 0}, "canvas_length"),
        ("fast-dllm-v2-7b", {"attention_bias": False}, "attention_bias=False"),
        ("sdar-4b-chat", {"block_size": "4"}, "block_size is '4'"),
        ("sdar-4b-chat", {"attention_bias": 0}, "attention_bias=0"),
    ],
)
def test_what_a_spelling_cannot_mean_is_refused(data, name, changes, named):
    """K20"""
    with pytest.raises(CheckpointError, match=named):
        parse_config(raw_config(data, name, **changes))
