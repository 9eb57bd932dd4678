"""What a run of `orl train` would need, without its weights: parameters, bytes per process, rows and cost of an update.

Tensors live on the meta device: names, shapes, what trains and what optimizers would hold are those of the run itself.
Responses are dealt and packed as the run does it. Bytes of activations are an estimate from the largest micro-batch, in
the compute type that `run.dtype` means on this machine; the rest is counted.

Left out on purpose: buffers of collectives, fragmentation, and the engines that roll out.

Source: ours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from orl.cost import CostModel, active_weights, deal
from orl.lora import lora_shapes
from orl.precision import is_bfloat16
from orl.shard import layer_of
from orl.train_recipe import TrainRecipe
from orl.tune import trains, with_new_adapter

_FLOAT = 4  # bytes; parameters, gradients and both moments of AdamW are float32
_RESIDUALS_PER_LAYER = 14  # tensors [T, D] that backward of a layer reads, the wider MLP counted by its width


def dry_run(
    config: ModelConfig, recipe: TrainRecipe, *, num_ranks: int, prompt_tokens: int, answer_tokens: int
) -> dict[str, Any]:
    """Counts for a run on `num_ranks` processes, with prompts and answers of the given lengths; JSON-ready.

    Raises:
        RecipeError: the model is no diffusion model, nothing would train, or the low rank does not fit.
    """
    tune = recipe.tune
    config = with_new_adapter(config, tune)
    trained = trains(config, tune)
    shapes = family_of(config).tensor_shapes(config)
    factors = lora_shapes(config, tune.lora_rank) if tune.what == "lora" else {}
    with torch.device("meta"):
        tensors = {name: torch.empty(shape) for name, shape in {**shapes, **factors}.items()}
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    num_trained = sum(size for name, size in sizes.items() if trained(name))
    update = _update(config, recipe, prompt_tokens, answer_tokens, num_ranks)
    layers = _by_layer(sizes)
    gathered = 2 * max(layers.values()) + sum(sizes.values()) - layers.total()
    memory = {
        "parameters": _FLOAT * sum(sizes.values()) // num_ranks,
        "start_model": _FLOAT * sum(sizes[name] for name in shapes) // num_ranks,
        "gradients": _FLOAT * num_trained // num_ranks,
        "optimizer": 2 * _FLOAT * num_trained // num_ranks,
        "gathered": _FLOAT * gathered if num_ranks > 1 else 0,  # two layers and what is outside of layers
        "activations": _activations(config, recipe, update["rows_per_micro"]),
        "logits": 3 * _FLOAT * config.vocab_size * update["loss_rows_per_micro"],
    }  # fmt: skip
    return {
        "architecture": config.architecture,
        "num_ranks": num_ranks,
        "compute_dtype": "bfloat16" if is_bfloat16(recipe.run.dtype, _device()) else "float32",
        "num_parameters": sum(sizes.values()),
        "num_trained": num_trained,
        "num_active": active_weights(config),
        "tune": tune.what,
        "update": {key: value for key, value in update.items() if key != "loss_rows_per_micro"},
        "bytes_per_rank": memory | {"total": sum(memory.values())},
    }


def _update(
    config: ModelConfig, recipe: TrainRecipe, prompt_tokens: int, answer_tokens: int, num_ranks: int
) -> dict[str, Any]:
    """Rows and operations of an update whose every prompt keeps as many answers as it may."""
    assert config.diffusion is not None
    length = config.diffusion.canvas_length
    num_blocks = math.ceil(answer_tokens / length)
    kept = recipe.keep.max_per_prompt or recipe.rollout.responses
    num_responses = recipe.prompts.per_update * min(kept, recipe.rollout.responses)
    starts = [prompt_tokens + length * block for block in range(num_blocks) for _ in range(1 + recipe.states.per_block)]
    num_clean = starts[-1]
    rows = num_clean + length * len(starts)
    cost = CostModel.of(config).response(num_clean, starts)
    dealt = deal(
        [cost] * num_responses, [num_clean] * num_responses, [len(starts)] * num_responses,
        canvas_length=length, budget=recipe.optim.rows_per_micro, num_ranks=num_ranks,
    )  # fmt: skip
    loss_rows, micro_rows = [], []  # of each micro-batch
    for shares in (shares for bins in dealt for shares in bins):
        loss_rows.append(length * sum(len(share.states) for share in shares))
        micro_rows.append(loss_rows[-1] + num_clean * len(shares))
    return {
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "num_responses": num_responses,
        "num_states": num_responses * len(starts),
        "num_rows": num_responses * rows,
        "rows_per_micro": max(micro_rows),
        "loss_rows_per_micro": max(loss_rows),
        "training_flops": 3 * num_responses * cost,
    }


def _activations(config: ModelConfig, recipe: TrainRecipe, num_rows: int) -> int:
    """Bytes that backward reads, in the compute type; with recomputed layers the inputs of all and one layer whole."""
    width = 2 if is_bfloat16(recipe.run.dtype, _device()) else 4
    moe = config.moe
    inner = config.intermediate_size
    if moe is not None:
        inner = max(inner, moe.intermediate_size * moe.num_experts_per_token + moe.shared_intermediate_size)
    one_layer = num_rows * (_RESIDUALS_PER_LAYER * config.hidden_size + 3 * inner) * width
    if recipe.tune.checkpoint_layers:
        return num_rows * config.hidden_size * config.num_layers * width + one_layer
    return config.num_layers * one_layer


def _device() -> str:
    """Where a run on this machine would compute (see `orl.ranks.joined`)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _by_layer(sizes: Mapping[str, int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for name, size in sizes.items():
        if (number := layer_of(name)) is not None:
            found[number] += size
    return found
