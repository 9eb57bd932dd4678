"""The `orl` command: tasks, pretrain, train, evaluate, frontier, compare.

Data goes to stdout, progress and notices to stderr; one-line errors and exit codes as `dlmrt`. Heavy imports live
inside the verbs, so that `orl --help` is quick.

Source: ours; conventions in docs/design.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlmrt.cli import guarded, print_version, run_app
from dlmrt.errors import UnknownOptionError, nearest
from orl.cli_measure import DebugOption, QuietOption, compare, evaluate, frontier

if TYPE_CHECKING:
    from orl.recipe import PretrainRecipe
    from orl.train_recipe import TrainRecipe

app = typer.Typer(
    name="orl",
    help="Train, convert and evaluate diffusion language models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(evaluate)
app.command("eval", hidden=True, help="Alias of evaluate.")(evaluate)
app.command()(frontier)
app.command()(compare)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def tasks(
    task: Annotated[str, typer.Option(help="Show only this task.")] = "",
    show: Annotated[int, typer.Option(min=0, help="Problems to show per task.")] = 0,
    split: Annotated[str, typer.Option(help="train or heldout.")] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: DebugOption = False,
) -> None:
    """List the tasks, and show problems with their gold answers."""
    with guarded(debug):
        from orl.tasks import get_task, task_names
        from orl.tasks.types import SPLITS

        if split not in SPLITS:
            raise UnknownOptionError(f"unknown split {split!r}{nearest(split, SPLITS)}")
        chosen = [get_task(name) for name in ([task] if task else task_names())]
        problems = [[t.problem(index, split) for index in range(show)] for t in chosen]
        if as_json:
            found = [
                {
                    "name": t.name,
                    "description": t.description,
                    "problems": [{"prompt": problem.prompt, "response": problem.response} for problem in shown],
                }
                for t, shown in zip(chosen, problems, strict=True)
            ]
            typer.echo(json.dumps(found, indent=1))
            return
        for t, shown in zip(chosen, problems, strict=True):
            typer.echo(f"{t.name}: {t.description}")
            for problem in shown:
                typer.echo(f"--- {t.name} {split} {problem.index}\n{problem.prompt}\n>>>\n{problem.response}")


@app.command()
def pretrain(
    recipe: Annotated[Path, typer.Argument(help="TOML file, e.g. recipes/tiny_mask.toml.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run, resumed if it exists. [default: runs/NAME-OF-RECIPE]")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override, e.g. --set optim.steps=100; may be repeated.")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option(min=0, help="Save and stop after this many seconds; call again to go on.")
    ] = None,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Pre-train a small model, or convert a checkpoint (run.init).

    Prints the checkpoint's folder. Ctrl-C saves the run; the same command goes on, also after a kill. Several
    processes share a run under torchrun: torchrun --nproc-per-node 8 -m orl pretrain RECIPE.
    """
    with guarded(debug):
        from orl.pretrain import pretrain as run
        from orl.progress import TrainingBar
        from orl.ranks import is_main_process
        from orl.recipe import PretrainRecipe, load_recipe

        resolved = load_recipe(recipe, PretrainRecipe, set_ or [])
        folder = run_dir or Path("runs") / recipe.stem
        quiet = quiet or not is_main_process()
        try:
            with TrainingBar(resolved.optim.steps, enabled=not quiet and sys.stderr.isatty()) as bar:
                model = run(
                    resolved,
                    folder,
                    evaluate=_held_out_evaluation(resolved),
                    on_progress=bar.update,
                    stop_after_s=stop_after,
                )
        except KeyboardInterrupt:
            if not quiet:
                typer.echo(f"notice: interrupted; the same command goes on from {folder}", err=True)
            raise
        if is_main_process():
            typer.echo(model)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="TOML file, e.g. recipes/orl_tiny.toml.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run, resumed if it exists. [default: runs/NAME-OF-RECIPE]")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override, e.g. --set loss.aec_weight=0; may be repeated.")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option(min=0, help="Save and stop after this many seconds; call again to go on.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Count parameters, memory and rows from run.init's config.json; train nothing."),
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that a dry run counts for.")] = 1,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train by On-Policy Residual Learning: the model learns from its own verified answers to decode in fewer steps.

    Prints the folder of the best checkpoint. Ctrl-C saves the run; the same command goes on, also after a kill. Several
    processes share a run under torchrun: torchrun --nproc-per-node 8 -m orl train RECIPE.
    """
    with guarded(debug):
        from orl.progress import UpdateBar
        from orl.ranks import is_main_process
        from orl.recipe import load_recipe
        from orl.train import train as run
        from orl.train_recipe import TrainRecipe

        resolved = load_recipe(recipe, TrainRecipe, set_ or [])
        if dry_run:
            typer.echo(json.dumps(_dry_run(resolved, ranks), indent=1))
            return
        folder = run_dir or Path("runs") / recipe.stem
        quiet = quiet or not is_main_process()
        try:
            with UpdateBar(resolved.optim.updates, enabled=not quiet and sys.stderr.isatty()) as bar:
                model = run(resolved, folder, on_progress=bar.update, stop_after_s=stop_after)
        except KeyboardInterrupt:
            if not quiet:
                typer.echo(f"notice: interrupted; the same command goes on from {folder}", err=True)
            raise
        if is_main_process():
            typer.echo(model)


def _dry_run(recipe: TrainRecipe, num_ranks: int) -> dict[str, Any]:
    """Counts for prompts of 200 tokens and answers of 500, the middle of the tasks that papers train on."""
    from dlmrt.checkpoint.hub import resolve
    from dlmrt.models.config import load_config
    from orl.dry_run import dry_run

    config = load_config(resolve(recipe.run.init, needs_weights=False))
    return dry_run(config, recipe, num_ranks=num_ranks, prompt_tokens=200, answer_tokens=500)


def _held_out_evaluation(recipe: PretrainRecipe) -> Callable[[Path], dict[str, Any]]:
    """Callback for the trainer: verified rate per task on a few held-out prompts at the conservative setting."""
    from dlmrt.decode.engine import Engine
    from orl.data import Mixture, held_out
    from orl.evaluate import DEFAULT_SETTINGS, Setting, evaluate

    setting = Setting.parse(DEFAULT_SETTINGS[recipe.objective.kind][0])
    problems = held_out(Mixture.of(recipe.data), recipe.run.eval_problems)

    def run(folder: Path) -> dict[str, Any]:
        with Engine.load(folder, num_threads=recipe.run.num_threads or None) as engine:
            row = evaluate(engine, problems, [setting])["results"][0]
        return {
            "setting": setting.name,
            "verified_rate": row["all"]["verified_rate"],
            "tpf_total": row["all"]["tpf_total"],
            "tasks": {task: summary["verified_rate"] for task, summary in row["tasks"].items()},
        }

    return run


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(run_app(app, "orl"))
