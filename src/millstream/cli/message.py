"""`millstream message` and `millstream topic peek`: messages as they lie there, without consuming them."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from millstream.cli.arguments import PAST_FORMS, START_FORMS, parse_past, parse_start
from millstream.cli.bundles import Commands
from millstream.cli.connection import LinesOptions, NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import (
    bytes_text,
    document_of,
    examples,
    print_facts,
    print_json,
    print_json_line,
    print_table,
    stdout,
    time_text,
)
from millstream.cli.rendering import json_content
from millstream.cli.terminal import terminal_safe

if TYPE_CHECKING:
    from millstream.client.browsing import MessageInfo

__all__ = ["PEEK_EPILOG", "app", "peek"]

app = Commands(no_args_is_help=True, help="Look at single messages.")

PEEK_EPILOG: Final = examples(
    "# the last ten",
    "millstream topic peek orders",
    "millstream topic peek orders --key customer-17 --max 100",
    "millstream topic peek orders --from 15m --text refused --json | jq .id",
    "millstream topic peek orders --header region=eu --until 2026-01-31T09:30",
)

_SHOWN: Final = 60


def peek(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    max_messages: Annotated[
        int, typer.Option("--max", "-m", min=1, max=100_000, metavar="N", help="Show at most this many.")
    ] = 10,
    key: Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help="Only messages with this key.")] = None,
    header: Annotated[
        str | None, typer.Option("--header", "-H", metavar="NAME[=VALUE]", help="Only messages with this header.")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", "-t", metavar="TEXT", help="Only messages whose value contains this.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="PLACE", help=f"Begin here, oldest first: {START_FORMS}."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help=f"Only messages stored before {PAST_FORMS}.")
    ] = None,
    offset: Annotated[
        int | None, typer.Option("--offset", "-o", min=0, metavar="N", help="Begin at this offset, oldest first.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, metavar="N", help="Only messages in this partition.")
    ] = None,
    *,
    given: LinesOptions,
) -> None:
    """Show messages of a topic without consuming them: the last ones, or the first ones from a given place on.

    Conditions are checked in the log itself, so they may take a while in a large topic. With --json, each message is
    one JSON object on a line.
    """
    now = datetime.datetime.now(datetime.UTC)
    since = before = None
    if start is not None and offset is not None:
        raise UsageProblem("--from and --offset exclude each other")
    if start is not None:
        place = parse_start(start, now)
        if place == "latest":
            raise UsageProblem("--from latest shows nothing; leave it out to see the last messages")
        if isinstance(place, int):
            offset = place
        elif isinstance(place, datetime.datetime):
            since = place
    if until is not None:
        before = parse_past(until, now, "--until")
    newest_first = start is None and offset is None
    with given.client() as client:
        messages = client.browse(
            topic,
            limit=max_messages,
            partition=partition,
            offset=offset,
            since=since,
            until=before,
            key=None if key is None else os.fsencode(key),
            header=header,
            text=text,
            newest_first=newest_first,
        )
    if newest_first:
        messages.reverse()  # as they came, like `tail`
    if given.as_json:
        for message in messages:
            print_json_line(_document(message))
        return
    print_table(
        ("id", "partition", "offset", "stored", "key", "size", "value"),
        [
            (
                message.id,
                message.partition,
                message.offset,
                time_text(message.append_time_ms),
                _shown(message.key),
                bytes_text(message.size),
                _shown(message.value),
            )
            for message in messages
        ],
        empty="no messages",
        numbers="partition|offset|size",
    )


@app.command(
    epilog=examples(
        "millstream message show 01M7GKBEFSGBA51QG000000000",
        "millstream message show 01M7GKBEFSGBA51QG000000000 --json | jq .value",
    )
)
def show(
    message_id: Annotated[
        str, typer.Argument(metavar="ID", help="The message's id, as a receipt, `consume` or `topic peek` shows it.")
    ],
    *,
    given: NamespaceOptions,
) -> None:
    """Show a message wherever it is, even one that is scheduled and not due yet."""
    with given.client() as client:
        message = client.find(message_id)
    if given.as_json:
        print_json(_document(message))
        return
    facts: list[tuple[str, object]] = [
        ("message", Text(message.id, style="bold")),
        ("lies in", f"{message.topic}/{message.partition} @{message.offset}"),
        ("made", time_text(message.timestamp_ms)),
        ("stored", time_text(message.append_time_ms)),
        ("key", _shown(message.key)),
        ("priority", message.priority),
    ]
    if message.deliver_at_ms:
        facts[1] = ("waits for", f"{message.topic}/{message.partition}")
        facts.append(("delivered at", time_text(message.deliver_at_ms)))
    if message.expiry_ms:
        facts.append(("expires", time_text(message.expiry_ms)))
    facts += [(f"header {name}", content.decode("utf-8", "surrogateescape")) for name, content in message.headers]
    print_facts(facts)
    stdout.print()
    if message.value is None:
        stdout.print("[dim]no value (a deletion marker)[/]")
    else:
        stdout.print(f"[dim]value, {bytes_text(message.size)}[/]")
        stdout.print(Text(terminal_safe(message.value.decode("utf-8", "surrogateescape"))), soft_wrap=True)


def _document(message: MessageInfo) -> dict[str, Any]:
    document: dict[str, Any] = document_of(message)
    del document["key"], document["value"]
    return {**document, **json_content(message.key, message.headers, message.value)}


def _shown(data: bytes | None) -> str:
    text = terminal_safe((data or b"").decode("utf-8", "surrogateescape").replace("\n", " "))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
