"""Write a checkpoint folder that this package, and for the backbone transformers, can open.

A checkpoint is replaced as a whole or not at all: everything is written and synced under a temporary name beside the
target and exchanged with it in one rename, so that a crash or a full disk leaves the previous checkpoint as it was.
A killed process leaves its hidden, unfinished ".tmp" folder there. Output depends on the arguments alone: saving what
was loaded gives the same bytes.

Left out on purpose: optimizer state and logs; a checkpoint folder holds nothing but the checkpoint.

Source: keys of config.json as in transformers 5.24.0 (Qwen3) and JetAstra/SDAR; shard names of the Hugging Face hub.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dlmrt.checkpoint.load import FLOAT_DTYPES, INDEX_FILE, SINGLE_FILE
from dlmrt.checkpoint.tensorfile import StoredTensor, encode, num_bytes, write_tensors
from dlmrt.errors import CheckpointError, UsageError, nearest
from dlmrt.models import qwen3
from dlmrt.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt",
)  # fmt: skip
_MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "SDARForCausalLM": "sdar"}


def save_checkpoint(
    folder: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor | npt.NDArray[Any] | torch.Tensor],
    *, generation: Mapping[str, Any] | None = None, tokenizer_files: Path | None = None, dtype: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:  # fmt: skip
    """Write `folder`, replacing the checkpoint that it may hold.

    Args:
        folder: made if absent, with its parents.
        config: written as config.json, with `dtype`.
        tensors: exactly the tensors of `qwen3.tensor_shapes(config)`, of any floating type.
        generation: content of generation_config.json; None writes none.
        tokenizer_files: folder whose tokenizer files are copied; None copies none.
        dtype: type of the written weights; "auto" for `config.dtype`. config.json declares what is written.
        max_shard_bytes: size above which weights are split into shards with an index.

    Raises:
        UsageError: `folder` holds files that the new checkpoint would not replace, or an argument cannot be used.
        CheckpointError: tensors do not fit `config`, or the disk refused; the previous checkpoint is unchanged.
    """
    wanted = config.dtype if dtype == "auto" else dtype
    if wanted not in FLOAT_DTYPES:
        raise UsageError(f"dtype {wanted!r} is not a type of weights{nearest(wanted, (*FLOAT_DTYPES, 'auto'))}")
    config = dataclasses.replace(config, dtype=wanted)
    shapes = _checked_shapes(config, tensors)
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            draft.chmod(0o777 & ~_umask())
            _write_json(draft / "config.json", config_to_json(config))
            if generation is not None:
                _write_json(draft / "generation_config.json", generation)
            if tokenizer_files is not None:
                _copy_tokenizer(tokenizer_files, draft)
            _write_weights(draft, shapes, wanted, tensors, max_shard_bytes)
            _sync(draft)
            _refuse_strangers(folder, draft)
            _exchange(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}; the previous checkpoint is unchanged, free space or pick another folder"
        ) from error


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of `config`; `parse_config` gives `config` back."""
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPES[config.architecture],
        "dtype": config.dtype,
        "torch_dtype": config.dtype,  # the name before transformers 4.56
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_to_json(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "use_cache": True,
    }
    if config.diffusion is not None:
        raw["canvas_length"] = raw["block_size"] = config.diffusion.canvas_length
        raw["mask_token_id"] = config.diffusion.mask_token_id
        raw["diffusion"] = dataclasses.asdict(config.diffusion)
    return raw


def _rope_to_json(config: ModelConfig) -> dict[str, Any] | None:
    """The keys that belong to the kind: a key of another kind is refused when read back."""
    kind = config.rope.kind
    keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    }[kind]
    values = {key: getattr(config.rope, key) for key in keys}
    return {"rope_type": kind, **{k: v for k, v in values.items() if v is not None}} if keys else None


def _checked_shapes(config: ModelConfig, tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = qwen3.tensor_shapes(config)
    for name in (*shapes, *tensors):
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing; pass every tensor of the model")
        if name not in shapes:
            raise CheckpointError(f"{name} is not a tensor of this model{nearest(name, shapes)}; leave it out")
        if tuple(tensors[name].shape) != shapes[name]:
            found, wanted = list(tensors[name].shape), list(shapes[name])
            raise CheckpointError(f"{name} has shape {found}, the config asks for {wanted}; pass the matching config")
    return shapes


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _copy_tokenizer(source: Path, draft: Path) -> None:
    if not (source / "tokenizer.json").exists():
        raise CheckpointError(f"{source} has no tokenizer.json; pass a folder that has one, or none at all")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, draft / name)
            _sync(draft / name)


def _write_weights(
    draft: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, tensors: Mapping[str, Any], max_shard_bytes: int
) -> None:
    shards = _split(shapes, dtype, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(draft / SINGLE_FILE, shards[0], dtype, lambda name: encode(tensors[name], dtype))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(draft / file, shard, dtype, lambda name: encode(tensors[name], dtype))
        weight_map |= dict.fromkeys(shard, file)
    total = sum(num_bytes(shape, dtype) for shape in shapes.values())
    _write_json(draft / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(shapes: Mapping[str, tuple[int, ...]], dtype: str, limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Greedy split in order; a tensor above the limit gets a shard of its own."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = num_bytes(shape, dtype)
        if shards[-1] and used + size > limit:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _refuse_strangers(folder: Path, draft: Path) -> None:
    """Replacing the folder would delete what the new checkpoint does not bring; only old weights may go."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; pick a folder")
    new = {entry.name for entry in draft.iterdir()} | {INDEX_FILE, "generation_config.json"}
    for entry in sorted(folder.iterdir()):
        is_weights = entry.name.startswith("model") and entry.name.endswith(".safetensors")
        if entry.name not in new and not is_weights:
            raise UsageError(
                f"{folder} holds {entry.name}, which saving a checkpoint there would delete; pick a folder of its own"
                + (f", or pass tokenizer_files={str(folder)!r} to keep it" if entry.name in TOKENIZER_FILES else "")
            )


def _exchange(draft: Path, folder: Path) -> None:
    """Put `draft` at `folder`; what was there ends up at `draft`."""
    if not folder.exists():
        draft.rename(folder)
    elif not _rename_exchange(draft, folder):
        # Without an exchange the path is absent for a moment: a crash in between leaves the old one under `old`.
        old = draft.with_suffix(".old")
        folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old)
    _sync(folder.parent)


def _rename_exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically; False where the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
