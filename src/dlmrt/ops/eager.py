"""The operations in torch: the specification that every other executor is compared with.

Differentiable, any leading axes, any packing. Activations follow the dtype of the weights (or of autocast); statistics
of norms, rotary phases and softmax are fp32 whatever the model runs in, since rounding them moves keys and with them
whole decisions.

Legend: as dlmrt.ops.spec. B rows of a batch, S keys.

Source: Qwen2, Qwen3 and DiffusionGemma as in transformers 5.24.0, LLaDA2 as in ZHZisZZ/dllm ca17675, its block routing
as in sglang 0.5.23 (all compared in tests/dlmrt/models).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmrt.models.config import RopeConfig
from dlmrt.ops.numerics import rope_inv_freq
from dlmrt.ops.spec import Attend


def embed(table: Tensor, ids: Tensor, *, scale: float = 1.0) -> Tensor:
    """See `Ops.embed`."""
    rows = F.embedding(ids, table)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype)


def add(x: Tensor, delta: Tensor) -> Tensor:
    """See `Ops.add`."""
    return x + delta


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """See `Ops.scale`."""
    return x * factor


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, is_product_fp32: bool = False) -> Tensor:
    """See `Ops.rms_norm`."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    return (normed * weight.float()).to(x.dtype) if is_product_fp32 else weight * normed.to(x.dtype)


Quantizer = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


class QuantizedInput:
    """A weight whose products round their input first, as formats with quantised activations do (W4A4, W8A8).

    It stands for the weight in `linear`, `gated_mlp` and `moe`; inference only.

    Args:
        weight: dequantised, [O, I], or stacked [E, O, I].
        quantizers: what rounds the input (see dlmrt.ops.formats): one, or one an expert.
    """

    def __init__(self, weight: Tensor, quantizers: Sequence[Quantizer]) -> None:
        self.weight, self.quantizers = weight, quantizers

    def __getitem__(self, expert: int) -> QuantizedInput:
        return QuantizedInput(self.weight[expert], [self.quantizers[expert]])

    def multiply(self, x: Tensor) -> Tensor:
        """The rounded x times the weight."""
        (quantize,) = self.quantizers
        return F.linear(torch.from_numpy(quantize(x.float().numpy())).to(x.dtype), self.weight)


class Multiplies(Protocol):
    """What may stand in place of a weight: rounded inputs, low-rank adaptation."""

    def multiply(self, x: Tensor) -> Tensor:
        """X [..., I] times the weight it stands for, [..., O]."""


def linear(x: Tensor, weight: Tensor | Multiplies) -> Tensor:
    """See `Ops.linear`."""
    return F.linear(x, weight) if isinstance(weight, Tensor) else weight.multiply(x)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str = "silu") -> Tensor:
    """See `Ops.gated_mlp`."""
    return linear(_ACTIVATIONS[activation](linear(x, gate)) * linear(x, up), down)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}


def residual_mix(
    x: Tensor, z: Tensor, where: Tensor | None, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    *, alpha: float, eps: float, activation: str = "silu", is_product_fp32: bool = False,
) -> Tensor:  # fmt: skip
    """See `Ops.residual_mix`. z = 0 adds exactly 0: the norm of 0 is 0 and the adapter has no biases."""
    normed = rms_norm(z, norm, eps=eps, is_product_fp32=is_product_fp32)
    delta = alpha * gated_mlp(normed, gate, up, down, activation=activation)
    return x + (delta if where is None else torch.where(where.unsqueeze(-1), delta, torch.zeros_like(delta)))


