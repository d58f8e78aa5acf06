"""`millstream mode`: what the broker lets itself be asked for."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from millstream.cli.connection import BrokerOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import document_of, examples, print_facts, print_json

__all__ = ["EPILOG", "mode"]

EPILOG: Final = examples(
    "millstream mode",
    "millstream mode maintenance --reason 'new disk'",
    "millstream mode normal",
)


def mode(
    wanted: Annotated[
        Literal["normal", "maintenance"] | None,
        typer.Argument(
            metavar="MODE", help="normal or maintenance. Without it, the mode is shown.", show_default=False
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="The reason that clients are told.")
    ] = "",
    *,
    given: BrokerOptions,
) -> None:
    """Show the mode, or begin or end maintenance.

    During maintenance, the broker answers only administrators; publishers and consumers wait until it is over. Modes
    that the broker enters by itself, because disk or memory runs out, end by themselves.
    """
    if wanted is None and reason:
        raise UsageProblem("--reason says why a mode begins: name the mode as well")
    with given.client() as client:
        told = client.broker() if wanted is None else document_of(client.set_mode(wanted, reason))
    if given.as_json:
        print_json({"mode": told["mode"], "reason": told["reason"] or ""})
    else:
        print_facts([("mode", told["mode"]), ("reason", told["reason"] or None)])
