"""`millstream mode`: what the broker lets itself be asked for."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, open_client
from millstream.cli.output import JsonOption, document_of, examples, print_facts, print_json
from millstream.names import DEFAULT_NAMESPACE

__all__ = ["EPILOG", "mode"]

EPILOG: Final = examples(
    "millstream mode maintenance --reason 'new disk'",
    "millstream mode normal",
)


def mode(
    wanted: Annotated[Literal["normal", "maintenance"], typer.Argument(metavar="MODE", help="normal or maintenance.")],
    reason: Annotated[str, typer.Option("--reason", "-r", metavar="TEXT", help="What clients are told.")] = "",
    as_json: JsonOption = False,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Begin or end maintenance.

    During maintenance the broker answers administrators only: publishers and consumers wait until it is over. Modes
    that the broker enters by itself, because disk or memory runs out, end by themselves; `millstream status` shows the
    mode and the reason for it.
    """
    with open_client(broker, DEFAULT_NAMESPACE) as client:
        info = client.set_mode(wanted, reason)
    if as_json:
        print_json(document_of(info))
    else:
        print_facts([("mode", info.mode), ("reason", info.reason or None)])
