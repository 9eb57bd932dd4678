"""Which parameters of a model train, and its plain weights whenever an engine or a file needs them.

full: everything but routers, whose choice must not drift from what was rolled out. lora: low-rank factors of the
layers' matrices. adapter: nothing else. The residual adapter always trains.

Source: ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from orl.errors import RecipeError
from orl.lora import A, B, lora_view, merged, new_lora
from orl.shard import ShardedParams, whole
from orl.start import restore_params
from orl.train_recipe import TuneSection


def trains(config: ModelConfig, section: TuneSection) -> Callable[[str], bool]:
    """Whether the parameter of a name trains.

    Raises:
        RecipeError: nothing would.
    """
    family = family_of(config)
    if section.what == "adapter" and not family.has_residual(config):
        raise RecipeError("tune.what is 'adapter' and the start model has no residual adapter; use 'lora' or 'full'")

    def trained(name: str) -> bool:
        if name.startswith(family.ADAPTER) or name.endswith((A, B)):
            return True
        is_router = ".layers." in name and re.search(family.UNQUANTIZED, name) is not None
        return section.what == "full" and not is_router and not name.endswith(family.FLOAT32)

    return trained


def trained_params(
    start: Mapping[str, Tensor], config: ModelConfig, section: TuneSection,
    *, seed: int, saved: Mapping[str, Tensor] | None, states: Path,
) -> ShardedParams:  # fmt: skip
    """Parameters of the model being trained; what does not train is shared with `start`, not copied.

    Args:
        saved: of the run's last state, named ``param.<name>``; None for a new run.
        states: names that state in errors.

    Raises:
        RecipeError: nothing would train, or the rank does not fit.
        RunFolderError: the state is of a model with other tensors.
    """
    trained = trains(config, section)
    tensors = {name: tensor.clone() if trained(name) else tensor for name, tensor in start.items()}
    if section.what == "lora":
        tensors |= new_lora(config, section.lora_rank, seed=seed)
    if saved is not None:
        mine = {name: tensor for name, tensor in tensors.items() if trained(name)}
        restore_params(mine, {k: v for k, v in saved.items() if k.startswith("param.")}, states)
    return ShardedParams(
        tensors, trained=trained, checkpoint_layers=section.checkpoint_layers,
        view=lambda params: lora_view(params, section.lora_scale) if section.what == "lora" else params,
    )  # fmt: skip


def plain_weights(params: ShardedParams, section: TuneSection) -> dict[str, Tensor]:
    """Whole tensors of the model as decoders know it; every process must ask."""
    tensors = {name: whole(parameter.detach()).cpu() for name, parameter in params.parameters().items()}
    return merged(tensors, section.lora_scale) if section.what == "lora" else tensors
