"""`dlmrt generate`: one prompt from an argument or stdin, one answer on stdout.

Source: ours.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dlmrt.cli import options
from dlmrt.cli.chat import talk
from dlmrt.cli.report import print_json, result_document, timings
from dlmrt.cli.session import DEFAULT_MODEL, followed_model, load, names_model, notice, run_request, start
from dlmrt.cli.terminal import LiveView, PlainView, SilentView, View, canvas_is_possible
from dlmrt.errors import UsageError
from dlmrt.types import Message


@options.with_decode_options
def generate(
    context: typer.Context,
    first: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=f"Name, folder or hub id. [default: {DEFAULT_MODEL}]")
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Text; '-' or nothing: standard input.")
    ] = None,
    *,
    model: options.ModelOption = None,
    revision: options.RevisionOption = None,
    adapter: options.AdapterOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message before the prompt.")] = None,
    thinking: options.ThinkingOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
    show_timings: Annotated[bool, typer.Option("--timings", help="Counts, seconds and rates on stderr.")] = False,
    show_canvas: Annotated[bool, typer.Option("--show-canvas", help="Watch the canvas resolve.")] = False,
    executor: options.ExecutorOption = None,
    dtype: options.DtypeOption = None,
    num_threads: options.ThreadsOption = None,
    cuda_graph: options.CudaGraphOption = None,
    decode_file: options.DecodeFileOption = None,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
    decode: dict[str, Any],
) -> None:
    """Answer one prompt. As `run MODEL` on a terminal, without a prompt: chat, as Ollama's."""
    environment = start(debug=debug, quiet=quiet)
    if raw and system is not None:
        raise UsageError("--system has no place in a --raw prompt; write it into the prompt, or drop --raw")
    if raw and thinking is not None:
        raise UsageError("--thinking is a switch of the chat template, which a --raw prompt has none of; drop one")
    name, text = model_and_prompt(first, second, model)
    config = options.decode_config(decode_file, decode)
    source: dict[str, Any] = {
        "executor": executor,
        "dtype": dtype,
        "num_threads": num_threads,
        "revision": revision,
        "adapter": adapter,
        "cuda_graph": cuda_graph,
    }
    if followed_model(name, environment, **source):
        return
    if text is None and context.info_name == "run" and sys.stdin.isatty() and not (raw or json_output or show_timings):
        talk(load(name, environment, **source), config, system=system, thinking=thinking, plain=False, quiet=quiet)
        return
    text = _prompt_text(text)
    prompt: str | list[Message] = text
    if not raw:
        prompt = [{"role": "user", "content": text}]
        if system is not None:
            prompt.insert(0, {"role": "system", "content": system})
    loaded = load(name, environment, **source)
    view: View = SilentView() if json_output else PlainView()
    if show_canvas and canvas_is_possible():
        view = LiveView(loaded.piece, then=view)
    elif show_canvas:
        notice("--show-canvas needs a terminal on stderr; going on without it", quiet=quiet)
    result = run_request(loaded.engine, prompt, config, view, thinking=thinking)
    if json_output:
        print_json(result_document(result, model=name, load_s=loaded.load_s))
    if show_timings:
        typer.echo(timings(result, load_s=loaded.load_s), err=True)
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt


def model_and_prompt(first: str | None, second: str | None, option: str | None) -> tuple[str, str | None]:
    """Sort the positionals `[MODEL] [PROMPT]` and --model; a prompt of None is still to be read from stdin.

    Raises:
        UsageError: two models that differ.
    """
    if second is None and first is not None and (option is not None or first == "-" or not names_model(first)):
        first, second = None, first
    if first is not None and option is not None and first != option:
        raise UsageError(f"two models are named, {first!r} and --model {option!r}; remove one")
    return first if first is not None else DEFAULT_MODEL if option is None else option, second


def _prompt_text(prompt: str | None) -> str:
    """The prompt itself, read from stdin for None and "-"; one trailing newline, which `echo` adds, is dropped."""
    if prompt is None and sys.stdin.isatty():
        raise UsageError("there is no prompt; give it as an argument, or pipe it to standard input")
    try:
        if prompt is None or prompt == "-":
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        prompt.encode("utf-8")  # an argument that is not UTF-8 arrives with surrogates
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8 text; convert it first, e.g. with iconv") from error
    if not prompt:
        raise UsageError("the prompt is empty; give some text")
    return prompt
