"""Load the engine of a server as its options say, with the faults that a test asked for.

The options of other servers that reach into a checkpoint end here: a shorter context, other generation defaults, and a
number format that has to be the file's own, because formats are read, never chosen.

Source: ours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlmrt.checkpoint.load import Checkpoint
from dlmrt.decode.engine import Engine, make_denoiser, open_model
from dlmrt.errors import UsageError
from dlmrt.models.config import read_json
from dlmrt.serve.faults import FaultyDenoiser, before_load, parse_faults
from dlmrt.types import Denoiser

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is loaded and how. Example: ``LoadConfig(model="dlmrt-tiny", max_model_len=512)``."""

    model: str  # embedded name, folder or hub id
    revision: str | None = None
    adapter: Path | None = None  # folder of a residual adapter that was trained on the model
    executor: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None  # positions of prompt and answer together; None: the checkpoint's
    generation_config: str = "auto"  # "auto": the checkpoint's own; else a folder or file to read instead
    quantization: str | None = None  # name that the checkpoint's declared format must have
    fault: str = ""  # text of DLMRT_FAULT


def load_engine(config: LoadConfig) -> Engine:
    """The engine that `config` describes.

    Raises:
        UsageError: an option does not fit the checkpoint; the message says what does.
    """
    faults = parse_faults(config.fault)
    before_load(faults)

    def denoiser_of(checkpoint: Checkpoint) -> Denoiser:
        denoiser = make_denoiser(
            checkpoint, executor=config.executor, dtype=config.dtype, num_threads=config.num_threads
        )
        return FaultyDenoiser(denoiser, faults) if faults else denoiser

    return Engine.over(open_source(config), denoiser_of)


def open_source(config: LoadConfig) -> Checkpoint:
    """The checkpoint that `config` describes, as its options change it.

    Raises:
        UsageError: an option does not fit the checkpoint.
    """
    checkpoint = open_model(config.model, revision=config.revision, adapter=config.adapter)
    _check_quantization(checkpoint.quantization, config.quantization)
    model, length = checkpoint.config, config.max_model_len
    if length is not None:
        shortest = 1 if model.diffusion is None else model.diffusion.canvas_length
        if not shortest <= length <= model.max_position_embeddings:
            raise UsageError(
                f"--max-model-len {length} does not fit this model; it can be {shortest} (one block) to "
                f"{model.max_position_embeddings} (what the checkpoint was made for)"
            )
        model = dataclasses.replace(model, max_position_embeddings=length)
    generation = checkpoint.generation
    if config.generation_config != "auto":
        generation = _read_generation(config.generation_config)
    return dataclasses.replace(checkpoint, config=model, generation=generation)


def _read_generation(source: str) -> dict[str, Any]:
    if source == "vllm":
        raise UsageError(
            "--generation-config vllm would drop the denoising settings that the model needs, too; leave it out and "
            "override single settings, e.g. --max-tokens"
        )
    path = Path(source) / GENERATION_FILE if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise UsageError(
            f"--generation-config {source!r} is neither 'auto' nor a {GENERATION_FILE} nor a folder with one"
        )
    return read_json(path)


def _check_quantization(declared: dict[str, Any], wanted: str | None) -> None:
    """Formats are declared by the checkpoint; an option can only confirm it."""
    if wanted is None:
        return
    names = [str(name) for name in (declared.get("quant_method"), declared.get("format")) if name] or ["none"]
    if wanted.lower() not in (*map(str.lower, names), "auto"):
        raise UsageError(
            f"--quantization {wanted!r}: this checkpoint's is {' '.join(names)}; leave the option out, or convert the "
            "checkpoint (a type to pack it into while loading: --dtype)"
        )
