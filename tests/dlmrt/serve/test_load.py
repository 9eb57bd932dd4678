"""Options that reach into the checkpoint: honoured, or refused with the way out."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dlmrt.errors import CheckpointError, UsageError
from dlmrt.serve.load import LoadConfig, load_engine
from dlmrt.serve.load import _check_quantization as check_quantization

from .conftest import user

MODEL = LoadConfig(model="dlmrt-tiny", num_threads=1)


def test_a_shorter_context_bounds_prompt_and_answer(start):
    server = start(load_engine(dataclasses.replace(MODEL, max_model_len=64)))
    card = json.loads(server.request("GET", "/v1/models")[2])["data"][0]
    assert (card["max_model_len"], card["root"]) == (64, "tiny")
    status, error = server.post("/v1/chat/completions", messages=user("2 + 3 ="), max_tokens=64)
    assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
    usage = server.chat("2 + 3 =", max_tokens=32, ignore_eos=True)["usage"]
    assert (usage["completion_tokens"], usage["diffusion"]["graphs"]) == (32, False)
    for length in (31, 10**6):
        with pytest.raises(UsageError, match="it can be 32"):
            load_engine(dataclasses.replace(MODEL, max_model_len=length))


def test_other_generation_defaults(tmp_path):
    """K69: a file in their place is read whole; the settings of the rule come from it or from the rule."""
    assert load_engine(MODEL).settings().threshold == 0.99
    (tmp_path / "generation_config.json").write_text('{"diffusion": {"threshold": 0.5}, "max_new_tokens": 7}')
    for source in (tmp_path, tmp_path / "generation_config.json"):
        settings = load_engine(dataclasses.replace(MODEL, generation_config=str(source))).settings()
        assert (settings.threshold, settings.max_tokens) == (0.5, 7)


def test_an_adapter_is_read(tmp_path):
    with pytest.raises(CheckpointError, match="is no adapter"):
        load_engine(dataclasses.replace(MODEL, adapter=tmp_path))


def test_a_format_can_be_confirmed_and_not_chosen():
    declared = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    for name in (None, "auto", "compressed-tensors", "NVFP4-pack-quantized"):
        check_quantization(declared, name)
    check_quantization({}, "none")
    for names, wanted in ((declared, "modelopt"), ({}, "fp8")):
        with pytest.raises(UsageError, match="leave the option out"):
            check_quantization(names, wanted)
