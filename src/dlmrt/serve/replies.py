"""The JSON of an answer: one document, or chunks of a stream whose parts join to the same document.

Source: ours; shapes of the OpenAI API, `reasoning_content` as in DeepSeek's and vLLM's, the key `diffusion` ours.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlmrt import __version__
from dlmrt.decode.engine import StreamEvent
from dlmrt.decode.text import TextCodec
from dlmrt.serve.calls import Call
from dlmrt.serve.deltas import Channel, Delta, Deltas, TokenEntry
from dlmrt.serve.queue import Job
from dlmrt.serve.requests import ApiCall
from dlmrt.types import CanvasEvent, GenerateResult

_COUNTS = (
    "num_forwards",
    "num_denoise_steps",
    "num_commit_forwards",
    "num_prefill_forwards",
    "num_blocks",
    "num_edits",
)
_KEYS: dict[Channel, str] = {"content": "content", "reasoning": "reasoning_content", "tool_call": "tool_calls"}


@dataclass(kw_only=True)
class Choice:
    """One answer as it grows."""

    index: int
    deltas: Deltas
    num_prompt: int  # tokens
    prefix: str = ""  # the prompt's text, with echo
    texts: dict[Channel, list[str]] = field(default_factory=lambda: {"content": [], "reasoning": []})
    entries: dict[Channel, list[TokenEntry]] = field(
        default_factory=lambda: {"content": [], "reasoning": [], "tool_call": []}
    )
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    result: GenerateResult | None = None
    has_begun: bool = False  # its first chunk was sent
    text_offset: int = 0  # characters that log-probabilities were shown of

    def take(self, event: StreamEvent) -> list[Delta]:
        """Take one event of the engine; what of it may be sent."""
        deltas = self.deltas.feed(event)
        for delta in deltas:
            self.entries[delta.channel] += delta.entries
            if delta.tool_call is not None:
                self.tool_calls.append(self._numbered(delta.tool_call))
            else:
                self.texts[delta.channel].append(delta.text)
        if isinstance(event, GenerateResult):
            self.result = event
        return deltas

    def text(self, channel: Channel) -> str:
        """All text of a channel so far."""
        return "".join(self.texts[channel])

    @property
    def finish_reason(self) -> str:
        """OpenAI's word; an answer that was cut counts as one that was too long."""
        assert self.result is not None
        if self.result.finish_reason == "stop":
            return "tool_calls" if self.tool_calls else "stop"
        return "length"

    def _numbered(self, call: Call) -> dict[str, Any]:
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}


