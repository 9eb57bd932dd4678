"""`dlmrt quantize` and `dlmrt convert`, and what `dlmrt show` says about where a model fits."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.cli.fit import gpus
from dlmrt.cli.quantize import parse_size, read_prompts
from dlmrt.errors import UnknownOptionError, UsageError


@pytest.mark.parametrize("executor", ["eager", "cpu"])
def test_the_written_checkpoint_generates(cli, tiny_model, tmp_path, executor):
    outcome = cli("quantize", tiny_model, "--format", "int8", "--out", tmp_path / "q")
    assert outcome.status == 0 and outcome.err == ""
    assert outcome.out.startswith(f"{tmp_path / 'q'}: int8 of compressed-tensors, 14 matrices quantised, ")
    answer = cli("generate", tmp_path / "q", "hello", "--executor", executor, "--json")
    assert answer.status == 0 and json.loads(answer.out)["usage"]["completion_tokens"] > 0


def test_convert_is_quantize_and_goes_back(cli, tiny_model, tmp_path):
    cli("quantize", tiny_model, "--format", "nvfp4", "--out", tmp_path / "q", "--dialect", "modelopt")
    outcome = cli("convert", tmp_path / "q", "--format", "bf16", "--output", tmp_path / "b", "--json")
    report = json.loads(outcome.out)
    assert {name: report[name] for name in ("format", "dialect", "num_quantized", "num_kept_codes")} == {
        "format": "bfloat16", "dialect": None, "num_quantized": 0, "num_kept_codes": 0,
    }  # fmt: skip
    written = open_checkpoint(tmp_path / "b").stored.values()
    assert report["written_bytes"] == sum(tensor.num_bytes for tensor in written)
    other = cli("convert", tmp_path / "q", "--format", "nvfp4", "--out", tmp_path / "ct")
    assert "14 matrices quantised (14 with the codes they had)" in other.out


def test_shards(cli, tiny_model, tmp_path):
    cli("convert", tiny_model, "--format", "keep", "--out", tmp_path / "k", "--max-shard-size", "20KB")
    assert len(list((tmp_path / "k").glob("model-*-of-*.safetensors"))) > 1


def test_nothing_is_overwritten(cli, tiny_model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert cli("quantize", tiny_model, "--format", "int8", "--out", tmp_path / "empty").status == 0
    for name in ("empty", "file", "link"):
        outcome = cli("quantize", tiny_model, "--format", "fp8", "--out", tmp_path / name)
        assert outcome.status == 2 and "exists already" in outcome.err and outcome.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"
    assert cli("quantize", tiny_model, "--format", "int8", "--out", tiny_model).status == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "nvfp5"], "did you mean 'nvfp4'"),
        (["--format", "int8", "--policy", "all"], "known: experts, linears"),
        (["--format", "int8", "--policy", "experts"], "use policy 'linears'"),
        (["--format", "int8", "--dialect", "modelopt"], "does not write int8"),
        (["--format", "int8", "--ignore", "*.nothing"], "matches no module"),
        (["--format", "bf16", "--dialect", "modelopt"], "dialect: for quantised formats only"),
        (["--format", "keep", "--calibrate", "/dev/stdin.txt"], "cannot read"),
        (["--format", "int8", "--max-shard-size", "much"], "is not a size"),
        (["--format", "fp8", "--calibrate", "none.txt"], "check the path of --calibrate"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli, tiny_model, tmp_path, arguments, said):
    outcome = cli("quantize", tiny_model, "--out", tmp_path / "q", *arguments)
    assert outcome.status == 2 and said in outcome.err and outcome.err.count("\n") == 1
    assert not (tmp_path / "q").exists()


def test_calibration(cli, tiny_model, tmp_path):
    """Scales are the largest inputs that the prompts cause: of q, k and v the same, and larger with more prompts."""
    (tmp_path / "one.txt").write_text("hello\n\n")
    (tmp_path / "two.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "hello again, more and more of it"}\n')
    scales = []
    for prompts in ("one.txt", "two.jsonl"):
        outcome = cli(
            "quantize", tiny_model, "--format", "fp8", "--dialect", "modelopt", "--out", tmp_path / f"{prompts}.q",
            "--calibrate", tmp_path / prompts, "--calibrate-tokens", "8",
        )  # fmt: skip
        assert outcome.status == 0 and f"prompt 1 of {len(scales) + 1}" in outcome.err
        stored = open_checkpoint(tmp_path / f"{prompts}.q").stored
        scales.append({name: float(t.raw()) for name, t in stored.items() if name.endswith("input_scale")})
    assert len(scales[0]) == 14 and all(value > 0 for value in scales[0].values())
    assert len({scales[0][f"model.layers.0.self_attn.{which}_proj.input_scale"] for which in "qkv"}) == 1
    assert all(scales[1][name] >= value for name, value in scales[0].items()) and scales[0] != scales[1]


def test_files_of_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\n two\n")
    assert read_prompts(tmp_path / "p.txt") == ["one", " two"]
    for content, said in (("", "no prompts"), ("[]", "line 1"), ('{"prompt": 1}', "not a text"), ("{", "line 1")):
        (tmp_path / "p.jsonl").write_text(content)
        with pytest.raises(UsageError, match=said):
            read_prompts(tmp_path / "p.jsonl")


def test_a_pipe_is_not_waited_for(cli, tiny_model, tmp_path):
    """Nobody writes into it: reading would block for ever."""
    for name in ("p.txt", "d.yaml"):
        os.mkfifo(tmp_path / name)
    for arguments in (
        ["quantize", tiny_model, "--format", "fp8", "--out", tmp_path / "q", "--calibrate", tmp_path / "p.txt"],
        ["generate", tiny_model, "hello", "--decode-config", tmp_path / "d.yaml"],
        ["generate", tiny_model, "hello", "--decode-config", "/dev/zero/x.yaml"],
    ):
        outcome = cli(*arguments)
        assert outcome.status == 2 and "cannot read" in outcome.err and outcome.err.count("\n") == 1


@settings(max_examples=50)
@given(size=st.integers(1, 10**12), unit=st.sampled_from(["", "B", "KB", "kb", "MB", "GB", "MiB", " GiB", "k"]))
def test_sizes(size, unit):
    factor = {"K": 10**3, "M": 10**6, "G": 10**9}.get(unit.strip()[:1].upper(), 1)
    factor = {"MiB": 2**20, " GiB": 2**30}.get(unit, factor)
    assert parse_size(f"{size}{unit}") == size * factor


@settings(max_examples=50)
@given(text=st.text(max_size=8))
def test_what_is_no_size_is_refused(text):
    try:
        assert parse_size(text) > 0
    except UsageError as error:
        assert "write e.g. 5GB" in str(error)


def test_show_says_where_a_model_fits(cli, tiny_model):
    outcome = cli("show", tiny_model, "--gpu", "RTX-5090", "--context", "4096", "--tpf", "4", "--json")
    fit = json.loads(outcome.out)["fit"]
    stored = fit["formats"]["stored"]
    assert stored["weights_bytes"] == sum(t.num_bytes for t in open_checkpoint(tiny_model).stored.values())
    assert stored["total_bytes"] == stored["weights_bytes"] + fit["kv_bytes"] + fit["buffer_bytes"]
    gpu = fit["devices"]["rtx5090"]
    row = gpu["formats"]["stored"]
    assert row["fits"] and row["max_context_length"] == 8192
    assert row["max_tokens_per_second"] == pytest.approx(4 * 1792e9 / stored["read_bytes_per_forward"])
    assert row["max_tokens_per_second_autoregressive"] == row["max_forwards_per_second"]  # the same dense weights
    assert fit["devices"]["this machine"]["formats"]["stored"]["max_tokens_per_second"] is None
    text = cli("show", tiny_model, "--gpu", "h100", "--bandwidth", "30").out
    assert "on h100 (80.00 GB, 3.35 TB/s)" in text and "30.00 GB/s)" in text and "int8 linears" in text


def test_show_refuses_what_the_model_has_not(cli, tiny_model):
    for arguments, said in (
        (["--context", "9000"], "8192 positions"),
        (["--experts", "2"], "a layer of this model has 0"),
        (["--gpu", "h1000"], "did you mean 'h100'"),
    ):
        outcome = cli("show", tiny_model, *arguments)
        assert outcome.status == 2 and said in outcome.err


def test_gpus_by_their_usual_spellings():
    names = [device.name for device in gpus(["RTX 5090", "rtx-5090", "H200"])]
    assert names == ["rtx5090", "rtx5090", "h200"]
    with pytest.raises(UnknownOptionError, match="unknown GPU"):
        gpus(["tpu"])
