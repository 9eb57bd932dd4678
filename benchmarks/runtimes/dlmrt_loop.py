"""dlmrt as a benchmark runtime: `dlmrt_loop.py MODEL EXECUTOR DTYPE THREADS`, requests on stdin (benchmarks/child.py).

  step CONTEXT REPEATS         seconds of one denoising step of the executor's own loop behind CONTEXT tokens
  loop HOW BLOCKS REPEATS      seconds of a request of BLOCKS blocks; HOW: whole, or stepwise (driven from Python)
  answer HOW REPEATS ID...     greedy answer through the engine with the checkpoint's own settings: ids, text, counts

A step is timed inside whole requests: one block in NUM_STEPS steps, less one block in a single step. Prefill, start and
end, which both requests share, cancel out; no timer has to run inside the loop.

Source: ours.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from child import Channel
from dlmrt.checkpoint.load import Checkpoint, open_checkpoint
from dlmrt.decode.engine import Engine, make_denoiser
from dlmrt.decode.loop import LoopRequest, decode
from dlmrt.decode.native import run_loop
from dlmrt.decode.settings import resolve
from dlmrt.decode.text import TextCodec
from dlmrt.types import Bool, DecodeConfig, Denoiser, Float32, Int32

NUM_STEPS = 16  # of the long block; CANVAS / NUM_STEPS positions are committed a step
COMMITS = 4  # positions a step of `loop`


@dataclass
class Stepwise:
    """A denoiser without its native loop: the readable loop drives it forward by forward."""

    inner: Denoiser

    def __post_init__(self) -> None:
        self.name, self.dtype = f"{self.inner.name}, stepwise", self.inner.dtype
        self.vocab_size, self.has_residual = self.inner.vocab_size, self.inner.has_residual

    def reset(self) -> None:
        """As the executor's."""
        self.inner.reset()

    @property
    def context_length(self) -> int:
        """As the executor's."""
        return self.inner.context_length

    def truncate(self, length: int) -> None:
        """As the executor's."""
        self.inner.truncate(length)

    def extend(self, ids_S: Int32) -> None:
        """As the executor's."""
        self.inner.extend(ids_S)

    def forward(self, canvas_L: Int32, residual_LD: Float32 | None, where_L: Bool | None) -> Float32:
        """As the executor's."""
        return self.inner.forward(canvas_L, residual_LD, where_L)

    def soft_embedding(self, probs_LV: Float32) -> Float32:
        """As the executor's."""
        return self.inner.soft_embedding(probs_LV)


class Runtime:
    """Handlers of the requests."""

    def __init__(self, checkpoint: Checkpoint, denoiser: Denoiser) -> None:
        assert checkpoint.config.diffusion is not None
        self.checkpoint, self.denoiser, self.diffusion = checkpoint, denoiser, checkpoint.config.diffusion
        self.ways = {"whole": denoiser, "stepwise": Stepwise(denoiser)}
        self._engines: dict[str, Engine] = {}
        self._rng = np.random.default_rng(0)

    def step(self, context: str, repeats: str) -> dict[str, Any]:
        """Mean over `repeats` pairs of requests."""
        total = 0.0
        for _ in range(int(repeats)):
            prompt = self._prompt(int(context))
            slow = self._run(self.denoiser, prompt, num_blocks=1, commits=self.diffusion.canvas_length // NUM_STEPS)
            total += slow - self._run(self.denoiser, prompt, num_blocks=1, commits=self.diffusion.canvas_length)
        return {"value": total / int(repeats) / (NUM_STEPS - 1)}

    def loop(self, how: str, context: str, num_blocks: str, repeats: str) -> dict[str, Any]:
        """Mean over `repeats` requests, after one that warms up."""
        prompt, total = self._prompt(int(context)), 0.0
        for number in range(int(repeats) + 1):
            seconds = self._run(self.ways[how], prompt, num_blocks=int(num_blocks), commits=COMMITS)
            total += seconds if number else 0.0
        return {"value": total / int(repeats)}

    def answer(self, how: str, repeats: str, *ids: str) -> dict[str, Any]:
        """Answer a prompt of token ids as a caller of the engine does."""
        engine, seconds = self._engine(how), []
        for _ in range(int(repeats)):
            began = time.perf_counter()
            result = engine.generate([int(word) for word in ids])
            seconds.append(time.perf_counter() - began)
        usage = result.usage
        return {
            "seconds": seconds, "ids": list(result.token_ids), "text": result.text,
            "num_denoise_steps": usage.num_denoise_steps, "num_commit_forwards": usage.num_commit_forwards,
            "num_blocks": usage.num_blocks, "first_block_s": usage.time_to_first_block_s,
            "ends_with_stop": result.finish_reason == "stop",
        }  # fmt: skip

    def _engine(self, how: str) -> Engine:
        if how not in self._engines:
            codec = TextCodec.from_folder(self.checkpoint.folder)
            config, generation = self.checkpoint.config, self.checkpoint.generation
            self._engines[how] = Engine(self.ways[how], config, codec, generation)
        return self._engines[how]

    def _prompt(self, length: int) -> Int32:
        """Random ids that are neither the mask nor an end."""
        config = self.checkpoint.config
        special = {self.diffusion.mask_token_id, config.pad_token_id, config.bos_token_id, *config.eos_token_ids}
        allowed = np.setdiff1d(np.arange(config.vocab_size), [i for i in special if i is not None])
        return self._rng.choice(allowed, length).astype(np.int32)

    def _run(self, denoiser: Denoiser, prompt_S: Int32, *, num_blocks: int, commits: int) -> float:
        """Seconds of a request that commits exactly `commits` positions a step, whatever the weights say."""
        config, length = self.checkpoint.config, self.diffusion.canvas_length
        settings = resolve(
            DecodeConfig(
                commit_rule="threshold", threshold=1.0, min_commit=commits, max_tokens=num_blocks * length,
                temperature=0.0, ignore_eos=True,
            ),
            config, {},
        )  # fmt: skip
        request = LoopRequest(
            prompt_S=prompt_S, settings=settings, diffusion=self.diffusion, banned=np.empty(0, dtype=np.int32),
            allowed=np.arange(config.vocab_size, dtype=np.int32),
        )  # fmt: skip
        loop = decode if isinstance(denoiser, Stepwise) else run_loop
        began = time.perf_counter()
        for _ in loop(denoiser, request):
            pass
        return time.perf_counter() - began


def main() -> None:
    """Load, warm up, serve."""
    channel = Channel()
    model, executor, dtype, num_threads = sys.argv[1:]
    checkpoint = open_checkpoint(Path(model))
    denoiser = make_denoiser(checkpoint, executor=executor, dtype=dtype, num_threads=int(num_threads))
    runtime = Runtime(checkpoint, denoiser)
    runtime.loop("whole", "64", "1", "1")
    handlers = {"step": runtime.step, "loop": runtime.loop, "answer": runtime.answer}
    channel.serve(handlers, executor=denoiser.name, dtype=denoiser.dtype)


if __name__ == "__main__":
    main()
