"""Quantised checkpoints: both NVFP4 dialects load to one model, our files open in the public libraries.

What fits no format, or two, is refused by name.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch

from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.load import SINGLE_FILE, load_params, open_checkpoint, to_float32
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.checkpoint.scheme import INT4_GROUP
from dlmrt.checkpoint.tensorfile import read_tensors
from dlmrt.eager.executor import EagerDenoiser, dense_logits, quantize_inputs
from dlmrt.errors import CheckpointError, UnknownOptionError, UnsupportedModelError, UsageError
from dlmrt.ops import formats

GATE = 1e-4
BLOCKS = {"block_size": 8, "mask_token_id": 511}
DIALECTS = ("llada2_nvfp4_modelopt", "llada2_nvfp4_ct")


def block_causal(length, block=8):
    rows = np.arange(length) // block
    return rows[None] <= rows[:, None]


def relative(values, wanted):
    return np.linalg.norm(values - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("name", DIALECTS)
def test_nvfp4_experts_of_both_dialects(oracle, name):
    """K04: the same logits from either file, weight-only and with quantised activations."""
    checkpoint = open_checkpoint(oracle(name, **BLOCKS))
    expected = read_tensors(checkpoint.folder / "expected.safetensors")
    params = load_params(checkpoint)
    for case in ("fwd0", "fwd1"):
        ids = expected[f"{case}.input_ids"].raw().astype(np.int32)
        for kind, weights in (("w4a16", params), ("w4a4", quantize_inputs(checkpoint, params))):
            got = dense_logits(weights, checkpoint.config, ids, block_causal(len(ids)))
            assert np.abs(got - to_float32(expected[f"{case}.logits_{kind}"])).max() <= GATE, kind


def test_nvfp4_experts_of_diffusion_gemma(oracle):
    checkpoint = open_checkpoint(oracle("dgemma_nvfp4_modelopt"))
    expected = read_tensors(checkpoint.folder / "expected.safetensors")
    denoiser = EagerDenoiser(load_params(checkpoint), checkpoint.config)
    for prompt in ("prompt5", "prompt15", "prompt16", "prompt17", "prompt40"):
        denoiser.reset()
        denoiser.extend(expected[f"{prompt}.input_ids"].raw().astype(np.int32))
        canvas = expected[f"{prompt}.canvas"].raw().astype(np.int32)
        first = to_float32(expected[f"{prompt}.logits_w4a16"])
        z = denoiser.soft_embedding(torch.from_numpy(first / np.float32(0.8)).softmax(-1).numpy())
        for residual, key in ((None, "logits_w4a16"), (z, "logits_selfcond_w4a16")):
            got = denoiser.forward(canvas, residual, None)
            assert np.abs(got - to_float32(expected[f"{prompt}.{key}"])).max() <= GATE


@pytest.fixture(scope="module")
def llada2(oracle):
    return open_checkpoint(oracle("llada2_tiny", **BLOCKS))


@pytest.fixture(scope="module")
def wide_qwen3(tmp_path_factory, make_config, make_params):
    """A dense model whose rows hold whole int4 groups."""
    config = make_config(hidden_size=128, intermediate_size=256, head_dim=32, num_layers=1)
    folder = tmp_path_factory.mktemp("qwen3") / "ck"
    save_checkpoint(folder, config, make_params(config))
    return open_checkpoint(folder)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_saved_nvfp4_equals_the_reference_files(tmp_path, oracle, llada2, dialect):
    """Same bytes as the reference's quantisation of the same experts, in the names of each dialect."""
    convert_checkpoint(tmp_path / "q", llada2, format="nvfp4", dialect=dialect)
    ours = read_tensors(tmp_path / "q" / SINGLE_FILE)
    theirs = read_tensors(oracle(DIALECTS[dialect == "compressed-tensors"]) / SINGLE_FILE)
    # Weight-only: no scales of activations.
    assert set(ours) == {name for name in theirs if not name.endswith(("input_scale", "input_global_scale"))}
    for name, tensor in ours.items():
        wanted = theirs[name]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
        if name.endswith("global_scale"):  # the reciprocal of a reciprocal
            np.testing.assert_allclose(tensor.raw(), wanted.raw(), rtol=1e-6)
        else:
            np.testing.assert_array_equal(tensor.raw(), wanted.raw())
    reopened = open_checkpoint(tmp_path / "q")
    assert reopened.config == llada2.config
    params, wanted_params = load_params(reopened), load_params(open_checkpoint(oracle(DIALECTS[0], **BLOCKS)))
    for name, values in params.items():
        torch.testing.assert_close(values, wanted_params[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "int8", "int4"])
