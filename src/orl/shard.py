"""Parameters sharded over processes (FSDP2), for models whose forward is a function of a mapping of parameters.

`ShardedParams` holds what `torch.distributed.fsdp.fully_shard` needs, a tree of modules: one a layer and a root with
everything else. `run(fn)` calls ``fn(params)`` inside the root's forward; the family's loop over layers goes through
`run_layer`, hence through the layer's module, so a layer's tensors are gathered before it runs, freed after it,
gathered again in backward, and its gradients are reduced as soon as they exist. Nothing in model or loss code knows.

Gradients are *summed* over processes, not averaged: losses are normalised over the whole step before it is dealt, so k
processes give what one gives. Collectives must match, so every process runs `run` equally often.

With one process there is no sharding, and checkpointing of activations still works.

Left out on purpose: tensor and expert parallelism.

Source: torch.distributed.fsdp (FSDP2); ours otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dlmrt.models.layers import LayerFunction

T = TypeVar("T")
View = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class ShardedParams(Mapping[str, Tensor]):
    """A model's parameters by name, sharded if a process group is up.

    Args:
        params: by name, equal on every process; kept as they are where there is one process.
        trained: names of those that get gradients.
        checkpoint_layers: keep a layer's input alone and compute the layer again in backward.
        view: what the model reads instead of the parameters themselves (see `orl.lora.lora_view`).
    """

    def __init__(
        self, params: Mapping[str, Tensor], *, trained: Callable[[str], bool] = lambda name: True,
        checkpoint_layers: bool = False, view: View = lambda params: params,
    ) -> None:  # fmt: skip
        numbers = {name: layer_of(name) for name in params}
        num_layers = 1 + max((n for n in numbers.values() if n is not None), default=-1)
        self._view = view
        self.root = _Tensors(
            {name: params[name] for name, number in numbers.items() if number is None}, trained, checkpoint_it=False
        )
        self._layers = [
            _Tensors(
                {name: params[name] for name, number in numbers.items() if number == idx}, trained,
                checkpoint_it=checkpoint_layers,
            )
            for idx in range(num_layers)
        ]  # fmt: skip
        self.root.add_module("layers", nn.ModuleList(self._layers))
        self._of = {name: self.root if (n := numbers[name]) is None else self._layers[n] for name in params}
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._shard()

    def _shard(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for module in (*self._layers, self.root):
            # Also the root: after a run without backward it would keep what an optimizer step then outdates.
            fully_shard(module, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum

    def run(self, fn: Callable[[Mapping[str, Tensor]], T]) -> T:
        """``fn(params)`` with the tensors outside of layers gathered; what it returns may be back-propagated from."""
        return cast(T, self.root(lambda _: fn(self), None))

    def run_layer(self, layer_idx: int, layer: LayerFunction, x: Tensor) -> Tensor:
        """See `dlmrt.models.layers.LayeredParams`."""
        module = self._layers[layer_idx]
        return cast(Tensor, module(lambda x: layer(self._view(module.tensors()), x), x))

    def __getitem__(self, name: str) -> Tensor:
        module = self._of[name]
        return self._view(module.tensors())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What an optimizer steps and a state saves, by name: this process's shards where there are several."""
        return {name: module.parameter(name) for name, module in self._of.items()}


class _Tensors(nn.Module):
    """Some parameters by name; forward calls a function with them present."""

    def __init__(self, params: Mapping[str, Tensor], trained: Callable[[str], bool], *, checkpoint_it: bool) -> None:
        super().__init__()
        self._checkpoint_it = checkpoint_it
        self._keys = {name: name.replace(".", "/") for name in params}  # a parameter's name holds no dot
        for name, tensor in params.items():
            self.register_parameter(self._keys[name], nn.Parameter(tensor, requires_grad=trained(name)))

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter `name`: whole between gather and release, else a shard."""
        return self.get_parameter(self._keys[name])

    def tensors(self) -> dict[str, Tensor]:
        """All of them as they are now."""
        return {name: self.parameter(name) for name in self._keys}

    def forward(self, fn: Callable[[Any], Any], x: Any) -> Any:
        """``fn(x)``; again in backward if activations are not kept."""
        if self._checkpoint_it and torch.is_grad_enabled():
            return checkpoint(fn, x, use_reentrant=False)
        return fn(x)


def run_with(params: Mapping[str, Tensor], fn: Callable[[Mapping[str, Tensor]], T]) -> T:
    """``fn(params)``, by `ShardedParams.run` where they are such."""
    return params.run(fn) if isinstance(params, ShardedParams) else fn(params)


def layer_of(name: str) -> int | None:
    """Number of the layer that a parameter belongs to, None outside of layers."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_as(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor of the shape of `like`, as that is sharded; others are as they were."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def shared_out(function: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """`function` of each whole tensor, computed by one process each and sharded as its argument was.

    As many whole tensors are held at a time as there are processes. Every process must iterate to the end.
    """
    if not tensors or not isinstance(tensors[0], DTensor):
        yield from map(function, tensors)
        return
    mesh = tensors[0].device_mesh
    for start in range(0, len(tensors), mesh.size()):
        wholes = [whole(tensor) for tensor in tensors[start : start + mesh.size()]]
        results = [function(w) if mesh.get_local_rank() == i else torch.empty_like(w) for i, w in enumerate(wholes)]
        for i, result in enumerate(results):
            yield distribute_tensor(result, mesh, tensors[start + i].placements, src_data_rank=i)
