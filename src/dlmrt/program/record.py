"""The recorder: model functions and the loop call it as they would call torch, and it writes down program nodes.

It implements `dlmrt.ops.spec.Ops` over `Buffer` handles, so `qwen3.forward(recorder, ...)` records what it would
compute. Every node is checked against `dlmrt.program.signatures` when it is written: types, ranks and sizes, with one
letter standing for one size throughout a node. `finish` drops nodes whose results nobody reads (the final norm of a
prefill chunk, the last layer's output projection) and refuses scratch that is read before it was written, since such
a program would read what the previous request left.

Left out on purpose: any choice of kernel, layout or fusion; that is the lowering's.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

from dlmrt.models.config import RopeConfig
from dlmrt.ops.spec import Attend
from dlmrt.program.nodes import Buffer, Dim, If, Kernel, Node, Program, Rows, Value, While, maximum
from dlmrt.program.signatures import Operand, signature

URGENT = "is_urgent"  # operand of `publish` that is not part of the record
WEIGHT_TYPES = ("float32", "bfloat16", "int8", "fp8", "nvfp4", "int4_g32", "int4_g128")


class RecordError(ValueError):
    """A node does not fit its operands, or a program reads what it never wrote: a mistake in model or loop code."""


class Recorder:
    """Writes one program.

    Args:
        name: of the program.
        activations: type of what flows between operations.
        cache: type of keys and values.
    """

    def __init__(self, name: str, *, activations: str = "float32", cache: str = "float32") -> None:
        self.name = name
        self._types = {"act": (activations,), "kv": (cache,), "weight": WEIGHT_TYPES}
        self._bodies: list[list[Node]] = [[]]
        self._named: dict[str, Buffer] = {}
        self._num_scratch = 0

    # Buffers.

    def weight(self, name: str, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """A read-only tensor of the checkpoint."""
        return self._declare(Buffer(name=name, kind="weight", dtype=dtype, shape=shape))

    def state(self, name: str, dtype: str, shape: tuple[Dim, ...], *, present: Buffer | None = None) -> Buffer:
        """Memory that outlives a run or is read by the host; see `Buffer.present`."""
        return self._declare(Buffer(name=name, kind="state", dtype=dtype, shape=shape, present=present))

    def scalar(self, name: str, dtype: str = "int32") -> Buffer:
        """One number; the same name gives the same buffer."""
        known = self._named.get(name)
        if known is not None and known.kind == "scalar" and known.dtype == dtype:
            return known
        return self._declare(Buffer(name=name, kind="scalar", dtype=dtype, shape=()))

    def _declare(self, buffer: Buffer) -> Buffer:
        if buffer.name in self._named:
            raise RecordError(f"{self.name}: two buffers are called {buffer.name!r}")
        self._named[buffer.name] = buffer
        return buffer

    def _scratch(self, dtype: str, shape: tuple[Dim, ...]) -> Buffer:
        self._num_scratch += 1
        return Buffer(name=f"%{self._num_scratch - 1}", kind="scratch", dtype=dtype, shape=shape)

    # Nodes.

    def call(
        self, op: str, inputs: Mapping[str, Buffer | None], *, attributes: Mapping[str, Value] | None = None,
        outputs: Mapping[str, Buffer] | None = None, dims: Mapping[str, Dim] | None = None,
    ) -> dict[str, Buffer]:  # fmt: skip
        """Write one kernel node and return its outputs by name.

        Args:
            inputs: None stands for an optional input that is left out.
            outputs: buffers to write to; scratch is made for those not named.
            dims: sizes of letters that the inputs alone do not give.
        """
        wanted, results = signature(op)
        given = {name: buffer for name, buffer in inputs.items() if buffer is not None}
        sizes: dict[str, Dim] = dict(dims or {})
        for operand in wanted:
            if operand.name in given:
                self._check(op, operand, given[operand.name], sizes)
            elif not operand.is_optional:
                raise RecordError(f"{op}: operand {operand.name!r} is missing")
        self._refuse_unknown(op, given, wanted)
        written = dict(outputs or {})
        self._refuse_unknown(op, written, results)
        for operand in results:
            if operand.dtype is None:
                written[operand.name] = given[operand.name]
            elif operand.name in written:
                self._check(op, operand, written[operand.name], sizes)
            else:
                shape = tuple(_size(op, operand, word, sizes) for word in operand.dims)
                written[operand.name] = self._scratch(self._types.get(operand.dtype, (operand.dtype,))[0], shape)
        self._append(Kernel(op=op, inputs=given, outputs=written, attributes=dict(attributes or {})))
        return written

    def call_named(
        self, op: str, buffers: Mapping[str, Buffer], *, attributes: Mapping[str, Value] | None = None,
        outputs: Mapping[str, Buffer] | None = None,
    ) -> dict[str, Buffer]:  # fmt: skip
        """As `call`, with every operand of `op` taken from `buffers` by name; `outputs` come first."""
        wanted, results = signature(op)
        inputs = {operand.name: buffers[operand.name] for operand in wanted if operand.name in buffers}
        targets = {o.name: buffers[o.name] for o in results if o.dtype is not None and o.name in buffers}
        return self.call(op, inputs, attributes=attributes, outputs=targets | dict(outputs or {}))

    def publish(self, kind: str, ring: Buffer, fields: Mapping[str, Buffer], *, urgent: Buffer | None = None) -> None:
        """Append one record with the present values of `fields`, in this order, to the ring that the host reads.

        Args:
            urgent: flag, whether the host is to be woken for it; None: yes.
        """
        inputs = dict(fields) | ({} if urgent is None else {URGENT: urgent})
        self._append(Kernel(op="publish", inputs=inputs, outputs={"ring": ring}, attributes={"kind": kind}))

    @contextmanager
    def while_(self, flag: Buffer) -> Iterator[None]:
        """What is recorded inside runs as long as `flag` is not 0."""
        self._bodies.append([])
        yield
        body = tuple(self._bodies.pop())
        self._append(While(flag=flag, body=body))

    @contextmanager
    def if_(self, flag: Buffer) -> Iterator[None]:
        """What is recorded inside runs unless `flag` is 0."""
        self._bodies.append([])
        yield
        body = tuple(self._bodies.pop())
        self._append(If(flag=flag, body=body))

    def finish(self) -> Program:
        """The program, without dead nodes.

        Raises:
            RecordError: scratch is read before it is written on some path.
        """
        assert len(self._bodies) == 1, "finish inside a body"
        body = _prune(self._bodies[0], set())
        _check_written(self.name, body, set())
        return Program(name=self.name, body=body)

    def _append(self, node: Node) -> None:
        self._bodies[-1].append(node)

    def _check(self, op: str, operand: Operand, buffer: Buffer, sizes: dict[str, Dim]) -> None:
        assert operand.dtype is not None
        types = self._types.get(operand.dtype, (operand.dtype,))
        if buffer.dtype not in types:
            raise RecordError(f"{op}: {operand.name} ({buffer.name}) is {buffer.dtype}, wanted {' or '.join(types)}")
        if len(buffer.shape) != len(operand.dims):
            found = describe(buffer.shape)
            raise RecordError(
                f"{op}: {operand.name} ({buffer.name}) has shape {found}, wanted [{', '.join(operand.dims)}]"
            )
        for word, size in zip(operand.dims, buffer.shape, strict=True):
            expected = _bind(word, size, sizes)
            if expected != size:
                found, here = describe(buffer.shape), describe((expected,))[1:-1]
                raise RecordError(f"{op}: {operand.name} ({buffer.name}) has shape {found}, but {word} is {here} here")

    @staticmethod
    def _refuse_unknown(op: str, given: Iterable[str], wanted: tuple[Operand, ...]) -> None:
        unknown = set(given) - {operand.name for operand in wanted}
        if unknown:
            raise RecordError(f"{op}: it has no operand {sorted(unknown)[0]!r}")

    # dlmrt.ops.spec.Ops.

    def embed(self, table: Buffer, ids: Buffer, *, scale: float = 1.0) -> Buffer:
        """See `Ops.embed`."""
        return self.call("embed", {"table": table, "ids": ids}, attributes={"scale": scale})["x"]

    def residual_mix(
        self, x: Buffer, z: Buffer, where: Buffer | None, norm: Buffer, gate: Buffer, up: Buffer, down: Buffer,
        *, alpha: float, eps: float, activation: str = "silu", is_product_fp32: bool = False,
    ) -> Buffer:  # fmt: skip
        """See `Ops.residual_mix`; updates `x` in place, and only while `z` is present."""
        operands = {"x": x, "z": z, "where": where, "norm": norm, "gate": gate, "up": up, "down": down}
        constants: dict[str, Value] = {"alpha": alpha, "eps": eps, "activation": activation}
        if z.present is None:
            return self.call("residual_mix", operands, attributes=constants)["x"]
        with self.if_(z.present):
            return self.call("residual_mix", operands, attributes=constants)["x"]

    def add(self, x: Buffer, delta: Buffer) -> Buffer:
        """See `Ops.add`."""
        return self.call("add", {"x": x, "delta": delta})["y"]

    def scale(self, x: Buffer, factor: Buffer) -> Buffer:
        """See `Ops.scale`."""
        return self.call("scale", {"x": x, "factor": factor})["y"]

    def rms_norm(self, x: Buffer, weight: Buffer | None, *, eps: float, is_product_fp32: bool = False) -> Buffer:
        """See `Ops.rms_norm`; activations are not rounded between norm and product here."""
        return self.call("rms_norm", {"x": x, "weight": weight}, attributes={"eps": eps})["y"]

    def linear(self, x: Buffer, weight: Buffer) -> Buffer:
        """See `Ops.linear`."""
        return self.call("linear", {"x": x, "weight": weight})["y"]

    def qkv(
        self, x: Buffer, wq: Buffer, wk: Buffer, wv: Buffer, q_norm: Buffer, k_norm: Buffer, positions: Buffer,
        *, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Buffer, Buffer, Buffer]:  # fmt: skip
        """See `Ops.qkv`."""
        operands = {"x": x, "wq": wq, "wk": wk, "wv": wv, "q_norm": q_norm, "k_norm": k_norm, "positions": positions}
        return _qkv(
            self.call("qkv", operands, dims={"H": head_dim}, attributes={"eps": eps, "rope": describe_rope(rope)})
        )

    def qkv_biased(
        self, x: Buffer, wq: Buffer, wk: Buffer, wv: Buffer, bq: Buffer, bk: Buffer, bv: Buffer, positions: Buffer,
        *, head_dim: int, rope: RopeConfig,
    ) -> tuple[Buffer, Buffer, Buffer]:  # fmt: skip
        """See `Ops.qkv_biased`."""
        operands = {"x": x, "wq": wq, "wk": wk, "wv": wv, "bq": bq, "bk": bk, "bv": bv, "positions": positions}
        return _qkv(self.call("qkv_biased", operands, dims={"H": head_dim}, attributes={"rope": describe_rope(rope)}))

    def qkv_packed(
        self, x: Buffer, weight: Buffer, q_norm: Buffer, k_norm: Buffer, positions: Buffer,
        *, num_heads: int, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Buffer, Buffer, Buffer]:  # fmt: skip
        """See `Ops.qkv_packed`."""
        operands = {"x": x, "weight": weight, "q_norm": q_norm, "k_norm": k_norm, "positions": positions}
        num_kv_heads = (maximum(weight.shape[0]) // head_dim - num_heads) // 2
        dims: dict[str, Dim] = {"N": num_heads, "G": num_kv_heads, "H": head_dim}
        return _qkv(self.call("qkv_packed", operands, dims=dims, attributes={"eps": eps, "rope": describe_rope(rope)}))

    def qkv_normed(
        self, x: Buffer, wq: Buffer, wk: Buffer, wv: Buffer | None, q_norm: Buffer, k_norm: Buffer, positions: Buffer,
        *, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Buffer, Buffer, Buffer]:  # fmt: skip
        """See `Ops.qkv_normed`."""
        operands = {"x": x, "wq": wq, "wk": wk, "wv": wv, "q_norm": q_norm, "k_norm": k_norm, "positions": positions}
        constants: dict[str, Value] = {"eps": eps, "rope": describe_rope(rope), "is_value_normed": True}
        return _qkv(self.call("qkv", operands, dims={"H": head_dim}, attributes=constants))

    def attention(
        self, attend: Attend, layer_idx: int, q: Buffer, k: Buffer, v: Buffer, *, scale: float | None = None
    ) -> Buffer:
        """See `Ops.attention`."""
        out: Buffer = attend(layer_idx, q, k, v, scale=scale)
        return out

    def gated_mlp(self, x: Buffer, gate: Buffer, up: Buffer, down: Buffer, *, activation: str = "silu") -> Buffer:
        """See `Ops.gated_mlp`."""
        operands = {"x": x, "gate": gate, "up": up, "down": down}
        return self.call("gated_mlp", operands, attributes={"activation": activation})["y"]

    def route_sigmoid(
        self, x: Buffer, weight: Buffer, bias: Buffer,
        *, top_k: int, num_groups: int, num_kept_groups: int, capacity: int | None, block_length: int,
        scaling_factor: float,
    ) -> tuple[Buffer, Buffer]:  # fmt: skip
        """See `Ops.route_sigmoid`; capacity 0 stands for none."""
        constants: dict[str, Value] = {
            "num_groups": num_groups, "num_kept_groups": num_kept_groups, "capacity": capacity or 0,
            "block_length": block_length, "scaling_factor": scaling_factor,
        }  # fmt: skip
        operands = {"x": x, "weight": weight, "bias": bias}
        out = self.call("route_sigmoid", operands, dims={"K": top_k}, attributes=constants)
        return out["experts"], out["weights"]

    def route_softmax(
        self, x: Buffer, scale: Buffer, weight: Buffer, expert_scale: Buffer, *, top_k: int, eps: float
    ) -> tuple[Buffer, Buffer]:
        """See `Ops.route_softmax`."""
        operands = {"x": x, "scale": scale, "weight": weight, "expert_scale": expert_scale}
        out = self.call("route_softmax", operands, dims={"K": top_k}, attributes={"eps": eps})
        return out["experts"], out["weights"]

    def moe(
        self, x: Buffer, experts: Buffer, weights: Buffer, gate: Buffer, up: Buffer, down: Buffer, *, activation: str
    ) -> Buffer:
        """See `Ops.moe`."""
        operands = {"x": x, "experts": experts, "weights": weights, "gate": gate, "up": up, "down": down}
        return self.call("moe", operands, attributes={"activation": activation})["y"]

    def soft_cap(self, logits: Buffer, *, cap: float) -> Buffer:
        """See `Ops.soft_cap`."""
        return self.call("soft_cap", {"logits": logits}, attributes={"cap": cap})["y"]

    def soft_embedding(self, probs: Buffer, table: Buffer, *, scale: float) -> Buffer:
        """See `Ops.soft_embedding`."""
        return self.call("soft_embedding", {"probs": probs, "table": table}, attributes={"scale": scale})["z"]


@dataclass(frozen=True, kw_only=True)
class CacheAttention:
    """`dlmrt.ops.spec.Attend` over a cache by position: store the rows, then attend to what each may see."""

    recorder: Recorder
    caches: tuple[Buffer, ...]  # per layer [C, 2, G, H]
    positions: Buffer  # int32 [T]
    visible: Buffer  # int32 [T], the end of the positions that a row sees
    firsts: tuple[Buffer | None, ...]  # per layer int32 [T], where they begin; None: at 0

    def __call__(self, layer_idx: int, q: Buffer, k: Buffer, v: Buffer, *, scale: float | None = None) -> Buffer:
        """Record both nodes and return the attention's output; scale None: 1 / sqrt(H)."""
        cache = self.caches[layer_idx]
        self.recorder.call("kv_store", {"k": k, "v": v, "positions": self.positions, "cache": cache})
        constants: dict[str, Value] = {} if scale is None else {"scale": scale}
        operands = {"q": q, "cache": cache, "visible": self.visible, "first": self.firsts[layer_idx]}
        return self.recorder.call("attention", operands, attributes=constants)["y"]


