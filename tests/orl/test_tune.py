"""What trains: low-rank factors, fresh adapters, routers left alone; recipes of real targets, counted and on twins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode.engine import Engine
from dlmrt.models.config import ModelConfig, MoeConfig, ResidualConfig, RopeConfig, SlidingConfig, load_config
from dlmrt.models.families import family_of
from dlmrt.ops import eager as ops
from dlmrt.testing import tiny_config
from orl import precision
from orl.dry_run import dry_run
from orl.errors import RecipeError
from orl.lora import A, B, lora_targets, lora_view, merged, new_lora
from orl.packing import Share
from orl.recipe import load_recipe
from orl.replay import ReplayBatch, ReplayResponse, ReplayState, packed_logits
from orl.tasks.tokenizer import END_TOKEN, MASK_TOKEN, PAD_TOKEN
from orl.train import train
from orl.train_recipe import TrainRecipe, TuneSection
from orl.tune import trains, with_new_adapter

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
FAMILIES = ("qwen3", "llada2", "gemma")


def twin(family: str, codec=None) -> ModelConfig:
    """A model of a few thousand parameters with every trait of its family that training meets."""
    residual = ResidualConfig(kind="gated_mlp", intermediate_size=16)
    fields = {}
    if codec is not None:
        end, pad, mask = (codec.tokenizer.token_to_id(token) for token in (END_TOKEN, PAD_TOKEN, MASK_TOKEN))
        fields = {"vocab_size": codec.tokenizer.get_vocab_size(), "eos_token_ids": (end, pad), "pad_token_id": pad}
    diffusion = {} if codec is None else {"mask_token_id": mask}
    if family == "qwen3":
        return tiny_config(residual=residual, diffusion={"noise": "uniform"}, **fields)
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16)
    if family == "llada2":
        moe = MoeConfig(
            num_experts=4, num_experts_per_token=2, intermediate_size=16, shared_intermediate_size=16,
            num_dense_layers=1, num_groups=2, num_kept_groups=1, scaling_factor=2.5,
        )  # fmt: skip
        diffusion |= {"context_attention": "block_causal", "block_anchor": "position_zero"}
        return tiny_config(
            architecture="LLaDA2MoeModelLM", moe=moe, diffusion=diffusion, tie_word_embeddings=False, **fields
        )
    sliding = SlidingConfig(
        window=6, full_layers=(1,), full_head_dim=16, full_num_kv_heads=1,
        full_rope=RopeConfig(kind="proportional", partial_rotary_factor=0.25),
    )  # fmt: skip
    residual = ResidualConfig(kind="gated_mlp", intermediate_size=16, scale_embedding=True)
    return tiny_config(
        architecture="DiffusionGemmaForBlockDiffusion", moe=moe, sliding=sliding, residual=residual,
        diffusion={"noise": "uniform"}, logit_softcap=30.0, **fields,
    )  # fmt: skip


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = family_of(config).tensor_shapes(config)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator) if len(shape) == 1
        else torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }  # fmt: skip


def canvas_logits(config: ModelConfig, params) -> torch.Tensor:
    ids = torch.arange(8) + 5
    attend = ops.MaskedAttention(torch.ones(8, 8, dtype=torch.bool))
    family = family_of(config)
    return family.head(ops, params, config, family.forward(ops, params, config, ids, torch.arange(8), attend))


@pytest.mark.parametrize("name", FAMILIES)
def test_low_rank_factors_change_nothing_at_first_and_merge_exactly(name: str):
    config = twin(name)
    params = random_params(config)
    factors = new_lora(config, 3, seed=0)
    before = canvas_logits(config, params)
    assert torch.equal(canvas_logits(config, lora_view({**params, **factors}, 2.0)), before)
    for tensor_name in factors:
        factors[tensor_name] = factors[tensor_name] + 0.1 * torch.randn(factors[tensor_name].shape)
    adapted = canvas_logits(config, lora_view({**params, **factors}, 2.0))
    assert not torch.allclose(adapted, before, atol=1e-2)
    plain = merged({**params, **factors}, 2.0)
    assert plain.keys() == params.keys()
    torch.testing.assert_close(canvas_logits(config, plain), adapted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_factors_get_gradients_and_routers_are_left_alone(name: str):
    config = twin(name)
    trained = trains(config, TuneSection(what="lora"))
    params = {**random_params(config), **new_lora(config, 2, seed=0)}
    for tensor_name, tensor in params.items():
        tensor.requires_grad_(trained(tensor_name))
        if tensor_name.endswith(B):
            tensor.data.normal_()
    canvas_logits(config, lora_view(params, 1.0)).square().sum().backward()
    for target in lora_targets(config):
        assert params[target].grad is None
        assert params[target + A].grad.abs().sum() > 0, target
    full = trains(config, TuneSection(what="full"))
    assert [n for n in params if "router" in n or "mlp.gate." in n] == [
        n for n in params if ".layers." in n and not full(n)
    ]


def test_what_cannot_train_is_refused():
    with pytest.raises(RecipeError, match="the start model has no residual adapter; use 'lora' or 'full'"):
        trains(twin("llada2"), TuneSection(what="adapter"))
    with pytest.raises(RecipeError, match="has a residual adapter already; leave tune.new_adapter_width out"):
        with_new_adapter(twin("qwen3"), TuneSection(new_adapter_width=8))
    with pytest.raises(RecipeError, match="lora_rank 99 does not fit model.layers.0"):
        new_lora(twin("qwen3"), 99, seed=0)
    adapted = with_new_adapter(twin("llada2"), TuneSection(new_adapter_width=8))
    assert adapted.diffusion.residual == ResidualConfig(kind="gated_mlp", where="masked", intermediate_size=8)


def states_of(config: ModelConfig, clean: np.ndarray) -> tuple[ReplayState, ...]:
    """Two states of the first block and one of the last, with residuals where the family has the pathway."""
    rng, length = np.random.default_rng(0), config.diffusion.canvas_length
    everything = np.ones(length, dtype=bool)

    def state(start: int, *, has_residual: bool) -> ReplayState:
        z = rng.standard_normal((length, config.hidden_size)).astype(np.float32) if has_residual else None
        ids = rng.integers(5, 200, length).astype(np.int32)
        return ReplayState(
            start=start, canvas_L=ids, residual_LD=z, is_unresolved_L=everything, targets_L=ids, is_open_L=everything,
            is_gated_L=everything, is_anchored_L=~everything, own_entropy_L=None, source_entropy_L=None,
            source_entropy=None,
        )  # fmt: skip

    has_residual = family_of(config).has_residual(config)
    return (
        state(length, has_residual=False), state(length, has_residual=has_residual),
        state(len(clean), has_residual=has_residual),
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_states_have_the_logits_of_the_engine(name: str, codec, tokenizer_dir: Path, tmp_path: Path):
    """Packed states of every family, windows and expert routing included, against the eager executor one by one."""
    config = twin(name, codec)
    save_checkpoint(tmp_path / "model", config, random_params(config), tokenizer_files=tokenizer_dir)
    params = load_params(open_checkpoint(tmp_path / "model"), dtype="float32")
    clean = np.random.default_rng(1).integers(5, 200, 24).astype(np.int32)
    states = states_of(config, clean)
    response = ReplayResponse(number=0, clean_S=clean, grid=0, states=states)
    batch = ReplayBatch([response], [1.0], [Share(response=0, states=(0, 1, 2))], config)
    found = packed_logits(params, batch).detach().reshape(3, config.diffusion.canvas_length, -1).numpy()
    with Engine.load(tmp_path / "model", executor="eager", dtype="float32", num_threads=1) as engine:
        for logits, state in zip(found, states, strict=True):
            expected = engine.logits(clean[: state.start].tolist(), state.canvas_L.tolist(), state.residual_LD)
            allowed = np.isfinite(expected)
            np.testing.assert_allclose(logits[allowed], expected[allowed], rtol=1e-4, atol=1e-4)


RECIPES = {
    "llada21_mini_orl_8gpu": ("llada2.1-mini", "llada2"),
    "qwendlm_4b_orl_8gpu": ("qwen3-4b", "qwen3"),
    "diffusion_gemma_26b_orl_8gpu": ("diffusiongemma-26b-a4b", "gemma"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_real_targets_fit_eight_gpus(name: str, tmp_path: Path):
    """Counted from the released configuration; 80 GB a GPU."""
    raw = json.loads((CONFIGS / f"{RECIPES[name][0]}.json").read_text())
    if name.startswith("qwendlm"):
        raw["diffusion"] = {
            "canvas_length": 256, "noise": "uniform", "logit_shift": 0, "in_block_attention": "bidirectional",
            "context_attention": "causal", "block_anchor": "prompt_end", "commit_rule": "entropy_bound",
            "residual": {"kind": "gated_mlp", "intermediate_size": 9728},
        }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml", TrainRecipe)
    found = dry_run(load_config(tmp_path), recipe, num_ranks=8, prompt_tokens=200, answer_tokens=500)
    alone = dry_run(load_config(tmp_path), recipe, num_ranks=1, prompt_tokens=200, answer_tokens=500)
    low, high = {"llada": (16e9, 17e9), "qwend": (4e9, 4.2e9), "diffu": (25e9, 27e9)}[name[:5]]
    assert low < found["num_parameters"] < high
    assert found["num_trained"] == found["num_parameters"] or found["num_trained"] < 0.03 * found["num_parameters"]
    assert found["bytes_per_rank"]["total"] < 80e9
    assert found["bytes_per_rank"]["parameters"] == alone["bytes_per_rank"]["parameters"] // 8
    assert found["update"]["num_responses"] == 128
    assert found["compute_dtype"] == "bfloat16"


def test_dry_run_counts_the_largest_micro_batch_of_the_run(monkeypatch):
    """Several responses share one; by hand: 2 blocks of 8 behind 10 tokens, 3 states each, so 18 clean rows and 48."""
    config = twin("qwen3")
    assert config.diffusion.canvas_length == 8

    def counted(rows: int, dtype: str = "auto", *, num_ranks: int = 1) -> dict[str, Any]:
        recipe = load_recipe(ROOT / "recipes" / "orl_tiny.toml", TrainRecipe, [
            "states.per_block=2", "prompts.per_update=2", "rollout.responses=2", f"optim.rows_per_micro={rows}",
            f"run.dtype={dtype}",
        ])  # fmt: skip
        return dry_run(config, recipe, num_ranks=num_ranks, prompt_tokens=10, answer_tokens=16)

    per_row = 3 * 4 * config.vocab_size
    for rows, num_ranks, in_micro, with_loss in ((66, 1, 66, 48), (140, 1, 132, 96), (999, 1, 264, 192),
                                                (999, 4, 66, 48), (20, 1, 26, 8)):  # fmt: skip
        found = counted(rows, num_ranks=num_ranks)
        assert found["update"]["rows_per_micro"] == in_micro
        assert found["bytes_per_rank"]["logits"] == per_row * with_loss
    for has_bfloat16 in (False, True):
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device, found=has_bfloat16: found)
        auto, given = counted(140), counted(140, "bfloat16" if has_bfloat16 else "float32")
        assert auto["bytes_per_rank"] == given["bytes_per_rank"]
        assert auto["compute_dtype"] == given["compute_dtype"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_real_targets_run_on_a_twin(name: str, codec, tokenizer_dir: Path, tmp_path: Path):
    """Two updates from gold answers on the CPU: what should train moves, what should not is untouched bit for bit."""
    config = twin(RECIPES[name][1], codec)
    start = random_params(config)
    save_checkpoint(tmp_path / "start", config, start, dtype="float32", tokenizer_files=tokenizer_dir)
    evaluations = "max_tokens=4" if config.diffusion.noise == "mask" else "max_tokens=4,max_denoising_steps=2"
    changes = [
        f"run.init={tmp_path / 'start'}", "run.num_threads=1", "run.dtype=float32", "optim.updates=2",
        "optim.warmup_updates=0", "optim.lr=1e-3", "prompts.tasks=['spell_backward']", "prompts.per_update=1",
        "rollout.source=gold", "rollout.executor=eager", "keep.max_per_prompt=1", "states.per_block=1",
        "eval.problems=1", "eval.every_updates=2", f"eval.settings=['{evaluations}']",
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml", TrainRecipe, changes)
    if recipe.tune.what == "lora":
        changes.append("tune.lora_rank=2")
    if recipe.tune.new_adapter_width:
        changes.append("tune.new_adapter_width=8")
    train(load_recipe(ROOT / "recipes" / f"{name}.toml", TrainRecipe, changes), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert all(math.isfinite(line["loss"]) and "skipped" not in line for line in lines if "loss" in line)
    after = load_params(open_checkpoint(tmp_path / "run" / "model"), dtype="float32")
    assert set(start) <= set(after)
    for router in (n for n in start if "router" in n or "mlp.gate." in n):
        torch.testing.assert_close(after[router], start[router])
    for target in lora_targets(config):
        assert not torch.equal(after[target], start[target]), target
