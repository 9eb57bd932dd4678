"""Fixtures for tests of models and checkpoints: tiny random models and the reference data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from dlmrt.models import qwen3
from dlmrt.models.config import DiffusionConfig, ModelConfig, RopeConfig

# How long an example takes is the machine's business.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

DATA = Path(__file__).parents[1] / "data"
# Larger reference checkpoints that the repository does not carry; tests that need them are skipped without.
ORACLES = Path(__file__).parents[3] / "shared" / "oracles"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of reference checkpoints."""
    return DATA


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a reference checkpoint by name; `changes` go to its config.json, in a folder of links."""

    def find(name: str, **changes: Any) -> Path:
        folder = next((root / name for root in (DATA, ORACLES) if (root / name).exists()), None)
        if folder is None:
            pytest.skip(f"the reference checkpoint {name} is not here")
        if not changes:
            return folder
        copy = tmp_path_factory.mktemp(name)
        for path in folder.iterdir():
            if path.name != "config.json":
                (copy / path.name).symlink_to(path)
        (copy / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **changes}))
        return copy

    return find


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    """Tiny ModelConfig; `diffusion` may be a dict of DiffusionConfig fields or None."""

    def make(*, diffusion: dict[str, Any] | None = {}, **changes: Any) -> ModelConfig:  # noqa: B006 never changed
        config = ModelConfig(
            architecture="Qwen3ForCausalLM", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=8, vocab_size=61, max_position_embeddings=256, rms_norm_eps=1e-6,
            rope=RopeConfig(theta=10_000.0), tie_word_embeddings=False, eos_token_ids=(1,), pad_token_id=2,
            bos_token_id=None, dtype="float32",
            diffusion=None if diffusion is None else DiffusionConfig(
                **{"canvas_length": 4, "noise": "mask", "mask_token_id": 60, **diffusion}
            ),
        )  # fmt: skip
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture(scope="session")
def make_params() -> Callable[..., dict[str, torch.Tensor]]:
    """Random weights of a config, wide enough that errors of position or mask move the logits by whole units."""

    def make(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            values = torch.randn(shape, generator=generator)
            scaled = 1 + 0.2 * values if len(shape) == 1 else values / shape[-1] ** 0.5
            return (3 * values if name == qwen3.EMBEDDING else scaled).to(getattr(torch, config.dtype))

        return {name: draw(name, shape) for name, shape in qwen3.tensor_shapes(config).items()}

    return make
