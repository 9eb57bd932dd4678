"""The `dlmrt` command: generate, chat, serve, show, quantize, pull, list, rm, env.

Data goes to stdout; notices, statistics and errors to stderr. Start-up is part of the latency that users feel, so only
the parser and light modules are imported here; verbs import what they need when they run.

Source: ours; conventions in docs/design.md.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dlmrt.cli.chat import chat
from dlmrt.cli.environment import env
from dlmrt.cli.generate import generate
from dlmrt.cli.manners import guarded, print_version, run_app
from dlmrt.cli.models import list_models, pull, remove
from dlmrt.cli.quantize import quantize
from dlmrt.cli.serve import serve
from dlmrt.cli.show import show

__all__ = ["app", "guarded", "main", "print_version", "run_app"]

app = typer.Typer(
    name="dlmrt",
    help="Run diffusion language models, one request at a time.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("generate")(generate)
app.command("run", hidden=True, help="As generate; without a prompt on a terminal: chat.")(generate)
app.command("chat")(chat)
app.command("serve")(serve)
app.command("show")(show)
app.command("quantize")(quantize)
app.command("convert", hidden=True, help="Alias of quantize.")(quantize)
app.command("pull")(pull)
app.command("list")(list_models)
app.command("rm")(remove)
app.command("env")(env)
app.command("doctor", hidden=True, help="Alias of env.")(env)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(run_app(app, "dlmrt"))
