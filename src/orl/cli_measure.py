"""The verbs of `orl` that measure: evaluate, frontier, compare.

Data goes to stdout (the last line is one JSON document), tables and notices to stderr. Heavy imports live inside the
verbs.

Source: ours; conventions in docs/design.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlmrt.cli import guarded
from dlmrt.errors import UsageError

if TYPE_CHECKING:
    from dlmrt.types import GenerateResult
    from orl.evaluate import Outcome, Setting
    from orl.tasks.types import Problem

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notices on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Log everything and show tracebacks.")]
SettingOption = Annotated[list[str] | None, typer.Option(help="[NAME:]KEY=VALUE,... of the decoder; may be repeated.")]
TaskOption = Annotated[list[str] | None, typer.Option(help="Task to include; may be repeated. [default: all]")]
ProblemsOption = Annotated[int, typer.Option(min=1, help="Held-out problems per task.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Decoding seed.")]
ExecutorOption = Annotated[str, typer.Option(help="Who runs the denoising loop.")]
DtypeOption = Annotated[str, typer.Option(help="Compute type, e.g. float32.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads. [default: auto]")]


def evaluate(
    model: Annotated[str, typer.Argument(help="Embedded name, folder or hub id.")] = "dlmrt-tiny",
    setting: SettingOption = None,
    task: TaskOption = None,
    problems: ProblemsOption = 100,
    seed: SeedOption = 0,
    executor: ExecutorOption = "auto",
    dtype: DtypeOption = "auto",
    num_threads: ThreadsOption = None,
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
        from orl.evaluate import DEFAULT_SETTINGS, Setting, kind_of, outcome_dict
        from orl.evaluate import evaluate as run
        from orl.progress import CountBar, settings_table
        from orl.recipe import DataSection

        mixture = Mixture.of(DataSection(tasks=tuple(task or ())))
        settings = [Setting.parse(text) for text in setting or ()]
        failed: list[dict[str, Any]] = []
        with Engine.load(model, executor=executor, dtype=dtype, num_threads=num_threads) as engine:
            settings = settings or [Setting.parse(text) for text in DEFAULT_SETTINGS[kind_of(engine.config)]]
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


def frontier(
    models: Annotated[list[str], typer.Argument(help="[NAME=]MODEL; the first one is the baseline.")],
    sweep: Annotated[
        str, typer.Option(help="Decode knob and its values, e.g. threshold=0.5,0.7,0.9. [default: by the model's kind]")
    ] = "",
    fixed: Annotated[str, typer.Option(help="KEY=VALUE,... of the decoder at every point of --sweep.")] = "",
    setting: SettingOption = None,
    task: TaskOption = None,
    problems: ProblemsOption = 100,
    tolerance: Annotated[float, typer.Option(min=0, max=1, help="Share of accuracy that counts as matched.")] = 0.005,
    seed: SeedOption = 0,
    executor: ExecutorOption = "auto",
    dtype: DtypeOption = "auto",
    num_threads: ThreadsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of answers, report and plots. [default: runs/frontier]")
    ] = None,
    plot: Annotated[bool, typer.Option(help="Draw frontier.svg and frontier.png (needs dlmrt[plot]).")] = True,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Accuracy against tokens per forward over a decode knob, and the gain at matched accuracy.

    Every model is swept over the same knobs and held-out prompts. Answers are kept in the folder as they come: the same
    command goes on after a kill, and one with more models, knobs or problems adds what is missing. The last line of
    stdout is the report as one JSON document, also written to frontier.json.
    """
    with guarded(debug):
        from orl.data import Mixture, held_out
        from orl.frontier import Sweep, frontier_report
        from orl.progress import frontier_table
        from orl.recipe import DataSection
        from orl.sweep import Plan, named_models, sweep_models, sweep_settings

        folder = out or Path("runs/frontier")
        named = named_models(models)
        plan = Plan(
            problems=tuple(held_out(Mixture.of(DataSection(tasks=tuple(task or ()))), problems)),
            settings=tuple(sweep_settings(sweep, fixed, setting or ())),
            seed=seed, executor=executor, dtype=dtype, num_threads=num_threads,
        )  # fmt: skip
        try:
            reports = sweep_models(named, plan, folder, show_progress=not quiet and sys.stderr.isatty())
        except KeyboardInterrupt:
            if not quiet:
                typer.echo(f"notice: interrupted; the same command goes on from {folder}", err=True)
            raise
        report = frontier_report([Sweep.of(name, body) for name, body in reports.items()], tolerance=tolerance)
        report["reports"] = reports
        (folder / "frontier.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
        if plot:
            _plot(report, folder, quiet=quiet)
        if not quiet:
            typer.echo(frontier_table(report), err=True)
        typer.echo(json.dumps(report))


def _plot(report: Mapping[str, Any], folder: Path, *, quiet: bool) -> None:
    """Draw the plots, or say why not: hours of answers must not fail for a picture."""
    from dlmrt.errors import MissingDependencyError
    from orl.plot import write_plots

    try:
        write_plots(report, folder / "frontier")
    except MissingDependencyError as error:
        if not quiet:
            typer.echo(f"notice: no plots: {error}", err=True)


def compare(
    reports: Annotated[list[Path], typer.Argument(help="JSON of `orl evaluate --out` or frontier.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: DebugOption = False,
) -> None:
    """Say whether models differ: paired differences to the first one, with 95 % intervals over prompts.

    Models are taken from all reports, in order. "overlap" means that the interval holds no difference.
    """
    with guarded(debug):
        from orl.frontier import compare as paired
        from orl.progress import comparison_table

        sweeps = _sweeps_in(reports)
        found = [paired(sweeps[0], other) for other in sweeps[1:]]
        typer.echo(json.dumps(found) if as_json else "\n\n".join(map(comparison_table, found)))


def _sweeps_in(paths: Sequence[Path]) -> list[Any]:
    """Every model of the reports, at least two."""
    from orl.errors import ReportError
    from orl.frontier import SCHEMA, Sweep

    found = []
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        except (OSError, ValueError, IndexError) as error:
            raise ReportError(f"{path} cannot be read ({error}); give the JSON of orl evaluate or frontier") from error
        if isinstance(document, dict) and document.get("schema") == SCHEMA:
            found += [Sweep.of(name, body) for name, body in document["reports"].items()]
        else:
            found.append(Sweep.of(str(path), document if isinstance(document, dict) else {}))
    if len(found) < 2:
        raise UsageError(f"{paths[0]} holds one model; give a second report to compare it with")
    return found
