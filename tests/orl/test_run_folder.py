"""The run folder: atomic state, damaged state, full disk, metrics cut to the resumed step."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orl.errors import RunFolderError
from orl.recipe import OptimSection, PretrainRecipe, dump_recipe
from orl.run_folder import RunFolder


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b.step": torch.tensor(value)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def steps(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.states.iterdir())


def test_newest_state_comes_back_and_two_are_kept(folder: RunFolder):
    for step in (1, 5, 7):
        folder.save_state(step, tensors(step), {"stream": {"pool_idx": step}})
    assert steps(folder) == ["step_00000005", "step_00000007"]
    loaded = folder.load_state()
    assert loaded is not None
    assert loaded[1] == {"step": 7, "stream": {"pool_idx": 7}}
    for name, tensor in tensors(7).items():
        assert torch.equal(loaded[0][name], tensor)


def test_new_folder_has_no_state(folder: RunFolder):
    assert folder.load_state() is None


def test_transposed_tensors_and_repeated_saves(folder: RunFolder):
    matrix = torch.arange(6.0).reshape(2, 3)
    folder.save_state(1, {"m": matrix.T}, {})
    folder.save_state(1, {"m": matrix.T}, {})
    loaded = folder.load_state()
    assert loaded is not None
    assert torch.equal(loaded[0]["m"], matrix.T)


def test_state_of_a_step_that_is_there_gets_the_newer_counters(folder: RunFolder):
    """An evaluation that was interrupted and made later belongs to the same step; its line stays once it is saved."""
    folder.log({"step": 1, "loss": 0.5})
    folder.save_state(1, tensors(1), {"evaluations": []})
    folder.log({"step": 1, "eval": {"a": 1}})  # killed before it was saved: made again, so its line must go
    loaded = folder.load_state()
    assert loaded is not None
    assert loaded[1] == {"step": 1, "evaluations": []}
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == [{"step": 1, "loss": 0.5}]
    folder.log({"step": 1, "eval": {"a": 1}})
    folder.save_state(1, tensors(1), {"evaluations": [1]})
    loaded = folder.load_state()
    assert loaded is not None
    assert loaded[1]["evaluations"] == [1]
    assert torch.equal(loaded[0]["a"], tensors(1)["a"])
    assert len(folder.metrics.read_text().splitlines()) == 2


DAMAGES = {
    "tensors cut short": lambda path: (path / "tensors.safetensors").write_bytes(
        (path / "tensors.safetensors").read_bytes()[:-10]
    ),
    "tensors empty": lambda path: (path / "tensors.safetensors").write_bytes(b""),
    "tensors missing": lambda path: (path / "tensors.safetensors").unlink(),
    "json missing": lambda path: (path / "state.json").unlink(),
    "json cut short": lambda path: (path / "state.json").write_text('{"step": 5, "st'),
    "json without step": lambda path: (path / "state.json").write_text("{}"),
    "json no object": lambda path: (path / "state.json").write_text("3"),
    "empty folder": lambda path: [child.unlink() for child in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_state_is_set_aside_and_the_older_one_used(folder: RunFolder, damage: str, caplog):
    """K59: and the damaged one must not push the good ones out later."""
    for step in (3, 5):
        folder.log({"step": step})
        folder.save_state(step, tensors(step), {"note": "x"})
    DAMAGES[damage](folder.states / "step_00000005")
    loaded = folder.load_state()
    assert loaded is not None
    assert loaded[1]["step"] == 3
    assert "step_00000005 is damaged" in caplog.text
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [3]
    folder.save_state(4, tensors(4), {})
    assert [name for name in steps(folder) if name.startswith("step_")] == ["step_00000003", "step_00000004"]
    folder.save_state(5, tensors(5), {})
    loaded = folder.load_state()
    assert loaded is not None
    assert loaded[1]["step"] == 5


def test_no_readable_state_is_an_error_not_a_fresh_start(folder: RunFolder):
    folder.save_state(3, tensors(3), {})
    DAMAGES["json missing"](folder.states / "step_00000003")
    with pytest.raises(RunFolderError, match="no state in .* can be read; remove the folder"):
        folder.load_state()


def test_leftover_of_a_killed_save_is_ignored_and_removed(folder: RunFolder):
    folder.save_state(3, tensors(3), {})
    leftover = folder.states / ".partial"
    leftover.mkdir()
    (leftover / "tensors.safetensors").write_bytes(b"x" * 100)
    loaded = folder.load_state()
    assert loaded is not None
    assert loaded[1]["step"] == 3
    folder.save_state(4, tensors(4), {})
    assert steps(folder) == ["step_00000003", "step_00000004"]


def test_metrics_are_cut_to_the_state_and_torn_lines_dropped(folder: RunFolder):
    for step in (1, 2, 3):
        folder.log({"step": step, "loss": float("nan") if step == 2 else 0.5})
    folder.log({"step": 2, "eval": {"verified_rate": 0.5}})
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    folder.save_state(2, tensors(2), {})
    folder.load_state()
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines == [
        {"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 2, "eval": {"verified_rate": 0.5}},
    ]  # fmt: skip


def test_metrics_of_a_run_that_never_saved_are_dropped(folder: RunFolder):
    folder.log({"step": 1})
    assert folder.load_state() is None
    assert folder.metrics.read_text() == ""


def test_recipe_is_kept_and_another_one_refused(folder: RunFolder):
    recipe = PretrainRecipe()
    folder.check_recipe(recipe)
    folder.check_recipe(recipe)
    assert (folder.path / "recipe.resolved.toml").read_text() == dump_recipe(recipe)
    other = dataclasses.replace(recipe, optim=OptimSection(steps=7))
    with pytest.raises(RunFolderError, match=r"optim.steps was 2000 and is 7\); take another --run-dir or remove"):
        folder.check_recipe(other)


def test_recipe_of_an_earlier_version_counts_new_keys_as_defaults(folder: RunFolder):
    text = dump_recipe(PretrainRecipe())
    assert "max_skipped_steps = 10\n" in text
    (folder.path / "recipe.resolved.toml").write_text(text.replace("max_skipped_steps = 10\n", ""))
    folder.check_recipe(PretrainRecipe())
    with pytest.raises(RunFolderError, match="max_skipped_steps was 10 and is 3"):
        folder.check_recipe(PretrainRecipe(optim=OptimSection(max_skipped_steps=3)))


def test_damaged_recipe_is_refused(folder: RunFolder):
    (folder.path / "recipe.resolved.toml").write_text("[optim")
    with pytest.raises(RunFolderError, match="not valid TOML.*take another --run-dir or remove the folder"):
        folder.check_recipe(PretrainRecipe())


FULL_DISK = """
import pathlib, resource, sys, torch
from orl.errors import RunFolderError
from orl.run_folder import RunFolder
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
folder = RunFolder(pathlib.Path(sys.argv[1]) / "run")
folder.save_state(1, {"a": torch.ones(50_000)}, {})
try:
    folder.save_state(2, {"a": torch.ones(500_000)}, {})
