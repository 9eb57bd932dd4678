"""From the engine's events to the parts of a message: content, reasoning, tool calls, each with its tokens.

Reasoning and tool calls are delimited by single tokens of the tokenizer, found by id: the same text spelled by ordinary
tokens is ordinary text, and markers registered as special, which never show in text, are still seen. What only frames a
thought (its label, line breaks at both ends and before the answer) is not shown. A tool call is sent when its end
marker has come, whole; one that does not parse is content.

Where nothing needs ids (no markers, no log-probabilities) text is passed on as it comes. Else it waits for the ids of
its block, and each id is given the text that it made certain: the bytes of a character that several ids spell belong
to the last of them. How much text may be shown stays the engine's decision (stop strings, characters cut at the end).

Source: ours; markers of thoughts as in dlmrt.decode.reasoning, of calls as in dlmrt.serve.calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dlmrt.decode.engine import StreamEvent
from dlmrt.decode.reasoning import Frame, reasoning_markers
from dlmrt.decode.text import TextCodec
from dlmrt.serve.calls import SYNTAXES, Call, CallSyntax
from dlmrt.types import GenerateResult, TextEvent, TokenLogprob, TokensEvent

Channel = Literal["content", "reasoning", "tool_call"]

_NEAR = 8  # tokens from the end of a prompt within which a template may have opened a channel


@dataclass(frozen=True, kw_only=True)
class TokenEntry:
    """One completion token as `logprobs` shows it; the texts of a channel's entries join to its text."""

    token_id: int
    text: str  # empty for markers, stop tokens and unfinished characters
    logprob: TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A further piece of one channel."""

    channel: Channel
    text: str = ""
    tool_call: Call | None = None  # {"name": ..., "arguments": JSON text}
    entries: tuple[TokenEntry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Ids of the markers that a tokenizer has."""

    starts: dict[int, Channel] = field(default_factory=dict)
    ends: dict[int, Channel] = field(default_factory=dict)
    label: str = ""  # what the model writes first within a thought
    syntax: CallSyntax = SYNTAXES[0]  # of tool calls
    quote: int | None = None  # id of the syntax's quotation mark

    @classmethod
    def of(cls, codec: TextCodec) -> Markers:
        """Markers that are single tokens of `codec`, both of a pair."""
        starts: dict[int, Channel] = {}
        ends: dict[int, Channel] = {}
        thought = reasoning_markers(codec)
        if thought is not None:
            starts[thought.start] = ends[thought.end] = "reasoning"
        label = "" if thought is None else thought.label
        to_id = codec.tokenizer.token_to_id
        for syntax in SYNTAXES:
            start, end, quote = to_id(syntax.start), to_id(syntax.end), to_id(syntax.quote or syntax.start)
            if start is not None and end is not None and quote is not None:
                starts[start] = ends[end] = "tool_call"
                mark = None if syntax.quote is None else quote
                return cls(starts=starts, ends=ends, label=label, syntax=syntax, quote=mark)
        return cls(starts=starts, ends=ends, label=label)

    def only(self, *channels: Channel) -> Markers:
        """Without the markers of other channels, which then count as ordinary tokens."""
        return replace(
            self,
            starts={token: channel for token, channel in self.starts.items() if channel in channels},
            ends={token: channel for token, channel in self.ends.items() if channel in channels},
        )

    def open_channel(self, prompt_ids: Sequence[int]) -> Channel:
        """The channel that a rendered prompt ends in: templates of reasoning models may open it themselves."""
        for token in reversed(prompt_ids[-_NEAR:]):
            if token in self.starts:
                return self.starts[token]
            if token in self.ends:
                break
        return "content"


@dataclass
class _Piece:
    token_id: int
    text: str  # what the engine's text gained by this token
    logprob: TokenLogprob


