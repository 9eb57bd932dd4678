"""Chat templates: rendered in a sandbox, with every character known to be the template's or a user's.

A template is a program of the checkpoint. It writes control tokens; users must not, neither by typing their text nor by
typing something that the template turns into it (lower case, letters replaced, two strings put together). Looking at
the rendered text alone cannot tell. So messages are rendered again with what users wrote made visible, in the first of
three ways under which the template does the same:

    fenced      a mark before and one behind each of their characters
    filled      one and the same mark in place of each of their characters
    literal     marks around the texts of control tokens only

The first two know the author of every character, and a control token is real exactly if no user wrote any part of it.
Under the last one, for templates that both cut or count strings and escape them, a token is real if the template's own
text holds it, and what changes the text of a control token of the user's is refused.

White space is not marked, since templates strip it. Neither are words that the template compares strings with, and
roles. Pieces that it looks for in strings, such as "</think>", stay whole.

Left out on purpose: loading further templates by name.

Source: rendering rules of transformers 5.24.0 utils/chat_template_utils.py (compared in tests); the idea of marking
control tokens in user text before rendering is also theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dlmrt.errors import CheckpointError, UsageError
from dlmrt.models.typed import shown

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
Mark = Callable[[str, str], str]  # text, key under which it stands ("" for a key itself) -> marked text
Run = Callable[[Any, Any], str]  # messages, options -> rendered text

_MAX_DEPTH = 100  # of lists and objects in a message
_WORD = re.compile(r"[\w.-]+")
_FREE_TEXT = ("content", "text")  # keys whose strings are never words of the template


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text. Example: ``Rendered(text="<|user|>hi", control=((0, 8),))``."""

    text: str
    control: tuple[Span, ...]  # where the template wrote control tokens, in order


class ChatTemplate:
    """One checkpoint's template. Safe to use from several threads.

    Args:
        source: jinja.
        variables: special-token strings that it may name, e.g. ``{"bos_token": "<s>"}``.
        specials: texts of the control tokens.

    Raises:
        CheckpointError: `source` is not valid jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str], specials: Collection[str]) -> None:
        self._source, self._variables = source, dict(variables)
        self._specials = sorted(specials, key=len, reverse=True)
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template is not valid jinja ({error}); download it again") from error
        # Names that it reads, such as ``enable_thinking``.
        self.options = frozenset(meta.find_undeclared_variables(tree)) - {*environment.globals, "strftime_now"}
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        self._words = {constant.lower() for constant in constants}
        own_text = [*constants, *data, *self._variables.values()]
        self._own_specials = {special for special in self._specials if any(special in text for text in own_text)}
        pieces = {constant.strip() for constant in constants} - {""}
        self._fenced = _units((), [piece for piece in pieces if len(piece) > 1])
        self._filled = _units(self._specials, [piece for piece in pieces if len(piece) == 1 or _WORD.fullmatch(piece)])
        self._control = re.compile("|".join(map(re.escape, self._specials)) or "(?!)")
        self._beginnings = tuple({text[:length] for text in self._specials for length in range(1, len(text))})

    def render(self, messages: Messages, *, add_generation_prompt: bool, options: Mapping[str, Any]) -> Rendered:
        """The conversation, and which of its control tokens are real.

        Raises:
            UsageError: the template refuses the messages, or changes the text of a control token in them.
        """
        _check_values(messages, options)
        # A key with the value None would be rendered as "None"; templates handle its absence.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        now = datetime.now()
        clock = {"strftime_now": now.strftime}  # one time for all renderings

        def run(conversation: Any, values: Any) -> str:
            values = {"tools": None, "documents": None, **self._variables, **values, **clock}
            try:
                return str(
                    self._template.render(
                        messages=conversation, add_generation_prompt=add_generation_prompt, **values
                    )
                )  # fmt: skip
            except Exception as error:  # a template is a program: it can fail in any way, recursion and memory included
                reason = str(error) or type(error).__name__
                raise UsageError(
                    f"the chat template refuses these messages: {reason}; check roles and contents"
                ) from error

        text = run(given, options)
        before, behind = self._marks(given, options)

        def marked(mark: Mark) -> str:
            try:
                return run([_marked(message, mark) for message in given], _marked_values(options, mark))
            except UsageError:
                return ""

        own = _outside(marked(lambda string, key: self._fence(string, key, before, behind)), text, before, behind)
        if own is None:
            own = _filled(marked(lambda string, key: self._fill(string, key, before)), text, before)
        if own is not None:
            return Rendered(text=text, control=self.occurrences(own))
        own = _outside(marked(lambda string, key: self._fence_literals(string, before, behind)), text, before, behind)
        if own is None:
            raise UsageError(
                "a message holds the text of a special token and the chat template transforms it; remove that text"
            )
        spans = self.occurrences(own)
        return Rendered(text=text, control=tuple(s for s in spans if text[s[0] : s[1]] in self._own_specials))

    def occurrences(self, text: str) -> tuple[Span, ...]:
        """Where `text` holds texts of control tokens, whoever wrote them."""
        return tuple(match.span() for match in self._control.finditer(text))

    def _marks(self, *texts: object) -> tuple[str, str]:
        """Two private-use characters that occur nowhere in `texts` and the template, so that no user can forge them."""
        everything = [*texts, self._source, self._variables, self._specials]
        present = set(json.dumps(everything, ensure_ascii=False))
        free = (c for c in map(chr, range(0xF0000, 0x110000)) if c not in present)
        before, behind = next(free, None), next(free, None)
        if before is None or behind is None:
            raise UsageError("the messages use up all private-use characters; remove some")
        return before, behind

    def _is_word(self, text: str, key: str) -> bool:
        """Whether a string is one of the template's words, a role, or a name under which it finds a value."""
        if self._control.fullmatch(text) or not _WORD.fullmatch(text):
            return False
        return key in ("role", "") or (key not in _FREE_TEXT and text.lower() in self._words)

    def _fence(self, text: str, key: str, before: str, behind: str) -> str:
        if self._is_word(text, key):
            return text
        return self._fenced.sub(lambda unit: unit[0] if unit[0].isspace() else before + unit[0] + behind, text)

    def _fill(self, text: str, key: str, mark: str) -> str:
        if self._is_word(text, key):
            return text
        return self._filled.sub(lambda unit: unit[0] if unit.lastindex is None else mark * len(unit[0]), text)

    def _fence_literals(self, text: str, before: str, behind: str) -> str:
        """Fences around the texts of control tokens.

        A string that ends in the beginning of one is fenced there too: the template may put another behind it.
        """
        fenced = self._control.sub(lambda match: before + match[0] + behind, text)
        end = text.rstrip()  # templates strip
        if not end.endswith(self._beginnings):
            return fenced
        cut = len(end) - len(text) - 1
        rest = fenced[cut:]
        return fenced[:cut] + before + rest[0] + behind + rest[1:]


