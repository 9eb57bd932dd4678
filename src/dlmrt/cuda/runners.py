"""Three ways to run a program's steps: one graph for the loop, one graph for each straight piece, one launch at a time.

All three run the same launches over the same memory, so they give the same numbers. A runner that cannot be built is
replaced by the next one, with the reason in the log.

    loop   the device decides every turn; one launch runs until the program ends
    step   the host reads each flag; straight pieces between flags are graphs
    off    the host reads each flag and launches every kernel: for debugging and profilers

Source: ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dlmrt.cuda.graph import MIN_DRIVER, LoopGraph, Region, Step
from dlmrt.cuda.launches import Launch
from dlmrt.env import CUDA_GRAPHS
from dlmrt.errors import DeviceError

logger = logging.getLogger(__name__)

MODES = CUDA_GRAPHS


class Runner(Protocol):
    """Steps that are ready to run."""

    mode: str

    def run(self) -> None:
        """Run once and wait for the end."""

    def close(self) -> None:
        """Free what is captured; it does not run again."""


class Launches:
    """Mode `off`."""

    mode = "off"

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = steps

    def run(self) -> None:
        """See `Runner`."""
        _walk(self._steps, Launch.run)

    def close(self) -> None:
        """See `Runner`."""


class PieceGraphs:
    """Mode `step`."""

    mode = "step"

    def __init__(self, steps: tuple[Step, ...]) -> None:
        prepare(steps)
        self._steps = _in_pieces(steps, _captured)

    def run(self) -> None:
        """See `Runner`."""
        _walk(self._steps, lambda piece: piece.replay())

    def close(self) -> None:
        """See `Runner`."""
        self._steps = ()


class WholeGraph:
    """Mode `loop`.

    Args:
        is_direct: kernels that compute a flag set the graph's condition themselves, where the driver can load such.
    """

    mode = "loop"

    def __init__(self, steps: tuple[Step, ...], *, is_direct: bool = True) -> None:
        driver = loop_driver()
        prepare(steps)
        self.is_direct = is_direct and _can_set_conditions(steps)
        torch.cuda.synchronize()
        self._graph = LoopGraph(driver, _on_raw_stream, is_direct=self.is_direct)
        self._graph.capture(steps)

    def run(self) -> None:
        """See `Runner`."""
        stream = torch.cuda.current_stream()
        self._graph.launch(stream.cuda_stream)
        stream.synchronize()

    def close(self) -> None:
        """See `Runner`."""
        self._graph.close()


def make_runner(steps: tuple[Step, ...], *, mode: str, device: torch.device) -> Runner:
    """The runner of `mode`, or the next one that works; a machine without a device launches one by one."""
    if device.type != "cuda":
        return Launches(steps)
    kinds: dict[str, Callable[[tuple[Step, ...]], Runner]] = {"loop": WholeGraph, "step": PieceGraphs}
    for name in MODES[MODES.index(mode) : -1]:
        try:
            return kinds[name](steps)
        except (DeviceError, ImportError, RuntimeError) as error:
            logger.warning("CUDA graph mode %s is not available, using the next one: %s", name, error)
    prepare(steps)  # not in the first run, in which other ranks would wait for this one
    return Launches(steps)


def loop_driver() -> Any:
    """`cuda.bindings.driver` where it and the driver can capture loops.

    Raises:
        DeviceError: one of them is too old.
    """
    from cuda.bindings import driver

    if not hasattr(driver, "cuStreamBeginCaptureToGraph") or not hasattr(driver, "cuGraphConditionalHandleCreate"):
        raise DeviceError("cuda-bindings is older than 13; install cuda-bindings>=13.0.3,<14")
    error, version = driver.cuDriverGetVersion()
    if int(error) or version < MIN_DRIVER:
        raise DeviceError(f"the driver knows CUDA {version / 1000:.1f}; loops in graphs need 12.6, update it")
    return driver


def prepare(steps: tuple[Step, ...]) -> None:
    """Compile and load every kernel."""
    for launch in _launches(steps):
        launch.prepare()


def _can_set_conditions(steps: tuple[Step, ...]) -> bool:
    """Compile and load the kernels that set conditions; whether the driver takes them."""
    try:
        for launch in _launches(steps):
            if launch.flag is not None:
                launch.prepare(sets_condition=True)
    except Exception as error:  # Triton raises what it likes; a kernel of its own sets each condition then
        logger.warning("conditions of the loop are set by kernels of their own: %s", error)
        return False
    return True


def _launches(steps: tuple[Step, ...]) -> Iterator[Launch]:
    for step in steps:
        if isinstance(step, Launch):
            yield step
        else:
            yield from _launches(step.body)


def _walk(steps: tuple[Any, ...], run: Callable[[Any], None]) -> None:
    for step in steps:
        if not isinstance(step, Region):
            run(step)
        elif step.is_loop:
            while int(step.flag):
                _walk(step.body, run)
        elif int(step.flag):
            _walk(step.body, run)


def _in_pieces(steps: tuple[Step, ...], capture: Callable[[list[Launch]], Any]) -> tuple[Any, ...]:
    """Each run of launches as one captured piece, regions with their bodies likewise."""
    pieces: list[Any] = []
    straight: list[Launch] = []
    for step in (*steps, None):
        if isinstance(step, Launch):
            straight.append(step)
            continue
        if straight:
            pieces.append(capture(straight))
            straight = []
        if step is not None:
            body = _in_pieces(step.body, capture)
            pieces.append(Region(is_loop=step.is_loop, flag=step.flag, name=step.name, body=body))
    return tuple(pieces)


def _captured(launches: list[Launch]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for launch in launches:
            launch.run()
    return graph


def _on_raw_stream(stream: int) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.ExternalStream(stream))  # type: ignore[no-untyped-call]
    return context
