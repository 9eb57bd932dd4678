"""Which matrices of a model are quantised, by name alone: a policy, and patterns of what it must leave out.

    policy    what is quantised
    experts   routed experts; everything else keeps its type
    linears   also every other matrix but embedding, head, routers and residual adapter

Source: ours; what is left alone is what released files leave alone.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from dlmrt.errors import UnknownOptionError, UsageError, nearest
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.models.layers import FileName, file_names

Policy = Literal["experts", "linears"]
Shapes = Mapping[str, tuple[int, ...]]


def quantized_files(
    config: ModelConfig, shapes: Shapes, policy: Policy | None, ignore: Sequence[str] = ()
) -> dict[str, FileName]:
    """Module -> the matrix of the file that is quantised.

    Args:
        shapes: of the model's tensors.
        policy: None: experts where the model has them, else linears.
        ignore: modules to leave as they are: names, globs, or regular expressions behind "re:".

    Raises:
        UnknownOptionError: no policy goes by that name.
        UsageError: nothing would be quantised, a pattern matches nothing or is no expression.
    """
    if policy not in (None, *get_args(Policy)):
        raise UnknownOptionError(f"unknown policy {policy!r}{nearest(policy, get_args(Policy))}")
    family = family_of(config)
    policy = policy or ("linears" if config.moe is None else "experts")
    never = (family.EMBEDDING, family.HEAD)
    chosen = {
        module_of(file): file
        for file in file_names(shapes, joins=False)
        if file.index is not None
        or (
            policy == "linears" and file.name not in never and len(shape_of(file, shapes)) == 2
            and file.name.endswith(".weight") and not re.search(family.UNQUANTIZED, file.name)
        )
    }  # fmt: skip
    for pattern in ignore:
        matched = [module for module in chosen if _matches(module, pattern)]
        if not matched:
            raise UsageError(f"ignore pattern {pattern!r} matches no module that would be quantised; correct it")
        for module in matched:
            del chosen[module]
    if not chosen:
        raise UsageError(f"policy {policy!r} leaves nothing to quantise in this model; use policy 'linears'")
    return chosen


def module_of(file: FileName) -> str:
    """Name of the module whose weight the file's tensor is."""
    return file.name.removesuffix(".weight")


def shape_of(file: FileName, shapes: Shapes) -> tuple[int, ...]:
    """Of a tensor of a file that holds experts one by one."""
    shape = shapes[file.sources[0]]
    return shape if file.index is None else shape[1:]


def _matches(module: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatch.fnmatchcase(module, pattern)
    try:
        return re.match(pattern[3:], module) is not None
    except re.error as error:
        raise UsageError(f"ignore pattern {pattern!r} is no regular expression ({error}); correct it") from error
