"""Programs of one model on the native runner: weights packed once, memory shared, programs bound at first use.

The threads' own scratch is shared too, since only one program runs at a time. See `dlmrt.program.store`.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.tensorfile import encode
from dlmrt.cpu import _native
from dlmrt.cpu.lower import lower
from dlmrt.cpu.memory import Bytes, address, aligned, array_of, check_fits, rope_tables
from dlmrt.cpu.parts import DTYPES, PAGE_SIZE, group_of, rope_name, ropes
from dlmrt.cpu.weights import Matrix, Param, Params, Quantized, Stacked
from dlmrt.errors import DeviceError
from dlmrt.models.config import ModelConfig
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.nodes import Buffer, Kernel, Node, Program, While, maximum
from dlmrt.program.store import Lowered, Placed, Store, weight_key

Memory = tuple[int, int]  # address and bytes
Place = Memory | _native.PackedWeight | _native.Ring  # or an object that owns its memory

RING_SLOTS = 64  # records; the reader is woken when half are there, and the loop waits when it lags by all of them


@dataclass(frozen=True, kw_only=True)
class NativeProgram:
    """A program bound to memory, ready to run."""

    runner: _native.Runner
    scalars: Mapping[str, npt.NDArray[np.generic]]  # each of shape [1]
    states: Mapping[str, npt.NDArray[np.generic]]  # row-major states, at their largest size
    ring: _native.Ring | None  # of programs that publish
    record_types: Mapping[str, npt.DTypeLike]
    memory: object  # what the runner's addresses point into

    def set(self, **values: int | float) -> None:
        """Write scalars."""
        for name, value in values.items():
            self.scalars[name][0] = value


class ProgramStore(Store[NativeProgram, Param]):
    """Weights, context and programs of one model.

    Args:
        params: as in `Store`.
        num_threads: size of the pool.
        isa: name of an instruction set, "" for the best one.
    """

    def __init__(self, config: ModelConfig, params: Params, *, num_threads: int, isa: str = "") -> None:
        super().__init__(config, params, page=PAGE_SIZE)
        try:
            self.isa = str(_native.instruction_set(isa))
        except ValueError as error:
            raise DeviceError(f"DLMRT_CPU_ISA: {error}") from error
        self._pool = _native.Pool(num_threads)
        self.num_threads = self._pool.size
        self._packed: dict[tuple[str, str, str], _native.PackedWeight] = {}
        self._tables: dict[tuple[str, str, str], Bytes] = {}
        self._origins: dict[tuple[str, str, str], tuple[Buffer, ...]] = {}  # tensors that a weight was made of
        self._context: dict[str, Bytes] = {}
        self._ropes = {rope_name(i, which): aligned(0) for i, _ in enumerate(ropes(config)) for which in ("cos", "sin")}
        self._arena = aligned(0)

    def assign(self, params: Params) -> None:
        """Write other values of the same shapes into the weights that bound programs point to; none may be running."""
        self._params = params
        for key, weight in self._packed.items():
            self._fill_packed(weight, self._origins[key])
        for key, memory in self._tables.items():
            self._fill(memory, *self._origins[key])
        self.release_params()

    def _lowered(self, recorded: Program) -> Lowered:
        return lower(recorded, self.config, num_threads=self.num_threads)

    def _check_fits(self, placed: Placed) -> None:
        check_fits(self._missing_bytes(placed) + RING_SLOTS * placed.record_bytes, "the model")

    def _held_bytes(self, buffer: Buffer) -> int:
        if self._has(buffer):
            return buffer.num_bytes
        shared = self._ropes if buffer.kind == "weight" else self._context
        return len(shared.get(buffer.name, b""))

    def _arena_bytes(self) -> int:
        return len(self._arena)

    def _replace_arena(self, num_bytes: int) -> None:
        self._arena = aligned(num_bytes)

    def _grow_context(self, num_kept: int) -> None:
        for index, (rope, head_dim) in enumerate(ropes(self.config)):
            tables = rope_tables(rope, head_dim, self.capacity)
            self._ropes |= {rope_name(index, which): table for which, table in zip(("cos", "sin"), tables, strict=True)}
        if not num_kept:
            self._context.clear()

    def _load_weights(self, lowered: Lowered) -> None:
        # The largest first: what is read of a tensor lies beside what it becomes, best while little else is there.
        for buffer in sorted(lowered.program.buffers(), key=lambda buffer: buffer.num_bytes, reverse=True):
            if buffer.kind != "weight" or self._has(buffer) or buffer.name in self._ropes:
                continue
            self._origins[weight_key(buffer)] = lowered.sources.get(buffer, (buffer,))
            if buffer in lowered.sources:
                self._packed[weight_key(buffer)] = self._pack(buffer, lowered.sources[buffer])
            else:
                self._tables[weight_key(buffer)] = self._copy(buffer)

    def _has(self, buffer: Buffer) -> bool:
        return weight_key(buffer) in self._packed or weight_key(buffer) in self._tables

    def _pack(self, buffer: Buffer, tensors: tuple[Buffer, ...]) -> _native.PackedWeight:
        *stack, n, k = map(maximum, buffer.shape)
        weight = _native.empty_weight(DTYPES[buffer.dtype], group_of(buffer.dtype), n, k, *stack or (1,))
        self._fill_packed(weight, tensors)
        return weight

    def _fill_packed(self, weight: _native.PackedWeight, tensors: tuple[Buffer, ...]) -> None:
        """Experts are read one after the other, so that no more than one is in memory beside the packed ones."""
        params = [self._param(tensor.name) for tensor in tensors]
        *stack, _, _ = map(maximum, tensors[0].shape)
        for index in range(*stack or (1,)):
            matrices = [_contiguous(_matrix(param, index, bool(stack))) for param in params]
            _native.fill_weight(weight, self._pool, index, [_source(matrix) for matrix in matrices])

    def _copy(self, buffer: Buffer) -> Bytes:
        """A tensor kept in rows: norms and the embedding table."""
        memory = aligned(buffer.num_bytes)
        self._fill(memory, buffer)
        return memory

    def _fill(self, memory: Bytes, buffer: Buffer) -> None:
        values = self._param(buffer.name)
        assert isinstance(values, np.ndarray), f"{buffer.name} is read by rows"
        if buffer.dtype == "bfloat16":
            bits = values if values.dtype == np.uint16 else encode(values, "bfloat16")
            memory.view(np.uint16)[:] = bits.reshape(-1)
        else:
            memory.view(np.float32)[:] = as_float32(values).reshape(-1)

    def _bind(self, placed: Placed) -> NativeProgram:
        program, types = placed.program, placed.record_types
        ring = _native.Ring(RING_SLOTS, placed.record_bytes) if types else None
        states: dict[str, npt.NDArray[np.generic]] = {}
        scalars: dict[str, npt.NDArray[np.generic]] = {}
        places: dict[Buffer, Place] = {}
        kept: list[object] = [self._arena, dict(self._ropes)]
        for buffer in program.buffers():
            if buffer.kind == "weight":
                places[buffer] = self._place_of_weight(buffer)
            elif buffer.kind == "scratch":
                places[buffer] = address(self._arena) + placed.plan.offsets[buffer], buffer.num_bytes
            elif buffer.name == "ring":
                assert ring is not None
                places[buffer] = ring
            else:
                memory = self._state(buffer)
                kept.append(memory)
                places[buffer] = address(memory), buffer.num_bytes
                if buffer.kind == "scalar":
                    scalars[buffer.name] = memory.view(np.dtype(buffer.dtype))[:1]
                elif not buffer.name.startswith(CONTEXT):
                    states[buffer.name] = array_of(buffer, memory)
        runner = _native.Runner(self._pool, self.isa)
        _add(runner, program.body, places)
        check_fits(runner.missing_scratch_bytes, "scratch of the threads")
        return NativeProgram(runner=runner, scalars=scalars, states=states, ring=ring, record_types=types, memory=kept)

    def _state(self, buffer: Buffer) -> Bytes:
        """Memory of a state or scalar; that of the context is shared and grows with its contents."""
        if not buffer.name.startswith(CONTEXT):
            return aligned(max(buffer.num_bytes, 8))
        memory = self._context.get(buffer.name)
        if memory is None or len(memory) < buffer.num_bytes:
            grown = aligned(buffer.num_bytes)
            if memory is not None:
                grown[: len(memory)] = memory
            memory = self._context[buffer.name] = grown
        return memory

    def _place_of_weight(self, buffer: Buffer) -> Memory | _native.PackedWeight:
        key = weight_key(buffer)
        if key in self._packed:
            return self._packed[key]
        table = self._ropes[buffer.name] if buffer.name in self._ropes else self._tables[key]
        return address(table), len(table)


def _add(runner: _native.Runner, body: tuple[Node, ...], places: Mapping[Buffer, Place]) -> None:
    for node in body:
        if isinstance(node, Kernel):
            operands = {role: places[b] for role, b in (*node.inputs.items(), *node.outputs.items())}
            attributes = {name: float(value) for name, value in node.attributes.items()}
            runner.add(node.op, operands, attributes, node.span, node.waits)
            continue
        flag = places[node.flag]
        assert isinstance(flag, tuple)
        (runner.begin_while if isinstance(node, While) else runner.begin_if)(flag)
        _add(runner, node.body, places)
        runner.end()


def as_float32(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """float32, float16, or the bits of bfloat16 in uint16, as float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _matrix(param: Param, index: int, is_stacked: bool) -> Matrix:
    if isinstance(param, Stacked):
        return param[index]
    return param[index] if is_stacked and not isinstance(param, Quantized) else param


def _contiguous(param: Matrix) -> Matrix:
    return param if isinstance(param, Quantized) else np.ascontiguousarray(param)


def _source(param: Matrix) -> _native.Source:
    """What the packer is told about one tensor; the caller keeps the arrays alive."""
    if not isinstance(param, Quantized):
        dtype = "bfloat16" if param.dtype == np.uint16 else "float32"
        return DTYPES[dtype], address(param), param.shape[0], param.shape[1], 0, 0, 0.0
    rows, columns = param.shape
    scales = 0 if param.scales is None else address(param.scales)
    block_scales = 0 if param.block_scales is None else address(param.block_scales)
    dtype = "nvfp4" if param.format == "nvfp4" else "int8"  # of the codes: those of INT4 come one in a byte
    return DTYPES[dtype], address(param.codes), rows, columns, scales, block_scales, param.multiplier
