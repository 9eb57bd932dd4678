"""Kernel nodes -> launches: which Triton kernel, over which grid, with which constants.

A launch is bound once: its grid covers the largest number of rows, its arguments are tensors whose addresses never
change. Running it again is one call without any decision, which is what a graph captures. A kernel that computes a flag
of the loop can set the condition of a graph to it in the same launch.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlmrt.cuda import tiles
from dlmrt.cuda.kernels import attention, comm, head, loop, matmul, moe, ring, rows
from dlmrt.cuda.kernels.condition import LIBRARIES
from dlmrt.cuda.weights import PACKED, Packed
from dlmrt.program.nodes import Buffer, Kernel, Value, maximum
from dlmrt.program.record import URGENT
from dlmrt.program.shard import share
from dlmrt.program.signatures import LOOP_OPS, signature

Place = Tensor | Packed
_TERM_TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16}

FLAGS = {  # operations that compute the flag of a While or If, and its name
    "start_request": "more_prefill", "finish_chunk": "more_prefill", "start_block": "more_steps",
    "check_first": "is_first_open", "all_finite": "is_finite", "propose_edits": "needs_other",
    "settle": "is_continued", "finish_step": "more_steps", "close_block": "needs_commit", "bound_launch": "goes_on",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel with its grid and arguments."""

    op: str
    kernel: Any  # triton.JITFunction, or the interpreter's stand-in for it
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages
    flag: Tensor | None = None  # int32 of a While or If that the kernel computes

    def run(self, handle: int | None = None) -> None:
        """Launch on the current stream; with `handle`, also set this condition of a graph to `flag`."""
        self.kernel[self.grid](**self.arguments, **self.options, **self.condition(handle))

    def prepare(self, *, sets_condition: bool = False) -> None:
        """Compile and load the kernel, so that a capture finds it ready."""
        if isinstance(self.kernel, triton.runtime.JITFunction):
            condition = self.condition(0 if sets_condition else None)
            self.kernel.warmup(**self.arguments, **self.options, **condition, grid=self.grid)._init_handles()

    def condition(self, handle: int | None) -> dict[str, Any]:
        """Arguments and options with which a kernel that computes a flag sets the condition `handle`."""
        return {} if handle is None else {"handle": handle, "SETS": True, "extern_libs": LIBRARIES}


class Bound:
    """A kernel node and where its buffers lie.

    Args:
        places: tensor or packed weight of each buffer.
        capability: of the device, 90 for sm_90; 0 for the interpreter.
    """

    def __init__(self, node: Kernel, places: Mapping[Buffer, Place], capability: int) -> None:
        self.node, self.capability = node, capability
        self.buffers: dict[str, Buffer] = dict(node.inputs) | dict(node.outputs)
        self._places = places

    def place(self, role: str) -> Any:
        """Tensor or packed weight of an operand."""
        return self._places[self.buffers[role]]

    def pointer(self, role: str, fallback: str) -> Any:
        """Tensor of an operand that may be left out; then any other, which the kernel does not touch."""
        return self._places[self.buffers[role if role in self.buffers else fallback]]

    def has(self, role: str) -> bool:
        """Whether the node has this operand."""
        return role in self.buffers

    def size(self, role: str, axis: int) -> int:
        """Largest size of an operand along `axis`."""
        return maximum(self.buffers[role].shape[axis])

    def number(self, name: str, default: float = 0.0) -> Any:
        """A numeric attribute."""
        return self.node.attributes.get(name, default)

    def attribute(self, name: str) -> Value:
        """An attribute that every node of this operation has."""
        return self.node.attributes[name]

    def first_of_part(self) -> int:
        """First id or expert of this rank's; 0 without ranks."""
        return int(self.number("first", 0))

    def is_nvfp4(self, role: str) -> bool:
        """Whether an operand is there in NVFP4, which is the only use of bytes among operands."""
        return self.has(role) and self.buffers[role].dtype == "uint8"

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, num_stages: int = 2, **arguments: Any
    ) -> Launch:
        """This node as a launch of `kernel`."""
        options = {"num_warps": num_warps, "num_stages": num_stages}
        flag = arguments[FLAGS[self.node.op]] if self.node.op in FLAGS else None
        return Launch(op=self.node.op, kernel=kernel, grid=grid, arguments=arguments, options=options, flag=flag)


