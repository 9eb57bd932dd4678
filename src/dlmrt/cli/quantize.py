"""`dlmrt quantize` (alias: convert): a checkpoint in another format, written to a new folder.

One verb for quantising, for going back to floats, for the other dialect and for other shards: they differ in --format.

Source: ours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlmrt.cli import options
from dlmrt.cli.report import SCHEMA_VERSION, print_json, readable_bytes
from dlmrt.cli.session import notice, start
from dlmrt.errors import MissingDependencyError, UsageError
from dlmrt.models.config import without_duplicates

if TYPE_CHECKING:
    from dlmrt.checkpoint.convert import Conversion
    from dlmrt.checkpoint.folder import Progress
    from dlmrt.checkpoint.load import Checkpoint

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, folder or hub id.")],
    *,
    format: Annotated[
        str,
        typer.Option(
            "--format", "--quantization",
            help="nvfp4, fp8, int8, int4; bfloat16, float16, float32 (bf16, fp16, fp32): everything in floats; "
            "keep: as stored, in new shards.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "--output", "-o", help="Folder to write; must be new or empty.")],
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", help="Whose names a quantised file has: modelopt or [default:] compressed-tensors."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="experts, or linears: all but embedding, head, routers. [default: by model]"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Module to leave as it is: name, glob, or 're:' expression; may be repeated."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", help="Prompts (.txt: one a line; .jsonl: 'prompt') for scales of activations."),
    ] = None,
    calibrate_tokens: Annotated[
        int, typer.Option("--calibrate-tokens", min=1, help="Tokens of the answer to each of them, at the most.")
    ] = 64,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of one file, e.g. 500MB.")] = "5GB",
    revision: options.RevisionOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:  # fmt: skip
    """Write a checkpoint in another format: quantised, back in floats, other names, other shards (alias: convert)."""
    start(debug=debug, quiet=quiet)
    shard_bytes = parse_size(max_shard_size)
    _check_new(out)
    prompts = read_prompts(calibrate) if calibrate is not None else None
    from dlmrt.checkpoint.convert import convert_checkpoint
    from dlmrt.checkpoint.hub import resolve
    from dlmrt.checkpoint.load import open_checkpoint

    checkpoint = open_checkpoint(resolve(model, revision=revision))
    chosen: dict[str, Any] = {
        "format": _ALIASES.get(format, format), "dialect": dialect, "policy": policy, "ignore": tuple(ignore or ()),
    }  # fmt: skip
    started = time.perf_counter()
    if prompts is not None:
        chosen["input_maxima"] = _calibrated(checkpoint, prompts, chosen, max_tokens=calibrate_tokens, quiet=quiet)
    with _progress_bar(quiet=quiet) as progress:
        done = convert_checkpoint(out, checkpoint, **chosen, max_shard_bytes=shard_bytes, progress=progress)
    report = _report(checkpoint, out, chosen, done) | {"seconds": time.perf_counter() - started}
    if json_output:
        print_json(report, indent=2)
    else:
        typer.echo(_summary(report))


def _report(checkpoint: Checkpoint, out: Path, chosen: Mapping[str, Any], done: Conversion) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "folder": str(out),
        "format": chosen["format"],
        "dialect": done.dialect,
        "num_quantized": len(done.modules),
        "num_kept_codes": done.num_carried,
        "source_bytes": sum(tensor.num_bytes for tensor in checkpoint.stored.values()),
        "written_bytes": done.num_bytes,
    }


def _summary(report: Mapping[str, Any]) -> str:
    facts = [report["format"] + (f" of {report['dialect']}" if report["dialect"] else "")]
    if report["num_quantized"]:
        kept = f" ({report['num_kept_codes']} with the codes they had)" if report["num_kept_codes"] else ""
        facts.append(f"{report['num_quantized']} matrices quantised{kept}")
    facts.append(f"{readable_bytes(report['source_bytes'])} -> {readable_bytes(report['written_bytes'])}")
    return f"{report['folder']}: {', '.join(facts)}, {report['seconds']:.1f} s"


def _check_new(folder: Path) -> None:
    """Refuse to write over anything, before any work."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} exists already and would be overwritten; name a new folder in --out, or remove it")


def parse_size(text: str) -> int:
    """Bytes of e.g. "5GB", "500 MB", "2GiB" or "1000".

    Raises:
        UsageError: it is not a size, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]?I?)B?\s*", text.upper(), flags=re.ASCII)
    size = int(Decimal(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a size; write e.g. 5GB, 500MB or 2GiB")
    return size


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: the lines of .txt, or "prompt" of the objects that the lines of .jsonl are.

    Raises:
        UsageError: the file cannot be read or holds none.
    """
    lines = [line for line in options.read_text(path, option="--calibrate").splitlines() if line.strip()]
    prompts = [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)] if (
        path.suffix == ".jsonl"
    ) else lines  # fmt: skip
    if not prompts:
        raise UsageError(f"{path} holds no prompts; write one a line")
    return prompts


def _prompt(line: str, where: str) -> str:
    import json

    try:
        prompt = json.loads(line, object_pairs_hook=without_duplicates)["prompt"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise UsageError(f"{where} is not an object with 'prompt' ({error!r}); mend the file") from error
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f"{where}: 'prompt' is not a text; mend the file")
    return prompt


def _calibrated(
    checkpoint: Checkpoint, prompts: Sequence[str], chosen: Mapping[str, Any], *, max_tokens: int, quiet: bool
) -> dict[str, float]:
    """Module -> largest magnitude that entered it while the eager executor answered `prompts`."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingDependencyError(
            "calibration runs on the eager executor, which needs torch; pip install 'dlmrt[train]'"
        )
    from dlmrt.checkpoint.convert import DEFAULT_DIALECT, check_format
    from dlmrt.checkpoint.policy import quantized_files
    from dlmrt.checkpoint.scheme import Scheme
    from dlmrt.decode.engine import Engine
    from dlmrt.eager.calibrate import WatchedDenoiser

    check_format(chosen["format"], ["calibration"])
    Scheme(format=chosen["format"], dialect=chosen["dialect"] or DEFAULT_DIALECT, has_static_inputs=True)  # checked now
    shapes = {name: weight.shape for name, weight in checkpoint.weights().items()}
    targets = quantized_files(checkpoint.config, shapes, chosen["policy"], chosen["ignore"])
    denoiser = WatchedDenoiser(checkpoint, targets)
    engine = Engine.over(checkpoint, lambda _: denoiser)
    for number, prompt in enumerate(prompts, start=1):
        engine.generate(prompt, max_tokens=max_tokens)
        notice(f"calibrated with prompt {number} of {len(prompts)}", quiet=quiet)
    return denoiser.input_maxima()


@contextmanager
def _progress_bar(*, quiet: bool) -> Iterator[Progress]:
    """A bar of bytes on stderr; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        bar = bars.add_task("", total=None)
        yield lambda num_bytes, total: bars.update(bar, advance=num_bytes, total=total)
