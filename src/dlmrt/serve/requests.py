"""From a JSON body to one checked call: messages or prompts, decode settings, form of the answer.

Only names, types and combinations are checked here; ranges and what a checkpoint allows are the engine's business, and
its errors name the setting.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlmrt.decode.aliases import CANONICAL, canonical_settings
from dlmrt.decode.settings import RULE_FIELDS
from dlmrt.errors import UsageError, nearest
from dlmrt.serve.fields import HONOURED, KNOWN, NEUTRAL, REFUSED, Endpoint
from dlmrt.serve.messages import read_messages
from dlmrt.serve.problems import ApiError, bad_field
from dlmrt.types import DecodeConfig

logger = logging.getLogger(__name__)

MAX_CHOICES = 64  # prompts times n
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
_DIFFUSION_EXTRAS = {"max_steps": "max_denoising_steps"}
_XARGS = {"diffusion_max_steps": "max_denoising_steps", "diffusion_canvas_length": "canvas_length"}


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """One checked request. Example: ``ApiCall(endpoint="completions", prompts=("2 + 3 =",), settings={"seed": 7})``."""

    endpoint: Endpoint
    model: str | None = None
    messages: tuple[dict[str, Any], ...] = ()  # chat
    prompts: tuple[str | list[Any], ...] = ()  # completions: text or ids each
    settings: dict[str, Any] = field(default_factory=dict)  # fields of DecodeConfig that the request gives
    num_choices: int = 1  # of each prompt
    stream: bool = False
    include_usage: bool = False
    return_canvas: bool = False
    return_meta_info: bool = False
    echo: bool = False
    top_logprobs: int | None = None  # None: no log-probabilities
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)


def parse_call(body: Mapping[str, Any], endpoint: Endpoint, *, ignore_unknown: bool = False) -> ApiCall:
    """Check `body` against the table of fields.

    Raises:
        ApiError: 400; `param` names the field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in list(given):
        if name not in KNOWN:
            _unknown(name, ignore_unknown)
            del given[name]
    for name, value in given.items():
        _refuse(name, value, endpoint)
    _check_response_format(given)
    settings = _settings(given)
    diffusion = _take_object(given, "diffusion")
    top_logprobs = _top_logprobs(given)
    options = {"echo": _switch(given, "echo"), "return_meta_info": _switch(given, "return_meta_info")}
    if options["echo"] and top_logprobs is not None:
        raise bad_field("echo", "echo and logprobs together would need log-probabilities of the prompt; drop one")
    call = ApiCall(
        endpoint=endpoint,
        model=_model(given),
        settings=settings,
        num_choices=_integer(given, "n", 1, 8, default=1),
        top_logprobs=top_logprobs,
        return_canvas=_return_canvas(given, diffusion),
        stream=_switch(given, "stream"),
        include_usage=_include_usage(given),
        messages=read_messages(given.get("messages")) if endpoint == "chat" else (),
        prompts=_prompts(given) if endpoint == "completions" else (),
        tools=_tools(given),
        template_options=_template_options(given),
        **options,
    )
    if call.return_canvas and not call.stream:
        raise bad_field("return_canvas", "diffusion.return_canvas sends the canvas in a stream; set stream to true")
    if len(call.prompts) * call.num_choices > MAX_CHOICES:
        raise bad_field(
            "prompt", f"{len(call.prompts)} prompts times n are more than {MAX_CHOICES} choices; send fewer"
        )
    return call


def decode_config(base: DecodeConfig, settings: Mapping[str, Any], default_rule: str) -> DecodeConfig:
    """The server's settings `base` with those of the request on top.

    A request that chooses another commit rule drops the settings of `base` that only the other rule has.
    """
    rule = settings.get("commit_rule")
    if rule in RULE_FIELDS and rule != (base.commit_rule or default_rule):
        others = {name for fields in RULE_FIELDS.values() for name in fields} - set(RULE_FIELDS[rule])
        settings = {**dict.fromkeys(others), **settings}
    return dataclasses.replace(base, **settings)