def describe_rope(rope: RopeConfig) -> str:
    """A rotary embedding for listings, no two alike: kind, base, the share of a head that turns if not all, the rest.

    Example: ``yarn/10000/factor=4.0/original_max_position_embeddings=32``.
    """
    share = "" if rope.partial_rotary_factor == 1 else f"/{_digits(rope.partial_rotary_factor)}"
    shown = ("theta", "kind", "partial_rotary_factor")
    others = (field for field in fields(rope) if field.name not in shown)
    rest = (
        f"/{field.name}={getattr(rope, field.name)}" for field in others if getattr(rope, field.name) != field.default
    )
    return f"{rope.kind}/{_digits(rope.theta)}{share}{''.join(rest)}"


def _digits(value: float) -> str:
    """A number in six digits, or in all that it has."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def describe(shape: tuple[Dim, ...]) -> str:
    """A shape for people: ``[T, 32]``."""
    return f"[{', '.join(dim.symbol if isinstance(dim, Rows) else str(dim) for dim in shape)}]"


def _qkv(outputs: Mapping[str, Buffer]) -> tuple[Buffer, Buffer, Buffer]:
    return outputs["q"], outputs["k"], outputs["v"]


def _bind(word: str, size: Dim, sizes: dict[str, Dim]) -> Dim:
    """What `word` must be for `size`; a letter seen for the first time, alone or in a product, is bound by it."""
    if word.isdigit():
        return int(word)
    first, _, second = word.partition("*")
    if not second:
        return sizes.setdefault(first, size)
    factor = sizes[second]
    assert isinstance(factor, int) and isinstance(size, int), "products are of plain numbers"
    if first not in sizes and size % factor == 0:
        sizes[first] = size // factor
    known = sizes.get(first, 1)
    assert isinstance(known, int)
    return known * factor


def _size(op: str, operand: Operand, word: str, sizes: Mapping[str, Dim]) -> Dim:
    first, _, second = word.partition("*")
    for letter in (first, *second):
        if letter not in sizes:
            raise RecordError(f"{op}: the size {letter} of output {operand.name!r} is not given by the operands")
    if not second:
        return sizes[first]
    left, right = sizes[first], sizes[second]
    assert isinstance(left, int) and isinstance(right, int), "products are of plain numbers"
    return left * right


def _prune(body: Iterable[Node], read_later: set[Buffer]) -> tuple[Node, ...]:
    """Drop kernels that write nothing but scratch which is not in `read_later`; grows `read_later` by what is read."""
    kept: list[Node] = []
    for node in reversed(list(body)):
        if isinstance(node, Kernel):
            is_live = any(buffer.kind != "scratch" or buffer in read_later for buffer in node.outputs.values())
            if is_live:
                read_later.update(node.inputs.values())
                kept.append(node)
            continue
        inner = _prune(node.body, read_later)
        if inner or isinstance(node, While):
            kept.append(type(node)(flag=node.flag, body=inner))
    return tuple(reversed(kept))


def _check_written(name: str, body: tuple[Node, ...], written: set[Buffer]) -> None:
    """Refuse scratch reads that some path reaches before a write; what a While or If writes stays inside."""
    for node in body:
        if not isinstance(node, Kernel):
            _check_written(name, node.body, set(written))
            continue
        for role, buffer in node.inputs.items():
            if buffer.kind == "scratch" and buffer not in written:
                raise RecordError(
                    f"{name}: {node.op} reads {role} ({buffer.name}) before it is written; make it a state"
                )
        written.update(node.outputs.values())
