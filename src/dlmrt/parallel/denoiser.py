"""One rank's part of a model in torch: the eager executor over cut tensors, with sums where a cut runs through them.

Model files know nothing of it. Their operations get this rank's heads, columns, experts and ids; what needs the other
ranks is in the weights (`RowParallel`) or in the few operations that `ShardedOps` replaces. Activations are the same on
every rank, to the bit: every rank computes norms, routers and skip connections for itself, from the same sums.

Head statistics are made where the logits are (`dlmrt.parallel.statistics`); the soft embedding of a prediction is the
sum of what each rank's ids contribute from its own rows of the table.

Legend: as dlmrt.eager.executor. W ids of this rank, P ranks.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmrt.eager.executor import EagerDenoiser
from dlmrt.ops import eager
from dlmrt.ops.spec import Ops
from dlmrt.parallel.group import Group
from dlmrt.parallel.layout import Layout
from dlmrt.parallel.statistics import predict
from dlmrt.types import Bool, Float32, Int32, Prediction, Sampling


class RowParallel:
    """Some columns of a weight, on the rank that has those numbers of its input; see `dlmrt.ops.eager.Multiplies`."""

    def __init__(self, columns: Tensor, group: Group) -> None:
        self._columns, self._group = columns, group

    def multiply(self, x: Tensor) -> Tensor:
        """The whole product, on every rank."""
        return self._group.sum(F.linear(x, self._columns))


class ShardedOps:
    """`dlmrt.ops.eager`, but for operations over tables and experts that are divided over ranks."""

    def __init__(self, layout: Layout, group: Group) -> None:
        self._layout, self._group = layout, group

    def __getattr__(self, name: str) -> Any:
        return getattr(eager, name)

    def embed(self, table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
        """See `Ops.embed`. One rank has the row, the others add 0, which is exact."""
        at = ids - self._layout.vocab.start
        is_here = (at >= 0) & (at < len(table))
        rows = eager.embed(table, at.clamp(0, len(table) - 1), scale=scale)
        return self._group.sum(torch.where(is_here.unsqueeze(-1), rows, torch.zeros_like(rows)))

    def moe(
        self, x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str
    ) -> Tensor:
        """See `Ops.moe`. Every rank has all rows and computes its own experts."""
        mine = eager.expert_sum(x, experts, weights, gate, up, down, activation=activation, held=self._layout.experts)
        return self._group.sum(mine).to(x.dtype)

    def soft_embedding(self, probs: Tensor, table: Tensor, *, scale: float) -> Tensor:
        """See `Ops.soft_embedding`, of this rank's probabilities [T, W]: the sum over ranks."""
        return self._group.sum(eager.soft_embedding(probs, table, scale=scale))


class ShardedDenoiser(EagerDenoiser):
    """Implements `dlmrt.types.Denoiser` and `Predictor`; every rank makes the same calls.

    Args:
        params: this rank's parts (`Layout.cuts`), on the group's device.
        layout: what is whose.
    """

    def __init__(self, params: Mapping[str, Tensor], layout: Layout, group: Group) -> None:
        is_column = {name for name, cut in layout.cuts().items() if cut.axis == 1}
        parts = {name: RowParallel(part, group) if name in is_column else part for name, part in params.items()}
        super().__init__(cast(Any, parts), layout.config, ops=cast(Ops, ShardedOps(layout, group)))
        self._layout, self._group = layout, group
        self._probs: Tensor | None = None  # [L, W], of the last prediction
        self._banned: tuple[Int32, Tensor] | None = None  # ids, and which of this rank's they are

    @torch.inference_mode()
    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """See `Denoiser.forward`: all logits, gathered on every rank; `predict` leaves them where they are."""
        return whole_logits(self._logits(canvas_L, residual_LD, where_L).float(), self._layout, self._group)

    @torch.inference_mode()
    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """See `Denoiser.soft_embedding`: of probabilities of all ids, equal on every rank."""
        own = self._layout.vocab
        return super().soft_embedding(np.ascontiguousarray(probs_LV[:, own.start : own.stop]))

    @torch.inference_mode()
    def predict(
        self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None, sampling: Sampling, banned: Int32,
        *, block: int, step: int, open_L: Bool,
    ) -> Prediction:  # fmt: skip
        """See `Predictor.predict`; the same on every rank."""
        own = self._layout.vocab
        if self._banned is None or self._banned[0] is not banned:
            is_banned = np.zeros(self.vocab_size, dtype=bool)
            is_banned[banned] = True
            self._banned = banned, torch.from_numpy(is_banned[own.start : own.stop]).to(self._device)
        prediction, self._probs = predict(
            self._logits(canvas_L, residual_LD, where_L), own.start, self._group, sampling, self._banned[1],
            vocab_size=self.vocab_size, block=block, step=step, open_L=open_L,
        )  # fmt: skip
        return prediction

    @torch.inference_mode()
    def predicted_residual(self) -> Float32:
        """See `Predictor.predicted_residual`."""
        assert self._probs is not None, "nothing was predicted yet"
        result: Float32 = self._soft_embedding(self._probs).float().cpu().numpy()
        return result


def whole_logits(own_LW: Tensor, layout: Layout, group: Group) -> Float32:
    """Logits of all ids [L, V] from those of each rank, on every rank."""
    counts = [len(layout.vocab_of(rank)) for rank in range(layout.size)]
    parts = group.gather(F.pad(own_LW, (0, max(counts) - own_LW.shape[1]))).cpu().numpy()
    return np.concatenate([part[:, :count] for part, count in zip(parts, counts, strict=True)], axis=1)
