"""The operations that model files are written in: about twenty, each coarse enough to be one fused kernel.

`Ops` is the signature list. `dlmrt.ops.eager` implements it in torch (differentiable, any packing): that module is the
specification. A recorder implements the same list by writing program nodes. Model code gets one of them as its first
argument and calls nothing else, so a family is written once.

Legend: T rows (canvas positions or packed tokens, with any leading axes), D model width, N query heads, G key/value
heads, H head width, F MLP width, V vocabulary, E experts, K experts of one row. `Tensor` is the implementation's own
handle. `activation` is "silu" or "gelu_tanh".

Left out on purpose: whatever changes from request to request (lengths, positions, visibility). It arrives in
`positions` and in the `Attend` object, never as a Python number.

Source: ours.
"""

from __future__ import annotations

from typing import Any, Protocol

from dlmrt.models.config import RopeConfig

Tensor = Any


class Attend(Protocol):
    """Where a layer's keys and values go and what each row may see; one object per forward."""

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Attend q [T, N, H] over the context plus k, v [T, G, H]; return [T, N * H]. Scale None: 1 / sqrt(H)."""


class Ops(Protocol):
    """Signatures of the operations. Statistics of norms and softmax are fp32 in every implementation."""

    def embed(self, table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
        """Rows of `table` [V, D] for ids [T], times `scale` rounded to the table's type -> [T, D]."""

    def residual_mix(
        self, x: Tensor, z: Tensor, where: Tensor | None, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
        *, alpha: float, eps: float, activation: str = "silu", is_product_fp32: bool = False,
    ) -> Tensor:  # fmt: skip
        """x + alpha * where * down(act(gate n(z)) * up n(z)), n = RMSNorm(norm); z, x [T, D], where bool [T] / None."""

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """Skip connection: x + delta."""

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """x times `factor` [1]."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, *, eps: float, is_product_fp32: bool = False) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last axis; weight None stands for 1.

        `is_product_fp32`: multiply by the weight before rounding to the activations' type (Gemma), not after.
        """

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, I] times weight [O, I] transposed -> [T, O]."""

    def qkv(
        self, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
        *, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Project, RMSNorm q and k per head, rotate -> q [T, N, H], k [T, G, H], v [T, G, H]."""

    def qkv_biased(
        self, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, positions: Tensor,
        *, head_dim: int, rope: RopeConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Project, add the biases [N * H], [G * H], [G * H], rotate q and k; no norms."""

    def qkv_packed(
        self, x: Tensor, weight: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
        *, num_heads: int, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `qkv` with one matrix [(N + 2 G) H, D] whose rows are those of q, then k, then v."""

    def qkv_normed(
        self, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor | None, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
        *, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `qkv` with norms of `is_product_fp32`, also of v (without weight); wv None: v is the k projection."""

    def attention(
        self, attend: Attend, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """softmax(scale q k^T + visibility) v -> [T, N * H]; scale None: 1 / sqrt(H)."""

    def gated_mlp(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str = "silu") -> Tensor:
        """down(act(gate x) * up x), weights [F, D], [F, D], [D, F]."""

    def route_sigmoid(
        self, x: Tensor, weight: Tensor, bias: Tensor,
        *, top_k: int, num_groups: int, num_kept_groups: int, capacity: int | None, block_length: int,
        scaling_factor: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Experts [T, K] and their weights fp32 [T, K] from s = sigmoid(x weight^T), weight [E, D], bias [E].

        s + bias selects, s alone weighs: s / sum(s) * scaling_factor over the K chosen (K = 1: s * scaling_factor).
        Without `capacity`: the K best of the `num_kept_groups` groups whose two best sum highest. With it: the K best
        of the `capacity` experts whose best row, over a block, is highest; blocks are runs of `block_length` rows, the
        last one as long as it is. Equal scores: the lower expert.
        """

    def route_softmax(
        self, x: Tensor, scale: Tensor, weight: Tensor, expert_scale: Tensor, *, top_k: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Experts [T, K] and weights fp32 [T, K] from softmax(weight (n(x) * scale / sqrt(D))).

        n is an RMSNorm without weight. The K best, divided by their sum, each times its `expert_scale` [E]. Equal
        scores: the lower expert.
        """

    def moe(
        self, x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str
    ) -> Tensor:
        """Sum over K of weights * gated_mlp of that expert, in fp32; gate, up [E, F, D], down [E, D, F]."""

    def soft_cap(self, logits: Tensor, *, cap: float) -> Tensor:
        """cap * tanh(logits / cap) in fp32."""

    def soft_embedding(self, probs: Tensor, table: Tensor, *, scale: float) -> Tensor:
        """scale * probs [T, V] table [V, D] -> [T, D]: the residual z before the adapter; `scale` as in `embed`."""
