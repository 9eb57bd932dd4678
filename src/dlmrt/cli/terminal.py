"""How an answer appears: written to stdout as it is committed, or as a live canvas on stderr.

The live view repaints in place and is wiped at the end, when the text itself goes to stdout, so that pipes never see
it. It shows the tail that fits the screen: a terminal cannot repaint lines that have scrolled away.

Legend: L canvas positions.

Source: ours; the canvas view follows what llama-diffusion-cli calls --diffusion-visual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from dlmrt.types import Bool, CanvasEvent

if TYPE_CHECKING:
    from rich.text import Text

UNDECIDED = "\u2591"
STYLES = {"undecided": "dim", "new": "bold green", "edited": "bold magenta", "kept": ""}


class View(Protocol):
    """Where the events of one request go. Leaving the context completes the text on stdout."""

    wants_canvas: bool

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def text(self, text: str) -> None:
        """Take committed text."""

    def canvas(self, event: CanvasEvent) -> None:
        """Take the canvas after a denoising step."""


class PlainView:
    """Writes committed text to stdout at once and ends it with a newline."""

    wants_canvas = False

    def __init__(self) -> None:
        self._has_text = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self._has_text:  # a request that failed at once leaves stdout empty
            self._write("\n")

    def text(self, text: str) -> None:
        """See `View.text`."""
        self._has_text = True
        self._write(text)

    def canvas(self, event: CanvasEvent) -> None:
        """See `View.canvas`."""

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class SilentView(PlainView):
    """Shows nothing: the caller prints the finished result."""

    def _write(self, text: str) -> None:
        del text


class LiveView:
    """Repaints committed text and canvas on the terminal behind stderr; the text goes to stdout at the end.

    Args:
        piece: text of one token id.
        then: takes the text when the canvas has been wiped.
    """

    wants_canvas = True

    def __init__(self, piece: Callable[[int], str], *, then: View) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._painter = CanvasPainter(piece)
        self._then = then
        self._committed = ""
        self._before_block, self._block_idx = "", -1  # text in front of the canvas

    def __enter__(self) -> Self:
        self._then.__enter__()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._committed:
            self._then.text(self._committed)
        self._then.__exit__(kind, error, trace)

    def text(self, text: str) -> None:
        """See `View.text`."""
        self._committed += text

    def canvas(self, event: CanvasEvent) -> None:
        """See `View.canvas`."""
        from rich.console import Group
        from rich.text import Text

        if event.block_idx != self._block_idx:  # settled text of the block itself is in the canvas already
            self._before_block, self._block_idx = self._committed, event.block_idx
        body = Text(self._before_block).append_text(self._painter.paint(event))
        lines = body.wrap(self._console, self._console.width)[-max(1, self._console.height - 2) :]
        self._live.update(Group(*lines, Text(self._painter.status(), style="dim")), refresh=True)


class CanvasPainter:
    """Styles each canvas position by what the step did to it, and counts steps and tokens."""

    def __init__(self, piece: Callable[[int], str]) -> None:
        self._piece = piece
        self._block_idx = -1
        self._was_unresolved_L: Bool | None = None  # before this step; None: the block has just begun
        self._num_pinned = 0  # leading slots that hold the end of the prompt
        self._num_steps, self._step = 0, 0
        self._num_before, self._num_in_block = 0, 0  # decided positions of earlier blocks, of this one

    def paint(self, event: CanvasEvent) -> Text:
        """The canvas of `event` with one style a position."""
        from rich.text import Text

        if event.block_idx != self._block_idx:
            self._num_before += self._num_in_block
            self._block_idx, self._was_unresolved_L = event.block_idx, None
            untouched_L = ~(event.changed_L | event.is_unresolved_L)
            self._num_pinned = int(untouched_L.cumprod().sum())
        text = Text()
        for slot in range(self._num_pinned, len(event.canvas_L)):
            kind = self._kind(event, slot)
            text.append(UNDECIDED if kind == "undecided" else self._piece(int(event.canvas_L[slot])), STYLES[kind])
        self._was_unresolved_L = event.is_unresolved_L
        self._num_in_block = int((~event.is_unresolved_L).sum()) - self._num_pinned
        self._num_steps, self._step = self._num_steps + 1, event.step
        return text

    def _kind(self, event: CanvasEvent, slot: int) -> str:
        if event.is_unresolved_L[slot]:
            return "undecided"
        if self._was_unresolved_L is None or self._was_unresolved_L[slot]:
            return "new"
        return "edited" if event.changed_L[slot] else "kept"

    def status(self) -> str:
        """One line: where the denoising is, and decided positions per denoising step so far."""
        rate = (self._num_before + self._num_in_block) / max(1, self._num_steps)
        return f"block {self._block_idx + 1}  step {self._step + 1}  {rate:.2f} tokens/step"


def canvas_is_possible() -> bool:
    """Whether stderr is a terminal that can be repainted."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal
