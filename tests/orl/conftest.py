"""Tiny parts of a training run, and a command line that starts one in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orl.packing import Example, Noise
from orl.recipe import DataSection, ModelSection, ObjectiveSection, OptimSection, PretrainRecipe, RunSection

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 ids, trained on a few problems."""
    from orl.data import prepare_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    prepare_tokenizer(DataSection(tasks=("chain_sum", "spell_backward"), vocab_size=300, tokenizer_problems=40), folder)
    return folder


@pytest.fixture(scope="session")
def codec(tokenizer_dir: Path) -> Any:
    """Its codec."""
    from dlmrt.decode.text import TextCodec

    return TextCodec.from_folder(tokenizer_dir)


@pytest.fixture(scope="session")
def make_recipe(tokenizer_dir: Path) -> Callable[..., PretrainRecipe]:
    """A recipe of a few seconds: 10 steps of a model of 20 K parameters. Keyword: section -> changed fields."""

    def make(
        *, model: dict[str, Any] = {}, data: dict[str, Any] = {}, objective: dict[str, Any] = {},  # noqa: B006
        optim: dict[str, Any] = {}, run: dict[str, Any] = {},  # noqa: B006 never changed
    ) -> PretrainRecipe:  # fmt: skip
        return PretrainRecipe(
            model=ModelSection(**{
                "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
                "head_dim": 8, "canvas_length": 8, "residual_intermediate_size": 16, "max_position_embeddings": 512,
                **model,
            }),
            data=DataSection(**{
                "tasks": ("chain_sum", "spell_backward"), "tokenizer": str(tokenizer_dir), "pack_tokens": 384,
                "pool_problems": 24, **data,
            }),
            objective=ObjectiveSection(**objective),
            optim=OptimSection(**{"steps": 10, "bins_per_step": 4, "bins_per_micro": 2, "warmup_steps": 3, **optim}),
            run=RunSection(**{"dtype": "float32", "num_threads": 1, **run}),
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def make_model(codec: Any) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Config of a recipe and random weights, wide enough that an error of mask or position moves the loss visibly."""
    import torch

    from dlmrt.models import qwen3
    from orl.start import model_config

    def make(recipe: PretrainRecipe) -> tuple[Any, dict[str, Any]]:
        config = model_config(recipe, codec)
        generator = torch.Generator().manual_seed(1)
        params = {}
        for name, shape in qwen3.tensor_shapes(config).items():
            values = torch.randn(shape, generator=generator)
            params[name] = 1 + 0.2 * values if len(shape) == 1 else values / shape[-1] ** 0.5
            params[name].requires_grad_(True)
        return config, params

    return make


@pytest.fixture(scope="session")
def make_examples() -> Callable[..., list[Example]]:
    """Problems of random ids within 4..298 and ragged lengths."""

    def make(num: int, *, seed: int = 0, vocab_size: int = 299) -> list[Example]:
        rng = np.random.default_rng(seed)

        def ids(low: int, high: int) -> tuple[int, ...]:
            return tuple(rng.integers(4, vocab_size, size=int(rng.integers(low, high))).tolist())

        return [Example(number=n, prompt_ids=ids(2, 12), response_ids=(*ids(0, 20), 2)) for n in range(num)]

    return make


@pytest.fixture(scope="session")
def tiny_noise() -> Noise:
    """Canvas 8, mask id 3, padding 0, text ids 4..298."""
    return Noise(canvas_length=8, mask_token_id=3, pad_token_id=0, random_ids=np.arange(4, 299, dtype=np.int32))


@pytest.fixture(scope="session")
def start_python() -> Callable[..., subprocess.Popen[str]]:
    """Start `python *arguments` on one thread with the sources importable."""

    def start(*arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DLMRT_")}
        environment |= {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
            env=environment,
        )  # fmt: skip

    return start


@pytest.fixture(scope="session")
def run_orl(start_python: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """Run `orl *arguments` to its end -> (exit status, stdout, stderr)."""

    def run(*arguments: object, cwd: Path | None = None) -> tuple[int, str, str]:
        process = start_python("-m", "orl", *map(str, arguments), cwd=cwd)
        stdout, stderr = process.communicate(timeout=100)
        return process.returncode, stdout, stderr

    return run


@pytest.fixture
def orl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run `orl *arguments` in this process -> (exit status, stdout, stderr)."""

    from dlmrt.cli import run_app
    from orl.cli import app

    def run(*arguments: object, cwd: Path | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["orl", *map(str, arguments)])
        if cwd is not None:
            monkeypatch.chdir(cwd)
        capsys.readouterr()
        status = run_app(app, "orl")
        return status, *capsys.readouterr()

    return run
