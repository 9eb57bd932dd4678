"""The operations that model files are written in: about a dozen, each coarse enough to be one fused kernel.

`Ops` is the signature list. `dlmrt.ops.eager` implements it in torch (differentiable, any packing): that module is the
specification. A recorder implements the same list by writing program nodes. Model code gets one of them as its first
argument and calls nothing else, so a family is written once.

Legend: T rows (canvas positions or packed tokens, with any leading axes), D model width, N query heads, G key/value
heads, H head width, F MLP width, V vocabulary. `Tensor` is the implementation's own handle.

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

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend q [T, N, H] over the context plus k, v [T, G, H]; return [T, N * H]."""


class Ops(Protocol):
    """Signatures of the operations. Statistics of norms and softmax are fp32 in every implementation."""

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows of `table` [V, D] for ids [T] -> [T, D]."""

    def residual_mix(
        self, x: Tensor, z: Tensor, where: Tensor | None, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
        *, alpha: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """x + alpha * where * down(silu(gate n(z)) * up n(z)), n = RMSNorm(norm); z, x [T, D], where [T] bool or None."""

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """Skip connection: x + delta."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last axis."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, I] times weight [O, I] transposed -> [T, O]."""

    def qkv(
        self, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
        *, head_dim: int, rope: RopeConfig, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Project, RMSNorm q and k per head, rotate -> q [T, N, H], k [T, G, H], v [T, G, H]."""

    def attention(self, attend: Attend, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(H) + visibility) v -> [T, N * H]."""

    def gated_mlp(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """down(silu(gate x) * up x), weights [F, D], [F, D], [D, F]."""

    def soft_embedding(self, probs: Tensor, table: Tensor, *, scale: float) -> Tensor:
        """scale * probs [T, V] table [V, D] -> [T, D]: the residual z before the adapter."""
