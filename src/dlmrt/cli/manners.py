"""How a command ends: one line for an error, its traceback at debug level, and the exit status.

Exit status: 0, 1 failure, 2 usage, 130 Ctrl-C. Used by `dlmrt` and `orl`.

Source: ours; conventions in docs/design.md.
"""

from __future__ import annotations

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
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for name in ("dlmrt", "orl"):
        package = logging.getLogger(name)
        package.setLevel(level.upper())
        package.handlers = [handler]  # replaced, not added to, when called again


def run_app(app: typer.Typer, name: str) -> int:
    """Run a command line with the arguments of this process and return its exit status."""
    try:
        return app(prog_name=name, standalone_mode=False) or 0
    except TyperException as error:  # the parser's own: unknown option, value of a wrong type
        return _complain(error.format_message(), error.exit_code)
    except BrokenPipeError:  # the reader has left, e.g. `dlmrt generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would complain
        return 1
    except Exception as error:
        return _explain(error)


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
