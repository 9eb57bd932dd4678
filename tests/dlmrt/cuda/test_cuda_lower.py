"""What the lowering makes of recorded programs; running this file as a program renews the golden listings.

The golden files also are what a capture must do: the calls on the stand-in driver equal the listing, node for node.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs_cuda import ADAPTER, UNIFORM_SHIFTED, draw_params, small_config
from stand_in import GraphRunner

from dlmrt.cuda import programs
from dlmrt.cuda.kernels import loop as kernels
from dlmrt.cuda.launches import FLAGS
from dlmrt.cuda.lower import bounded, lower
from dlmrt.cuda.programs import ProgramStore
from dlmrt.cuda.weights import Packed
from dlmrt.parallel.layout import Layout
from dlmrt.program.forwards import Formats, record_canvas, record_extend
from dlmrt.program.loop import RULE_SCALARS, LoopOptions, record_loop, record_types
from dlmrt.program.nodes import Kernel, While, walk
from dlmrt.program.plan import plan
from dlmrt.program.show import show
from dlmrt.program.signatures import LOOP_OPS
from dlmrt.testing import assert_reads_see_own_writes

GOLDEN = Path(__file__).parent / "golden"
BF16 = Formats(matrix="bfloat16", table="bfloat16", cache="bfloat16")
RESIDUAL = small_config(residual=ADAPTER)
SHIFTED = small_config(**UNIFORM_SHIFTED)
GREEDY = LoopOptions(canvas_length=4, prefill_chunk=16, commit_rule="threshold", use_residual=True)
DRAWN = LoopOptions(canvas_length=4, prefill_chunk=16, commit_rule="joint_threshold", is_greedy=False)
FILTERED = LoopOptions(
    canvas_length=4, prefill_chunk=16, commit_rule="entropy_bound", is_greedy=False, is_filtered=True
)

RECORDED = {
    "canvas_float32.txt": (SHIFTED, record_canvas(SHIFTED, Formats(), capacity=512, max_rows=4)),
    "loop_bfloat16_residual.txt": (RESIDUAL, record_loop(RESIDUAL, BF16, GREEDY, capacity=512)),
    "loop_drawn": (SHIFTED, record_loop(SHIFTED, Formats(), DRAWN, capacity=512)),
    "loop_filtered": (SHIFTED, record_loop(SHIFTED, BF16, FILTERED, capacity=512)),
    "extend": (RESIDUAL, record_extend(RESIDUAL, BF16, capacity=512, max_rows=16)),
}


def lowered(name):
    config, program = RECORDED[name]
    made = lower(program, config).program
    return bounded(made) if record_types(program) else made


def test_every_rule_has_its_kernels():
    grid = {"context_attention": "block_causal", "block_anchor": "position_zero"}
    config = small_config(logit_shift=1, delete_token_id=3, split_token_id=4, **grid)
    for rule in RULE_SCALARS:
        options = LoopOptions(canvas_length=4, prefill_chunk=16, commit_rule=rule, num_remembered=64)
        program = record_loop(config, Formats(), options, capacity=512)
        operations = {node.op for node in walk(lower(program, config).program.body) if isinstance(node, Kernel)}
        assert all(hasattr(kernels, op) for op in operations & set(LOOP_OPS))


@pytest.mark.parametrize("name", [name for name in RECORDED if name.endswith(".txt")])
def test_listing_equals_the_golden_file(name):
    assert show(lowered(name)) == (GOLDEN / name).read_text()


def calls(body, end=None):
    """The launches and conditional nodes that a capture of `body` must make; `end` is the flag of its loop."""
    made, before = [], None

    def set_behind(flag):
        """A kernel sets the condition, unless the one before it computes the flag and does so itself."""
        is_kernel = isinstance(before, Kernel) and before.op in FLAGS
        if not is_kernel or before.outputs[FLAGS[before.op]] is not flag:
            made.append("set_condition")

    for node in body:
        if isinstance(node, Kernel):
            made.append(node.op)
        else:
            set_behind(node.flag)
            is_loop = isinstance(node, While)
            made.append(("while", calls(node.body, node.flag)) if is_loop else ("if", calls(node.body)))
        before = node
    if end is not None:
        set_behind(end)
    return made


@pytest.mark.parametrize("name", list(RECORDED))
def test_the_calls_on_the_driver_equal_the_listing(name, monkeypatch):
    config, program = RECORDED[name]
    monkeypatch.setattr(programs, "make_runner", lambda steps, **_: GraphRunner(steps))
    params = {key: Packed(values=values) for key, values in draw_params(config).items()}
    store = ProgramStore(config, params, device=torch.device("cpu"), mode="loop")
    store.reserve(512, 0)
    runner = store.get("it", lambda: program).runner
    assert runner.driver.tree(runner.graph.graph) == calls(lowered(name).body)


@pytest.mark.parametrize("name", list(RECORDED))
def test_no_read_sees_another_buffers_write(name):
    program = lowered(name)
    assert_reads_see_own_writes(program, plan(program))


@pytest.mark.parametrize("head_dim", [64, 48])
def test_nvfp4_operands_are_written_by_the_kernels_that_make_the_values(head_dim):
    """The same launches as with bfloat16 operands; a head of odd width needs one that quantises."""
    config = replace(SHIFTED, hidden_size=128, intermediate_size=256, num_heads=8, head_dim=head_dim)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    named = {f"model.layers.0.{name}.weight": "nvfp4" for name in names}
    program = record_canvas(config, replace(BF16, named=named), capacity=512, max_rows=4)
    plain, both = (
        [node for node in lower(program, config, has_nvfp4_operands=is_both).program.body if isinstance(node, Kernel)]
        for is_both in (False, True)
    )
    extra = ["sum_rows"] if head_dim == 48 else []
    assert sorted(node.op for node in both) == sorted([*(node.op for node in plain), *extra])
    operands = {
        node.inputs["x"].dtype for node in both if node.op == "matmul" and node.inputs["weight"].dtype == "nvfp4"
    }
    assert operands == {"uint8"}


def test_four_kernels_of_a_step_set_the_conditions_that_they_compute():
    """No kernel stands there for a condition alone, but where a model has a residual, whose flag is older."""
    (outer,) = [part for kind, part in filter(is_node, calls(lowered("loop_drawn").body)) if kind == "while"]
    (step,) = [part for kind, part in filter(is_node, outer) if kind == "while"]
    assert "set_condition" not in step and "set_condition" not in outer
    assert step[-1] == "finish_step" and outer[-1] == "bound_launch"


def is_node(call):
    """Whether a call makes a conditional node."""
    return isinstance(call, tuple)


def test_logits_exist_only_where_something_reads_them():
    """A greedy or drawn program without residual takes statistics tile by tile."""
    has_logits = {
        name: any(isinstance(node, Kernel) and "logits" in node.outputs for node in walk(lowered(name).body))
        for name in RECORDED
    }
    assert not has_logits["loop_drawn"]
    assert has_logits["loop_filtered"] and has_logits["loop_bfloat16_residual.txt"]


def test_a_layer_is_ten_launches():
    """Norms take the sums before them, so no kernel only adds."""
    ops = [node.op for node in lowered("canvas_float32.txt").body if isinstance(node, Kernel)]
    layer = ["matmul", "qk_norm_rope_store", "attention", "attention_merge", "matmul", "norm", "matmul", "gate",
             "matmul", "norm"]  # fmt: skip
    assert ops == ["embed", "norm", *layer, "shift", "matmul", "sum_rows"]


def record_rank(record, config, *arguments, **sizes):
    """A program of rank 1 of 2."""
    layout = Layout(config, 1, 2)
    program = record(layout.config, Formats(), *arguments, capacity=512, shard=layout.shard(terms="float32"), **sizes)
    return lower(program, layout.config)


def test_a_layer_of_a_rank_adds_up_with_the_skip_stream_and_the_norm_behind_it():
    """Two meetings a layer and one before it; no kernel only adds or only norms."""
    program = record_rank(record_canvas, SHIFTED, max_rows=4).program
    kernels = [node for node in program.body if isinstance(node, Kernel)]
    over_ranks = ["put_terms", "meet", "sum_terms"]
    layer = ["matmul", "qk_norm_rope_store", "attention", "attention_merge", "matmul", *over_ranks, "matmul", "gate",
             "matmul", *over_ranks]  # fmt: skip
    assert [node.op for node in kernels] == ["embed", *over_ranks, *layer, "shift", "matmul", "sum_rows"]
    sums = [node for node in kernels if node.op == "sum_terms"]
    assert ["x" in node.inputs for node in sums] == [False, True, True]
    assert all("weight" in node.inputs for node in sums)


@pytest.mark.parametrize("options", [GREEDY, DRAWN, FILTERED])
def test_a_loop_of_a_rank_asks_rank_0_wherever_it_may_end(options):
    """Nothing but the meeting reads the host's flag; scratch is not shared while it lives."""
    config = RESIDUAL if options.use_residual else SHIFTED
    lowered_rank = record_rank(record_loop, config, options)
    program = bounded(lowered_rank.program)
    readers = [node for node in walk(program.body) if isinstance(node, Kernel) and any(
        buffer.name == "cancel" for buffer in node.inputs.values())]  # fmt: skip
    assert len(readers) == 4 and {node.op for node in readers} == {"meet"}
    assert all(node.outputs["agreed"].name == "agreed_cancel" for node in readers)
    assert_reads_see_own_writes(program, plan(program))
    widest = -(-config.vocab_size // 2) if options.is_filtered else config.hidden_size
    rows = 4 if options.is_filtered else 16  # of logits, of a chunk of the prompt
    assert lowered_rank.part_bytes == 4 * rows * widest


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file in RECORDED:
        if file.endswith(".txt"):
            (GOLDEN / file).write_text(show(lowered(file)))
