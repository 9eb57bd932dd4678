"""Conversion between formats: codes that are kept, values that come back, folders that are complete or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.folder import write_folder
from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import INDEX_FILE, SINGLE_FILE, load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.checkpoint.tensorfile import FileTensor, read_tensors
from dlmrt.cpu.executor import load_denoiser as load_native
from dlmrt.decode.engine import Engine
from dlmrt.decode.text import TextCodec
from dlmrt.eager.executor import load_denoiser
from dlmrt.errors import CheckpointError, UsageError
from dlmrt.models import qwen3

BLOCKS = {"block_size": 8, "mask_token_id": 511}
FP4_TOP, FP8_TOP = 6 * 448, 448


@pytest.fixture(scope="module")
def llada2(oracle):
    return open_checkpoint(oracle("llada2_tiny", **BLOCKS))


@pytest.fixture(scope="module")
def dense(tmp_path_factory, make_config, make_params):
    """A dense bfloat16 model whose rows hold whole int4 groups."""
    config = make_config(hidden_size=128, intermediate_size=256, head_dim=32, num_layers=1, dtype="bfloat16")
    folder = tmp_path_factory.mktemp("dense") / "ck"
    save_checkpoint(folder, config, make_params(config), generation={"max_new_tokens": 7})
    return open_checkpoint(folder)


def converted(folder, source, **options):
    convert_checkpoint(folder, source, **options)
    return open_checkpoint(folder)


def assert_same_values(one, other, *, dtype="float32"):
    params, wanted = load_params(one, dtype=dtype), load_params(other, dtype=dtype)
    assert params.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(params[name], values, rtol=1e-6, atol=0)


def test_the_other_dialect_keeps_every_code(tmp_path, llada2):
    """K04: there and back, with calibrated scales of activations: the first file's bytes, reciprocals apart."""
    maxima = dict.fromkeys(convert_checkpoint(tmp_path / "plain", llada2, format="nvfp4").modules, 3.0)
    first = converted(tmp_path / "a", llada2, format="nvfp4", dialect="modelopt", input_maxima=maxima)
    done = convert_checkpoint(tmp_path / "b", first, format="nvfp4", dialect="compressed-tensors")
    assert done.num_carried == len(done.modules) == len(maxima)
    second = open_checkpoint(tmp_path / "b")
    assert second.quantization["quant_method"] == "compressed-tensors"
    back = converted(tmp_path / "c", second, format="nvfp4", dialect="modelopt")
    assert back.config == first.config and back.quantization == first.quantization
    assert back.stored.keys() == first.stored.keys()
    for name, tensor in first.stored.items():
        if name.endswith(("weight_scale_2", "input_scale")):
            np.testing.assert_allclose(back.stored[name].raw(), tensor.raw(), rtol=1e-6)
        else:
            np.testing.assert_array_equal(back.stored[name].raw(), tensor.raw())
    assert_same_values(second, first)


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "int8", "int4"])
def test_back_to_floats(tmp_path, dense, format):
    """The values of the codes, in a file that says nothing of quantisation and that goes on being converted."""
    quantized = converted(tmp_path / "q", dense, format=format)
    plain = converted(tmp_path / "plain", quantized, format="bfloat16")
    assert plain.quantization == {} and plain.config == dense.config and plain.generation == dense.generation
    assert {tensor.dtype for tensor in plain.stored.values()} == {"bfloat16"}
    assert_same_values(plain, quantized, dtype="bfloat16")
    whole = converted(tmp_path / "whole", plain, format="float32")
    assert whole.config.dtype == "float32"
    assert_same_values(whole, plain)


def test_floats_are_named_as_the_released_files_name_them(tmp_path, oracle):
    """DiffusionGemma joins its experts, gate and up in one tensor; quantised files hold them one by one."""
    source = open_checkpoint(oracle("dgemma_tiny"))
    quantized = converted(tmp_path / "q", source, format="int8")
    assert "model.decoder.layers.0.experts.0.gate_proj.weight" in quantized.stored
    plain = converted(tmp_path / "plain", quantized, format="float32")
    assert plain.stored["model.decoder.layers.0.experts.gate_up_proj"].shape[0] == 8
    assert_same_values(plain, quantized)


