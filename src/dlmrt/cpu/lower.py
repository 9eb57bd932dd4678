"""Recorded program -> program of native kernels: control flow and loop as they are, model operations as passes.

What is fused: the skip connection into the projection before it (`accumulate`), the norm with the packing or
quantisation of the next projection's input, q, k and v into one projection whose epilogue normalises, rotates and
stores, gate and up into one projection, the head with its statistics, so that logits exist only where something else
reads them.

A value may live in two forms: fp32 rows, and operand cells (`kernels/args.hpp`), which is what projections read. Each
form is made once, where the value is made if that is possible. The result is an ordinary `Program`, so `plan` places
its scratch and `show` prints it.

Left out on purpose: choices per shape; kernels take any number of rows.

Source: ours; what to fuse from docs/design.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlmrt.cpu import _native
from dlmrt.models.config import ModelConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.loop import RECORD_KINDS
from dlmrt.program.nodes import Buffer, Dim, If, Kernel, Node, Program, Rows, Value, While, maximum, walk
from dlmrt.program.record import URGENT
from dlmrt.program.signatures import LOOP_OPS, signature

PAGE_SIZE = 64  # positions of a cache page
ATTENTION_CHUNK = 4096  # positions whose scores a worker holds at once; up to here the softmax is exact in one piece
INT4_GROUP = 128

DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "nvfp4": 3, "int4": 4}  # DType of kernels/args.hpp
_OPERANDS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "nvfp4": "int8", "int4": "int8"}
_GROUPS = {"nvfp4": 16, "int4": INT4_GROUP}
_MATRIX_INPUTS = {("linear", "x"), ("qkv", "x"), ("gated_mlp", "x")}


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A native program and what its fused weights are made of."""

    program: Program
    sources: Mapping[Buffer, tuple[Buffer, ...]]  # packed weight -> tensors whose rows it holds, in order


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """A value as operand of the matrix kernels."""

    dtype: str
    cells: Buffer
    scales: Buffer | None  # int8 only

    def operands(self) -> dict[str, Buffer]:
        return {"cells": self.cells} | ({} if self.scales is None else {"scales": self.scales})


def group_of(dtype: str) -> int:
    """Values of k that share a block scale, 0 without blocks."""
    return _GROUPS.get(dtype, 0)


def lower(program: Program, config: ModelConfig) -> Lowered:
    """Lower `program`, which was recorded for `config`."""
    lowering = _Lowering(program, config)
    body = lowering.body(program.body)
    return Lowered(program=Program(name=f"{program.name} (cpu)", body=body), sources=lowering.sources)


@dataclass
class _Forms:
    """Which forms of which values exist at this point of the program."""

    rows: dict[Buffer, Buffer] = field(default_factory=dict)
    cells: dict[tuple[Buffer, str], _Cells] = field(default_factory=dict)

    def copy(self) -> _Forms:
        return _Forms(rows=dict(self.rows), cells=dict(self.cells))


