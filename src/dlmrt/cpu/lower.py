"""Recorded program -> program of native kernels: control flow and loop as they are, model operations as passes.

What is fused: the skip connection into the projection before it (`accumulate`), the norm with the packing or
quantisation of the next projection's input, q, k and v into one node that projects, normalises, rotates, stores and
attends, gate and up into one projection with their product, the head with its statistics, so that logits exist only
where something else reads them. The result is an ordinary `Program`, so `plan` places its scratch and `show` prints it.

How threads share the work: by rows where that lets them run a whole layer without waiting (`Kernel.span`), which takes
rows that go round evenly and a layer that fits the caches; otherwise every operation by columns or heads.

Left out on purpose: other choices per shape; kernels take any number of rows.

Source: ours; what to fuse from docs/design.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dlmrt.cpu import _native
from dlmrt.cpu.experts import Experts
from dlmrt.cpu.parts import ATTENTION_CHUNK, DTYPES, OPERANDS, PANEL, Cells, operand_bytes, rounded
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.loop import RECORD_KINDS
from dlmrt.program.nodes import Buffer, If, Kernel, Node, Program, Value, While, maximum
from dlmrt.program.signatures import HEAD_OPS, LOOP_OPS, signature
from dlmrt.program.store import Lowered


@dataclass(frozen=True, kw_only=True)
class _Head:
    """Logits that are not computed yet: statistics may be all that is wanted."""

    cells: Cells
    weight: Buffer
    cap: float = 0.0  # 0: none


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Operands and constants of a node that is to be joined with the next one."""

    inputs: Mapping[str, Buffer]
    outputs: Mapping[str, Buffer]
    attributes: Mapping[str, Value]

    def joined(self, other: _Part) -> _Part:
        return _Part(
            inputs={**self.inputs, **other.inputs}, outputs={**self.outputs, **other.outputs},
            attributes={**self.attributes, **other.attributes},
        )  # fmt: skip


def lower(program: Program, config: ModelConfig, *, num_threads: int = 1) -> Lowered:
    """Lower `program`, which was recorded for `config`, for a pool of `num_threads`."""
    lowering = _Lowering(program, config, num_threads)
    body = lowering.body(program.body)
    return Lowered(program=Program(name=f"{program.name} (cpu)", body=body), sources=lowering.sources)


