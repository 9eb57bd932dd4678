"""The loop over reference checkpoints: requests that ban nothing, as the references do, and all of their events."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dlmrt.decode import native
from dlmrt.decode.loop import BlockEvent, GivenDraws, LoopRequest, PrefillEvent, StepEvent
from dlmrt.decode.settings import resolve
from dlmrt.models.config import ModelConfig
from dlmrt.types import DecodeConfig, Denoiser, ForwardRecord


@dataclass
class Run:
    """What the loop said about one request."""

    answer: list[int] = field(default_factory=list)
    steps: list[StepEvent] = field(default_factory=list)
    forwards: list[ForwardRecord] = field(default_factory=list)
    blocks: list[BlockEvent] = field(default_factory=list)

    @property
    def steps_per_block(self) -> list[int]:
        return [sum(step.state.block_idx == block.block_idx for step in self.steps) for block in self.blocks]

    @property
    def trace(self) -> list[list[int]]:
        """Canvases that the denoising forwards saw."""
        return [step.state.canvas_L.tolist() for step in self.steps]


@pytest.fixture(params=["eager", "cpu"] if importlib.util.find_spec("dlmrt.cpu._native") else ["eager"])
def executor(request: pytest.FixtureRequest) -> str:
    """Name of an executor; without the native module there is one."""
    return str(request.param)


@pytest.fixture(scope="session")
def run_loop() -> Callable[..., Run]:
    """Decode `prompt`, natively where the executor can.

    `fields` are of DecodeConfig, `generation` is a generation_config.json, `given` replaces random draws.
    """

    def run(
        denoiser: Denoiser,
        config: ModelConfig,
        prompt: list[int],
        generation: dict[str, Any] | None = None,
        given: GivenDraws | None = None,
        **fields: Any,
    ) -> Run:
        assert config.diffusion is not None
        request = LoopRequest(
            prompt_S=np.array(prompt, dtype=np.int32),
            settings=resolve(DecodeConfig(**fields), config, generation or {}), diffusion=config.diffusion,
            banned=np.array([], dtype=np.int32),
            allowed=np.arange(config.vocab_size, dtype=np.int32), given=given,
        )  # fmt: skip
        result = Run()
        for event in native.run_loop(denoiser, request):
            match event:
                case StepEvent():
                    result.steps.append(event)
                case BlockEvent():
                    result.answer += event.answer
                    result.forwards += event.forwards
                    result.blocks.append(event)
                case PrefillEvent():
                    result.forwards += event.forwards
        return result

    return run