@lru_cache(maxsize=32)
def _inv_freq(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    inv_freq, factor = rope_inv_freq(rope, head_dim)
    return torch.from_numpy(inv_freq), factor


def rotate(x: Tensor, positions: Tensor, *, rope: RopeConfig) -> Tensor:
    """Rotate x [..., T, N, H] by its positions [..., T]; pairs are (i, i + R/2) of the R that turn. Phases are fp32."""
    inv_freq, factor = _inv_freq(rope, x.shape[-1])
    phase = positions.to(torch.float32).unsqueeze(-1) * inv_freq.to(device=x.device, dtype=torch.float32)
    cos, sin = (phase.cos() * factor).unsqueeze(-2), (phase.sin() * factor).unsqueeze(-2)
    turning, rest = torch.split(x, [2 * len(inv_freq), x.shape[-1] - 2 * len(inv_freq)], dim=-1)
    first, second = turning.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def qkv(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
    *, head_dim: int, rope: RopeConfig, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `Ops.qkv`."""
    q, k, v = (_heads(linear(x, weight), head_dim) for weight in (wq, wk, wv))
    q = rotate(rms_norm(q, q_norm, eps=eps), positions, rope=rope)
    k = rotate(rms_norm(k, k_norm, eps=eps), positions, rope=rope)
    return q, k, v


def qkv_biased(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, positions: Tensor,
    *, head_dim: int, rope: RopeConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `Ops.qkv_biased`."""
    pairs = ((wq, bq), (wk, bk), (wv, bv))
    q, k, v = (_heads(linear(x, weight) + bias, head_dim) for weight, bias in pairs)
    return rotate(q, positions, rope=rope), rotate(k, positions, rope=rope), v


def qkv_packed(
    x: Tensor, weight: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
    *, num_heads: int, head_dim: int, rope: RopeConfig, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `Ops.qkv_packed`."""
    packed = _heads(linear(x, weight), head_dim)
    num_kv_heads = (packed.shape[-2] - num_heads) // 2
    q, k, v = torch.split(packed, [num_heads, num_kv_heads, num_kv_heads], dim=-2)
    q = rotate(rms_norm(q, q_norm, eps=eps), positions, rope=rope)
    k = rotate(rms_norm(k, k_norm, eps=eps), positions, rope=rope)
    return q, k, v


def qkv_normed(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor | None, q_norm: Tensor, k_norm: Tensor, positions: Tensor,
    *, head_dim: int, rope: RopeConfig, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `Ops.qkv_normed`."""
    q, k = _heads(linear(x, wq), head_dim), _heads(linear(x, wk), head_dim)
    v = rms_norm(k if wv is None else _heads(linear(x, wv), head_dim), None, eps=eps)
    q = rotate(rms_norm(q, q_norm, eps=eps, is_product_fp32=True), positions, rope=rope)
    k = rotate(rms_norm(k, k_norm, eps=eps, is_product_fp32=True), positions, rope=rope)
    return q, k, v


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def attention(attend: Attend, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """See `Ops.attention`."""
    out: Tensor = attend(layer_idx, q, k, v, scale=scale)
    return out


def route_sigmoid(
    x: Tensor, weight: Tensor, bias: Tensor,
    *, top_k: int, num_groups: int, num_kept_groups: int, capacity: int | None, block_length: int,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Ops.route_sigmoid`."""
    scores = F.linear(x.float(), weight.float()).sigmoid()
    ranked = scores + bias.float()
    if capacity is None:
        groups = torch.unflatten(ranked, -1, (num_groups, -1))
        kept = _best(groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1), num_kept_groups)
        admitted = _members(kept, num_groups).repeat_interleave(groups.shape[-1], dim=-1)
    else:
        blocks = torch.split(ranked, block_length, dim=-2)
        chosen = [_members(_best(block.amax(-2), capacity), ranked.shape[-1]) for block in blocks]
        admitted = torch.cat(
            [mask.unsqueeze(-2).expand_as(block) for mask, block in zip(chosen, blocks, strict=True)], dim=-2
        )
    experts = _best(ranked.masked_fill(~admitted, -math.inf), top_k)
    weights = scores.gather(-1, experts)
    if top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * scaling_factor


def route_softmax(
    x: Tensor, scale: Tensor, weight: Tensor, expert_scale: Tensor, *, top_k: int, eps: float
) -> tuple[Tensor, Tensor]:
    """See `Ops.route_softmax`. The projection is in the weights' dtype, as in the reference."""
    probs = F.linear(rms_norm(x, None, eps=eps) * scale * x.shape[-1] ** -0.5, weight).float().softmax(-1)
    experts = _best(probs, top_k)
    weights = probs.gather(-1, experts)
    return experts, weights / weights.sum(-1, keepdim=True) * expert_scale[experts]


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest along the last axis, highest first; the lower index on equal scores."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _members(indices: Tensor, size: int) -> Tensor:
    """Bool [..., size], True at `indices` [..., n]."""
    return torch.zeros(*indices.shape[:-1], size, dtype=torch.bool, device=indices.device).scatter(-1, indices, True)


def moe(
    x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: str
) -> Tensor:
    """See `Ops.moe`. Only experts that some row chose are computed."""
    return expert_sum(x, experts, weights, gate, up, down, activation=activation).to(x.dtype)


def expert_sum(
    x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    *, activation: str, held: range | None = None,
) -> Tensor:  # fmt: skip
    """What the experts add to each row, fp32 [T, D], before it is rounded.

    Args:
        held: numbers of the experts that `gate`, `up` and `down` stack, the others add nothing; None: all.
    """
    rows, experts, weights = (t.reshape(-1, t.shape[-1]) for t in (x, experts, weights))
    out = rows.new_zeros(rows.shape, dtype=torch.float32)
    for expert in torch.unique(experts).tolist():
        if held is not None and expert not in held:
            continue
        at = expert if held is None else expert - held.start
        row, slot = (experts == expert).nonzero(as_tuple=True)
        y = gated_mlp(rows[row], gate[at], up[at], down[at], activation=activation)
        out = out.index_add(0, row, y.float() * weights[row, slot].float().unsqueeze(-1))
    return out.reshape(x.shape)


def soft_cap(logits: Tensor, *, cap: float) -> Tensor:
    """See `Ops.soft_cap`."""
    return cap * torch.tanh(logits.float() / cap)


def emittable_probs(logits: Tensor, banned: Tensor | None, *, temperature: float = 1.0) -> Tensor:
    """softmax(logits / temperature) in fp32 over the ids that can be emitted: what `soft_embedding` makes z of.

    The same distribution as `dlmrt.decode.sampling.predict` gives: ids that no answer can hold have no share in z, or a
    model would be trained on a residual that decoding never feeds it.

    Args:
        banned: bool [V], ids that are never predicted (`dlmrt.decode.sampling.banned_ids`); None bans nothing.
    """
    scaled = logits.float() / temperature
    return (scaled if banned is None else scaled.masked_fill(banned, -math.inf)).softmax(-1)


def soft_embedding(probs: Tensor, table: Tensor, *, scale: float) -> Tensor:
    """See `Ops.soft_embedding`. The product runs in the table's dtype, which is what the next step consumes."""
    rows = probs.to(table.dtype) @ table
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype)


class MaskedAttention:
    """Attention of all rows over all rows under one boolean mask: training, and the reference without a cache.

    Args:
        visible: bool [..., T, S]; True where row t may see key s. Every row must see at least one key: a row that
            sees nothing has no defined softmax, so padding rows see themselves.
    """

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible.unsqueeze(-3)  # one mask for all heads

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `Attend`."""
        return scaled_dot_product(q, k, v, self.visible, scale=scale)


class CachedAttention:
    """Attention of canvas rows over a committed context plus themselves.

    Args:
        keys, values: per layer [1, C, G, H] of the committed context; replaced by the grown ones when `write`.
        visible: per layer bool [T, C + T], or None where every row sees everything.
        write: append the rows' keys and values to the context.
    """

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], visible: Sequence[Tensor | None], *, write: bool
    ) -> None:
        self.keys, self.values, self.visible, self.write = keys, values, visible, write

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """See `Attend`."""
        k = torch.cat((self.keys[layer_idx], k), dim=-3)
        v = torch.cat((self.values[layer_idx], v), dim=-3)
        if self.write:
            self.keys[layer_idx], self.values[layer_idx] = k, v
        return scaled_dot_product(q, k, v, self.visible[layer_idx], scale=scale)


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """softmax(scale q k^T) v with grouped heads: q [..., T, N, H], k, v [..., S, G, H] -> [..., T, N * H]."""
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        enable_gqa=q.shape[-3] != k.shape[-3],
    )  # fmt: skip
    return out.transpose(-2, -3).flatten(-2)
