"""Weights of files: quantised matrices keep their codes, and what they multiply to is what they stand for."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from pairs import draw_params, make_cpu, make_eager, with_adapter

from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.checkpoint.tensorfile import FileTensor, write_tensors
from dlmrt.cpu.executor import FORMATS, load_denoiser
from dlmrt.cpu.weights import FileParams, Quantized, kept_formats
from dlmrt.ops import formats
from dlmrt.testing import tiny_config


def write_quantized(folder, config, params, kind, *, dialect="modelopt", skip=()):
    """A checkpoint whose matrices, but those whose names hold a word of `skip`, are stored in `kind`."""
    from dlmrt.checkpoint.save import config_to_json

    tensors = {}
    for name, values in params.items():
        module = name.removesuffix(".weight")
        if values.ndim == 1 or "embed" in name or any(word in name for word in skip):
            tensors[name] = file_tensor("float32", values)
        elif kind.startswith("int4"):
            words, scale = formats.quantize_int4(values, int(kind.removeprefix("int4_g")))
            tensors[f"{module}.weight_packed"] = file_tensor("int32", words)
            tensors[f"{module}.weight_scale"] = file_tensor("float32", scale)
            tensors[f"{module}.weight_shape"] = file_tensor("int64", np.array(values.shape))
        elif kind == "int8":
            codes, scale = formats.quantize_int8(values)
            tensors[name] = file_tensor("int8", codes)
            tensors[f"{module}.weight_scale"] = file_tensor("float32", scale)
        else:
            codes, blocks, shared = formats.quantize_nvfp4(values)
            packed = "weight" if dialect == "modelopt" else "weight_packed"
            whole = ("weight_scale_2", shared) if dialect == "modelopt" else ("weight_global_scale", 1 / shared)
            tensors[f"{module}.{packed}"] = file_tensor("uint8", codes)
            tensors[f"{module}.weight_scale"] = file_tensor("float8_e4m3", blocks)
            tensors[f"{module}.{whole[0]}"] = file_tensor("float32", np.array([whole[1]], dtype=np.float32))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_json(config)))
    write_tensors(folder / "model.safetensors", tensors)
    return open_checkpoint(folder)


def file_tensor(dtype, values):
    return FileTensor(dtype=dtype, shape=values.shape, bits=lambda: values)


@pytest.fixture
def model():
    config = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16, tie_word_embeddings=False)
    return config, draw_params(config)


def logits_of(denoiser):
    denoiser.reset()
    denoiser.extend(np.arange(20, dtype=np.int32))
    return denoiser.forward(np.arange(100, 108, dtype=np.int32), None, None)


def relative_error(values, expected):
    return np.linalg.norm(values - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("int8", ""), ("int4_g32", ""), ("int4_g128", "")],
)
def test_quantized_matrices_multiply_to_what_they_stand_for(tmp_path, model, kind, dialect):
    config, params = model
    if kind == "int4_g128":
        config = dataclasses.replace(config, hidden_size=128, intermediate_size=128, num_heads=8, num_kv_heads=8)
        params = draw_params(config)
    checkpoint = write_quantized(tmp_path / "model", config, params, kind, dialect=dialect, skip=("layers.1.mlp",))
    assert kept_formats(checkpoint.weights())["model.layers.0.mlp.up_proj.weight"] == kind
    exact = {name: weight.stored().raw() for name, weight in checkpoint.weights().items()}
    expected = logits_of(make_eager(config, {name: np.array(values) for name, values in exact.items()}))
    denoiser = load_denoiser(checkpoint, num_threads=2)
    assert denoiser.dtype == kind.partition("_")[0]
    assert {dtype for name, dtype, _ in denoiser._store._packed if "layers.0" in name} == {kind}
    assert relative_error(logits_of(denoiser), expected) < 0.06  # activations are int8
    assert relative_error(logits_of(make_eager(config, params)), expected) > (0.003 if kind == "int8" else 0.06)


def test_int4_with_zero_points_or_other_groups_is_dequantized(tmp_path, model):
    config, params = model
    checkpoint = write_quantized(tmp_path / "model", config, params, "int4_g16")
    assert kept_formats(checkpoint.weights()) == {}
    exact = {name: np.array(weight.stored().raw()) for name, weight in checkpoint.weights().items()}
    denoiser = load_denoiser(checkpoint, dtype="float32")
    np.testing.assert_allclose(logits_of(denoiser), logits_of(make_cpu(config, exact)), atol=1e-6)
    weight = checkpoint.weights()["model.layers.0.mlp.up_proj.weight"].pieces[0].weight
    with_zeros = dataclasses.replace(weight, parts={**weight.parts, "weight_zero_point": weight.parts["weight_packed"]})
    assert (weight.layout, with_zeros.layout) == ("int4_g16", "int4_g16_zero_points")


def test_both_nvfp4_dialects_give_the_same_numbers(tmp_path, model):
    config, params = model
    results = [
        logits_of(load_denoiser(write_quantized(tmp_path / dialect, config, params, "nvfp4", dialect=dialect)))
        for dialect in ("modelopt", "compressed-tensors")
    ]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_head_of_quantized_layers_is_int8(tmp_path, has_residual):
    """A tied embedding goes with it and is kept once, unless the residual pathway reads its rows."""
    config = tiny_config(**({"residual": with_adapter()} if has_residual else {}))
    checkpoint = write_quantized(tmp_path / "model", config, draw_params(config), "nvfp4", skip=("residual",))
    store = load_denoiser(checkpoint)._store
    assert {dtype for name, dtype, _ in store._packed if "embed" in name or "lm_head" in name} == {"int8"}
    assert [dtype for name, dtype, _ in store._tables if "embed" in name] == ["bfloat16"] * has_residual


def test_a_matrix_fused_with_one_of_another_format_is_dequantized(tmp_path, model):
    config, params = model
    checkpoint = write_quantized(tmp_path / "model", config, params, "nvfp4", skip=("layers.0.self_attn.k_proj",))
    kept = kept_formats(checkpoint.weights())
    assert not any(name.startswith("model.layers.0.self_attn") and "o_proj" not in name for name in kept)
    assert kept["model.layers.1.self_attn.q_proj.weight"] == kept["model.layers.0.mlp.gate_proj.weight"] == "nvfp4"
    assert isinstance(FileParams(checkpoint.weights(), kept)["model.layers.0.mlp.up_proj.weight"], Quantized)
    logits_of(load_denoiser(checkpoint))


def test_gate_and_up_keep_their_own_scales(tmp_path, model):
    """K10: fused gate and up whose ranges differ five times; each half keeps its own scale of the whole matrix."""
    config, params = model
    for name in params:
        if "up_proj" in name:
            params[name] *= 5
    checkpoint = write_quantized(tmp_path / "model", config, params, "nvfp4")
    exact = {name: np.array(weight.stored().raw()) for name, weight in checkpoint.weights().items()}
    assert relative_error(logits_of(load_denoiser(checkpoint)), logits_of(make_eager(config, exact))) < 0.06


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_explicit_type_dequantizes(tmp_path, model, dtype):
    config, params = model
    checkpoint = write_quantized(tmp_path / "model", config, params, "nvfp4")
    exact = {name: np.array(weight.stored().raw()) for name, weight in checkpoint.weights().items()}
    denoiser = load_denoiser(checkpoint, dtype=dtype)
    assert denoiser.dtype == dtype
    np.testing.assert_allclose(logits_of(denoiser), logits_of(make_cpu(config, exact, dtype=dtype)), atol=1e-6)


def test_plain_files_keep_their_type(tmp_path, model):
    from dlmrt.checkpoint.save import save_checkpoint

    config, params = model
    for stored, wanted in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")):
        folder = tmp_path / stored
        save_checkpoint(folder, dataclasses.replace(config, dtype=stored), params)
        assert load_denoiser(open_checkpoint(folder)).dtype == wanted
    assert set(FORMATS) == {"float32", "bfloat16", "int8"}
