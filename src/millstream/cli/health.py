"""`millstream health`: how the broker is, for people and for whatever watches it."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.text import Text

from millstream.cli.connection import BrokerOptions
from millstream.cli.findings import print_findings
from millstream.cli.output import (
    document_of,
    duration_text,
    examples,
    print_facts,
    print_json,
    stdout,
)

__all__ = ["EPILOG", "health"]

EPILOG: Final = examples(
    "millstream health",
    "# also store a message, read it back, and look for readers that are far behind",
    "millstream health --deep",
    "# for a supervisor, which looks at the exit code only",
    "millstream health --broker broker-1:9092 > /dev/null",
)

_STYLES: Final = {"healthy": "green", "degraded": "yellow", "unknown": "yellow", "critical": "red"}


def health(
    deep: Annotated[bool, typer.Option("--deep", help="Also try things out: store, sync and read back.")] = False,
    *,
    given: BrokerOptions,
) -> None:
    """Show the health of a broker.

    The exit code is 0 when the broker is healthy or degraded (it serves, but somebody should look), 1 when it is
    critical, and 3 when no broker answers.
    """
    with given.client() as client:
        report = client.admin.health(deep=deep)
    if given.as_json:
        print_json(document_of(report))
    else:
        print_facts(
            [
                ("broker", given.broker),
                ("status", Text(report.status, style=_STYLES[report.status])),
                ("takes messages", "yes" if report.ready else f"no: {report.reason}"),
                ("up for", duration_text(report.uptime_ms)),
            ]
        )
        stdout.print()
        print_findings(
            "component",
            "status",
            [
                (
                    component.name,
                    Text(component.status, style=_STYLES[component.status]),
                    component.message,
                    component.recommendation,
                )
                for component in report.components
            ],
        )
    if report.status == "critical":
        raise typer.Exit(1)