def bind(node: Kernel, places: Mapping[Buffer, Place], *, capability: int) -> Launch:
    """The launch of `node`."""
    bound = Bound(node, places, capability)
    return _BINDERS.get(node.op, _loop_operation)(bound)


def compute_type(values: Tensor) -> Any:
    """Type in which products with such operands are taken."""
    return tl.float32 if values.dtype == torch.float32 else tl.bfloat16


def _weight(b: Bound) -> dict[str, Any]:
    """Arguments for a weight in any format."""
    weight: Packed = b.place("weight")
    kept = b.buffers["weight"].dtype
    return {
        "weight": weight.values, "scales": weight.values if weight.scales is None else weight.scales,
        "shared": weight.values if weight.shared is None else weight.shared, "BLOCK": weight.scale_block,
        "FORMAT": kept if kept in PACKED else "float", "CDT": compute_type(b.place("x")),
        "num_warps": 8 if kept == "nvfp4" else 4, "num_stages": 3,
    }  # fmt: skip


def _matmul(b: Bound) -> Launch:
    n, k = b.size("weight", 0), b.size("weight", 1)
    splits, rows_at_most = b.size("part", 0), b.size("part", 1)
    step, row_tile = tiles.tile_k(b.buffers["weight"].dtype), tiles.row_tile(rows_at_most)
    kernel, columns, weight = matmul.matmul, tiles.TILE_N, _weight(b)
    if b.is_nvfp4("x"):
        kernel, columns = matmul.matmul_nvfp4_both, tiles.SCALED_TILE_N
        weight = {name: weight[name] for name in ("weight", "scales", "shared")}
    return b.launch(
        kernel, (-(-n // columns), -(-rows_at_most // row_tile), splits), x=b.place("x"), part=b.place("part"),
        rows=b.place("rows"), M=rows_at_most, N=n, K=k, PER=tiles.per_split(k, splits, step), BM=row_tile, BN=columns,
        BK=step, **weight,
    )  # fmt: skip


def _embed(b: Bound) -> Launch:
    width, table = b.size("x", 1), b.place("table").values
    scale = float(torch.tensor(b.number("scale"), dtype=table.dtype))
    return b.launch(
        rows.embed, (b.size("x", 0),), table=table, ids=b.place("ids"), x=b.place("x"), rows=b.place("rows"),
        scale=scale, first=b.first_of_part(), V=b.size("table", 0), D=width, DP=tiles.power_of_two(width),
        num_warps=_warps(width),
    )  # fmt: skip


def _sum_rows(b: Bound) -> Launch:
    width = b.size("x" if b.has("x") else "part", -1)
    block = min(1024, tiles.power_of_two(width))
    factor = b.place("factor").values if b.has("factor") else b.place("y")
    return b.launch(
        rows.sum_rows, (b.size("y", 0), -(-width // block)), x=b.pointer("x", "part"), part=b.pointer("part", "y"),
        factor=factor, y=b.place("y"), rows=b.place("rows"), M=b.size("y", 0), scale=float(b.number("scale", 1.0)),
        cap=float(b.number("cap")), D=width, BD=block, S=_splits(b), HAS_X=b.has("x"), HAS_FACTOR=b.has("factor"),
        HAS_CAP=b.number("cap") > 0, NVFP4=b.is_nvfp4("y"),
    )  # fmt: skip


def _norm(b: Bound) -> Launch:
    role = "x" if b.has("x") else "part"
    rows_at_most, width = b.size(role, -2), b.size(role, -1)
    weight = b.place("weight").values if b.has("weight") else b.place(role)
    return b.launch(
        rows.norm, (rows_at_most,), x=b.pointer("x", role), part=b.pointer("part", role), weight=weight,
        total=b.pointer("total", role), y=b.pointer("y", role), operand=b.pointer("operand", role),
        rows=b.place("rows"), M=rows_at_most, eps=b.number("eps"), D=width, DP=tiles.power_of_two(width),
        S=_splits(b), HAS_X=b.has("x"), HAS_WEIGHT=b.has("weight"), HAS_TOTAL=b.has("total"), HAS_Y=b.has("y"),
        HAS_OPERAND=b.has("operand"), NVFP4=b.is_nvfp4("operand"), num_warps=_warps(width),
    )  # fmt: skip


def _gate(b: Bound) -> Launch:
    rows_at_most, width = b.size("operand", 0), b.size("part", 2) // 2
    block = min(1024, tiles.power_of_two(width))
    return b.launch(
        rows.gate, (rows_at_most, -(-width // block)), part=b.place("part"), operand=b.place("operand"),
        rows=b.place("rows"), M=rows_at_most, F=width, BF=block, S=_splits(b),
        IS_GELU=b.attribute("activation") == "gelu_tanh", ENTRIES=b.number("entries", 1),
        NVFP4=b.is_nvfp4("operand"),
    )  # fmt: skip


def _qk_norm_rope_store(b: Bound) -> Launch:
    rows_at_most, num_heads, head_dim = (b.size("q", axis) for axis in range(3))
    num_kv_heads = b.size("cache", 2)
    return b.launch(
        rows.qk_norm_rope_store, (rows_at_most, num_heads + 2 * num_kv_heads), part=b.place("part"),
        bias=b.place("bias").values if b.has("bias") else b.place("part"),
        q_norm=b.place("q_norm").values if b.has("q_norm") else b.place("part"),
        k_norm=b.place("k_norm").values if b.has("k_norm") else b.place("part"), cos=b.place("cos"), sin=b.place("sin"),
        positions=b.place("positions"), q=b.place("q"), cache=b.place("cache"), rows=b.place("rows"), M=rows_at_most,
        eps=b.number("eps"), N=num_heads, G=num_kv_heads, H=head_dim, HP=tiles.power_of_two(head_dim),
        R=2 * b.size("cos", 1), S=_splits(b), HAS_BIAS=b.has("bias"), HAS_NORM=b.has("q_norm"),
        IS_VALUE_NORMED=b.attribute("is_value_normed"),
        IS_VALUE_KEY=b.attribute("is_value_key"), num_warps=1 if head_dim <= 128 else 2,
    )  # fmt: skip


def _attention(b: Bound) -> Launch:
    rows_at_most, num_heads, head_dim = (b.size("q", axis) for axis in range(3))
    num_kv_heads, chunks = b.size("cache", 2), b.size("acc", 0)
    width = max(16, tiles.power_of_two(head_dim))
    most, positions = tiles.attention_tile(width, b.capability)
    pairs = rows_at_most * (num_heads // num_kv_heads)
    row_tile = min(most, max(16, tiles.power_of_two(pairs)))
    return b.launch(
        attention.attention, (-(-pairs // row_tile), num_kv_heads, chunks), q=b.place("q"), cache=b.place("cache"),
        visible=b.place("visible"), first=b.pointer("first", "visible"), acc_out=b.place("acc"),
        lse_out=b.place("lse"), rows=b.place("rows"), M=rows_at_most, scale=b.number("scale"), N=num_heads,
        G=num_kv_heads, H=head_dim, HP=width, CHUNK=b.attribute("chunk"), BR=row_tile, BC=positions,
        HAS_FIRST=b.has("first"), CDT=compute_type(b.place("q")), num_warps=4 if width <= 64 else 8,
    )  # fmt: skip


def _attention_merge(b: Bound) -> Launch:
    chunks, rows_at_most, num_heads, head_dim = (b.size("acc", axis) for axis in range(4))
    return b.launch(
        attention.attention_merge, (rows_at_most, num_heads), acc_in=b.place("acc"), lse_in=b.place("lse"),
        y=b.place("y"), rows=b.place("rows"), M=rows_at_most, N=num_heads, H=head_dim,
        HP=tiles.power_of_two(head_dim), J=chunks, JP=tiles.power_of_two(chunks), NVFP4=b.is_nvfp4("y"), num_warps=1,
    )  # fmt: skip


def _window_start(b: Bound) -> Launch:
    return b.launch(
        rows.window_start, (1,), positions=b.place("positions"), first=b.place("first"), rows=b.place("rows"),
        WINDOW=b.attribute("window"), IS_SHARED=b.attribute("is_shared"),
        MP=tiles.power_of_two(b.size("positions", 0)),
    )  # fmt: skip


def _admit_experts(b: Bound) -> Launch:
    num_experts = b.size("part", 2)
    return b.launch(
        moe.admit_experts, (b.size("admitted", 0),), part=b.place("part"), bias=b.place("bias").values,
        admitted=b.place("admitted"), rows=b.place("rows"), M=b.size("part", 1), E=num_experts,
        EP=tiles.power_of_two(num_experts), S=_splits(b), BLOCK=b.attribute("block"), CAPACITY=b.attribute("capacity"),
    )  # fmt: skip


def _route_sigmoid(b: Bound) -> Launch:
    num_experts, groups = b.size("part", 2), int(b.number("groups"))
    return b.launch(
        moe.route_sigmoid, (b.size("experts", 0),), part=b.place("part"), bias=b.place("bias").values,
        admitted=b.pointer("admitted", "experts"), experts=b.place("experts"), weights=b.place("weights"),
        rows=b.place("rows"), scaling=float(b.number("scaling")), M=b.size("part", 1), E=num_experts,
        EP=tiles.power_of_two(num_experts), S=_splits(b), K=b.size("experts", 1), GROUPS=groups,
        KEPT=b.attribute("kept"), GP=tiles.power_of_two(groups), BLOCK=b.attribute("block"), num_warps=1,
    )  # fmt: skip


def _route_softmax(b: Bound) -> Launch:
    num_experts = b.size("part", 2)
    return b.launch(
        moe.route_softmax, (b.size("experts", 0),), part=b.place("part"),
        expert_scale=b.place("expert_scale").values, experts=b.place("experts"), weights=b.place("weights"),
        rows=b.place("rows"), factor=float(b.number("factor")), M=b.size("part", 1), E=num_experts,
        EP=tiles.power_of_two(num_experts), S=_splits(b), K=b.size("experts", 1), num_warps=1,
    )  # fmt: skip


def _list_rows(b: Bound) -> Launch:
    return b.launch(
        moe.list_rows, (b.size("counts", 0),), experts=b.place("experts"), lists=b.place("lists"),
        counts=b.place("counts"), rows=b.place("rows"), first=b.first_of_part(), M=b.size("experts", 0),
        K=b.size("experts", 1), BE=256,
    )  # fmt: skip


def _matmul_experts(b: Bound) -> Launch:
    num_experts, n, k = (b.size("weight", axis) for axis in range(3))
    rows_at_most, step = b.size("lists", 1), tiles.tile_k(b.buffers["weight"].dtype)
    row_tile = tiles.row_tile(rows_at_most, most=16)
    return b.launch(
        moe.matmul_experts, (-(-n // tiles.TILE_N), -(-rows_at_most // row_tile), num_experts), x=b.place("x"),
        out=b.place("out"), lists=b.place("lists"), counts=b.place("counts"), M=rows_at_most, N=n, KD=k,
        K=b.attribute("top_k"), BM=row_tile, BN=tiles.TILE_N, BK=step, IS_ROW=b.attribute("is_row"), **_weight(b),
    )  # fmt: skip


def _sum_experts(b: Bound) -> Launch:
    width = b.size("y", 1)
    block = min(1024, tiles.power_of_two(width))
    return b.launch(
        moe.sum_experts, (b.size("y", 0), -(-width // block)), part=b.place("part"), weights=b.place("weights"),
        experts=b.place("experts"), y=b.place("y"), rows=b.place("rows"), first=b.first_of_part(),
        E=b.attribute("num_experts"), D=width, BD=block, K=b.size("weights", 1),
    )  # fmt: skip


def _residual_add(b: Bound) -> Launch:
    rows_at_most, width = b.size("x", 0), b.size("x", 1)
    block = min(1024, tiles.power_of_two(width))
    return b.launch(
        rows.residual_add, (rows_at_most, -(-width // block)), x=b.place("x"), part=b.place("part"),
        where=b.pointer("where", "x"), rows=b.place("rows"), M=rows_at_most, alpha=b.number("alpha"), D=width,
        BD=block, S=_splits(b), HAS_WHERE=b.has("where"),
    )  # fmt: skip


def _hidden_store(b: Bound) -> Launch:
    width = b.size("hidden", 1)
    return b.launch(
        rows.hidden_store, (b.size("hidden", 0),), hidden=b.place("hidden"), positions=b.place("positions"),
        cache=b.place("cache"), rows=b.place("rows"), D=width, DP=tiles.power_of_two(width), num_warps=_warps(width),
    )  # fmt: skip


def _shift(b: Bound) -> Launch:
    width = b.size("y", 1)
    return b.launch(
        rows.shift, (b.size("y", 0),), hidden=b.pointer("hidden", "cache"), cache=b.place("cache"),
        context=b.place("context"), y=b.place("y"), rows=b.place("rows"), D=width, DP=tiles.power_of_two(width),
        num_warps=_warps(width),
    )  # fmt: skip


def _head_stats(b: Bound) -> Launch:
    weight: Packed = b.place("weight")
    vocab, width, rows_at_most = b.size("weight", 0), b.size("weight", 1), b.size("x", 0)
    row_tile = tiles.row_tile(rows_at_most, most=32)
    is_sampled, cap = b.has("tile_score"), float(b.number("cap"))
    return b.launch(
        head.head_stats, (b.size("tile_max", 0), -(-rows_at_most // row_tile)), x=b.place("x"), weight=weight.values,
        banned=b.place("banned"), temperature=b.place("temperature"), seed=b.pointer("seed", "banned"),
        step=b.pointer("step", "banned"), block_idx=b.pointer("block_idx", "banned"), tile_max=b.place("tile_max"),
        tile_sum=b.place("tile_sum"), tile_weighted=b.place("tile_weighted"), tile_argmax=b.place("tile_argmax"),
        tile_score=b.pointer("tile_score", "tile_max"), tile_sample=b.pointer("tile_sample", "tile_argmax"),
        tile_sample_logit=b.pointer("tile_sample_logit", "tile_max"), logits=b.pointer("logits", "tile_max"),
        rows=b.place("rows"), cap=cap, first=b.first_of_part(), M=rows_at_most, V=vocab, K=width, BM=row_tile,
        BN=tiles.TILE_V,
        BK=tiles.TILE_K, HAS_CAP=cap > 0, IS_SAMPLED=is_sampled, HAS_LOGITS=b.has("logits"),
        CDT=compute_type(b.place("x")), num_warps=8, num_stages=3,
    )  # fmt: skip


def _head_merge(b: Bound) -> Launch:
    vocab_tiles, rows_at_most = b.size("tile_max", 0), b.size("argmax", 0)
    return b.launch(
        head.head_merge, (rows_at_most,), **_tile_statistics(b), **_prediction(b), rows=b.place("rows"),
        M=rows_at_most, T=vocab_tiles, TP=tiles.power_of_two(vocab_tiles), IS_SAMPLED=b.has("tile_score"),
    )  # fmt: skip


def _tile_statistics(b: Bound) -> dict[str, Any]:
    names = ("tile_max", "tile_sum", "tile_weighted", "tile_argmax")
    draws = {"tile_score": "tile_max", "tile_sample": "tile_argmax", "tile_sample_logit": "tile_max"}
    return {name: b.place(name) for name in names} | {name: b.pointer(name, other) for name, other in draws.items()}


def _prediction(b: Bound) -> dict[str, Any]:
    names = ("argmax", "argmax_confidence", "token", "confidence", "entropy", "log_sum_exp", "max_logit",
             "is_finite_row")  # fmt: skip
    return {name: b.place(name) for name in names} | {"is_drawn": b.pointer("is_drawn", "is_finite_row")}


def _put_statistics(b: Bound) -> Launch:
    vocab_tiles, rows_at_most = b.size("tile_max", 0), b.size("tile_max", 1)
    return b.launch(
        head.put_statistics, (rows_at_most,), ranks=b.place("ranks"), **_tile_statistics(b), rows=b.place("rows"),
        M=rows_at_most, T=vocab_tiles, TP=tiles.power_of_two(vocab_tiles), P=b.attribute("num_ranks"),
        IS_SAMPLED=b.has("tile_score"),
    )  # fmt: skip


def _merge_ranks(b: Bound) -> Launch:
    rows_at_most, size = b.size("argmax", 0), int(b.number("num_ranks"))
    return b.launch(
        head.merge_ranks, (rows_at_most,), ranks=b.place("ranks"), **_prediction(b), rows=b.place("rows"),
        M=rows_at_most, P=size, PP=tiles.power_of_two(size), IS_SAMPLED=b.has("is_drawn"), num_warps=1,
    )  # fmt: skip


def _all_finite(b: Bound) -> Launch:
    return b.launch(
        head.all_finite, (1,), is_finite_row=b.place("is_finite_row"), is_finite=b.place("is_finite"),
        rows=b.place("rows"), MP=tiles.power_of_two(b.size("is_finite_row", 0)),
    )  # fmt: skip


def _filtered_draw(b: Bound) -> Launch:
    vocab = b.size("logits", 1)
    names = [name for name in b.buffers if name != "rows"]
    # Twice as many ids at a time would not fit the registers of sm_100.
    return b.launch(
        head.filtered_draw, (b.size("logits", 0),), **{name: b.place(name) for name in names}, rows=b.place("rows"),
        V=vocab, BV=min(2048, max(16, tiles.power_of_two(vocab))), num_warps=8,
    )  # fmt: skip


def _soft_embedding(b: Bound) -> Launch:
    is_logits = b.has("logits")
    source = "logits" if is_logits else "probs"
    vocab, (splits, rows_at_most, width) = b.size(source, 1), (b.size("part", axis) for axis in range(3))
    row_tile, table = tiles.row_tile(rows_at_most), b.place("table").values
    return b.launch(
        head.soft_embedding, (-(-width // tiles.TILE_N), -(-rows_at_most // row_tile), splits),
        source=b.place(source), log_sum_exp=b.pointer("log_sum_exp", source), table=table, part=b.place("part"),
        rows=b.place("rows"), M=rows_at_most, V=vocab, D=width,
        PER=tiles.per_split(vocab, splits, tiles.TILE_SOFT), BM=row_tile, BD=tiles.TILE_N, BV=tiles.TILE_SOFT,
        IS_LOGITS=is_logits, CDT=compute_type(table),
    )  # fmt: skip


def _pack_record(b: Bound) -> Launch:
    fields = [name for name in b.node.inputs if name != URGENT]
    control = b.place("ring")
    table = torch.zeros(max(len(fields), 1), 3, dtype=torch.int64)
    begin = 4  # behind the record's kind
    for at, name in enumerate(fields):
        num_bytes = b.buffers[name].num_bytes
        table[at] = torch.tensor([b.place(name).data_ptr(), begin, num_bytes])
        begin += num_bytes
    return b.launch(
        ring.pack_record, (len(fields) + 1,), control=control, fields=table.to(control.device),
        kind=b.number("kind"), BYTES=1024,
    )  # fmt: skip


def _publish(b: Bound) -> Launch:
    control = b.place("ring")
    return b.launch(
        ring.publish, (1,), control=control, ranks=b.pointer("ranks", "ring"), HAS_RANKS=b.has("ranks"),
        IS_DEVICE=control.device.type != "cpu", num_warps=1,
    )  # fmt: skip


def _meet(b: Bound) -> Launch:
    ranks = b.place("ranks")
    return b.launch(
        comm.meet, (1,), ranks=ranks, flag=b.pointer("flag", "ranks"), agreed=b.pointer("agreed", "ranks"),
        P=b.attribute("num_ranks"), HAS_FLAG=b.has("flag"), IS_DEVICE=ranks.device.type != "cpu", num_warps=1,
    )  # fmt: skip


def _put_terms(b: Bound) -> Launch:
    source = b.buffers["x" if b.has("x") else "part"]
    rows_at_most, width = (maximum(dim) for dim in source.shape[-2:])
    block = min(1024, tiles.power_of_two(width))
    return b.launch(
        comm.put_terms, (rows_at_most, -(-width // block)), ranks=b.place("ranks"), x=b.pointer("x", "part"),
        part=b.pointer("part", "x"), rows=b.place("rows"), M=rows_at_most, D=width, BD=block, S=_splits(b),
        P=b.attribute("num_ranks"), HAS_X=b.has("x"), TDT=_TERM_TYPES[str(b.attribute("terms"))],
    )  # fmt: skip


def _sum_terms(b: Bound) -> Launch:
    made = next(role for role in ("total", "y", "operand") if b.has(role))
    rows_at_most, width = b.size(made, 0), int(b.number("width"))
    weight = b.place("weight").values if b.has("weight") else b.place(made)
    return b.launch(
        comm.sum_terms, (rows_at_most,), ranks=b.place("ranks"), x=b.pointer("x", made), weight=weight,
        total=b.pointer("total", made), y=b.pointer("y", made), operand=b.pointer("operand", made),
        rows=b.place("rows"), M=rows_at_most, eps=b.number("eps"), D=width, DP=tiles.power_of_two(width),
        P=b.attribute("num_ranks"), TDT=_TERM_TYPES[str(b.attribute("terms"))], HAS_X=b.has("x"),
        HAS_WEIGHT=b.has("weight"), HAS_TOTAL=b.has("total"), HAS_Y=b.has("y"), HAS_OPERAND=b.has("operand"),
        NVFP4=b.is_nvfp4("operand"), num_warps=_warps(width),
    )  # fmt: skip


def _take_logits(b: Bound) -> Launch:
    vocab, size, ranks = b.size("logits", 1), int(b.number("num_ranks")), b.place("ranks")
    firsts = torch.tensor([share(vocab, rank, size).start for rank in range(size)] + [vocab])
    block = min(1024, tiles.power_of_two(vocab))
    return b.launch(
        comm.take_logits, (b.size("logits", 0), -(-vocab // block)), ranks=ranks, firsts=firsts.to(ranks.device),
        logits=b.place("logits"), rows=b.place("rows"), V=vocab, BV=block, P=size,
    )  # fmt: skip


def _loop_operation(b: Bound) -> Launch:
    """An operation of the loop: one program, operands by name."""
    arguments: dict[str, Any] = {name: b.place(name) for name in b.buffers}
    kernel, attributes = getattr(loop, b.node.op), b.node.attributes
    if b.node.op in LOOP_OPS:
        # Operands that the node leaves out are pointers that the kernel does not touch.
        for operand in signature(b.node.op)[0]:
            arguments.setdefault(operand.name, next(iter(arguments.values())))
    constants: dict[str, Any] = {}
    if "length" in attributes:
        length = int(b.number("length"))
        constants |= {"L": length, "LP": tiles.power_of_two(length)}
    if "chunk" in attributes:
        chunk = int(b.number("chunk"))
        constants |= {"CHUNK": chunk, "CP": tiles.power_of_two(chunk)}
    for name, attribute in (("ALIGN", "align"), ("BLOCK", "block"), ("MASK", "mask_token_id"), ("VALUE", "value"),
                            ("NUM_STEPS", "num_steps"), ("VOCAB", "vocab_size"), ("DELETE", "delete_token_id"),
                            ("SPLIT", "split_token_id"), ("IS_STICKY", "is_sticky"),
                            ("HAS_RANGE", "is_schedule")):  # fmt: skip
        if attribute in attributes:
            constants[name] = attributes[attribute]
    if "in_block" in attributes:
        constants["IS_CAUSAL"] = attributes["in_block"] == "causal"
    if b.node.op == "commit_threshold":
        constants["IS_EDITED"] = b.has("edit_threshold")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    arguments = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    return b.launch(kernel, (1,), **arguments, **constants)


def _splits(b: Bound) -> int:
    """Number of partial sums; rows that stand in for them are one."""
    if not b.has("part"):
        return 0
    shape = b.buffers["part"].shape
    return maximum(shape[0]) if len(shape) == 3 else 1


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


_BINDERS: dict[str, Callable[[Bound], Launch]] = {
    "matmul": _matmul, "embed": _embed, "sum_rows": _sum_rows,
    "norm": _norm, "gate": _gate, "qk_norm_rope_store": _qk_norm_rope_store, "attention": _attention,
    "attention_merge": _attention_merge, "residual_add": _residual_add, "hidden_store": _hidden_store,
    "shift": _shift, "head_stats": _head_stats, "head_merge": _head_merge, "all_finite": _all_finite,
    "filtered_draw": _filtered_draw, "soft_embedding": _soft_embedding, "pack_record": _pack_record,
    "publish": _publish, "window_start": _window_start, "admit_experts": _admit_experts,
    "route_sigmoid": _route_sigmoid, "route_softmax": _route_softmax, "list_rows": _list_rows,
    "matmul_experts": _matmul_experts, "sum_experts": _sum_experts, "meet": _meet, "put_terms": _put_terms,
    "sum_terms": _sum_terms, "put_statistics": _put_statistics, "merge_ranks": _merge_ranks,
    "take_logits": _take_logits,
}  # fmt: skip
