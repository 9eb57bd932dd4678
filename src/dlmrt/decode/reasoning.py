"""Where a model's thoughts end and its answer begins.

The families mark thoughts by a pair of single tokens, some of them special, so they are found by id: decoded text does
not show special tokens, and the same letters typed by ordinary tokens are ordinary text.

    Qwen3, LLaDA2   <think> ... </think>
    DiffusionGemma  <|channel>thought\\n ... <channel|>

A chat template may have opened the thought in the prompt, and an answer may be cut within it.

Source: chat templates of Qwen3 and DiffusionGemma (NVIDIA-NeMo/Automodel 36044ad examples/dllm_sft).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dlmrt.decode.text import TextCodec

Channel = Literal["reasoning", "content"]


@dataclass(frozen=True, kw_only=True)
class ReasoningMarkers:
    """One pair of tokens. Example: ``ReasoningMarkers(start=151667, end=151668)``."""

    start: int
    end: int
    label: str = ""  # what the model writes first within the pair; no part of the thought


_PAIRS = (("<think>", "</think>", ""), ("<|channel>", "<channel|>", "thought\n"))


def reasoning_markers(codec: TextCodec) -> ReasoningMarkers | None:
    """The pair that `codec` has as single tokens, None if it has none."""
    for first, last, label in _PAIRS:
        start, end = codec.tokenizer.token_to_id(first), codec.tokenizer.token_to_id(last)
        if start is not None and end is not None:
            return ReasoningMarkers(start=start, end=end, label=label)
    return None


def is_open(prompt_ids: Sequence[int], markers: ReasoningMarkers) -> bool:
    """Whether a rendered prompt ends within a thought."""
    for token in reversed(prompt_ids):
        if token in (markers.start, markers.end):
            return token == markers.start
    return False


class Frame:
    """Cuts off what only frames a run of text: a label and line breaks before it, line breaks behind it.

    Text is held back while it may still be part of the frame.

    Args:
        label: may come first.
        cut_end: whether line breaks at the end are cut off, too.
    """

    def __init__(self, label: str = "", *, cut_end: bool) -> None:
        self._label, self._cut_end = label, cut_end
        self._is_begun = False
        self._held = ""

    def push(self, text: str) -> str:
        """Take further text and return what is no part of the frame."""
        self._held += text
        if not self._is_begun:
            if self._held != self._label and self._label.startswith(self._held):
                return ""
            self._held, self._label = self._held.removeprefix(self._label).lstrip("\n"), ""
            self._is_begun = bool(self._held)
        length = len(self._held.rstrip("\n")) if self._cut_end else len(self._held)
        shown, self._held = self._held[:length], self._held[length:]
        return shown


class ReasoningSplitter:
    """Thoughts and answer of ids that arrive in pieces; where they are cut makes no difference.

    Example:
        splitter = ReasoningSplitter(codec, prompt_ids)
        for channel, text in splitter.push(ids): ...

    Args:
        prompt_ids: what the model was given; a template may have opened the thought there.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int]) -> None:
        self._markers = reasoning_markers(codec)
        self._decoder = codec.incremental()
        self.channel: Channel = "content"  # of the next id
        self.has_reasoning = False  # whether a thought was opened so far
        self._frame: Frame | None = None  # of the open channel's text
        if self._markers is not None and is_open(prompt_ids, self._markers):
            self._turn()

    def push(self, ids: Iterable[int]) -> list[tuple[Channel, str]]:
        """Take further ids and return the text that became certain, in order, by channel."""
        pieces: list[tuple[Channel, str]] = []
        for token in ids:
            if self._markers is not None and token == self._next_marker(self._markers):
                pieces.append((self.channel, self._framed(self._decoder.finish())))
                self._turn()
            else:
                pieces.append((self.channel, self._framed(self._decoder.push([token]))))
        return _joined(pieces)

    def finish(self) -> list[tuple[Channel, str]]:
        """The answer is over: return the rest, without an incomplete character at its end."""
        return _joined([(self.channel, self._framed(self._decoder.finish()))])

    def _next_marker(self, markers: ReasoningMarkers) -> int:
        """The id that ends the open channel."""
        return markers.end if self.channel == "reasoning" else markers.start

    def _turn(self) -> None:
        assert self._markers is not None
        self.channel = "content" if self.channel == "reasoning" else "reasoning"
        self.has_reasoning = True
        is_thought = self.channel == "reasoning"
        self._frame = Frame(self._markers.label if is_thought else "", cut_end=is_thought)

    def _framed(self, text: str) -> str:
        return text if self._frame is None else self._frame.push(text)


def _joined(pieces: Iterable[tuple[Channel, str]]) -> list[tuple[Channel, str]]:
    """`pieces` without empty ones, neighbours of one channel in one."""
    joined: list[tuple[Channel, str]] = []
    for channel, text in pieces:
        if joined and joined[-1][0] == channel:
            joined[-1] = (channel, joined[-1][1] + text)
        elif text:
            joined.append((channel, text))
    return joined


def split_reasoning(codec: TextCodec, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[str | None, str]:
    """Thoughts and answer of `answer_ids`; thoughts are None where there are none."""
    splitter = ReasoningSplitter(codec, prompt_ids)
    pieces = splitter.push(answer_ids) + splitter.finish()
    thought, content = (
        "".join(text for channel, text in pieces if channel == name) for name in ("reasoning", "content")
    )
    return (thought if splitter.has_reasoning else None), content
