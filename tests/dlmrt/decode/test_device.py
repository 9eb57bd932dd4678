"""Executor "auto" leaves cuda alone while it has not run on a GPU; asking for a device needs no torch and no driver."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from dlmrt.cuda.device import num_devices
from dlmrt.decode import engine


@pytest.mark.parametrize(
    ("executor", "module"), [("auto", "dlmrt.cpu.executor"), ("cuda", "dlmrt.cuda.executor")]
)  # fmt: skip
def test_cuda_is_chosen_by_name_only(executor, module, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: object())
        patch.setattr(importlib, "import_module", lambda name: SimpleNamespace(load_denoiser=lambda *_, **__: name))
        assert engine.make_denoiser(None, executor=executor, dtype="auto", num_threads=None) == module


def test_no_driver_is_no_device():
    assert num_devices("libdlmrt-has-no-such-driver.so") == 0
