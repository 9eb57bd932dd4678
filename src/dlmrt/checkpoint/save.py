"""Write a checkpoint folder that this package, and for the backbone transformers, can open.

Output depends on the arguments alone: saving what was loaded gives the same bytes. The folder is replaced as a whole or
not at all (`dlmrt.checkpoint.folder`). Tensors are written as the family's released files name them: experts one by one
or joined.

Left out on purpose: optimizer state and logs; a checkpoint folder holds nothing but the checkpoint.

Source: tensor names as in transformers 5.24.0 and ZHZisZZ/dllm ca17675 (LLaDA2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.config_json import config_to_json
from dlmrt.checkpoint.folder import MAX_SHARD_BYTES, TOKENIZER_FILES, write_folder
from dlmrt.checkpoint.load import FLOAT_DTYPES
from dlmrt.checkpoint.tensorfile import FileTensor, StoredTensor, encode
from dlmrt.errors import CheckpointError, UsageError, nearest
from dlmrt.models.config import ModelConfig
from dlmrt.models.families import family_of
from dlmrt.models.layers import FileName, file_names

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_SHARD_BYTES", "TOKENIZER_FILES", "config_to_json", "save_checkpoint"]


def save_checkpoint(
    folder: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor | npt.NDArray[Any] | torch.Tensor],
    *, generation: Mapping[str, Any] | None = None, tokenizer_files: Path | None = None, dtype: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:  # fmt: skip
    """Write `folder`, replacing the checkpoint that it may hold.

    Args:
        folder: made if absent, with its parents.
        config: written as config.json, with `dtype`.
        tensors: exactly the tensors of the family's `tensor_shapes(config)`, of any floating type.
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
    documents: dict[str, Mapping[str, Any]] = {} if generation is None else {"generation_config.json": generation}
    documents["config.json"] = config_to_json(config)
    kept = family_of(config).FLOAT32

    def values(name: str, index: int | None) -> Any:
        whole = tensors[name]
        if index is None:
            return whole
        return whole.item(index) if isinstance(whole, StoredTensor) else whole[index]

    files = {
        file.name: plain_tensor(file, shapes, values, "float32" if file.name.endswith(kept) else wanted)
        for file in file_names(shapes, joins=family_of(config).JOINS_EXPERTS)
    }
    write_folder(folder, documents, files, tokenizer_files=tokenizer_files, max_shard_bytes=max_shard_bytes)


def plain_tensor(
    file: FileName, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str, int | None], Any], dtype: str
) -> FileTensor:
    """One tensor of a plain file in `dtype`; `values` gives a tensor of the model, or one index of its first axis."""
    first, *others = file.sources
    shape = shapes[first]
    if file.index is not None:
        return FileTensor(dtype=dtype, shape=shape[1:], bits=lambda: encode(values(first, file.index), dtype))
    if not others:
        return FileTensor(dtype=dtype, shape=shape, bits=lambda: encode(values(first, None), dtype))
    joined = (*shape[:-2], sum(shapes[name][-2] for name in file.sources), shape[-1])

    def join() -> npt.NDArray[Any]:
        return np.concatenate([encode(values(name, None), dtype) for name in file.sources], axis=-2)

    return FileTensor(dtype=dtype, shape=joined, bits=join)


def _checked_shapes(config: ModelConfig, tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = family_of(config).tensor_shapes(config)
    for name in (*shapes, *tensors):
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is missing; pass every tensor of the model")
        if name not in shapes:
            raise CheckpointError(f"{name} is not a tensor of this model{nearest(name, shapes)}; leave it out")
        if tuple(tensors[name].shape) != shapes[name]:
            found, wanted = list(tensors[name].shape), list(shapes[name])
            raise CheckpointError(f"{name} has shape {found}, the config asks for {wanted}; pass the matching config")
    return shapes
