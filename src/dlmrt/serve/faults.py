"""Faults on demand, for tests of what the server does when the model or the machine fails. Off unless asked for.

`DLMRT_FAULT` holds faults separated by commas, each `name` or `name=value`; the environment refuses it without
`DLMRT_TESTING=1`. Requests and blocks count from 0. Without faults nothing of this module runs.

    nan=J             request J sees NaN logits in its first forward
    error=N           every request fails when block N begins
    slow_load=S       loading takes S seconds longer
    failed_load       loading fails
    slow_prefill=S    prefill takes S seconds longer
    slow_step=S       every denoising step takes S seconds longer

Source: ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from dlmrt.errors import CheckpointError, DeviceError, UnknownOptionError, UsageError, nearest
from dlmrt.types import Bool, Denoiser, Float32, Int32

_FAULTS = {"nan": int, "error": int, "slow_load": float, "failed_load": None, "slow_prefill": float, "slow_step": float}

Faults = Mapping[str, float]


def parse_faults(text: str) -> Faults:
    """The faults of `DLMRT_FAULT`.

    Raises:
        UnknownOptionError: there is no fault of that name.
        UsageError: a value is missing, superfluous or no number.
    """
    faults: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, has_value, value = item.partition("=")
        if name not in _FAULTS:
            raise UnknownOptionError(f"DLMRT_FAULT: unknown fault {name!r}{nearest(name, _FAULTS)}")
        kind = _FAULTS[name]
        try:
            faults[name] = 1.0 if kind is None and not has_value else (kind or _no_value)(value)
        except ValueError:
            raise UsageError(f"DLMRT_FAULT: {item!r} is not of the form name or name=number") from None
    return faults


def _no_value(value: str) -> float:
    raise ValueError(value)


def before_load(faults: Faults) -> None:
    """Faults of loading."""
    time.sleep(faults.get("slow_load", 0.0))
    if "failed_load" in faults:
        raise CheckpointError("loading failed because DLMRT_FAULT asks for it; unset it")


class FaultyDenoiser:
    """A denoiser that fails as told and is otherwise the one it wraps."""

    def __init__(self, denoiser: Denoiser, faults: Faults) -> None:
        self._denoiser, self._faults = denoiser, faults
        self._request, self._block = -1, -1
        self.name, self.dtype = denoiser.name, denoiser.dtype
        self.vocab_size, self.has_residual = denoiser.vocab_size, denoiser.has_residual

    def reset(self) -> None:
        """A new request begins."""
        self._request, self._block, self._is_new_block = self._request + 1, -1, True
        self._denoiser.reset()

    @property
    def context_length(self) -> int:
        """As the wrapped one's."""
        return self._denoiser.context_length

    def truncate(self, length: int) -> None:
        """As the wrapped one's."""
        self._denoiser.truncate(length)

    def extend(self, ids_S: Int32) -> None:
        """Prefill or commit forward."""
        if self._block < 0:
            time.sleep(self._faults.get("slow_prefill", 0.0))
        self._is_new_block = True
        self._denoiser.extend(ids_S)

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """One denoising step."""
        if self._is_new_block:
            self._block, self._is_new_block = self._block + 1, False
            if self._block == self._faults.get("error"):
                raise DeviceError("the device failed because DLMRT_FAULT asks for it; unset it")
        time.sleep(self._faults.get("slow_step", 0.0))
        logits_LV = self._denoiser.forward(canvas_L, residual_LD, where_L)
        if self._request == self._faults.get("nan") and self._block == 0:
            logits_LV = np.full_like(logits_LV, np.nan)
        return logits_LV

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """As the wrapped one's."""
        return self._denoiser.soft_embedding(probs_LV)
