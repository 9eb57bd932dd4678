"""Optimizers with state that can be saved: Muon and AdamW of pre-training, the two AdamW groups of ORL.

Pre-training: Muon over the matrices of layers and adapter, AdamW over embedding, head and norms.

Source: ours over torch.optim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dlmrt.models import qwen3
from orl.precision import ComputeType, is_bfloat16
from orl.recipe import OptimSection
from orl.shard import sharded_as, shared_out, whole
from orl.train_recipe import UpdateSection


def learning_rate_ratio(step: int, num_steps: int, warmup_steps: int, end_ratio: float) -> float:
    """Linear warm-up, then cosine from 1 to `end_ratio`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return end_ratio + (1 - end_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def why_unusable(loss: float, norms: Mapping[str, float]) -> str | None:
    """Why gradients of these norms cannot be used for a step, None if they can."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    if not all(map(math.isfinite, norms.values())):
        return "the gradient is not finite"
    return None


class NamedOptimizers:
    """Several optimizers as one, with state that can be saved by parameter name.

    Args:
        optimizers: by name.
        names: parameters of each, in its order.
        base_lr: learning rate of each at ratio 1.
    """

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[str, Sequence[str]],
        base_lr: Mapping[str, float],
    ) -> None:  # fmt: skip
        self.by_name, self.names, self.base_lr = optimizers, names, base_lr

    def step(self, ratio: float) -> None:
        """One update at `ratio` of the base learning rates; gradients are cleared."""
        for name, optimizer in self.by_name.items():
            for group in optimizer.param_groups:
                group["lr"] = self.base_lr[name] * ratio
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Drop the gradients without an update."""
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All state tensors, whole, named ``optim.<optimizer>.<parameter>.<key>``; every rank must ask."""
        found = {}
        for name, optimizer in self.by_name.items():
            for idx, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    found[f"optim.{name}.{self.names[name][idx]}.{key}"] = whole(torch.as_tensor(value))
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave; a parameter that had no gradient yet has no state."""
        for name, optimizer in self.by_name.items():
            state = {}
            for idx, parameter in enumerate(self.names[name]):
                prefix = f"optim.{name}.{parameter}."
                like = optimizer.param_groups[0]["params"][idx]
                found = {
                    k.removeprefix(prefix): sharded_as(v, like) for k, v in tensors.items() if k.startswith(prefix)
                }
                if found:
                    state[idx] = found
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix to it; steps have the size of AdamW's.

    As `torch.optim.Muon` (Nesterov momentum 0.95, `adjust_lr_fn="match_rms_adamw"`), whose iteration is always in
    bfloat16: here it is in the type that the run's forwards compute in. In bfloat16 the last bits of a gradient, which
    several processes add up in another order, decide directions whose singular values are small.

    Args:
        dtype: of the iteration; auto: bfloat16 where the hardware multiplies it, else float32.

    Source: K. Jordan's Muon; step size after arXiv 2502.16982, section 2.2.
    """

    MOMENTUM, COEFFICIENTS, ITERATIONS, EPS = 0.95, (3.4445, -4.775, 2.0315), 5, 1e-7

    def __init__(
        self, params: Sequence[Tensor], *, lr: float, weight_decay: float, dtype: ComputeType = "auto"
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            params.sort(key=lambda p: sorted(p.shape))  # each process takes one of several that cost the same
            updates = shared_out(self._orthogonal, [self._momentum(p) for p in params])
            for p, update in zip(params, updates, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        state["momentum_buffer"].lerp_(p.grad, 1 - self.MOMENTUM)
        return p.grad.lerp(state["momentum_buffer"], self.MOMENTUM)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """Newton-Schulz iteration of fifth order towards the orthogonal factor; singular values end near 1."""
        a, b, c = self.COEFFICIENTS
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.bfloat16() if is_bfloat16(self.dtype, str(matrix.device)) else matrix
        x = x.T if is_tall else x
        x = x / x.norm().clamp(min=self.EPS)
        for _ in range(self.ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if is_tall else x


class Optimizers(NamedOptimizers):
    """Muon and AdamW of a pre-training run.

    Args:
        params: leaves that require gradients, by name.
        dtype: that Muon computes in.
    """

    def __init__(self, params: Mapping[str, Tensor], section: OptimSection, *, dtype: ComputeType = "auto") -> None:
        matrices = [n for n, p in params.items() if p.ndim == 2 and n not in (qwen3.EMBEDDING, qwen3.HEAD)]
        rest = [n for n in params if n not in matrices]
        muon = Muon([params[n] for n in matrices], lr=section.muon_lr, weight_decay=section.weight_decay, dtype=dtype)
        adamw = torch.optim.AdamW(
            [params[n] for n in rest], lr=section.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        super().__init__(
            {"muon": muon, "adamw": adamw}, {"muon": matrices, "adamw": rest},
            {"muon": section.muon_lr, "adamw": section.adamw_lr},
        )  # fmt: skip


class PathwayOptimizers(NamedOptimizers):
    """AdamW of On-Policy Residual Learning: one group for the backbone, one for the residual pathway.

    Each group has its learning rate and is clipped by its own norm, so neither can drown the other.

    Args:
        params: leaves that require gradients, by name.
        adapter: how the names of the pathway's parameters begin.
    """

    def __init__(self, params: Mapping[str, Tensor], section: UpdateSection, *, adapter: str) -> None:
        pathway = [n for n in params if n.startswith(adapter)]
        names = {"backbone": [n for n in params if n not in pathway], "residual": pathway}
        names = {group: members for group, members in names.items() if members}
        base_lr = {"backbone": section.lr, "residual": section.lr * section.residual_lr_ratio}
        optimizers = {
            group: torch.optim.AdamW(
                [params[n] for n in members], lr=base_lr[group], betas=(0.9, 0.99),
                weight_decay=section.weight_decay, fused=True,
            )
            for group, members in names.items()
        }  # fmt: skip
        super().__init__(optimizers, names, {group: base_lr[group] for group in names})
        self.params = params

    def clip(self, max_norm: float) -> dict[str, float]:
        """Clip the gradients of each group to `max_norm`; their norms before that."""
        return {
            group: float(whole(torch.nn.utils.clip_grad_norm_([self.params[n] for n in members], max_norm)))
            for group, members in self.names.items()
        }