class _Lowering:
    def __init__(self, program: Program, config: ModelConfig) -> None:
        self.config = config
        self.sources: dict[Buffer, tuple[Buffer, ...]] = {}
        self._packed: dict[tuple[Buffer, ...], Buffer] = {}
        self._forms = _Forms()
        self._nodes: list[Node] = []
        self._num_scratch = 0
        self._uses: dict[Buffer, list[tuple[Kernel, str]]] = {}
        for node in walk(program.body):
            if isinstance(node, Kernel):
                for role, buffer in node.inputs.items():
                    self._uses.setdefault(buffer, []).append((node, role))
        self._rotary_dim = 2 * len(rope_inv_freq(config.rope, config.head_dim)[0])
        self._rope = tuple(self._table(f"rope.{name}", program) for name in ("cos", "sin"))
        self._heads: dict[Buffer, tuple[_Cells, Buffer]] = {}  # logits not yet computed -> operand and weight
        self._projections: dict[Buffer, tuple[Kernel, Buffer]] = {}  # k -> node qkv and rows [T, (N + 2G) H]
        self._logits: dict[Buffer, Buffer] = {}

    def body(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Lower a body; forms made inside are unknown outside, where the body may not have run."""
        outer, self._nodes = self._nodes, []
        forms, self._forms = self._forms, self._forms.copy()
        for node in nodes:
            if isinstance(node, Kernel):
                getattr(self, f"_lower_{node.op}", self._lower_other)(node)
            elif isinstance(node, While):
                self._nodes.append(While(flag=node.flag, body=self.body(node.body)))
            else:
                self._nodes.append(If(flag=node.flag, body=self.body(node.body)))
        inner, self._nodes, self._forms = self._nodes, outer, forms
        return tuple(inner)

    # Model operations.

    def _lower_embed(self, node: Kernel) -> None:
        table, ids, x = node.inputs["table"], node.inputs["ids"], node.outputs["x"]
        self._emit(
            "embed", x.shape[0], {"table": table, "ids": ids}, {"x": self._new_rows(x)},
            table_dtype=DTYPES[table.dtype], width=maximum(x.shape[1]),
        )  # fmt: skip

    def _lower_residual_mix(self, node: Kernel) -> None:
        i, x = node.inputs, self._forms.rows[node.inputs["x"]]
        rows, width = x.shape[0], maximum(x.shape[1])
        norm = self._cells_like(i["z"], _OPERANDS[i["gate"].dtype])
        self._emit(
            "rms_norm", rows, {"x": i["z"], "weight": i["norm"]}, norm.operands(),
            eps=node.attributes["eps"], width=width, operand=DTYPES[norm.dtype],
        )  # fmt: skip
        delta = self._scratch("float32", x.shape)
        self._mlp(norm, i, rows, delta, accumulate=0)
        where = {} if "where" not in i else {"where": i["where"]}
        self._emit(
            "scaled_add", rows, {"x": x, "delta": delta} | where, {"x": x}, alpha=node.attributes["alpha"], width=width
        )

    def _lower_rms_norm(self, node: Kernel) -> None:
        y, x = node.outputs["y"], self._forms.rows[node.inputs["x"]]
        wanted = {self._operand_type(use, role) for use, role in self._uses[y]}
        outputs: dict[str, Buffer] = {}
        attributes: dict[str, Value] = {}
        types = [dtype for dtype in wanted if dtype is not None]
        if None in wanted or len(types) > 1:
            outputs["y"] = self._new_rows(y)
        elif types:
            cells = self._forms.cells[y, types[0]] = self._cells_like(y, types[0])
            outputs |= cells.operands()
            attributes["operand"] = DTYPES[types[0]]
        self._emit(
            "rms_norm", x.shape[0], {"x": x, "weight": node.inputs["weight"]}, outputs,
            eps=node.attributes["eps"], width=maximum(x.shape[1]), **attributes,
        )  # fmt: skip

    def _lower_add(self, node: Kernel) -> None:
        """The sum was accumulated by the projection that made `delta`."""
        assert self._forms.rows[node.inputs["delta"]] is self._forms.rows[node.inputs["x"]], (
            "add of a value that was not fused"
        )
        self._forms.rows[node.outputs["y"]] = self._forms.rows[node.inputs["x"]]

    def _lower_linear(self, node: Kernel) -> None:
        y, weight = node.outputs["y"], self._pack(node.inputs["weight"])
        cells = self._cells_of(node.inputs["x"], _OPERANDS[weight.dtype])
        if any(use.op == "predict" for use, _ in self._uses[y]):
            self._heads[y] = cells, weight
            return
        self._linear(cells, weight, y.shape[0], *self._sum_or_rows(y))

    def _lower_gated_mlp(self, node: Kernel) -> None:
        y = node.outputs["y"]
        cells = self._cells_of(node.inputs["x"], _OPERANDS[node.inputs["gate"].dtype])
        out, accumulate = self._sum_or_rows(y)
        self._mlp(cells, node.inputs, y.shape[0], out, accumulate=accumulate)

    def _lower_qkv(self, node: Kernel) -> None:
        i, rows = node.inputs, node.outputs["q"].shape[0]
        weight = self._pack(i["wq"], i["wk"], i["wv"])
        out = self._scratch("float32", (rows, weight.shape[0]))
        self._linear(self._cells_of(i["x"], _OPERANDS[weight.dtype]), weight, rows, out, 0)
        self._projections[node.outputs["k"]] = node, out

    def _lower_kv_store(self, node: Kernel) -> None:
        qkv, projected = self._projections[node.inputs["k"]]
        cache, rows = self._pages(node.inputs["cache"]), projected.shape[0]
        q = qkv.outputs["q"]
        group = self.config.num_heads // self.config.num_kv_heads
        num_bytes = _operand_bytes(cache.dtype, maximum(rows) * group, self.config.head_dim) * self.config.num_kv_heads
        cells = self._scratch(cache.dtype, q.shape, layout="cells", num_bytes=num_bytes)
        self._forms.cells[q, cache.dtype] = _Cells(dtype=cache.dtype, cells=cells, scales=None)
        cos, sin = self._rope
        self._emit(
            "qk_norm_rope_store", rows,
            {"qkv": projected, "q_norm": qkv.inputs["q_norm"], "k_norm": qkv.inputs["k_norm"], "cos": cos, "sin": sin,
             "positions": node.inputs["positions"], "cache": cache},
            {"q": cells, "cache": cache}, eps=qkv.attributes["eps"], rotary_dim=self._rotary_dim,
            **self._cache_attributes(cache),
        )  # fmt: skip

    def _lower_attention(self, node: Kernel) -> None:
        cache, y = self._pages(node.inputs["cache"]), node.outputs["y"]
        q = self._forms.cells[node.inputs["q"], cache.dtype].cells
        self._emit(
            "attention", y.shape[0], {"q": q, "cache": cache, "visible": node.inputs["visible"]},
            {"y": self._new_rows(y)}, chunk=ATTENTION_CHUNK, **self._cache_attributes(cache),
        )  # fmt: skip

    def _lower_hidden_store(self, node: Kernel) -> None:
        hidden, cache = self._forms.rows[node.inputs["hidden"]], node.inputs["cache"]
        self._emit(
            "hidden_store", hidden.shape[0], {"hidden": hidden, "positions": node.inputs["positions"], "cache": cache},
            {"cache": cache}, width=maximum(hidden.shape[1]),
        )  # fmt: skip

    def _lower_shift(self, node: Kernel) -> None:
        y, operands = node.outputs["y"], dict(node.inputs)
        if "hidden" in operands:
            operands["hidden"] = self._forms.rows[operands["hidden"]]
        self._emit("shift", y.shape[0], operands, {"y": self._new_rows(y)}, width=maximum(y.shape[1]))

    def _lower_soft_embedding(self, node: Kernel) -> None:
        table, probs, z = node.inputs["table"], node.inputs["probs"], node.outputs["z"]
        cells = self._cells_of(probs, table.dtype)
        self._emit(
            "soft_embedding", z.shape[0], {"table": table} | cells.operands(), {"z": self._new_rows(z)},
            scale=node.attributes["scale"], vocab=maximum(probs.shape[1]), width=maximum(z.shape[1]),
            operand=DTYPES[cells.dtype],
        )  # fmt: skip

    def _lower_output(self, node: Kernel) -> None:
        """The value was written to its place by the node that made it."""
        assert self._forms.rows[node.inputs["x"]] is node.outputs["y"]

    # Head.

    def _lower_predict(self, node: Kernel) -> None:
        i, o, logits = node.inputs, node.outputs, node.inputs["logits"]
        cells, weight = self._heads.pop(logits)
        rows, vocab = logits.shape[0], maximum(logits.shape[1])
        is_filtered, is_greedy = bool(node.attributes["is_filtered"]), bool(node.attributes["is_greedy"])
        stride, tiles = -(-maximum(rows) // 16) * 16, -(-vocab // _native.HEAD_TILE)
        draw = {name: i[name] for name in ("seed", "step", "block_idx")} if not is_greedy else {}

        def tile(dtype: str) -> Buffer:
            return self._scratch(dtype, (tiles, stride))

        partials = {name: tile("float32") for name in ("tile_max", "tile_sum", "tile_weighted")} | {
            "tile_argmax": tile("int32")
        }
        merged = {"max_logit": self._scratch("float32", (rows,))}
        merged |= {name: o[name] for name in ("argmax", "log_sum_exp", "entropy", "argmax_confidence")}
        keys: dict[str, Buffer] = {}
        sampled: dict[str, Buffer] = {}
        if not is_greedy:
            sampled = {"sample": self._scratch("int32", (rows,)), "sample_logit": self._scratch("float32", (rows,))}
        if not is_greedy and not is_filtered:
            keys["keys"] = self._scratch("uint8", (rows, _native.GUMBEL_KEY_BYTES))
            partials |= {
                "tile_score": tile("float32"),
                "tile_sample_logit": tile("float32"),
                "tile_sample": tile("int32"),
            }
            self._emit("gumbel_keys", rows, draw, keys)
            merged |= sampled
        written = dict(partials)
        if is_filtered or len(self._uses[logits]) > 1:
            written["logits"] = self._logits[logits] = self._scratch("float32", logits.shape)
        self._emit(
            "head_stats", rows,
            {"weight": weight, "temperature": i["step_temperature"], "banned": i["banned"]} | cells.operands() | keys,
            written, operand=DTYPES[cells.dtype], row_stride=stride, max_rows=maximum(rows),
        )  # fmt: skip
        self._emit("head_merge", rows, partials, merged, vocab=vocab, row_stride=stride)
        if is_filtered:
            filters = {name: i[name] for name in ("is_drawn", "top_k", "top_p", "min_p")}
            inputs = {"logits": self._logits[logits], "max_logit": merged["max_logit"]} | filters | draw
            self._emit("filtered_draw", rows, inputs, sampled, vocab=vocab)
        inputs = {name: merged[name] for name in ("argmax", "max_logit", "log_sum_exp", "argmax_confidence")} | sampled
        inputs |= {} if is_greedy else {"is_drawn": i["is_drawn"]}
        names = ("token", "confidence", "is_finite_row", "is_finite")
        self._emit("finish_predict", rows, inputs, {name: o[name] for name in names})

    def _lower_probabilities(self, node: Kernel) -> None:
        probs = node.outputs["probs"]
        dtype = next(use.inputs["table"].dtype for use, _ in self._uses[probs])
        cells = self._forms.cells[probs, dtype] = self._cells_like(probs, dtype)
        self._emit(
            "probabilities", probs.shape[0],
            {"logits": self._logits[node.inputs["logits"]], "log_sum_exp": node.inputs["log_sum_exp"]},
            cells.operands(), vocab=maximum(probs.shape[1]), operand=DTYPES[dtype],
        )  # fmt: skip

    # Loop operations pass through, with the canvas length as a number.

    def _lower_publish(self, node: Kernel) -> None:
        sizes: dict[str, Value] = {f"bytes.{name}": b.num_bytes for name, b in node.inputs.items() if name != URGENT}
        kind = RECORD_KINDS.index(str(node.attributes["kind"]))
        self._nodes.append(
            Kernel(op="publish", inputs=node.inputs, outputs=node.outputs, attributes={"kind": kind} | sizes)
        )

    def _lower_other(self, node: Kernel) -> None:
        """An operation of the loop; of the model's, those that no supported family uses have no kernel."""
        assert node.op in LOOP_OPS, f"no lowering of {node.op}"
        operands, buffers = (*signature(node.op)[0], *signature(node.op)[1]), dict(node.inputs) | dict(node.outputs)
        attributes: dict[str, Value] = {
            name: value for name, value in node.attributes.items() if not isinstance(value, str)
        }
        for operand in operands:
            if operand.dims == ("L",):
                attributes["length"] = maximum(buffers[operand.name].shape[0])
        if "in_block" in node.attributes:
            attributes["is_causal"] = node.attributes["in_block"] == "causal"
        self._nodes.append(Kernel(op=node.op, inputs=node.inputs, outputs=node.outputs, attributes=attributes))

    # Parts.

    def _mlp(self, cells: _Cells, inputs: Mapping[str, Buffer], rows: Dim, out: Buffer, *, accumulate: int) -> None:
        weight, down = self._pack(inputs["gate"], inputs["up"]), self._pack(inputs["down"])
        width = maximum(inputs["gate"].shape[0])
        gate_up = self._scratch("float32", (rows, weight.shape[0]))
        self._linear(cells, weight, rows, gate_up, 0)
        product = self._cells_for(rows, width, _OPERANDS[down.dtype])
        self._emit(
            "silu_mul", rows, {"gate_up": gate_up}, {"gate_up": gate_up} | product.operands(),
            width=width, operand=DTYPES[product.dtype],
        )  # fmt: skip
        self._linear(product, down, rows, out, accumulate)

    def _linear(self, cells: _Cells, weight: Buffer, rows: Dim, out: Buffer, accumulate: int) -> None:
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
        uses = self._uses.get(value, [])
        is_output = len(uses) == 1 and uses[0][0].op == "output"
        rows = uses[0][0].outputs["y"] if is_output else self._scratch("float32", value.shape)
        self._forms.rows[value] = rows
        return rows

    def _operand_type(self, use: Kernel, role: str) -> str | None:
        """In which operand type `use` reads this input; None: as rows."""
        if (use.op, role) not in _MATRIX_INPUTS:
            return None
        weight = next(use.inputs[name] for name in ("weight", "wq", "gate") if name in use.inputs)
        return _OPERANDS[weight.dtype]

    def _cells_of(self, value: Buffer, dtype: str) -> _Cells:
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

    def _cells_like(self, value: Buffer, dtype: str) -> _Cells:
        return self._cells_for(value.shape[0], maximum(value.shape[1]), dtype)

    def _cells_for(self, rows: Dim, width: int, dtype: str) -> _Cells:
        num_bytes = _operand_bytes(dtype, maximum(rows), width)
        cells = self._scratch(dtype, (rows, width), layout="cells", num_bytes=num_bytes)
        return _Cells(dtype=dtype, cells=cells, scales=self._scratch("float32", (rows,)) if dtype == "int8" else None)

    def _pack(self, *tensors: Buffer) -> Buffer:
        """The rows of `tensors` as one packed weight."""
        known = self._packed.get(tensors)
        if known is not None:
            return known
        dtype, n, k = tensors[0].dtype, sum(maximum(t.shape[0]) for t in tensors), maximum(tensors[0].shape[1])
        assert all(t.dtype == dtype for t in tensors), "tensors of one projection have one format"
        num_bytes = _native.weight_bytes(DTYPES[dtype], group_of(dtype), n, k)
        first, *others = (t.name.removesuffix(".weight") for t in tensors)
        name = "+".join((first, *(other.rpartition(".")[2] for other in others)))
        packed = Buffer(name=name, kind="weight", dtype=dtype, shape=(n, k), layout="panels", layout_bytes=num_bytes)
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

    def _table(self, name: str, program: Program) -> Buffer:
        """Rotary table [C, H / 2] of the program's context."""
        shapes = [b.shape for b in program.buffers() if b.name.startswith(CONTEXT)]
        capacity = maximum(shapes[0][0]) if shapes else 0
        return Buffer(name=name, kind="weight", dtype="float32", shape=(capacity, self._rotary_dim // 2))

    def _cache_attributes(self, cache: Buffer) -> dict[str, Value]:
        return {
            "cache_dtype": DTYPES[cache.dtype], "page_size": PAGE_SIZE, "num_heads": self.config.num_heads,
            "num_kv_heads": self.config.num_kv_heads, "head_dim": self.config.head_dim,
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
        self, op: str, rows: Dim, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer], **attributes: Value
    ) -> None:
        """One native node over `rows` rows: a constant, or the buffer that holds the number."""
        count = {"rows": rows.count} if isinstance(rows, Rows) else {}
        if not isinstance(rows, Rows):
            attributes["rows"] = rows
        self._nodes.append(Kernel(op=op, inputs=dict(inputs) | count, outputs=dict(outputs), attributes=attributes))


def _operand_bytes(dtype: str, rows: int, width: int) -> int:
    return _native.operand_bytes(DTYPES[dtype], rows, width)
