"""A stand-in for `cuda.bindings.driver`: records what `LoopGraph` captures, refuses misuse, runs the result on the CPU.

It models control and data flow: graphs of nodes with dependencies, conditional nodes whose bodies are graphs, handles
with their default values. It knows nothing of allocators, of streams that run at the same time, or of time.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

KERNEL, CONDITIONAL, HOST = 0, 13, 3  # CUgraphNodeType


@dataclass
class Node:
    """One node of a recorded graph."""

    kind: int
    dependencies: tuple[int, ...]
    name: str
    run: Any = None
    handle: int = 0
    body: int = 0
    is_loop: bool = False


@dataclass
class StandInDriver:
    """The driver's functions that `LoopGraph` calls, each returning (error, results...)."""

    max_turns: int = 1000
    graphs: dict[int, list[int]] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    capturing: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # stream -> graph, last nodes
    current: list[int] = field(default_factory=list)  # streams made current, innermost last
    values: dict[int, int] = field(default_factory=dict)  # of handles
    defaults: dict[int, int] = field(default_factory=dict)
    num_launches: int = 0
    is_closed: bool = False
    fails: str = ""  # name of a function that reports an error
    _last: int = 100

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(CU_STREAM_SET_CAPTURE_DEPENDENCIES=1)
    CUgraphConditionalNodeType = SimpleNamespace(CU_GRAPH_COND_TYPE_IF=0, CU_GRAPH_COND_TYPE_WHILE=1)
    CUgraphNodeType = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_KERNEL=0, CU_GRAPH_NODE_TYPE_MEMCPY=1, CU_GRAPH_NODE_TYPE_MEMSET=2,
        CU_GRAPH_NODE_TYPE_EMPTY=5, CU_GRAPH_NODE_TYPE_CONDITIONAL=CONDITIONAL,
    )  # fmt: skip

    @staticmethod
    def CUgraphNodeParams():
        return SimpleNamespace(type=None, conditional=SimpleNamespace(phGraph_out=None))

    def __getattribute__(self, name):
        if name.startswith("cu") and name == object.__getattribute__(self, "fails"):
            return lambda *_: (700,)
        return object.__getattribute__(self, name)

    def _new(self):
        self._last += 1
        return self._last

    # What a launch on the current stream does while it is captured.

    @contextmanager
    def on_stream(self, stream):
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def record(self, launch, handle=None):
        """Stands for a kernel launch, which sets a condition where it is given one."""
        assert self.current[-1] == self.innermost, "work on another stream than the innermost one"
        assert handle is None or handle in self.defaults

        def run():
            launch.run()
            if handle is not None:
                self.values[handle] = int(launch.flag)

        self._add(self.current[-1], Node(KERNEL, (), launch.op, run=run))

    @property
    def innermost(self):
        return list(self.capturing)[-1]

    def _add(self, stream, node):
        graph, last = self.capturing[stream]
        node.dependencies = tuple(last)
        number = self._new()
        self.nodes[number] = node
        self.graphs[graph].append(number)
        self.capturing[stream] = graph, [number]
        return number

    # The driver.

    def cuModuleLoadData(self, image):
        assert b"set_condition" in ctypes.string_at(image)
        return 0, self._new()

    def cuModuleGetFunction(self, module, name):
        return 0, name.decode()

    def cuStreamCreate(self, flags):
        assert flags == 1
        return 0, self._new()

    def cuStreamDestroy(self, stream):
        assert stream not in self.capturing
        return (0,)

    def cuCtxGetCurrent(self):
        return 0, 7

    def cuStreamBeginCapture(self, stream, mode):
        assert not self.capturing and mode == 2
        graph = self._new()
        self.graphs[graph] = []
        self.capturing[stream] = graph, []
        return (0,)

    def cuStreamBeginCaptureToGraph(self, stream, graph, dependencies, edges, count, mode):
        assert stream not in self.capturing and not self.graphs[graph] and count == 0
        self.capturing[stream] = graph, []
        return (0,)

    def cuStreamEndCapture(self, stream):
        graph, _ = self.capturing.pop(stream)
        return 0, graph

    def cuStreamGetCaptureInfo(self, stream):
        if stream not in self.capturing:
            return 0, 0, 0, None, [], [], 0
        graph, last = self.capturing[stream]
        return 0, 1, 1, graph, last, None, len(last)

    def cuStreamUpdateCaptureDependencies(self, stream, nodes, edges, count, flags):
        assert count == len(nodes) and flags == 1
        self.capturing[stream] = self.capturing[stream][0], list(nodes)
        return (0,)

    def cuGraphConditionalHandleCreate(self, graph, context, default, flags):
        assert graph in self.graphs and flags == 1
        handle = self._new()
        self.defaults[handle] = default
        return 0, handle

    def cuGraphAddNode(self, graph, dependencies, edges, count, params):
        assert count == len(dependencies) and params.conditional.size == 1
        body = self._new()
        self.graphs[body] = []
        params.conditional.phGraph_out = [body]
        is_loop = params.conditional.type == 1
        number = self._new()
        self.nodes[number] = Node(
            CONDITIONAL, tuple(dependencies), "while" if is_loop else "if", handle=params.conditional.handle, body=body,
            is_loop=is_loop,
        )  # fmt: skip
        self.graphs[graph].append(number)
        return 0, number

    def cuLaunchKernel(self, function, *arguments):
        stream, ((handle, pointer), _) = arguments[7], arguments[8]
        assert stream == self.innermost and handle in self.defaults

        def run():
            self.values[handle] = ctypes.c_int32.from_address(pointer).value

        self._add(stream, Node(KERNEL, (), function, run=run))
        return (0,)

    def cuGraphGetNodes(self, graph, count):
        return 0, self.graphs[graph][:count], len(self.graphs[graph])

    def cuGraphNodeGetType(self, node):
        return 0, self.nodes[node].kind

    def cuGraphInstantiate(self, graph, flags):
        return 0, graph

    def cuGraphExecDestroy(self, executable):
        self.is_closed = True
        return (0,)

    def cuGraphDestroy(self, graph):
        return (0,)

    def cuGraphLaunch(self, executable, stream):
        assert not self.is_closed
        self.num_launches += 1
        self.values = dict(self.defaults)
        self._run(executable)
        return (0,)

    def _run(self, graph):
        for number in self.graphs[graph]:
            node = self.nodes[number]
            if node.kind == KERNEL:
                node.run()
                continue
            turns = 0
            while self.values[node.handle] and (node.is_loop or not turns):
                self._run(node.body)
                turns += 1
                assert turns < self.max_turns, "a loop does not end"

    def tree(self, graph):
        """Names of the nodes, a conditional one as (kind, its body)."""
        nodes = [self.nodes[number] for number in self.graphs[graph]]
        return [node.name if node.kind != CONDITIONAL else (node.name, self.tree(node.body)) for node in nodes]


class GraphRunner:
    """`dlmrt.cuda.runners.WholeGraph` on the stand-in."""

    mode = "loop"

    def __init__(self, steps, *, is_direct=True):
        from dlmrt.cuda.graph import LoopGraph

        self.steps, self.driver = steps, StandInDriver()
        self.graph = LoopGraph(self.driver, self.driver.on_stream, self.driver.record, is_direct=is_direct)
        self.graph.capture(steps)

    def run(self):
        self.graph.launch(0)

    def close(self):
        self.graph.close()
