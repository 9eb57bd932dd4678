"""Largest activations of the matrices of a model, watched while it answers prompts.

The scale of activations that a file may store (NVFP4 W4A4, FP8) is the largest magnitude that ever entered the matrix.
Matrices that engines multiply together see the same input and so get the same scale; experts of one layer see different
rows, some hardly any, so all of them get the largest of the layer.

Left out: percentiles and searches for a better clipping point.

Source: maximum calibration as in nvidia-modelopt 0.47.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from torch import Tensor

from dlmrt.checkpoint.load import Checkpoint, load_params
from dlmrt.eager.executor import EagerDenoiser
from dlmrt.models.layers import FileName
from dlmrt.ops import eager
from dlmrt.types import Float32


class _Watcher:
    """Lets an input through and remembers its largest magnitude."""

    def __init__(self) -> None:
        self.largest = 0.0

    def __call__(self, x: Float32) -> Float32:
        self.largest = max(self.largest, float(np.abs(x).max(initial=0)))
        return x


class WatchedDenoiser(EagerDenoiser):
    """The eager executor, which also notes what enters the matrices of `targets`.

    Args:
        checkpoint: whose weights are loaded, in its own type.
        targets: module -> matrix, as `dlmrt.checkpoint.policy.quantized_files` gives them.
    """

    def __init__(self, checkpoint: Checkpoint, targets: Mapping[str, FileName]) -> None:
        self._source = {module: file.sources[0] for module, file in targets.items()}
        params = load_params(checkpoint)
        self._watchers = {
            name: [_Watcher() for _ in range(params[name].shape[0] if params[name].ndim == 3 else 1)]
            for name in dict.fromkeys(self._source.values())
        }
        watched = {name: eager.QuantizedInput(params[name], watchers) for name, watchers in self._watchers.items()}
        super().__init__(cast("Mapping[str, Tensor]", {**params, **watched}), checkpoint.config)

    def input_maxima(self) -> dict[str, float]:
        """Module -> largest magnitude that entered it so far; of all experts of a layer together."""
        largest = {name: max(watcher.largest for watcher in watchers) for name, watchers in self._watchers.items()}
        return {module: largest[name] for module, name in self._source.items()}
