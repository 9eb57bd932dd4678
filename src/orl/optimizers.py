"""Muon over the matrices of layers and adapter, AdamW over embedding, head and norms, with state that can be saved.

Source: Muon: torch.optim.Muon (Keller Jordan's), learning rate matched to AdamW's RMS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dlmrt.models import qwen3
from orl.recipe import OptimSection


def learning_rate_ratio(step: int, num_steps: int, warmup_steps: int, end_ratio: float) -> float:
    """Linear warm-up, then cosine from 1 to `end_ratio`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return end_ratio + (1 - end_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimizers:
    """Both optimizers of a run as one.

    Args:
        params: leaves that require gradients, by name.
    """

    def __init__(self, params: Mapping[str, Tensor], section: OptimSection) -> None:
        matrices = [n for n, p in params.items() if p.ndim == 2 and n not in (qwen3.EMBEDDING, qwen3.HEAD)]
        rest = [n for n in params if n not in matrices]
        self.names = {"muon": matrices, "adamw": rest}
        muon = torch.optim.Muon(
            [params[n] for n in matrices], lr=section.muon_lr, weight_decay=section.weight_decay,
            momentum=0.95, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        adamw = torch.optim.AdamW(
            [params[n] for n in rest], lr=section.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.by_name: dict[str, torch.optim.Optimizer] = {"muon": muon, "adamw": adamw}
        self.base_lr = {"muon": section.muon_lr, "adamw": section.adamw_lr}

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
        """All state tensors, named ``optim.<optimizer>.<parameter>.<key>``."""
        found = {}
        for name, optimizer in self.by_name.items():
            for idx, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    found[f"optim.{name}.{self.names[name][idx]}.{key}"] = torch.as_tensor(value)
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave; a parameter that had no gradient yet has no state."""
        for name, optimizer in self.by_name.items():
            state = {}
            for idx, parameter in enumerate(self.names[name]):
                prefix = f"optim.{name}.{parameter}."
                found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
                if found:
                    state[idx] = found
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
