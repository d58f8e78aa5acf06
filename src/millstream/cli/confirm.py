"""Asking before something is lost for good."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from millstream.cli.failure import UsageProblem
from millstream.cli.output import stderr
from millstream.cli.terminal import terminal_safe

__all__ = ["YesOption", "confirm"]

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def confirm(question: str, *, yes: bool) -> None:
    """Return when the user agrees.  A script is never asked and never assumed to agree: it must say --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageProblem(f"{question} Add --yes to agree: there is no terminal to ask on.")
    stderr.print(f"{escape(terminal_safe(question))} [dim]\\[y/N][/] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        stderr.print("Nothing was changed.")
        raise typer.Exit(1)
