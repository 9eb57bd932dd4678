"""Keys of released config files: whatever type a value has, it is read as it is or refused by name, never converted."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmrt.errors import CheckpointError
from dlmrt.models.config import parse_config

LLADA2 = (
    "moe_intermediate_size", "num_shared_experts", "num_experts", "num_experts_per_tok", "first_k_dense_replace",
    "n_group", "topk_group", "expert_capacity", "moe_shared_expert_intermediate_size",
)  # fmt: skip
GEMMA = (
    "num_experts", "top_k_experts", "moe_intermediate_size", "num_hidden_layers", "num_key_value_heads",
    "sliding_window", "intermediate_size", "self_conditioning_size", "global_head_dim", "num_global_key_value_heads",
    "head_dim",
)  # fmt: skip
KEYS = [("llada2.1-mini", (key,)) for key in LLADA2] + [
    ("diffusiongemma-26b-a4b", ("text_config", key)) for key in GEMMA
]
NOT_WHOLE = [4.0, 4.7, "4", True, [4], {"4": 4}]


def changed(data, name, path, value):
    raw = json.loads((data / "configs" / f"{name}.json").read_text())
    target = raw
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return raw


@pytest.mark.parametrize(("name", "path"), KEYS, ids=[f"{name}-{path[-1]}" for name, path in KEYS])
@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_a_number_is_not_converted(data, name, path, value):
    with pytest.raises(CheckpointError, match=path[-1]):
        parse_config(changed(data, name, path, value))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("routed_scaling_factor",), "2.5", "routed_scaling_factor"),
        (("routed_scaling_factor",), True, "routed_scaling_factor"),
        (("partial_rotary_factor",), "0.5", "partial_rotary_factor"),
        (("norm_topk_prob",), 1, "norm_topk_prob"),
        (("use_bias",), 0, "use_bias"),
    ],
)
def test_llada2_values_of_another_type(data, path, value, named):
    with pytest.raises(CheckpointError, match=named):
        parse_config(changed(data, "llada2.1-mini", path, value))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(0, 64), (-1, 64), (128, "64"), (128.0, 64)])
def test_share_of_the_head_that_turns(data, head_dim, rotary_dim):
    raw = changed(data, "llada2.1-mini", ("partial_rotary_factor",), None)
    with pytest.raises(CheckpointError, match="head_dim|rotary_dim"):
        parse_config({**raw, "head_dim": head_dim, "rotary_dim": rotary_dim})


FULL = {"head_dim": 512, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers"),  # the layers are listed before anything else is checked
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("num_hidden_layers", -3, "num_hidden_layers"),
        ("layer_types", "full_attention", "layer_types"),
        ("layer_types", [["full_attention"]] * 30, "layer_types"),
        ("layer_types", ["full_attention"] * 29, "layer_types"),
        ("per_layer_config", [FULL], "per_layer_config"),
        ("per_layer_config", {"5": FULL}, "per_layer_config"),
        ("per_layer_config", dict.fromkeys(("5", "11", "17", "23", "29"), 512), "per_layer_config"),
        ("per_layer_config", {key: {"head_dim": "512"} for key in ("5", "11", "17", "23", "29")}, "head_dim"),
        ("per_layer_config", {**dict.fromkeys(("5", "11", "17", "23"), FULL), "29.0": FULL}, "per_layer_config"),
        ("rope_parameters", [1], "rope_parameters"),
        ("rope_parameters", {"sliding_attention": 1e4}, "sliding_attention"),
    ],
)
def test_gemma_layers(data, key, value, named):
    with pytest.raises(CheckpointError, match=named):
        parse_config(changed(data, "diffusiongemma-26b-a4b", ("text_config", key), value))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ["llada2.1-mini", "diffusiongemma-26b-a4b", "fast-dllm-v2-7b", "i-dlm-8b"])
@given(choice=st.integers(0, 10**6), value=JUNK)
def test_any_value_under_any_key_is_read_or_refused(data, name, choice, value):
    """No value ends in another exception, in a loop over a billion layers, or in a config of wrong types."""
    raw = json.loads((data / "configs" / f"{name}.json").read_text())
    places = [(raw, key) for key in raw] + [(raw[key], inner) for key in raw if isinstance(raw[key], dict)
                                            for inner in raw[key]]  # fmt: skip
    target, key = places[choice % len(places)]
    target[key] = copy.deepcopy(value)
    try:
        config = parse_config(raw)
    except CheckpointError:
        return
    assert config.num_layers <= 10_000
