"""Fixtures for tests of models and checkpoints: tiny random models and the reference data."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from dlmrt.checkpoint.load import Checkpoint, open_checkpoint
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


@pytest.fixture(scope="session")
def live_diffusion_gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint]:
    """transformers' DiffusionGemma with random weights, also of the layers' scalars, and its saved files opened."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text = {
        "vocab_size": 199, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2,
        "sliding_window": 12, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 24,
        "max_position_embeddings": 512, "use_bidirectional_attention": "vision", "final_logit_softcapping": 20.0,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    }  # fmt: skip
    config = DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=8, attn_implementation="eager")
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "vision" in name or not tensor.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
                continue
            values = torch.randn(tensor.shape, generator=generator)
            # Through a strong residual, errors of rounding grow tenfold a step.
            scale = 0.1 if name.endswith("self_conditioning.down_proj.weight") else 1.0
            tensor.copy_(1 + 0.2 * values if tensor.ndim == 1 else scale * values / tensor.shape[-1] ** 0.5)
    folder = tmp_path_factory.mktemp("live")
    model.save_pretrained(folder)
    return model, open_checkpoint(folder)
