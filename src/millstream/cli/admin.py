"""`millstream admin`: for whoever runs the broker."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.text import Text

from millstream.cli.bundles import Commands
from millstream.cli.config import setting_text
from millstream.cli.connection import (
    BrokerOptions,
    NamespaceOptions,
)
from millstream.cli.output import (
    bytes_text,
    document_of,
    duration_text,
    examples,
    print_facts,
    print_json,
    print_table,
)

__all__ = ["app"]

app = Commands(no_args_is_help=True, help="Look at a running broker as a whole, and work on its files.")


@app.command(
    epilog=examples(
        "millstream admin config",
        "# what somebody has set",
        "millstream admin config --json | jq '.[] | select(.source != \"default\")'",
    )
)
def config(*, given: BrokerOptions) -> None:
    """Show the settings of a running broker, and where each came from.

    Secrets are not shown.
    """
    with given.client() as client:
        settings = client.admin.config()
    if given.as_json:
        print_json(document_of(settings))
        return
    print_table(
        ("setting", "value", "from"),
        [
            (
                setting.name,
                setting_text(setting.name, setting.value),
                Text(setting.source, style="dim" if setting.source == "default" else "cyan"),
            )
            for setting in settings
        ],
    )


@app.command(epilog=examples("# before a snapshot of the disk, or a restart", "millstream admin checkpoint"))
def checkpoint(*, given: BrokerOptions) -> None:
    """Put everything on disk and write the broker's state anew, so that it starts quickly."""
    with given.client() as client:
        answer = client.admin.checkpoint()
    if given.as_json:
        print_json(document_of(answer))
    else:
        print_facts(
            [
                ("logs on disk", answer.logs),
                ("journals written anew", answer.journals),
                ("state logs written anew", answer.state_logs),
                ("took", duration_text(answer.took_ms)),
                *(("failed", failure) for failure in answer.failures),
            ]
        )
    if answer.failures:
        raise typer.Exit(1)


@app.command(
    epilog=examples(
        "millstream admin compact orders",
        "# also what is still being written to",
        "millstream admin compact orders --roll",
        "# everything",
        "millstream admin compact",
    )
)
def compact(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Only this topic; without it, everything.")
    ] = None,
    roll: Annotated[bool, typer.Option("--roll", help="First end the segments that are being written.")] = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Apply retention and compaction now, instead of when their turn comes."""
    with given.client() as client:
        answer = client.admin.compact(topic, roll=roll)
    if given.as_json:
        print_json(document_of(answer))
        return
    print_facts(
        [
            ("partitions looked at", answer.partitions),
            ("segments deleted", answer.segments_deleted),
            ("partitions compacted", answer.compacted),
            ("size", f"{bytes_text(answer.bytes_before)} before, {bytes_text(answer.bytes_after)} now"),
            ("took", duration_text(answer.took_ms)),
        ]
    )


@app.command(
    "log-level", epilog=examples("millstream admin log-level debug", "# and back", "millstream admin log-level info")
)
def log_level(
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Argument(metavar="LEVEL", help="debug, info, warning or error."),
    ],
    *,
    given: BrokerOptions,
) -> None:
    """Set the log level of the broker until it stops."""
    with given.client() as client:
        info = client.admin.set_log_level(level)
    if given.as_json:
        print_json(document_of(info))
    else:
        print_facts([("log level", info.level), ("before", info.before)])


@app.command(epilog=examples("millstream admin connections", "watch -n 2 millstream admin connections"))
def connections(*, given: BrokerOptions) -> None:
    """List the connected clients, oldest connection first."""
    with given.client() as client:
        found = client.admin.connections()
    if given.as_json:
        print_json(document_of(found))
        return
    print_table(
        ("id", "client", "address", "door", "namespace", "connected for", "queues", "leased", "subscriptions"),
        [
            (
                connection.id,
                connection.client_id,
                connection.address,
                connection.door,
                connection.namespace,
                duration_text(connection.age_ms),
                ", ".join(connection.queues),
                connection.leased,
                connection.subscriptions,
            )
            for connection in found
        ],
        numbers="leased|subscriptions",
    )


@app.command(
    epilog=examples(
        "# its id is what `millstream admin connections` shows",
        "millstream admin disconnect 5f0c2a9be413",
        "millstream admin disconnect 5f0c2a9be413 --reason 'holds messages for hours'",
    )
)
def disconnect(
    connection: Annotated[str, typer.Argument(metavar="ID", help="The id of the connection.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="The reason that the client is told.")] = "",
    *,
    given: BrokerOptions,
) -> None:
    """End the connection of a client; what it has leased goes back at once.

    Clients connect again by themselves. To keep one out, revoke its key: `millstream key revoke`.
    """
    with given.client() as client:
        ended = client.admin.disconnect(connection, reason)
    if given.as_json:
        print_json(document_of(ended))
        return
    print_facts(
        [
            ("disconnected", ended.client_id),
            ("address", ended.address),
            ("messages given back", ended.leased),
        ]
    )
