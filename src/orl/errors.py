"""Errors of `orl`: one base class, each error also the stdlib exception it stands for.

Every message ends with the way out, and every error survives pickling, because worker processes send errors back.
Constraint: arguments are plain strings kept in `args`, which is what makes the default pickling work.

**Source:** ours; the pattern follows tinker-cookbook `tinker_cookbook/exceptions.py`.
"""

from dlmrt.errors import DlmrtError, UnknownOptionError, UsageError


class OrlError(DlmrtError):
    """Base of all errors raised on purpose by `orl`."""


class RecipeError(OrlError, UsageError):
    """A recipe cannot be read, or holds an unknown key or a value that cannot be used."""


class RunFolderError(OrlError, ValueError):
    """A run folder cannot be resumed from: other recipe, other model, or damaged state."""


class AnswerLogError(OrlError, ValueError):
    """A sweep's file of answers is damaged, or belongs to another checkpoint or other settings of the run."""


class ReportError(OrlError, ValueError):
    """A report cannot be compared: another kind of document, or nothing in common with the other one."""


class DataError(OrlError, ValueError):
    """A problem cannot be trained on: too long for a packed sequence, or with a reserved id in its text."""


class DivergedError(OrlError, ArithmeticError):
    """Too many training steps in a row gave no usable gradient."""


class NothingVerifiedError(OrlError, ArithmeticError):
    """No answer of an update was kept, so there is nothing to train on."""


class StaleRolloutError(OrlError, RuntimeError):
    """Trajectories were made by other weights than those being trained."""


class UnknownTaskError(OrlError, UnknownOptionError):
    """A task was asked for by a name that is not registered."""


class SplitExhaustedError(OrlError, ValueError):
    """A task's prompt space is too small to find a prompt of the wanted split."""


class SandboxUnavailableError(OrlError, OSError):
    """The sandbox cannot run here, or its child did not come up."""
