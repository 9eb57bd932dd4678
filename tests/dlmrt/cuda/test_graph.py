"""What `LoopGraph` calls on a stand-in of the driver, what the captured graph computes, and what it refuses."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from stand_in import HOST, GraphRunner, StandInDriver

from dlmrt.cuda import runners
from dlmrt.cuda.graph import LoopGraph, Region
from dlmrt.cuda.launches import Launch
from dlmrt.errors import DeviceError


def number(value):
    return torch.tensor([value], dtype=torch.int32)


def step(name, action=None):
    """A launch that runs `action` where a kernel would."""
    return Launch(op=name, kernel={(1,): lambda **_: action() if action else None}, grid=(1,), arguments={})


def loop(flag, *body):
    return Region(is_loop=True, flag=flag, name="flag", body=body)


def branch(flag, *body):
    return Region(is_loop=False, flag=flag, name="flag", body=body)


def test_bodies_are_nested_and_every_node_waits_for_the_one_before_it():
    flag = number(0)
    runner = GraphRunner((step("a"), loop(flag, step("b"), branch(flag, step("c")), step("d")), step("e")))
    driver, root = runner.driver, runner.graph.graph
    inside = ["b", "set_condition", ("if", ["c"]), "d", "set_condition"]
    assert driver.tree(root) == ["a", "set_condition", ("while", inside), "e"]
    bodies = [root, *(node.body for node in driver.nodes.values() if node.body)]
    for graph in bodies:
        numbers = driver.graphs[graph]
        assert driver.nodes[numbers[0]].dependencies == ()
        for before, after in pairwise(numbers):
            assert driver.nodes[after].dependencies == (before,)
    assert not driver.capturing and not driver.current


def test_nested_loops_count_as_python_loops_do():
    outer, inner, odd, count, hits = (number(0) for _ in range(5))

    def end_of_outer():
        odd.copy_(outer % 2)
        outer.sub_(1)

    runner = GraphRunner(
        (
            loop(
                outer,
                step("fill", lambda: inner.fill_(10)),
                loop(inner, step("count", lambda: (count.add_(1), inner.sub_(1)))),
                step("end", end_of_outer),
                branch(odd, step("hit", lambda: hits.add_(1))),
            ),
        )
    )
    assert int(count) == 0, "recording runs nothing"
    for turns in (7, 0, 4):
        outer.fill_(turns), count.zero_(), hits.zero_()
        runner.run()
        assert int(count) == 10 * turns and int(hits) == (turns + 1) // 2


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_kernel_that_computes_a_flag_sets_the_condition_behind_it(is_direct):
    """In front of a node and at the end of a loop's body; not where the flag is another one or is read later."""
    more, odd, other, turns, hits = number(3), number(0), number(0), number(0), number(0)

    def action(change, flag):
        """A launch with this flag; the handle is what the driver gave, as the kernel takes it."""
        kernel = {(1,): lambda **arguments: change()}
        return Launch(op="kernel", kernel=kernel, grid=(1,), arguments={}, flag=flag)

    def turn():
        turns.add_(1), odd.copy_(turns % 2)

    steps = (
        action(lambda: None, more),
        loop(
            more, action(turn, odd), branch(odd, step("hit", lambda: hits.add_(1))), action(lambda: None, other),
            step("between"), branch(odd, step("nothing")), action(lambda: more.sub_(1), more),
        ),
    )  # fmt: skip
    runner = GraphRunner(steps, is_direct=is_direct)
    set_by = ["kernel"] if is_direct else ["kernel", "set_condition"]
    body = [*set_by, ("if", ["hit"]), "kernel", "between", "set_condition", ("if", ["nothing"]), *set_by]
    assert runner.driver.tree(runner.graph.graph) == [*set_by, ("while", body)]
    runner.run()
    assert (int(turns), int(hits)) == (3, 2)


