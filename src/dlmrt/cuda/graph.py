"""A program's launches as one CUDA graph: While and If nodes become conditional nodes, bodies are captured in place.

Captured are raw streams of our own, through cuda-bindings: a body is captured into the graph of its conditional node
on a new stream, and the parent stream goes on behind that node. Rules that the driver does not state in its errors:

    condition   set right before each node and, for a While, at the end of its body: by the kernel that stands there and
                computes the flag, or by one of its own. The handle's default of 0 is applied once a launch, so that a
                forgotten set ends a loop instead of spinning.
    bodies      hold kernels, copies and further conditional nodes only: no allocation, no host node, no event. Every
                graph is walked after the capture and refused with the kind of the offending node.
    streams     while a body is captured, work on the parent would land behind the node in silence: the body's stream
                is current inside one context manager, and nothing keeps a stream for later.
    errors      end the capture on every open stream, innermost first; the first error is the one that is raised.

Needs a driver that knows CUDA 12.6 (conditional nodes nested in bodies, cooperative kernels) and cuda-bindings 13.

Source: CUDA driver API, "Conditional nodes" and cuGraphConditionalHandleCreate; capture sequence as NVIDIA/warp 9934a4e
warp/native/warp.cu and NVIDIA-NeMo/Speech 018d032 cuda_python_utils.py do it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlmrt.cuda.launches import Launch
from dlmrt.errors import DeviceError

MIN_DRIVER = 12060  # as cuDriverGetVersion counts: CUDA 12.6

# The condition of handle `h` becomes the int32 at `flag`. cudaGraphSetConditional is the driver's own device function.
SET_CONDITION = b"""
.version 8.3
.target sm_90
.address_size 64
.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);
.visible .entry set_condition(.param .u64 h, .param .u64 flag)
{
  .reg .b32 %value;
  .reg .b64 %handle, %pointer;
  ld.param.u64 %handle, [h];
  ld.param.u64 %pointer, [flag];
  cvta.to.global.u64 %pointer, %pointer;
  ld.global.u32 %value, [%pointer];
  {
    .param .b64 argument_0;
    .param .b32 argument_1;
    st.param.b64 [argument_0], %handle;
    st.param.b32 [argument_1], %value;
    call.uni cudaGraphSetConditional, (argument_0, argument_1);
  }
  ret;
}
"""


@dataclass(frozen=True, kw_only=True)
class Region:
    """A While or If with its flag, an int32 on the device."""

    is_loop: bool
    flag: Tensor
    name: str
    body: tuple[Step, ...]


Step = Launch | Region


@dataclass(frozen=True, kw_only=True)
class _Condition:
    """What decides about a conditional node."""

    handle: int  # as a signed number: what Triton and ctypes take
    flag: Tensor


class LoopGraph:
    """A captured program.

    Args:
        driver: `cuda.bindings.driver`, or a stand-in for it.
        on_stream: makes a raw stream current for launches.
        launch: runs one launch on the current stream, handing its flag to the condition that is given.
        is_direct: kernels that compute a flag set the condition themselves.
    """

    def __init__(
        self, driver: Any, on_stream: Callable[[int], AbstractContextManager[object]],
        launch: Callable[[Launch, int | None], None] = Launch.run, *, is_direct: bool = True,
    ) -> None:  # fmt: skip
        self._driver, self._on_stream, self._launch, self._is_direct = driver, on_stream, launch, is_direct
        self._streams: list[Any] = []  # ours; they live as long as the executable, libraries keep workspaces a stream
        self._capturing: list[Any] = []  # innermost last
        self._handles: dict[int, Any] = {}  # the driver's own objects, by number
        self._ended: Any = None  # graph of the capture that ended last
        self._image = ctypes.create_string_buffer(SET_CONDITION)
        module = self._check(driver.cuModuleLoadData(ctypes.addressof(self._image)))
        self._set_condition = self._check(driver.cuModuleGetFunction(module, b"set_condition"))
        self._executable: Any = None
        self.graph: Any = None

    def capture(self, steps: tuple[Step, ...]) -> None:
        """Capture `steps` and make them ready to be launched."""
        driver = self._driver
        stream = self._new_stream()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._on_stream(int(stream)):
            self._check(driver.cuStreamBeginCapture(stream, mode))
            with self._ending_capture(stream):
                self._record(steps)
        self.graph = self._ended
        self._executable = self._check(driver.cuGraphInstantiate(self.graph, 0))

    def launch(self, stream: int) -> None:
        """Enqueue one run on `stream`; returns at once."""
        self._check(self._driver.cuGraphLaunch(self._executable, stream))

    def close(self) -> None:
        """Free everything; no launch may be in flight."""
        driver = self._driver
        if self._executable is not None:
            self._check(driver.cuGraphExecDestroy(self._executable))
            self._check(driver.cuGraphDestroy(self.graph))
        for stream in self._streams:
            self._check(driver.cuStreamDestroy(stream))
        self._executable, self.graph, self._streams = None, None, []

    def _record(self, steps: tuple[Step, ...], end: _Condition | None = None) -> None:
        """Capture `steps`; `end` is the condition of the loop whose body they are, which is set behind them."""
        condition: _Condition | None = None  # what the launch before this step has set
        for at, step in enumerate(steps):
            if isinstance(step, Launch):
                condition = self._condition_behind(step, steps[at + 1 :], end)
                self._launch(step, None if condition is None else condition.handle)
                continue
            if condition is None:
                condition = self._new_condition(step.flag)
                self._set(condition)
            with self._body(condition, is_loop=step.is_loop):
                self._record(step.body, condition if step.is_loop else None)
            condition = None
        if end is not None and condition is None:
            self._set(end)

    def _condition_behind(self, launch: Launch, rest: tuple[Step, ...], end: _Condition | None) -> _Condition | None:
        """The condition that reads the flag of `launch` right behind it."""
        if launch.flag is None or not self._is_direct:
            return None
        if rest:
            is_read = isinstance(rest[0], Region) and rest[0].flag is launch.flag
            return self._new_condition(launch.flag) if is_read else None
        return end if end is not None and end.flag is launch.flag else None

    @contextmanager
    def _body(self, condition: _Condition, *, is_loop: bool) -> Iterator[None]:
        driver, parent = self._driver, self._capturing[-1]
        kinds = driver.CUgraphConditionalNodeType
        graph, dependencies = self._capture_state(parent)
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = self._handles[condition.handle]
        params.conditional.type = kinds.CU_GRAPH_COND_TYPE_WHILE if is_loop else kinds.CU_GRAPH_COND_TYPE_IF
        params.conditional.size = 1
        params.conditional.ctx = self._check(driver.cuCtxGetCurrent())
        node = self._check(driver.cuGraphAddNode(graph, dependencies, None, len(dependencies), params))
        only = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        self._check(driver.cuStreamUpdateCaptureDependencies(parent, [node], None, 1, only))
        stream = self._new_stream()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        body = params.conditional.phGraph_out[0]
        self._check(driver.cuStreamBeginCaptureToGraph(stream, body, None, None, 0, mode))
        with self._on_stream(int(stream)), self._ending_capture(stream):
            yield

    @contextmanager
    def _ending_capture(self, stream: Any) -> Iterator[None]:
        self._capturing.append(stream)
        try:
            yield
        except BaseException:
            self._driver.cuStreamEndCapture(stream)  # its own error would hide the first one
            raise
        finally:
            self._capturing.pop()
        self._ended = self._check(self._driver.cuStreamEndCapture(stream))
        self._check_nodes(self._ended)

    def _capture_state(self, stream: Any) -> tuple[Any, list[Any]]:
        """Graph that `stream` is capturing into, and the nodes that its next one depends on."""
        status, _, graph, dependencies, _, count = self._check(self._driver.cuStreamGetCaptureInfo(stream))
        assert int(status) == 1, "the stream is not capturing"
        return graph, list(dependencies or [])[:count]

    def _new_stream(self) -> Any:
        """A stream of our own: one of torch's pool may already be capturing."""
        stream = self._check(self._driver.cuStreamCreate(1))  # not blocking the default stream
        self._streams.append(stream)
        return stream

    def _new_condition(self, flag: Tensor) -> _Condition:
        graph, _ = self._capture_state(self._capturing[-1])
        context = self._check(self._driver.cuCtxGetCurrent())
        handle = self._check(self._driver.cuGraphConditionalHandleCreate(graph, context, 0, 1))
        number = int(handle) - (1 << 64 if int(handle) >= 1 << 63 else 0)
        self._handles[number] = handle
        return _Condition(handle=number, flag=flag)

    def _set(self, condition: _Condition) -> None:
        values = ((condition.handle, condition.flag.data_ptr()), (ctypes.c_int64, ctypes.c_void_p))
        stream = self._capturing[-1]
        self._check(self._driver.cuLaunchKernel(self._set_condition, 1, 1, 1, 1, 1, 1, 0, stream, values, 0))

    def _check_nodes(self, graph: Any) -> None:
        """Refuse kinds of nodes that a conditional body must not hold."""
        driver, kinds = self._driver, self._driver.CUgraphNodeType
        allowed = {
            int(kind)
            for kind in (
                kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEMCPY, kinds.CU_GRAPH_NODE_TYPE_MEMSET,
                kinds.CU_GRAPH_NODE_TYPE_EMPTY, kinds.CU_GRAPH_NODE_TYPE_CONDITIONAL,
            )
        }  # fmt: skip
        _, count = self._check(driver.cuGraphGetNodes(graph, 0))
        nodes, _ = self._check(driver.cuGraphGetNodes(graph, count)) if count else ([], 0)
        for node in nodes:
            kind = self._check(driver.cuGraphNodeGetType(node))
            if int(kind) not in allowed:
                raise DeviceError(f"a node of kind {kind!r} was captured, which a CUDA graph's loop cannot hold")

    @staticmethod
    def _check(result: Any) -> Any:
        error, *values = result
        if int(error):
            raise DeviceError(f"the CUDA driver refused a graph operation with {error!r}; set DLMRT_CUDA_GRAPH=step")
        return values[0] if len(values) == 1 else tuple(values)
