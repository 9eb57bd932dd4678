"""Options that verbs share: the model and how to run it, and one option per field of `DecodeConfig`.

Decode options are made from the dataclass, so a new field becomes an option, a key of `--decode-config` and of `/set`
by adding its line to `HELP`. Spellings of other engines come from dlmrt.decode.aliases.

Source: ours.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dlmrt.decode.aliases import ALIASES, CANONICAL, canonical_settings, is_tuple, scalar_type
from dlmrt.errors import UsageError
from dlmrt.models.config import without_duplicates
from dlmrt.types import DecodeConfig

Command = TypeVar("Command", bound=Callable[..., None])

HELP = {
    "commit_rule": "The rule: threshold, joint_threshold, joint_threshold_indel, entropy_bound, steps or sub_blocks.",
    "canvas_length": "Positions denoised together, where the checkpoint allows another length than its own.",
    "threshold": "Commit a position when its confidence is above this; 0 to 1.",
    "edit_threshold": "joint_threshold changes a committed position when the new confidence is above this; 0: always.",
    "max_post_edit_steps": "Edit rounds after the last position of a block was decided.",
    "min_commit": "Positions that a step commits at the least.",
    "sub_block_length": "sub_blocks decides so many positions of a block before any to their right.",
    "max_denoising_steps": "Denoising steps a block at the most.",
    "entropy_bound": "Cumulative entropy that one step may accept, in nats.",
    "t_min": "Temperature of entropy_bound at the last step.",
    "t_max": "Temperature of entropy_bound at the first step.",
    "stop_entropy": "Mean entropy below which a stable canvas ends, in nats.",
    "stability_threshold": "Further equal argmax canvases before a canvas may end.",
    "temperature": "0: argmax and one fixed noise stream, whatever the seed.",
    "top_k": "Sample among the k most probable tokens; 0: all.",
    "top_p": "Sample among the smallest set of tokens with this mass; 1: all.",
    "min_p": "Sample among tokens with this share of the best probability; 0: all.",
    "seed": "Seed of the request; absent: drawn and reported.",
    "noise_seed": "Varies the random canvas at temperature 0.",
    "max_tokens": "Tokens of the answer at the most, stop token included.",
    "stop": "Text that ends the answer and is not shown; may be repeated.",
    "stop_token_ids": "Token id that ends the answer; may be repeated.",
    "ignore_eos": "Go on past the end-of-text tokens.",
    "use_residual": "Feed each step's prediction into the next one, where the checkpoint can.",
}

ModelOption = Annotated[
    str | None, typer.Option("--model", "--model-path", help="Model: name, folder or hub id; instead of MODEL.")
]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")]
AdapterOption = Annotated[
    Path | None, typer.Option("--adapter", help="Folder of a residual adapter that was trained on this model.")
]
ExecutorOption = Annotated[
    str | None, typer.Option("--executor", help="Who runs the denoising loop. [default: DLMRT_EXECUTOR or auto]")
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="Compute type, e.g. float32. [default: DLMRT_DTYPE or auto]")
]
CudaGraphOption = Annotated[
    str | None,
    typer.Option("--cuda-graph", help="How cuda runs the loop: loop, step, off. [default: DLMRT_CUDA_GRAPH or loop]"),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--num-threads", min=1, help="CPU threads. [default: DLMRT_NUM_THREADS or auto]")
]
DecodeFileOption = Annotated[
    Path | None,
    typer.Option("--decode-config", help="TOML, YAML or JSON file of decode settings; options overrule it."),
]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="Think first or not, by the chat template's switch. [default: the template's]"
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No notices on stderr.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Log everything and show tracebacks.")]


def with_decode_options(command: Command) -> Command:
    """Add one option per field of `DecodeConfig` to `command`, which receives those given as the dict `decode`."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "decode"]
    options = [_option(name) for name in HELP]

    @functools.wraps(command)
    def parsed(**values: Any) -> None:
        given = {name: values.pop(name) for name in HELP}
        command(**values, decode={name: _value(name, value) for name, value in given.items() if value is not None})

    parsed.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    parsed.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
    return typing.cast(Command, parsed)


def _option(name: str) -> inspect.Parameter:
    spellings = [name, *(alias for alias in ALIASES.get(name, ()) if "." not in alias)]
    flags = [f"--{spelling.replace('_', '-')}" for spelling in spellings]
    kind = scalar_type(name)
    if kind is bool:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    metavar = None if kind is bool else f"<{kind.__name__}>"
    # A list, so that no spelling is dropped when several are given.
    annotation = kind if kind is bool else list[kind]  # type: ignore[valid-type]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation | None, typer.Option(*flags, metavar=metavar, help=HELP[name])],
    )


def _value(name: str, given: Any) -> Any:
    """The setting's value of what the parser collected: all of it, or the one that all spellings agree on."""
    if is_tuple(name) or not isinstance(given, list):
        return tuple(given) if isinstance(given, list) else given
    spelt = ", ".join(map(repr, given))
    if len(set(map(repr, given))) > 1:  # NaN equals nothing, not even itself
        raise UsageError(f"--{name.replace('_', '-')} (or another spelling of it) is given as {spelt}; remove one")
    return given[0]


def read_decode_file(path: Path) -> dict[str, Any]:
    """Settings of a TOML, YAML or JSON file under their canonical names.

    Raises:
        UsageError: the file cannot be read, or a value has a wrong type, or two spellings disagree.
        UnknownOptionError: a key that no setting has.
    """
    if path.suffix not in _PARSERS:
        raise UsageError(f"{path}: decode settings are read from .toml, .yaml or .json files; rename or convert it")
    text = read_text(path, option="--decode-config")
    try:
        raw = _PARSERS[path.suffix](text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is not valid {path.suffix[1:].upper()} ({reason}); mend the file") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path} holds no keys; write e.g. 'threshold' and its value")
    return canonical_settings(raw, source=str(path))


def read_text(path: Path, *, option: str) -> str:
    """Text of the file that `option` names.

    Raises:
        UsageError: it cannot be read, or is no file: a pipe would be waited for, without end if nobody writes to it.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot read {path} (it is not a file); check the path of {option}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path of {option}") from error
    except UnicodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; convert it first, e.g. with iconv") from error
    except UsageError:
        raise
    except ValueError as error:  # a name that no file system can hold
        raise UsageError(f"{str(path)!r} is not a file name; check the path of {option}") from error


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
        """Refuses a key that occurs twice, of which YAML would keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            without_duplicates([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=without_duplicates)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": _parse_json,
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def decode_config(file: Path | None, given: Mapping[str, Any]) -> DecodeConfig:
    """Settings of `file` with those `given` on the command line on top."""
    return DecodeConfig(**{**(read_decode_file(file) if file else {}), **given})


def changed_setting(config: DecodeConfig, key: str, text: str) -> DecodeConfig:
    """`config` with the setting `key` read from `text` as JSON, or as plain text; "null" gives it back its default."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    name = CANONICAL.get(key.replace("-", "_"), key)
    if name in HELP and scalar_type(name) is str and not isinstance(value, list | types.NoneType):
        value = text
    if isinstance(value, dict):
        raise UsageError(f"/set {key}: {text} holds several settings; set them one by one")
    settings = canonical_settings({name: value}, source="/set")
    default = {field.name: field.default for field in dataclasses.fields(DecodeConfig)}
    return dataclasses.replace(config, **{name: settings.get(name, default[name])})
