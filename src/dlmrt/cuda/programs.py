"""Programs of one model on the device: weights fused once, memory shared, programs bound at first use.

All programs of a model share its weights, one arena of scratch (only one runs at a time) and the committed context.
When the context must hold more positions, or a program needs more scratch, that memory is replaced and every program
is bound anew at its next use: growth happens between requests, never while a program runs.

A loop program runs in launches of some blocks each (`dlmrt.cuda.lower.bounded`), so many that their records fit the
ring: the device never waits for the host, and one launch stays short enough for a display's watchdog.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlmrt.cuda.graph import Region, Step
from dlmrt.cuda.launches import Place, bind
from dlmrt.cuda.lower import CONSTANT, RANKS, Lowered, bounded, lower
from dlmrt.cuda.memory import STORAGE, Ring, Scalars, view_of
from dlmrt.cuda.runners import Runner, make_runner
from dlmrt.cuda.weights import Packed, Params, join
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.loop import record_types
from dlmrt.program.nodes import Buffer, Kernel, Node, Program, While, maximum
from dlmrt.program.plan import Plan, plan
from dlmrt.program.record import describe_rope

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


class ProgramStore:
    """Weights, context and programs of one model.

    Args:
        params: the checkpoint's tensors; kept only while weights are being fused.
        mode: how loops run, a name of `dlmrt.cuda.runners.MODES`.
        has_nvfp4_operands: as in `dlmrt.cuda.lower.lower`.
        peers: the other ranks, where programs are of one rank's part.
    """

    def __init__(
        self, config: ModelConfig, params: Params, *, device: torch.device, mode: str, has_nvfp4_operands: bool = False,
        peers: Peers | None = None,
    ) -> None:  # fmt: skip
        self.config, self.device, self.mode, self.peers = config, device, mode, peers
        self._has_nvfp4_operands = has_nvfp4_operands
        self.capacity = 0  # positions that the context holds
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self._capability = 10 * major + minor
        self._params: Params | None = params
        self._weights: dict[tuple[str, str, str], Packed] = {}
        self._context: dict[str, Tensor] = {}
        self._arena = torch.zeros(0, dtype=torch.uint8, device=device)
        self._ropes: dict[str, Tensor] = {}
        self._ring = Ring(device)
        self._programs: dict[Hashable, DeviceProgram] = {}

    @property
    def uses_graphs(self) -> bool:
        """Whether a program runs as a graph: a mode that is not available was replaced by another one."""
        return any(program.runner.mode != "off" for program in self._programs.values())

    def get(self, key: Hashable, record: Callable[[], Program]) -> DeviceProgram:
        """The program called `key`, recorded and bound at its first use."""
        if key not in self._programs:
            recorded = record()
            lowered = lower(recorded, self.config, has_nvfp4_operands=self._has_nvfp4_operands)
            types = record_types(recorded)
            if types:
                lowered = replace(lowered, program=bounded(lowered.program))
            if self.peers is not None:
                self.peers.reserve(lowered.part_bytes)
            placement = plan(lowered.program)
            self._load_weights(lowered)
            if placement.num_bytes > len(self._arena):
                self._programs.clear()
                self._arena = torch.zeros(placement.num_bytes, dtype=torch.uint8, device=self.device)
            self._programs[key] = self._bind(lowered.program, placement, types)
        return self._programs[key]

    def release_params(self) -> None:
        """Weights are on the device: forget where they came from."""
        self._params = None

    def reserve(self, positions: int, kept: int) -> None:
        """Make room for `positions` in the context, keeping the first `kept`."""
        if positions <= self.capacity:
            return
        limit = self.config.max_position_embeddings
        wanted = max(positions, min(limit, max(1024, 1 << (positions - 1).bit_length())))
        self.capacity = -(-wanted // PAGE) * PAGE
        self._programs.clear()
        self._ropes.clear()
        if not kept:
            self._context.clear()

    def _load_weights(self, lowered: Lowered) -> None:
        """Fuse or copy the weights of a program that are not there yet."""
        for buffer in lowered.program.buffers():
            key = _key(buffer)
            if buffer.kind == "weight" and not _is_rope(buffer) and key not in self._weights:
                tensors = lowered.sources.get(buffer, (buffer,))
                self._weights[key] = join([self._param(t.name) for t in tensors], buffer.dtype, self.device)

    def _param(self, name: str) -> Packed:
        assert self._params is not None, f"{name} is asked for after the weights were loaded"
        family = family_of(self.config)
        is_tied = name == family.HEAD and self.config.tie_word_embeddings
        param = self._params[family.EMBEDDING if is_tied else name]
        return Packed(values=param) if isinstance(param, Tensor) else param

    def _bind(self, program: Program, placement: Plan, types: Mapping[str, npt.DTypeLike]) -> DeviceProgram:
        buffers = program.buffers()
        scalars = Scalars((b for b in buffers if b.kind == "scalar"), self.device, on_host="cancel")
        states: dict[str, Tensor] = {}
        places: dict[Buffer, Place] = {}
        for buffer in buffers:
            if buffer.kind == "weight":
                places[buffer] = self._rope(buffer) if _is_rope(buffer) else self._weights[_key(buffer)]
            elif buffer.kind == "scratch":
                places[buffer] = view_of(buffer, self._arena[placement.offsets[buffer] :])
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
        steps = self._steps(program.body, places)
        runner = make_runner(steps, mode=self.mode, device=self.device)
        return DeviceProgram(runner=runner, scalars=scalars, states=states, ring=self._ring, record_types=types)

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


def _key(buffer: Buffer) -> tuple[str, str, str]:
    return buffer.name, buffer.dtype, buffer.layout


def _is_rope(buffer: Buffer) -> bool:
    return buffer.name.startswith("rope.")