class _Lowering(Experts):
    def __init__(self, program: Program, config: ModelConfig, num_threads: int) -> None:
        super().__init__(program, config, num_threads)
        # The head's copy of a tied table serves look-ups too, unless a soft embedding reads the table by rows.
        self._is_table_packed = config.tie_word_embeddings and not family_of(config).has_residual(config)
        self._heads: dict[Buffer, _Head] = {}
        self._projections: dict[Buffer, tuple[Kernel, Buffer]] = {}  # k -> node qkv and rows of q, k and v heads
        self._fused: dict[Buffer, _Part] = {}  # q -> what waits for its attention
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
        where = self._pack(table) if self._is_table_packed else table
        self._emit(
            "embed", x.shape[0], {"table": where, "ids": ids}, {"x": self._new_rows(x)},
            table_dtype=DTYPES[table.dtype], width=maximum(x.shape[1]), **self._scale_of(node, table),
        )  # fmt: skip

    @staticmethod
    def _scale_of(node: Kernel, table: Buffer) -> dict[str, Value]:
        scale = float(node.attributes["scale"])
        return {} if scale == 1 else {"scale": rounded(scale, table.dtype)}

    def _lower_residual_mix(self, node: Kernel) -> None:
        i, x = node.inputs, self._forms.rows[node.inputs["x"]]
        rows, width = x.shape[0], maximum(x.shape[1])
        norm = self._cells_like(i["z"], OPERANDS[i["gate"].dtype])
        self._emit(
            "rms_norm", rows, {"x": i["z"], "weight": i["norm"]}, norm.operands(),
            eps=node.attributes["eps"], width=width, operand=DTYPES[norm.dtype],
        )  # fmt: skip
        delta = self._scratch("float32", x.shape)
        self._mlp(norm, node, rows, delta, accumulate=0)
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
        if len(types) == 1:
            cells = self._forms.cells[y, types[0]] = self._cells_like(y, types[0])
            outputs |= cells.operands()
            attributes["operand"] = DTYPES[types[0]]
        self._emit(
            "rms_norm", x.shape[0], dict(node.inputs) | {"x": x}, outputs,
            eps=node.attributes["eps"], width=maximum(x.shape[1]), **attributes,
        )  # fmt: skip

    def _lower_add(self, node: Kernel) -> None:
        """Nothing to do where the projection that made `delta` accumulated the sum."""
        y, x, delta = node.outputs["y"], self._in_place(node, "x"), self._forms.rows[node.inputs["delta"]]
        if delta is not x:
            width = maximum(y.shape[1])
            self._emit("scaled_add", y.shape[0], {"x": x, "delta": delta}, {"x": x}, alpha=1.0, width=width)
        self._forms.rows[y] = x

    def _lower_scale(self, node: Kernel) -> None:
        y, x = node.outputs["y"], self._in_place(node, "x")
        inputs = {"x": x, "factor": node.inputs["factor"]}
        self._emit("scale", y.shape[0], inputs, {"x": x}, width=maximum(y.shape[1]))
        self._forms.rows[y] = x

    def _lower_linear(self, node: Kernel) -> None:
        y, weight = node.outputs["y"], self._pack(node.inputs["weight"])
        cells = self._cells_of(node.inputs["x"], OPERANDS[weight.dtype])
        if any(use.op in HEAD_OPS for use, _ in self._uses[self._capped(y)]):
            self._heads[y] = _Head(cells=cells, weight=weight)
            return
        self._linear(cells, weight, y.shape[0], *self._sum_or_rows(y))

    def _lower_soft_cap(self, node: Kernel) -> None:
        logits, y, cap = node.inputs["logits"], node.outputs["y"], float(node.attributes["cap"])
        if logits in self._heads:
            self._heads[y] = replace(self._heads.pop(logits), cap=cap)
            return
        x = self._forms.rows[y] = self._in_place(node, "logits")
        self._emit("soft_cap", y.shape[0], {"x": x}, {"x": x}, cap=cap, width=maximum(y.shape[1]))

    def _lower_gated_mlp(self, node: Kernel) -> None:
        y = node.outputs["y"]
        cells = self._cells_of(node.inputs["x"], OPERANDS[node.inputs["gate"].dtype])
        out, accumulate = self._sum_or_rows(y)
        self._mlp(cells, node, y.shape[0], out, accumulate=accumulate)

    def _lower_qkv(self, node: Kernel) -> None:
        i, rows = node.inputs, node.outputs["q"].shape[0]
        weight = self._pack(*(i[name] for name in ("weight", "wq", "wk", "wv") if name in i))
        out = self._scratch("float32", (rows, weight.shape[0]))
        cells, q = self._cells_of(i["x"], OPERANDS[weight.dtype]), node.outputs["q"]
        is_fused = node.op != "qkv_biased" and q in self._uses and maximum(weight.shape[0]) % PANEL == 0
        if is_fused and not self._spans(rows):
            self._fused[q] = _Part(
                inputs={"weight": weight} | cells.operands(), outputs={"qkv": out},
                attributes={"operand": DTYPES[cells.dtype]},
            )  # fmt: skip
        else:
            self._linear(cells, weight, rows, out, 0)
        self._projections[node.outputs["k"]] = node, out

    _lower_qkv_packed = _lower_qkv

    def _lower_qkv_biased(self, node: Kernel) -> None:
        self._lower_qkv(node)
        _, out = self._projections[node.outputs["k"]]
        biases = {name: node.inputs[name] for name in ("bq", "bk", "bv")}
        widths: dict[str, Value] = {f"width_{name}": maximum(bias.shape[0]) for name, bias in biases.items()}
        self._emit("add_bias", out.shape[0], {"x": out} | biases, {"x": out}, **widths)

    def _lower_kv_store(self, node: Kernel) -> None:
        qkv, projected = self._projections[node.inputs["k"]]
        cache, rows = self._pages(node.inputs["cache"]), projected.shape[0]
        q, rope = qkv.outputs["q"], self._ropes[str(qkv.attributes["rope"]), maximum(cache.shape[3])]
        num_heads, num_kv_heads, head_dim = (maximum(size) for size in (q.shape[1], *cache.shape[2:]))
        num_bytes = operand_bytes(cache.dtype, maximum(rows) * (num_heads // num_kv_heads), head_dim) * num_kv_heads
        cells = self._scratch(cache.dtype, q.shape, layout="cells", num_bytes=num_bytes)
        self._forms.cells[q, cache.dtype] = Cells(dtype=cache.dtype, cells=cells, scales=None)
        norms = {name: qkv.inputs[name] for name in ("q_norm", "k_norm") if name in qkv.inputs}
        # What differs from the plain case stands in the node.
        options: dict[str, Value] = {}
        for attention, _ in self._uses.get(q, []):
            options |= {name: value for name, value in attention.attributes.items() if name == "scale"}
        if qkv.attributes.get("is_value_normed"):
            options["is_v_normed"] = 1
        if "wq" in qkv.inputs and "wv" not in qkv.inputs:
            options["is_v_from_k"] = 1
        inputs = norms | {
            "cos": rope.cos, "sin": rope.sin, "positions": node.inputs["positions"], "cache": cache,
        }  # fmt: skip
        outputs = {"q": cells, "cache": cache}
        options |= {"eps": qkv.attributes.get("eps", 0.0), "rotary_dim": rope.rotary_dim}
        if q in self._fused:
            self._fused[q] = self._fused[q].joined(_Part(inputs=inputs, outputs=outputs, attributes=options))
            return
        constants = options | self._cache_attributes(cache, q)
        self._emit("qk_norm_rope_store", rows, {"qkv": projected} | inputs, outputs, **constants)

    def _lower_window_start(self, node: Kernel) -> None:
        first = self._plain_of(node.outputs["first"])
        self._emit("window_start", first.shape[0], node.inputs, {"first": first}, **node.attributes)

    def _lower_attention(self, node: Kernel) -> None:
        cache, y, q = self._pages(node.inputs["cache"]), node.outputs["y"], node.inputs["q"]
        operands = {"visible": node.inputs["visible"]}
        if "first" in node.inputs:
            operands["first"] = self._plain_of(node.inputs["first"])
        constants: dict[str, Value] = {"chunk": ATTENTION_CHUNK} | self._cache_attributes(cache, q)
        part = _Part(inputs=operands, outputs={"y": self._new_rows(y)}, attributes=constants)
        if q in self._fused:
            op, part = "qkv_attention", self._fused[q].joined(part)
        else:
            stored = {"q": self._forms.cells[q, cache.dtype].cells, "cache": cache}
            op, part = "attention", _Part(inputs=stored, outputs={}, attributes={}).joined(part)
        self._emit(op, y.shape[0], part.inputs, part.outputs, **part.attributes)

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
            scale=rounded(float(node.attributes["scale"]), table.dtype), vocab=maximum(probs.shape[1]),
            width=maximum(z.shape[1]), operand=DTYPES[cells.dtype],
        )  # fmt: skip

    def _lower_output(self, node: Kernel) -> None:
        """The value was written to its place by the node that made it."""
        assert self._forms.rows[node.inputs["x"]] is node.outputs["y"]

    # Head.

    def _lower_predict(self, node: Kernel) -> None:
        i, o, logits = node.inputs, node.outputs, node.inputs["logits"]
        rows, vocab = logits.shape[0], maximum(logits.shape[1])
        is_filtered, is_greedy = bool(node.attributes["is_filtered"]), bool(node.attributes["is_greedy"])
        draw = {name: i[name] for name in ("seed", "step", "block_idx")} if not is_greedy else {}
        partials = self._head_partials(logits, is_drawn=not is_greedy and not is_filtered)
        merged = {"max_logit": self._scratch("float32", (rows,))}
        merged |= {name: o[name] for name in ("argmax", "log_sum_exp", "entropy", "argmax_confidence")}
        keys: dict[str, Buffer] = {}
        sampled: dict[str, Buffer] = {}
        if not is_greedy:
            sampled = {"sample": self._scratch("int32", (rows,)), "sample_logit": self._scratch("float32", (rows,))}
        if not is_greedy and not is_filtered:
            keys["keys"] = self._scratch("uint8", (rows, _native.GUMBEL_KEY_BYTES))
            self._emit("gumbel_keys", rows, draw, keys)
            merged |= sampled
        kept: dict[str, Buffer] = {}
        if is_filtered or any(use.op == "probabilities" for use, _ in self._uses[logits]):
            kept["logits"] = self._logits[logits] = self._scratch("float32", logits.shape)
        self._head_statistics(node, partials, keys, merged, kept)
        if is_filtered:
            filters = {name: i[name] for name in ("is_drawn", "top_k", "top_p", "min_p")}
            inputs = {"logits": self._logits[logits], "max_logit": merged["max_logit"]} | filters | draw
            self._emit("filtered_draw", rows, inputs, sampled, vocab=vocab)
        inputs = {name: merged[name] for name in ("argmax", "max_logit", "log_sum_exp", "argmax_confidence")} | sampled
        inputs |= {} if is_greedy else {"is_drawn": i["is_drawn"]}
        names = ("token", "confidence", "is_finite_row", "is_finite")
        self._emit("finish_predict", rows, inputs, {name: o[name] for name in names})

    def _lower_best_other(self, node: Kernel) -> None:
        """The statistics once more with other ids banned, of which the argmax is all that counts."""
        logits = node.inputs["logits"]
        partials = self._head_partials(logits, is_drawn=False)
        names = ("max_logit", "log_sum_exp", "entropy", "argmax_confidence")
        merged = {name: self._scratch("float32", logits.shape[:1]) for name in names}
        self._head_statistics(node, partials, {}, merged | {"argmax": node.outputs["argmax"]}, {})

    def _head_partials(self, logits: Buffer, *, is_drawn: bool) -> dict[str, Buffer]:
        """Where the statistics of each tile of `logits` go."""
        stride, tiles = _row_stride(logits), -(-maximum(logits.shape[1]) // _native.HEAD_TILE)
        types = {"tile_max": "float32", "tile_sum": "float32", "tile_weighted": "float32", "tile_argmax": "int32"}
        if is_drawn:
            types |= {"tile_score": "float32", "tile_sample_logit": "float32", "tile_sample": "int32"}
        return {name: self._scratch(dtype, (tiles, stride)) for name, dtype in types.items()}

    def _head_statistics(
        self, node: Kernel, partials: Mapping[str, Buffer], keys: Mapping[str, Buffer], merged: Mapping[str, Buffer],
        kept: Mapping[str, Buffer],
    ) -> None:  # fmt: skip
        """Statistics of the logits that `node` reads, tile by tile, then of whole rows.

        Args:
            partials: what becomes of the tiles.
            keys: noise of the draw, if there is one.
            merged: what becomes of the rows.
            kept: where logits are written, if they are.
        """
        logits = node.inputs["logits"]
        head, rows, vocab = self._heads[logits], logits.shape[0], maximum(logits.shape[1])
        stride = _row_stride(logits)
        inputs = {"weight": head.weight, "temperature": node.inputs["step_temperature"]}
        inputs |= {"banned": node.inputs["banned"]} | head.cells.operands()
        self._emit(
            "head_stats", rows, inputs | dict(keys), dict(partials) | dict(kept),
            operand=DTYPES[head.cells.dtype], row_stride=stride, **({"softcap": head.cap} if head.cap else {}),
        )  # fmt: skip
        self._emit("head_merge", rows, partials, merged, vocab=vocab, row_stride=stride)

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
        kind = RECORD_KINDS.index(str(node.attributes["kind"]))
        self._nodes.append(Kernel(op="publish", inputs=node.inputs, outputs=node.outputs, attributes={"kind": kind}))

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


def _row_stride(logits: Buffer) -> int:
    """Rows of a tile's statistics, in whole vectors."""
    return -(-maximum(logits.shape[0]) // 16) * 16
