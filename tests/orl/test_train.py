"""Training runs of the shipped model on its easiest task: resume, kills, skips, stops, arms, the command."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.decode.engine import Engine
from orl import gradients
from orl import train as module
from orl.errors import DivergedError, NothingVerifiedError, RecipeError, RunFolderError, StaleRolloutError
from orl.recipe import dump_recipe, load_recipe
from orl.run_folder import RunFolder
from orl.train import TrainRun, UpdateProgress, train
from orl.train_recipe import (
    EvalSection,
    KeepSection,
    LossSection,
    PromptSection,
    RolloutSection,
    StatesSection,
    TrainRecipe,
    TrainRunSection,
    UpdateSection,
)

CHILD = """
import sys
from pathlib import Path
from orl.recipe import load_recipe
from orl.train import train
from orl.train_recipe import TrainRecipe
train(load_recipe(Path(sys.argv[1]), TrainRecipe), Path(sys.argv[2]), on_progress=lambda p: print(p.update))
"""
CLOCKS = ("rollout_s", "train_s", "eval_s")


@pytest.fixture
def make() -> Callable[..., TrainRecipe]:
    """A recipe of seconds; keyword: section -> changed fields."""

    def recipe(**changes: dict[str, Any]) -> TrainRecipe:
        given: dict[str, tuple[type, dict[str, Any]]] = {
            "prompts": (PromptSection, {"tasks": ("spell_backward",), "per_update": 2}),
            # a fixed number of steps: by threshold the model is done with these words before it needs a residual
            "rollout": (
                RolloutSection,
                {"responses": 2, "setting": "commit_rule=steps,max_denoising_steps=4,temperature=1", "workers": 1},
            ),
            "keep": (KeepSection, {}),
            "states": (StatesSection, {"per_block": 1}),
            "loss": (LossSection, {}),
            "optim": (UpdateSection, {"updates": 3, "warmup_updates": 1}),
            "eval": (EvalSection, {"every_updates": 2, "problems": 1, "settings": ("threshold=0.9",)}),
            "run": (TrainRunSection, {"num_threads": 1}),
        }
        return TrainRecipe(**{name: cls(**{**base, **changes.get(name, {})}) for name, (cls, base) in given.items()})

    return recipe


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def updates(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run_dir) if "loss" in line]


def assert_same_run(first: Path, second: Path) -> None:
    assert metrics(first) == metrics(second)
    (tensors, extra), (other, other_extra) = (RunFolder(path).load_state() for path in (first, second))
    assert extra == other_extra
    assert tensors.keys() == other.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other[name]), name
    for name in ("best", "model"):
        assert (first / name / "model.safetensors").read_bytes() == (second / name / "model.safetensors").read_bytes()


def test_stopped_and_resumed_run_equals_a_straight_one(make, tmp_path: Path):
    """K59: metrics, state and checkpoints; and every update trains on fresh answers of the newest weights."""
    reports: list[UpdateProgress] = []
    train(make(), tmp_path / "straight", on_progress=reports.append)
    for _ in range(2):
        train(make(), tmp_path / "resumed", stop_after_s=0)
    train(make(), tmp_path / "resumed")
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    lines = updates(tmp_path / "straight")
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in metrics(tmp_path / "straight") if "eval" in line] == [0, 2, 3]
    assert [report.update for report in reports] == [1, 2, 3]
    for line in lines:
        assert line["num_states"] > 0
        assert line["verified_rate"] > 0
        assert line["recorded_entropy_gap"] < 0.02, "states are replayed by the weights that made them"


def test_run_killed_with_sigkill_resumes_exactly(make, tmp_path: Path, start_python):
    """K59: the child saves after every update, so the kill falls into an update, an evaluation or a save."""
    recipe = make(optim={"updates": 4}, run={"save_every_s": 0.0})
    path = tmp_path / "r.toml"
    path.write_text(dump_recipe(recipe))
    train(recipe, tmp_path / "straight")
    child = start_python("-c", CHILD, str(path), str(tmp_path / "killed"))
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "2":
            os.kill(child.pid, signal.SIGKILL)
            break
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    train(recipe, tmp_path / "killed")
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


def test_update_without_a_usable_gradient_is_skipped_and_counted(make, tmp_path: Path, monkeypatch):
    recipe = make(optim={"updates": 2, "max_skipped_updates": 2})
    weights = gradients.state_weights
    monkeypatch.setattr(gradients, "state_weights", lambda responses, norm: [math.nan] * len(responses))
    run = TrainRun(recipe, tmp_path)
    before = {name: tensor.detach().clone() for name, tensor in run.params.items()}
    entry = run.update()
    assert entry["skipped"] == "the loss is not finite"
    assert (entry["num_skipped"], entry["policy_version"]) == (1, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in run.params.items())
    monkeypatch.setattr(gradients, "state_weights", weights)
    entry = run.update()
    assert "skipped" not in entry
    assert (entry["num_skipped"], entry["policy_version"]) == (1, 1)
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.params.items())
    monkeypatch.setattr(gradients, "state_weights", lambda responses, norm: [math.nan] * len(responses))
    run.update()
    with pytest.raises(DivergedError, match=r"2 updates in a row were skipped, update 4 because .* lower optim.lr"):
        run.update()


def test_interrupted_evaluation_is_made_by_the_next_call_and_once(make, tmp_path: Path, monkeypatch):
    """Ctrl-C in the last evaluation: the state is of the last update, and three later calls add one line."""
    recipe = make(optim={"updates": 1})
    train(recipe, tmp_path / "straight")
    measure, calls = module.evaluate, 0

    def evaluate(*arguments: Any, **options: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(module, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "resumed")
    for _ in range(2):
        train(recipe, tmp_path / "resumed")
    assert calls == 3
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_states_that_the_decoder_did_not_see_end_the_run(make, tmp_path: Path):
    """Rollouts in bfloat16 are a little inexact; with no tolerance at all that is too much."""
    with (
        TrainRun(make(rollout={"max_entropy_gap": 0.0}), tmp_path) as run,
        pytest.raises(StaleRolloutError, match="update 1: .* above rollout.max_entropy_gap = 0; take rollout.dtype"),
    ):
        run.update()


def test_updates_without_an_answer_say_nothing_about_divergence():
    """And gold answers in their place do not hide that nothing was kept."""
    recipe = TrainRecipe(
        keep=KeepSection(max_empty_updates=4, on_no_success="gold"), optim=UpdateSection(max_skipped_updates=2)
    )
    run: Any = SimpleNamespace(
        recipe=recipe, step=0, num_empty_in_a_row=0, num_skipped=0, num_skipped_in_a_row=0
    )  # fmt: skip
    nothing, something = {"kept_share": 0.0, "num_answers": 4}, {"kept_share": 0.5}
    for _ in range(3):
        TrainRun._count(run, "no answer was kept", is_empty=True, report=nothing)
    assert (run.num_skipped, run.num_skipped_in_a_row, run.num_empty_in_a_row) == (3, 0, 3)
    TrainRun._count(run, "the loss is not finite", is_empty=False, report=something)
    TrainRun._count(run, "no answer was kept", is_empty=True, report=nothing)
    assert (run.num_skipped_in_a_row, run.num_empty_in_a_row) == (1, 1)
    with pytest.raises(DivergedError, match="2 updates in a row"):
        TrainRun._count(run, "the loss is not finite", is_empty=False, report=something)
    run.num_empty_in_a_row = 3
    with pytest.raises(NothingVerifiedError):
        TrainRun._count(run, None, is_empty=False, report=nothing)  # gold answers were there
    TrainRun._count(run, None, is_empty=False, report={})  # source "gold": nothing was rolled out
    assert run.num_empty_in_a_row == run.num_skipped_in_a_row == 0


def test_nothing_verified_ends_the_run_with_the_reason(make, tmp_path: Path):
    """The cap of 2 tokens leaves no answer finished."""
    recipe = make(rollout={"setting": "threshold=0.5,temperature=1,max_tokens=2"}, keep={"max_empty_updates": 2})
    with TrainRun(recipe, tmp_path) as run:
        entry = run.update()
        assert entry["skipped"] == "no answer was kept"
        assert (entry["loss"], entry["kept_share"], entry["coverage"]) == (0.0, 0.0, 0.0)
        with pytest.raises(NothingVerifiedError, match=r"update 2: none of 4 answers was kept .*'failed': 4.* easier"):
            run.update()


def test_gold_answers_stand_in_for_prompts_without_success(make, tmp_path: Path):
    recipe = make(
        rollout={"setting": "threshold=0.5,temperature=1,max_tokens=2"},
        keep={"on_no_success": "gold", "max_empty_updates": 2},
    )  # fmt: skip
    with TrainRun(recipe, tmp_path) as run:
        entry = run.update()
        assert entry["num_gold"] == 2
        assert entry["loss"] > 0
        assert entry["policy_version"] == 1
        with pytest.raises(NothingVerifiedError, match="update 2: none of 4 answers was kept"):
            run.update()


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"source": "gold"}, "loss": {"aec_weight": 0.0, "kl_weight": 0.0}},
        {"rollout": {"policy": "start", "max_entropy_gap": 0.0}},
        {"rollout": {"use_residual": False}},
        {"loss": {"aec_weight": 0.0}},
    ],
    ids=["gold", "stale", "no residual", "no contraction"],
)
def test_arms(make, tmp_path: Path, changes: dict[str, Any]):
    train(make(**changes, optim={"updates": 2}), tmp_path)
    lines = updates(tmp_path)
    assert [line["policy_version"] for line in lines] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    assert ("verified_rate" in lines[0]) == (changes.get("rollout", {}).get("source") != "gold")
    has_residual_gradient = [line["residual_grad_norm"] > 0 for line in lines]
    assert any(has_residual_gradient) == (changes.get("rollout", {}).get("use_residual", True))
    evaluations = [line["eval"]["threshold=0.9"] for line in metrics(tmp_path) if "eval" in line]
    assert [sorted(item) for item in evaluations] == [["tasks", "tpf_denoise", "tpf_total", "verified_rate"]] * 2


def test_lost_accuracy_ends_the_run_and_the_best_checkpoint_is_kept(make, tmp_path: Path):
    """A learning rate that destroys the model: alerts, an early stop, and `best` still holds the start model."""
    recipe = make(
        optim={"updates": 6, "lr": 0.3, "warmup_updates": 0},
        keep={"max_empty_updates": 9, "on_no_success": "gold"}, eval={"every_updates": 1, "patience": 2},
    )  # fmt: skip
    best = train(recipe, tmp_path)
    assert best == tmp_path / "best"
    stopped = [line for line in metrics(tmp_path) if "stopped" in line]
    assert len(stopped) == 1
    assert "below the start model's for 2 evaluations" in stopped[0]["stopped"]
    assert stopped[0]["step"] < 6
    assert train(recipe, tmp_path) == best
    assert updates(tmp_path)[-1]["step"] == stopped[0]["step"], "a stopped run does not go on"
    start = load_params(open_checkpoint(resolve("dlmrt-tiny")), dtype="bfloat16")
    for name, tensor in load_params(open_checkpoint(best), dtype="bfloat16").items():
        assert torch.equal(tensor, start[name]), name


def test_other_recipe_model_or_start_weights_are_refused(make, tmp_path: Path):
    recipe = make(optim={"updates": 1})
    train(recipe, tmp_path)
    with pytest.raises(RunFolderError, match="optim.updates was 1 and is 2"):
        train(make(optim={"updates": 2}), tmp_path)
    state = next((tmp_path / "state").glob("step_*"))
    extra = json.loads((state / "state.json").read_text())
    (state / "state.json").write_text(json.dumps({**extra, "start": "0" * 16}))
    with pytest.raises(RunFolderError, match="began from other weights than dlmrt-tiny has now"):
        train(recipe, tmp_path)


def test_state_of_another_architecture_is_refused(make, make_recipe, tmp_path: Path):
    from orl.pretrain import pretrain

    other = pretrain(make_recipe(optim={"steps": 1}), tmp_path / "other")
    recipe = make(optim={"updates": 1})
    train(recipe, tmp_path / "run")
    changed = make(optim={"updates": 1}, run={"init": str(other)})
    (tmp_path / "run" / "recipe.resolved.toml").write_text(dump_recipe(changed))
    with pytest.raises(RunFolderError, match="is of another model"):
        train(changed, tmp_path / "run")


def test_greedy_copies_are_refused(make, tmp_path: Path, monkeypatch):
    """K13: two greedy answers of a mask model are one. What was open by then is closed."""
    closed: list[type] = []
    for opened in (Engine, RunFolder):
        monkeypatch.setattr(opened, "close", lambda self: closed.append(type(self)))
    with pytest.raises(RecipeError, match=r"'threshold=0.9,temperature=0' is greedy: 2 answers"):
        TrainRun(make(rollout={"setting": "threshold=0.9,temperature=0"}), tmp_path)
    assert closed == [Engine, RunFolder]


def test_decoders_that_move_text_between_slots_are_refused(make):
    run: Any = SimpleNamespace(recipe=make(), config=SimpleNamespace(diffusion=SimpleNamespace(noise="mask")))
    with pytest.raises(RecipeError, match="moves text between slots.* add commit_rule=joint_threshold"):
        TrainRun._check_decoder(run, SimpleNamespace(is_greedy=False, commit_rule="joint_threshold_indel"))
    TrainRun._check_decoder(run, SimpleNamespace(is_greedy=False, commit_rule="joint_threshold"))


def test_command_trains_and_prints_the_best_checkpoint(make, tmp_path: Path, run_orl):
    path = tmp_path / "r.toml"
    path.write_text(dump_recipe(make()))
    status, stdout, stderr = run_orl("train", path, "--run-dir", tmp_path / "run", "--set", "optim.updates=1")
    assert (status, stderr) == (0, "")
    assert stdout.strip() == str(tmp_path / "run" / "best")
    assert (tmp_path / "run" / "best" / "generation_config.json").exists()
    status, _, stderr = run_orl("train", path, "--set", "loss.aec_wieght=1", cwd=tmp_path)
    assert status == 2
    assert "unknown key 'aec_wieght'" in stderr
    assert "aec_weight" in stderr


def test_shipped_recipe_is_valid():
    path = Path(__file__).parents[2] / "recipes" / "orl_tiny.toml"
    recipe = load_recipe(path, TrainRecipe)
    assert (path.parents[1] / recipe.run.init / "model.safetensors").exists()
    assert load_recipe(path, TrainRecipe, ["rollout.source=gold"]).rollout.source == "gold"
    of_shipped = load_recipe(path.with_name("tiny_mask_orl.toml"), TrainRecipe)
    assert of_shipped.run.init == "runs/tiny_mask/model"  # what recipes/tiny_mask.toml makes