def test_an_error_in_a_body_leaves_no_stream_capturing():
    driver = StandInDriver()

    def launch(step, handle):
        raise RuntimeError("boom")

    graph = LoopGraph(driver, driver.on_stream, launch)
    with pytest.raises(RuntimeError, match="boom"):
        graph.capture((loop(number(1), loop(number(1), step("a"))),))
    assert not driver.capturing and not driver.current


@pytest.mark.parametrize("name", ["cuGraphAddNode", "cuGraphInstantiate", "cuStreamBeginCaptureToGraph"])
def test_a_refusal_of_the_driver_is_reported_with_the_way_out(name):
    driver = StandInDriver(fails=name)
    graph = LoopGraph(driver, driver.on_stream, driver.record)
    with pytest.raises(DeviceError, match="DLMRT_CUDA_GRAPH=step"):
        graph.capture((loop(number(0), step("a")),))
    assert not driver.capturing


def test_kinds_of_nodes_that_bodies_must_not_hold_are_refused():
    driver = StandInDriver()

    def launch(step, handle):
        driver.record(step)
        driver.nodes[driver._last].kind = HOST

    graph = LoopGraph(driver, driver.on_stream, launch)
    with pytest.raises(DeviceError, match="cannot hold"):
        graph.capture((loop(number(0), step("a")),))


def test_a_capture_can_be_freed():
    runner = GraphRunner((step("a"),))
    runner.graph.close()
    assert runner.graph.graph is None


def parameters(function):
    """Number of parameters by the first line of the documentation, which is all that compiled functions say."""
    line = function.__doc__.strip().splitlines()[0]
    inside, depth, count = line[line.index("(") + 1 : line.rindex(")")], 0, 1
    for character in inside:
        depth += (character in "([") - (character in ")]")
        count += character == "," and depth == 0
    return count if inside.strip() else 0


def test_the_stand_in_has_the_functions_of_cuda_bindings():
    """Names, numbers of parameters and enumerations that `LoopGraph` uses; no driver is needed to read them."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (make peers)")
    functions = [name for name in vars(StandInDriver) if name.startswith("cu") and name != "current"]
    assert len(functions) > 15
    for name in functions:
        code = getattr(StandInDriver, name).__code__
        number = 11 if code.co_flags & inspect.CO_VARARGS else code.co_argcount - 1
        assert parameters(getattr(driver, name)) == number, name
    for name in ("CUstreamCaptureMode", "CUstreamUpdateCaptureDependencies_flags", "CUgraphConditionalNodeType",
                 "CUgraphNodeType"):  # fmt: skip
        for member, value in vars(getattr(StandInDriver, name)).items():
            assert int(getattr(getattr(driver, name), member)) == value
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = driver.CUgraphConditionalHandle(2**63 + 5)
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    params.conditional.size = 1
    assert int(params.conditional.handle) == 2**63 + 5 and len(params.conditional.phGraph_out) == 1


def test_modes_that_cannot_be_built_give_way_with_a_reason(monkeypatch, caplog):
    def too_old():
        raise DeviceError("the driver is too old")

    def no_graphs():
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(runners, "loop_driver", too_old)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", no_graphs)
    runner = runners.make_runner((step("a"),), mode="loop", device=torch.device("cuda"))
    assert runner.mode == "off"
    assert [record.args[0] for record in caplog.records] == ["loop", "step"]
    assert "the driver is too old" in caplog.text and "no graphs here" in caplog.text


def test_a_kernel_that_cannot_be_loaded_leaves_its_condition_to_a_kernel_of_its_own(monkeypatch, caplog):
    def prepare(launch, *, sets_condition=False):
        if sets_condition:
            raise RuntimeError("undefined symbol")

    monkeypatch.setattr(Launch, "prepare", prepare)
    flag = number(1)
    steps = (Launch(op="a", kernel=None, grid=(1,), arguments={}, flag=flag), loop(flag, step("b")))
    assert not runners._can_set_conditions(steps)
    assert "undefined symbol" in caplog.text
    assert runners._can_set_conditions(steps[1:]), "without such a kernel nothing is in the way"
