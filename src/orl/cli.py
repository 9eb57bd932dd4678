"""The `orl` command: tasks, pretrain, train, evaluate.

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

if TYPE_CHECKING:
    from dlmrt.types import GenerateResult
    from orl.evaluate import Outcome, Setting
    from orl.recipe import PretrainRecipe
    from orl.tasks.types import Problem

app = typer.Typer(
    name="orl",
    help="Train, convert and evaluate diffusion language models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notices on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Log everything and show tracebacks.")]

# Settings that `evaluate` runs when none is given, by the checkpoint's kind; the first is the conservative one.
DEFAULT_SETTINGS = {
    "mask": (
        "conservative:commit_rule=threshold,threshold=0.95",
        "commit_rule=threshold,threshold=0.9",
        "commit_rule=threshold,threshold=0.7",
        "commit_rule=threshold,threshold=0.5",
    ),
    "uniform": (
        "conservative:commit_rule=entropy_bound,entropy_bound=0.05",
        "commit_rule=entropy_bound,entropy_bound=0.1",
        "commit_rule=entropy_bound,entropy_bound=0.3",
        "commit_rule=threshold,threshold=0.95",
    ),
    "ar": ("greedy:temperature=0",),
}


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

    Prints the checkpoint's folder. Ctrl-C saves the run; the same command goes on, also after a kill.
    """
    with guarded(debug):
        from orl.pretrain import pretrain as run
        from orl.progress import TrainingBar
        from orl.recipe import PretrainRecipe, load_recipe

        resolved = load_recipe(recipe, PretrainRecipe, set_ or [])
        folder = run_dir or Path("runs") / recipe.stem
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
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Train by On-Policy Residual Learning: the model learns from its own verified answers to decode in fewer steps.

    Prints the folder of the best checkpoint. Ctrl-C saves the run; the same command goes on, also after a kill.
    """
    with guarded(debug):
        from orl.progress import UpdateBar
        from orl.recipe import load_recipe
        from orl.train import train as run
        from orl.train_recipe import TrainRecipe

        resolved = load_recipe(recipe, TrainRecipe, set_ or [])
        folder = run_dir or Path("runs") / recipe.stem
        try:
            with UpdateBar(resolved.optim.updates, enabled=not quiet and sys.stderr.isatty()) as bar:
                model = run(resolved, folder, on_progress=bar.update, stop_after_s=stop_after)
        except KeyboardInterrupt:
            if not quiet:
                typer.echo(f"notice: interrupted; the same command goes on from {folder}", err=True)
            raise
        typer.echo(model)


def _held_out_evaluation(recipe: PretrainRecipe) -> Callable[[Path], dict[str, Any]]:
    """Callback for the trainer: verified rate per task on a few held-out prompts at the conservative setting."""
    from dlmrt.decode.engine import Engine
    from orl.data import Mixture, held_out
    from orl.evaluate import Setting, evaluate

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


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="Embedded name, folder or hub id.")] = "dlmrt-tiny",
    setting: Annotated[
        list[str] | None, typer.Option(help="[NAME:]KEY=VALUE,... of the decoder; may be repeated.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Task to include; may be repeated. [default: all]")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems per task.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Decoding seed.")] = 0,
    executor: Annotated[str, typer.Option(help="Who runs the denoising loop.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Compute type, e.g. float32.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. [default: auto]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON report here too.")] = None,
    failures: Annotated[Path | None, typer.Option(help="Write failed answers here as JSON lines.")] = None,
    min_score: Annotated[
        float, typer.Option(min=0, max=1, help="Exit 1 if a task's verified rate at the first setting is below this.")
    ] = 0.0,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Verified rate and tokens per forward over held-out prompts, for several decode settings.

    A table goes to stderr; the last line of stdout is the report as one JSON document.
    """
    with guarded(debug):
        from dlmrt.decode.engine import Engine
        from orl.data import Mixture, held_out
        from orl.evaluate import Setting, outcome_dict
        from orl.evaluate import evaluate as run
        from orl.progress import CountBar, settings_table
        from orl.recipe import DataSection

        mixture = Mixture.of(DataSection(tasks=tuple(task or ())))
        settings = [Setting.parse(text) for text in setting or ()]
        failed: list[dict[str, Any]] = []
        with Engine.load(model, executor=executor, dtype=dtype, num_threads=num_threads) as engine:
            settings = settings or [Setting.parse(text) for text in DEFAULT_SETTINGS[_kind(engine)]]
            chosen = held_out(mixture, problems)
            with CountBar(len(chosen) * len(settings), "evaluate", enabled=not quiet and sys.stderr.isatty()) as bar:

                def on_answer(setting: Setting, problem: Problem, result: GenerateResult, outcome: Outcome) -> None:
                    bar.advance()
                    if not outcome.passed:
                        answer = {"prompt": problem.prompt, "response": result.text, "gold": problem.response}
                        failed.append({"setting": setting.name, **outcome_dict(outcome), **answer})

                report = run(engine, chosen, settings, seed=seed, on_answer=on_answer)
        report["conditions"]["model"] = Path(model).name
        if failures:
            failures.write_text("".join(json.dumps(answer) + "\n" for answer in failed), encoding="utf-8")
        if not quiet:
            typer.echo(settings_table(report), err=True)
        text = json.dumps(report)
        if out:
            out.write_text(text + "\n", encoding="utf-8")
        typer.echo(text)
        rates = {name: summary["verified_rate"] for name, summary in report["results"][0]["tasks"].items()}
        worst = min(rates, key=rates.__getitem__)
        if rates[worst] < min_score:
            typer.echo(f"error: {worst} reached {rates[worst]:.3f}, below --min-score {min_score}", err=True)
            raise typer.Exit(1)


def _kind(engine: Any) -> str:
    """Row of DEFAULT_SETTINGS: one position a block is an auto-regressive model, whatever its noise is called."""
    diffusion = engine.config.diffusion
    return "ar" if diffusion.canvas_length == 1 else str(diffusion.noise)


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(run_app(app, "orl"))