class Deltas:
    """Takes the events of one answer and returns what may be sent.

    Args:
        markers: of the channels that this request splits off.
        channel: the one the answer begins in.
        with_tokens: whether entries are wanted.
    """

    def __init__(self, codec: TextCodec, markers: Markers, *, channel: Channel, with_tokens: bool) -> None:
        self._markers = markers
        self._channel = self._open_channel = channel  # of the next token, of the collected entries
        self._entries: list[TokenEntry] = []
        self._by_ids = with_tokens or bool(markers.starts)
        self._decoder = codec.incremental()
        self._pieces: list[_Piece] = []  # not passed on yet
        self._num_certain = 0  # characters of the engine's text that no delta covers yet
        self._frame: Frame | None = None  # of the open channel's text
        if channel == "reasoning":
            self._frame = Frame(markers.label, cut_end=True)
        self.num_reasoning_tokens = 0

    @property
    def needs_tokens(self) -> bool:
        """Whether the engine has to send ids."""
        return self._by_ids

    def feed(self, event: StreamEvent) -> list[Delta]:
        """Take one event; a result ends the answer."""
        if isinstance(event, TextEvent):
            if not self._by_ids:
                return [Delta(channel="content", text=event.text)]
            self._num_certain += len(event.text)
            return self._drain()
        if isinstance(event, TokensEvent) and self._by_ids:
            for token, logprob in zip(event.token_ids, event.logprobs, strict=True):
                self._pieces.append(_Piece(token, self._decoder.push([token]), logprob))
            return self._drain()
        if isinstance(event, GenerateResult) and self._by_ids:
            return self._finish()
        return []

    def _drain(self) -> list[Delta]:
        """Pass on the leading pieces whose whole text is certain."""
        count, length = 0, 0
        for piece in self._pieces:
            length += len(piece.text)
            if length > self._num_certain:
                break
            count += 1
        ready, self._pieces = self._pieces[:count], self._pieces[count:]
        self._num_certain -= sum(len(piece.text) for piece in ready)
        return self._route(ready)

    def _finish(self) -> list[Delta]:
        """Pass on the rest: what the engine did not show of it is not shown."""
        rest = self._decoder.finish()
        if self._pieces:
            self._pieces[-1].text += rest
        for piece in self._pieces:
            piece.text = piece.text[: self._num_certain]
            self._num_certain -= len(piece.text)
        ready, self._pieces = self._pieces, []
        return self._route(ready) + self._flush()  # the rest is there when the answer ended inside a tool call

    def _route(self, pieces: list[_Piece]) -> list[Delta]:
        """Give pieces to their channels; those of one channel in a row make one delta, a tool call makes one alone."""
        deltas: list[Delta] = []
        for piece in pieces:
            starts, ends = self._markers.starts.get(piece.token_id), self._markers.ends.get(piece.token_id)
            is_start = starts is not None and self._channel == "content"
            is_end = ends is not None and ends == self._channel
            if is_start and starts is not None:
                self._channel = starts
                self._frame = Frame(self._markers.label, cut_end=True) if starts == "reasoning" else None
                deltas += self._flush()
            self._open_channel = self._channel
            text = "" if is_start or is_end else self._framed(piece)
            self._entries.append(TokenEntry(token_id=piece.token_id, text=text, logprob=piece.logprob))
            self.num_reasoning_tokens += self._channel == "reasoning"
            if is_end:
                deltas += self._flush(is_whole=True)
                self._frame = Frame("", cut_end=False) if ends == "reasoning" else None
                self._channel = self._open_channel = "content"
        if self._open_channel != "tool_call":
            deltas += self._flush()
        return deltas

    def _framed(self, piece: _Piece) -> str:
        """Text of a piece in the open channel."""
        if self._channel == "tool_call" and piece.token_id == self._markers.quote:
            return str(self._markers.syntax.quote)
        return piece.text if self._frame is None else self._frame.push(piece.text)

    def _flush(self, *, is_whole: bool = False) -> list[Delta]:
        """A delta of the entries collected for the open channel, if there are any."""
        entries, self._entries = tuple(self._entries), []
        if not entries:
            return []
        text = "".join(entry.text for entry in entries)
        if self._open_channel != "tool_call":
            return [Delta(channel=self._open_channel, text=text, entries=entries)]
        syntax = self._markers.syntax
        call = syntax.parse(text)
        if call is not None:
            return [Delta(channel="tool_call", tool_call=call, entries=entries)]
        shown = [entry.text for entry in entries]
        shown[0], shown[-1] = syntax.start + shown[0], shown[-1] + (syntax.end if is_whole else "")
        entries = tuple(replace(entry, text=text) for entry, text in zip(entries, shown, strict=True))
        return [Delta(channel="content", text="".join(shown), entries=entries)]
