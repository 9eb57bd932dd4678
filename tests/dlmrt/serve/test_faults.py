"""Fault switches: parsed strictly, and without effect where nothing was asked for."""

from __future__ import annotations

import time

import pytest

from dlmrt.decode.engine import Engine
from dlmrt.env import Environment
from dlmrt.errors import CheckpointError, DeviceError, NonFiniteError, UnknownOptionError, UsageError
from dlmrt.serve.faults import FaultyDenoiser, before_load, parse_faults
from dlmrt.testing import END, ScriptedDenoiser, answering, byte_codec, encode_bytes, tiny_config

SCRIPT = answering([*encode_bytes("a text of two blocks"), END])


def engine_with(text: str) -> Engine:
    return Engine(FaultyDenoiser(ScriptedDenoiser(SCRIPT), parse_faults(text)), tiny_config(), byte_codec())


def test_parsing():
    assert parse_faults(" nan=2, slow_step=0.5,failed_load ,") == {"nan": 2, "slow_step": 0.5, "failed_load": 1}
    for text in ("nan", "nan=x", "failed_load=1", "nan=1.5"):
        with pytest.raises(UsageError, match="DLMRT_FAULT"):
            parse_faults(text)
    with pytest.raises(UnknownOptionError, match="did you mean 'slow_step'"):
        parse_faults("slow_steps=1")


def test_the_environment_asks_for_testing():
    assert Environment.read({"DLMRT_FAULT": "nan=0", "DLMRT_TESTING": "1"}).fault == "nan=0"
    for variables in (
        {"DLMRT_FAULT": "nan=0"},
        {"DLMRT_FAULT": "nan=0", "DLMRT_TESTING": "0"},
        {"DLMRT_TESTING": "yes"},
    ):
        with pytest.raises(UsageError, match="DLMRT_TESTING"):
            Environment.read(variables)


def test_faults_hit_what_they_name_and_nothing_else():
    plain = Engine(ScriptedDenoiser(SCRIPT), tiny_config(), byte_codec()).generate("x")
    engine = engine_with("nan=1")
    assert engine.generate("x").text == plain.text
    with pytest.raises(NonFiniteError):
        engine.generate("x")
    assert engine.generate("x").record.forwards == plain.record.forwards
    events = engine_with("error=1").stream("x")
    assert next(events).text == "a text o"
    with pytest.raises(DeviceError):
        list(events)


def test_slow_ones_take_their_time():
    began = time.monotonic()
    engine_with("slow_prefill=0.05,slow_step=0.02").generate("x")
    assert time.monotonic() - began >= 0.05 + 3 * 0.02
    with pytest.raises(CheckpointError):
        before_load(parse_faults("failed_load"))
