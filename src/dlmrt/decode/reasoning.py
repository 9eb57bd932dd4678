"""Where a model's thoughts end and its answer begins.

The families mark thoughts by a pair of single tokens, some of them special, so they are found by id: decoded text does
not show special tokens, and the same letters typed by ordinary tokens are ordinary text.

    Qwen3, LLaDA2   <think> ... </think>
    DiffusionGemma  <|channel>thought\\n ... <channel|>

A chat template may have opened the thought in the prompt, and an answer may be cut within it.

Source: chat templates of Qwen3 and DiffusionGemma (NVIDIA-NeMo/Automodel 36044ad examples/dllm_sft).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlmrt.decode.text import TextCodec


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


def split_reasoning(codec: TextCodec, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[str | None, str]:
    """Thoughts and answer of `answer_ids`; thoughts are None where there are none.

    Args:
        prompt_ids: what the model was given; a template may have opened the thought there.
    """
    markers = reasoning_markers(codec)
    if markers is None:
        return None, codec.decode(answer_ids)
    parts: dict[bool, list[int]] = {True: [], False: []}
    is_thought = was_thought = is_open(prompt_ids, markers)
    for token in answer_ids:
        if token == (markers.end if is_thought else markers.start):
            is_thought = not is_thought
            was_thought |= is_thought
        else:
            parts[is_thought].append(token)
    if not was_thought:
        return None, codec.decode(answer_ids)
    thought = codec.decode(parts[True]).removeprefix(markers.label).strip("\n")
    return thought, codec.decode(parts[False]).lstrip("\n")