def test_the_type_is_declared_wherever_the_source_declares_it(tmp_path, oracle):
    """transformers writes the type of DiffusionGemma twice."""
    text = json.loads((oracle("dgemma_tiny") / "config.json").read_text())["text_config"]
    source = open_checkpoint(oracle("dgemma_tiny", text_config={**text, "dtype": "float32"}))
    convert_checkpoint(tmp_path / "plain", source, format="bfloat16")
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == raw["text_config"]["dtype"] == "bfloat16"


def test_tensors_that_stay_float32_do_so(tmp_path, llada2):
    """expert_bias selects experts: rounded to bfloat16, it reroutes."""
    plain = converted(tmp_path / "plain", llada2, format="bfloat16")
    assert plain.stored["model.layers.1.mlp.gate.expert_bias"].dtype == "float32"
    assert plain.stored["model.layers.1.mlp.gate.weight"].dtype == "bfloat16"


def test_keep_changes_shards_alone(tmp_path, llada2):
    quantized = converted(tmp_path / "q", llada2, format="nvfp4", dialect="modelopt")
    kept = converted(tmp_path / "kept", quantized, format="keep", max_shard_bytes=20_000)
    assert (tmp_path / "kept" / INDEX_FILE).exists()
    for name in ("config.json", "hf_quant_config.json"):
        assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "q" / name).read_bytes()
    assert kept.stored.keys() == quantized.stored.keys()
    for name, tensor in quantized.stored.items():
        np.testing.assert_array_equal(kept.stored[name].raw(), tensor.raw())
    again = convert_checkpoint(tmp_path / "again", kept, format="keep")
    assert (tmp_path / "again" / SINGLE_FILE).stat().st_size == (tmp_path / "q" / SINGLE_FILE).stat().st_size
    assert again.num_carried == len(again.modules) == 2 * 8 * 3  # layers, experts, matrices


def test_matrices_that_are_not_chosen_come_back_to_the_declared_type(tmp_path, dense):
    quantized = converted(tmp_path / "q", dense, format="int8")
    part = converted(tmp_path / "part", quantized, format="nvfp4", ignore=["*.mlp.*"])
    assert part.stored["model.layers.0.mlp.up_proj.weight"].dtype == "bfloat16"
    assert part.stored["model.layers.0.self_attn.q_proj.weight_packed"].dtype == "uint8"
    wanted = load_params(quantized, dtype="bfloat16")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(load_params(part, dtype="bfloat16")["model.layers.0.mlp.up_proj.weight"], wanted)


