"""Where a run begins: tokenizer, configuration and first parameters, fresh or from a checkpoint.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.decode.sampling import banned_ids
from dlmrt.decode.text import TextCodec
from dlmrt.models import qwen3
from dlmrt.models.config import AUTOREGRESSIVE, DiffusionConfig, ModelConfig, ResidualConfig, RopeConfig, check_config
from dlmrt.models.families import family_of
from orl.data import prepare_tokenizer
from orl.errors import RecipeError, RunFolderError
from orl.packing import Noise
from orl.recipe import PretrainRecipe
from orl.tasks.tokenizer import END_TOKEN, MASK_TOKEN, PAD_TOKEN

Params = dict[str, Tensor]


def open_tokenizer(recipe: PretrainRecipe, folder: Path) -> TextCodec:
    """The run's tokenizer, kept in `folder`: of `run.init`, of `data.tokenizer`, or trained on the tasks."""
    source = recipe.run.init or recipe.data.tokenizer
    if not folder.exists():
        prepare_tokenizer(recipe.data, folder, source=resolve(source) if source else None)
    return TextCodec.from_folder(folder)


def model_config(recipe: PretrainRecipe, codec: TextCodec) -> ModelConfig:
    """The ModelConfig that a recipe's model and objective sections describe, with ids of the run's tokenizer.

    Raises:
        RecipeError: the tokenizer lacks a token that training needs.
        CheckpointError: sizes that contradict each other, or a mask token that has another meaning already.
    """
    shape, kind = recipe.model, recipe.objective.kind

    def token_id(token: str) -> int:
        found = codec.tokenizer.token_to_id(token)
        if found is None:
            raise RecipeError(f'the tokenizer has no {token!r}; train one (data.tokenizer = ""), or add the token')
        return int(found)

    diffusion = AUTOREGRESSIVE
    if kind != "ar":
        width = shape.residual_intermediate_size
        diffusion = DiffusionConfig(
            canvas_length=shape.canvas_length,
            noise=kind,
            mask_token_id=token_id(MASK_TOKEN) if kind == "mask" else None,
            logit_shift=shape.logit_shift,
            residual=ResidualConfig(kind="gated_mlp" if width else "none", intermediate_size=width),
            commit_rule="threshold" if kind == "mask" else "entropy_bound",
        )
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=codec.tokenizer.get_vocab_size(),
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=shape.rope_theta),
        tie_word_embeddings=True,
        eos_token_ids=(token_id(END_TOKEN), token_id(PAD_TOKEN)),  # padding fills canvases right of the end
        pad_token_id=token_id(PAD_TOKEN),
        bos_token_id=None,
        dtype="bfloat16",
        diffusion=diffusion,
    )
    check_config(config, "the recipe's model section")
    return config


def init_params(config: ModelConfig, seed: int) -> Params:
    """Fresh fp32 parameters: norms 1, embedding N(0, 0.02), matrices N(0, 0.4/fan_in), outputs of layers smaller.

    The adapter's last matrix is 0, so a model without a trained pathway is unchanged by it.
    """
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in qwen3.tensor_shapes(config).items():
        if len(shape) == 1:
            params[name] = torch.ones(shape)
        elif name == f"{qwen3.ADAPTER}down_proj.weight":
            params[name] = torch.zeros(shape)
        else:
            std = 0.02 if name == qwen3.EMBEDDING else math.sqrt(0.4 / shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * config.num_layers)
            params[name] = torch.randn(shape, generator=generator) * std
    return params


def load_init(params: Params, config: ModelConfig, name: str) -> None:
    """Overwrite `params` by those of checkpoint `name`; tensors that it lacks (a new adapter) stay fresh.

    Raises:
        RecipeError: the checkpoint has another shape than `config`, or tensors that the model would drop.
    """
    checkpoint = open_checkpoint(resolve(name))
    theirs, ours = (asdict(replace(c, diffusion=None)) for c in (checkpoint.config, config))
    if changed := [f"{key} {theirs[key]} against {ours[key]}" for key in ours if theirs[key] != ours[key]]:
        raise RecipeError(f"run.init {name} differs from the model section: {', '.join(changed)}; make them equal")
    for tensor_name, tensor in load_params(checkpoint, dtype="float32").items():
        if tensor_name not in params or params[tensor_name].shape != tensor.shape:
            raise RecipeError(
                f"run.init {name} has {tensor_name} {list(tensor.shape)}, which the recipe's model has no place for; "
                "set model.residual_intermediate_size to the checkpoint's"
            )
        params[tensor_name] = tensor.clone()


def restore_params(params: Params, tensors: Mapping[str, Tensor], states: Path) -> None:
    """Overwrite `params` by the tensors ``param.<name>`` of a saved state.

    Raises:
        RunFolderError: the state is of a model with other tensors.
    """
    saved = {name.removeprefix("param.") for name in tensors if name.startswith("param.")}
    for name in {**params, **dict.fromkeys(saved)}:
        found, wanted = tensors.get(f"param.{name}"), params.get(name)
        if found is None or wanted is None or found.shape != wanted.shape:
            raise RunFolderError(f"the state in {states} is of another model ({name} differs); take another --run-dir")
        with torch.no_grad():
            wanted.copy_(found)


def stop_id_of(config: ModelConfig, codec: TextCodec) -> int:
    """The token that ends a gold answer: the family's own, the chat template's where it is an EOS id, or an EOS id.

    Raises:
        RecipeError: no token ends answers of this model.
    """
    end, eos = codec.tokenizer.token_to_id(END_TOKEN), config.eos_token_ids
    family = [codec.tokenizer.token_to_id(token) for token in family_of(config).STOP_TOKENS]
    for found in (*family, end if end in eos else None, *eos):
        if found is not None:
            return int(found)
    raise RecipeError("run.init names no EOS token, so gold answers cannot end; add eos_token_id to its config.json")


def noise_of(config: ModelConfig, codec: TextCodec) -> Noise:
    """Noise of this model: uniform ids are those that its decoder draws.

    Raises:
        RecipeError: the model has no padding id, which fills the last block of a gold answer.
    """
    if config.pad_token_id is None:
        raise RecipeError("run.init has no padding id to fill blocks of gold answers; add pad_token_id to config.json")
    diffusion = config.diffusion
    return Noise(
        canvas_length=diffusion.canvas_length if diffusion else 1,
        mask_token_id=diffusion.mask_token_id if diffusion else None,
        pad_token_id=config.pad_token_id,
        logit_shift=diffusion.logit_shift if diffusion else 0,
        random_ids=np.setdiff1d(np.arange(config.vocab_size), banned_ids(config, codec.known_ids)).astype(np.int32),
        is_grid_at_zero=diffusion is not None and diffusion.block_anchor == "position_zero",
    )
