"""Residual adapters apart from their base: a folder with a few tensors and what they fit, laid over a checkpoint.

On-Policy Residual Learning trains the pathway that carries one step's prediction into the next. Its adapter is small
beside the model (`Family.adapter_shapes`), so it can be kept and given away alone:

    adapter.json         format and version, the base it was trained on, the `residual` section of its config.json
    model.safetensors    the adapter's tensors, by their names in the model

The base is known by its shape and by a digest of its input embedding, the table that the residual is made of: a base in
another type of weights, or with quantised layers, keeps the digest, another model does not. An adapter replaces the one
that the base may hold. `merge_adapter` writes both as one ordinary checkpoint, with every tensor of the base as it is
stored; it computes exactly what the two apart do.

Source: ours; the pathway is ORL's e_i = E[x_i] + alpha * g(z_i) (arXiv 2610.20687).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dlmrt.checkpoint.folder import write_folder
from dlmrt.checkpoint.load import FLOAT_DTYPES, SINGLE_FILE, Checkpoint
from dlmrt.checkpoint.tensorfile import FileTensor, StoredTensor, encode, read_tensors, to_float32
from dlmrt.errors import CheckpointError, UsageError, nearest
from dlmrt.models.config import ModelConfig, ResidualConfig, check_config, read_json
from dlmrt.models.families import family_of
from dlmrt.models.typed import build, section_of, shown

if TYPE_CHECKING:
    import torch

ADAPTER_FILE = "adapter.json"
FORMAT, VERSION = "dlmrt-residual-adapter", 1
_SAMPLED_ROWS = 256  # of the embedding, evenly spaced, that the digest is of


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An opened adapter folder, not yet compared with a base."""

    folder: Path
    base: Mapping[str, Any]  # architecture, hidden_size, vocab_size, embedding_sha256
    residual: ResidualConfig
    stored: Mapping[str, StoredTensor]


