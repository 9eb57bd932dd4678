"""`dlmrt show`: what a checkpoint is, what it needs and where it fits, from its JSON files and tensor headers alone.

No weight is read and torch is not imported, so it answers at once for a checkpoint of any size.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlmrt.cli import fit, options
from dlmrt.cli.report import print_json
from dlmrt.cli.session import DEFAULT_MODEL, start
from dlmrt.types import DecodeConfig

if TYPE_CHECKING:
    from dlmrt.checkpoint.load import Checkpoint

SPECIAL_IDS = ("eos_token_ids", "pad_token_id", "bos_token_id")
SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
         "max_position_embeddings")  # fmt: skip


def show(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Name, folder or hub id.")] = DEFAULT_MODEL,
    *,
    revision: options.RevisionOption = None,
    program: Annotated[bool, typer.Option("--program", help="Print the program that native executors run.")] = False,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="GPU to fit it on, e.g. rtx5090 or h100; may be repeated.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", "--max-model-len", min=0, help="Tokens to fit. [default: 8192, or all]")
    ] = None,
    tokens_per_forward: Annotated[
        float,
        typer.Option("--tokens-per-forward", "--tpf", min=0.01, help="Decided by a forward, for the ceilings."),
    ] = 8.0,
    experts: Annotated[
        float | None, typer.Option("--experts", min=1, help="Of a layer, read by a forward. [default: uniform choices]")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", min=0.001, help="Of this machine's memory in GB/s, for ceilings.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: options.DebugOption = False,
) -> None:
    """What a checkpoint is: architecture, diffusion settings, size, defaults; where it fits, and how fast at best."""
    start(debug=debug)
    from dlmrt.checkpoint.hub import resolve
    from dlmrt.checkpoint.load import open_checkpoint

    devices = [fit.this_machine(bandwidth), *fit.gpus(gpu or [])]
    folder = resolve(model, revision=revision)
    checkpoint = open_checkpoint(folder)
    if program:
        typer.echo(program_listing(checkpoint), nl=False)
        return
    longest = checkpoint.config.max_position_embeddings
    workload = fit.Workload(
        context_length=min(8192, longest) if context is None else context, tokens_per_forward=tokens_per_forward,
        experts=experts,
    )  # fmt: skip
    report = checkpoint_report(checkpoint, folder)
    fitting = fit.fit_report(checkpoint, workload, devices)
    if json_output:
        print_json({**report, "fit": fitting}, indent=2)
        return
    for section, values in report.items():
        if not isinstance(values, dict):
            typer.echo(f"{section:<26}{values}")
            continue
        typer.echo(section)
        for name, value in values.items():
            typer.echo(f"  {name:<24}{_readable(name, value)}")
    for line in fit.fit_lines(fitting):
        typer.echo(line)


def program_listing(checkpoint: Checkpoint) -> str:
    """The denoising loop of a checkpoint's default settings as a program, for its whole context."""
    from dlmrt.decode.native import loop_options
    from dlmrt.decode.settings import resolve
    from dlmrt.models.families import family_of
    from dlmrt.program.forwards import Formats
    from dlmrt.program.loop import record_loop
    from dlmrt.program.show import show as listing

    config = checkpoint.config
    settings = resolve(DecodeConfig(), config, checkpoint.generation)
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    recorded = record_loop(
        config,
        Formats(matrix=dtype, table=dtype, cache=dtype),
        loop_options(settings, has_residual=family_of(config).has_residual(config)),
        capacity=config.max_position_embeddings,
    )
    return listing(recorded)


def checkpoint_report(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """What `dlmrt show` prints, as JSON values. Memory is for one request; `kv` for a context of that many tokens."""
    config = checkpoint.config
    dtypes = sorted({tensor.dtype for tensor in checkpoint.stored.values()})
    diffusion = config.diffusion
    report: dict[str, Any] = {
        "folder": str(folder),
        "architecture": config.architecture,
        "model": {name: getattr(config, name) for name in SIZES} | {"tie_word_embeddings": config.tie_word_embeddings},
        "diffusion": dataclasses.asdict(diffusion) if diffusion else "none: an auto-regressive checkpoint",
        "weights": {
            "parameters": _num_parameters(checkpoint),
            "dtype": dtypes,
            "disk_bytes": sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        },
        "memory": _memory(checkpoint),
        "special_ids": {name: getattr(config, name) for name in SPECIAL_IDS}
        | {"mask_token_id": diffusion.mask_token_id if diffusion else None},
    }
    if diffusion:
        from dlmrt.decode.settings import resolve

        report["decode_defaults"] = resolve(DecodeConfig(), config, checkpoint.generation).as_dict()
    return report


def _num_parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.stored.values())


def _memory(checkpoint: Checkpoint) -> dict[str, Any]:
    """Bytes of weights and of keys and values in the checkpoint's own type, for a few context lengths."""
    config = checkpoint.config
    item_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[config.dtype]
    weights = _num_parameters(checkpoint) * item_bytes
    per_token = config.kv_bytes_per_token * item_bytes // 2
    longest = config.max_position_embeddings
    lengths = sorted({length for length in (1024, 8192) if length < longest} | {longest})
    totals = {f"total_bytes_at_{length}": weights + per_token * length for length in lengths}
    return {"dtype": config.dtype, "weights_bytes": weights, "kv_bytes_per_token": per_token} | totals


def _readable(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, int) and "bytes" in name:
        return f"{value:,} ({value / 2**20:,.1f} MiB)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
