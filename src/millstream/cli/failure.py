"""How a command ends when it cannot do what was asked: one sentence, one hint, one exit code per kind of trouble."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from enum import IntEnum

from rich.markup import escape

from millstream import errors
from millstream.cli.output import stderr
from millstream.cli.terminal import terminal_safe

__all__ = ["ExitCode", "OutputProblem", "UsageProblem", "drop_output", "exit_code_of", "is_of_the_output", "report"]


class ExitCode(IntEnum):
    """What a script can tell failures apart by; part of the interface."""

    OK = 0
    REQUEST = 1
    USAGE = 2
    UNREACHABLE = 3
    STORAGE = 4
    INTERRUPTED = 130
    TERMINATED = 143


class UsageProblem(errors.RequestError):
    """The command line cannot be understood, or asks for what does not go together."""

    # Never on the wire, hence no number of its own.
    code = "USAGE"
    remedy = "Add --help to see what the command takes."


class OutputProblem(errors.RequestError):
    """What a command prints cannot be written where it goes: the disk is full."""

    code = "OUTPUT"
    remedy = "Make room, or send it somewhere else."


_UNREACHABLE = (errors.ConnectionLost, errors.RequestTimeout, errors.ShuttingDown)
_STORAGE = (errors.DataDamaged, errors.DataDirLocked, errors.StorageFailed)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def exit_code_of(error: errors.MillstreamError) -> ExitCode:
    if isinstance(error, (UsageProblem, errors.ConfigInvalid)):
        return ExitCode.USAGE
    if isinstance(error, _UNREACHABLE):
        return ExitCode.UNREACHABLE
    if isinstance(error, _STORAGE):
        return ExitCode.STORAGE
    return ExitCode.REQUEST


def is_of_the_output(error: OSError) -> bool:
    """Whether it is what we write to that failed, not what we read: a pipe that nobody reads, a disk that is full."""
    return isinstance(error, BrokenPipeError) or (error.errno in _NO_ROOM and error.filename is None)


def drop_output() -> None:
    """Nobody reads it any more.  Python flushes it once more at exit and would complain there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: BaseException) -> ExitCode:
    """Tell the user on standard error what went wrong, and answer with the exit code for it."""
    if os.environ.get("MILLSTREAM_DEBUG"):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, errors.MillstreamError):
        _say(str(error) or type(error).__doc__ or error.code, error.code, error.remedy)
        return exit_code_of(error)
    if isinstance(error, OSError) and is_of_the_output(error):  # `> FILE`, on a full disk
        error = OutputProblem(f"the output cannot be written: {error.strerror}")
        _say(str(error), error.code, error.remedy)
        return exit_code_of(error)
    _say(
        f"{type(error).__name__}: {error}", "INTERNAL", "This is a bug; run again with MILLSTREAM_DEBUG=1 to see where."
    )
    return ExitCode.REQUEST


def _say(sentence: str, code: str, hint: str) -> None:
    # Soft wrapping: a terminal may break the line, but a script that greps for it gets it whole.
    stderr.print(f"[bold red]error:[/] {escape(terminal_safe(sentence))} [dim]\\[{code}][/]", soft_wrap=True)
    stderr.print(f"[cyan]hint:[/]  {escape(hint)}", soft_wrap=True)