def save_adapter(
    folder: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor | npt.NDArray[Any] | torch.Tensor],
    *, base: Checkpoint, dtype: str = "auto",
) -> None:  # fmt: skip
    """Write the adapter among `tensors` to `folder`, replacing the adapter that it may hold.

    Args:
        config: of the trained model; its `diffusion.residual` is written.
        tensors: of the trained model; those that are not the adapter's are left alone.
        base: what the adapter is to be laid over.
        dtype: of the written tensors; "auto" for `config.dtype`.

    Raises:
        UsageError: the model has no residual pathway, or `folder` holds something else.
        CheckpointError: a tensor of the adapter is missing or has another shape, or the disk refused.
    """
    wanted = config.dtype if dtype == "auto" else dtype
    if wanted not in FLOAT_DTYPES:
        raise UsageError(f"dtype {wanted!r} is not a type of weights{nearest(wanted, (*FLOAT_DTYPES, 'auto'))}")
    if config.diffusion is None or config.diffusion.residual.kind == "none":
        raise UsageError("the model has no residual pathway (diffusion.residual.kind is 'none'), hence no adapter")
    shapes = family_of(config).adapter_shapes(config)
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = f"has shape {list(tensors[name].shape)}" if name in tensors else "is missing"
            raise CheckpointError(
                f"{name} {found}, the config asks for {list(shape)}; pass the trained model's tensors"
            )
    document = {
        "format": FORMAT, "version": VERSION, "base": identity(base),
        "residual": dataclasses.asdict(config.diffusion.residual),
    }  # fmt: skip
    files = {
        name: FileTensor(dtype=wanted, shape=shape, bits=lambda name=name: encode(tensors[name], wanted))  # type: ignore[misc]
        for name, shape in shapes.items()
    }
    write_folder(folder, {ADAPTER_FILE: document}, files)


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter folder.

    Raises:
        CheckpointError: a file is absent or damaged, or of a version that this program does not know.
    """
    path = folder / ADAPTER_FILE
    if not path.exists():
        way = "it is a whole checkpoint, load it as the model" if (folder / "config.json").exists() else "give a folder"
        raise CheckpointError(f"{folder} has no {ADAPTER_FILE}, so it is no adapter; {way}")
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is {shown(raw.get('format'))}, not {FORMAT!r}; get the adapter again")
    if type(raw.get("version")) is not int or raw["version"] != VERSION:
        raise CheckpointError(
            f"{path}: version {shown(raw.get('version'))} is not known, only {VERSION}; update dlmrt, or save it again"
        )
    unknown = set(raw) - {"format", "version", "base", "residual"}
    if unknown:
        raise CheckpointError(f"{path}: unknown key {min(unknown)!r}; update dlmrt, or save it again")
    residual = build(ResidualConfig, section_of(raw, "residual", str(path)), str(path), section="residual")
    if residual.kind == "none":
        raise CheckpointError(f"{path}: residual.kind is 'none': there is nothing to lay over a model")
    return Adapter(
        folder=folder, base=section_of(raw, "base", str(path)), residual=residual,
        stored=read_tensors(folder / SINGLE_FILE),
    )  # fmt: skip


def with_adapter(checkpoint: Checkpoint, adapter: Adapter) -> Checkpoint:
    """`checkpoint` with the tensors and the residual settings of `adapter`; no file is changed.

    Raises:
        CheckpointError: the adapter was trained on another base, or its tensors do not fit its own settings.
    """
    config = checkpoint.config
    if config.diffusion is None:
        raise CheckpointError(f"{checkpoint.folder} is an auto-regressive model; an adapter needs a diffusion model")
    for key, value in identity(checkpoint).items():
        if adapter.base.get(key) != value:
            raise CheckpointError(
                f"the adapter {adapter.folder} was trained on another base than {checkpoint.folder}: {key} "
                f"{shown(adapter.base.get(key))} against {shown(value)}; use its own base"
            )
    config = dataclasses.replace(config, diffusion=dataclasses.replace(config.diffusion, residual=adapter.residual))
    check_config(config, str(adapter.folder / ADAPTER_FILE))
    shapes = family_of(config).adapter_shapes(config)
    for name in (*shapes, *adapter.stored):
        if name not in adapter.stored:
            raise CheckpointError(f"{adapter.folder} lacks {name}; get the adapter again")
        if name not in shapes:
            raise CheckpointError(
                f"{adapter.folder} holds {name}, which is no tensor of a {config.architecture} adapter"
            )
        if adapter.stored[name].shape != shapes[name]:
            found, wanted = list(adapter.stored[name].shape), list(shapes[name])
            raise CheckpointError(f"{adapter.folder}: {name} has shape {found}, its settings ask for {wanted}")
    return dataclasses.replace(checkpoint, config=config, stored={**_bare(checkpoint), **adapter.stored})


def merge_adapter(folder: Path, checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Write `checkpoint` with `adapter` in it to `folder`; tensors stay as they are stored, quantised ones too.

    Raises:
        CheckpointError: the two do not fit, or the disk refused.
        UsageError: `folder` holds files that the new checkpoint would not replace.
    """
    merged = with_adapter(checkpoint, adapter)
    names = ("config.json", "generation_config.json", "hf_quant_config.json")
    documents = {name: read_json(checkpoint.folder / name) for name in names if (checkpoint.folder / name).exists()}
    config = documents["config.json"]
    section = section_of(config, "diffusion", str(checkpoint.folder))
    documents["config.json"] = {
        **config, "diffusion": {**section, "residual": dataclasses.asdict(adapter.residual)},
    }  # fmt: skip
    files = {
        name: FileTensor(dtype=tensor.dtype, shape=tensor.shape, bits=tensor.raw)
        for name, tensor in merged.stored.items()
    }
    has_tokenizer = (checkpoint.folder / "tokenizer.json").exists()
    write_folder(folder, documents, files, tokenizer_files=checkpoint.folder if has_tokenizer else None)


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a base is known by."""
    config = checkpoint.config
    return {
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "embedding_sha256": _embedding_digest(checkpoint),
    }


def _embedding_digest(checkpoint: Checkpoint) -> str:
    """Of evenly spaced rows in float32, so that a copy in a wider type has the same."""
    table = checkpoint.weights()[family_of(checkpoint.config).EMBEDDING].stored()
    rows = np.linspace(0, table.shape[0] - 1, num=min(_SAMPLED_ROWS, table.shape[0]), dtype=np.int64)
    raw = np.ascontiguousarray(table.raw()[rows])
    sample = dataclasses.replace(table, shape=raw.shape, data=raw.reshape(-1).view(np.uint8).data)
    return hashlib.sha256(to_float32(sample).tobytes()).hexdigest()


def _bare(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The files' tensors without those of an adapter, however they are spelled or quantised."""
    module = f".{family_of(checkpoint.config).ADAPTER.rstrip('.').rpartition('.')[2]}."
    return {name: tensor for name, tensor in checkpoint.stored.items() if module not in f".{name}"}
