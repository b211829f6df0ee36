"""Errors that a user is meant to read.

A `UserError` is raised where a setting, a file or a service is wrong and the user can fix it. Its text is one or two
sentences: what is wrong, why it matters, how to fix it. Every command prints it without a traceback and exits with
status 2. Any other exception is a bug and keeps its traceback, except for the few that `sentence_for` explains.

This module needs the standard library alone: it also explains that packages are missing.
"""

from __future__ import annotations

import difflib
import errno
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_VENV = Path(__file__).resolve().parents[1] / ".venv"


class UserError(Exception):
    """A problem the user can fix; `str(error)` is the whole message."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the known one that is nearest to it, if any is."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "."


def sentence_for(error: Exception) -> str | None:
    """What the user can do about an error, or None when it is a bug."""
    if isinstance(error, UserError):
        return str(error)
    if disk_is_full(error):
        return f"The disk is full ({error}); free some space and run the same command again to continue."
    if isinstance(error, (ImportError, SyntaxError)) and Path(sys.prefix).resolve() != _VENV.resolve():
        return (
            f"This Python ({sys.executable}) cannot run this ({error}); use {_VENV / 'bin/python'}, which "
            "`python run_pipeline.py setup` makes."
        )
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; check this path and its permissions."
    return None


def disk_is_full(error: BaseException) -> bool:
    """Whether any library failed for lack of disk space; some of them only say so in their text."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    return any(words in str(error) for words in ("No space left on device", "os error 28", "disk is full"))


def print_sentence(error: Exception) -> bool:
    """Print what the user can do about an error to stderr; False when there is nothing."""
    sentence = sentence_for(error)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr)
    return sentence is not None


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` for errors that come before a command's own handling, while its modules are imported."""
    if isinstance(error, Exception) and print_sentence(error):
        sys.exit(2)
    sys.__excepthook__(kind, error, trace)
