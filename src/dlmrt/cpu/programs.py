"""Programs of one model on the native runner: weights packed once, memory shared, programs bound at first use.

All programs of a model share its packed weights, one arena of scratch, the threads' own scratch (only one runs at a
time) and the committed context. When the context must hold more positions, or a program needs a larger arena, that
memory is replaced and every program is bound anew at its next use: growth happens between requests, never while a
program runs. What does not fit the memory is refused before anything is replaced, and leaves all as it was.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.tensorfile import encode
from dlmrt.cpu import _native
from dlmrt.cpu.lower import Lowered, lower
from dlmrt.cpu.memory import Bytes, address, aligned, array_of, check_fits, rope_tables
from dlmrt.cpu.parts import DTYPES, PAGE_SIZE, group_of, rope_name, ropes
from dlmrt.cpu.weights import Matrix, Param, Params, Quantized, Stacked
from dlmrt.errors import DeviceError
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.loop import record_types
from dlmrt.program.nodes import Buffer, Kernel, Node, Program, While, maximum
from dlmrt.program.plan import Plan, plan

Memory = tuple[int, int]  # address and bytes
Place = Memory | _native.PackedWeight | _native.Ring  # or an object that owns its memory

RING_SLOTS = 64  # records; the reader is woken when half are there, and the loop waits when it lags by all of them
MAX_PROGRAMS = 16  # that are kept; a model's own forwards are 3 to 6, each kind of request adds one


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


class ProgramStore:
    """Weights, context and programs of one model.

    Args:
        params: the checkpoint's tensors; kept only while weights are being packed.
        num_threads: size of the pool.
        isa: name of an instruction set, "" for the best one.
    """

    def __init__(self, config: ModelConfig, params: Params, *, num_threads: int, isa: str = "") -> None:
        self.config = config
        self.capacity = 0  # positions that the next program is recorded for
        self._bound = 0  # and those that the context holds
        self._least = 0  # positions that are asked for: `capacity` where memory is short
        self._num_kept = 0  # of the context, when it grows
        try:
            self.isa = str(_native.instruction_set(isa))
        except ValueError as error:
            raise DeviceError(f"DLMRT_CPU_ISA: {error}") from error
        self._pool = _native.Pool(num_threads)
        self.num_threads = self._pool.size
        self._params: Params | None = params
        self._packed: dict[tuple[str, str, str], _native.PackedWeight] = {}
        self._tables: dict[tuple[str, str, str], Bytes] = {}
        self._origins: dict[tuple[str, str, str], tuple[Buffer, ...]] = {}  # tensors that a weight was made of
        self._context: dict[str, Bytes] = {}
        self._ropes = {rope_name(i, which): aligned(0) for i, _ in enumerate(ropes(config)) for which in ("cos", "sin")}
        self._arena = aligned(0)
        self._programs: dict[Hashable, NativeProgram] = {}

    def get(self, key: Hashable, record: Callable[[], Program]) -> NativeProgram:
        """The program called `key`, recorded and bound at its first use.

        Raises:
            DeviceError: there is no memory for it, or for the context that `reserve` asked for.
        """
        if self.capacity != self._bound or key not in self._programs:
            try:
                program = self._made(record)
            finally:
                self.capacity = self._least = self._bound
            self._programs[key] = program
        program = self._programs[key] = self._programs.pop(key)  # the last one is the one used last
        return program

    def release_params(self) -> None:
        """Weights are packed: forget where they came from."""
        self._params = None

    def assign(self, params: Params) -> None:
        """Write other values of the same shapes into the weights that bound programs point to; none may be running."""
        self._params = params
        for key, weight in self._packed.items():
            self._fill_packed(weight, self._origins[key])
        for key, memory in self._tables.items():
            self._fill(memory, *self._origins[key])
        self.release_params()

    def reserve(self, positions: int, kept: int) -> None:
        """Make room for `positions` in the context at the next `get`, keeping the first `kept`."""
        if positions <= self._bound:
            return
        limit = self.config.max_position_embeddings
        wanted = max(positions, min(limit, max(1024, 1 << (positions - 1).bit_length())))
        self.capacity, self._least = (-(-count // PAGE_SIZE) * PAGE_SIZE for count in (wanted, positions))
        self._num_kept = kept

    def _made(self, record: Callable[[], Program]) -> NativeProgram:
        recorded, lowered, placement = self._fitting(record)
        self._load_weights(lowered)
        if self.capacity > self._bound:
            self._grow()
        if placement.num_bytes > len(self._arena):
            self._programs.clear()
            self._arena = aligned(placement.num_bytes)
        while len(self._programs) >= MAX_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return self._bind(lowered, placement, record_types(recorded))

    def _fitting(self, record: Callable[[], Program]) -> tuple[Program, Lowered, Plan]:
        """What `record` gives, lowered and placed: for `capacity`, or for no more than is asked for if that fits."""
        while True:
            recorded = record()
            lowered = lower(recorded, self.config, num_threads=self.num_threads)
            placement = plan(lowered.program)
            try:
                check_fits(self._missing_bytes(lowered.program, placement, record_types(recorded)), "the model")
            except DeviceError:
                if self.capacity == self._least:
                    raise
                self.capacity = self._least
            else:
                return recorded, lowered, placement

    def _grow(self) -> None:
        self._programs.clear()
        self._bound = self.capacity
        for index, (rope, head_dim) in enumerate(ropes(self.config)):
            tables = rope_tables(rope, head_dim, self.capacity)
            self._ropes |= {rope_name(index, which): table for which, table in zip(("cos", "sin"), tables, strict=True)}
        if not self._num_kept:
            self._context.clear()

    def _missing_bytes(self, program: Program, placement: Plan, types: Mapping[str, npt.DTypeLike]) -> int:
        """What `program` needs beside what is there: weights, context, other states, scratch, the ring."""
        needed = max(placement.num_bytes - len(self._arena), 0) + RING_SLOTS * _slot_bytes(types)
        for buffer in program.buffers():
            shared = self._ropes if buffer.kind == "weight" else self._context
            if buffer.kind in ("weight", "state") and not self._has(buffer):
                needed += max(buffer.num_bytes - len(shared.get(buffer.name, b"")), 0)
        return needed

    def _load_weights(self, lowered: Lowered) -> None:
        """Pack or copy the weights of a program that are not there yet."""
        # The largest first: what is read of a tensor lies beside what it becomes, best while little else is there.
        for buffer in sorted(lowered.program.buffers(), key=lambda buffer: buffer.num_bytes, reverse=True):
            if buffer.kind != "weight" or self._has(buffer) or buffer.name in self._ropes:
                continue
            self._origins[_key(buffer)] = lowered.sources.get(buffer, (buffer,))
            if buffer in lowered.sources:
                self._packed[_key(buffer)] = self._pack(buffer, lowered.sources[buffer])
            else:
                self._tables[_key(buffer)] = self._copy(buffer)

    def _has(self, buffer: Buffer) -> bool:
        return _key(buffer) in self._packed or _key(buffer) in self._tables

    def _param(self, name: str) -> Param:
        assert self._params is not None, f"{name} is asked for after the weights were packed"
        family = family_of(self.config)
        is_tied = name == family.HEAD and self.config.tie_word_embeddings
        return self._params[family.EMBEDDING if is_tied else name]

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

    def _bind(self, lowered: Lowered, placement: Plan, types: Mapping[str, npt.DTypeLike]) -> NativeProgram:
        program = lowered.program
        ring = _native.Ring(RING_SLOTS, _slot_bytes(types)) if types else None
        states: dict[str, npt.NDArray[np.generic]] = {}
        scalars: dict[str, npt.NDArray[np.generic]] = {}
        places: dict[Buffer, Place] = {}
        kept: list[object] = [self._arena, dict(self._ropes)]
        for buffer in program.buffers():
            if buffer.kind == "weight":
                places[buffer] = self._place_of_weight(buffer)
            elif buffer.kind == "scratch":
                places[buffer] = address(self._arena) + placement.offsets[buffer], buffer.num_bytes
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
        key = _key(buffer)
        if key in self._packed:
            return self._packed[key]
        table = self._ropes[buffer.name] if buffer.name in self._ropes else self._tables[key]
        return address(table), len(table)


def _slot_bytes(types: Mapping[str, npt.DTypeLike]) -> int:
    """Size of the largest record."""
    return max((np.dtype(t).itemsize for t in types.values()), default=0)


def _key(buffer: Buffer) -> tuple[str, str, str]:
    return buffer.name, buffer.dtype, buffer.layout


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
