"""One rank's part of a model on its GPU: the cuda executor over cut tensors, whole loops included.

Every rank captures the loop of its part. What ranks need of each other goes through symmetric memory inside the graphs
(`dlmrt.cuda.kernels.comm`), so a loop of many steps is one command of rank 0; each rank decides every step itself, from
the same bits. A rank that does not come to a meeting of GPUs in time ends the others' loops, which is an error here.

Single calls run the same programs: logits of all ids are put together outside of them.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dlmrt.cuda.comm import Peers
from dlmrt.cuda.executor import CudaDenoiser
from dlmrt.cuda.programs import DeviceProgram
from dlmrt.cuda.weights import Params
from dlmrt.parallel.denoiser import whole_logits
from dlmrt.parallel.group import Group
from dlmrt.parallel.layout import Layout
from dlmrt.program.forwards import Formats
from dlmrt.program.loop import LoopOptions
from dlmrt.program.shard import Shard
from dlmrt.types import Bool, Float32, Int32


class DeviceDenoiser(CudaDenoiser):
    """Implements `dlmrt.types.Denoiser`; every rank makes the same calls.

    Args:
        params: this rank's parts (`Layout.cuts`).
        shard: what programs know of them.
        formats, dtype, mode: as in `CudaDenoiser`.
    """

    def __init__(
        self, params: Params, layout: Layout, shard: Shard, group: Group, peers: Peers, *, formats: Formats, dtype: str,
        mode: str,
    ) -> None:  # fmt: skip
        self._layout, self._group, self._peers = layout, group, peers
        super().__init__(
            params, layout.config, dtype=dtype, device=str(group.device), mode=mode, formats=formats, shard=shard,
            peers=peers,
        )  # fmt: skip

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """See `Denoiser.forward`: all logits, gathered on every rank."""
        own = torch.from_numpy(super().forward(canvas_L, residual_LD, where_L)).to(self._group.device)
        return whole_logits(own, self._layout, self._group)

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """See `Denoiser.soft_embedding`: of probabilities of all ids, equal on every rank."""
        own = self._layout.vocab
        return super().soft_embedding(np.ascontiguousarray(probs_LV[:, own.start : own.stop]))

    def prepare_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> DeviceProgram:  # fmt: skip
        """See `CudaDenoiser.prepare_loop`; all ranks have done so then, who may take minutes to compile."""
        program = super().prepare_loop(options, positions=positions, scalars=scalars, arrays=arrays)
        self._group.assemble()
        return program

    def launch_loop(self, *, is_first: bool, num_blocks: int) -> bool:
        """See `CudaDenoiser.launch_loop`.

        Raises:
            DeviceError: a rank did not come to a meeting.
        """
        with self._group.guarded("loop"):
            has_ended = super().launch_loop(is_first=is_first, num_blocks=num_blocks)
            self._peers.check()
        return has_ended

    def _run(self, program: DeviceProgram, inputs: Mapping[str, npt.NDArray[np.generic]], **scalars: Any) -> None:
        self._group.assemble()  # its program may just have been compiled
        with self._group.guarded("forward"):
            super()._run(program, inputs, **scalars)
            self._peers.check()
