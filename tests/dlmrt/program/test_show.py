"""Listings of the tiny model's programs equal the golden files; running this file as a program renews them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dlmrt.models.config import ResidualConfig, load_config, parse_config
from dlmrt.parallel.layout import Layout
from dlmrt.program.forwards import Formats, record_canvas, record_extend
from dlmrt.program.loop import LoopOptions, record_loop, record_types
from dlmrt.program.show import show
from dlmrt.testing import tiny_config

GOLDEN = Path(__file__).parent / "golden"
DATA = Path(__file__).parents[2] / "data"


def listings():
    """Every golden listing by file name."""
    config = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=48))
    uniform = tiny_config(diffusion={"noise": "uniform", "logit_shift": 1})
    greedy = LoopOptions(canvas_length=8, prefill_chunk=512, commit_rule="threshold", use_residual=True)
    drawn = LoopOptions(
        canvas_length=8, prefill_chunk=512, commit_rule="entropy_bound", is_greedy=False, is_filtered=True
    )
    grid = {"context_attention": "block_causal", "block_anchor": "position_zero"}
    shifted = tiny_config(diffusion=grid | {"logit_shift": 1})
    edited = tiny_config(diffusion=grid | {"delete_token_id": 5, "split_token_id": 6})
    sub_blocks, indel = (
        LoopOptions(canvas_length=8, prefill_chunk=512, commit_rule=rule, num_remembered=steps)
        for rule, steps in (("sub_blocks", 0), ("joint_threshold_indel", 64))
    )
    return {
        "loop_sub_blocks_shift.txt": record_loop(shifted, Formats(), sub_blocks, capacity=256),
        "loop_joint_threshold_indel.txt": record_loop(edited, Formats(), indel, capacity=256),
        "canvas_of_rank_1_of_2.txt": record_rank(two_layers_of_llada2()),
        "extend.txt": record_extend(config, Formats(), capacity=256, max_rows=512),
        "canvas.txt": record_canvas(config, Formats(), capacity=256, max_rows=8),
        "loop_threshold_residual.txt": record_loop(config, Formats(), greedy, capacity=256),
        "loop_entropy_bound_uniform_shift.txt": record_loop(uniform, Formats(), drawn, capacity=256),
        "canvas_llada2.txt": record_canvas(two_layers_of_llada2(), Formats(), capacity=256, max_rows=8),
        "canvas_diffusion_gemma.txt": record_canvas(two_layers_of_gemma(), Formats(), capacity=256, max_rows=16),
    }


def record_rank(config):
    """A canvas with the part of rank 1 of 2."""
    layout = Layout(config, 1, 2)
    shard = layout.shard(terms="bfloat16")
    return record_canvas(layout.config, Formats(), capacity=256, max_rows=8, shard=shard)


def two_layers_of_llada2():
    """A dense layer and one with experts."""
    given = json.loads((DATA / "llada2_tiny" / "config.json").read_text())
    return parse_config(given | {"block_size": 8, "mask_token_id": 511, "num_hidden_layers": 2})


def two_layers_of_gemma():
    """A sliding layer and a full one."""
    config = load_config(DATA / "dgemma_tiny")
    assert config.sliding is not None
    return dataclasses.replace(config, num_layers=2, sliding=dataclasses.replace(config.sliding, full_layers=(1,)))


@pytest.mark.parametrize("name", sorted(listings()))
def test_listing_equals_the_golden_file(name):
    assert show(listings()[name]) == (GOLDEN / name).read_text()


def test_records_of_the_loop_are_packed_in_the_order_of_the_listing():
    types = record_types(listings()["loop_threshold_residual.txt"])
    assert list(types) == ["prefill", "step", "block", "end"]
    assert types["prefill"].names == ("kind", "context", "num_prefill_forwards")
    assert types["prefill"].itemsize == 12
    assert types["step"]["canvas"].shape == (8,)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file, program in listings().items():
        (GOLDEN / file).write_text(show(program))
