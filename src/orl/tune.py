"""Which parameters of a model train, and its plain weights whenever an engine or a file needs them.

full: everything but routers, whose choice must not drift from what was rolled out. lora: low-rank factors of the
layers' matrices. adapter: nothing else. The residual adapter always trains.

Source: ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dlmrt.checkpoint.adapter import open_adapter, save_adapter, with_adapter
from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import Checkpoint, open_checkpoint
from dlmrt.models.config import ModelConfig, ResidualConfig
from dlmrt.models.families import family_of
from orl.errors import RecipeError
from orl.lora import A, B, lora_view, merged, new_lora
from orl.ranks import TrainRanks
from orl.shard import ShardedParams, whole
from orl.start import restore_params
from orl.train_recipe import TuneSection


def with_new_adapter(config: ModelConfig, section: TuneSection) -> ModelConfig:
    """The config of the model that trains: with the fresh residual adapter that the recipe asks for.

    Raises:
        RecipeError: the start model is no diffusion model, or has an adapter already.
    """
    if config.diffusion is None:
        raise RecipeError("run.init is no diffusion model; make one of it with orl pretrain")
    if not section.new_adapter_width:
        return config
    if family_of(config).has_residual(config):
        raise RecipeError("run.init has a residual adapter already; leave tune.new_adapter_width out")
    residual = ResidualConfig(
        kind="gated_mlp", where="masked" if config.diffusion.noise == "mask" else "all",
        intermediate_size=section.new_adapter_width,
    )  # fmt: skip
    return replace(config, diffusion=replace(config.diffusion, residual=residual))


def new_adapter(config: ModelConfig, *, seed: int) -> dict[str, Tensor]:
    """A fresh adapter whose last matrix is 0: the model computes what it did without one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in family_of(config).adapter_shapes(config).items():
        if len(shape) == 1:
            found[name] = torch.ones(shape)
        elif "down_proj" in name:
            found[name] = torch.zeros(shape)
        else:
            found[name] = torch.randn(shape, generator=generator) * math.sqrt(0.4 / shape[1])
    return found


def start_checkpoint(init: str, section: TuneSection, folder: Path, ranks: TrainRanks, *, seed: int) -> Checkpoint:
    """The start model; with the fresh adapter, which is kept in `folder`, if the recipe asks for one."""
    base = open_checkpoint(resolve(init))
    config = with_new_adapter(base.config, section)
    if config is base.config:
        return base
    if ranks.is_main and not folder.exists():
        save_adapter(folder, config, new_adapter(config, seed=seed), base=base, dtype="float32")
    ranks.wait()
    return with_adapter(base, open_adapter(folder))


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
    *, seed: int, saved: Mapping[str, Tensor] | None, states: Path, device: str = "cpu",
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
        {name: tensor.to(device) for name, tensor in tensors.items()}, trained=trained,
        checkpoint_layers=section.checkpoint_layers,
        view=lambda params: lora_view(params, section.lora_scale) if section.what == "lora" else params,
    )  # fmt: skip


def plain_weights(params: ShardedParams, section: TuneSection) -> dict[str, Tensor]:
    """Whole tensors of the model as decoders know it; every process must ask."""
    tensors = {name: whole(parameter.detach()).cpu() for name, parameter in params.parameters().items()}
    return merged(tensors, section.lora_scale) if section.what == "lora" else tensors
