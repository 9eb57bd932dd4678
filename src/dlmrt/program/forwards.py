"""The forwards of one model as programs: extend the context, look at a canvas, turn a prediction into a residual.

`ModelParts` holds a program's weights and caches and records the pieces; the step-by-step programs below and the loop
of `dlmrt.program.loop` are made of the same pieces, so what one forward computes cannot depend on who drives it.

A canvas forward writes the keys and values of its rows into the cache, at the positions behind the committed context:
there they are overwritten by the next forward and seen by no row that is not told so, since `visible` bounds each row.

Legend: T rows of a forward, C positions of the cache, D model width, V vocabulary.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlmrt.models.config import DiffusionConfig, ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.nodes import Buffer, Dim, Program, Rows, maximum
from dlmrt.program.record import CacheAttention, Recorder
from dlmrt.program.shard import Shard, make_recorder

CONTEXT = "context."  # states of this prefix are the committed context, which all programs of a model share


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Types of what a program reads. Example: ``Formats(matrix="int8", table="bfloat16", cache="bfloat16")``."""

    matrix: str = "float32"  # linear layers and the head
    table: str = "float32"  # embedding rows, for lookups and soft embeddings
    cache: str = "float32"  # keys and values
    named: Mapping[str, str] = field(default_factory=dict)  # matrices in a type of their own, by name


class ModelParts:
    """Weights and caches of `config` in one program.

    Args:
        capacity: positions that the caches hold.
        shard: one rank's part, of whose heads `config` is; None: the whole model.
    """

    def __init__(
        self, recorder: Recorder, config: ModelConfig, formats: Formats, *, capacity: int, shard: Shard | None = None
    ) -> None:  # fmt: skip
        assert config.diffusion is not None
        self.recorder, self.config = recorder, config
        self.diffusion: DiffusionConfig = config.diffusion
        self.family = family_of(config)
        shapes = self.family.tensor_shapes(config) if shard is None else shard.shapes
        self.params = {
            name: recorder.weight(name, self._format(name, shape, formats), shape) for name, shape in shapes.items()
        }
        self._head_params = self.params
        head_format = formats.named.get(self.family.HEAD, formats.matrix)
        if config.tie_word_embeddings and head_format != formats.table:
            # One tensor in two formats: a table for lookups, a matrix for the head.
            head = recorder.weight(self.family.HEAD, head_format, shapes[self.family.EMBEDDING])
            self._head_params = self.params | {self.family.EMBEDDING: head}
        layers = [config.attention(layer_idx) for layer_idx in range(config.num_layers)]
        self._windows = tuple(layer.window for layer in layers)
        self.caches = tuple(
            recorder.state(f"{CONTEXT}cache.{i}", formats.cache, (capacity, 2, layer.num_kv_heads, layer.head_dim))
            for i, layer in enumerate(layers)
        )
        self._hidden: Buffer | None = None
        if self.diffusion.logit_shift:
            self._hidden = recorder.state(f"{CONTEXT}hidden", "float32", (capacity, config.hidden_size))

    @property
    def num_ids(self) -> int:
        """Ids whose rows of the embedding this program has."""
        return maximum(self.params[self.family.EMBEDDING].shape[0])

    def extend(self, ids: Buffer, positions: Buffer, visible: Buffer) -> None:
        """Append final ids [T] to the context."""
        hidden = self._forward(ids, positions, visible, z=None, where=None, is_context=True)
        if self._hidden is not None:
            self.recorder.call("hidden_store", {"hidden": hidden, "positions": positions, "cache": self._hidden})

    def canvas(
        self,
        ids: Buffer,
        positions: Buffer,
        visible: Buffer,
        context: Buffer,
        *,
        z: Buffer | None,
        where: Buffer | None,
    ) -> Buffer:
        """Logits [T, V] of a canvas behind `context` committed tokens; row i predicts slot i."""
        if self._hidden is None:
            return self._head(self._forward(ids, positions, visible, z=z, where=where, is_context=False))
        if ids.shape[0] == 1:
            return self.stored_canvas(context, 1)
        return self._shifted(
            self._forward(ids, positions, visible, z=z, where=where, is_context=False), context, ids.shape[0]
        )

    def stored_canvas(self, context: Buffer, length: int) -> Buffer:
        """Logits [L, V] of the first slots, for shifted logits: the rows that predict them went through `extend`.

        No row is computed here; slot 0 is predicted by the last committed one.
        """
        return self._shifted(None, context, length)

    def _shifted(self, hidden: Buffer | None, context: Buffer, rows: Dim) -> Buffer:
        assert self._hidden is not None
        operands = {"hidden": hidden, "cache": self._hidden, "context": context}
        return self._head(self.recorder.call("shift", operands, dims={"T": rows})["y"])

    def _head(self, hidden: Buffer) -> Buffer:
        logits: Buffer = self.family.head(self.recorder, self._head_params, self.config, hidden)
        return logits

    def soft_embedding(self, probs: Buffer, residual: Buffer) -> None:
        """Write the residual of probs [T, V]."""
        z = self.family.soft_embedding(self.recorder, self.params, self.config, probs)
        self.recorder.call("output", {"x": z}, outputs={"y": residual})

    def _forward(
        self, ids: Buffer, positions: Buffer, visible: Buffer, *, z: Buffer | None, where: Buffer | None,
        is_context: bool,
    ) -> Buffer:  # fmt: skip
        attend = CacheAttention(
            recorder=self.recorder, caches=self.caches, positions=positions, visible=visible,
            firsts=self._window_starts(positions, is_context=is_context),
        )  # fmt: skip
        hidden: Buffer = self.family.forward(
            self.recorder, self.params, self.config, ids, positions, attend, z=z, where=where, is_context=is_context
        )
        return hidden

    def _window_starts(self, positions: Buffer, *, is_context: bool) -> tuple[Buffer | None, ...]:
        """Where the rows' view begins, for each layer. A canvas that sees itself counts as one position."""
        is_shared = not is_context and self.diffusion.in_block_attention == "bidirectional"
        starts: dict[int | None, Buffer | None] = {None: None}
        for window in self._windows:
            if window not in starts:
                constants = {"window": window or 0, "is_shared": is_shared}
                out = self.recorder.call("window_start", {"positions": positions}, attributes=constants)
                starts[window] = out["first"]
        return tuple(starts[window] for window in self._windows)

    def _format(self, name: str, shape: tuple[int, ...], formats: Formats) -> str:
        if len(shape) == 1 or (self.family.ROUTER and name.endswith(self.family.ROUTER)):
            return "float32"  # a rounded router takes other experts
        return formats.table if name == self.family.EMBEDDING else formats.named.get(name, formats.matrix)


