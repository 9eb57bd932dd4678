"""The recorder refuses what does not fit, drops what nobody reads, and knows presence and nesting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlmrt.models.config import RopeConfig
from dlmrt.program.nodes import If, Kernel, Rows, While, walk
from dlmrt.program.record import Recorder, RecordError, describe_rope
from dlmrt.program.signatures import SIGNATURES, signature


@pytest.fixture
def recorder():
    return Recorder("test")


def rows_of(recorder, maximum=16):
    return Rows(symbol="T", maximum=maximum, count=recorder.scalar("rows"))


def test_every_signature_parses_and_updates_in_place_only_what_it_reads():
    for op in SIGNATURES:
        inputs, outputs = signature(op)
        assert len({operand.name for operand in inputs}) == len(inputs)
        for operand in outputs:
            assert operand.dtype is not None or operand.name in {i.name for i in inputs}, f"{op}: {operand.name}"


def test_shapes_are_checked_and_the_error_names_operation_and_operand(recorder):
    x = recorder.state("x", "float32", (rows_of(recorder), 32))
    weight = recorder.weight("w", "float32", (8, 31))
    with pytest.raises(RecordError, match=r"linear: weight \(w\) has shape \[8, 31\], but D is 32"):
        recorder.linear(x, weight)
    with pytest.raises(RecordError, match=r"rms_norm: weight \(w\) has shape \[8, 31\], wanted \[D\]"):
        recorder.rms_norm(x, weight, eps=1e-6)


def test_two_row_counts_are_not_one(recorder):
    x = recorder.state("x", "float32", (rows_of(recorder), 32))
    ids = recorder.state("delta", "float32", (Rows(symbol="T", maximum=16, count=recorder.scalar("others")), 32))
    with pytest.raises(RecordError, match="add: delta"):
        recorder.add(x, ids)


def test_types_are_checked(recorder):
    table = recorder.weight("table", "float32", (10, 4))
    ids = recorder.state("ids", "float32", (3,))
    with pytest.raises(RecordError, match=r"embed: ids \(ids\) is float32, wanted int32"):
        recorder.embed(table, ids)


def test_missing_and_unknown_operands_are_refused(recorder):
    x = recorder.state("x", "float32", (2, 4))
    with pytest.raises(RecordError, match="add: operand 'delta' is missing"):
        recorder.call("add", {"x": x})
    with pytest.raises(RecordError, match="add: it has no operand 'bias'"):
        recorder.call("add", {"x": x, "delta": x, "bias": x})


def test_names_are_unique(recorder):
    recorder.state("x", "float32", (2,))
    with pytest.raises(RecordError, match="two buffers are called 'x'"):
        recorder.weight("x", "float32", (2,))


def test_products_bind_the_letter_that_is_still_open(recorder):
    head_dim = 8
    x = recorder.state("x", "float32", (5, 32))
    wq, wk, wv = (recorder.weight(name, "float32", (n * head_dim, 32)) for name, n in (("q", 4), ("k", 2), ("v", 2)))
    norms = [recorder.weight(name, "float32", (head_dim,)) for name in ("qn", "kn")]
    positions = recorder.state("positions", "int32", (5,))
    names = ("x", "wq", "wk", "wv", "q_norm", "k_norm", "positions")
    operands = dict(zip(names, (x, wq, wk, wv, *norms, positions), strict=True))
    out = recorder.call("qkv", operands, dims={"H": head_dim}, attributes={"eps": 1e-6})
    assert (out["q"].shape, out["k"].shape, out["v"].shape) == ((5, 4, 8), (5, 2, 8), (5, 2, 8))


def test_dead_nodes_are_dropped_with_what_only_they_read(recorder):
    x = recorder.state("x", "float32", (2, 4))
    out = recorder.state("out", "float32", (2, 4))
    kept = recorder.add(x, x)
    recorder.add(recorder.add(kept, x), x)  # nobody reads it
    recorder.call("output", {"x": kept}, outputs={"y": out})
    ops = [node.op for node in recorder.finish().body]
    assert ops == ["add", "output"]


def test_scratch_must_be_written_on_every_path_before_it_is_read(recorder):
    x, flag = recorder.state("x", "float32", (2, 4)), recorder.scalar("flag")
    with recorder.if_(flag):
        maybe = recorder.add(x, x)
    recorder.call("output", {"x": maybe}, outputs={"y": recorder.state("y", "float32", (2, 4))})
    with pytest.raises(RecordError, match="output reads x .* before it is written; make it a state"):
        recorder.finish()


def test_bodies_nest_and_flags_are_buffers(recorder):
    x, y = recorder.state("x", "float32", (2, 4)), recorder.state("y", "float32", (2, 4))
    with recorder.while_(recorder.scalar("more")), recorder.if_(recorder.scalar("flag")):
        recorder.call("output", {"x": recorder.add(x, x)}, outputs={"y": y})
    program = recorder.finish()
    loop = program.body[0]
    assert isinstance(loop, While) and isinstance(loop.body[0], If)
    assert [node.op for node in walk(program.body) if isinstance(node, Kernel)] == ["add", "output"]
    assert {buffer.name for buffer in program.buffers() if buffer.kind == "scalar"} == {"more", "flag"}


def test_an_absent_residual_skips_its_adapter(recorder):
    """z stands for 0 in a block's first step: the adapter is inside an If on its flag and updates x in place."""
    flag = recorder.scalar("has_residual")
    x = recorder.add(*(2 * [recorder.state("x", "float32", (2, 4))]))
    z = recorder.state("z", "float32", (2, 4), present=flag)
    weights = [recorder.weight(n, "float32", s) for n, s in (("n", (4,)), ("g", (6, 4)), ("u", (6, 4)), ("d", (4, 6)))]
    assert recorder.residual_mix(x, z, None, *weights, alpha=0.5, eps=1e-6) is x
    recorder.call("output", {"x": x}, outputs={"y": recorder.state("y", "float32", (2, 4))})
    inner = recorder.finish().body[1]
    assert isinstance(inner, If) and inner.flag is flag and inner.body[0].op == "residual_mix"


def test_two_rotary_embeddings_have_two_descriptions():
    base = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=32)
    others = [
        replace(base, **change) for change in (
            {"factor": 8.0}, {"original_max_position_embeddings": 64}, {"beta_fast": 16.0}, {"beta_slow": 2.0},
            {"low_freq_factor": 2.0}, {"high_freq_factor": 8.0}, {"attention_factor": 1.0}, {"theta": 10000.001},
            {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5000001}, {"kind": "llama3"},
        )
    ]  # fmt: skip
    assert len({describe_rope(rope) for rope in (base, *others)}) == len(others) + 1
    assert describe_rope(base) == "yarn/10000/factor=4.0/original_max_position_embeddings=32"
    assert describe_rope(RopeConfig(theta=1e6, partial_rotary_factor=0.25)) == "default/1e+06/0.25"
