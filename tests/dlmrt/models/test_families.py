"""Every family: full-size configs give the published sizes, and model files offer what callers read."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from dlmrt.checkpoint.config_json import config_to_json
from dlmrt.errors import CheckpointError, UnsupportedModelError
from dlmrt.models.config import parse_config
from dlmrt.models.families import family_of
from dlmrt.models.layers import file_names, places
from dlmrt.models.upstream import READERS

# Parameters, those in experts, bytes of keys and values a token.
SIZES = {
    "qwen3-4b": (4_022_468_096, 0, 144 * 1024),
    "sdar-4b-chat": (4_411_424_256, 0, 144 * 1024),
    "llada2.1-mini": (16_255_643_392, 15_300_820_992, 40 * 1024),
    "llada2.1-flash": (102_889_705_216, 99_857_989_632, 64 * 1024),
    "diffusiongemma-26b-a4b": (25_250_986_812, 22_837_985_280, 220 * 1024),
}


def raw_config(data, name, **changes):
    return {**json.loads((data / "configs" / f"{name}.json").read_text()), **changes}


@pytest.mark.parametrize("name", SIZES)
def test_full_size(data, name):
    config = parse_config(raw_config(data, name))
    shapes = family_of(config).tensor_shapes(config)
    counts = {tensor: math.prod(shape) for tensor, shape in shapes.items()}
    experts = sum(count for tensor, count in counts.items() if ".experts." in tensor)
    assert (sum(counts.values()), experts, config.kv_bytes_per_token) == SIZES[name]


@pytest.mark.parametrize("flavour", ["mini", "flash"])
def test_llada2_0_has_the_sizes_of_2_1(data, flavour):
    raw = raw_config(data, f"llada2.1-{flavour}", max_position_embeddings=16384)
    config = parse_config(raw)
    count = sum(math.prod(shape) for shape in family_of(config).tensor_shapes(config).values())
    assert count == SIZES[f"llada2.1-{flavour}"][0]


def on_meta(raw):
    """transformers' model of a config file in full size, without memory."""
    import transformers
    from transformers import AutoConfig

    classes = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "diffusion_gemma": raw["architectures"][0]}
    with torch.device("meta"):
        return getattr(transformers, classes[raw["model_type"]])(AutoConfig.for_model(**raw))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-4b", {}),
        ("sdar-4b-chat", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
        ("fast-dllm-v2-7b", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
        ("diffusiongemma-26b-a4b", {}),
    ],
)
def test_full_size_tensors_are_transformers(data, name, changes):
    """Names and shapes as transformers has them on the meta device, and no parameter more."""
    raw = raw_config(data, name, **changes)
    config = parse_config(raw)
    family = family_of(config)
    shapes = family.tensor_shapes(config)
    model = on_meta(raw)
    theirs = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    for file in file_names(shapes, joins=family.JOINS_EXPERTS):
        rows = sum(shapes[source][-2] for source in file.sources) if len(file.sources) > 1 else None
        shape = shapes[file.sources[0]]
        assert theirs[file.name] == (shape if rows is None else (*shape[:-2], rows, shape[-1]))
    named = [*model.named_parameters(), *((key, b) for key, b in model.named_buffers() if key.endswith("layer_scalar"))]
    text = [tensor for key, tensor in named if "vision" not in key]
    assert sum(tensor.numel() for tensor in text) == SIZES.get(name, (7_615_616_512,))[0]


@pytest.mark.parametrize("name", SIZES)
def test_file_names_and_renames_are_inverse(data, name):
    """Whatever spelling a file has, each place of each tensor is filled once."""
    config = parse_config(raw_config(data, name))
    family = family_of(config)
    shapes = family.tensor_shapes(config)
    for joins in {family.JOINS_EXPERTS, False}:
        filled = {}
        for file in file_names(shapes, joins=joins):
            for place, source in zip(places(file.name, family.RENAMES), file.sources, strict=True):
                assert (place.target, place.index) == (source, file.index)
                assert filled.setdefault((place.target, place.index), file.name) == file.name
        wanted = sum(shape[0] if not joins and ".experts." in tensor else 1 for tensor, shape in shapes.items())
        assert len(filled) == wanted


