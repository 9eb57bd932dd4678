"""Numbers of a finished request, for people (`--timings`, `/stats`) and for programs (`--json`).

Source: ours; counting rules in docs/design.md, layout of the timings after `ollama run --verbose`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import typer

from dlmrt.types import GenerateResult

SCHEMA_VERSION = 1


def result_document(result: GenerateResult, *, model: str, load_s: float) -> dict[str, Any]:
    """The result as JSON values; `forwards` keeps its order, so the tokens finalised by each can be read off."""
    usage, record = result.usage, result.record
    derived = ("num_forwards", "tpf_total", "tpf_denoise", "tokens_per_second")
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": dataclasses.asdict(usage) | {name: getattr(usage, name) for name in derived},
        "record": {
            "seed": record.seed,
            "executor": record.executor,
            "dtype": record.dtype,
            "commit_rule": record.commit_rule,
            "end_reason": record.end_reason,
            "num_blocks": record.num_blocks,
            "num_cached_prompt_tokens": record.num_cached_prompt_tokens,
            "settings": dict(record.settings),
            "forwards": [dataclasses.asdict(forward) for forward in record.forwards],
        },
        "load_s": load_s,
    }


def print_json(document: Any, *, indent: int | None = None) -> None:
    """Print one JSON document to stdout, readable where the encoding allows it and valid in any case."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=indent)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeError:
        text = json.dumps(document, allow_nan=False, indent=indent)
    typer.echo(text)


def timings(result: GenerateResult, *, load_s: float | None = None) -> str:
    """Counts, seconds and rates of one request, one line a phase; `load_s` where the model was loaded for it."""
    usage, record = result.usage, result.record
    computed = usage.prompt_tokens - record.num_cached_prompt_tokens
    rows = {
        "prompt": f"{usage.prompt_tokens} tokens ({record.num_cached_prompt_tokens} cached)  "
        f"{usage.prefill_s:.3f} s  {_rate(computed, usage.prefill_s)}",
        "generation": f"{usage.completion_tokens} tokens  {usage.decode_s:.3f} s  "
        f"{_rate(usage.completion_tokens, usage.decode_s)}",
        "forwards": f"{usage.num_forwards} ({usage.num_denoise_steps} denoise, {usage.num_commit_forwards} commit; "
        f"prefill apart: {usage.num_prefill_forwards})",
        "tokens/forward": f"{usage.tpf_total:.2f} total, {usage.tpf_denoise:.2f} denoise",
        "blocks": f"{usage.num_blocks}, first after {usage.time_to_first_block_s:.3f} s; {usage.num_edits} edits",
        "end": f"{record.end_reason} (executor {record.executor}, {record.dtype})",
        "settings": " ".join(f"{name}={value}" for name, value in record.settings.items()),
        "total": f"{usage.total_s:.3f} s  {_rate(usage.completion_tokens, usage.total_s)}",
    }
    if load_s is not None:
        rows = {"load": f"{load_s:.3f} s", **rows}
    return "\n".join(f"{name:<16}{value}" for name, value in rows.items())


def readable_bytes(count: int) -> str:
    """A size for people, in decimal units as disks and memory are sold."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else "n/a"
