"""The training loop: exact resume, skipped steps, checkpoints, Ctrl-C. Real tasks, real processes, a tiny model."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlmrt.checkpoint.load import load_params, open_checkpoint
from dlmrt.errors import CheckpointError
from dlmrt.models import qwen3
from orl import pretrain as module
from orl.errors import DivergedError, RecipeError, RunFolderError
from orl.optimizers import learning_rate_ratio
from orl.packing import Rows
from orl.pretrain import Progress, Run, pretrain
from orl.recipe import PretrainRecipe, dump_recipe
from orl.run_folder import RunFolder

KINDS = ["mask", "uniform", "ar"]

CHILD = """
import sys
from pathlib import Path
from orl.pretrain import pretrain
from orl.recipe import PretrainRecipe, load_recipe
pretrain(load_recipe(Path(sys.argv[1]), PretrainRecipe), Path(sys.argv[2]), on_progress=lambda p: print(p.step))
"""


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without the only figure that a clock decides."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "rows_per_s"} for line in lines]


def final_state(run_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    state = RunFolder(run_dir).load_state()
    assert state is not None
    return state


def assert_same_run(first: Path, second: Path) -> None:
    assert metrics(first) == metrics(second)
    (tensors, extra), (other, other_extra) = final_state(first), final_state(second)
    assert extra == other_extra
    assert tensors.keys() == other.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_run_equals_a_straight_one(make_recipe, tmp_path: Path, kind: str):
    """K59: losses, learning rates, problem numbers, final tensors."""
    recipe = make_recipe(objective={"kind": kind})
    pretrain(recipe, tmp_path / "straight")
    for _ in range(2):
        pretrain(recipe, tmp_path / "resumed", stop_after_s=0)
    assert final_state(tmp_path / "resumed")[1]["step"] == 2
    pretrain(recipe, tmp_path / "resumed")
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    lines = metrics(tmp_path / "straight")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert all(line["problems"] and line["loss"] > 0 for line in lines)
    assert len({line["muon_lr"] for line in lines}) > 5
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_run_killed_with_sigkill_resumes_exactly(make_recipe, tmp_path: Path, start_python):
    """K59: the child saves after every step, so the kill falls into a step or into a save."""
    recipe = make_recipe(optim={"steps": 25}, run={"save_every_s": 0.0})
    path = tmp_path / "r.toml"
    path.write_text(dump_recipe(recipe))
    pretrain(recipe, tmp_path / "straight")
    child = start_python("-c", CHILD, str(path), str(tmp_path / "killed"))
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "5":
            os.kill(child.pid, signal.SIGKILL)
            break
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    killed_at = max(line["step"] for line in metrics(tmp_path / "killed"))
    assert 5 <= killed_at < 25
    pretrain(recipe, tmp_path / "killed")
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


def test_damaged_newest_state_falls_back_and_the_run_is_the_same(make_recipe, tmp_path: Path):
    """K59: two states are there, the newest is torn."""
    recipe = make_recipe(run={"save_every_s": 0.0})
    pretrain(recipe, tmp_path / "straight")
    for _ in range(3):
        pretrain(recipe, tmp_path / "torn", stop_after_s=0)
    newest = tmp_path / "torn" / "state" / "step_00000003" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    pretrain(recipe, tmp_path / "torn")
    assert_same_run(tmp_path / "straight", tmp_path / "torn")


def test_finished_run_does_nothing_more(make_recipe, tmp_path: Path):
    recipe = make_recipe(optim={"steps": 2})
    model = pretrain(recipe, tmp_path)
    before = (model / "model.safetensors").read_bytes()
    assert pretrain(recipe, tmp_path) == model
    assert (model / "model.safetensors").read_bytes() == before
    assert len(metrics(tmp_path)) == 2


def test_state_written_by_an_early_version_resumes(make_recipe, tmp_path: Path):
    """Its state.json has no counters of skipped steps and problems left out, nor the step that was evaluated."""
    recipe = make_recipe()
    pretrain(recipe, tmp_path / "straight", evaluate=lambda folder: {})
    pretrain(recipe, tmp_path / "early", stop_after_s=0)
    path = tmp_path / "early" / "state" / "step_00000001" / "state.json"
    extra = json.loads(path.read_text())
    stream = {key: extra["stream"][key] for key in ("pool_idx", "offset")}
    path.write_text(json.dumps({"step": extra["step"], "stream": stream, "num_rows": extra["num_rows"]}))
    pretrain(recipe, tmp_path / "early", evaluate=lambda folder: {})
    assert_same_run(tmp_path / "straight", tmp_path / "early")


def test_other_recipe_and_state_of_another_model_are_refused(make_recipe, tmp_path: Path):
    pretrain(make_recipe(optim={"steps": 1}), tmp_path)
    with pytest.raises(RunFolderError, match="optim.steps was 1 and is 2"):
        pretrain(make_recipe(optim={"steps": 2}), tmp_path)
    for model in ({"hidden_size": 16}, {"num_layers": 1}, {"residual_intermediate_size": 0}):
        other = make_recipe(optim={"steps": 1}, model=model)
        (tmp_path / "recipe.resolved.toml").write_text(dump_recipe(other))
        with pytest.raises(RunFolderError, match="is of another model"):
            pretrain(other, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_holds_the_final_parameters(make_recipe, tmp_path: Path, kind: str):
    recipe = make_recipe(optim={"steps": 2}, objective={"kind": kind})
    checkpoint = open_checkpoint(pretrain(recipe, tmp_path))
    assert checkpoint.config.diffusion is not None
    assert checkpoint.config.diffusion.canvas_length == (1 if kind == "ar" else 8)
    params = {
        name.removeprefix("param."): t for name, t in final_state(tmp_path)[0].items() if name.startswith("param.")
    }
    for name, tensor in load_params(checkpoint, dtype="bfloat16").items():
        assert torch.equal(tensor, params[name].bfloat16()), name


def test_conversion_starts_from_the_checkpoint_and_adds_a_fresh_adapter(make_recipe, tmp_path: Path):
    source = pretrain(make_recipe(optim={"steps": 3}, objective={"kind": "ar"}), tmp_path / "ar")
    recipe = make_recipe(optim={"steps": 3}, run={"init": str(source)})
    run = Run(recipe, tmp_path / "mask")
    given = load_params(open_checkpoint(source), dtype="float32")
    for name, tensor in run.params.items():
        if name.startswith(qwen3.ADAPTER):
            assert name not in given
        else:
            assert torch.equal(tensor, given[name]), name
    assert not run.params[f"{qwen3.ADAPTER}down_proj.weight"].any()
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "mask" / "tokenizer" / file).read_bytes() == (source / file).read_bytes()
    converted = pretrain(recipe, tmp_path / "mask")
    with pytest.raises(RecipeError, match="model.residual_adapter.* which the recipe's model has no place for"):
        Run(make_recipe(objective={"kind": "ar"}, run={"init": str(converted)}), tmp_path / "back")
    with pytest.raises(RecipeError, match="num_layers 2 against 1"):
        Run(make_recipe(model={"num_layers": 1}, run={"init": str(source)}), tmp_path / "other")


def test_mask_token_must_be_a_token_of_its_own(make_recipe, tmp_path: Path, tokenizer_dir: Path):
    """K56: it is never guessed; an id with another meaning is refused by the config check."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in tokenizer_dir.iterdir():
        (foreign / path.name).write_text(path.read_text().replace("<|mask|>", "<|hole|>"))
    with pytest.raises(RecipeError, match=r"the tokenizer has no '<\|mask\|>'"):
        Run(make_recipe(data={"tokenizer": str(foreign)}), tmp_path / "a")