def record_extend(
    config: ModelConfig, formats: Formats, *, capacity: int, max_rows: int, shard: Shard | None = None
) -> Program:
    """Append rows `ids` at `positions` to the context; the host fills the inputs."""
    recorder = make_recorder("extend", shard, cache=formats.cache)
    model = ModelParts(recorder, config, formats, capacity=capacity, shard=shard)
    rows = Rows(symbol="T", maximum=max_rows, count=recorder.scalar("rows"))
    model.extend(*_row_inputs(recorder, rows))
    return recorder.finish()


def record_canvas(
    config: ModelConfig, formats: Formats, *, capacity: int, max_rows: int, shard: Shard | None = None
) -> Program:
    """State `logits` [T, V] of a canvas; the host fills ids, positions, visible, context and, if any, the residual."""
    recorder = make_recorder("canvas", shard, cache=formats.cache)
    model = ModelParts(recorder, config, formats, capacity=capacity, shard=shard)
    rows = Rows(symbol="T", maximum=max_rows, count=recorder.scalar("rows"))
    inputs = _row_inputs(recorder, rows)
    z, where = None, None
    if model.family.has_residual(config):
        z = recorder.state("residual", "float32", (rows, config.hidden_size), present=recorder.scalar("has_residual"))
        where = recorder.state("where", "bool", (rows,))
    logits = model.canvas(*inputs, recorder.scalar("context"), z=z, where=where)
    recorder.call("output", {"x": logits}, outputs={"y": recorder.state("logits", "float32", (rows, logits.shape[1]))})
    return recorder.finish()


def record_soft_embedding(
    config: ModelConfig, formats: Formats, *, max_rows: int, shard: Shard | None = None
) -> Program:
    """State `residual` [T, D] of state `probs` [T, V]."""
    recorder = make_recorder("soft_embedding", shard, cache=formats.cache)
    model = ModelParts(recorder, config, formats, capacity=0, shard=shard)
    rows = Rows(symbol="T", maximum=max_rows, count=recorder.scalar("rows"))
    probs = recorder.state("probs", "float32", (rows, model.num_ids))
    model.soft_embedding(probs, recorder.state("residual", "float32", (rows, config.hidden_size)))
    return recorder.finish()


def _row_inputs(recorder: Recorder, rows: Rows) -> tuple[Buffer, Buffer, Buffer]:
    ids, positions, visible = (recorder.state(name, "int32", (rows,)) for name in ("ids", "positions", "visible"))
    return ids, positions, visible
