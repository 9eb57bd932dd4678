"""Text to ids and back: encoding that users cannot abuse, incremental decoding, stop strings.

Special tokens are written by templates (`decode.template`) and by the tokenizer's own post-processor, never by users:
their text in a prompt or message is ordinary text, or a prompt could open a hole in itself (the mask token) or a turn
of its own.

Decoding is defined once, as a stream: ids are decoded one after the other behind a short context, and text is held
while it ends in an incomplete character. `decode` is that stream pushed at once, so streamed and plain text cannot
differ. An incomplete character at the very end is dropped.

Left out on purpose: tokenizers that prepend a space to each piece of text (those get it after every special token when
a message holds special-token text).

Source: ours; which added tokens swallow white space as in tokenizers 0.23.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dlmrt.decode.template import ChatTemplate, Rendered
from dlmrt.errors import CheckpointError, UnknownOptionError, UsageError, nearest
from dlmrt.models.config import read_json
from dlmrt.models.typed import shown

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what tokenizers decode half a character to
_MAX_PENDING = 8  # tokens; a character has at most four bytes, so more are not half a character but garbage

THINKING = "enable_thinking"  # what most templates call the switch of thoughts
_OTHER_SWITCHES = ("thinking",)  # LLaDA2


class TextCodec:
    """Tokenizer and chat template of one checkpoint. Safe to use from several threads.

    Args:
        tokenizer: taken over; `encode_special_tokens` is set.
        template: chat template (jinja), None when the checkpoint has none.
        variables: special-token strings that templates may name, e.g. ``{"bos_token": "<s>"}``.
        reserved_ids: ids that text must never produce and decoding never shows, beside the tokenizer's special ones.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template: str | None = None, variables: Mapping[str, str] | None = None,
        reserved_ids: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        self._source = template
        self._lock = threading.Lock()  # encode_special_tokens is state of the tokenizer
        added = tokenizer.get_added_tokens_decoder()
        named = set(self.variables.values())
        reserved = set(reserved_ids) | {i for i, token in added.items() if token.content in named}
        tokenizer.add_special_tokens([_as_special(added[i]) for i in reserved & set(added) if not added[i].special])
        self._special = {i: t for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a checkpoint folder.

        Ids that config.json names as mask, eos, bos or pad are reserved even where tokenizer.json does not call them
        special.

        Raises:
            CheckpointError: tokenizer.json is absent, or a file is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{folder} has no tokenizer.json; save_pretrained of a fast tokenizer writes one")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises plain Exception
            raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error
        _check_added_tokens(tokenizer, path)
        settings = _read_optional(folder / "tokenizer_config.json")
        names = {**_read_optional(folder / "special_tokens_map.json"), **settings}
        config = _read_optional(folder / "config.json")
        return cls(
            tokenizer,
            template=_find_template(folder, settings),
            variables={
                key: text for key, value in names.items() if key.endswith("_token") and (text := _content(value))
            },
            reserved_ids=_config_ids(config),
        )

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """Ids that the tokenizer has a token for, added ones included; there may be holes between them."""
        return frozenset(self.tokenizer.get_vocab(with_added_tokens=True).values())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for text, added tokens included."""
        return max(self.known_ids, default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that text never produces and decoding never shows."""
        return frozenset(self._special)

    @property
    def has_template(self) -> bool:
        """Whether `encode_messages` can be used."""
        return self._source is not None

    @property
    def template_options(self) -> frozenset[str]:
        """Names that the chat template reads, such as ``enable_thinking``."""
        return self._template.options if self.has_template else frozenset()

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with what the tokenizer itself adds (BOS, once, if it adds one).

        Raises:
            UsageError: `text` holds a lone surrogate, which no tokenizer can encode.
        """
        return self._encode(text, specials=False, add=True)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_options: Any
    ) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template; equal to the tokenizer's own apply_chat_template.

        Special tokens written by the template are real; the same text inside `messages` or options is ordinary text.
        Nothing is added to what the template writes. `enable_thinking` means the template's switch, whatever its name.

        Raises:
            UsageError: there is no template, it refuses the messages, or it transforms special-token text of theirs.
            UnknownOptionError: an option that the template does not read.
        """
        if THINKING in template_options and THINKING not in self.template_options:
            switch = next((name for name in _OTHER_SWITCHES if name in self.template_options), THINKING)
            if switch not in template_options:
                template_options[switch] = template_options.pop(THINKING)
        for name in template_options if self.has_template else ():
            if name not in self.template_options:
                raise UnknownOptionError(
                    f"the chat template does not read {name!r}{nearest(name, self.template_options)}"
                )
        rendered = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, options=template_options
        )  # fmt: skip
        if rendered.control != self._template.occurrences(rendered.text):
            return self._encode_rendered(rendered)
        ids = self._encode(rendered.text, specials=True, add=False)
        # A tokenizer that normalises text first can find control tokens in other text, e.g. of full width.
        found = Counter(token for token in ids if token in self._special)
        written = Counter(rendered.text[begin:end] for begin, end in rendered.control)
        if all(count <= written[self._special[token].content] for token, count in found.items()):
            return ids
        return self._encode_rendered(rendered)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special and unknown ids are dropped, and so is an incomplete character at the end."""
        stream = self.incremental()
        return stream.push(ids) + stream.finish()

    def incremental(self) -> IncrementalDecoder:
        """A decoder for ids that arrive in pieces."""
        return IncrementalDecoder(self)

    def _encode(self, text: str, *, specials: bool, add: bool) -> list[int]:
        try:
            with self._lock:
                self.tokenizer.encode_special_tokens = not specials
                try:
                    return list(self.tokenizer.encode(text, add_special_tokens=add).ids)
                finally:
                    self.tokenizer.encode_special_tokens = True
        except (TypeError, UnicodeError) as error:
            raise UsageError("the text holds a lone surrogate or is not a string; send valid Unicode") from error

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._source is None:
            raise UsageError(
                "this checkpoint has no chat template; send a plain prompt, or add chat_template.jinja to its folder"
            )
        return ChatTemplate(self._source, self.variables, [token.content for token in self._special.values()])

    def _encode_rendered(self, rendered: Rendered) -> list[int]:
        """Encode with the template's control tokens real and all other text ordinary."""
        by_content = {token.content: (token_id, token) for token_id, token in self._special.items()}
        ids: list[int] = []
        text, position, strip_left = rendered.text, 0, False
        for begin, end in rendered.control:
            token_id, token = by_content[text[begin:end]]
            ids += self._encode_segment(text[position:begin], strip_left, token.lstrip)
            ids.append(token_id)
            position, strip_left = end, token.rstrip
        return ids + self._encode_segment(text[position:], strip_left, False)

    def _encode_segment(self, text: str, strip_left: bool, strip_right: bool) -> list[int]:
        """Encode ordinary text between special tokens; some of those swallow the white space beside them."""
        text = text.lstrip() if strip_left else text
        text = text.rstrip() if strip_right else text
        return self._encode(text, specials=False, add=False) if text else []