def _units(specials: Sequence[str], pieces: Collection[str]) -> re.Pattern[str]:
    """Matches one of `specials`, of `pieces`, a run of white space or one character; first and last are groups."""
    groups = [f"({re.escape(special)})" for special in specials]
    whole = [re.escape(piece) for piece in sorted(pieces, key=len, reverse=True)]
    return re.compile("|".join([*groups, *whole, r"\s+", "(.)"]), re.DOTALL)


def _outside(marked: str, text: str, before: str, behind: str) -> str | None:
    """`text` with a mark in place of all that is fenced in `marked`; None where the two are not the same."""
    pieces, is_inside = [], False
    for piece in re.split(f"([{before}{behind}])", marked):
        if piece in (before, behind):
            if is_inside == (piece == before):
                return None
            is_inside = not is_inside
        else:
            pieces.append(before * len(piece) if is_inside else piece)
    is_same = marked.replace(before, "").replace(behind, "") == text
    return "".join(pieces) if is_same and not is_inside else None


def _filled(marked: str, text: str, mark: str) -> str | None:
    """`marked` if it is `text` but for the characters that are `mark`, else None."""
    is_same = len(marked) == len(text) and all(m in (mark, c) for m, c in zip(marked, text, strict=True))
    return marked if is_same else None


def _marked(value: Any, mark: Mark, key: str = "") -> Any:
    """Copy of `value` with all of its strings marked, keys included."""
    if isinstance(value, str):
        return mark(value, key)
    if isinstance(value, Mapping):
        return {mark(inner, ""): _marked(item, mark, inner) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, mark, key) for item in value]
    return value


def _marked_values(options: Mapping[str, Any], mark: Mark) -> dict[str, Any]:
    """As `_marked`, but for the names of the options themselves, which the template reads."""
    return {name: _marked(value, mark, name) for name, value in options.items()}


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training masks; rendering keeps its body as it is."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Sandboxed jinja with the filters and globals that chat templates on the hub rely on."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja's own escapes for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def _check_values(messages: Messages, options: Mapping[str, Any]) -> None:
    """Refuse what JSON cannot hold: a template would show other objects as text that nobody has looked at."""
    if not isinstance(messages, list | tuple):  # an iterator would be empty when it is rendered
        raise UsageError(f"the messages are a {type(messages).__name__}; give a list of them")
    if not messages:
        raise UsageError("a conversation needs at least one message")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {at} is {shown(message)}; it must be an object with role and content")
        if not isinstance(message.get("role"), str):
            raise UsageError(f'message {at} has no role; give e.g. "role": "user"')
        _check_json(message, f"message {at}")
    _check_json(options, "a template option")


def _check_json(value: Any, where: str, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise UsageError(f"{where} is nested more than {_MAX_DEPTH} deep; flatten it")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {shown(key)}; keys are text")
            _check_json(item, where, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json(item, where, depth + 1)
    elif not isinstance(value, str | int | float | None):
        raise UsageError(f"{where} holds {shown(value)}; it must be text, a number, a list or an object")
