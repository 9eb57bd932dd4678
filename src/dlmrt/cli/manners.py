"""How a command ends: one line for an error, its traceback at debug level, and the exit status.

Exit status: 0, 1 failure, 2 usage, 130 Ctrl-C. Used by `dlmrt` and `orl`.

Source: ours; conventions in docs/design.md.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from typer.exceptions import TyperException

from dlmrt.cli.environment import version_line
from dlmrt.errors import DlmrtError, exit_code

logger = logging.getLogger(__name__)


def set_up_logging(level: str) -> None:
    """Log our packages to stderr from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    rank = os.environ.get("RANK")  # of several processes that write to one terminal
    place = f"rank {rank} " if rank is not None else ""
    handler.setFormatter(logging.Formatter(f"{place}%(levelname)s %(name)s: %(message)s"))
    for name in ("dlmrt", "orl"):
        package = logging.getLogger(name)
        package.setLevel(level.upper())
        package.handlers = [handler]  # replaced, not added to, when called again


def run_app(app: typer.Typer, name: str) -> int:
    """Run a command line with the arguments of this process and return its exit status."""
    _open_streams()
    try:
        return app(prog_name=name, standalone_mode=False) or 0
    except TyperException as error:  # the parser's own: unknown option, value of a wrong type
        return _complain(error.format_message(), error.exit_code)
    except BrokenPipeError:  # the reader has left, e.g. `dlmrt generate ... | head -1`
        _drop_output()
        return 1
    except DlmrtError as error:
        return _explain(error)
    except OSError as error:
        if error.filename is not None:  # a file of ours, not a stream
            return _explain(error)
        _drop_output()
        return _complain(f"cannot write the output ({error.strerror}); check where it goes", 1)
    except Exception as error:
        return _explain(error)


def _open_streams() -> None:
    """Make all three standard streams usable, whatever the caller has closed and in whatever encoding.

    A closed one gets a stand-in, which also keeps its number from a file that is opened later; writing to that of
    stdout fails. A character that the encoding of stdout lacks is written as its escape; bytes of stdin that are no
    text arrive as surrogates, which every prompt is checked for.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let what is still buffered for stdout vanish: the flush at exit would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def guarded(debug: bool) -> Iterator[None]:
    """Within a verb: errors end the command as `run_app` would end it, with a traceback if `debug`."""
    if debug:
        set_up_logging("debug")
    try:
        yield
    except (typer.Exit, typer.Abort, TyperException, BrokenPipeError):
        raise
    except Exception as error:
        raise typer.Exit(_explain(error)) from error


def print_version(wanted: bool) -> None:
    """Callback of `--version`."""
    if wanted:
        typer.echo(version_line())
        raise typer.Exit()


def _explain(error: Exception) -> int:
    logger.debug("where the error below came from", exc_info=error)
    if isinstance(error, DlmrtError):
        return _complain(str(error), exit_code(error))
    return _complain(f"{type(error).__name__}: {error} (our fault: run again with --debug and report it)", 1)


def _complain(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
