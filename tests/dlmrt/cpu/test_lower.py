"""What the lowering makes of the tiny model's programs; running this file as a program renews the golden listings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from dlmrt.cpu.lower import lower
from dlmrt.models.config import ResidualConfig, load_config, parse_config
from dlmrt.program.forwards import Formats, record_canvas, record_extend
from dlmrt.program.loop import LoopOptions, record_loop
from dlmrt.program.nodes import Kernel, walk
from dlmrt.program.plan import plan
from dlmrt.program.show import show
from dlmrt.testing import assert_reads_see_own_writes, tiny_config

GOLDEN = Path(__file__).parent / "golden"
INT8 = Formats(matrix="int8", table="bfloat16", cache="bfloat16")
RESIDUAL = tiny_config(residual=ResidualConfig(kind="gated_mlp", intermediate_size=48))
SHIFTED = tiny_config(diffusion={"noise": "uniform", "logit_shift": 1})
GREEDY = LoopOptions(canvas_length=8, prefill_chunk=512, commit_rule="threshold", use_residual=True)
DRAWN = LoopOptions(canvas_length=8, prefill_chunk=512, commit_rule="joint_threshold", is_greedy=False)
FILTERED = LoopOptions(
    canvas_length=8, prefill_chunk=512, commit_rule="entropy_bound", is_greedy=False, is_filtered=True
)


GRID = {"context_attention": "block_causal", "block_anchor": "position_zero"}
FAST = tiny_config(diffusion=GRID | {"logit_shift": 1})
EDITED = tiny_config(diffusion=GRID | {"delete_token_id": 5, "split_token_id": 6})
SUB_BLOCKS = LoopOptions(canvas_length=8, prefill_chunk=512, commit_rule="sub_blocks")
INDEL = LoopOptions(
    canvas_length=8, prefill_chunk=512, commit_rule="joint_threshold_indel", is_greedy=False, num_remembered=64
)
DATA = Path(__file__).parents[2] / "data"
CANVAS = LoopOptions(canvas_length=16, prefill_chunk=512, commit_rule="entropy_bound", use_residual=True)


def two_layers_of_llada2():
    """A dense layer and one with experts."""
    given = json.loads((DATA / "llada2_tiny" / "config.json").read_text())
    return parse_config(given | {"block_size": 8, "mask_token_id": 511, "num_hidden_layers": 2})


def two_layers_of_gemma():
    """A sliding layer and a full one."""
    config = load_config(DATA / "dgemma_tiny")
    return dataclasses.replace(config, num_layers=2, sliding=dataclasses.replace(config.sliding, full_layers=(1,)))


def programs():
    """Golden listings by file name, and programs of the other paths without one."""
    return {
        "canvas_float32.txt": lower(record_canvas(SHIFTED, Formats(), capacity=256, max_rows=8), SHIFTED),
        "loop_int8_residual.txt": lower(record_loop(RESIDUAL, INT8, GREEDY, capacity=256), RESIDUAL),
        "loop_drawn": lower(record_loop(SHIFTED, Formats(), DRAWN, capacity=256), SHIFTED),
        "loop_sub_blocks": lower(record_loop(FAST, INT8, SUB_BLOCKS, capacity=256), FAST),
        "loop_indel_int8.txt": lower(record_loop(EDITED, INT8, INDEL, capacity=256), EDITED),
        "loop_filtered": lower(record_loop(SHIFTED, INT8, FILTERED, capacity=256), SHIFTED),
        "canvas_llada2_int8.txt": lower(
            record_canvas(two_layers_of_llada2(), INT8, capacity=256, max_rows=8), two_layers_of_llada2()
        ),
        "loop_diffusion_gemma.txt": lower(
            record_loop(two_layers_of_gemma(), Formats(), CANVAS, capacity=256), two_layers_of_gemma()
        ),
        "extend": lower(record_extend(RESIDUAL, INT8, capacity=256, max_rows=512), RESIDUAL),
    }


@pytest.mark.parametrize("name", [name for name in sorted(programs()) if name.endswith(".txt")])
def test_listing_equals_the_golden_file(name):
    assert show(programs()[name].program) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", sorted(programs()))
def test_no_read_sees_another_buffers_write(name):
    program = programs()[name].program
    assert_reads_see_own_writes(program, plan(program))


def test_projections_are_fused_and_packed_once():
    lowered = programs()["loop_int8_residual.txt"]
    fused = {tuple(tensor.name.split(".")[-2] for tensor in tensors) for tensors in lowered.sources.values()}
    assert {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",), ("o_proj",)} <= fused
    names = [buffer.name for buffer in lowered.sources]
    assert len(names) == len(set(names)) == 4 * RESIDUAL.num_layers + 2 + 1  # layers, adapter, head


def test_logits_exist_only_where_something_reads_them():
    """A greedy program without residual takes statistics tile by tile; soft embeddings and filters need the logits."""
    has_logits = {
        name: any(isinstance(node, Kernel) and "logits" in node.outputs for node in walk(lowered.program.body))
        for name, lowered in programs().items()
    }
    assert not has_logits["loop_drawn"]
    assert not has_logits["loop_indel_int8.txt"]  # it takes the statistics again where it looks for other ids
    assert has_logits["loop_filtered"] and has_logits["loop_int8_residual.txt"]


def spanned(config, num_threads, *, canvas=32, formats=INT8):
    """The lowered loop over `canvas` slots for so many threads."""
    options = dataclasses.replace(GREEDY, canvas_length=canvas, use_residual=False)
    return lower(record_loop(config, formats, options, capacity=256), config, num_threads=num_threads).program


def spans_of(program):
    """Kernels of each span, in order."""
    spans = {}
    for node in walk(program.body):
        if isinstance(node, Kernel) and node.span is not None:
            spans.setdefault(node.span, []).append(node)
    return list(spans.values())


def test_threads_go_through_all_layers_without_waiting_but_for_attention():
    program = spanned(SHIFTED, 2)
    assert " span 0\n" in show(program) and " span 0, waits\n" in show(program)
    assert_reads_see_own_writes(program, plan(program))
    spans = spans_of(program)
    num_layers = [sum(node.op == "attention" for node in nodes) for nodes in spans]
    assert num_layers == [SHIFTED.num_layers, 0, SHIFTED.num_layers]  # a step, its final norm behind the shift, commit
    for nodes in spans:
        assert all(node.waits == (node.op == "attention") for node in nodes)
        assert {node.attributes["rows"] for node in nodes} == {32}
        body = next(b for b in bodies(program.body) if nodes[0] in b)
        assert list(body[body.index(nodes[0]) :][: len(nodes)]) == nodes  # neighbours
    placement = plan(program)
    for nodes in spans:
        waits = [i for i, node in enumerate(nodes) if node.waits]
        for first, last in itertools.pairwise([0, *waits, len(nodes)]):
            used = {b: None for node in nodes[first:last] for b in (*node.inputs.values(), *node.outputs.values())}
            pieces = sorted((placement.offsets[b], b.num_bytes) for b in used if b.kind == "scratch")
            assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(pieces))


def bodies(body):
    """`body` and all that are nested in it."""
    yield body
    for node in body:
        if not isinstance(node, Kernel):
            yield from bodies(node.body)


@pytest.mark.parametrize(
    ("config", "num_threads", "canvas"),
    [
        (SHIFTED, 1, 32),
        (SHIFTED, 3, 64),
        (SHIFTED, 4, 32),
        (SHIFTED, 2, 40),
        (tiny_config(intermediate_size=50_000), 2, 32),
    ],
    ids=["one thread", "uneven", "few rows", "rows that share a group", "large layer"],
)
def test_other_work_is_shared_by_columns(config, num_threads, canvas):
    program = spanned(config, num_threads, canvas=canvas)
    assert not spans_of(program)
    assert any(node.op == "qkv_attention" for node in walk(program.body) if isinstance(node, Kernel))


def test_prefill_stops_at_the_last_layers_keys_and_values():
    """Nobody reads a context row's final hidden state, so its last attention, MLP and norm are not computed."""
    ops = [node.op for node in programs()["extend"].program.body]
    assert ops.count("qkv_attention") == RESIDUAL.num_layers - 1
    assert ops.count("qk_norm_rope_store") == 1 and ops.count("attention") == 0


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file, made in programs().items():
        if file.endswith(".txt"):
            (GOLDEN / file).write_text(show(made.program))
