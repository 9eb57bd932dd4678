"""Several real gloo processes answer what one does; a rank that dies or hangs is named. `cases` has what they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlmrt.checkpoint.save import save_checkpoint
from dlmrt.decode.engine import Engine
from dlmrt.testing import byte_codec, tiny_config

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(400)  # up to eighteen processes on a loaded machine
FAMILIES = [
    "qwen3, mask", "qwen3, mask, residual", "qwen3, uniform, residual", "qwen2, sub-blocks behind a shift",
    "next token", "llada2, groups of experts", "llada2, experts by block, deletions", "diffusion_gemma",
]  # fmt: skip


def run_jobs(*jobs: str) -> dict[tuple[str, int], list[str]]:
    """Lines of each (job, rank); the last one is its exit status."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DLMRT_")}
    environment |= {
        "PYTHONPATH": str(HERE.parents[2] / "src"), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "DLMRT_RANK_TIMEOUT": "100",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, HERE / "together.py", *jobs], env=environment, capture_output=True, text=True, check=False,
        timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, int], list[str]] = {}
    for line in done.stdout.splitlines():
        label = re.match(r"(.*) (\d+) of (\d+): ", line)
        assert label, line
        found.setdefault((f"{label[1]} of {label[3]}", int(label[2])), []).append(line[label.end() :])
    return found


@pytest.fixture(scope="module")
def equal():
    return run_jobs("2:equal", "4:equal")


@pytest.fixture(scope="module")
def lost():
    return run_jobs("3:lost:killed", "3:lost:stopped", "3:lost:hangs", "3:lost:raises")


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_forwards_and_commit_order_are_those_of_one_process(equal, size):
    """Also log-probabilities' statistics, single calls, and soft embeddings of an odd vocabulary (K39)."""
    assert equal[f"equal of {size}", 0] == [*FAMILIES, "status 0"]
    assert all(equal[f"equal of {size}", rank] == ["status 0"] for rank in range(1, size))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "rank 1 of 3 has not been heard of for"),
        ("stopped", "rank 1 of 3 has not been heard of for"),
        ("hangs", "rank 1 of 3 lives, but the others wait for it"),
        ("raises", "rank 1 of 3 has failed"),
    ],
)
def test_a_lost_rank_is_named_with_its_place_and_last_lines(lost, how, said):
    """K60, within the time-out of a collective and some seconds; afterwards every call is refused."""
    *lines, status = lost[f"lost {how} of 3", 0]
    assert status == "status 0", lines
    report = next(line for line in lines if "start all again" in line)
    assert said in report
    assert re.search(r"it was at: command \d+, (block 0, step \d|extend by \d+ rows)", report)
    assert "a line of its own" in report
    if how == "raises":
        assert "MemoryError: no memory for the fourth layer" in report


@pytest.fixture(scope="module")
def folders(tmp_path_factory, make_params) -> list[Path]:
    """Two checkpoints of one shape and other weights."""
    text_files = tmp_path_factory.mktemp("tokenizer")
    byte_codec().tokenizer.save(str(text_files / "tokenizer.json"))
    (text_files / "chat_template.jinja").write_text("{{ messages[0].content }}")
    config = tiny_config(diffusion={"canvas_length": 4})
    folders = [tmp_path_factory.mktemp("models") / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        save_checkpoint(folder, config, make_params(config, seed=seed), tokenizer_files=text_files)
    return folders


def test_command_line_and_server_run_in_all_ranks_and_answer_once(folders):
    """Answers are those of one process; files that differ are refused on every rank before a weight is loaded."""
    found = run_jobs(f"2:cli:{folders[0]}", f"2:served:{folders[0]}", f"2:mismatch:{folders[0]}:{folders[1]}")
    answers = {key: lines for key, lines in found.items() if key[0].startswith("cli")}
    (first, second) = (lines for _, lines in sorted(answers.items()))
    assert second == ["status 0"]
    with Engine.load(folders[0], executor="eager") as engine:
        wanted = engine.generate([{"role": "user", "content": "hello"}], max_tokens=9)
        ids = engine.generate("hello", max_tokens=9).token_ids
    assert "\n".join(first).startswith(wanted.text)
    assert first[-1] == "status 0"
    assert any("executor parallel" in line for line in first)
    served = [lines for (job, _), lines in sorted(found.items()) if job.startswith("served")]
    assert served == [[str(ids), str(ids), "status 0"], ["status 0"]]
    for key, lines in found.items():
        if key[0].startswith("mismatch"):
            assert lines[-1] == "status 2"
            assert re.search(r"error: rank 0 has checkpoint '\w+' and rank 1 has '\w+'; start all ranks", lines[0])
