"""What lowering is made of: the two forms of a value, packed weights, scratch, and native nodes.

A value may live in two forms: fp32 rows, and operand cells (`kernels/args.hpp`), which is what projections read. Each
form is made once, where the value is made if that is possible.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dlmrt.cpu import _native
from dlmrt.models.config import ModelConfig, RopeConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.nodes import Buffer, Dim, Kernel, Node, Program, Rows, Value, maximum, walk
from dlmrt.program.record import describe_rope

PAGE_SIZE = 64  # positions of a cache page
ATTENTION_CHUNK = 4096  # positions whose scores a worker holds at once; up to here the softmax is exact in one piece
PANEL = 16  # columns that lie together in a packed weight
SPAN_BYTES = 2 << 20  # most of a layer that threads share by rows, each reading all of it; at 3 MB it gains nothing
SPAN_ROWS = 16  # fewest of a thread: below, a product waits for its weights

# DType of kernels/args.hpp
DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "nvfp4": 3, "int4_g32": 4, "int4_g128": 4}
OPERANDS = {name: name if name in ("float32", "bfloat16") else "int8" for name in DTYPES}
_GROUPS = {"nvfp4": 16, "int4_g32": 32, "int4_g128": 128}
# Operations that compute rows apart from each other; attention reads those of other rows that came before it.
_ROW_OPS = {
    "add_bias", "attention", "embed", "gated_linear", "gelu_mul", "linear", "qk_norm_rope_store", "quantize_rows",
    "rms_norm", "scale", "scaled_add", "silu_mul",
}  # fmt: skip
# Operations that multiply their `x` by a matrix.
_MATRIX_INPUTS = {"linear", "qkv", "qkv_biased", "qkv_packed", "gated_mlp", "route_sigmoid", "moe"}


def group_of(dtype: str) -> int:
    """Values of k that share a block scale, 0 without blocks."""
    return _GROUPS.get(dtype, 0)


def ropes(config: ModelConfig) -> list[tuple[RopeConfig, int]]:
    """The rotary embeddings of a model and the heads that they turn, each once; number i has tables of `rope_name`."""
    layers = map(config.attention, range(config.num_layers))
    return list(dict.fromkeys((layer.rope, layer.head_dim) for layer in layers))


def rope_name(index: int, which: str) -> str:
    """Name of a table, `which` is cos or sin. Example: ``rope.cos``, ``rope1.sin``."""
    return f"rope{index or ''}.{which}"


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A value as operand of the matrix kernels."""

    dtype: str
    cells: Buffer
    scales: Buffer | None  # int8 only

    def operands(self, prefix: str = "") -> dict[str, Buffer]:
        """By role."""
        scales = {} if self.scales is None else {f"{prefix}scales": self.scales}
        return {f"{prefix}cells": self.cells} | scales


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Tables [C, R/2] of one rotary embedding, and R."""

    rotary_dim: int
    cos: Buffer
    sin: Buffer


@dataclass
class Forms:
    """Which forms of which values exist at this point of the program."""

    rows: dict[Buffer, Buffer] = field(default_factory=dict)
    cells: dict[tuple[Buffer, str], Cells] = field(default_factory=dict)

    def copy(self) -> Forms:
        """For a body, whose forms end with it."""
        return Forms(rows=dict(self.rows), cells=dict(self.cells))


class Parts:
    """State of a lowering, and what several operations are made of."""

    def __init__(self, program: Program, config: ModelConfig, num_threads: int) -> None:
        self.sources: dict[Buffer, tuple[Buffer, ...]] = {}
        self._packed: dict[tuple[Buffer, ...], Buffer] = {}
        self._forms = Forms()
        self._nodes: list[Node] = []
        self._num_scratch = 0
        self._plain: dict[Buffer, Buffer] = {}  # values of one form: their scratch under a name of this program
        self._uses: dict[Buffer, list[tuple[Kernel, str]]] = {}
        for node in walk(program.body):
            if isinstance(node, Kernel):
                for role, buffer in node.inputs.items():
                    self._uses.setdefault(buffer, []).append((node, role))
        self._num_threads, self._num_spans, self._layer_bytes = num_threads, 0, _layer_bytes(program)
        contexts = [b.shape for b in program.buffers() if b.name.startswith(CONTEXT)]
        capacity = maximum(contexts[0][0]) if contexts else 0
        self._ropes: dict[tuple[str, int], Rope] = {}
        for index, (rope, head_dim) in enumerate(ropes(config)):
            half = len(rope_inv_freq(rope, head_dim)[0])
            cos, sin = (
                Buffer(name=rope_name(index, which), kind="weight", dtype="float32", shape=(capacity, half))
                for which in ("cos", "sin")
            )
            assert (describe_rope(rope), head_dim) not in self._ropes, "two rotary embeddings of one description"
            self._ropes[describe_rope(rope), head_dim] = Rope(rotary_dim=2 * half, cos=cos, sin=sin)

    def _mlp(self, cells: Cells, node: Kernel, rows: Dim, out: Buffer, *, accumulate: int) -> None:
        inputs, op = node.inputs, gate_op(node)
        weight, down = self._pack(inputs["gate"], inputs["up"]), self._pack(inputs["down"])
        width = maximum(inputs["gate"].shape[0])
        gate_up = self._scratch("float32", (rows, weight.shape[0]))
        product = self._cells_for(rows, width, OPERANDS[down.dtype])
        if width % PANEL == 0:
            self._emit(
                "gated_linear", rows, {"weight": weight} | cells.operands(),
                {"gate_up": gate_up} | product.operands("product_"), operand=DTYPES[cells.dtype],
                product_operand=DTYPES[product.dtype], **({"is_gelu": 1} if op == "gelu_mul" else {}),
            )  # fmt: skip
        else:
            self._linear(cells, weight, rows, gate_up, 0)
            self._emit(
                op, rows, {"gate_up": gate_up}, {"gate_up": gate_up} | product.operands(),
                width=width, operand=DTYPES[product.dtype],
            )  # fmt: skip
        self._linear(product, down, rows, out, accumulate)

    def _linear(self, cells: Cells, weight: Buffer, rows: Dim, out: Buffer, accumulate: int) -> None:
        inputs = {"weight": weight} | cells.operands() | ({"y": out} if accumulate else {})
        self._emit("linear", rows, inputs, {"y": out}, accumulate=accumulate, operand=DTYPES[cells.dtype])

    def _sum_or_rows(self, y: Buffer) -> tuple[Buffer, int]:
        """Where the projection that makes `y` writes: into the skip stream it is added to, or to rows of its own."""
        uses = self._uses[y]
        if len(uses) == 1 and uses[0][0].op == "add" and uses[0][1] == "delta":
            node = uses[0][0]
            assert self._uses[node.inputs["x"]][-1][0] is node, "the skip stream is read after it was added to"
            self._forms.rows[y] = self._forms.rows[node.inputs["x"]]
            return self._forms.rows[y], 1
        return self._new_rows(y), 0

    def _new_rows(self, value: Buffer) -> Buffer:
        """Rows for `value`: the state that it is the output of, or scratch."""
        uses = self._uses.get(self._capped(value), [])
        is_output = len(uses) == 1 and uses[0][0].op == "output"
        rows = uses[0][0].outputs["y"] if is_output else self._scratch("float32", value.shape)
        self._forms.rows[value] = rows
        return rows

    def _plain_of(self, value: Buffer) -> Buffer:
        """Scratch of a value that has one form, such as a choice of experts."""
        if value not in self._plain:
            self._plain[value] = self._scratch(value.dtype, value.shape)
        return self._plain[value]

    def _capped(self, value: Buffer) -> Buffer:
        """What a soft cap makes of `value` in place, or `value` where there is none."""
        use = self._uses.get(value, [(None, "")])[0][0]
        return use.outputs["y"] if use is not None and use.op == "soft_cap" else value

    def _in_place(self, node: Kernel, role: str) -> Buffer:
        """Rows of an input that `node` may overwrite, being the last to read it."""
        value = node.inputs[role]
        assert self._uses[value][-1][0] is node, f"{node.op} overwrites a value that is read later"
        return self._forms.rows[value]

    def _operand_type(self, use: Kernel, role: str) -> str | None:
        """In which operand type `use` reads this input; None: as rows."""
        if role != "x" or use.op not in _MATRIX_INPUTS:
            return None
        weight = next(use.inputs[name] for name in ("weight", "wq", "gate") if name in use.inputs)
        return OPERANDS[weight.dtype]

    def _cells_of(self, value: Buffer, dtype: str) -> Cells:
        """`value` as operand, packed from its rows unless that was done."""
        known = self._forms.cells.get((value, dtype))
        if known is not None:
            return known
        cells = self._forms.cells[value, dtype] = self._cells_like(value, dtype)
        rows = self._forms.rows.get(value, value)
        self._emit(
            "quantize_rows", value.shape[0], {"x": rows}, cells.operands(),
            width=maximum(value.shape[1]), operand=DTYPES[dtype],
        )  # fmt: skip
        return cells

    def _cells_like(self, value: Buffer, dtype: str) -> Cells:
        return self._cells_for(value.shape[0], maximum(value.shape[1]), dtype)

    def _cells_for(self, rows: Dim, width: int, dtype: str) -> Cells:
        num_bytes = operand_bytes(dtype, maximum(rows), width)
        cells = self._scratch(dtype, (rows, width), layout="cells", num_bytes=num_bytes)
        return Cells(dtype=dtype, cells=cells, scales=self._scratch("float32", (rows,)) if dtype == "int8" else None)

    def _pack(self, *tensors: Buffer) -> Buffer:
        """The rows of `tensors` as one packed weight; of stacked tensors, those of each expert."""
        known = self._packed.get(tensors)
        if known is not None:
            return known
        dtype, n, k = tensors[0].dtype, sum(maximum(t.shape[-2]) for t in tensors), maximum(tensors[0].shape[-1])
        assert all(t.dtype == dtype for t in tensors), "tensors of one projection have one format"
        stack = tuple(maximum(size) for size in tensors[0].shape[:-2])
        num_bytes = _packed_bytes(dtype, n, k, *stack)
        first, *others = (t.name.removesuffix(".weight") for t in tensors)
        name = "+".join((first, *(other.rpartition(".")[2] for other in others)))
        packed = Buffer(
            name=name, kind="weight", dtype=dtype, shape=(*stack, n, k), layout="panels", layout_bytes=num_bytes
        )
        self._packed[tensors] = packed
        self.sources[packed] = tensors
        return packed

    def _pages(self, cache: Buffer) -> Buffer:
        """The cache in pages, under its own name."""
        known = self._packed.get((cache,))
        if known is not None:
            return known
        capacity, _, num_kv_heads, head_dim = (maximum(dim) for dim in cache.shape)
        page = _native.kv_page_bytes(DTYPES[cache.dtype], PAGE_SIZE, num_kv_heads, head_dim)
        paged = Buffer(
            name=cache.name, kind="state", dtype=cache.dtype, shape=cache.shape, layout="pages",
            layout_bytes=-(-capacity // PAGE_SIZE) * page,
        )  # fmt: skip
        self._packed[cache,] = paged
        return paged

    def _cache_attributes(self, cache: Buffer, q: Buffer) -> dict[str, Value]:
        return {
            "cache_dtype": DTYPES[cache.dtype], "page_size": PAGE_SIZE, "num_heads": maximum(q.shape[1]),
            "num_kv_heads": maximum(cache.shape[2]), "head_dim": maximum(cache.shape[3]),
        }  # fmt: skip

    def _scratch(
        self, dtype: str, shape: tuple[Dim, ...], *, layout: str = "rows", num_bytes: int | None = None
    ) -> Buffer:
        self._num_scratch += 1
        return Buffer(
            name=f"%{self._num_scratch - 1}",
            kind="scratch",
            dtype=dtype,
            shape=shape,
            layout=layout,
            layout_bytes=num_bytes,
        )

    def _emit(
        self, op: str, rows: Dim | None, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer],
        **attributes: Value,
    ) -> None:  # fmt: skip
        """One native node over `rows` rows: a constant, the buffer that holds the number, or None: it knows itself."""
        count = {"rows": rows.count} if isinstance(rows, Rows) else {}
        if rows is not None:
            attributes["max_rows" if count else "rows"] = maximum(rows)
        span = None
        is_large = op in ("linear", "gated_linear") and inputs["weight"].num_bytes > SPAN_BYTES  # a head, an adapter
        if op in _ROW_OPS and rows is not None and self._spans(rows) and not is_large:
            before = self._nodes[-1] if self._nodes else None
            if isinstance(before, Kernel) and before.span is not None and before.attributes["rows"] == rows:
                span = before.span
            else:
                span, self._num_spans = self._num_spans, self._num_spans + 1
        self._nodes.append(
            Kernel(
                op=op, inputs=dict(inputs) | count, outputs=dict(outputs), attributes=attributes, span=span,
                waits=span is not None and op == "attention",
            )
        )  # fmt: skip

    def _spans(self, rows: Dim) -> bool:
        """Whether threads share operations over `rows` rows by rows: each gets as many, and enough of them."""
        share, rest = divmod(maximum(rows), self._num_threads)
        is_even = not isinstance(rows, Rows) and rest == 0 and share % _native.ROW_GROUP == 0
        return self._num_threads > 1 and is_even and share >= SPAN_ROWS and self._layer_bytes <= SPAN_BYTES


def _layer_bytes(program: Program) -> int:
    """Bytes of the largest MLP and of the largest projections into heads."""
    most = {"qkv": 0, "gated_mlp": 0}
    for node in walk(program.body):
        if not isinstance(node, Kernel):
            continue
        kind = "qkv" if node.op.startswith("qkv") else node.op
        if kind in most:
            matrices = [b for b in node.inputs.values() if b.kind == "weight" and len(b.shape) == 2]
            most[kind] = max(most[kind], sum(_packed_bytes(b.dtype, *map(maximum, b.shape)) for b in matrices))
    return sum(most.values())


def _packed_bytes(dtype: str, n: int, k: int, count: int = 1) -> int:
    return _native.weight_bytes(DTYPES[dtype], group_of(dtype), n, k, count)


def gate_op(node: Kernel) -> str:
    """The native operation of a gated product."""
    return {"silu": "silu_mul", "gelu_tanh": "gelu_mul"}[str(node.attributes["activation"])]


def rounded(value: float, dtype: str) -> float:
    """`value` as a number of `dtype`, which is what a table of that type is multiplied by; int8 stands for bfloat16."""
    bits = int(np.float32(value).view(np.uint32))
    if dtype in ("bfloat16", "int8"):
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def operand_bytes(dtype: str, rows: int, width: int) -> int:
    """Bytes of the cells of an operand."""
    return _native.operand_bytes(DTYPES[dtype], rows, width)
