"""Read a checkpoint folder: its configuration and a checked stream of tensors.

Nothing is taken on trust: every tensor that the model needs must be there, in the right shape and a known format, and
nothing may be left over, before the first one is handed out. A server that starts on half a download would answer, and
answer nonsense. Peak memory is what the caller keeps plus one tensor; torch is imported only by `load_params`.

Left out on purpose: `*.bin`, `*.pt` and every other pickled format, which run code when they are opened.

Source: file layout of the Hugging Face hub; generation_config precedence as in transformers 5.24.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmrt.checkpoint.assemble import ModelWeight, assemble, is_same
from dlmrt.checkpoint.cut import Cut
from dlmrt.checkpoint.formats import FLOATS, StoredWeight, collect, quantization_metadata
from dlmrt.checkpoint.tensorfile import StoredTensor, read_tensors, to_float32, to_torch
from dlmrt.errors import CheckpointError, UsageError, nearest
from dlmrt.models.config import ModelConfig, check_config, load_config, read_json
from dlmrt.models.families import family_of
from dlmrt.models.typed import section_of

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "StoredTensor", "load_params", "open_checkpoint", "to_float32", "to_torch"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = FLOATS
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened folder: configuration read, headers of all tensor files checked, no weight read yet."""

    folder: Path
    config: ModelConfig  # eos_token_ids: those of generation_config.json first, then those of config.json
    generation: dict[str, Any]  # generation_config.json, {} when there is none
    stored: Mapping[str, StoredTensor]  # every tensor of the files, by name
    quantization: dict[str, Any] = field(default_factory=dict)  # the declared format; {} when there is none

    def weights(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, ModelWeight]:
        """Check the files against `shapes` (name -> shape, None: those of the config) and find each tensor's values.

        Raises:
            CheckpointError: a tensor is missing, left over, or has another shape or a type that is not a float.
        """
        family = family_of(self.config)
        stored = collect(self.stored, self.quantization)
        if self.config.tie_word_embeddings and family.HEAD in stored:
            self._check_tied_head(stored.pop(family.HEAD), stored.get(family.EMBEDDING))
        return assemble(
            stored, family.tensor_shapes(self.config) if shapes is None else shapes, family.RENAMES, folder=self.folder,
            architecture=self.config.architecture,
        )  # fmt: skip

    def tensors(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Iterator[tuple[str, StoredTensor]]:
        """As `weights`, then yield each tensor in that order, dequantised and whole; one at a time is in memory."""
        weights = self.weights(shapes)
        return ((name, weight.stored()) for name, weight in weights.items())

    def _check_tied_head(self, head: StoredWeight, embedding: StoredWeight | None) -> None:
        """A tied checkpoint may store its head too, if it is the embedding: a different one would be ignored."""
        if embedding is not None and not is_same(head, embedding):
            raise CheckpointError(
                f"{self.folder}: tie_word_embeddings is true, yet {head.name} differs from {embedding.name}; "
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
    raw, generation, hf_quant = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("config.json", "generation_config.json", "hf_quant_config.json")
    )
    quantization = quantization_metadata(raw, hf_quant, str(folder))
    config = dataclasses.replace(config, eos_token_ids=_eos_token_ids(generation, config, folder))
    check_config(config, str(folder))
    _check_tokenizer(folder, config)
    return Checkpoint(
        folder=folder, config=config, generation=generation, stored=_read_folder(folder), quantization=quantization
    )


def load_params(
    checkpoint: Checkpoint, *, dtype: str = "auto", cuts: Mapping[str, Cut] | None = None
) -> dict[str, torch.Tensor]:
    """Load the weights of `checkpoint` as torch tensors on the CPU, dequantised.

    Args:
        dtype: "auto" for the type that config.json declares, or "float32", "bfloat16", "float16". A few tensors that
            the family keeps in float32 stay so.
        cuts: what to read of the tensors that are not wanted whole, by name; None: all of everything.
    """
    import torch

    wanted = checkpoint.config.dtype if dtype == "auto" else dtype
    if wanted not in FLOAT_DTYPES:
        raise UsageError(f"dtype {wanted!r} is not a type of weights{nearest(wanted, (*FLOAT_DTYPES, 'auto'))}")
    kept = family_of(checkpoint.config).FLOAT32
    return {
        name: weight.to_torch(
            torch.float32 if name.endswith(kept) else getattr(torch, wanted), None if cuts is None else cuts.get(name)
        )
        for name, weight in checkpoint.weights().items()
    }


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
    ids = _tokenizer_ids(read_json(path), str(path))
    if ids and max(ids) >= config.vocab_size:
        raise CheckpointError(
            f"{path} knows the id {max(ids)}, the embedding table has {config.vocab_size} rows (vocabulary mismatch); "
            "tokenizer and weights are not of one model"
        )


def _tokenizer_ids(raw: Mapping[str, Any], source: str) -> list[int]:
    """All ids of a tokenizer.json: of its vocabulary, a list or a mapping, and of its added tokens."""
    vocabulary = section_of(raw, "model", source).get("vocab") or {}
    added = raw.get("added_tokens") or []
    if isinstance(vocabulary, dict | list) and isinstance(added, list):
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token.get("id") if isinstance(token, dict) else None for token in added]
        if all(type(token) is int and token >= 0 for token in ids):
            return ids
    raise CheckpointError(f"{source} holds tokens without an id; download the file again")


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
