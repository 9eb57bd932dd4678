"""Every request field the server knows: what it does, or why it is refused. Nothing is accepted and ignored.

Both endpoints read the same table, so a field means the same on both; `prompt` and the fields of a conversation belong
to one of them. `null` always means "not given". The table is also the OpenAPI schema and the table of docs/server.md.

Source: ours; names from the OpenAI API reference, vLLM 0.33.0, SGLang 0.5.23 and mlx-vlm 0.7.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dlmrt.decode.aliases import ALIASES, CANONICAL, RULE_KEYS

Endpoint = Literal["chat", "completions"]

_STRING, _BOOL, _NUMBER, _INTEGER = ({"type": kind} for kind in ("string", "boolean", "number", "integer"))
_OBJECT = {"type": "object"}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field that is honoured."""

    says: str
    schema: Mapping[str, Any]
    only: Endpoint | None = None  # refused on the other endpoint


HONOURED: dict[str, Field] = {
    "model": Field(says="one of the served names; absent: the served model", schema=_STRING),
    "messages": Field(
        says="the conversation; text parts only. Literal special-token text in it is ordinary text",
        schema={"type": "array", "items": _OBJECT}, only="chat",
    ),
    "prompt": Field(
        says="text, token ids, or a list of either: one choice each, run one after another",
        schema={"anyOf": [_STRING, {"type": "array"}]}, only="completions",
    ),
    "max_tokens": Field(
        says="tokens of the answer at the most, stop token included; 1 or more, and it must fit the context. "
        "Absent: the checkpoint's default",
        schema=_INTEGER,
    ),
    "max_completion_tokens": Field(says="the same as `max_tokens`", schema=_INTEGER),
    "temperature": Field(
        says="0: argmax and one fixed noise stream, so one text whatever the seed. With `entropy_bound` it scales the "
        "temperature schedule. Absent: the checkpoint's default",
        schema=_NUMBER,
    ),
    "top_p": Field(says="nucleus filter of what is drawn", schema=_NUMBER),
    "top_k": Field(says="draw among the k most probable; 0: all", schema=_INTEGER),
    "min_p": Field(says="draw among tokens with this share of the best probability", schema=_NUMBER),
    "seed": Field(
        says="the same request with the same seed gives the same text; absent: drawn, and reported in "
        "`usage.diffusion.seed`",
        schema=_INTEGER,
    ),
    "stop": Field(
        says="text or up to 64 texts that end the answer and are not shown; found inside blocks and across them, in "
        "reasoning too",
        schema={"anyOf": [_STRING, {"type": "array", "items": _STRING}]},
    ),
    "stop_token_ids": Field(
        says="ids that end the answer, beside the checkpoint's", schema={"type": "array", "items": _INTEGER}
    ),
    "ignore_eos": Field(says="go on past the end-of-text tokens", schema=_BOOL),
    "n": Field(
        says="1 to 8 choices, run one after another; the first with `seed`, the others with seeds derived from it",
        schema=_INTEGER,
    ),
    "stream": Field(says="server-sent events; see Streaming", schema=_BOOL),
    "stream_options": Field(
        says="`include_usage`: one more chunk with empty `choices` before `[DONE]`; needs `stream`", schema=_OBJECT
    ),
    "logprobs": Field(
        says="true, or the number of alternatives (0 to 20): one entry per completion token; see Log-probabilities",
        schema={"anyOf": [_BOOL, _INTEGER]},
    ),
    "top_logprobs": Field(says="number of alternatives, 0 to 20; needs `logprobs`", schema=_INTEGER),
    "echo": Field(
        says="the prompt's text comes before the answer (of a conversation: the rendered prompt without special "
        "tokens); not together with `logprobs`",
        schema=_BOOL,
    ),
    "tools": Field(
        says="functions for the template, where template and tokenizer know tool calls; calls are parsed, see "
        "Reasoning and tools",
        schema={"type": "array", "items": _OBJECT}, only="chat",
    ),
    "tool_choice": Field(
        says="`auto` or `none`; `required` and named functions are refused, since nothing would enforce them",
        schema=_STRING, only="chat",
    ),
    "chat_template_kwargs": Field(
        says="options that the chat template reads, others are refused; `enable_thinking` also where it calls that "
        "switch otherwise. Of "
        "`reasoning_effort` and `reasoning_strength` one is enough", schema=_OBJECT,
        only="chat",
    ),
    "reasoning_effort": Field(says="to the template, where it reads that name", schema=_STRING, only="chat"),
    "response_format": Field(says="`text`; JSON formats are refused: nothing enforces them yet", schema=_OBJECT),
    "return_meta_info": Field(
        says="adds `meta_info` with `spec_verify_ct` (forwards) and `spec_accept_length` (tokens per forward)",
        schema=_BOOL,
    ),
    "diffusion": Field(
        says="decode settings by their names or aliases, and `return_canvas`: stream the canvas after every step; "
        "`max_steps` is `max_denoising_steps`",
        schema=_OBJECT,
    ),
    "stream_mode": Field(says="`denoise`: the same as `diffusion.return_canvas`", schema=_STRING),
    "vllm_xargs": Field(says="`diffusion_max_steps`, `diffusion_canvas_length`: as under `diffusion`", schema=_OBJECT),
}  # fmt: skip

