"""Which part of a model each rank holds: attention by heads, MLPs by width, experts whole, tables by ids.

    tensor                            cut                       joined by
    q, k, v and their biases          rows of whole heads       -
    o                                 columns of those heads    sum over ranks
    gate, up of an MLP or adapter     rows                      -
    down                              columns                   sum over ranks
    stacked experts                   whole experts             sum over ranks
    embedding, head                   rows (ids)                sum of looked-up rows; statistics of the head
    norms, routers, scales            not cut                   -

Runs are contiguous and differ by one in length where a count does not divide, so nothing is padded and an odd
vocabulary or number of experts is no special case. Where there are fewer key/value heads than ranks, several ranks keep
the same one and divide the query heads that read it.

Legend: N query heads, G key/value heads, V vocabulary, E experts.

Source: ours; the split is that of Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from dlmrt.checkpoint.cut import Cut
from dlmrt.errors import UsageError
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.program.shard import Shard, share

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads of one rank in one layer. Example: 8 query heads over 2 others, rank 1 of 4: 2..4 over 0..1."""

    queries: range
    keys: range


def share_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> Heads:
    """Heads of `rank`; every local key/value head is read by equally many local query heads, which are neighbours."""
    readers = num_heads // num_kv_heads
    if size <= num_kv_heads:
        keys = share(num_kv_heads, rank, size)
        return Heads(queries=range(keys.start * readers, keys.stop * readers), keys=keys)
    keepers = [share(size, head, num_kv_heads) for head in range(num_kv_heads)]
    head = next(head for head, ranks in enumerate(keepers) if rank in ranks)
    mine = share(readers, rank - keepers[head].start, len(keepers[head]))
    return Heads(
        queries=range(head * readers + mine.start, head * readers + mine.stop), keys=range(head, head + 1)
    )  # fmt: skip


class Layout:
    """The part of a model that one rank holds.

    Args:
        config: of the whole model.

    Raises:
        UsageError: there are more ranks than heads, or than ids.
    """

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        if size > min(config.num_heads, config.vocab_size):
            raise UsageError(
                f"{config.architecture} has {config.num_heads} attention heads, which {size} processes cannot share; "
                f"start at most {config.num_heads}"
            )
        self.whole, self.rank, self.size = config, rank, size
        self.vocab = share(config.vocab_size, rank, size)
        self.experts = range(0) if config.moe is None else share(config.moe.num_experts, rank, size)
        self.config = self._local_config()

    def vocab_of(self, rank: int) -> range:
        """Ids of another rank's rows."""
        return share(self.whole.vocab_size, rank, self.size)

    def cuts(self) -> dict[str, Cut]:
        """What this rank reads of the tensors that it does not hold whole, by name."""
        shapes = family_of(self.whole).tensor_shapes(self.whole)
        found = {name: self._cut(name, shape) for name, shape in shapes.items()}
        return {name: cut for name, cut in found.items() if cut is not None}

    def shard(self, *, terms: str) -> Shard:
        """The part for programs of it.

        Args:
            terms: type in which terms of sums travel.

        Raises:
            UsageError: there are more ranks than experts.
        """
        moe = self.whole.moe
        if moe is not None and moe.num_experts < self.size:
            raise UsageError(
                f"{self.whole.architecture} has {moe.num_experts} experts for {self.size} processes, each of which "
                f"needs one; start at most {moe.num_experts}"
            )
        cuts, shapes = self.cuts(), family_of(self.whole).tensor_shapes(self.whole)
        return Shard(
            rank=self.rank, size=self.size, vocab=self.vocab, vocab_size=self.whole.vocab_size, experts=self.experts,
            shapes={name: cuts[name].shape_of(shape) if name in cuts else shape for name, shape in shapes.items()},
            summed=frozenset(name for name, cut in cuts.items() if cut.axis == 1), terms=terms,
        )  # fmt: skip

    def _local_config(self) -> ModelConfig:
        """`whole` with this rank's heads, for code that counts them."""
        whole = self.whole
        heads = self._heads(whole.num_kv_heads)
        sliding = whole.sliding
        if sliding is not None:
            full = self._heads(sliding.full_num_kv_heads)
            sliding = dataclasses.replace(sliding, full_num_kv_heads=len(full.keys))
        return dataclasses.replace(
            whole, num_heads=len(heads.queries), num_kv_heads=len(heads.keys), sliding=sliding
        )  # fmt: skip

    def _heads(self, num_kv_heads: int) -> Heads:
        return share_heads(self.whole.num_heads, num_kv_heads, self.rank, self.size)

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        family = family_of(self.whole)
        leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if name in (family.EMBEDDING, family.HEAD):
            return _rows(self.vocab)
        if len(shape) == 3:
            return _rows(self.experts)
        if leaf in ("q_proj", "k_proj", "v_proj", "query_key_value", "o_proj", "dense"):
            return self._attention_cut(name, leaf)
        if leaf in ("gate_proj", "up_proj"):
            return _rows(share(shape[0], self.rank, self.size))
        if leaf == "down_proj":
            return _columns(share(shape[1], self.rank, self.size))
        return None

    def _attention_cut(self, name: str, leaf: str) -> Cut:
        found = _LAYER.search(name)
        assert found is not None, name
        layer = self.whole.attention(int(found[1]))
        heads, num_heads = self._heads(layer.num_kv_heads), self.whole.num_heads
        queries, keys = _times(heads.queries, layer.head_dim), _times(heads.keys, layer.head_dim)
        if leaf in ("o_proj", "dense"):
            return _columns(queries)
        if leaf == "query_key_value":
            starts = (num_heads * layer.head_dim, (num_heads + layer.num_kv_heads) * layer.head_dim)
            return _rows(queries, *(range(start + keys.start, start + keys.stop) for start in starts))
        return _rows(queries if leaf == "q_proj" else keys)


def _times(run: range, factor: int) -> range:
    return range(run.start * factor, run.stop * factor)


def _rows(*runs: range) -> Cut:
    return Cut(axis=0, runs=tuple((run.start, run.stop) for run in runs))


def _columns(run: range) -> Cut:
    return Cut(axis=1, runs=((run.start, run.stop),))
