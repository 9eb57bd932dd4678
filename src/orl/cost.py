"""What training on a replayed response costs, and how responses are dealt to ranks so that none waits for another.

Cost is counted in floating-point operations of one forward: products with weights for every row, attention for every
pair of a row and a key it sees, the head for rows with a loss. Backward is twice that for every term, so it changes no
ratio. What a response costs depends on the prompt, the answer's length and the number of states: dealing responses by
turns leaves a rank waiting, dealing them by cost, the costliest first, does not (Graham's rule).

Weights of the loss are counted over the whole update before anything is dealt (`orl.replay.state_weights`), so neither
packing nor ranks can change it. Every rank gets the same number of micro-batches, some of them empty: collectives of a
sharded model must match.

Left out on purpose: memory traffic and launch costs, which the row budget of a micro-batch bounds.

Source: ours; R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.models.layers import STACKED
from orl.packing import Share, balance, pack_shares


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Operations of one forward. Example (Qwen3-4B): per_row 7.2e9, per_key 5.9e5, per_loss_row 7.8e8."""

    per_row: float  # products with the weights that a row meets
    per_key: float  # of a row of a layer without a window, per key that it sees, summed over these layers
    per_window_key: float  # the same for layers with a window
    per_loss_row: float  # head
    window: int | None
    canvas_length: int

    @classmethod
    def of(cls, config: ModelConfig) -> CostModel:
        """Counted from the shapes of the model's tensors; of stacked experts a row meets those it is routed to."""
        assert config.diffusion is not None
        layers = [config.attention(layer_idx) for layer_idx in range(config.num_layers)]

        def attention(has_window: bool) -> float:
            return sum(4.0 * config.num_heads * a.head_dim for a in layers if (a.window is not None) == has_window)

        return cls(
            per_row=2.0 * active_weights(config),
            per_key=attention(False),
            per_window_key=attention(True),
            per_loss_row=2.0 * config.hidden_size * config.vocab_size,
            window=None if config.sliding is None else config.sliding.window,
            canvas_length=config.diffusion.canvas_length,
        )

    def response(self, num_clean: int, starts: Sequence[int]) -> float:
        """Cost of one response.

        Args:
            num_clean: clean rows, prompt included.
            starts: position of slot 0 of every state's canvas; all its slots count as rows with a loss.
        """
        length = self.canvas_length
        num_rows = num_clean + length * len(starts)
        wide = num_clean * (num_clean + 1) / 2 + length * sum(start + length for start in starts)
        narrow = wide
        if self.window is not None:
            seen = min(num_clean, self.window)
            narrow = seen * (seen + 1) / 2 + (num_clean - seen) * self.window
            narrow += length * sum(min(start, self.window - 1) + length for start in starts)
        return (
            self.per_row * num_rows + self.per_key * wide + self.per_window_key * narrow
            + self.per_loss_row * length * len(starts)
        )  # fmt: skip


def active_weights(config: ModelConfig) -> int:
    """Elements of the matrices that one row meets, without embedding and head."""
    family = family_of(config)
    total = 0
    for name, shape in family.tensor_shapes(config).items():
        if len(shape) < 2 or name in {family.EMBEDDING, family.HEAD}:
            continue
        size = math.prod(shape)
        if re.fullmatch(STACKED, name):
            assert config.moe is not None
            size = size // config.moe.num_experts * config.moe.num_experts_per_token
        total += size
    return total


def deal(
    costs: Sequence[float], num_clean: Sequence[int], num_states: Sequence[int],
    *, canvas_length: int, budget: int, num_ranks: int,
) -> list[list[list[Share]]]:  # fmt: skip
    """Micro-batches of every rank: ``[rank][micro-batch]`` -> shares; as many for each rank, the last ones empty.

    Args:
        costs: of each response.
        num_clean, num_states: of each response.
        budget: rows of a micro-batch, as of `orl.packing.pack_shares`.
    """
    ranks = []
    for mine in balance(costs, num_ranks):
        bins = pack_shares(
            [num_clean[i] for i in mine], [num_states[i] for i in mine], canvas_length=canvas_length, budget=budget
        )
        ranks.append([[replace(share, response=mine[share.response]) for share in shares] for shares in bins])
    most = max(map(len, ranks))
    return [bins + [[] for _ in range(most - len(bins))] for bins in ranks]