except RunFolderError as error:
    print(error)
tensors, extra = folder.load_state()
print(extra["step"], bool((tensors["a"] == 1).all()), sorted(p.name for p in folder.states.iterdir()))
folder.save_state(3, {"a": torch.ones(50_000)}, {})
print(folder.load_state()[1]["step"])
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_full_disk_leaves_the_state_before(tmp_path: Path, start_python, kind: str):
    """K59: a file size limit, and a file system of 1 MiB where this user may mount one."""
    arguments = ["-c", FULL_DISK, str(tmp_path), kind]
    if kind == "tmpfs":
        if not can_mount():
            pytest.skip("this user cannot mount a tmpfs")
        command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"', str(tmp_path)]
        arguments = ["-c", f"import os, sys; os.execvp('unshare', [*{command!r}, sys.executable, *{arguments!r}])"]
    stdout, stderr = start_python(*arguments).communicate(timeout=60)
    lines = stdout.splitlines()
    assert len(lines) == 3, stderr
    assert "cannot save step 2" in lines[0]
    assert "free space and run the same command" in lines[0]
    assert lines[1] == "1 True ['step_00000001']"
    assert lines[2] == "3"


def test_one_process_at_a_time(tmp_path: Path):
    """A second process is refused while the first lives; the lock of a killed one is gone."""
    program = f"""
from pathlib import Path
from orl.run_folder import RunFolder
RunFolder(Path({str(tmp_path / "run")!r}))
print("open", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(RunFolderError, match="another process trains in .*--run-dir"):
            RunFolder(tmp_path / "run")
        first.kill()
    RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run")  # the same process may open it again
