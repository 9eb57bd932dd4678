"""Read a checkpoint folder: its configuration and a checked stream of tensors.

Nothing is taken on trust: every tensor that the model needs must be there, in the right shape and a floating type, and
nothing may be left over, before the first one is handed out. A server that starts on half a download would answer, and
answer nonsense. Peak memory is what the caller keeps plus one tensor; torch is imported only by `load_params`.

Left out on purpose: `*.bin`, `*.pt` and every other pickled format, which run code when they are opened.

Source: file layout of the Hugging Face hub; generation_config precedence as in transformers 5.24.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.tensorfile import StoredTensor, read_tensors, to_float32, to_torch
from dlmrt.errors import CheckpointError, UnsupportedModelError, UsageError, nearest
from dlmrt.models import qwen3
from dlmrt.models.config import ModelConfig, check_config, load_config, read_json

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "StoredTensor", "load_params", "open_checkpoint", "to_float32", "to_torch"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened folder: configuration read, headers of all tensor files checked, no weight read yet."""

    folder: Path
    config: ModelConfig  # eos_token_ids: those of generation_config.json first, then those of config.json
    generation: dict[str, Any]  # generation_config.json, {} when there is none
    stored: Mapping[str, StoredTensor]  # every tensor of the files, by name

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, StoredTensor]]:
        """Check the files against `shapes` (name -> shape), then yield each tensor in that order.

        Raises:
            CheckpointError: a tensor is missing, left over, or has another shape or a type that is not a float.
        """
        self._check_names(shapes)
        for name, shape in shapes.items():
            tensor = self.stored[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.path}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; "
                    "config.json and weights are not of one model"
                )
            if tensor.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{tensor.path}: {name} has dtype {tensor.dtype}, supported: {', '.join(FLOAT_DTYPES)}; "
                    "convert the checkpoint to one of them"
                )
        return ((name, self.stored[name]) for name in shapes)

    def _check_names(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in shapes if name not in self.stored]
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {len(missing)} of {len(shapes)} tensors, first {missing[0]}; "
                "the download is incomplete or config.json is of another model"
            )
        for name in self.stored:
            if name in shapes:
                continue
            if name == qwen3.HEAD and self.config.tie_word_embeddings:
                self._check_tied_head()
                continue
            raise CheckpointError(
                f"{self.stored[name].path}: {name} is not a tensor of {self.config.architecture}"
                f"{nearest(name, shapes)}; remove it or correct config.json"
            )

    def _check_tied_head(self) -> None:
        """A tied checkpoint may store its head too, if it is the embedding: a different one would be ignored."""
        head, embedding = self.stored[qwen3.HEAD], self.stored[qwen3.EMBEDDING]
        if head.dtype != embedding.dtype or not np.array_equal(_bytes(head), _bytes(embedding)):
            raise CheckpointError(
                f"{head.path}: tie_word_embeddings is true, yet {qwen3.HEAD} differs from {qwen3.EMBEDDING}; "
                "set tie_word_embeddings to false in config.json, or remove the head"
            )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the JSON files and tensor headers of `folder`.

    Raises:
        CheckpointError: a file is absent or damaged, or the files contradict each other.
        UnsupportedModelError: the architecture or a declared feature is not implemented.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a folder in Hugging Face layout")
    config = load_config(folder)
    if read_json(folder / "config.json").get("quantization_config"):
        raise UnsupportedModelError(f"{folder} holds quantized weights, which are not read; use a bfloat16 one")
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    config = dataclasses.replace(config, eos_token_ids=_eos_token_ids(generation, config, folder))
    check_config(config, str(folder))
    _check_tokenizer(folder, config)
    return Checkpoint(folder=folder, config=config, generation=generation, stored=_read_folder(folder))


def load_params(checkpoint: Checkpoint, *, dtype: str = "auto") -> dict[str, torch.Tensor]:
    """Load all weights of `checkpoint` as torch tensors on the CPU.

    `dtype` is "auto" for the type that config.json declares, or "float32", "bfloat16", "float16".
    """
    import torch

    wanted = checkpoint.config.dtype if dtype == "auto" else dtype
    if wanted not in FLOAT_DTYPES:
        raise UsageError(f"dtype {wanted!r} is not a type of weights{nearest(wanted, (*FLOAT_DTYPES, 'auto'))}")
    tensors = checkpoint.tensors(qwen3.tensor_shapes(checkpoint.config))
    return {name: to_torch(tensor).to(getattr(torch, wanted)) for name, tensor in tensors}


def _eos_token_ids(generation: Mapping[str, Any], config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """Union of both files' ids, those of generation_config.json first: the ecosystem stops on them."""
    value = generation.get("eos_token_id")
    given = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in given):
        path = folder / "generation_config.json"
        raise CheckpointError(f"{path}: eos_token_id {value!r} is not an id or a list of ids")
    return tuple(dict.fromkeys((*given, *config.eos_token_ids)))


def _check_tokenizer(folder: Path, config: ModelConfig) -> None:
    """Refuse a tokenizer that can produce ids without a row in the embedding table."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    raw = read_json(path)
    vocabulary = (raw.get("model") or {}).get("vocab") or {}
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token.get("id", 0) for token in raw.get("added_tokens") or []]
    if ids and max(ids) >= config.vocab_size:
        raise CheckpointError(
            f"{path} knows the id {max(ids)}, the embedding table has {config.vocab_size} rows (vocabulary mismatch); "
            "tokenizer and weights are not of one model"
        )


def _bytes(tensor: StoredTensor) -> npt.NDArray[np.uint8]:
    return np.frombuffer(tensor.data, dtype=np.uint8)


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_FILE
    if index.exists():
        return _read_shards(folder, read_json(index).get("weight_map"), index)
    if (folder / SINGLE_FILE).exists():
        return read_tensors(folder / SINGLE_FILE)
    names = sorted(entry.name for entry in folder.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLED)]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        raise CheckpointError(f"{folder} has {shards[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}; get the index too")
    if pickled:
        raise CheckpointError(
            f"{folder} has only pickled weights ({pickled[0]}), which are never opened because they can run code; "
            f"convert them to {SINGLE_FILE}, e.g. with save_pretrained of transformers"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; the download is incomplete")


def _read_shards(folder: Path, weight_map: Any, index: Path) -> dict[str, StoredTensor]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download the file again")
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} puts {name} into {file!r}, which is not a safetensors file of this folder")
        names.setdefault(file, []).append(name)
    if SINGLE_FILE not in names and (folder / SINGLE_FILE).exists():
        raise CheckpointError(f"{folder} has {SINGLE_FILE} and an index that does not name it; remove one of them")
    stored: dict[str, StoredTensor] = {}
    for file, wanted in sorted(names.items()):
        shard = read_tensors(folder / file)
        for name in wanted:
            if name not in shard:
                raise CheckpointError(f"{folder / file} lacks {name}, which {INDEX_FILE} puts there; download it again")
        for name in shard:
            if weight_map.get(name) != file:
                raise CheckpointError(
                    f"{folder / file} holds {name}, which {INDEX_FILE} does not put there; download both again"
                )
        stored |= shard
    return stored