@pytest.mark.parametrize(
    ("format", "dialect", "name", "value"),
    [
        ("nvfp4", "modelopt", "input_scale", 2.0 / FP4_TOP),
        ("nvfp4", "compressed-tensors", "input_global_scale", FP4_TOP / 2.0),
        ("fp8", "modelopt", "input_scale", 2.0 / FP8_TOP),
        ("fp8", "compressed-tensors", "input_scale", 2.0 / FP8_TOP),
    ],
)
def test_scales_of_activations(tmp_path, dense, format, dialect, name, value):
    """Static scales are written in each dialect's sense and used when products are to round their inputs."""
    modules = convert_checkpoint(tmp_path / "plain", dense, format=format).modules
    maxima = dict.fromkeys(modules, 2.0)
    done = converted(tmp_path / "q", dense, format=format, dialect=dialect, input_maxima=maxima)
    module = "model.layers.0.mlp.down_proj"
    stored = done.stored[f"{module}.{name}"]
    assert stored.shape == (() if dialect == "modelopt" else (1,))
    np.testing.assert_allclose(stored.raw().reshape(()), value, rtol=1e-6)
    (quantize,) = done.weights()[f"{module}.weight"].input_quantizers()
    x = np.random.default_rng(0).uniform(-2, 2, (4, 256)).astype(np.float32)
    error = np.linalg.norm(quantize(x) - x) / np.linalg.norm(x)
    assert 0 < error < {"nvfp4": 0.13, "fp8": 0.04}[format]
    np.testing.assert_allclose(np.abs(quantize(np.full((1, 256), 9.0, np.float32))), 2.0, rtol=1e-6)  # saturates


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_our_calibrated_files_are_what_the_library_declares(tmp_path, dense, dialect):
    """Its configuration class takes our section, and reads from it that inputs are quantised statically."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    maxima = dict.fromkeys(convert_checkpoint(tmp_path / "plain", dense, format="fp8").modules, 1.0)
    for format, kind in (("nvfp4", "local"), ("fp8", False)):
        folder = tmp_path / format
        convert_checkpoint(folder, dense, format=format, dialect=dialect, input_maxima=maxima)
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        if dialect == "modelopt":
            algorithm = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
            assert section["quant_algo"] == algorithm == format.upper()
            continue
        config = quantization.QuantizationConfig.model_validate(section)
        assert config.config_groups["group_0"].input_activations.dynamic == kind


def test_fp8_of_modelopt_shares_its_scale_between_fused_matrices(tmp_path, dense):
    maxima = dict.fromkeys(convert_checkpoint(tmp_path / "plain", dense, format="fp8").modules, 1.0)
    done = converted(tmp_path / "q", dense, format="fp8", dialect="modelopt", input_maxima=maxima)
    scales = [done.stored[f"model.layers.0.self_attn.{which}_proj.weight_scale"] for which in "qkv"]
    assert {scale.shape for scale in scales} == {()} and len({float(scale.raw()) for scale in scales}) == 1
    for name, values in load_params(dense, dtype="float32").items():
        if name.endswith("q_proj.weight"):
            got = load_params(done, dtype="float32")[name]
            assert 0 < torch.linalg.norm(got - values) / torch.linalg.norm(values) < 0.05


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"format": "int8", "input_maxima": {}}, "int8 has no static scales"),
        ({"format": "fp8", "dialect": "modelopt"}, "needs calibrated scales"),
        ({"format": "nvfp4", "input_maxima": {}}, "lacks 7 modules, first model"),
        ({"format": "bfloat16", "policy": "linears"}, "policy: for quantised formats only"),
        ({"format": "keep", "dialect": "modelopt"}, "dialect: for quantised formats only"),
        ({"format": "keep", "ignore": ["x"]}, "ignore: for quantised formats only"),
        ({"format": "int8", "ignore": ["re:("]}, "no regular expression"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, dense, options, named):
    with pytest.raises(UsageError, match=named):
        convert_checkpoint(tmp_path / "q", dense, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_known_before_anything_is_written(tmp_path):
    def never():
        raise AssertionError("asked for its bits")

    huge = {"w": FileTensor(dtype="float32", shape=(1 << 50,), bits=never)}
    with pytest.raises(CheckpointError, match=r"need 4,503,599,627,370,496 bytes .* free"):
        write_folder(tmp_path / "ck", {"config.json": {}}, huge)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(tmp_path, dense):
    seen = []
    done = convert_checkpoint(
        tmp_path / "q", dense, format="int4", progress=lambda count, total: seen.append((count, total))
    )
    assert sum(count for count, _ in seen) == done.num_bytes == seen[0][1]
    assert {total for _, total in seen} == {done.num_bytes}
    assert done.num_bytes == sum(tensor.num_bytes for tensor in read_tensors(tmp_path / "q" / SINGLE_FILE).values())


KILLED = """
import sys, time
from pathlib import Path
from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.load import open_checkpoint

def wait(count, total):
    print(count, flush=True)
    time.sleep(60)