@pytest.mark.parametrize("name", SIZES)
def test_config_survives_writing(data, name):
    config = parse_config(raw_config(data, name))
    assert parse_config(config_to_json(config)) == config


def test_built_in_rows(data):
    """What released files leave unsaid, by architecture."""
    llada, gemma, sdar = (
        parse_config(raw_config(data, name)) for name in ("llada2.1-mini", "diffusiongemma-26b-a4b", "sdar-4b-chat")
    )
    assert (llada.diffusion.canvas_length, llada.diffusion.mask_token_id) == (32, 156895)
    assert llada.diffusion.commit_rule == "joint_threshold" and llada.eos_token_ids == (156892,)
    assert (gemma.diffusion.canvas_length, gemma.diffusion.noise, gemma.diffusion.mask_token_id) == (
        256,
        "uniform",
        None,
    )
    assert gemma.diffusion.commit_rule == "entropy_bound" and gemma.eos_token_ids == (1, 106)
    assert gemma.diffusion.residual.intermediate_size == 2112 and gemma.diffusion.residual.scale_embedding
    assert gemma.sliding.full_layers == (5, 11, 17, 23, 29) and gemma.sliding.full_rope.theta == 1e6
    assert [gemma.attention(i).window for i in (4, 5)] == [1024, None]
    assert (sdar.diffusion.canvas_length, sdar.diffusion.mask_token_id) == (4, 151669)


def test_edit_ids_choose_the_rule_of_llada2_2(data):
    raw = raw_config(
        data, "llada2.1-mini", expert_capacity=48, block_size=32, delete_token_id=156930, split_token_id=156931
    )
    config = parse_config(raw)
    assert config.moe.expert_capacity == 48 and config.diffusion.commit_rule == "joint_threshold_indel"
    assert (config.diffusion.delete_token_id, config.diffusion.split_token_id) == (156930, 156931)
    assert parse_config(config_to_json(config)) == config


def test_one_key_of_a_nested_section_keeps_the_others(data):
    """K69"""
    raw = raw_config(data, "diffusiongemma-26b-a4b", diffusion={"residual": {"alpha": 0.5}})
    assert parse_config(raw).diffusion.residual.intermediate_size == 2112


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llada2.1-mini", {"norm_head": True}, "norm_head"),
        ("llada2.1-mini", {"score_function": "softmax"}, "score_function"),
        ("llada2.1-mini", {"use_qk_norm": False}, "use_qk_norm"),
        ("llada2.1-mini", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling"),
        ("diffusiongemma-26b-a4b", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("qwen3-4b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_features_that_are_not_computed_are_refused(data, name, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        parse_config(raw_config(data, name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llada2.1-mini", {"use_bias": None}, "use_bias"),
        ("llada2.1-mini", {"rope_theta": None}, "rope_theta"),
        ("llada2.1-mini", {"num_experts": None}, "num_experts"),
        ("llada2.1-mini", {"n_group": 3}, "groups"),
        ("llada2.1-mini", {"expert_capacity": 4}, "fit together"),
        ("llada2.1-mini", {"delete_token_id": 5}, "come together"),
        ("llada2.1-mini", {"delete_token_id": 156895, "split_token_id": 5}, "id of its own"),
        ("llada2.1-mini", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("diffusiongemma-26b-a4b", {"text_config": None}, "text_config"),
        ("diffusiongemma-26b-a4b", {"canvas_length": None}, "canvas_length"),
    ],
)
def test_contradictions_are_refused_by_name(data, name, changes, named):
    """K20: nothing that the strategy needs is guessed."""
    with pytest.raises(CheckpointError, match=named):
        parse_config(raw_config(data, name, **changes))


@pytest.mark.parametrize("architecture", READERS)
def test_every_architecture_has_a_family(data, architecture):
    """K34"""
    config = parse_config(raw_config(data, "qwen3-4b"))
    family = family_of(dataclasses.replace(config, architecture=architecture))
    for name in ("tensor_shapes", "has_residual", "forward", "head", "soft_embedding"):
        assert callable(getattr(family, name))