def test_contradicting_sizes_are_refused_before_training(make_recipe, tmp_path: Path):
    with pytest.raises(CheckpointError, match="3 heads do not divide into 2"):
        Run(make_recipe(model={"num_heads": 3}), tmp_path)


def poison(rows: Rows, weight: float) -> Rows:
    return dataclasses.replace(rows, weights=np.where(rows.weights > 0, np.float32(weight), rows.weights))


def test_step_with_a_loss_that_is_not_finite_is_skipped_and_logged(make_recipe, tmp_path: Path, monkeypatch):
    recipe = make_recipe(optim={"steps": 4})
    run = Run(recipe, tmp_path)
    run.train_step()
    before = {name: p.detach().clone() for name, p in run.params.items()}
    optimizer = {name: t.clone() for name, t in run.optimizers.tensors().items()}
    take = run.stream.take
    monkeypatch.setattr(run.stream, "take", lambda n: [poison(rows, float("inf")) for rows in take(n)])
    entry = run.train_step()
    assert entry["skipped"] == "the loss is not finite"
    assert (entry["step"], entry["num_skipped"]) == (2, 1)
    for name, tensor in run.params.items():
        assert torch.equal(tensor, before[name])
        assert tensor.grad is None
    for name, tensor in run.optimizers.tensors().items():
        assert torch.equal(tensor, optimizer[name])
    monkeypatch.undo()
    entry = run.train_step()
    assert "skipped" not in entry
    assert entry["num_skipped"] == 1
    assert run.num_skipped_in_a_row == 0