class IncrementalDecoder:
    """Text of ids that arrive in pieces, without half characters; time is linear in the number of ids."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._context: list[int] = []  # last ids shown: decoders treat the start of a text differently
        self._pending: list[int] = []  # ids whose text may still change

    def push(self, ids: Iterable[int]) -> str:
        """Take further ids and return the text that became certain."""
        shown = []
        tokenizer, special = self._codec.tokenizer, self._codec.special_ids
        for token in map(int, ids):
            if not 0 <= token < self._codec.vocab_size or token in special or tokenizer.id_to_token(token) is None:
                continue
            self._pending.append(token)
            text = self._pending_text()
            if not text.endswith(_INCOMPLETE) or len(self._pending) > _MAX_PENDING:
                shown.append(text)
                self._context, self._pending = self._pending, []
        return "".join(shown)

    def finish(self) -> str:
        """Return the rest, without an incomplete character at its end."""
        text = self._pending_text().rstrip(_INCOMPLETE)
        self._context, self._pending = [], []
        return text

    def _pending_text(self) -> str:
        decode = self._codec.tokenizer.decode
        before = decode(self._context, skip_special_tokens=False)
        text = decode(self._context + self._pending, skip_special_tokens=False)
        return text[len(before) :] if text.startswith(before) else decode(self._pending, skip_special_tokens=False)


class StopMatcher:
    """Ends a streamed text before the first stop string, wherever the stream is cut.

    First means: the earliest start in the whole text. Text is held back while it may still become a stop string.

    Args:
        stops: none of them empty; an empty sequence never matches.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or "" in stops:
            raise UsageError("stop strings must be a list of strings that are not empty")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take further text; return what is safe to show and whether the text has ended before a stop string."""
        if self._matched:
            return "", True
        text = self._held + text
        match = self._first_match(text)
        tails = range(max(0, len(text) - self._longest + 1), len(text))
        hold = next((start for start in tails if self._may_match(text[start:])), len(text))
        # A stop string that begins earlier and is still growing wins over a finished one: wait for it.
        self._matched = match <= hold and match < len(text)
        shown = min(match, hold)
        self._held = "" if self._matched else text[shown:]
        return text[:shown], self._matched

    def flush(self) -> tuple[str, bool]:
        """The stream is over: return what was held back, up to a stop string in it, and whether there is one."""
        held, self._held = self._held, ""
        match = self._first_match(held)
        self._matched = self._matched or match < len(held)
        return held[:match], self._matched

    def _first_match(self, text: str) -> int:
        """Start of the first stop string in `text`, its length if there is none."""
        return min((at for at in map(text.find, self._stops) if at >= 0), default=len(text))

    def _may_match(self, tail: str) -> bool:
        return any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops)


def _check_added_tokens(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse ids that the tokenizers package would change: it numbers added tokens on where the file leaves a gap."""
    for token in read_json(path).get("added_tokens") or []:
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            raise CheckpointError(
                f"{path}: {token['content']!r} has the id {token['id']} and would be read as {found}; ids of added "
                "tokens have to follow the vocabulary's without a gap, fill it with reserved tokens"
            )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.normalized, special=True,
    )  # fmt: skip


def _content(token: Any) -> str:
    """Text of a token in tokenizer_config.json: a string, or an object with its flags."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _config_ids(config: Mapping[str, Any]) -> set[int]:
    """Ids that config.json gives a meaning of their own."""
    values = [config.get(f"{name}_token_id") for name in ("mask", "eos", "bos", "pad")]
    values.append((config.get("diffusion") or {}).get("mask_token_id"))
    flat = itertools.chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
    return {token for token in flat if isinstance(token, int)}


def _find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the (default) template of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str | None):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {shown(template)}; it must be text"
        )
    return template
