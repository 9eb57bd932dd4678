"""Pieces that several model files share: the ORL residual adapter, and where a file's tensors go.

Source: ours; the adapter is ORL's e_i = E[x_i] + alpha * g(z_i) (arXiv 2610.20687, project page), g as in
DiffusionGemma's self-conditioning module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dlmrt.models.config import ModelConfig
from dlmrt.ops.spec import Ops, Tensor

ADAPTER = "model.residual_adapter."
STACKED = r"(.*\.experts)\.(gate|up|down)_proj"  # names of stacked experts: prefix, which matrix
Shapes = dict[str, tuple[int, ...]]


def has_residual(config: ModelConfig) -> bool:
    """Whether the checkpoint has a residual pathway."""
    return config.diffusion is not None and config.diffusion.residual.kind != "none"


def adapter_shapes(config: ModelConfig) -> Shapes:
    """Tensors of the residual adapter, none without the pathway."""
    if not has_residual(config):
        return {}
    assert config.diffusion is not None
    d, width = config.hidden_size, config.diffusion.residual.intermediate_size
    return {
        ADAPTER + "norm.weight": (d,),
        ADAPTER + "gate_proj.weight": (width, d),
        ADAPTER + "up_proj.weight": (width, d),
        ADAPTER + "down_proj.weight": (d, width),
    }


def mix_residual(
    ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, x: Tensor, z: Tensor | None, where: Tensor | None
) -> Tensor:
    """Embeddings x [T, D] with the adapter's view of residual z added on the rows of `where`; z None stands for 0."""
    if z is None:
        return x
    assert config.diffusion is not None
    adapter = [params[f"{ADAPTER}{name}.weight"] for name in ("norm", "gate_proj", "up_proj", "down_proj")]
    return ops.residual_mix(x, z, where, *adapter, alpha=config.diffusion.residual.alpha, eps=config.rms_norm_eps)


LayerFunction = Callable[[Mapping[str, Tensor], Tensor], Tensor]  # (parameters, rows [T, D]) -> rows [T, D]


@runtime_checkable
class LayeredParams(Protocol):
    """Parameters that are to hand for one layer at a time: sharded over processes, or used again in backward."""

    def run_layer(self, layer_idx: int, layer: LayerFunction, x: Tensor) -> Tensor:
        """``layer(parameters, x)`` with the parameters of layer `layer_idx` present."""


def run_layer(
    layer: Callable[..., Tensor], ops: Ops, params: Mapping[str, Tensor], config: ModelConfig, layer_idx: int,
    x: Tensor, *rest: Any,
) -> Tensor:  # fmt: skip
    """``layer(ops, params, config, layer_idx, x, *rest)`` by way of the parameters, where they want to know."""

    def call(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return layer(ops, params, config, layer_idx, x, *rest)

    return params.run_layer(layer_idx, call, x) if isinstance(params, LayeredParams) else call(params, x)


def embedding_scale(config: ModelConfig) -> float:
    """Factor of the soft embedding."""
    assert config.diffusion is not None
    return math.sqrt(config.hidden_size) if config.diffusion.residual.scale_embedding else 1.0


@dataclass(frozen=True, kw_only=True)
class Rename:
    """Where one kind of tensor in a file goes in the model. A tensor that no rule matches keeps its name.

    Example: ``Rename(pattern=r"(.*\\.experts)\\.(\\d+)\\.up_proj\\.weight", target=r"\\1.up_proj", index=2)``.
    """

    pattern: str  # of the whole name in the file
    target: str | None  # name in the model, with the pattern's groups; None: no part of the model
    index: int | None = None  # group that holds the place along the target's first axis
    part: tuple[int, int] | None = (
        None  # (i, n): the file joins n targets along the last axis but one; this is the i-th
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place in a tensor of the model that one tensor of a file fills."""

    target: str
    index: int | None = None
    part: tuple[int, int] | None = None


def places(name: str, renames: Sequence[Rename]) -> tuple[Place, ...]:
    """Where the file's tensor `name` goes; empty when it is no part of the model."""
    return tuple(_places(name, renames))


def _places(name: str, renames: Sequence[Rename]) -> Iterator[Place]:
    matches = [(rule, match) for rule in renames if (match := re.fullmatch(rule.pattern, name))]
    if not matches:
        yield Place(target=name)
    for rule, match in matches:
        if rule.target is not None:
            index = None if rule.index is None else int(match[rule.index])
            yield Place(target=match.expand(rule.target), index=index, part=rule.part)


@dataclass(frozen=True, kw_only=True)
class FileName:
    """A tensor of a file and what of the model it holds: the inverse of `Rename`."""

    name: str
    sources: tuple[str, ...]  # several: joined along the last axis but one
    index: int | None = None  # of the first axis; None: all of it


def file_names(shapes: Mapping[str, tuple[int, ...]], *, joins: bool) -> list[FileName]:
    """The tensors of a plain file for the model's tensors `shapes`.

    Args:
        joins: stacked experts stay whole, gate and up in one tensor; False: one matrix an expert.
    """
    names: list[FileName] = []
    for source, shape in shapes.items():
        match = re.fullmatch(STACKED, source)
        if match is None:
            names.append(FileName(name=source, sources=(source,)))
        elif not joins:
            names += [
                FileName(name=f"{match[1]}.{index}.{match[2]}_proj.weight", sources=(source,), index=index)
                for index in range(shape[0])
            ]
        elif match[2] == "gate":
            names.append(FileName(name=f"{match[1]}.gate_up_proj", sources=(source, f"{match[1]}.up_proj")))
        elif match[2] == "down":
            names.append(FileName(name=source, sources=(source,)))
    return names
