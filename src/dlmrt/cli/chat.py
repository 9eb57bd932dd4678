"""`dlmrt chat`: a conversation in the terminal, or with lines piped to stdin.

The loop keeps three things: the history that goes to the chat template, the settings that `/set` changes, and the last
result for `/stats`. An answer cut by Ctrl-C stays in the history as far as it was committed; a request that failed
leaves the history as it was.

Source: ours; commands as in `transformers chat` and mini-sglang's shell.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from dlmrt.cli import options
from dlmrt.cli.report import timings
from dlmrt.cli.session import DEFAULT_MODEL, Loaded, followed_model, load, notice, run_request, start
from dlmrt.cli.terminal import LiveView, PlainView, View, canvas_is_possible
from dlmrt.errors import DlmrtError, UsageError, nearest
from dlmrt.types import DecodeConfig, GenerateResult, Message

COMMANDS = {
    "/help": "show this list",
    "/clear": "forget the conversation",
    "/set": "/set KEY VALUE changes a decode setting; /set alone shows those that are set",
    "/stats": "counts and times of the last answer",
    "/exit": "end (also Ctrl-D)",
}


@options.with_decode_options
def chat(
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=f"Name, folder or hub id. [default: {DEFAULT_MODEL}]")
    ] = None,
    *,
    model: options.ModelOption = None,
    revision: options.RevisionOption = None,
    adapter: options.AdapterOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    thinking: options.ThinkingOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print text as it is committed, without the canvas.")] = False,
    executor: options.ExecutorOption = None,
    dtype: options.DtypeOption = None,
    num_threads: options.ThreadsOption = None,
    cuda_graph: options.CudaGraphOption = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="Talk to a running server; DLMRT_API_KEY holds its key.")
    ] = None,
    decode_file: options.DecodeFileOption = None,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
    decode: dict[str, Any],
) -> None:
    """Talk to a model."""
    environment = start(debug=debug, quiet=quiet)
    if model is not None and model_argument not in (None, model):
        raise UsageError(f"two models are named, {model_argument!r} and --model {model!r}; remove one")
    name = next((given for given in (model_argument, model) if given is not None), DEFAULT_MODEL)
    config = options.decode_config(decode_file, decode)
    here: dict[str, Any] = {
        "executor": executor, "dtype": dtype, "num_threads": num_threads, "revision": revision, "adapter": adapter,
        "cuda_graph": cuda_graph,
    }  # fmt: skip
    if base_url is None and followed_model(name, environment, **here):
        return
    if base_url is None:
        loaded = load(name, environment, **here)
    else:
        loaded = _connect(base_url, model_argument or model, environment.api_key, here)
    talk(loaded, config, system=system, thinking=thinking, plain=plain, quiet=quiet)


def talk(
    loaded: Loaded, config: DecodeConfig, *, system: str | None, thinking: bool | None, plain: bool, quiet: bool
) -> None:
    """Answer lines of stdin until they end."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # not on every platform
            import readline  # noqa: F401  line editing and recall for input()
    conversation = Conversation(
        loaded=loaded, config=config, system=system, thinking=thinking, live=not plain and canvas_is_possible()
    )
    notice(f"{loaded.model} is ready; /help lists the commands", quiet=quiet or not sys.stdin.isatty())
    while (line := _read_line()) is not None:
        if line.strip() and not conversation.handle(line):
            break


def _connect(base_url: str, model: str | None, api_key: str | None, here: dict[str, Any]) -> Loaded:
    """The model of a running server; options of this process's own engine have no effect on it."""
    from dlmrt.serve.client import RemoteEngine

    for option, value in here.items():
        if value is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} has no effect with --base-url: the server has its own; leave it out")
    started = time.perf_counter()
    engine = RemoteEngine(base_url, model=model, api_key=api_key)
    return Loaded(engine=engine, model=engine.model, load_s=time.perf_counter() - started)


def _read_line() -> str | None:
    """One line of the user, None at the end of input. Ctrl-C empties the line; twice in a row it ends the program."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    for is_last in (False, True):
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            if is_last:
                raise
            print("\n(Ctrl-C again or /exit ends)", file=sys.stderr)
    raise AssertionError("the second turn returns or raises")


@dataclass(kw_only=True)
class Conversation:
    """State of one chat."""

    loaded: Loaded
    config: DecodeConfig
    system: str | None = None
    thinking: bool | None = None  # position of the template's switch
    live: bool = False  # show the canvas
    history: list[Message] = field(default_factory=list)  # without the system message
    last: GenerateResult | None = None

    def handle(self, line: str) -> bool:
        """Answer a line or run its command; False ends the chat. A user's error is printed and the chat goes on."""
        try:
            if line.startswith("/"):
                return self._command(line)
            self._answer(line)
        except DlmrtError as error:
            print(f"error: {error}", file=sys.stderr)
        return True

    def _answer(self, line: str) -> None:
        turns: list[Message] = [*self.history, {"role": "user", "content": line}]
        prompt: list[Message] = [{"role": "system", "content": self.system}] if self.system is not None else []
        view: View = PlainView()
        if self.live:
            view = LiveView(self.loaded.piece, then=view)
        self.last = run_request(self.loaded.engine, [*prompt, *turns], self.config, view, thinking=self.thinking)
        if self.last.finish_reason == "cancelled":
            notice("cancelled")
        self.history = [*turns, {"role": "assistant", "content": self.last.text}]

    def _command(self, line: str) -> bool:
        name, *words = line.split(maxsplit=2)
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name!r}{nearest(name, COMMANDS)}")
        if words and name != "/set":
            raise UsageError(f"{name} takes no arguments; {COMMANDS[name]}")
        if name == "/help":
            print("\n".join(f"{command:<8}{text}" for command, text in COMMANDS.items()), file=sys.stderr)
        elif name == "/clear":
            self.history = []
        elif name == "/set":
            self._set(words)
        elif name == "/stats":
            print(timings(self.last) if self.last else "no answer yet", file=sys.stderr)
        return name != "/exit"

    def _set(self, words: list[str]) -> None:
        if len(words) == 1:
            raise UsageError(f"/set {words[0]} has no value; write /set KEY VALUE, e.g. /set threshold 0.9")
        if words:
            self.config = options.changed_setting(self.config, *words)
        changed = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(DecodeConfig)}
        for setting, value in changed.items():
            if value != DecodeConfig.__dataclass_fields__[setting].default:
                print(f"{setting} = {value}", file=sys.stderr)
