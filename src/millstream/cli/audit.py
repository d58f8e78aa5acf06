"""`millstream audit`: what administrators did."""

from __future__ import annotations

import datetime
from typing import Annotated, Final

import typer

from millstream.cli.arguments import PAST_FORMS, parse_past
from millstream.cli.connection import BrokerOptions
from millstream.cli.output import document_of, examples, print_json, print_table, time_text

__all__ = ["EPILOG", "audit"]

EPILOG: Final = examples(
    "millstream audit",
    "millstream audit --since 2h --call topic.delete",
    "millstream audit --key-id 1f2e3d4c5b6a --json",
)


def audit(
    key: Annotated[str, typer.Option("--key-id", metavar="ID", help="Only what was done with this key.")] = "",
    call: Annotated[str, typer.Option("--call", metavar="OP", help="Only this call, such as topic.delete.")] = "",
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help=f"Only what was done at or after {PAST_FORMS}.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000, help="Show at most this many.")] = 50,
    *,
    given: BrokerOptions,
) -> None:
    """Show what administrators did or tried to do, newest first."""
    since_ms = 0
    if since is not None:
        since_ms = int(parse_past(since, datetime.datetime.now(datetime.UTC), "--since").timestamp() * 1000)
    with given.client() as client:
        page = client.audit(limit, key=key, call=call, since_ms=since_ms)
        entries = page.entries
        while page.after and len(entries) < limit:  # one answer looks at so many entries and no more
            left = limit - len(entries)
            page = client.audit(left, key=key, call=call, since_ms=since_ms, after=page.after)
            entries += page.entries
    if given.as_json:
        print_json([document_of(entry) for entry in entries])
        return
    print_table(
        ("time", "key", "from", "call", "namespace", "names", "outcome"),
        [
            (
                time_text(entry.time_ms),
                entry.key,
                f"{entry.door} {entry.address}",
                entry.call,
                entry.namespace,
                " ".join(entry.names),
                entry.outcome,
            )
            for entry in entries
        ],
        empty="no entries; is access.audit on?",
    )
