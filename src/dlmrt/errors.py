"""User errors of dlmrt: one base class, each error also the standard exception it replaces.

A message names the cause and ends with the way out. Faults of our own are `assert`s, not classes of this module.
`EXIT_CODES` and `HTTP_STATUS` map classes to what the command line and the server answer; a class without a row
takes its nearest base class's.

Source: ours; conventions of exit codes in docs/design.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DlmrtError(Exception):
    """Base of every error that a user can cause or mend."""


class UsageError(DlmrtError, ValueError):
    """An argument, option or request field has a value that cannot be used."""


class UnknownOptionError(UsageError):
    """A name that is not known; the message offers the nearest known one."""


class CheckpointError(DlmrtError, ValueError):
    """A checkpoint's files are absent, damaged, or disagree with its config.json."""


class ModelNotFoundError(CheckpointError, FileNotFoundError):
    """A model name is neither embedded, nor a folder, nor resolvable on the hub."""


class UnsupportedModelError(CheckpointError):
    """The architecture or a declared feature of the checkpoint is not implemented."""


class ContextLengthError(UsageError):
    """Prompt and answer do not fit the model's context."""


class MissingDependencyError(DlmrtError, ImportError):
    """A package of an optional extra is needed and not installed."""


class NonFiniteError(DlmrtError, ArithmeticError):
    """The model produced NaN or infinite values; the request failed, the engine is usable."""


class DeviceError(DlmrtError, RuntimeError):
    """A device, instruction set or amount of memory that was asked for is not available."""


class OutOfMemoryError(DeviceError, MemoryError):
    """A model or request does not fit the memory; nothing was changed, and an engine that is there is usable."""


EXIT_CODES: dict[type[DlmrtError], int] = {
    DlmrtError: 1,
    UsageError: 2,
    CheckpointError: 1,
    ModelNotFoundError: 2,
    MissingDependencyError: 1,
}

HTTP_STATUS: dict[type[DlmrtError], int] = {
    DlmrtError: 500,
    UsageError: 400,
    ModelNotFoundError: 404,
}


def non_finite_error(slots: list[int], *, block: int, step: int) -> NonFiniteError:
    """The error for canvas slots whose logits cannot be used."""
    return NonFiniteError(
        f"the model produced non-finite logits in block {block}, step {step}, slots {slots}; "
        "the request failed, the next one starts clean"
    )


def exit_code(error: DlmrtError) -> int:
    """Exit status of the command line for `error`: the row of its nearest class in `EXIT_CODES`."""
    return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)


def http_status(error: DlmrtError) -> int:
    """HTTP status for `error`: the row of its nearest class in `HTTP_STATUS`."""
    return next(HTTP_STATUS[cls] for cls in type(error).__mro__ if cls in HTTP_STATUS)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, or the list of known names."""
    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.5) if isinstance(name, str) else []
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(names)}"
