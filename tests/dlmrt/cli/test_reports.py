"""`dlmrt show`, `dlmrt env`, `--version`, and the verbs' own names."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

import dlmrt
from dlmrt.cli.terminal import STYLES, CanvasPainter
from dlmrt.env import Environment
from dlmrt.errors import UnknownOptionError, UsageError
from dlmrt.models import qwen3
from dlmrt.testing import END, END_OF_TEXT, MASK
from dlmrt.types import CanvasEvent


def test_show_counts_what_is_in_the_files(cli, tiny_model, engine):
    report = json.loads(cli("show", tiny_model, "--json").out)
    parameters = sum(math.prod(shape) for shape in qwen3.tensor_shapes(engine.config).values())
    assert report["weights"]["parameters"] == parameters
    assert report["weights"]["disk_bytes"] == sum(file.stat().st_size for file in tiny_model.iterdir())
    assert report["memory"]["weights_bytes"] == 4 * parameters
    per_token = 4 * 2 * engine.config.num_layers * engine.config.num_kv_heads * engine.config.head_dim
    assert report["memory"]["total_bytes_at_8192"] == 4 * parameters + 8192 * per_token
    assert report["diffusion"]["canvas_length"] == 4
    assert report["special_ids"] == {
        "eos_token_ids": [END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "bos_token_id": None, "mask_token_id": MASK,
    }  # fmt: skip
    assert report["decode_defaults"]["max_tokens"] == 20  # generation_config.json
    assert report["decode_defaults"]["commit_rule"] == "threshold"


def test_show_for_people(cli, tiny_model):
    outcome = cli("show", tiny_model)
    assert outcome.status == 0
    rows = {line.split()[0]: line for line in outcome.out.splitlines()}
    assert "MiB" in rows["disk_bytes"]
    assert rows["architecture"].endswith("Qwen3ForCausalLM")


def test_show_of_a_missing_model(cli):
    outcome = cli("show", "nothing")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1


def test_env_reports_this_process(cli, monkeypatch):
    monkeypatch.setenv("DLMRT_NUM_THREADS", "3")
    report = json.loads(cli("env", "--json").out)
    assert report["dlmrt"] == dlmrt.__version__
    assert report["packages"]["numpy"] == np.__version__
    assert report["executors"]["eager"] == "available"
    assert report["environment"]["DLMRT_NUM_THREADS"] == 3
    assert report["environment"]["DLMRT_EXECUTOR"] == "auto"
    assert 1 <= report["cpu"]["num_cpus_allowed"] <= os.cpu_count()
    assert cli("doctor").out.splitlines()[0].split() == ["dlmrt", dlmrt.__version__]


def test_version_and_help(cli):
    assert cli("--version").out.startswith(f"dlmrt {dlmrt.__version__} (python ")
    top = cli()
    assert top.status == 0
    assert top.out == cli("--help").out == cli("-h").out
    assert all(verb in top.out for verb in ("generate", "chat", "show", "env"))


def test_unknown_verb_names_the_nearest(cli):
    outcome = cli("genrate")
    assert outcome.status == 2
    assert outcome.err == "error: No such command 'genrate'. Did you mean 'generate'?\n"


def test_environment_variables():
    assert Environment.read({"DLMRT_NUM_THREADS": " 2 ", "DLMRT_DTYPE": "", "OTHER": "x"}) == Environment(num_threads=2)
    for value in ("0", "-1", "1.5", "two", "\u0662"):
        with pytest.raises(UsageError, match="DLMRT_NUM_THREADS"):
            Environment.read({"DLMRT_NUM_THREADS": value})
    with pytest.raises(UnknownOptionError, match="did you mean 'DLMRT_DTYPE'"):
        Environment.read({"DLMRT_DTYP": "float32"})


def _event(canvas, unresolved, changed, *, block_idx=0, step=0):
    return CanvasEvent(
        block_idx=block_idx, step=step, start=0, canvas_L=np.array(canvas, np.int32),
        is_unresolved_L=np.array(unresolved, bool), changed_L=np.array(changed, bool),
        confidence_L=np.ones(len(canvas), np.float32), text="",
    )  # fmt: skip


def _styles(text):
    return [str(span.style) for span in text.spans]


def test_painter_tells_new_edited_and_kept_apart():
    painter = CanvasPainter(lambda token: f"<{token}>")
    first = painter.paint(_event([5, 6, 2, 2], [0, 0, 1, 1], [0, 1, 0, 0]))  # slot 0 is the end of the prompt
    assert first.plain == "<6>\u2591\u2591"
    assert _styles(first) == [STYLES["new"], STYLES["undecided"], STYLES["undecided"]]
    second = painter.paint(_event([5, 7, 8, 2], [0, 0, 0, 1], [0, 1, 1, 0], step=1))
    assert second.plain == "<7><8>\u2591"
    assert _styles(second) == [STYLES["edited"], STYLES["new"], STYLES["undecided"]]
    third = painter.paint(_event([5, 7, 8, 9], [0, 0, 0, 0], [0, 0, 0, 1], step=2))
    assert third.plain == "<7><8><9>"
    assert painter.status() == "block 1  step 3  1.00 tokens/step"
    painter.paint(_event([1, 2, 3, 4], [0, 0, 0, 0], [1, 1, 1, 1], block_idx=1))
    assert painter.status() == "block 2  step 1  1.75 tokens/step"