def test_save_and_load(tmp_path, wide_qwen3, format):
    """All linears, whatever the format: what loads is what the format makes of each matrix."""
    modules = convert_checkpoint(
        tmp_path / "q", wide_qwen3, format=format, policy="linears", ignore=["*.o_proj"]
    ).modules
    assert len(modules) == 6 and "model.layers.0.self_attn.o_proj" not in modules
    params, original = load_params(open_checkpoint(tmp_path / "q")), load_params(wide_qwen3)
    limit = {"nvfp4": 0.13, "fp8": 0.04, "int8": 0.015, "int4": 0.15}[format]
    for name, values in original.items():
        error = relative(params[name].numpy(), values.numpy())
        if name.removesuffix(".weight") in modules:
            assert 0 < error < limit
        else:
            assert error == 0


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "int8", "int4"])
def test_our_files_open_in_compressed_tensors(tmp_path, wide_qwen3, format):
    """Its own configuration class takes our section, its own decompressor gives our values."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    modules = convert_checkpoint(tmp_path / "q", wide_qwen3, format=format, policy="linears").modules
    raw = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = safetensors.torch.load_file(tmp_path / "q" / SINGLE_FILE)
    params = load_params(open_checkpoint(tmp_path / "q"))
    for module in modules:
        parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
        theirs = compressor.decompress(parts, scheme)["weight"].float()
        torch.testing.assert_close(params[f"{module}.weight"], theirs, rtol=1e-2 if format == "nvfp4" else 1e-6, atol=0)


def test_our_files_open_in_modelopt(tmp_path, llada2):
    tensors = pytest.importorskip("modelopt.torch.quantization.qtensor")
    convert_checkpoint(tmp_path / "q", llada2, format="nvfp4", dialect="modelopt")
    stored = safetensors.torch.load_file(tmp_path / "q" / SINGLE_FILE)
    module = "model.layers.1.mlp.experts.3.up_proj"
    packed, scale, shared = (stored[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
    theirs = tensors.NVFP4QTensor(torch.Size((32, 64)), torch.float32, packed).dequantize(
        scale=scale, double_scale=shared, block_sizes={-1: 16}
    )
    ours = load_params(open_checkpoint(tmp_path / "q"))["model.layers.1.mlp.experts.up_proj"][3]
    torch.testing.assert_close(ours, theirs.float())


def test_fused_matrices_share_their_scale(tmp_path, llada2, wide_qwen3):
    """K10: gate and up of one expert, and q, k and v, so that no engine has to choose one of two."""
    convert_checkpoint(tmp_path / "moe", llada2, format="nvfp4", dialect="modelopt")
    stored = read_tensors(tmp_path / "moe" / SINGLE_FILE)
    scale = {name: float(t.raw()) for name, t in stored.items() if name.endswith("weight_scale_2")}
    for name, value in scale.items():
        assert value == scale[name.replace("gate_proj", "up_proj")]
    convert_checkpoint(tmp_path / "dense", wide_qwen3, format="nvfp4", policy="linears")
    stored = read_tensors(tmp_path / "dense" / SINGLE_FILE)
    names = [f"model.layers.0.self_attn.{which}_proj.weight_global_scale" for which in "qkv"]
    assert len({float(stored[name].raw()[0]) for name in names}) == 1


def test_gate_and_up_of_different_scales_keep_both(tmp_path, llada2):
    """K10: a file that does not share them; each matrix is read with its own."""
    convert_checkpoint(tmp_path / "q", llada2, format="nvfp4", dialect="modelopt")
    tensors = safetensors.torch.load_file(tmp_path / "q" / SINGLE_FILE)
    name = "model.layers.1.mlp.experts.0.gate_proj"
    tensors[f"{name}.weight_scale_2"] *= 4
    safetensors.torch.save_file(tensors, tmp_path / "q" / SINGLE_FILE, {"format": "pt"})
    params, original = load_params(open_checkpoint(tmp_path / "q")), load_params(llada2)
    experts = "model.layers.1.mlp.experts."
    assert relative(params[experts + "up_proj"][0], original[experts + "up_proj"][0]) < 0.13
    assert relative(params[experts + "gate_proj"][0] / 4, original[experts + "gate_proj"][0]) < 0.13


def test_experts_of_diffusion_gemma_are_written_one_by_one(tmp_path, oracle):
    checkpoint = open_checkpoint(oracle("dgemma_tiny"))
    modules = convert_checkpoint(tmp_path / "q", checkpoint, format="nvfp4", dialect="modelopt").modules
    assert len(modules) == 4 * 8 * 3
    theirs = read_tensors(oracle("dgemma_nvfp4_modelopt") / SINGLE_FILE)
    ours = read_tensors(tmp_path / "q" / SINGLE_FILE)
    module = "model.decoder.layers.2.experts.5.down_proj"
    for part in ("weight", "weight_scale", "weight_scale_2"):
        np.testing.assert_array_equal(ours[f"{module}.{part}"].raw(), theirs[f"{module}.{part}"].raw())
    assert open_checkpoint(tmp_path / "q").config == checkpoint.config


def rewritten(tmp_path, llada2, change):
    """A ModelOpt checkpoint with changed tensors."""
    convert_checkpoint(tmp_path / "q", llada2, format="nvfp4", dialect="modelopt")
    tensors = safetensors.torch.load_file(tmp_path / "q" / SINGLE_FILE)
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "q" / SINGLE_FILE, {"format": "pt"})
    return open_checkpoint(tmp_path / "q")


MODULE, DOWN = "model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.experts.0.down_proj"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # K04, file 3: names of neither dialect
        (lambda t: t.update({f"{MODULE}.weight_global_scale": t.pop(f"{MODULE}.weight_scale_2")}), "none of the known"),
        (lambda t: t.pop(f"{MODULE}.weight_scale_2"), "none of the known"),
        (lambda t: t.pop(f"{MODULE}.weight_scale"), "none of the known"),
        (lambda t: t.update({f"{MODULE}.weight_scale": torch.ones(32, 4)}), "none of the known"),
        # K36: stored transposed
        (lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].T.contiguous()}), "down_proj.weight .* transposed"),
        (lambda t: t.update({f"{MODULE}.weight_scale_2": torch.tensor(0.0)}), "must be a positive number"),
        (lambda t: [t.pop(f"{MODULE}.{part}") for part in ("weight", "weight_scale", "weight_scale_2")],
         "lacks 1 of the 8 parts of model.layers.1.mlp.experts.up_proj, first 0"),
        (lambda t: t.update({MODULE.replace("0.up", "8.up") + ".weight": torch.ones(32, 64)}), r"experts\.8\.up_proj"),
        (lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.ones(8, 64, dtype=torch.uint8)}), "dtype uint8"),
    ],
)  # fmt: skip
def test_tensors_that_fit_no_format_are_named(tmp_path, llada2, change, named):
    checkpoint = rewritten(tmp_path, llada2, change)
    with pytest.raises(CheckpointError, match=named):
        checkpoint.weights()


def test_transposed_square_matrix_is_named(tmp_path, wide_qwen3):
    """K36: halves of the columns are packed, so even a square matrix shows."""
    convert_checkpoint(tmp_path / "q", wide_qwen3, format="nvfp4", policy="linears")
    name = "model.layers.0.self_attn.q_proj"
    tensors = safetensors.torch.load_file(tmp_path / "q" / SINGLE_FILE)
    assert tensors[f"{name}.weight_packed"].shape == (128, 64)
    for part in ("weight_packed", "weight_scale"):
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"].T.contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "q" / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(tmp_path / "q").weights()


def declare(tmp_path, llada2, section, hf_quant=None):
    convert_checkpoint(tmp_path / "q", llada2, format="nvfp4", dialect="modelopt")
    path = tmp_path / "q" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
    if hf_quant is None:
        (tmp_path / "q" / "hf_quant_config.json").unlink()
    else:
        (tmp_path / "q" / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    return tmp_path / "q"


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"bits": 4}, "quant_method None"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "sparsity_config": {"format": "sparse-24"},
            },
            "sparse",
        ),
    ],
)
def test_unknown_metadata_is_refused_by_name(tmp_path, llada2, section, named):
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(declare(tmp_path, llada2, section))


def test_metadata_that_contradicts_the_tensors_is_refused(tmp_path, llada2):
    """K04: reading one dialect as the other would be off by a factor of up to 1e9."""
    folder = declare(tmp_path, llada2, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
    with pytest.raises(CheckpointError, match="reciprocal"):
        open_checkpoint(folder).weights()


@pytest.mark.parametrize("hf_quant", [None, {"quantization": {"quant_algo": "NVFP4"}}])
def test_names_alone_tell_the_dialect(tmp_path, llada2, hf_quant):
    folder = declare(tmp_path, llada2, None, hf_quant)
    got = load_params(open_checkpoint(folder))
    convert_checkpoint(tmp_path / "ct", llada2, format="nvfp4")
    for name, values in load_params(open_checkpoint(tmp_path / "ct")).items():
        torch.testing.assert_close(got[name], values, rtol=1e-6, atol=0)


def test_scales_of_a_quantised_cache_are_skipped(tmp_path, wide_qwen3):
    convert_checkpoint(tmp_path / "q", wide_qwen3, format="fp8", policy="linears")
    tensors = safetensors.torch.load_file(tmp_path / "q" / SINGLE_FILE)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    safetensors.torch.save_file(tensors, tmp_path / "q" / SINGLE_FILE, {"format": "pt"})
    assert "model.layers.0.self_attn.k_proj.k_scale" not in load_params(open_checkpoint(tmp_path / "q"))


@pytest.mark.parametrize("scale_shape", [(), (1,), (136, 1), (2, 1)])
def test_fp8_scales_of_every_shape(tmp_path, make_config, make_params, scale_shape):
    """One number, a row's, a 128 x 128 block's (also under DeepSeek's name), and what each rounds its input to."""
    config = make_config(hidden_size=40, intermediate_size=136, num_layers=1)
    save_checkpoint(tmp_path / "ck", config, make_params(config))
    tensors = safetensors.torch.load_file(tmp_path / "ck" / SINGLE_FILE)
    name = "model.layers.0.mlp.gate_proj"
    scale = torch.full(scale_shape, 0.25)
    suffix = "weight_scale_inv" if scale_shape == (2, 1) else "weight_scale"
    tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] / 0.25).to(torch.float8_e4m3fn)
    tensors[f"{name}.{suffix}"] = scale
    safetensors.torch.save_file(tensors, tmp_path / "ck" / SINGLE_FILE, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path / "ck")
    params = load_params(checkpoint)
    torch.testing.assert_close(params[f"{name}.weight"], tensors[f"{name}.weight"].float() * 0.25)
    x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    (quantize,) = checkpoint.weights()[f"{name}.weight"].input_quantizers()
    np.testing.assert_array_equal(quantize(x), formats.quantize_fp8_input(x))
    logits = dense_logits(
        quantize_inputs(checkpoint, params), config, np.arange(6, dtype=np.int32), np.ones((6, 6), bool)
    )
    assert 0 < relative(logits, dense_logits(params, config, np.arange(6, dtype=np.int32), np.ones((6, 6), bool))) < 0.1


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"format": "nvfp5"}, UnknownOptionError, "did you mean 'nvfp4'"),
        ({"format": "nvfp4", "policy": "expert"}, UnknownOptionError, "did you mean 'experts'"),
        ({"format": "nvfp4", "dialect": "modelOpt"}, UnknownOptionError, "did you mean 'modelopt'"),
        ({"format": "int8", "dialect": "modelopt"}, UsageError, "does not write int8"),
        ({"format": "int8", "ignore": ["*.attention.*"]}, UsageError, "matches no module"),
        ({"format": "int4"}, UsageError, f"multiple of {INT4_GROUP}"),
        ({"format": "int8", "ignore": [r"re:.*experts.*"]}, UsageError, "leaves nothing"),
    ],
)
def test_wrong_requests_are_refused(tmp_path, llada2, options, error, named):
    with pytest.raises(error, match=named):
        convert_checkpoint(tmp_path / "q", llada2, **options)
    assert not (tmp_path / "q").exists()


