"""Rank 0 decides, the others follow: how ranks come together, and how a request runs on all of them.

Every rank starts with the same command line and loads its part of the same checkpoint; files and settings that differ
are refused by name before a weight is read. Then rank 0 has a denoiser like any other under an ordinary engine, and
`follow` runs on the others: each call of the denoiser is sent to them and made on all parts at once.

Where GPUs read each other's memory, parts are programs (`dlmrt.parallel.device`) and rank 0 has a `LeadingLoop`: a call
runs many steps on all of them, which decide alike. Elsewhere parts are in torch, and rank 0 has a `LeadingDenoiser`:
the loop, the commit rule, random numbers and the tokens are rank 0's alone. What another rank would have decided is
never asked, so ranks cannot come apart; ids arrive with each call.

Followers wait for commands without end, but only while rank 0 lives (`dlmrt.parallel.pulse`). When a rank is lost the
others stop with an error that names it; nothing is tried again.

Source: ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from dlmrt.checkpoint.load import Checkpoint, load_params
from dlmrt.env import Environment
from dlmrt.errors import DeviceError, NonFiniteError, OutOfMemoryError, UsageError
from dlmrt.parallel.denoiser import ShardedDenoiser
from dlmrt.parallel.group import JOIN_S, Group
from dlmrt.parallel.layout import Layout
from dlmrt.parallel.ranks import EXECUTOR, Ranks
from dlmrt.program.loop import LoopOptions
from dlmrt.types import Bool, Float32, Int32, Prediction, Sampling

if TYPE_CHECKING:
    from dlmrt.cuda.executor import LoopRun
    from dlmrt.parallel.device import DeviceDenoiser

logger = logging.getLogger(__name__)

_METHODS = ("reset", "truncate", "extend", "forward", "soft_embedding", "predict", "predicted_residual", "prepare_loop",
            "launch_loop")  # fmt: skip
# What a call raises on every rank or on none: of its arguments, of statistics that all have, and of memory, about which
# ranks agree. Anything else may be one rank's alone, and a rank that goes on without the others' last collective is out
# of step.
_SHARED_ERRORS = (UsageError, NonFiniteError, OutOfMemoryError)
_KEPT = "as before"  # stands for an argument that the follower has: it was in the last call, or made by it


@dataclass
class _Kept:
    """Large arguments that every rank has by now, by name."""

    values: dict[str, Any] = field(default_factory=dict)

    def packed(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values` of a call, those that followers have left out."""
        found = {
            name: _KEPT if value is not None and value is self.values.get(name) else value
            for name, value in values.items()
        }  # fmt: skip
        self._keep(values)
        return found

    def unpacked(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values` as rank 0 has them."""
        found = {
            name: self.values[name] if isinstance(value, str) and value == _KEPT else value
            for name, value in values.items()
        }  # fmt: skip
        self._keep(found)
        return found

    def _keep(self, values: dict[str, Any]) -> None:
        self.values |= {name: values[name] for name in ("banned", "residual_LD") if name in values}


class _Leader:
    """Implements `dlmrt.types.Denoiser` over the parts of all ranks."""

    name = EXECUTOR

    def __init__(self, part: ShardedDenoiser | DeviceDenoiser, group: Group) -> None:
        self._part, self._group, self._kept = part, group, _Kept()
        self.dtype, self.vocab_size, self.has_residual = part.dtype, part.vocab_size, part.has_residual
        self.num_ranks = group.size
        self.num_threads: int | None = getattr(part, "num_threads", None)  # of this rank
        self._numbers = 0

    def reset(self) -> None:
        """Forget the committed context."""
        self._on_all("reset", "reset")

    @property
    def context_length(self) -> int:
        """Committed tokens whose keys and values are final."""
        return self._part.context_length

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens."""
        self._on_all("truncate", f"truncate to {length}", length=length)

    def extend(self, ids_S: Int32) -> None:
        """Append final ids to the committed context."""
        self._on_all("extend", f"extend by {len(ids_S)} rows behind {self.context_length}", ids_S=ids_S)

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """See `Denoiser.forward`."""
        logits_LV: Float32 = self._on_all(
            "forward", f"forward of {len(canvas_L)} rows", canvas_L=canvas_L, residual_LD=residual_LD, where_L=where_L
        )
        return logits_LV

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """See `Denoiser.soft_embedding`."""
        return self._residual(self._on_all("soft_embedding", "soft embedding", probs_LV=probs_LV))

    def _on_all(self, method: str, what: str, **arguments: Any) -> Any:
        """Call `method` of every rank's part; what rank 0's returns."""
        self._numbers += 1
        command = (self._numbers, method, what, self._kept.packed(arguments))
        self._group.do(f"command {self._numbers}, {what}", number=self._numbers)
        self._group.command(pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL))
        try:
            return getattr(self._part, method)(**arguments)
        except _SHARED_ERRORS:
            raise
        except Exception as error:
            if self._group.loss is None:  # the others are in the middle of it
                self._group.fail(error)
            raise

    def _residual(self, z: Float32) -> Float32:
        self._kept.values["residual_LD"] = z  # every rank has made it
        return z


class LeadingDenoiser(_Leader):
    """Implements `dlmrt.types.Denoiser` and `Predictor` over parts in torch."""

    def predict(
        self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None, sampling: Sampling, banned: Int32,
        *, block: int, step: int, open_L: Bool,
    ) -> Prediction:  # fmt: skip
        """See `Predictor.predict`."""
        prediction: Prediction = self._on_all(
            "predict", f"block {block}, step {step}", canvas_L=canvas_L, residual_LD=residual_LD, where_L=where_L,
            sampling=sampling, banned=banned, block=block, step=step, open_L=open_L,
        )  # fmt: skip
        return prediction

    def predicted_residual(self) -> Float32:
        """See `Predictor.predicted_residual`."""
        return self._residual(self._on_all("predicted_residual", "residual"))


class LeadingLoop(_Leader):
    """Implements `dlmrt.types.Denoiser` and `dlmrt.decode.native.LoopExecutor` over parts that are programs."""

    @property
    def uses_graphs(self) -> bool:
        """See `CudaDenoiser.uses_graphs`."""
        return bool(getattr(self._part, "uses_graphs", False))

    def start_loop(
        self, options: LoopOptions, *, positions: int, scalars: Mapping[str, int | float],
        arrays: Mapping[str, npt.NDArray[np.generic]],
    ) -> LoopRun:  # fmt: skip
        """See `CudaDenoiser.start_loop`. A thread sends the launches; nothing else is sent until the run is closed."""
        from dlmrt.cuda.executor import LoopRun

        program = self._on_all(
            "prepare_loop", "preparing a loop", options=options, positions=positions, scalars=dict(scalars),
            arrays=dict(arrays),
        )  # fmt: skip
        return LoopRun(program, self._launch, max_steps=int(scalars["max_steps"]))

    def _launch(self, *, is_first: bool, num_blocks: int) -> bool:
        where = "the first blocks" if is_first else "further blocks"
        has_ended: bool = self._on_all("launch_loop", where, is_first=is_first, num_blocks=num_blocks)
        return has_ended


def load_denoiser(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> _Leader:
    """Join the other ranks as their leader and load this rank's part of `checkpoint`.

    Raises:
        UsageError: this process is not the first of several, or a rank has other files or settings.
        DeviceError: a rank is missing or lost.
    """
    ranks = Ranks.read()
    if ranks.size == 1 or ranks.is_follower:
        raise UsageError(
            f"executor {EXECUTOR!r} is the first of several processes' own; start them with torchrun, the others call "
            "dlmrt.parallel.lead.follow"
        )
    part, group = _joined(ranks, checkpoint, dtype=dtype, num_threads=num_threads)
    leader = LeadingDenoiser(part, group) if isinstance(part, ShardedDenoiser) else LeadingLoop(part, group)
    weakref.finalize(leader, _leave, group)  # also at the end of the process: followers end with their leader
    return leader


def follow(checkpoint: Checkpoint, *, dtype: str = "auto", num_threads: int | None = None) -> None:
    """Run the commands of rank 0 until it dismisses this one.

    When another rank is lost while this one waits in a collective, from which nothing wakes it, the process ends with
    a line on stderr and status 1.

    Raises:
        UsageError: files or settings differ from another rank's.
        DeviceError: a rank is missing or lost.
    """
    part, group = _joined(Ranks.read(), checkpoint, dtype=dtype, num_threads=num_threads, on_loss=_end_process)
    try:
        obey(part, group)
    except Exception as error:
        group.fail(error)
        raise
    finally:
        group.close()


def obey(part: ShardedDenoiser | DeviceDenoiser, group: Group) -> None:
    """Run the commands of rank 0's denoiser on this rank's part until it sends an empty one."""
    kept, expected = _Kept(), 0
    while True:
        group.do(f"waiting for command {expected + 1}", number=expected)
        payload = group.command(None)
        if not payload:
            return
        number, method, what, arguments = pickle.loads(payload)
        expected += 1
        if number != expected or method not in _METHODS:
            raise DeviceError(f"rank {group.rank} got command {number}, {method!r}, where {expected} was to come")
        group.do(f"command {number}, {what}", number=number)
        try:
            result = getattr(part, method)(**kept.unpacked(arguments))
        except _SHARED_ERRORS:
            continue  # rank 0's caller is told
        if method in ("predicted_residual", "soft_embedding"):
            kept.values["residual_LD"] = result


def _end_process(report: str) -> None:
    print(f"error: {report}", file=sys.stderr, flush=True)
    os._exit(1)


def _leave(group: Group) -> None:
    """Send the followers home, and go."""
    if group.loss is None:
        with contextlib.suppress(DeviceError):  # a rank that is gone needs no word
            group.command(b"")
    group.close()


def _joined(
    ranks: Ranks,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    num_threads: int | None,
    on_loss: Callable[[str], None] | None = None,
) -> tuple[ShardedDenoiser | DeviceDenoiser, Group]:
    """This rank's part, once all ranks are there, agree, and have loaded theirs."""
    layout = Layout(checkpoint.config, ranks.rank, ranks.size)
    timeout_s = Environment.read().rank_timeout
    group = Group(ranks, timeout_s=timeout_s, on_loss=on_loss)
    try:
        _check_agreement(
            group,
            {"checkpoint": fingerprint(checkpoint), "dtype": dtype, "DLMRT_RANK_TIMEOUT": timeout_s,
             "device": _device_name(group.device), "torch": torch.__version__},
        )  # fmt: skip
        group.connect()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        group.do("loading its part of the checkpoint")
        part = _load_part(checkpoint, layout, group, dtype=dtype)
        group.pulse.note(f"loaded its part of {checkpoint.folder.name}")
        group.pulse.meet("loaded", "", JOIN_S)
    except Exception as error:
        group.fail(error)
        group.close()
        raise
    return part, group


def _load_part(checkpoint: Checkpoint, layout: Layout, group: Group, *, dtype: str) -> ShardedDenoiser | DeviceDenoiser:
    """Programs, if all ranks can run them; else, with a logged reason, forwards in torch."""
    if reason := group.agree(_obstacle(layout, group, dtype)):
        level = logging.INFO if group.device.type == "cpu" else logging.WARNING
        logger.log(level, "no loop on the GPUs, each step is driven from rank 0: %s", reason)
        params = load_params(checkpoint, dtype=dtype, cuts=layout.cuts())
        return ShardedDenoiser({name: values.to(group.device) for name, values in params.items()}, layout, group)
    from dlmrt.cuda.executor import part_formats
    from dlmrt.parallel.device import DeviceDenoiser

    held, formats, name = part_formats(checkpoint, dtype=dtype, cuts=layout.cuts())
    assert group.peers is not None, "what has no obstacle"
    return DeviceDenoiser(
        held, layout, layout.shard(terms=formats.matrix), group, group.peers, formats=formats, dtype=name,
        mode=Environment.read().cuda_graph,
    )  # fmt: skip


def _obstacle(layout: Layout, group: Group, dtype: str) -> str:
    """Why this rank cannot run programs; empty: it can."""
    if group.device.type == "cpu":
        return f"rank {group.rank} runs on the CPU"
    if group.peers is None:
        return "the GPUs do not read each other's memory"
    if dtype == "float16":
        return "dtype float16 has no kernels"
    try:
        layout.shard(terms="float32")
    except UsageError as error:
        return str(error)
    return ""


def _device_name(device: torch.device) -> str:
    """Kind of the device: other GPUs may round otherwise, and ranks would decide otherwise."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _check_agreement(group: Group, mine: dict[str, Any]) -> None:
    """Refuse files or settings that differ between ranks."""
    texts = group.pulse.meet("settings", json.dumps(mine), JOIN_S)
    first, *others = map(json.loads, texts)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UsageError(
                    f"rank 0 has {name} {value!r} and rank {rank} has {other.get(name)!r}; start all ranks with the "
                    "same command, settings and files"
                )


def fingerprint(checkpoint: Checkpoint) -> str:
    """A digest of configuration, tensor headers and one row of each tensor: differs between fine-tunings of a model."""
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    for name, tensor in sorted(checkpoint.stored.items()):
        row = tensor
        while len(row.shape) > 1:
            row = row.item(0)
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(row.raw().tobytes())
    return digest.hexdigest()[:16]
