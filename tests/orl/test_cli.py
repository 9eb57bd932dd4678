"""The `orl` command: what goes to stdout, what to stderr, exit codes, Ctrl-C. Real processes where one is needed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from orl.recipe import dump_recipe
from orl.tasks import task_names

# `orl`, with a line on stderr after each step: a test knows where the run is without waiting for a time.
SLOW_TRAINER = """
import sys
from orl.cli import main
from orl.run_folder import RunFolder
log = RunFolder.log
def tell(self, entry):
    log(self, entry)
    print("logged", entry["step"], file=sys.stderr, flush=True)
RunFolder.log = tell
main()
"""


@pytest.fixture(scope="module")
def recipe_file(make_recipe, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "small.toml"
    recipe = make_recipe(optim={"steps": 2}, run={"eval_every_steps": 1, "eval_problems": 1})
    path.write_text(dump_recipe(recipe))
    return path


@pytest.fixture(scope="module")
def model(run_orl, recipe_file: Path, tmp_path_factory) -> Path:
    """Checkpoint made by `orl pretrain`, which is checked here."""
    folder = tmp_path_factory.mktemp("work")
    status, stdout, stderr = run_orl("pretrain", recipe_file, cwd=folder)
    assert (status, stderr) == (0, "")
    assert stdout == "runs/small/model\n"
    lines = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    evaluations = [line["eval"] for line in lines if "eval" in line]
    assert [line["step"] for line in lines] == [1, 1, 2, 2]
    assert evaluations[0]["setting"] == "conservative"
    assert evaluations[0]["tasks"].keys() == {"chain_sum", "spell_backward"}
    return folder / "runs/small/model"


def test_tasks_are_listed_and_shown(orl):
    status, stdout, stderr = orl("tasks")
    assert (status, stderr) == (0, "")
    assert [line.split(":")[0] for line in stdout.splitlines()] == task_names()
    status, stdout, _ = orl("tasks", "--task", "chain_sum", "--show", "2", "--split", "heldout")
    assert status == 0
    assert "--- chain_sum heldout 1\n" in stdout
    assert "\n>>>\n" in stdout


def test_tasks_as_json(orl):
    status, stdout, stderr = orl("tasks", "--json", "--show", "1")
    assert (status, stderr) == (0, "")
    found = json.loads(stdout)
    assert [task["name"] for task in found] == task_names()
    assert all(task["description"] and len(task["problems"]) == 1 for task in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks", "--task", "chain_sums"], "unknown task 'chain_sums'; did you mean 'chain_sum'?"),
        (["tasks", "--split", "held"], "unknown split 'held'; did you mean 'heldout'?"),
        (["taks"], "No such command 'taks'."),
        (["pretrain", "none.toml"], "recipe none.toml does not exist; recipes of this project are in recipes/"),
        (["evaluate", "--setting", "treshold=1"], "unknown decode setting 'treshold'; did you mean 'threshold'?"),
        (["evaluate", "--task", "equation"], "unknown task 'equation'; did you mean 'equations'?"),
        (["evaluate", "--problems", "0"], "Invalid value for '--problems'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(orl, tmp_path: Path, arguments: list[str], message: str):
    status, stdout, stderr = orl(*arguments, cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_wrong_override_is_a_usage_error_before_anything_is_written(orl, recipe_file: Path, tmp_path: Path):
    status, stdout, stderr = orl("pretrain", recipe_file, "--set", "optim.step=3", cwd=tmp_path)
    assert (status, stdout) == (2, "")
    assert "optim: unknown key 'step'; did you mean 'steps'?" in stderr
    assert not list(tmp_path.iterdir())


def test_another_recipe_in_the_same_folder_is_a_failure(orl, recipe_file: Path, model: Path):
    folder = model.parents[2]
    status, stdout, stderr = orl("pretrain", recipe_file, "--set", "optim.steps=3", cwd=folder)
    assert (status, stdout) == (1, "")
    assert "(optim.steps was 2 and is 3); take another --run-dir or remove the folder" in stderr
    assert "Traceback" not in stderr
    status, _, stderr = orl("pretrain", recipe_file, "--set", "optim.steps=3", "--debug", cwd=folder)
    assert status == 1
    assert "Traceback" in stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_interrupt_saves_the_run_and_exits_130(start_python, recipe_file: Path, tmp_path: Path, quiet: bool):
    arguments = ["pretrain", str(recipe_file), "--run-dir", str(tmp_path / "run"), "--set", "optim.steps=100000",
                 "--set", "run.eval_every_steps=100000"]  # fmt: skip
    process = start_python("-c", SLOW_TRAINER, *arguments, *(["--quiet"] if quiet else []))
    assert process.stderr is not None
    for line in process.stderr:
        if line == "logged 3\n":
            process.send_signal(signal.SIGINT)
            break
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout == ""
    rest = [line for line in stderr.splitlines() if not line.startswith("logged")]
    assert rest == ([] if quiet else [f"notice: interrupted; the same command goes on from {tmp_path / 'run'}"])
    (state,) = (tmp_path / "run" / "state").iterdir()
    saved = json.loads((state / "state.json").read_text())["step"]
    logged = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert saved == logged[-1] >= 3


def test_run_stops_after_a_time_and_goes_on(orl, recipe_file: Path, tmp_path: Path):
    for expected in (1, 2, 2):
        status, stdout, _ = orl("pretrain", recipe_file, "--run-dir", tmp_path / "run", "--stop-after", "0")
        assert (status, stdout) == (0, f"{tmp_path / 'run' / 'model'}\n")
        states = sorted(path.name for path in (tmp_path / "run" / "state").iterdir())
        assert states[-1] == f"step_{expected:08d}"


def test_evaluate_prints_a_table_for_people_and_json_for_programs(orl, model: Path, tmp_path: Path):
    status, stdout, stderr = orl(
        "evaluate", model, "--task", "chain_sum", "--problems", "2", "--setting", "slow:threshold=0.9,max_tokens=16",
        "--setting", "threshold=0.1,max_tokens=16", "--out", tmp_path / "report.json", "--failures",
        tmp_path / "failures.jsonl", "--min-score", "1",
    )  # fmt: skip
    report = json.loads(stdout.splitlines()[-1])
    assert report["schema"] == "orl.evaluate/2"
    assert report["conditions"]["model"] == "model"
    assert [row["setting"] for row in report["results"]] == ["slow", "threshold=0.1,max_tokens=16"]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    failures = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert len(failures) == 4 - sum(row["all"]["verified"] for row in report["results"])
    assert failures[0].keys() >= {"setting", "task", "reason", "prompt", "response", "gold"}
    assert "verified rate @ tpf_total" in stderr
    assert status == 1
    assert stderr.splitlines()[-1] == "error: chain_sum reached 0.000, below --min-score 1.0"


def test_evaluate_quietly(orl, model: Path):
    status, stdout, stderr = orl(
        "evaluate", model, "--task", "chain_sum", "--problems", "1", "--setting", "max_tokens=8", "--quiet"
    )
    assert (status, stderr) == (0, "")
    assert stdout.count("\n") == 1


def test_help_and_version(orl, run_orl):
    status, stdout, stderr = orl("--version")
    assert (status, stderr) == (0, "")
    assert stdout.startswith("dlmrt ")
    status, stdout, stderr = run_orl()
    assert (status, stderr) == (0, "")
    assert all(verb in stdout for verb in ("tasks", "pretrain", "evaluate"))