class Reply:
    """Builds the documents of one request."""

    def __init__(self, call: ApiCall, job: Job, codec: TextCodec, *, model: str, choices: Sequence[Choice]) -> None:
        self.call, self.job, self.choices = call, job, choices
        self._codec, self._model = codec, model
        self._is_chat = call.endpoint == "chat"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._pieces: dict[int, str] = {}

    @property
    def results(self) -> list[GenerateResult]:
        """What is finished."""
        return [choice.result for choice in self.choices if choice.result is not None]

    @property
    def is_complete(self) -> bool:
        """Whether every choice has its result."""
        return len(self.results) == len(self.choices)

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._chat_choice(c) if self._is_chat else self._text_choice(c) for c in self.choices]
        document = self._frame("chat.completion" if self._is_chat else "text_completion", choices)
        document |= {"usage": self.usage()}
        if self.call.return_meta_info:
            document["meta_info"] = self._meta_info()
        return document

    def head(self, choice: Choice) -> list[dict[str, Any]]:
        """The first chunk of a choice: the role, and the prompt's text with echo."""
        choice.has_begun = True
        if not self._is_chat and not choice.prefix:
            return []
        return [self._chunk(choice, {"role": "assistant", "content": choice.prefix}, choice.prefix)]

    def chunks(self, choice: Choice, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Chunks of further text or tool calls."""
        chunks = []
        num_later = sum(delta.tool_call is not None for delta in deltas)
        for delta in deltas:
            logprobs = self._logprobs(choice, {delta.channel: delta.entries}) if delta.entries else None
            part: dict[str, Any] = {_KEYS[delta.channel]: delta.text}
            if delta.tool_call is not None:
                at = len(choice.tool_calls) - num_later
                num_later -= 1
                part = {"tool_calls": [{"index": at, **choice.tool_calls[at]}]}
            elif not delta.text and logprobs is None:
                continue
            chunks.append(self._chunk(choice, part, delta.text, logprobs=logprobs))
        return chunks

    def last(self, choice: Choice) -> dict[str, Any]:
        """The chunk that carries the finish reason."""
        chunk = self._chunk(choice, {}, "", finish_reason=choice.finish_reason)
        if self.call.return_meta_info and self.is_complete:
            chunk["meta_info"] = self._meta_info()
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The extra chunk of `include_usage`."""
        return self._frame(self._chunk_object, []) | {"usage": self.usage()}

    def canvas_chunk(self, choice: Choice, event: CanvasEvent) -> dict[str, Any]:
        """An ordinary chunk without text and with the canvas after one step; prompt slots are left out."""
        num_pinned = max(0, choice.num_prompt - event.start)
        is_open = event.is_unresolved_L[num_pinned:]
        position = max(0, event.start - choice.num_prompt)
        ids = event.canvas_L[num_pinned:].tolist()
        canvas = {
            "block": event.block_idx,
            "step": event.step,
            "position": position,
            "committed_len": position + (int(is_open.argmax()) if is_open.any() else len(ids)),
            "token_ids": ids,
            "tokens": [self._piece(token) for token in ids],
            "open": is_open.nonzero()[0].tolist(),
            "changed": event.changed_L[num_pinned:].nonzero()[0].tolist(),
            "confidence": [round(float(p), 4) for p in event.confidence_L[num_pinned:]],
            "text": event.text,
        }
        return self._chunk(choice, {}, "") | {"diffusion": canvas}

    def usage(self) -> dict[str, Any]:
        """Counts of all choices together; times are sums, the queue is waited in once."""
        results = self.results
        usages = [result.usage for result in results]
        counts = {name: sum(getattr(usage, name) for usage in usages) for name in _COUNTS}
        prompt_tokens = sum(result.usage.prompt_tokens for result in results)
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        total_s = sum(usage.total_s for usage in usages)
        record = results[0].record
        reasons = [self.job.cut if r.record.end_reason == "cancelled" else r.record.end_reason for r in results]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(r.record.num_cached_prompt_tokens for r in results)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.deltas.num_reasoning_tokens for choice in self.choices)
            },
            "diffusion": {
                **counts,
                "tpf_total": completion_tokens / max(1, counts["num_forwards"]),
                "tpf_denoise": completion_tokens / max(1, counts["num_denoise_steps"]),
                "queue_s": self.job.queue_s,
                "prefill_s": max(0.0, sum(usage.prefill_s for usage in usages)),
                "decode_s": sum(usage.decode_s for usage in usages),
                "time_to_first_block_s": max(0.0, usages[0].time_to_first_block_s),
                "total_s": total_s,
                "tokens_per_second": completion_tokens / total_s if total_s > 0 else 0.0,
                "executor": record.executor,
                "dtype": record.dtype,
                "graphs": record.graphs,
                "seed": record.seed,
                "end_reason": reasons[0] if len(set(reasons)) == 1 else reasons,
                "settings": dict(record.settings),
            },
        }

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.prefix + choice.text("content")}
        if reasoning := choice.text("reasoning"):
            message["reasoning_content"] = reasoning
        if choice.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = choice.tool_calls
        return {
            "index": choice.index,
            "message": message | {"refusal": None},
            "logprobs": self._logprobs(choice, choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.prefix + choice.text("content"),
            "logprobs": self._logprobs(choice, choice.entries),
            "finish_reason": choice.finish_reason,
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"dlmrt-{__version__}",
            "choices": choices,
        }

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], text: str, *, logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        body: dict[str, Any] = {"delta": delta} if self._is_chat else {"text": text}
        entry = {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame(self._chunk_object, [entry])

    def _logprobs(self, choice: Choice, entries: dict[Channel, Any]) -> dict[str, Any] | None:
        if self.call.top_logprobs is None:
            return None
        if not self._is_chat:
            return self._text_logprobs(choice, entries.get("content", ()))
        lists: dict[str, Any] = {"content": [self._entry(entry) for entry in entries.get("content", ())]}
        for channel in ("reasoning", "tool_call"):
            if entries.get(channel):
                lists[_KEYS[channel]] = [self._entry(entry) for entry in entries[channel]]
        return lists | {"refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        return _logprob(entry.text, entry.logprob.logprob) | {
            "top_logprobs": [_logprob(self._label(token), logprob) for token, logprob in entry.logprob.top]
        }

    def _text_logprobs(self, choice: Choice, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """The older form; offsets count the characters of the whole text."""
        offsets = []
        for entry in entries:  # each entry is shown once, in a chunk or in the document
            offsets.append(choice.text_offset)
            choice.text_offset += len(entry.text)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob.logprob for entry in entries],
            "top_logprobs": [{self._label(t): logprob for t, logprob in entry.logprob.top} for entry in entries],
            "text_offset": offsets,
        }

    def _meta_info(self) -> dict[str, Any]:
        diffusion = self.usage()["diffusion"]
        return {"spec_verify_ct": diffusion["num_forwards"], "spec_accept_length": diffusion["tpf_total"]}

    def _piece(self, token: int) -> str:
        """Text of one token, empty for special tokens and parts of a character."""
        if token not in self._pieces:
            self._pieces[token] = self._codec.decode([token])
        return self._pieces[token]

    def _label(self, token: int) -> str:
        """A token that did not become text still needs a name among the alternatives."""
        return self._piece(token) or str(self._codec.tokenizer.id_to_token(token))


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}
