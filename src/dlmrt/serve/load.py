"""Load the engine of a server, with the faults that a test asked for.

Source: ours.
"""

from __future__ import annotations

from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.decode.engine import Engine, make_denoiser
from dlmrt.decode.text import TextCodec
from dlmrt.serve.faults import FaultyDenoiser, before_load, parse_faults


def load_engine(
    model: str, *, executor: str, dtype: str, num_threads: int | None, revision: str | None, fault: str = ""
) -> Engine:
    """`Engine.load`, and with `fault` (the text of DLMRT_FAULT) an engine that fails as it says."""
    if not fault:
        return Engine.load(model, executor=executor, dtype=dtype, num_threads=num_threads, revision=revision)
    faults = parse_faults(fault)
    before_load(faults)
    checkpoint = open_checkpoint(resolve(model, revision=revision))
    denoiser = make_denoiser(checkpoint, executor=executor, dtype=dtype, num_threads=num_threads)
    codec = TextCodec.from_folder(checkpoint.folder)
    return Engine(FaultyDenoiser(denoiser, faults), checkpoint.config, codec, checkpoint.generation)