# Any of these values is the behaviour anyway; another one is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (0, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "store": (False,),
    "modalities": (["text"],),
}

# Say something about the request or the account, not about the answer.
NO_EFFECT = (
    "user", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "request_id",
)  # fmt: skip

REFUSED: dict[str, str] = {
    "suffix": "infilling is not supported",
    "audio": "this is a text model",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "there is no web search",
    "verbosity": "say it in the prompt",
    "guided_json": "nothing enforces a grammar on the canvas yet",
    "guided_regex": "nothing enforces a grammar on the canvas yet",
    "guided_choice": "nothing enforces a grammar on the canvas yet",
    "guided_grammar": "nothing enforces a grammar on the canvas yet",
    "structured_outputs": "nothing enforces a grammar on the canvas yet",
    "seed_canvas": "a canvas cannot be given yet",
    "pinned": "positions cannot be pinned yet",
    "total_steps": "limit the steps of a block with max_denoising_steps",
}

# Decode settings are also taken at the top level, where some clients put them.
TOP_LEVEL_SETTINGS = tuple(name for name in CANONICAL if "." not in name and name not in HONOURED)
KNOWN = frozenset((*HONOURED, *NEUTRAL, *NO_EFFECT, *REFUSED, *TOP_LEVEL_SETTINGS))


def schema(endpoint: Endpoint) -> dict[str, Any]:
    """JSON schema of a request body."""
    mine = {name: field for name, field in HONOURED.items() if field.only in (None, endpoint)}
    properties = {name: {**field.schema, "description": field.says} for name, field in mine.items()}
    settings: dict[str, Any] = {name: {"description": "decode setting"} for name in TOP_LEVEL_SETTINGS}
    return {
        "type": "object",
        "properties": properties | settings,
        "required": ["messages" if endpoint == "chat" else "prompt"],
        "additionalProperties": False,
    }


def markdown_table() -> str:
    """The table of docs/server.md."""
    rows = ["| field | rule |", "|---|---|"]
    where = {None: "", "chat": " (chat only)", "completions": " (completions only)"}
    rows += [f"| `{name}`{where[field.only]} | {field.says} |" for name, field in HONOURED.items()]
    settings = [name for name in TOP_LEVEL_SETTINGS if CANONICAL[name] == name]
    aliases = "; ".join(
        f"`{name}`: {', '.join(f'`{alias}`' for alias in known if '.' not in alias)}"
        for name, known in (*ALIASES.items(), ("commit_rule", RULE_KEYS))
        if name not in HONOURED and any("." not in alias for alias in known)
    )
    rows.append(f"| {', '.join(f'`{name}`' for name in settings)} | decode settings, as under `diffusion` |")
    rows.append(f"| aliases of these | {aliases} |")
    rows += [f"| `{name}` | only {_values(values)}, which changes nothing |" for name, values in NEUTRAL.items()]
    rows.append(f"| {', '.join(f'`{name}`' for name in NO_EFFECT)} | accepted, no effect on the answer |")
    rows += [f"| `{name}` | refused: {why} |" for name, why in REFUSED.items()]
    rows.append("| any other key | refused, naming the nearest known one; `--ignore-unknown-fields` logs it instead |")
    return "\n".join(rows)


def _values(values: tuple[Any, ...]) -> str:
    words = {True: "true", False: "false"}
    return " or ".join(f"`{words[value] if isinstance(value, bool) else value}`" for value in values)