convert_checkpoint(Path(sys.argv[2]), open_checkpoint(Path(sys.argv[1])), format="int8", progress=wait)
"""


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path, dense):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(dense.folder), str(tmp_path / "out" / "q")],
        env=os.environ, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout.readline().strip()  # it is in the middle of the weights
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out" / "q").exists()
    (left,) = (tmp_path / "out").iterdir()
    assert left.name.startswith(".") and not (left / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(left)
    convert_checkpoint(tmp_path / "out" / "q", dense, format="int8")  # it is in nobody's way


PEAK = """
import resource, sys
from pathlib import Path
from dlmrt.checkpoint.convert import convert_checkpoint
from dlmrt.checkpoint.load import open_checkpoint
checkpoint = open_checkpoint(Path(sys.argv[1]))
convert_checkpoint(Path(sys.argv[2]) / "warm", checkpoint, format="int8", policy="linears", ignore=["*.mlp.*"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_checkpoint(Path(sys.argv[2]) / "all", checkpoint, format=sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_memory_is_that_of_one_matrix(tmp_path, make_config, format):
    """16 layers take no more than one."""
    config = make_config(hidden_size=256, intermediate_size=1024, num_layers=16, dtype="bfloat16", diffusion=None)
    weights = {name: np.broadcast_to(np.float32(0.5), shape) for name, shape in qwen3.tensor_shapes(config).items()}
    save_checkpoint(tmp_path / "ck", config, weights)
    size = (tmp_path / "ck" / SINGLE_FILE).stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "ck"), str(tmp_path), format],
        env=os.environ, check=True, capture_output=True, text=True,
    )  # fmt: skip
    matrix = 4 * 256 * 1024
    assert size > 20 * matrix
    assert int(done.stdout) <= 12 * matrix  # float32 values of one matrix and the steps of its rounding


@pytest.fixture(scope="module")
def trained():
    return open_checkpoint(resolve("dlmrt-tiny"))


@pytest.fixture(scope="module")
def canvases(trained):
    """(prompt, canvas) of problems that the model knows: nothing decided yet, and half of its own answer."""
    codec, rng = TextCodec.from_folder(trained.folder), np.random.default_rng(0)
    engine = Engine(load_denoiser(trained, dtype="float32"), trained.config, codec, trained.generation)
    result = []
    for prompt in ("If Ann has 3 apples and buys 4, how many apples has she?", "Sort: 5, 2, 9, 1", "12 + 7 - 5 ="):
        answer = np.array(engine.generate(prompt, max_tokens=32, temperature=0).token_ids, np.int32)[:32]
        for share in (0.0, 0.5):
            canvas = np.full(32, trained.config.diffusion.mask_token_id, np.int32)
            canvas[: len(answer)] = np.where(rng.random(len(answer)) < share, answer, canvas[: len(answer)])
            result.append((np.array(codec.encode(prompt), np.int32), canvas))
    return result


def logits(denoiser, canvases):
    """Float32 [canvases, slots, V]."""
    rows = []
    for prompt, canvas in canvases:
        denoiser.reset()
        denoiser.extend(prompt)
        rows.append(denoiser.forward(canvas, None, None))
    return np.stack(rows)


@pytest.mark.parametrize(
    ("format", "error", "agreement"),  # measured over ten canvases: 0.006 1.00, 0.025 0.99, 0.096 0.98, 0.099 0.98
    [("int8", 0.01, 0.99), ("fp8", 0.04, 0.97), ("nvfp4", 0.15, 0.95), ("int4", 0.15, 0.95)],
)
def test_the_trained_model_survives(tmp_path, trained, canvases, format, error, agreement):
    """Logits against bfloat16 on both executors; cpu keeps all codes but those of fp8, and rounds inputs too."""
    quantized = converted(tmp_path / "q", trained, format=format)
    native = load_native(quantized)
    assert native.dtype == ("bfloat16" if format == "fp8" else format)
    wanted = logits(load_denoiser(trained, dtype="float32"), canvases)
    for denoiser, extra in ((load_denoiser(quantized, dtype="float32"), 0), (native, 0.03)):
        got = logits(denoiser, canvases)
        assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < error + extra
        assert np.mean(got.argmax(-1) == wanted.argmax(-1)) >= agreement - extra
