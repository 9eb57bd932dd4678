"""torch as a benchmark runtime: `torch_step.py SHAPE MODE THREADS`, MODE: eager, compile or autotune.

  step N     seconds of one denoising step, mean of N after one that warms up

One step is what a user of torch would write: the forward of a block over a static cache of keys and values, the
greatest probability of each row, and the commit of COMMITS positions, as one module call. bfloat16; weights are torch's
own random numbers. `compile` is inductor with frozen weights and the C++ wrapper, `autotune` adds max-autotune: the
fastest ways that torch 2.13 has on a CPU without AMX.

Source: ours; layers as in transformers 5.24.0 models/qwen3.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from child import Channel
from shapes import CANVAS, CONTEXT, SHAPES

COMMITS = 4


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float32, as the reference does."""
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


class Layer(nn.Module):
    """One layer; q, k, v and gate, up are one projection each, which is faster."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        self.sizes = [heads, kv_heads, kv_heads]
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.head_norms = nn.ParameterList(nn.Parameter(torch.ones(head_dim)) for _ in range(2))
        self.qkv = nn.Linear(hidden, sum(self.sizes) * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rows [L, D] of the canvas behind cached keys and values [G, C, H]."""
        rows = x.shape[0]
        q, k, v = self.qkv(rms_norm(x, self.norms[0])).view(rows, sum(self.sizes), -1).split(self.sizes, 1)

        def rope(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k = rope(rms_norm(q, self.head_norms[0])), rope(rms_norm(k, self.head_norms[1]))
        keys, values = torch.cat([keys, k.transpose(0, 1)], 1), torch.cat([values, v.transpose(0, 1)], 1)
        seen = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], enable_gqa=True)[0]
        x = x + self.o(seen.transpose(0, 1).reshape(rows, -1))
        gate, up = self.gate_up(rms_norm(x, self.norms[1])).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Step(nn.Module):
    """canvas, open flags -> the next canvas and flags."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        num_layers, hidden, heads, kv_heads, head_dim, ffn, vocab = SHAPES[shape]
        self.table = nn.Parameter(torch.empty(vocab, hidden))
        self.layers = nn.ModuleList(Layer(hidden, heads, kv_heads, head_dim, ffn) for _ in range(num_layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        rng = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02, generator=rng)
        self.head = nn.Linear(hidden, vocab, bias=False).requires_grad_(False)
        self.head.weight = self.table
        frequencies = 1e6 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = (torch.arange(CANVAS) + CONTEXT).float()[:, None] * frequencies
        for name, values in {
            "cos": angles.cos()[:, None],
            "sin": angles.sin()[:, None],
            "keys": torch.randn(num_layers, kv_heads, CONTEXT, head_dim, generator=rng),
            "values": torch.randn(num_layers, kv_heads, CONTEXT, head_dim, generator=rng),
        }.items():
            self.register_buffer(name, values)
        self.to(torch.bfloat16)

    def forward(self, canvas: Tensor, is_open: Tensor) -> tuple[Tensor, Tensor]:
        """One denoising step."""
        x = F.embedding(canvas, self.table)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.cos, self.sin, self.keys[number], self.values[number])
        logits = self.head(rms_norm(x, self.norm)).float()
        top, token = logits.max(-1)
        confidence = 1 / torch.exp(logits - top[:, None]).sum(-1)
        best = torch.topk(torch.where(is_open, confidence, -1.0), COMMITS).indices
        take = torch.zeros_like(is_open).index_fill(0, best, True) & is_open
        return torch.where(take, token, canvas), is_open & ~take


def compiled(module: nn.Module, mode: str) -> Any:
    """The module as `mode` runs it."""
    if mode == "eager":
        return module
    from torch._inductor import config as inductor

    inductor.freezing = inductor.cpp_wrapper = True
    inductor.max_autotune = mode == "autotune"
    inductor.compile_threads = 1
    return torch.compile(module, fullgraph=True, dynamic=False)


def main() -> None:
    """Build, compile, warm up, serve."""
    channel = Channel()
    shape, mode, num_threads = sys.argv[1:]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(int(num_threads))
    torch.set_grad_enabled(False)
    step = compiled(Step(shape).eval(), mode)
    rng = torch.Generator().manual_seed(1)

    def timed(count: str) -> dict[str, float]:
        canvas, is_open = torch.randint(0, 8000, (CANVAS,), generator=rng), torch.ones(CANVAS, dtype=torch.bool)
        began = 0.0
        for number in range(int(count) + 1):
            if number == 1:
                began = time.perf_counter()
            canvas, is_open = step(canvas, is_open)
            if not bool(is_open.any()):  # what a loop in Python asks after each step
                is_open = torch.ones(CANVAS, dtype=torch.bool)
        return {"value": (time.perf_counter() - began) / int(count)}

    timed("2")
    channel.serve({"step": timed}, torch=torch.__version__)


if __name__ == "__main__":
    main()
