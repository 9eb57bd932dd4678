"""What `generate` and `chat` share: reading the environment, loading the engine, running one request under Ctrl-C.

The first Ctrl-C asks the engine to stop and keeps what is committed; a second one, while it is stopping, ends the
program. The engine looks at its flag before each forward; a handler that raised at once would lose finished text.

Source: ours.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlmrt.cli.manners import set_up_logging
from dlmrt.cli.terminal import View
from dlmrt.env import CUDA_GRAPHS, Environment
from dlmrt.errors import MissingDependencyError, UsageError
from dlmrt.parallel.ranks import Ranks, chosen_executor
from dlmrt.types import CanvasEvent, DecodeConfig, GenerateResult, Message, TextEvent

if TYPE_CHECKING:
    from dlmrt.checkpoint.load import Checkpoint
    from dlmrt.decode.engine import Engine
    from dlmrt.serve.client import RemoteEngine

DEFAULT_MODEL = "dlmrt-tiny"  # embedded
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine ready for requests."""

    engine: Engine | RemoteEngine
    model: str  # as asked for
    load_s: float

    def piece(self, token_id: int) -> str:
        """Text of one token, for the canvas; a middle dot for special tokens and parts of a character."""
        return self.engine.tokenizer.decode([token_id]) or "\u00b7"


def start(*, debug: bool, quiet: bool = False) -> Environment:
    """Read the environment and set the log level: debug, or errors only when quiet, or DLMRT_LOG_LEVEL."""
    environment, ranks = Environment.read(), Ranks.read()
    level = "debug" if debug else "error" if quiet else environment.log_level
    set_up_logging(level)
    if ranks.size > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank that is gone is reported by us, in one line
    return environment


def load(
    model: str,
    environment: Environment,
    *,
    executor: str | None,
    dtype: str | None,
    num_threads: int | None,
    revision: str | None,
    adapter: Path | None = None,
    cuda_graph: str | None = None,
) -> Loaded:
    """Load `model`; options that are None come from the environment."""
    started = time.perf_counter()
    set_cuda_graph(cuda_graph, executor or environment.executor)
    from dlmrt.decode.engine import Engine  # its imports are part of what the user waits for

    engine = Engine.load(
        model,
        executor=chosen_executor(executor or environment.executor, Ranks.read()),
        dtype=dtype or environment.dtype,
        num_threads=num_threads or environment.num_threads,
        revision=revision,
        adapter=adapter,
    )
    return Loaded(engine=engine, model=model, load_s=time.perf_counter() - started)


def followed(open_checkpoint: Callable[[], Checkpoint], *, executor: str, dtype: str, num_threads: int | None) -> bool:
    """Run this rank's part for rank 0 until that ends, where this is one of several processes and not the first.

    Args:
        open_checkpoint: gives the checkpoint that rank 0 loads.
    """
    ranks = Ranks.read()
    if not ranks.is_follower:
        return False
    chosen_executor(executor, ranks)
    # Ctrl-C goes to all processes of the terminal, SIGTERM to all that torchrun has started: rank 0 ends its request in
    # good order, for which it needs this process, and this process with itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    checkpoint = open_checkpoint()
    try:
        from dlmrt.parallel.lead import follow
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "several processes need torch, not installed; pip install 'dlmrt[train]'"
        ) from error
    follow(checkpoint, dtype=dtype, num_threads=num_threads)
    return True


def followed_model(
    model: str, environment: Environment, *, executor: str | None, dtype: str | None, num_threads: int | None,
    revision: str | None, adapter: Path | None = None, cuda_graph: str | None = None,
) -> bool:  # fmt: skip
    """As `followed`, for the model that `load` would load with the same arguments; all ranks refuse what it does."""
    set_cuda_graph(cuda_graph, executor or environment.executor)

    def open_checkpoint() -> Checkpoint:
        from dlmrt.decode.engine import open_model

        return open_model(model, revision=revision, adapter=adapter)

    return followed(
        open_checkpoint, executor=executor or environment.executor, dtype=dtype or environment.dtype,
        num_threads=num_threads or environment.num_threads,
    )  # fmt: skip


def set_cuda_graph(mode: str | None, executor: str) -> None:
    """Hand the option --cuda-graph to the cuda executor, which reads its variable when it loads.

    Raises:
        UsageError: not a mode, or another executor will run.
    """
    if mode is None:
        return
    if mode not in CUDA_GRAPHS:
        raise UsageError(f"--cuda-graph {mode!r} is not a mode; use one of {', '.join(CUDA_GRAPHS)}")
    if executor != "cuda":
        raise UsageError(f"--cuda-graph has no effect on executor {executor!r}; add --executor cuda, or leave it out")
    os.environ["DLMRT_CUDA_GRAPH"] = mode


def names_model(word: str) -> bool:
    """Whether a single positional is a model: an embedded name (or nearly), a folder, or shaped like a hub id.

    A near miss of an embedded name counts, so that a typing error is reported and not answered.
    """
    from dlmrt.checkpoint.hub import embedded_models

    if "\n" in word or len(word) > 255:  # not a name
        return False
    near = difflib.get_close_matches(word, embedded_models(), n=1, cutoff=0.8)
    return bool(near) or os.path.isdir(word) or _HUB_ID.fullmatch(word) is not None  # isdir never raises


def run_request(
    engine: Engine | RemoteEngine, prompt: str | list[Message], config: DecodeConfig, view: View,
    *, thinking: bool | None = None,
) -> GenerateResult:  # fmt: skip
    """Run one request, its events going to `view`. A cancelled one returns with what was committed.

    Args:
        thinking: position of the chat template's switch; None: as the template has it.

    Raises:
        KeyboardInterrupt: Ctrl-C came a second time.
    """
    result: GenerateResult | None = None
    with interrupts_as_event() as cancel:
        switch = {} if thinking is None else {"enable_thinking": thinking}
        events = engine.stream(prompt, config, canvas=view.wants_canvas, cancel=cancel, template_options=switch)
        with view:
            for event in events:
                if isinstance(event, TextEvent):
                    view.text(event.text)
                elif isinstance(event, CanvasEvent):
                    view.canvas(event)
                elif isinstance(event, GenerateResult):
                    result = event
    assert result is not None, "the stream ended without a result"
    return result


@contextmanager
def interrupts_as_event() -> Iterator[threading.Event]:
    """Within the context, Ctrl-C sets the event; once it is set, Ctrl-C raises KeyboardInterrupt as usual.

    SIGTERM ends the program at once, but in good order: the terminal gets its cursor back. A signal that the caller has
    this process ignore, as shells do for background jobs, stays ignored.
    """
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    wanted = {signal.SIGINT: interrupt, signal.SIGTERM: end}
    previous = {number: signal.getsignal(number) for number in wanted}
    for number, handler in wanted.items():
        if previous[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield interrupted
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def notice(text: str, *, quiet: bool = False) -> None:
    """Tell the user something on stderr that is not an error."""
    if not quiet:
        print(f"notice: {text}", file=sys.stderr)
