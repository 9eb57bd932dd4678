"""Low-rank adaptation of any matrix of a model, stacked experts included: W x + scale * B (A x).

The two factors are parameters like all others, named ``<matrix>.lora_a`` and ``<matrix>.lora_b``: optimizers, saved
state and sharding know nothing of them. The model reads its parameters through `lora_view`, which hands out, in place
of an adapted matrix, an object that multiplies (`dlmrt.ops.eager.linear`). B starts at 0, so update 0 is the start
model. `merged` gives plain weights: what engines decode with and what is exported.

Own code, not peft: that library wraps modules of type Linear, and here a linear is a function of a named tensor, packed
for query, key and value in one family and stacked over experts in two; wrapping would need a module tree made for it.

Legend: O output width, I input width, E experts, r rank.

Source: E. Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from orl.errors import RecipeError

A, B = ".lora_a", ".lora_b"


def lora_targets(config: ModelConfig) -> list[str]:
    """Matrices of the layers; not routers, whose choice must not drift from what was rolled out, nor the adapter."""
    family = family_of(config)
    return [
        name
        for name, shape in family.tensor_shapes(config).items()
        if ".layers." in name and len(shape) >= 2 and not re.search(family.UNQUANTIZED, name)
    ]


def lora_shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of both factors of every target.

    Raises:
        RecipeError: the rank is not below the sides of every matrix.
    """
    shapes = family_of(config).tensor_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for name in lora_targets(config):
        *stack, out, width = shapes[name]
        if not 1 <= rank < min(out, width):
            raise RecipeError(
                f"lora_rank {rank} does not fit {name} of {out} x {width}; give 1 to {min(out, width) - 1}"
            )
        found |= {name + A: (*stack, rank, width), name + B: (*stack, out, rank)}
    return found


def new_lora(config: ModelConfig, rank: int, *, seed: int) -> dict[str, Tensor]:
    """Fresh factors: A uniform within sqrt(3 / I), B zero."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in lora_shapes(config, rank).items():
        if name.endswith(B):
            found[name] = torch.zeros(shape)
        else:
            found[name] = (2 * torch.rand(shape, generator=generator) - 1) * math.sqrt(3 / shape[-1])
    return found


class LoraWeight:
    """An adapted matrix [O, I], or a stack [E, O, I]: what `linear` multiplies with in its place."""

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        self.weight, self.a, self.b, self.scale = weight, a, b, scale

    def __getitem__(self, expert: int) -> LoraWeight:
        return LoraWeight(self.weight[expert], self.a[expert], self.b[expert], self.scale)

    def multiply(self, x: Tensor) -> Tensor:
        """X times the adapted matrix."""
        return F.linear(x, self.weight) + self.scale * F.linear(F.linear(x, self.a), self.b)


class _LoraView(Mapping[str, Any]):
    def __init__(self, params: Mapping[str, Tensor], scale: float) -> None:
        self._params, self._scale = params, scale

    def __getitem__(self, name: str) -> Any:
        weight = self._params[name]
        if name + A not in self._params:
            return weight
        return LoraWeight(weight, self._params[name + A], self._params[name + B], self._scale)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._params if not name.endswith((A, B)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def lora_view(params: Mapping[str, Tensor], scale: float) -> Mapping[str, Tensor]:
    """What the model reads: adapted matrices where there are factors, everything else as it is."""
    return _LoraView(params, scale)


@torch.no_grad()
def merged(params: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Plain weights that compute the same, in the dtype of the matrices."""
    found = {}
    for name, weight in params.items():
        if name.endswith((A, B)):
            continue
        found[name] = weight
        if name + A in params:
            delta = params[name + B].float() @ params[name + A].float()
            found[name] = (weight.float() + scale * delta).to(weight.dtype)
    return found