def derived_seed(seed: int, choice: int) -> int:
    """Seed of the choice with that index; 53 bits, so that it survives JSON readers that hold numbers as doubles."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def _unknown(name: str, ignore: bool) -> None:
    message = f"unknown field {name!r}{nearest(name, KNOWN)}"
    if not ignore:
        raise ApiError(400, message, param=name, code="unknown_parameter")
    logger.warning("ignored: %s", message)


def _refuse(name: str, value: Any, endpoint: Endpoint) -> None:
    if name in REFUSED:
        raise ApiError(400, f"{name} is refused: {REFUSED[name]}", param=name, code="unsupported_parameter")
    if name in NEUTRAL and not any(value == neutral and _same_kind(value, neutral) for neutral in NEUTRAL[name]):
        raise ApiError(
            400, f"{name} is not supported and would have to be ignored; leave it out, or send {NEUTRAL[name][0]!r}",
            param=name, code="unsupported_parameter",
        )  # fmt: skip
    known = HONOURED.get(name)
    if known is not None and known.only not in (None, endpoint) and value not in ([], {}, "none"):
        path = "/v1/chat/completions" if known.only == "chat" else "/v1/completions"
        raise bad_field(name, f"{name} belongs to {path}; send it there")


def _same_kind(value: Any, neutral: Any) -> bool:
    """`1 == True` in Python, not in JSON."""
    return isinstance(value, bool) == isinstance(neutral, bool)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of DecodeConfig from the top level, `diffusion` and `vllm_xargs`; those that disagree are refused."""
    places: list[tuple[str, str, Any]] = [(name, name, value) for name, value in given.items() if name in CANONICAL]
    for key, value in _take_object(given, "diffusion").items():
        if key == "return_canvas":
            continue
        if key in REFUSED:
            raise bad_field(key, f"diffusion.{key} is refused: {REFUSED[key]}")
        places.append((f"diffusion.{key}", _DIFFUSION_EXTRAS.get(key, key), value))
    for key, value in _take_object(given, "vllm_xargs").items():
        if key == "diffusion_read_only" and value is False:
            continue
        if key not in _XARGS:
            raise bad_field("vllm_xargs", f"vllm_xargs.{key} is not supported{nearest(key, _XARGS)}")
        places.append((f"vllm_xargs.{key}", _XARGS[key], value))
    settings: dict[str, Any] = {}
    for where, key, value in places:
        name = CANONICAL.get(key, key)
        if name == "stop" and isinstance(value, list) and len(value) > MAX_STOPS:
            raise bad_field("stop", f"stop holds {len(value)} texts; {MAX_STOPS} are the most")
        try:
            found = canonical_settings({key: value}, source="the request")
        except UsageError as error:
            raise bad_field(where.split(".")[-1], str(error)) from None
        for setting, checked in found.items():
            if settings.setdefault(setting, checked) != checked:
                raise bad_field(
                    where, f"{where} says {checked!r} and another field says {settings[setting]!r}; remove one"
                )
    return settings


def _take_object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise bad_field(name, f"{name} must be an object")
    return {key: inner for key, inner in value.items() if inner is not None}


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad_field(name, f"{name} is {value!r}; it must be true or false")
    return value


def _integer(given: Mapping[str, Any], name: str, low: int, high: int, *, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_field(name, f"{name} is {value!r}; it must be a whole number within [{low}, {high}]")
    return value


def _model(given: Mapping[str, Any]) -> str | None:
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_field("model", f"model is {model!r}; it must be text")
    return model


def _top_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = given.get("logprobs", False)
    if wanted is False:
        if given.get("top_logprobs", 0) != 0:
            raise bad_field("top_logprobs", "top_logprobs has no effect without logprobs; set logprobs to true")
        return None
    count = _integer(given, "top_logprobs", 0, MAX_TOP_LOGPROBS, default=0)
    if wanted is True:
        return count
    number = _integer(given, "logprobs", 0, MAX_TOP_LOGPROBS, default=0)
    if "top_logprobs" in given and count != number:
        raise bad_field("top_logprobs", f"logprobs says {number} and top_logprobs {count}; remove one")
    return number


def _return_canvas(given: Mapping[str, Any], diffusion: Mapping[str, Any]) -> bool:
    mode = given.get("stream_mode")
    if mode not in (None, "denoise"):
        raise bad_field("stream_mode", f"stream_mode {mode!r} is not known; send 'denoise' or leave it out")
    return _switch(diffusion, "return_canvas") or mode == "denoise"


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = _take_object(given, "stream_options")
    for key in options:
        if key != "include_usage":
            raise bad_field("stream_options", f"stream_options.{key} is not supported; only include_usage is")
    if options and given.get("stream") is not True:
        raise bad_field("stream_options", "stream_options has no effect without stream; set stream to true")
    return _switch(options, "include_usage")


def _prompts(given: Mapping[str, Any]) -> tuple[str | list[Any], ...]:
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise bad_field("prompt", "prompt must be text, a list of token ids, or a list of either")
    if all(isinstance(item, int) for item in prompt):  # a bool among them is refused by the engine
        return (prompt,)
    if all(isinstance(item, str | list) for item in prompt):
        return tuple(prompt)
    raise bad_field("prompt", "prompt mixes text and token ids; send a list of texts, or of lists of ids")


def _tools(given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise bad_field("tool_choice", f"tool_choice {choice!r} would not be enforced; send 'auto' or 'none'")
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise bad_field("tools", "tools must be a list")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field("tools", f"tools[{at}] must be of type 'function' with a function that has a name")
    return tuple(tools) if choice == "auto" else ()


def _check_response_format(given: Mapping[str, Any]) -> None:
    kind = _take_object(given, "response_format").get("type", "text")
    if kind != "text":
        raise ApiError(
            400, f"response_format {kind!r} is not enforced on the canvas yet; ask for it in the prompt",
            param="response_format", code="unsupported_parameter",
        )  # fmt: skip


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = _take_object(given, "chat_template_kwargs")
    for name in ("tools", "messages", "add_generation_prompt"):
        if name in options:
            raise bad_field("chat_template_kwargs", f"chat_template_kwargs cannot set {name!r}")
    if "reasoning_effort" in given:
        options["reasoning_effort"] = given["reasoning_effort"]
    return options
