"""Executor "auto" tries cuda only where the driver finds a device; asking it needs neither torch nor a driver."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from dlmrt.cuda.device import num_devices
from dlmrt.decode import engine


@pytest.mark.parametrize(("count", "first"), [(0, "dlmrt.cpu.executor"), (1, "dlmrt.cuda.executor")])
def test_auto_starts_with_cuda_only_where_there_is_a_device(count, first, monkeypatch):
    monkeypatch.setattr(engine, "num_devices", lambda: count)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: object())
        patch.setattr(importlib, "import_module", lambda name: SimpleNamespace(load_denoiser=lambda *_, **__: name))
        assert engine.make_denoiser(None, executor="auto", dtype="auto", num_threads=None) == first


def test_no_driver_is_no_device():
    assert num_devices("libdlmrt-has-no-such-driver.so") == 0
