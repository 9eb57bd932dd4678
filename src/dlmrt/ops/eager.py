"""The operations in torch: the specification that every other executor is compared with.

Differentiable, any leading axes, any packing. Activations follow the dtype of the weights (or of autocast); statistics
of norms, rotary phases and softmax are fp32 whatever the model runs in, since rounding them moves keys and with them
whole decisions.

Legend: as dlmrt.ops.spec. B rows of a batch, S keys.

Source: Qwen3 as in transformers 5.24.0 models/qwen3/modeling_qwen3.py (compared in tests/dlmrt/models).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmrt.models.config import RopeConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.ops.spec import Attend


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """See `Ops.embed`."""
    return F.embedding(ids, table)


def add(x: Tensor, delta: Tensor) -> Tensor:
    """See `Ops.add`."""
    return x + delta


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `Ops.rms_norm`. The product with `weight` is in the activations' dtype, as in the reference."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `Ops.linear`."""
    return F.linear(x, weight)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """See `Ops.gated_mlp`."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def residual_mix(
    x: Tensor, z: Tensor, where: Tensor | None, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    *, alpha: float, eps: float,
) -> Tensor:  # fmt: skip
    """See `Ops.residual_mix`. z = 0 adds exactly 0: the norm of 0 is 0 and the adapter has no biases."""
    delta = alpha * gated_mlp(rms_norm(z, norm, eps=eps), gate, up, down)
    return x + (delta if where is None else torch.where(where.unsqueeze(-1), delta, torch.zeros_like(delta)))


@lru_cache(maxsize=32)
def _inv_freq(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    inv_freq, factor = rope_inv_freq(rope, head_dim)
    return torch.from_numpy(inv_freq), factor


def rotate(x: Tensor, positions: Tensor, *, rope: RopeConfig) -> Tensor:
    """Rotate x [..., T, N, H] by its positions [..., T]; pairs are (i, i + H/2). Phases are fp32."""
    inv_freq, factor = _inv_freq(rope, x.shape[-1])
    phase = positions.to(torch.float32).unsqueeze(-1) * inv_freq.to(device=x.device, dtype=torch.float32)
    cos, sin = (phase.cos() * factor).unsqueeze(-2), (phase.sin() * factor).unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def qkv(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
    *, head_dim: int, rope: RopeConfig, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `Ops.qkv`."""
    q, k, v = (t.reshape(*t.shape[:-1], -1, head_dim) for t in (F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)))
    q = rotate(rms_norm(q, q_norm, eps=eps), positions, rope=rope)
    k = rotate(rms_norm(k, k_norm, eps=eps), positions, rope=rope)
    return q, k, v


def attention(attend: Attend, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See `Ops.attention`."""
    out: Tensor = attend(layer_idx, q, k, v)
    return out


def soft_embedding(probs: Tensor, table: Tensor, *, scale: float) -> Tensor:
    """See `Ops.soft_embedding`. The product runs in the table's dtype, which is what the next step consumes."""
    return (probs.to(table.dtype) @ table) * scale


class MaskedAttention:
    """Attention of all rows over all rows under one boolean mask: training, and the reference without a cache.

    Args:
        visible: bool [..., T, S]; True where row t may see key s. Every row must see at least one key: a row that
            sees nothing has no defined softmax, so padding rows see themselves.
    """

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible.unsqueeze(-3)  # one mask for all heads

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        return scaled_dot_product(q, k, v, self.visible)


class CachedAttention:
    """Attention of canvas rows over a committed context plus themselves.

    Args:
        keys, values: per layer [1, C, G, H] of the committed context; replaced by the grown ones when `write`.
        visible: bool [T, C + T], or None where every row sees everything.
        write: append the rows' keys and values to the context.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], visible: Tensor | None, *, write: bool) -> None:
        self.keys, self.values, self.visible, self.write = keys, values, visible, write

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        k = torch.cat((self.keys[layer_idx], k), dim=-3)
        v = torch.cat((self.values[layer_idx], v), dim=-3)
        if self.write:
            self.keys[layer_idx], self.values[layer_idx] = k, v
        return scaled_dot_product(q, k, v, self.visible)


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(H)) v with grouped heads: q [..., T, N, H], k, v [..., S, G, H] -> [..., T, N * H]."""
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=1.0 / math.sqrt(q.shape[-1]), enable_gqa=q.shape[-3] != k.shape[-3]
    )
    return out.transpose(-2, -3).flatten(-2)
