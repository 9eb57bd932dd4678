"""Lowering of a mixture of experts: rows that chose an expert are copied side by side and multiplied like any others.

Routing stays inside the program: runs of rows, the places of their copies and the number of experts that were hit are
buffers that later nodes read. Experts come in ascending order and a row adds their results in that order, so a row does
not depend on the others; an expert that no row chose is not read.

Source: ours; the operations are `dlmrt.ops.spec.Ops.route_sigmoid`, `route_softmax` and `moe`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlmrt.cpu import _native
from dlmrt.cpu.parts import DTYPES, OPERANDS, Cells, Parts, gate_op
from dlmrt.program.nodes import Buffer, Kernel, maximum


class Experts(Parts):
    """The nodes of routers and experts."""

    def _lower_route_sigmoid(self, node: Kernel) -> None:
        logits = self._router(self._cells_of(node.inputs["x"], "float32"), node)
        self._emit(
            "route_sigmoid", logits.shape[0], {"logits": logits, "bias": node.inputs["bias"]}, self._choices(node),
            num_experts=maximum(logits.shape[1]), top_k=maximum(node.outputs["experts"].shape[1]), **node.attributes,
        )  # fmt: skip

    def _lower_route_softmax(self, node: Kernel) -> None:
        i, x = node.inputs, self._forms.rows[node.inputs["x"]]
        rows, width = x.shape[0], maximum(x.shape[1])
        cells = self._cells_like(x, "float32")
        self._emit(
            "rms_norm", rows, {"x": x, "weight": i["scale"]}, cells.operands(),
            eps=node.attributes["eps"], width=width, operand=DTYPES["float32"],
        )  # fmt: skip
        logits = self._router(cells, node)
        self._emit(
            "route_softmax", rows, {"logits": logits, "expert_scale": i["expert_scale"]}, self._choices(node),
            num_experts=maximum(logits.shape[1]), top_k=maximum(node.outputs["experts"].shape[1]), factor=width**-0.5,
        )  # fmt: skip

    def _choices(self, node: Kernel) -> dict[str, Buffer]:
        return {role: self._plain_of(value) for role, value in node.outputs.items()}

    def _router(self, cells: Cells, node: Kernel) -> Buffer:
        rows = node.outputs["experts"].shape[0]
        weight = self._pack(node.inputs["weight"])
        logits = self._scratch("float32", (rows, weight.shape[0]))
        self._linear(cells, weight, rows, logits, 0)
        return logits

    def _lower_moe(self, node: Kernel) -> None:
        i, y = node.inputs, node.outputs["y"]
        rows, width, top_k = y.shape[0], maximum(y.shape[1]), maximum(i["experts"].shape[1])
        num_experts, inner = (maximum(size) for size in i["gate"].shape[:2])
        gate_up, down = self._pack(i["gate"], i["up"]), self._pack(i["down"])
        cells = self._cells_of(i["x"], OPERANDS[gate_up.dtype])
        runs_bytes = _native.expert_runs_bytes(num_experts)
        runs = self._scratch("int32", (num_experts, 3), layout="runs", num_bytes=runs_bytes)
        place = self._scratch("int32", (rows, top_k))
        self._emit(
            "group_choices", rows, {"experts": self._plain_of(i["experts"])}, {"runs": runs, "place": place},
            num_experts=num_experts, top_k=top_k,
        )  # fmt: skip
        num_copies = _native.expert_rows(maximum(rows) * top_k, num_experts)
        copies = self._cells_for(num_copies, width, cells.dtype)
        self._emit(
            "gather_rows", rows, cells.operands() | {"place": place}, copies.operands("run_"),
            width=width, top_k=top_k, operand=DTYPES[cells.dtype],
        )  # fmt: skip
        both = self._expert_linear(gate_up, copies, runs)
        product = self._cells_for(num_copies, inner, OPERANDS[down.dtype])
        self._emit(
            "expert_gate", None, {"gate_up": both, "runs": runs}, {"gate_up": both} | product.operands("run_"),
            width=inner, operand=DTYPES[product.dtype], is_gelu=gate_op(node) == "gelu_mul",
        )  # fmt: skip
        inputs: Mapping[str, Buffer] = {
            "x": self._expert_linear(down, product, runs), "place": place, "weights": self._plain_of(i["weights"]),
        }  # fmt: skip
        self._emit("combine", rows, inputs, {"y": self._new_rows(y)}, width=width, top_k=top_k)

    def _expert_linear(self, weight: Buffer, cells: Cells, runs: Buffer) -> Buffer:
        out = self._scratch("float32", (cells.cells.shape[0], weight.shape[1]))
        inputs = {"weight": weight, "runs": runs} | cells.operands("run_")
        self._emit("expert_linear", None, inputs, {"y": out}, operand=DTYPES[cells.dtype])
        return out
