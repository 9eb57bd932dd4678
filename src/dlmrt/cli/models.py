"""`dlmrt pull`, `dlmrt list` and `dlmrt rm`: models in the cache of the Hugging Face client.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from dlmrt.cli import options
from dlmrt.cli.report import print_json, readable_bytes
from dlmrt.cli.session import notice, start
from dlmrt.errors import UsageError


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id.")],
    *,
    revision: options.RevisionOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Fetch a model into the cache, only the files it needs, verify their checksums and print its folder."""
    start(debug=debug, quiet=quiet)
    from dlmrt.checkpoint.cache import verify
    from dlmrt.checkpoint.hub import is_local, resolve
    from dlmrt.checkpoint.load import open_checkpoint

    if is_local(model):
        raise UsageError(f"{model!r} is on this machine already; give a hub id such as 'Qwen/Qwen3-0.6B'")
    if quiet or not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    folder = resolve(model, revision=revision)
    num_verified = verify(folder)
    open_checkpoint(folder).weights()  # every tensor is there
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if json_output:
        print_json(
            {"model": model, "revision": folder.name, "folder": str(folder), "size_bytes": size,
             "num_verified": num_verified},
            indent=2,
        )  # fmt: skip
        return
    typer.echo(str(folder))
    notice(f"{readable_bytes(size)}, {num_verified} files have the hub's checksums", quiet=quiet)


def list_models(
    *,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: options.DebugOption = False,
) -> None:
    """Models on this machine: embedded ones and those of the cache."""
    start(debug=debug)
    from dlmrt.checkpoint.cache import installed_models

    models = installed_models()
    if json_output:
        print_json([{**dataclasses.asdict(model), "folder": str(model.folder)} for model in models], indent=2)
        return
    header = ("NAME", "ARCHITECTURE", "FORMAT", "SIZE", "REVISION")
    rows = [
        (
            model.name,
            model.architecture + ("" if model.is_supported else " (not supported)"),
            model.format,
            readable_bytes(model.size_bytes),
            "embedded" if model.revision is None else " ".join((model.revision[:12], *model.refs)),
        )
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        typer.echo("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def remove(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id of a cached model.")],
    *,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit. [default: all that are cached]")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Remove a model from the cache."""
    start(debug=debug, quiet=quiet)
    from dlmrt.checkpoint.cache import removal
    from dlmrt.checkpoint.hub import is_local

    if is_local(model):
        raise UsageError(f"{model!r} is not in the cache, and only models of the cache are removed; delete it yourself")
    plan = removal(model, revision)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"removing {model} needs a yes, and there is no terminal to ask on; pass --yes")
        for path in plan.paths:
            typer.echo(str(path), err=True)
        if not typer.confirm(f"Remove {model} ({readable_bytes(plan.freed_bytes)})?", err=True):
            raise typer.Exit(1)
    plan.execute()
    notice(f"removed {model}, {readable_bytes(plan.freed_bytes)}", quiet=quiet)
