"""Programs of one model on the device: weights fused once, memory shared, programs bound at first use.

See `dlmrt.program.store`. Ranks refuse together: what does not fit one of them is not bound on any.

A loop program runs in launches of some blocks each (`dlmrt.cuda.lower.bounded`), so many that their records fit the
ring: the device never waits for the host, and one launch stays short enough for a display's watchdog.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlmrt.cuda.graph import Region, Step
from dlmrt.cuda.launches import Place, bind
from dlmrt.cuda.lower import CONSTANT, RANKS, bounded, lower
from dlmrt.cuda.memory import STORAGE, Ring, Scalars, available_bytes, view_of
from dlmrt.cuda.runners import Runner, make_runner
from dlmrt.cuda.weights import Packed, Params, join, weight_bytes
from dlmrt.errors import DeviceError, OutOfMemoryError
from dlmrt.models.config import ModelConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.loop import record_types
from dlmrt.program.nodes import Buffer, Kernel, Node, Program, While, maximum
from dlmrt.program.record import describe_rope
from dlmrt.program.store import Lowered, Placed, Store, shortage, weight_key

if TYPE_CHECKING:
    from dlmrt.cuda.comm import Peers

PAGE = 512  # positions by which the context grows
MIN_SLOTS = 64  # of the ring


@dataclass(frozen=True, kw_only=True)
class DeviceProgram:
    """A program bound to memory, ready to run."""

    runner: Runner
    scalars: Scalars
    states: Mapping[str, Tensor]
    ring: Ring
    record_types: Mapping[str, npt.DTypeLike]

    def fill(self, **inputs: npt.NDArray[np.generic]) -> None:
        """Write the leading rows of states; those that the program does not read are left out."""
        for name, values in inputs.items():
            if name not in self.states:
                continue
            state = self.states[name]
            kept = np.ascontiguousarray(values.view(np.int32) if values.dtype == np.uint32 else values)
            state[: len(values)] = torch.from_numpy(kept).to(device=state.device, dtype=state.dtype)

    def result(self, name: str, length: int) -> npt.NDArray[np.float32]:
        """A copy of the leading rows of a float32 state."""
        values: npt.NDArray[np.float32] = self.states[name][:length].float().cpu().numpy()
        return values


class ProgramStore(Store[DeviceProgram, Tensor | Packed]):
    """Weights, context and programs of one model.

    Args:
        params: as in `Store`.
        mode: how loops run, a name of `dlmrt.cuda.runners.MODES`.
        has_nvfp4_operands: as in `dlmrt.cuda.lower.lower`.
        peers: the other ranks, where programs are of one rank's part.
    """

    def __init__(
        self, config: ModelConfig, params: Params, *, device: torch.device, mode: str, has_nvfp4_operands: bool = False,
        peers: Peers | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, params, page=PAGE)
        self.device, self.mode, self.peers = device, mode, peers
        self._has_nvfp4_operands = has_nvfp4_operands
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self._capability = 10 * major + minor
        self._weights: dict[tuple[str, str, str], Packed] = {}
        self._context: dict[str, Tensor] = {}
        self._arena = torch.zeros(0, dtype=torch.uint8, device=device)
        self._ropes: dict[str, Tensor] = {}
        self._ring = Ring(device)

    @property
    def uses_graphs(self) -> bool:
        """Whether a program runs as a graph: a mode that is not available was replaced by another one."""
        return any(program.runner.mode != "off" for program in self._programs.values())

    def _made(self, record: Callable[[], Program]) -> DeviceProgram:
        try:
            return super()._made(record)
        except torch.OutOfMemoryError as error:  # what is free lies in pieces, or another process was quicker
            raise DeviceError(f"the model does not fit the device: {error}; free memory, or choose another") from error

    def _lowered(self, recorded: Program) -> Lowered:
        lowered = lower(recorded, self.config, has_nvfp4_operands=self._has_nvfp4_operands)
        return replace(lowered, program=bounded(lowered.program)) if record_types(recorded) else lowered

    def _check_fits(self, placed: Placed) -> None:
        what = "the model" if self.peers is None else f"the part of rank {self.peers.rank}"
        reason = shortage(self._missing_bytes(placed), available_bytes(self.device), what)
        if self.peers is not None:
            reason = self.peers.agree(reason)
        if reason:
            raise OutOfMemoryError(reason)
        if self.peers is not None:
            self.peers.reserve(placed.lowered.part_bytes)

    def _num_bytes(self, buffer: Buffer) -> int:
        return weight_bytes(buffer) if buffer.kind == "weight" else buffer.num_bytes

    def _held_bytes(self, buffer: Buffer) -> int:
        if weight_key(buffer) in self._weights:
            return self._num_bytes(buffer)
        held = (self._ropes if buffer.kind == "weight" else self._context).get(buffer.name)
        return 0 if held is None else held.nbytes

    def _load_weights(self, lowered: Lowered) -> None:
        for buffer in lowered.program.buffers():
            key = weight_key(buffer)
            if buffer.kind == "weight" and not _is_rope(buffer) and key not in self._weights:
                tensors = lowered.sources.get(buffer, (buffer,))
                self._weights[key] = join([self._tensor(t.name) for t in tensors], buffer.dtype, self.device)

    def _tensor(self, name: str) -> Packed:
        param = self._param(name)
        return Packed(values=param) if isinstance(param, Tensor) else param

    def _grow_context(self, num_kept: int) -> None:
        self._ropes.clear()
        if not num_kept:
            self._context.clear()

    def _arena_bytes(self) -> int:
        return len(self._arena)

    def _replace_arena(self, num_bytes: int) -> None:
        self._arena = torch.zeros(0, dtype=torch.uint8, device=self.device)  # there may be no room for both
        self._arena = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def _release(self, program: DeviceProgram) -> None:
        program.runner.close()

    def _bind(self, placed: Placed) -> DeviceProgram:
        buffers = placed.program.buffers()
        scalars = Scalars((b for b in buffers if b.kind == "scalar"), self.device, on_host="cancel")
        states: dict[str, Tensor] = {}
        places: dict[Buffer, Place] = {}
        for buffer in buffers:
            if buffer.kind == "weight":
                places[buffer] = self._rope(buffer) if _is_rope(buffer) else self._weights[weight_key(buffer)]
            elif buffer.kind == "scratch":
                places[buffer] = view_of(buffer, self._arena[placed.plan.offsets[buffer] :])
            elif buffer.kind == "scalar":
                places[buffer] = scalars.tensors[buffer.name]
                if buffer.name.startswith(CONSTANT):
                    scalars.set(**{buffer.name: int(buffer.name.removeprefix(CONSTANT))})
            elif buffer.name == "ring":
                places[buffer] = self._ring.control
            elif buffer.name == RANKS:
                assert self.peers is not None, "a program of one rank's part"
                places[buffer] = self.peers.control
            else:
                places[buffer] = states[buffer.name] = self._state(buffer)
        scalars.upload()
        steps = self._steps(placed.program.body, places)
        runner = make_runner(steps, mode=self.mode, device=self.device)
        return DeviceProgram(
            runner=runner, scalars=scalars, states=states, ring=self._ring, record_types=placed.record_types
        )  # fmt: skip

    def _steps(self, body: tuple[Node, ...], places: Mapping[Buffer, Place]) -> tuple[Step, ...]:
        steps: list[Step] = []
        for node in body:
            if isinstance(node, Kernel):
                steps.append(bind(node, places, capability=self._capability))
                continue
            flag = places[node.flag]
            assert isinstance(flag, Tensor)
            steps.append(
                Region(
                    is_loop=isinstance(node, While),
                    flag=flag,
                    name=node.flag.name,
                    body=self._steps(node.body, places),
                )
            )
        return tuple(steps)

    def _state(self, buffer: Buffer) -> Tensor:
        """Memory of a state; that of the context is shared and grows with its contents."""
        shape = tuple(maximum(dim) for dim in buffer.shape)
        dtype = STORAGE[buffer.dtype]
        if not buffer.name.startswith(CONTEXT):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        memory = self._context.get(buffer.name)
        if memory is None or len(memory) < shape[0]:
            grown = torch.zeros(shape, dtype=dtype, device=self.device)
            if memory is not None:
                grown[: len(memory)] = memory
            memory = self._context[buffer.name] = grown
        return memory

    def _rope(self, buffer: Buffer) -> Tensor:
        """Cosines or sines float32 [C, R / 2]; phases are float32 products, as in the eager executor."""
        if buffer.name not in self._ropes:
            described, head_dim, name = buffer.name.removeprefix("rope.").rsplit(".", 2)
            layers = map(self.config.attention, range(self.config.num_layers))
            rope = next(layer.rope for layer in layers if describe_rope(layer.rope) == described)
            inv_freq, factor = rope_inv_freq(rope, int(head_dim))
            phase = np.arange(self.capacity, dtype=np.float32)[:, None] * inv_freq
            table = (np.cos if name == "cos" else np.sin)(phase.astype(np.float64)).astype(np.float32)
            self._ropes[buffer.name] = torch.from_numpy(table * np.float32(factor)).to(self.device)
        return self._ropes[buffer.name]


def _is_rope(buffer: Buffer) -> bool:
    return buffer.name.startswith("rope.")