def test_step_without_any_target_is_skipped_and_counted(make_recipe, tmp_path: Path, monkeypatch):
    """K57 in the real step: the weights stay, whatever momentum the optimizers hold."""
    run = Run(make_recipe(), tmp_path)
    run.train_step()
    before = {name: p.detach().clone() for name, p in run.params.items()}
    take = run.stream.take
    monkeypatch.setattr(run.stream, "take", lambda n: [poison(rows, 0.0) for rows in take(n)])
    entry = run.train_step()
    assert (entry["loss"], entry["grad_norm"], entry["denominator"]) == (0, 0, 0)
    assert entry["skipped"] == "no row has a target"
    assert run.num_skipped == 1
    for name, tensor in run.params.items():
        assert torch.equal(tensor, before[name])


def test_run_that_only_skips_ends_with_an_error_and_its_last_good_state(make_recipe, tmp_path: Path, monkeypatch):
    recipe = make_recipe(optim={"steps": 20, "max_skipped_steps": 3})
    pretrain(recipe, tmp_path, stop_after_s=0)
    take = module.PackedStream.take
    monkeypatch.setattr(
        module.PackedStream, "take", lambda self, n: [poison(rows, float("inf")) for rows in take(self, n)]
    )
    with pytest.raises(
        DivergedError, match="3 steps in a row were skipped, step 4 because the loss is not finite; lower"
    ):
        pretrain(recipe, tmp_path)
    assert [line.get("skipped") for line in metrics(tmp_path)] == [None, *["the loss is not finite"] * 2]
    assert final_state(tmp_path)[1]["step"] == 1


def test_progress_and_evaluation_are_reported(make_recipe, tmp_path: Path):
    recipe = make_recipe(optim={"steps": 5}, run={"eval_every_steps": 2})
    seen: list[Progress] = []
    folders: list[Path] = []

    def evaluate(folder: Path) -> dict[str, Any]:
        folders.append(folder)
        return {"verified_rate": len(folders) / 10}

    model = pretrain(recipe, tmp_path, evaluate=evaluate, on_progress=seen.append)
    assert [p.step for p in seen] == [1, 2, 3, 4, 5]
    assert seen[-1].seconds_left == 0
    assert all(p.rows_per_s > 0 and p.seconds_left > 0 for p in seen[:-1])
    assert folders == [model] * 3
    evaluations = [(line["step"], line["eval"]["verified_rate"]) for line in metrics(tmp_path) if "eval" in line]
    assert evaluations == [(2, 0.1), (4, 0.2), (5, 0.3)]


def test_interrupted_evaluation_is_made_by_the_next_call_and_once(make_recipe, tmp_path: Path):
    """Ctrl-C while step 2 of 3 is evaluated, then while step 3 is; later calls have nothing left to do."""
    recipe = make_recipe(optim={"steps": 3}, run={"eval_every_steps": 2})
    calls = 0

    def evaluate(folder: Path) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls in (1, 3):
            raise KeyboardInterrupt
        return {"verified_rate": 0.5}

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe, tmp_path / "resumed", evaluate=evaluate)
    for _ in range(2):
        pretrain(recipe, tmp_path / "resumed", evaluate=evaluate)
    assert calls == 4
    pretrain(recipe, tmp_path / "straight", evaluate=evaluate)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_interrupt_saves_the_last_whole_step(make_recipe, tmp_path: Path):
    """Ctrl-C in the middle of a step: the step is finished, logged and saved before KeyboardInterrupt gets out."""
    recipe = make_recipe()
    pretrain(recipe, tmp_path / "straight")
    backward = torch.autograd.backward
    calls = 0

    def interrupted(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:  # first micro-batch of step 3
            signal.raise_signal(signal.SIGINT)
        backward(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe, tmp_path / "resumed")
    assert final_state(tmp_path / "resumed")[1]["step"] == 3
    assert len(metrics(tmp_path / "resumed")) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pretrain(recipe, tmp_path / "resumed")
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_learning_rate_warms_up_and_falls_along_a_cosine():
    ratios = [learning_rate_ratio(step, 100, 10, 0.1) for step in range(100)]
    assert ratios[0] == pytest.approx(0.1)
    assert ratios[9] == ratios[10] == 1
    assert ratios[55] == pytest.approx(0.55)
    assert ratios[99] == pytest.approx(0.1, abs=1e-3)
    assert ratios[10:] == sorted(ratios[10:], reverse=True)
    assert learning_rate_ratio(0, 10, 0, 0.0) == 1
    assert learning_rate_ratio(5, 5, 5, 0.2) == 1


def test_recipe_without_residual_pathway_trains_without_an_adapter(make_recipe, tmp_path: Path):
    recipe: PretrainRecipe = make_recipe(optim={"steps": 1}, model={"residual_intermediate_size": 0})
    run = Run(recipe, tmp_path)
    assert not any(name.startswith(qwen3.ADAPTER) for name in run.params)
    assert run.train_step()["loss"] > 0
