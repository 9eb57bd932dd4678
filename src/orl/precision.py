"""The type that forwards compute in: bfloat16 where the hardware multiplies it, float32 elsewhere.

A CPU without bfloat16 instructions computes such products one by one, about 50 times slower than float32 (measured:
0.8 against 44 GFLOP/s on one AVX2 core), so "auto" asks the hardware.

Source: ours.
"""

from __future__ import annotations

from typing import Literal

import torch

ComputeType = Literal["auto", "bfloat16", "float32"]


def multiplies_bfloat16(device: str) -> bool:
    """Whether bfloat16 products are native on `device` ("cpu", "cuda:1")."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Of the library that multiplies on a CPU; torch has no public name for the question.
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_bfloat16(dtype: ComputeType, device: str) -> bool:
    """What `dtype` means on `device`."""
    return multiplies_bfloat16(device) if dtype == "auto" else dtype == "bfloat16"


def autocast(dtype: ComputeType, device: str) -> torch.autocast:
    """The context in which forwards on `device` run."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=is_bfloat16(dtype, device))
