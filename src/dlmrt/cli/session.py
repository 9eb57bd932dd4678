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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlmrt.cli.manners import set_up_logging
from dlmrt.cli.terminal import View
from dlmrt.env import Environment
from dlmrt.types import CanvasEvent, DecodeConfig, GenerateResult, Message, TextEvent

if TYPE_CHECKING:
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
    environment = Environment.read()
    level = "debug" if debug else "error" if quiet else environment.log_level
    set_up_logging(level)
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
) -> Loaded:
    """Load `model`; options that are None come from the environment."""
    started = time.perf_counter()
    from dlmrt.decode.engine import Engine  # its imports are part of what the user waits for

    engine = Engine.load(
        model,
        executor=executor or environment.executor,
        dtype=dtype or environment.dtype,
        num_threads=num_threads or environment.num_threads,
        revision=revision,
        adapter=adapter,
    )
    return Loaded(engine=engine, model=model, load_s=time.perf_counter() - started)


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
