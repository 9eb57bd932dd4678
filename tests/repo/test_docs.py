"""Generated pages are fresh, README commands run, and nothing names the machine it was written on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKED = re.findall(r"<!-- run -->\n```(bash|python)\n(.*?)```", README, flags=re.DOTALL)
FOLDERS = ("src", "tests", "docs", "scripts", "recipes", "checkpoints", "benchmarks", ".ci", ".github")
BUILT = {"__pycache__", "dlmrt.egg-info", "build"}
# Split, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~}/])/(?:work" + r"|root|home|Users|farm|opt)/\w")


def _text_files() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a worktree's is a file
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [
        path
        for path in found
        if not BUILT & set(path.parts) and path.suffix not in (".safetensors", ".so", ".pyc", ".png")
    ]


def test_cli_page_is_fresh(run_python):
    done = run_python("scripts/write_docs.py", "--check")
    assert done.returncode == 0, done.stderr


def test_readme_has_commands_to_run():
    assert {language for language, _ in MARKED} == {"bash", "python"}


@pytest.mark.parametrize(("language", "block"), MARKED, ids=range(len(MARKED)))
def test_readme_commands_run(language, block, tmp_path):
    """Each marked block runs in an empty folder and prints something."""
    command = ["bash", "-euo", "pipefail", "-c"] if language == "bash" else [sys.executable, "-c"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DLMRT_TEST_")}  # switches of ours
    environment = {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, block],
        env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_no_file_names_a_path_of_one_machine():
    files = _text_files()
    assert len(files) > 50
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_versions_agree():
    import dlmrt

    assert f"version: {dlmrt.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {dlmrt.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
