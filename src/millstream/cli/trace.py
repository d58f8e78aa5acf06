"""`millstream trace`: what has happened to a message, or to messages."""

from __future__ import annotations

import datetime
import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from millstream.cli.arguments import PAST_FORMS, parse_past
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import (
    document_of,
    duration_text,
    examples,
    plural,
    print_facts,
    print_json,
    print_json_line,
    print_table,
    stdout,
)
from millstream.cli.rendering import json_bytes
from millstream.cli.terminal import terminal_safe

if TYPE_CHECKING:
    from millstream.client.tracing import PassportInfo, TraceEvent

__all__ = ["EPILOG", "trace"]

EPILOG: Final = examples(
    "# the passport of one message",
    "millstream trace 01M7GKBEFSGBA51QG000000000",
    "# everything of one trace",
    "millstream trace 4bf92f3577b34da6a3ce929d0e0e4736",
    "# what was recorded last",
    "millstream trace",
    "# what failed in the last quarter of an hour",
    "millstream trace --topic orders --failures --from 15m",
    "millstream trace --topic orders --key customer-17 --json | jq .id",
)

_TRACE_ID: Final = re.compile("[0-9a-fA-F]{32}")
_GOOD: Final = frozenset(("published", "stored", "acked", "replayed", "fired"))
_BAD: Final = frozenset(("rejected", "dead_lettered", "expired", "evicted", "purged", "cancelled"))
_SHOWN: Final = 60


def trace(
    about: Annotated[str | None, typer.Argument(metavar="[ID]", help="A message id or a trace id.")] = None,
    topic: Annotated[str, typer.Option("--topic", "-t", metavar="TOPIC", help="Only messages of this topic.")] = "",
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="Only messages with this key; use it with --topic.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help=f"Only what happened since {PAST_FORMS}.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Only what happened before this time, in the same forms."),
    ] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only what went wrong.")] = False,
    max_events: Annotated[
        int, typer.Option("--max", "-m", min=1, max=100_000, metavar="N", help="Print at most this many lines.")
    ] = 50,
    *,
    given: NamespaceOptions,
) -> None:
    """Show everything that has happened to a message, or what happened to messages of a trace, a topic or a key.

    Without an argument, the newest events of the namespace are listed.

    Failures are always recorded. Of what goes well, only a sample is (setting traces.sample). With --json, each line of
    a list is one JSON object.
    """
    if about is not None and _TRACE_ID.fullmatch(about) is None:
        if topic or key is not None or start or until or failures:
            raise UsageProblem("a message id stands alone: its passport is shown whole")
        with given.client() as client:
            _print_passport(client.passport(about), as_json=given.as_json)
        return
    now = datetime.datetime.now(datetime.UTC)
    since = None if start is None else parse_past(start, now, "--from")
    before = None if until is None else parse_past(until, now, "--until")
    with given.client() as client:
        events = client.traces(
            limit=max_events,
            trace_id=about or "",
            topic=topic,
            key=None if key is None else os.fsencode(key),
            since=since,
            until=before,
            failures_only=failures,
        )
    if given.as_json:
        for event in events:
            print_json_line(_document(event))
        return
    print_table(
        ("time", "what", "message", "topic", "group", "consumer", "error"),
        [
            (
                _time(event.time_ms),
                _kind(event.kind),
                event.id or plural(event.messages, "message"),
                event.topic,
                event.group,
                event.consumer,
                _short(event.error or event.note),
            )
            for event in events
        ],
        empty="nothing was recorded",
    )


def _print_passport(passport: PassportInfo, *, as_json: bool) -> None:
    if as_json:
        print_json(_document(passport))
        return
    print_facts(
        [
            ("message", Text(passport.id, style="bold")),
            ("topic", f"{passport.topic}/{passport.partition} @{passport.offset}"),
            ("key", terminal_safe((passport.key or b"").decode("utf-8", "surrogateescape"))),
            ("trace", passport.trace_id),
        ]
    )
    stdout.print()
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "dim", "", ""):
        table.add_column(style=style, overflow="fold")
    before_ms = None
    for event in passport.events:
        since = "" if before_ms is None else f"+{duration_text(max(0, event.time_ms - before_ms))}"
        before_ms = event.time_ms
        who = " by ".join(filter(None, (event.group, event.consumer)))
        details = [who, event.error, event.note, f"→ {event.link}" if event.link else ""]
        said = " · ".join(terminal_safe(detail) for detail in details if detail)
        table.add_row(_time(event.time_ms), since, _kind(event.kind), Text(said))
    stdout.print(table)
    if not passport.complete:
        stdout.print("\n[dim]there are more records than could be looked through[/]")


def _time(time_ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{time_ms % 1000:03}"


def _kind(kind: str) -> Text:
    style = "green" if kind in _GOOD else "red" if kind in _BAD else "yellow" if kind != "leased" else ""
    return Text(kind.replace("_", " "), style=style)


def _short(text: str) -> str:
    text = terminal_safe(text.replace("\n", " "))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _document(answer: PassportInfo | TraceEvent) -> dict[str, Any]:
    document: dict[str, Any] = document_of(answer)
    del document["key"]
    return {**document, **json_bytes("key", answer.key)}
