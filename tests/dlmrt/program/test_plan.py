"""The memory plan: live buffers never share a byte, whatever the program; the arena is near what is needed at least."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.program.nodes import Buffer, If, Kernel, Program, While
from dlmrt.program.plan import ALIGNMENT, plan

FLAG = Buffer(name="flag", kind="scalar", dtype="int32", shape=())


@st.composite
def programs(draw):
    """Random nestings of kernels that read earlier scratch and write new scratch."""
    counter = itertools.count()

    def body(depth, visible):
        nodes = []
        for _ in range(draw(st.integers(1, 6))):
            kind = draw(st.sampled_from(("kernel", "kernel", "kernel", "while", "if"))) if depth < 3 else "kernel"
            if kind == "kernel":
                size = draw(st.integers(0, 40))
                out = Buffer(name=f"%{next(counter)}", kind="scratch", dtype="float32", shape=(size, 3))
                inputs = draw(st.lists(st.sampled_from(visible), max_size=3)) if visible else []
                nodes.append(Kernel(op="x", inputs={str(i): b for i, b in enumerate(inputs)}, outputs={"y": out}))
                visible = [*visible, out]
            else:
                node = While if kind == "while" else If
                nodes.append(node(flag=FLAG, body=body(depth + 1, visible)))
        return tuple(nodes)

    return Program(name="random", body=body(0, []))


def timeline(program, turns=2):
    """The kernels in the order in which they run when every If is taken and every While turns twice."""

    def run(nodes):
        for node in nodes:
            if isinstance(node, Kernel):
                yield node
            else:
                for _ in range(turns if isinstance(node, While) else 1):
                    yield from run(node.body)

    return list(run(program.body))


@given(programs())
@settings(max_examples=150, deadline=None)
def test_no_read_sees_another_buffers_write(program):
    """Execute the placement: each write marks its bytes, each read must find its own marks."""
    placement = plan(program)
    owner = {}
    for node in timeline(program):
        for buffer in node.inputs.values():
            assert all(owner[at] is buffer for at in bytes_of(placement, buffer)), f"{buffer.name} was overwritten"
        for buffer in node.outputs.values():
            owner |= dict.fromkeys(bytes_of(placement, buffer), buffer)


@given(programs())
@settings(max_examples=150, deadline=None)
def test_offsets_are_aligned_inside_the_arena_and_disjoint_while_alive(program):
    placement = plan(program)
    assert placement.num_bytes >= placement.lower_bound
    for buffer, offset in placement.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset + buffer.num_bytes <= placement.num_bytes
    for a, b in itertools.combinations(placement.offsets, 2):
        if placement.intervals[a].overlaps(placement.intervals[b]):
            assert not set(bytes_of(placement, a)) & set(bytes_of(placement, b))


def bytes_of(placement, buffer):
    """The bytes of `buffer`; an empty one owns the first."""
    return range(placement.offsets[buffer], placement.offsets[buffer] + max(buffer.num_bytes, 1))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_is_shared_between_two_waits_of_a_span(data):
    """Threads may be anywhere between two waits, each with rows of every buffer that is used there."""
    buffers, nodes, phases = [], [], []
    for position in range(data.draw(st.integers(1, 20))):
        span = data.draw(st.sampled_from((None, 0, 0, 0, 1)))
        is_same = span is not None and bool(nodes) and nodes[-1].span == span
        waits = span is not None and data.draw(st.booleans())
        size = data.draw(st.integers(0, 300))
        out = Buffer(name=f"%{position}", kind="scratch", dtype="uint8", shape=(size,))
        inputs = data.draw(st.lists(st.sampled_from(buffers), max_size=2)) if buffers else []
        nodes.append(
            Kernel(op="x", inputs={str(i): b for i, b in enumerate(inputs)}, outputs={"y": out}, span=span, waits=waits)
        )
        if not is_same or waits:
            phases.append(set())
        phases[-1] |= {out, *inputs}
        buffers.append(out)
    placement = plan(Program(name="spans", body=tuple(nodes)))
    for used in phases:
        for a, b in itertools.combinations(used, 2):
            assert not set(bytes_of(placement, a)) & set(bytes_of(placement, b))


def test_dead_buffers_make_room():
    sizes = [64, 64, 64, 64]
    chain = [Buffer(name=f"%{i}", kind="scratch", dtype="uint8", shape=(n,)) for i, n in enumerate(sizes)]
    nodes = [Kernel(op="x", inputs={}, outputs={"y": chain[0]})]
    nodes += [Kernel(op="x", inputs={"x": a}, outputs={"y": b}) for a, b in itertools.pairwise(chain)]
    placement = plan(Program(name="chain", body=tuple(nodes)))
    assert placement.num_bytes == placement.lower_bound == 128