def test_dense_models_have_no_experts(tmp_path, wide_qwen3):
    with pytest.raises(UsageError, match="policy 'linears'"):
        convert_checkpoint(tmp_path / "q", wide_qwen3, format="int8", policy="experts")


@pytest.mark.parametrize("name", ["llada2_tiny", "dgemma_tiny"])
def test_plain_families_save_and_load(tmp_path, oracle, name):
    """Experts one by one or joined, as released; the same model comes back, and the same bytes from it again."""
    checkpoint = open_checkpoint(oracle(name, **(BLOCKS if name == "llada2_tiny" else {})))
    save_checkpoint(tmp_path / "a", checkpoint.config, dict(checkpoint.tensors()), generation=checkpoint.generation)
    stored, original = read_tensors(tmp_path / "a" / SINGLE_FILE), read_tensors(checkpoint.folder / SINGLE_FILE)
    assert set(stored) == {tensor for tensor in original if "vision" not in tensor}
    for tensor in stored:
        np.testing.assert_array_equal(stored[tensor].raw(), original[tensor].raw())
    again = open_checkpoint(tmp_path / "a")
    assert again.config == checkpoint.config
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    save_checkpoint(tmp_path / "b", again.config, load_params(again), generation=again.generation)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_duplicates_must_agree(tmp_path, oracle):
    """DiffusionGemma may store its encoder beside the decoder; a different copy would be ignored, so it is refused."""
    checkpoint = open_checkpoint(oracle("dgemma_tiny"))
    shutil.copytree(checkpoint.folder, tmp_path / "ck")
    tensors = safetensors.torch.load_file(tmp_path / "ck" / SINGLE_FILE)
    ours, other = (f"model.{side}.layers.0.mlp.up_proj.weight" for side in ("decoder", "encoder.language_model"))
    for copy, fails in ((tensors[ours].clone(), False), (tensors[ours] + 1, True)):
        safetensors.torch.save_file({**tensors, other: copy}, tmp_path / "ck" / SINGLE_FILE, {"format": "pt"})
        if not fails:
            assert len(load_params(open_checkpoint(tmp_path / "ck"))) == len(load_params(checkpoint))
            continue
        with pytest.raises(CheckpointError, match="differs from"):
            load_params(open_checkpoint(tmp_path / "ck"))
