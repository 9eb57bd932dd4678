"""Ctrl-C at moments when nothing is half done.

Source: ours.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while the block runs, raise KeyboardInterrupt at its end; main thread only, else no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_pending = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        is_pending = True

    previous = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if is_pending:
        raise KeyboardInterrupt
