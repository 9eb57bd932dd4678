"""Programs of one rank's part of a model: the recorder that adds sums over ranks, and what it must know of the part.

Model functions know nothing of it. A product with a weight that is cut along its input, the experts of one rank and a
lookup among some ids give one rank's term of a sum. Two terms that are added are one; whatever else reads a term reads
the sum over ranks (`sum_ranks`), which is recorded right before its first reader. All else is computed by every
rank for itself, from the same sums, so activations, canvases and flags are the same on every rank to the bit.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlmrt.program.nodes import Buffer, Dim, Value
from dlmrt.program.record import Recorder

_PRODUCTS = {"linear": "weight", "gated_mlp": "down"}  # operations and the weight that may be cut along its input


def share(count: int, rank: int, size: int) -> range:
    """The run of `count` things that `rank` of `size` holds; runs differ by one in length."""
    return range(count * rank // size, count * (rank + 1) // size)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of a model. Example: rank 1 of 2 has ids 50 to 100 of 101: ``first_id=50``."""

    rank: int
    size: int
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor of the part
    summed: frozenset[str]  # weights that are cut along their input
    vocab: range
    vocab_size: int  # of the whole model
    experts: range
    terms: str = "float32"  # type in which terms of sums inside a layer travel


class ShardRecorder(Recorder):
    """Writes one program for one rank; see `Recorder`."""

    def __init__(self, name: str, shard: Shard, *, activations: str = "float32", cache: str = "float32") -> None:
        super().__init__(name, activations=activations, cache=cache)
        self.shard = shard
        self._terms: dict[Buffer, str] = {}  # one rank's terms, and the type in which they travel
        self._sums: dict[Buffer, Buffer] = {}  # terms -> their sum over ranks

    def call(
        self, op: str, inputs: Mapping[str, Buffer | None], *, attributes: Mapping[str, Value] | None = None,
        outputs: Mapping[str, Buffer] | None = None, dims: Mapping[str, Dim] | None = None,
    ) -> dict[str, Buffer]:  # fmt: skip
        """See `Recorder.call`; terms among the inputs become sums, but where two are added that nobody has summed."""
        is_add = op == "add" and all(b in self._terms and b not in self._sums for b in inputs.values())
        if not is_add:
            inputs = {name: self._whole(buffer) for name, buffer in inputs.items()}
        constants = dict(attributes or {})
        if op in ("predict", "best_other"):
            constants |= {
                "num_ranks": self.shard.size, "first": self.shard.vocab.start, "vocab_size": self.shard.vocab_size
            }  # fmt: skip
        written = super().call(op, inputs, attributes=constants, outputs=outputs, dims=dims)
        weight = inputs.get(_PRODUCTS.get(op, ""))
        if is_add or op == "moe" or (weight is not None and weight.name in self.shard.summed):
            self._terms[written["y"]] = self.shard.terms
        return written

    def embed(self, table: Buffer, ids: Buffer, *, scale: float = 1.0) -> Buffer:
        """See `Ops.embed`. One rank has the row, the others add 0, which is exact in float32."""
        constants: dict[str, Value] = {"scale": scale, "first": self.shard.vocab.start}
        x = self.call("embed", {"table": table, "ids": ids}, attributes=constants)["x"]
        self._terms[x] = "float32"
        return x

    def residual_mix(
        self, x: Buffer, z: Buffer, where: Buffer | None, norm: Buffer, gate: Buffer, up: Buffer, down: Buffer,
        *, alpha: float, eps: float, activation: str = "silu", is_product_fp32: bool = False,
    ) -> Buffer:  # fmt: skip
        """See `Ops.residual_mix`; the adapter in its parts, whose product is summed before it is scaled."""
        assert z.present is not None, "a residual may be absent"
        x = self._summed(x)  # before the body, for readers behind it
        with self.if_(z.present):
            normed = self.rms_norm(z, norm, eps=eps)
            delta = self.gated_mlp(normed, gate, up, down, activation=activation)
            return self.call("mix", {"x": x, "delta": delta, "where": where}, attributes={"alpha": alpha})["x"]

    def moe(
        self, x: Buffer, experts: Buffer, weights: Buffer, gate: Buffer, up: Buffer, down: Buffer, *, activation: str
    ) -> Buffer:
        """See `Ops.moe`, of this rank's experts."""
        operands = {"x": x, "experts": experts, "weights": weights, "gate": gate, "up": up, "down": down}
        constants: dict[str, Value] = {"activation": activation, "first": self.shard.experts.start}
        return self.call("moe", operands, attributes=constants)["y"]

    def soft_embedding(self, probs: Buffer, table: Buffer, *, scale: float) -> Buffer:
        """See `Ops.soft_embedding`, of this rank's ids."""
        z = super().soft_embedding(probs, table, scale=scale)
        self._terms[z] = "float32"
        return z

    def _whole(self, buffer: Buffer | None) -> Buffer | None:
        return self._summed(buffer) if buffer is not None and buffer in self._terms else buffer

    def _summed(self, terms: Buffer) -> Buffer:
        """The sum over ranks of `terms`, recorded when it is first asked for."""
        if terms not in self._sums:
            constants: dict[str, Value] = {"num_ranks": self.shard.size, "terms": self._terms[terms]}
            self._sums[terms] = super().call("sum_ranks", {"x": terms}, attributes=constants)["y"]
        return self._sums[terms]


def make_recorder(name: str, shard: Shard | None, *, cache: str) -> Recorder:
    """A recorder for the whole model, or for one rank's part of it."""
    return Recorder(name, cache=cache) if shard is None else ShardRecorder(name, shard, cache=cache)
