"""Staircase attention for accelerators, equal to `orl.attention` in value and gradient; and the choice among all.

The enumerated products of `orl.attention` are the rule on a CPU, the Triton kernel on a GPU; FlexAttention is there for
devices that Triton kernels of ours were not tuned for. Heavy imports live inside the function.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dlmrt.models.config import ModelConfig
from dlmrt.ops.spec import Attend
from orl.attention import Layout, StaircaseAttention
from orl.kernels.intervals import Intervals

Kind = Literal["auto", "enumerated", "flex", "triton"]


def staircase_attention(layout: Sequence[Layout], config: ModelConfig, *, device: str, kind: Kind) -> Attend:
    """Attention over the packed rows that `layout` describes, for a family that runs all rows alike."""
    assert config.diffusion is not None
    if kind == "auto":
        kind = "triton" if device.startswith("cuda") else "enumerated"
    if kind == "enumerated":
        return StaircaseAttention(layout, config.diffusion, device=device)
    layers = [Intervals.of(layout, config.diffusion)] * config.num_layers
    if kind == "flex":
        from orl.kernels.flex import FlexStaircase

        return FlexStaircase(layers, device=device)
    from orl.kernels.triton_staircase import TritonStaircase

    return TritonStaircase(layers, device=device)
