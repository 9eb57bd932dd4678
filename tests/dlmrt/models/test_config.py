"""config.json -> ModelConfig: what is read, what is refused, and that writing it back loses nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.checkpoint.save import config_to_json
from dlmrt.errors import CheckpointError, UnsupportedModelError
from dlmrt.models.config import DiffusionConfig, ResidualConfig, RopeConfig, load_config, parse_config

RAW = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": [1, 3], "pad_token_id": 2, "bos_token_id": 4,
    "diffusion": {"canvas_length": 4, "noise": "mask", "mask_token_id": 60},
}  # fmt: skip


def changed(**changes):
    raw = copy.deepcopy(RAW)
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = raw
        for parent in parents:
            target = target.setdefault(parent, {})
        target[key] = value
    return raw


def test_reference_configs(data):
    sdar = load_config(data / "qwen3_bd_tiny")
    assert sdar.architecture == "SDARForCausalLM" and sdar.eos_token_ids == (508,) and sdar.rope.theta == 1e6
    assert sdar.diffusion == DiffusionConfig(
        canvas_length=8, noise="mask", mask_token_id=511, context_attention="block_causal", block_anchor="position_zero"
    )
    qwen = load_config(data / "qwen3_hd128_tied_bf16")
    assert qwen.diffusion is None and qwen.tie_word_embeddings and qwen.dtype == "bfloat16" and qwen.head_dim == 128


def test_order_of_belief():
    """Our section wins over upstream keys, those over the built-in row; raising one keeps the others (K69)."""
    sdar = changed(architectures=["SDARForCausalLM"], vocab_size=151936, diffusion=None)
    assert parse_config(sdar).diffusion.canvas_length == 4 and parse_config(sdar).diffusion.mask_token_id == 151669
    upstream = parse_config({**sdar, "block_size": 16, "mask_token_id": 7}).diffusion
    assert (upstream.canvas_length, upstream.mask_token_id, upstream.context_attention) == (16, 7, "block_causal")
    ours = parse_config({**sdar, "block_size": 16, "diffusion": {"canvas_length": 32}}).diffusion
    assert (ours.canvas_length, ours.mask_token_id, ours.block_anchor) == (32, 151669, "position_zero")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"diffusion__mask_token_id": 1}, "equals eos_token_id"),
        ({"diffusion__mask_token_id": 3}, "equals eos_token_id"),
        ({"diffusion__mask_token_id": 2}, "equals pad_token_id"),
        ({"diffusion__mask_token_id": 4}, "equals bos_token_id"),
        ({"diffusion__mask_token_id": 61}, "outside the table"),
        ({"diffusion__mask_token_id": -1}, "outside the table"),
        ({"diffusion__mask_token_id": None}, "never guessed"),
        ({"diffusion__mask_token_id": True}, "whole number"),
        ({"diffusion__noise": "uniform"}, "no mask token"),
    ],
)
def test_mask_id_that_is_another_token_is_refused(changes, named):
    """K56"""
    with pytest.raises(CheckpointError, match=named):
        parse_config(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"head_dim": 7}, "odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"diffusion__canvas_length": None}, "canvas_length"),
        ({"diffusion__canvas_length": 0}, "canvas_length"),
        ({"diffusion__canvas_length": 257}, "canvas_length"),
        ({"diffusion__canvas_length": 4.5}, "canvas_length"),
        ({"diffusion__canvas_lenght": 4}, "did you mean 'canvas_length'"),
        ({"diffusion__logit_shift": 2}, "logit_shift"),
        ({"diffusion__noise": "white"}, "noise"),
        ({"diffusion__context_attention": "backwards"}, "context_attention"),
        ({"diffusion__residual__kind": "gated_mlp"}, "intermediate_size"),
        ({"diffusion__residual__knd": "none"}, "did you mean 'kind'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, r"rope\.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4}}, "positive and rise"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}}, "beta_slow, beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "attention_factor": -1}}, "attention_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_theta": None}, "no 'rope_theta'"),
        ({"rope_theta": "1e6"}, r"rope\.theta is '1e6'"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers is 2\.0; it must be a whole number"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ({"head_dim": 0}, "head_dim"),
        ({"rms_norm_eps": 1e9}, "rms_norm_eps"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"eos_token_id": 61}, "eos_token_id 61 is outside the table"),
        ({"eos_token_id": [1, -1]}, "eos_token_id -1 is outside the table"),
        ({"eos_token_id": "1"}, "eos_token_id is '1'"),
        ({"pad_token_id": 10**9}, "pad_token_id 1000000000 is outside the table"),
        ({"pad_token_id": "<pad>"}, "pad_token_id is '<pad>'"),
        ({"bos_token_id": [4]}, "bos_token_id"),
        ({"diffusion": False}, "diffusion is False"),
        ({"diffusion__residual": []}, r"residual is \[\]"),
        ({"diffusion__residual__alpha": "1"}, r"residual\.alpha is '1'"),
        ({"diffusion__residual__scale_embedding": 1}, "scale_embedding is 1; it must be true or false"),
        ({"diffusion__residual__intermediate_size": 8}, r"no effect with residual\.kind 'none'"),
        ({"diffusion__commit_rule": ["threshold"]}, "commit_rule"),
        ({"dtype": 16}, "dtype is 16"),
    ],
)
def test_contradictions_are_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named):
        parse_config(changed(**changes), source="folder/config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["NoSuchModel"]}, "supported: .*Qwen3ForCausalLM.*SDARForCausalLM"),
        ({"architectures": ["DreamModel"]}, "recognised but not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1}}, "mscale"),
        ({"rope_scaling": {"factor": 4.0}}, "rope key 'factor' is not implemented for rope_type 'default'"),
        ({"dtype": "float64"}, "dtype 'float64' is not implemented; supported: float32, bfloat16, float16"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, named):
    """K31 (unknown rope type), K34 (unknown architecture)"""
    with pytest.raises(UnsupportedModelError, match=named):
        parse_config(changed(**changes))


def test_rope_spellings():
    old = parse_config(changed(rope_scaling={"type": "linear", "factor": 2.0}))
    new = parse_config(changed(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}))
    assert old.rope == new.rope == RopeConfig(theta=1e6, kind="linear", factor=2.0)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": NaN', "[" * 100_000, "\udcff", '{"a": 1, "a": 2}'])
def test_damaged_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is not a file"):
        load_config(tmp_path)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(key=st.sampled_from([*RAW, "rope_scaling", "rope_parameters", "block_size", "dtype"]), value=JSON_VALUES)
def test_any_value_gives_a_config_or_a_checkpoint_error(key, value):
    try:
        parse_config({**RAW, key: value})
    except CheckpointError as error:
        assert "config.json" in str(error)


@given(key=st.sampled_from([f.name for f in dataclasses.fields(DiffusionConfig)]), value=JSON_VALUES)
def test_any_diffusion_value_gives_a_config_or_a_checkpoint_error(key, value):
    try:
        parse_config(changed(**{f"diffusion__{key}": value}))
    except CheckpointError as error:
        assert "config.json" in str(error)


ROPES = st.one_of(
    st.builds(RopeConfig, theta=st.floats(1, 1e7)),
    st.builds(RopeConfig, kind=st.just("linear"), factor=st.floats(1, 64)),
    st.builds(RopeConfig, kind=st.just("llama3"), factor=st.floats(1, 64), low_freq_factor=st.floats(0.5, 1),
              high_freq_factor=st.floats(2, 8), original_max_position_embeddings=st.integers(1, 9999)),
    st.builds(RopeConfig, kind=st.just("yarn"), factor=st.floats(1, 64), beta_fast=st.floats(8, 64),
              beta_slow=st.floats(0.5, 2), original_max_position_embeddings=st.integers(1, 9999),
              attention_factor=st.none() | st.floats(0.5, 2)),
)  # fmt: skip
DIFFUSIONS = st.none() | st.builds(
    DiffusionConfig, canvas_length=st.integers(1, 256), noise=st.just("mask"), mask_token_id=st.integers(5, 60),
    logit_shift=st.integers(0, 1), in_block_attention=st.sampled_from(["bidirectional", "causal"]),
    context_attention=st.sampled_from(["causal", "block_causal"]), block_anchor=st.just("position_zero"),
    residual=st.builds(
        ResidualConfig, kind=st.just("gated_mlp"), where=st.sampled_from(["all", "masked"]), alpha=st.floats(-2, 2),
        scale_embedding=st.booleans(), intermediate_size=st.integers(1, 99),
    ),
)  # fmt: skip


@given(rope=ROPES, diffusion=DIFFUSIONS, architecture=st.sampled_from(["Qwen3ForCausalLM", "SDARForCausalLM"]))
def test_written_config_reads_back_equal(rope, diffusion, architecture):
    config = dataclasses.replace(parse_config(RAW), rope=rope, diffusion=diffusion, architecture=architecture)
    if architecture == "SDARForCausalLM" and diffusion is None:
        config = dataclasses.replace(config, architecture="Qwen3ForCausalLM")
    assert parse_config(json.loads(json.dumps(config_to_json(config)))) == config
