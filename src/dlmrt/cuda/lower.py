"""Recorded program -> program of Triton kernels: control flow as it is, model operations fused where a sum allows it.

A projection leaves partial sums. What reads them adds them up on the way: the norm behind a skip connection, the gate
of an MLP, the rotation of queries and keys. A value therefore has up to three forms: partial sums that wait for their
skip stream, float32 rows, and rows as operand of the next product. Each form is made once, by the kernel that makes the
value if that is possible. The result is an ordinary `Program`: `plan` places its scratch, `show` prints it.

`bounded` cuts the loop into launches of some blocks each, which go on from device memory where the last one stopped.

A sum over ranks is three kernels: this rank's term to where the others read it, a meeting, and the sum, which waits
like partial sums do for its skip stream and its norm. It cannot wait past the next meeting, whose parts take its place.

Left out on purpose: choices per card; they are made when kernels are bound (`dlmrt.cuda.launches`).

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlmrt.cuda.tiles import PACKED_TILE_K, TILE_SOFT, TILE_V, chunk_length, num_splits, power_of_two, tile_k
from dlmrt.models.config import ModelConfig, RopeConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.program.forwards import CONTEXT
from dlmrt.program.loop import RECORD_KINDS
from dlmrt.program.nodes import ITEM_BYTES, Buffer, Dim, If, Kernel, Node, Program, Rows, Value, While, maximum, walk
from dlmrt.program.record import describe_rope
from dlmrt.program.signatures import HEAD_OPS, LOOP_OPS, signature
from dlmrt.program.store import Lowered

_MATRIX_INPUTS = {("linear", "x"), ("qkv", "x"), ("qkv_packed", "x"), ("gated_mlp", "x"), ("moe", "x"),
                  ("qkv_biased", "x")}  # fmt: skip
CONSTANT = "constant."  # scalars of this prefix hold the number in their name
LAUNCH = "launch."  # scalars of this prefix bound one launch
RANKS = "ranks"  # state that stands for what kernels know of the other ranks (dlmrt.cuda.kernels.comm)


@dataclass
class _Forms:
    """Forms in which one value exists."""

    rows: Buffer | None = None
    operands: dict[str, Buffer] = field(default_factory=dict)
    sum_of: tuple[Buffer | None, Buffer] | None = None  # rows (None: 0) and partial sums, not yet added up
    cap: float = 0.0  # the sum is capped; 0: not


def operand_type(weight_dtype: str) -> str:
    """Type in which the other side of a product with such a weight is kept."""
    return "float32" if weight_dtype == "float32" else "bfloat16"


def lower(program: Program, config: ModelConfig, *, has_nvfp4_operands: bool = False) -> Lowered:
    """Lower `program`, which was recorded for `config`.

    Args:
        has_nvfp4_operands: NVFP4 matrices, experts excepted, multiply operands in NVFP4 instead of bfloat16.
    """
    lowering = _Lowering(program, config, has_nvfp4_operands=has_nvfp4_operands)
    body = lowering.body(program.body)
    return Lowered(
        program=Program(name=f"{program.name} (cuda)", body=body), sources=lowering.sources,
        part_bytes=lowering.part_bytes,
    )  # fmt: skip


def bounded(program: Program) -> Program:
    """A loop program that ends after `launch.blocks_left` blocks and is launched again until `launch.ends`."""
    names = {node.flag.name: at for at, node in enumerate(program.body) if isinstance(node, While)}
    at = names["more_blocks"]
    loop = program.body[at]
    assert isinstance(loop, While)
    is_first, blocks_left, goes_on, ends = (
        Buffer(name=LAUNCH + name, kind="scalar", dtype="int32", shape=())
        for name in ("is_first", "blocks_left", "goes_on", "ends")
    )
    bound = Kernel(
        op="bound_launch", inputs={"more_blocks": loop.flag, "blocks_left": blocks_left},
        outputs={"blocks_left": blocks_left, "goes_on": goes_on, "ends": ends},
    )  # fmt: skip
    body: tuple[Node, ...] = (
        If(flag=is_first, body=program.body[:at]),
        While(flag=goes_on, body=(*loop.body, bound)),
        If(flag=ends, body=program.body[at + 1 :]),
    )
    return Program(name=program.name, body=body)


class _Lowering:
    def __init__(self, program: Program, config: ModelConfig, *, has_nvfp4_operands: bool) -> None:
        self.config, self._has_nvfp4_operands = config, has_nvfp4_operands
        self.sources: dict[Buffer, tuple[Buffer, ...]] = {}
        self._packed: dict[tuple[Buffer, ...], Buffer] = {}
        self._named: dict[str, Buffer] = {}
        self._forms: dict[Buffer, _Forms] = {}
        self._nodes: list[Node] = []
        self._num_scratch = 0
        self._uses: dict[Buffer, list[tuple[Kernel, str]]] = {}
        for node in walk(program.body):
            if isinstance(node, Kernel):
                for role, buffer in node.inputs.items():
                    self._uses.setdefault(buffer, []).append((node, role))
        self._ropes: dict[str, RopeConfig] = {}
        for layer_idx in range(config.num_layers):
            rope = config.attention(layer_idx).rope
            self._ropes[describe_rope(rope)] = rope
        contexts = [b.shape for b in program.buffers() if b.name.startswith(CONTEXT)]
        self._capacity = maximum(contexts[0][0]) if contexts else 0
        self._projections: dict[Buffer, tuple[Kernel, Buffer]] = {}  # k -> its node and partial sums
        self._heads: dict[Buffer, tuple[Buffer, Buffer, float]] = {}  # logits not computed -> operand, weight, cap
        self._logits: dict[Buffer, Buffer] = {}
        self.part_bytes = 0
        kernels = [node for node in walk(program.body) if isinstance(node, Kernel)]
        self._num_ranks = max((int(node.attributes.get("num_ranks", 0)) for node in kernels), default=0)
        self._ranks = Buffer(name=RANKS, kind="state", dtype="uint8", shape=(0,))
        self._terms = ""  # type of the terms that wait to be added up

    def body(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Lower a body; forms made inside are unknown outside, where the body may not have run."""
        outer, self._nodes = self._nodes, []
        known = dict(self._forms)
        for node in nodes:
            if isinstance(node, Kernel):
                getattr(self, f"_lower_{node.op}", self._lower_other)(node)
                continue
            self._add_up_ranks()
            assert not any(self._is_read_inside(value, node) for value in self._waiting()), "a sum waits for a body"
            kind = While if isinstance(node, While) else If
            self._nodes.append(kind(flag=node.flag, body=self.body(node.body)))
        self._add_up_ranks()
        inner, self._nodes, self._forms = self._nodes, outer, known
        return tuple(inner)

    # Model operations.

    def _lower_embed(self, node: Kernel) -> None:
        x = node.outputs["x"]
        self._emit(
            "embed", x.shape[0], {"table": node.inputs["table"], "ids": node.inputs["ids"]}, {"x": self._new_rows(x)},
            scale=node.attributes["scale"], **_first(node),
        )  # fmt: skip

    def _lower_residual_mix(self, node: Kernel) -> None:
        i, x = node.inputs, self._rows_of(node.inputs["x"])
        normed = self._operand_scratch(self._operand_type(i["gate"]), x.shape)
        self._emit(
            "norm", x.shape[0], {"x": i["z"], "weight": i["norm"]}, {"operand": normed}, eps=node.attributes["eps"]
        )
        part = self._mlp(normed, i, x.shape[0], node.attributes["activation"])
        where = {"where": i["where"]} if "where" in i else {}
        self._emit("residual_add", x.shape[0], {"x": x, "part": part} | where, {"x": x}, alpha=node.attributes["alpha"])

    def _lower_mix(self, node: Kernel) -> None:
        x, part = self._rows_of(node.inputs["x"]), self._rows_of(node.inputs["delta"])
        where = {"where": node.inputs["where"]} if "where" in node.inputs else {}
        self._emit(
            "residual_add", x.shape[0], {"x": x, "part": part} | where, {"x": x}, alpha=node.attributes["alpha"]
        )  # fmt: skip

    def _lower_rms_norm(self, node: Kernel) -> None:
        x, y = node.inputs["x"], node.outputs["y"]
        forms = self._forms.setdefault(x, _Forms(rows=x))
        outputs: dict[str, Buffer] = {}
        if forms.rows is not None:
            inputs = {"x": forms.rows}
        else:
            inputs = self._take_sum(forms)
            if len(self._uses[x]) > 1:
                outputs["total"] = forms.rows = self._scratch("float32", x.shape)
            if forms.rows is not None or "ranks" in inputs:
                forms.sum_of = None
        if "weight" in node.inputs:
            inputs["weight"] = node.inputs["weight"]
        made = self._forms.setdefault(y, _Forms())
        wanted = {self._operand_of(use, role) for use, role in self._uses[y]}
        types = sorted(wanted - {"rows"})
        if "rows" in wanted or len(types) > 1:  # a second type of operand is made of the rows
            made.rows = outputs["y"] = self._output_or_scratch(y)
        if types:
            made.operands[types[0]] = outputs["operand"] = self._operand_scratch(types[0], y.shape)
        if "ranks" in inputs:
            self._emit_sum(y, inputs, outputs, eps=node.attributes["eps"])
        else:
            self._emit("norm", y.shape[0], inputs, outputs, eps=node.attributes["eps"])

    def _lower_add(self, node: Kernel) -> None:
        """Not computed here: the sum is taken by whoever reads it."""
        x, delta = self._rows_of(node.inputs["x"]), self._forms[node.inputs["delta"]]
        if delta.sum_of is not None and delta.sum_of[0] is None and not delta.cap:
            part = delta.sum_of[1]
            if part is self._ranks:
                del self._forms[node.inputs["delta"]]
        else:
            part = self._rows_of(node.inputs["delta"])
        self._forms[node.outputs["y"]] = _Forms(sum_of=(x, part))

    def _lower_scale(self, node: Kernel) -> None:
        x, y = self._forms[node.inputs["x"]], node.outputs["y"]
        if x.rows is None and x.sum_of is not None and x.sum_of[1] is not self._ranks:
            inputs = self._take_sum(x)
        else:
            inputs = {"x": self._rows_of(node.inputs["x"])}
        self._emit("sum_rows", y.shape[0], inputs | {"factor": node.inputs["factor"]}, {"y": self._new_rows(y)})

    def _lower_linear(self, node: Kernel) -> None:
        y, weight = node.outputs["y"], self._pack(node.inputs["weight"])
        operand = self._operand(node.inputs["x"], self._operand_type(weight))
        if any(use.op in ("predict", "soft_cap") for use, _ in self._uses[y]):
            self._heads[y] = operand, weight, 0.0
            return
        self._forms[y] = _Forms(sum_of=(None, self._matmul(operand, weight, y.shape[0])))

    def _lower_soft_cap(self, node: Kernel) -> None:
        operand, weight, _ = self._heads.pop(node.inputs["logits"])
        y, cap = node.outputs["y"], node.attributes["cap"]
        assert isinstance(cap, float)
        if any(use.op in HEAD_OPS for use, _ in self._uses[y]):
            self._heads[y] = operand, weight, cap
        else:
            self._forms[y] = _Forms(sum_of=(None, self._matmul(operand, weight, y.shape[0])), cap=cap)

    def _lower_gated_mlp(self, node: Kernel) -> None:
        i, y = node.inputs, node.outputs["y"]
        operand = self._operand(i["x"], self._operand_type(i["gate"]))
        part = self._mlp(operand, i, y.shape[0], node.attributes["activation"])
        self._forms[y] = _Forms(sum_of=(None, part))

    def _lower_qkv(self, node: Kernel) -> None:
        names = [name for name in ("wq", "wk", "wv") if name in node.inputs]
        self._project(node, self._pack(*(node.inputs[name] for name in names)))

    def _lower_qkv_packed(self, node: Kernel) -> None:
        self._project(node, self._pack(node.inputs["weight"]))

    def _lower_qkv_biased(self, node: Kernel) -> None:
        self._project(node, self._pack(*(node.inputs[name] for name in ("wq", "wk", "wv"))))

    def _project(self, node: Kernel, weight: Buffer) -> None:
        operand = self._operand(node.inputs["x"], self._operand_type(weight))
        part = self._matmul(operand, weight, node.outputs["q"].shape[0])
        self._projections[node.outputs["k"]] = node, part

    def _lower_kv_store(self, node: Kernel) -> None:
        qkv, part = self._projections[node.inputs["k"]]
        cache, q, i = node.inputs["cache"], qkv.outputs["q"], qkv.inputs
        rope = self._ropes[str(qkv.attributes["rope"])]
        cos, sin = (self._rope_table(name, rope, maximum(q.shape[2])) for name in ("cos", "sin"))
        rotated = self._scratch(operand_type(cache.dtype), q.shape)
        self._forms[q] = _Forms(operands={rotated.dtype: rotated})
        self._emit(
            "qk_norm_rope_store", q.shape[0],
            {"part": part, "cos": cos, "sin": sin, "positions": node.inputs["positions"], "cache": cache}
            | {name: i[name] for name in ("q_norm", "k_norm") if name in i}
            | ({"bias": self._pack(i["bq"], i["bk"], i["bv"])} if "bq" in i else {}),
            {"q": rotated, "cache": cache}, eps=qkv.attributes.get("eps", 0.0),
            is_value_normed=bool(qkv.attributes.get("is_value_normed", False)),
            is_value_key=qkv.op == "qkv" and "wv" not in i,
        )  # fmt: skip

    def _lower_attention(self, node: Kernel) -> None:
        cache, y, q = node.inputs["cache"], node.outputs["y"], node.inputs["q"]
        rows, num_heads, head_dim = q.shape
        chunk = chunk_length(maximum(rows))
        chunks = -(-max(maximum(cache.shape[0]), 1) // chunk)
        means = self._scratch("float32", (chunks, rows, num_heads, head_dim))
        sums = self._scratch("float32", (chunks, rows, num_heads))
        scale = node.attributes.get("scale", maximum(head_dim) ** -0.5)
        inputs = {name: buffer for name, buffer in node.inputs.items() if name not in ("q", "cache")}
        self._emit(
            "attention", rows, {"q": self._operand(q, operand_type(cache.dtype)), "cache": cache} | inputs,
            {"acc": means, "lse": sums}, scale=scale, chunk=chunk,
        )  # fmt: skip
        dtype, is_whole = self._operand_of(*self._uses[y][0]), power_of_two(maximum(head_dim)) == head_dim
        if dtype == "nvfp4" and not is_whole:  # one head's numbers would be written with the next one's
            merged = self._new_rows(y)
        else:
            merged = self._operand_scratch(dtype, y.shape)
            self._forms[y] = _Forms(operands={dtype: merged})
        self._emit("attention_merge", rows, {"acc": means, "lse": sums}, {"y": merged})

    def _lower_window_start(self, node: Kernel) -> None:
        self._emit("window_start", node.outputs["first"].shape[0], node.inputs, node.outputs, **node.attributes)

    # Experts.

    def _lower_route_sigmoid(self, node: Kernel) -> None:
        i, o, a = node.inputs, node.outputs, node.attributes
        rows, num_experts = o["experts"].shape[0], maximum(i["weight"].shape[0])
        part = self._matmul(self._rows_of(i["x"]), self._pack(i["weight"]), rows)
        inputs = {"part": part, "bias": i["bias"]}
        capacity, block = int(a["capacity"]), 0
        if capacity:
            block = int(a["block_length"])
            admitted = self._scratch("uint8", (-(-maximum(rows) // block), num_experts))
            self._emit("admit_experts", rows, inputs, {"admitted": admitted}, block=block, capacity=capacity)
            inputs |= {"admitted": admitted}
        self._emit(
            "route_sigmoid", rows, inputs, o, block=block, groups=a["num_groups"], kept=a["num_kept_groups"],
            scaling=a["scaling_factor"],
        )  # fmt: skip

    def _lower_route_softmax(self, node: Kernel) -> None:
        i, o = node.inputs, node.outputs
        x = self._rows_of(i["x"])
        rows, width = o["experts"].shape[0], maximum(x.shape[1])
        normed = self._scratch("float32", x.shape)
        self._emit("norm", rows, {"x": x, "weight": i["scale"]}, {"y": normed}, eps=node.attributes["eps"])
        part = self._matmul(normed, self._pack(i["weight"]), rows)
        inputs = {"part": part, "expert_scale": i["expert_scale"]}
        self._emit("route_softmax", rows, inputs, o, factor=width**-0.5)

    def _lower_moe(self, node: Kernel) -> None:
        i, y = node.inputs, node.outputs["y"]
        rows, top_k = i["experts"].shape[0], maximum(i["experts"].shape[1])
        entries = maximum(rows) * top_k
        gate_up, down = self._pack(i["gate"], i["up"]), self._pack(i["down"])
        operand = self._operand(i["x"], self._operand_type(gate_up))
        num_experts, width, out = maximum(i["gate"].shape[0]), maximum(i["gate"].shape[1]), maximum(y.shape[1])
        lists = {"lists": self._scratch("int32", (num_experts, rows)), "counts": self._scratch("int32", (num_experts,))}
        self._emit("list_rows", rows, {"experts": i["experts"]}, lists, **_first(node))
        both = self._scratch("float32", (1, entries, 2 * width))
        self._emit("matmul_experts", rows, {"x": operand, "weight": gate_up} | lists, {"out": both}, top_k=top_k,
                   is_row=True)  # fmt: skip
        product = self._operand_scratch(self._operand_type(down), (entries, width))
        activation = node.attributes["activation"]
        self._emit("gate", rows, {"part": both}, {"operand": product}, activation=activation, entries=top_k)
        parts = self._scratch("float32", (1, entries, out))
        self._emit("matmul_experts", rows, {"x": product, "weight": down} | lists, {"out": parts}, top_k=top_k,
                   is_row=False)  # fmt: skip
        inputs = {"part": parts, "weights": i["weights"], "experts": i["experts"]}
        self._emit(
            "sum_experts", rows, inputs, {"y": self._new_rows(y)}, num_experts=num_experts, **_first(node)
        )  # fmt: skip

    def _lower_hidden_store(self, node: Kernel) -> None:
        hidden, cache = self._rows_of(node.inputs["hidden"]), node.inputs["cache"]
        self._emit(
            "hidden_store", hidden.shape[0],
            {"hidden": hidden, "positions": node.inputs["positions"], "cache": cache}, {"cache": cache},
        )  # fmt: skip

    def _lower_shift(self, node: Kernel) -> None:
        y, inputs = node.outputs["y"], dict(node.inputs)
        if "hidden" in inputs:
            inputs["hidden"] = self._rows_of(inputs["hidden"])
        operand = self._scratch(self._operand_of(*self._uses[y][0]), y.shape)
        self._forms[y] = _Forms(operands={operand.dtype: operand})
        self._emit("shift", y.shape[0], inputs, {"y": operand})

    def _lower_soft_embedding(self, node: Kernel) -> None:
        probs, table, z = node.inputs["probs"], node.inputs["table"], node.outputs["z"]
        vocab = maximum(probs.shape[1])
        splits = num_splits(maximum(z.shape[1]), vocab, TILE_SOFT)
        part = self._scratch("float32", (splits, *z.shape))
        source = {"probs": probs} if probs not in self._logits else {
            "logits": self._logits[probs], "log_sum_exp": self._named["log_sum_exp"]
        }  # fmt: skip
        self._emit("soft_embedding", z.shape[0], {"table": table} | source, {"part": part})
        self._emit("sum_rows", z.shape[0], {"part": part}, {"y": self._new_rows(z)}, scale=node.attributes["scale"])

    def _lower_output(self, node: Kernel) -> None:
        """Most values were written to their place by the node that made them."""
        rows = self._rows_of(node.inputs["x"])
        assert rows is node.outputs["y"]

    # Ranks.

    def _lower_sum_ranks(self, node: Kernel) -> None:
        x, y, terms = node.inputs["x"], node.outputs["y"], str(node.attributes["terms"])
        forms = self._forms[x]
        inputs = self._take_sum(forms) if forms.rows is None else {"x": forms.rows}
        num_bytes = maximum(x.shape[0]) * maximum(x.shape[1]) * ITEM_BYTES[terms]
        self._exchange("put_terms", x.shape[0], inputs, num_bytes, terms=terms)
        self._terms = terms
        self._forms[y] = _Forms(sum_of=(None, self._ranks))

    def _lower_agree(self, node: Kernel) -> None:
        self._add_up_ranks()
        self._meet(node.inputs, node.outputs)

    def _exchange(self, op: str, rows: Dim, inputs: Mapping[str, Buffer], num_bytes: int, **attributes: Value) -> None:
        """This rank's part by kernel `op`, and the meeting behind which those of all ranks can be read."""
        self._add_up_ranks()
        self.part_bytes = max(self.part_bytes, num_bytes)
        ranks = {"ranks": self._ranks}
        self._emit(op, rows, dict(inputs) | ranks, ranks, num_ranks=self._num_ranks, **attributes)
        self._meet({}, {})

    def _meet(self, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> None:
        ranks, size = {"ranks": self._ranks}, {"num_ranks": self._num_ranks}
        self._nodes.append(
            Kernel(op="meet", inputs=ranks | dict(inputs), outputs=ranks | dict(outputs), attributes=size)
        )

    def _add_up_ranks(self) -> None:
        """Add up what ranks have put: the next meeting is about other values."""
        for value in self._waiting():
            forms = self._forms[value]
            if forms.sum_of is not None and forms.sum_of[1] is self._ranks:
                self._rows_of(value)

    def _emit_sum(
        self, value: Buffer, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer], **attributes: Value
    ) -> None:
        self._emit(
            "sum_terms", value.shape[0], inputs, outputs, num_ranks=self._num_ranks, terms=self._terms,
            width=maximum(value.shape[1]), **attributes,
        )  # fmt: skip

    # Head.

    def _lower_predict(self, node: Kernel) -> None:
        i, o, logits = node.inputs, node.outputs, node.inputs["logits"]
        operand, weight, cap = self._heads[logits]
        rows = logits.shape[0]
        is_filtered, is_greedy = bool(node.attributes["is_filtered"]), bool(node.attributes["is_greedy"])
        is_sampled = not is_greedy and not is_filtered
        draw = {} if is_greedy else {name: i[name] for name in ("seed", "step", "block_idx")}
        names = ["tile_max", "tile_sum", "tile_weighted", "tile_argmax"]
        if is_sampled:
            names += ["tile_score", "tile_sample", "tile_sample_logit"]
        partials = {
            name: self._scratch("int32" if name in ("tile_argmax", "tile_sample") else "float32", (_tiles(node), rows))
            for name in names
        }
        written = dict(partials)
        if is_filtered or any(use.op == "probabilities" for use, _ in self._uses[logits]):
            written["logits"] = self._logits[logits] = self._scratch("float32", logits.shape)
        inputs = {"x": operand, "weight": weight, "banned": i["banned"], "temperature": i["step_temperature"]}
        self._emit("head_stats", rows, inputs | (draw if is_sampled else {}), written, cap=cap, **_first(node))
        merged = {name: o[name] for name in ("argmax", "argmax_confidence", "token", "confidence", "entropy",
                                             "log_sum_exp", "is_finite_row")}  # fmt: skip
        merged["max_logit"] = self._scratch("float32", (rows,))
        drawn = {"is_drawn": i["is_drawn"]} if is_sampled else {}
        self._merge(rows, partials, drawn, merged)
        if is_filtered:
            filters = {name: i[name] for name in ("is_drawn", "top_k", "top_p", "min_p")}
            whole = self._logits_of_all(node, written["logits"])
            self._emit(
                "filtered_draw", rows,
                {"logits": whole, "max_logit": merged["max_logit"], "log_sum_exp": o["log_sum_exp"],
                 "token": o["token"], "confidence": o["confidence"]} | filters | draw,
                {"token": o["token"], "confidence": o["confidence"]},
            )  # fmt: skip
        self._emit("all_finite", rows, {"is_finite_row": o["is_finite_row"]}, {"is_finite": o["is_finite"]})

    def _lower_best_other(self, node: Kernel) -> None:
        """The statistics once more with other ids banned, of which the argmax is all that counts."""
        i, logits = node.inputs, node.inputs["logits"]
        operand, weight, cap = self._heads[logits]
        rows = logits.shape[0]
        types = {"tile_max": "float32", "tile_sum": "float32", "tile_weighted": "float32", "tile_argmax": "int32"}
        partials = {name: self._scratch(dtype, (_tiles(node), rows)) for name, dtype in types.items()}
        inputs = {"x": operand, "weight": weight, "banned": i["banned"], "temperature": i["step_temperature"]}
        self._emit("head_stats", rows, inputs, partials, cap=cap, **_first(node))
        names = ("argmax_confidence", "confidence", "entropy", "log_sum_exp", "max_logit")
        merged = {name: self._scratch("float32", (rows,)) for name in names}
        merged |= {"token": self._scratch("int32", (rows,)), "is_finite_row": self._scratch("bool", (rows,))}
        self._merge(rows, partials, {}, merged | {"argmax": node.outputs["argmax"]})

    def _merge(
        self, rows: Dim, tiles: Mapping[str, Buffer], drawn: Mapping[str, Buffer], merged: Mapping[str, Buffer]
    ) -> None:
        """Statistics of a row from those of its tiles, and where ranks share the ids of them all."""
        if not self._num_ranks:
            self._emit("head_merge", rows, dict(tiles) | dict(drawn), merged)
            return
        self._exchange("put_statistics", rows, tiles, 7 * maximum(rows) * ITEM_BYTES["float32"])
        self._emit("merge_ranks", rows, {"ranks": self._ranks} | dict(drawn), merged, num_ranks=self._num_ranks)

    def _logits_of_all(self, node: Kernel, logits: Buffer) -> Buffer:
        """Logits of all ids: filters weigh them against each other many times."""
        if not self._num_ranks:
            return logits
        rows, vocab = logits.shape[0], int(node.attributes["vocab_size"])
        num_bytes = maximum(rows) * -(-vocab // self._num_ranks) * ITEM_BYTES["float32"]
        self._exchange("put_terms", rows, {"x": logits}, num_bytes, terms="float32")
        whole = self._scratch("float32", (rows, vocab))
        self._emit("take_logits", rows, {"ranks": self._ranks}, {"logits": whole}, num_ranks=self._num_ranks)
        return whole

    def _lower_probabilities(self, node: Kernel) -> None:
        """Not computed: the soft embedding takes them from the logits."""
        self._logits[node.outputs["probs"]] = self._logits[node.inputs["logits"]]
        self._named["log_sum_exp"] = node.inputs["log_sum_exp"]

    # Loop operations pass through.

    def _lower_publish(self, node: Kernel) -> None:
        kind = RECORD_KINDS.index(str(node.attributes["kind"]))
        for op in ("pack_record", "publish"):
            waits = {"ranks": self._ranks} if self._num_ranks else {}
            inputs = node.inputs if op == "pack_record" else waits
            self._nodes.append(Kernel(op=op, inputs=inputs, outputs=node.outputs, attributes={"kind": kind}))

    def _lower_other(self, node: Kernel) -> None:
        assert node.op in LOOP_OPS, f"no lowering of {node.op}"
        attributes: dict[str, Value] = dict(node.attributes)
        operands, buffers = (*signature(node.op)[0], *signature(node.op)[1]), dict(node.inputs) | dict(node.outputs)
        for operand in operands:
            if operand.dims == ("L",):
                attributes["length"] = maximum(buffers[operand.name].shape[0])
        self._nodes.append(Kernel(op=node.op, inputs=node.inputs, outputs=node.outputs, attributes=attributes))

    # Parts.

    def _mlp(self, operand: Buffer, inputs: Mapping[str, Buffer], rows: Dim, activation: Value) -> Buffer:
        """Partial sums of down(act(gate x) * up x)."""
        down = self._pack(inputs["down"])
        part = self._matmul(operand, self._pack(inputs["gate"], inputs["up"]), rows)
        product = self._operand_scratch(self._operand_type(down), (rows, maximum(inputs["gate"].shape[0])))
        self._emit("gate", rows, {"part": part}, {"operand": product}, activation=activation)
        return self._matmul(product, down, rows)

    def _matmul(self, operand: Buffer, weight: Buffer, rows: Dim) -> Buffer:
        n, k = map(maximum, weight.shape)
        part = self._scratch("float32", (num_splits(n, k, tile_k(weight.dtype)), rows, n))
        self._emit("matmul", rows, {"x": operand, "weight": weight}, {"part": part})
        return part

    def _take_sum(self, forms: _Forms) -> dict[str, Buffer]:
        """Operands `x` and `part` of a kernel that adds up a waiting value."""
        assert forms.sum_of is not None and not forms.cap
        x, part = forms.sum_of
        return ({} if x is None else {"x": x}) | {"ranks" if part is self._ranks else "part": part}

    def _rows_of(self, value: Buffer) -> Buffer:
        """`value` as float32 rows, summed up now if it waits."""
        forms = self._forms.setdefault(value, _Forms(rows=value))
        if forms.rows is None:
            assert forms.sum_of is not None, f"{value.name} exists only as operand"
            cap, forms.cap = forms.cap, 0.0
            inputs = self._take_sum(forms)
            forms.rows, forms.sum_of = self._output_or_scratch(value), None
            if "ranks" in inputs:
                self._emit_sum(value, inputs, {"total": forms.rows})
            else:
                self._emit("sum_rows", value.shape[0], inputs, {"y": forms.rows}, cap=cap)
        return forms.rows

    def _operand(self, value: Buffer, dtype: str) -> Buffer:
        """`value` as operand, made now unless the kernel that made it did so."""
        forms = self._forms.setdefault(value, _Forms(rows=value))
        if dtype not in forms.operands:
            rows = self._rows_of(value)
            forms.operands[dtype] = self._operand_scratch(dtype, value.shape)
            self._emit("sum_rows", value.shape[0], {"x": rows}, {"y": forms.operands[dtype]})
        return forms.operands[dtype]

    def _operand_of(self, use: Kernel, role: str) -> str:
        """Type of operand in which `use` reads this input, or "rows"."""
        if (use.op, role) not in _MATRIX_INPUTS:
            return "rows"
        weight = next(use.inputs[name] for name in ("weight", "wq", "gate") if name in use.inputs)
        return self._operand_type(weight)

    def _operand_type(self, weight: Buffer) -> str:
        """Type of operand that `weight` is multiplied with; NVFP4 where its blocks fill the tiles."""
        is_matrix = len(weight.shape) == 2 and weight.dtype == "nvfp4" and not maximum(weight.shape[1]) % PACKED_TILE_K
        return "nvfp4" if is_matrix and self._has_nvfp4_operands else operand_type(weight.dtype)

    def _operand_scratch(self, dtype: str, shape: tuple[Dim, ...]) -> Buffer:
        """Scratch of an operand; in NVFP4 codes and block scales are bytes behind each other."""
        if dtype != "nvfp4":
            return self._scratch(dtype, shape)
        width = maximum(shape[1])
        return self._scratch("uint8", (shape[0], width // 2 + width // 16))

    def _waiting(self) -> list[Buffer]:
        return [value for value, forms in self._forms.items() if forms.sum_of is not None]

    def _is_read_inside(self, value: Buffer, node: While | If) -> bool:
        inside = {id(kernel) for kernel in walk(node.body)}
        return any(id(use) in inside for use, _ in self._uses.get(value, []))

    def _new_rows(self, value: Buffer) -> Buffer:
        rows = self._output_or_scratch(value)
        self._forms.setdefault(value, _Forms()).rows = rows
        return rows

    def _output_or_scratch(self, value: Buffer) -> Buffer:
        """Where the rows of `value` go: the state that it is the output of, or scratch."""
        uses = self._uses.get(value, [])
        is_output = len(uses) == 1 and uses[0][0].op == "output"
        return uses[0][0].outputs["y"] if is_output else self._scratch("float32", value.shape)

    def _pack(self, *tensors: Buffer) -> Buffer:
        """The rows of `tensors` as one weight."""
        if tensors not in self._packed:
            dtype, axis = tensors[0].dtype, max(len(tensors[0].shape) - 2, 0)  # rows; of experts: of each one
            assert all(t.dtype == dtype for t in tensors), "tensors of one projection have one format"
            first, *others = (t.name.removesuffix(".weight") for t in tensors)
            name = "+".join((first, *(other.rpartition(".")[2] for other in others)))
            shape = list(tensors[0].shape)
            shape[axis] = sum(maximum(t.shape[axis]) for t in tensors)
            packed = Buffer(name=name, kind="weight", dtype=dtype, shape=tuple(shape), layout="packed")
            self._packed[tensors] = packed
            self.sources[packed] = tensors
        return self._packed[tensors]

    def _rope_table(self, name: str, rope: RopeConfig, head_dim: int) -> Buffer:
        """Rotary table [C, R / 2] of the program's context."""
        full = f"rope.{describe_rope(rope)}.{head_dim}.{name}"
        if full not in self._named:
            width = len(rope_inv_freq(rope, head_dim)[0])
            self._named[full] = Buffer(name=full, kind="weight", dtype="float32", shape=(self._capacity, width))
        return self._named[full]

    def _constant(self, value: int) -> Buffer:
        name = f"{CONSTANT}{value}"
        if name not in self._named:
            self._named[name] = Buffer(name=name, kind="scalar", dtype="int32", shape=())
        return self._named[name]

    def _scratch(self, dtype: str, shape: tuple[Dim, ...]) -> Buffer:
        self._num_scratch += 1
        return Buffer(name=f"%{self._num_scratch - 1}", kind="scratch", dtype=dtype, shape=shape)

    def _emit(
        self, op: str, rows: Dim, inputs: Mapping[str, Buffer], outputs: Mapping[str, Buffer], **attributes: Value
    ) -> None:
        """One kernel over `rows` rows, whose number it reads from the device."""
        count = rows.count if isinstance(rows, Rows) else self._constant(rows)
        inputs = dict(inputs) | {"rows": count}
        self._nodes.append(Kernel(op=op, inputs=inputs, outputs=dict(outputs), attributes=attributes))


def _first(node: Kernel) -> dict[str, Value]:
    """First id or expert of this rank's part, where there are several."""
    return {"first": node.attributes["first"]} if "first" in node.attributes else {}


def _tiles(node: Kernel) -> int:
    """Tiles of the ids of a head; they begin at a multiple of 4."""
    vocab = maximum(node.inputs["logits"].shape[1])
    return -(-(vocab + int(node.attributes.get("first", 0)) % 4) // TILE_V)
