"""`millstream schedule`: messages that are delivered later, and messages that are published again and again."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from millstream.cli.arguments import AHEAD_FORMS, PriorityOption, parse_ahead, parse_headers, parse_priority
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import (
    bytes_text,
    count_text,
    document_of,
    duration_text,
    examples,
    plural,
    print_done,
    print_facts,
    print_json,
    print_table,
    stdout,
    time_text,
)
from millstream.cli.rendering import json_bytes, json_content

if TYPE_CHECKING:
    from millstream.client.schedules import Repeating, ScheduleInfo, ScheduleSummary

app = Commands(no_args_is_help=True, help="Look at, move and cancel scheduled messages; publish messages repeatedly.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id that publishing the message returned.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The recurring schedule's name.")]


@app.command(
    "list",
    epilog=examples(
        "millstream schedule list orders",
        "# what comes within the hour",
        "millstream schedule list orders --before 1h",
        "millstream schedule list orders --key c-17 --json",
    ),
)
def list_schedules(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic that the messages will go to.")],
    key: Annotated[str | None, typer.Option("--key", "-k", metavar="TEXT", help="Only messages with this key.")] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="WHEN", help=f"Only messages due at or after {AHEAD_FORMS}.")
    ] = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="WHEN", help="Only messages due before this, in the same forms.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", metavar="N", min=1, help="Show at most this many.")] = 100,
    *,
    given: NamespaceOptions,
) -> None:
    """List the messages that are pending for a topic, soonest first."""
    now = datetime.datetime.now(datetime.UTC)
    earliest = None if after is None else parse_ahead(after, now, "--after")
    latest = None if before is None else parse_ahead(before, now, "--before")
    with given.client() as client:
        found = client.schedules.list(
            topic,
            key=None if key is None else os.fsencode(key),
            after=earliest,
            before=latest,
            limit=limit,
        )
    if given.as_json:
        print_json([_document(schedule) for schedule in found])
        return
    print_table(
        ("id", "due", "in", "partition", "key", "size"),
        [
            (
                schedule.id,
                time_text(schedule.due_ms),
                _ahead_text(schedule.due_ms, now),
                schedule.partition,
                _text(schedule.key),
                bytes_text(schedule.size_bytes),
            )
            for schedule in found
        ],
        empty="nothing is scheduled",
        numbers="in|partition|size",
    )


@app.command(epilog=examples("millstream schedule show 01K9ZQ4Y4RXH2M1S4J0000002G"))
def show(schedule_id: IdArgument, *, given: NamespaceOptions) -> None:
    """Show a scheduled message and what became of it."""
    with given.client() as client:
        info = client.schedules.show(schedule_id)
    if given.as_json:
        print_json(_whole_document(info))
        return
    now = datetime.datetime.now(datetime.UTC)
    due = f"{time_text(info.due_ms)} (in {_ahead_text(info.due_ms, now)})" if info.due_ms else None
    print_facts(
        [
            ("id", Text(info.id, style="bold")),
            ("state", info.state),
            ("topic", info.topic),
            ("partition", info.partition),
            ("due", due if info.state == "pending" else time_text(info.due_ms) if info.due_ms else None),
            *([("moved from", time_text(info.moved_from_ms))] if info.moved_from_ms else []),
            ("published", time_text(info.published_ms) if info.published_ms else None),
            *([("expires", time_text(info.expiry_ms))] if info.expiry_ms else []),
            ("priority", info.priority),
            ("key", _text(info.key)),
            *((f"header {name}", _text(content)) for name, content in info.headers),
            ("value", _text(info.value)),
        ]
    )


@app.command(
    epilog=examples(
        "millstream schedule cancel 01K9ZQ4Y4RXH2M1S4J0000002G",
        "# everything that is pending for a customer",
        "millstream schedule cancel --topic reminders --key c-17",
    )
)
def cancel(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of the messages to cancel.")] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="With --key: the topic of the messages.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="TEXT", help="Cancel everything that is pending with this key.")
    ] = None,
    yes: YesOption = False,
    *,
    given: NamespaceOptions,
) -> int:
    """Cancel scheduled messages, by id or by key.

    What was already delivered cannot be cancelled.
    """
    if bool(ids) == (key is not None) or (key is not None and topic is None):
        raise UsageProblem("give ids, or --topic and --key")
    with given.client() as client:
        if key is not None:
            assert topic is not None
            confirm(f"Cancel everything that is scheduled for {topic} with the key {key}?", yes=yes)
            cancelled, refused = client.schedules.cancel_key(topic, os.fsencode(key)), []
        else:
            answer = client.schedules.cancel_many(ids or [])
            cancelled, refused = answer.cancelled, answer.refused
    if given.as_json:
        print_json({"cancelled": cancelled, "refused": document_of(refused)})
    else:
        stdout.print(f"cancelled {plural(cancelled, 'message')}")
        if refused:
            print_table(("not cancelled", "because"), [(entry.id, entry.reason) for entry in refused])
    return 1 if refused else 0


@app.command(
    epilog=examples(
        "millstream schedule move 01K9ZQ4Y4RXH2M1S4J0000002G 30m",
        "millstream schedule move 01K9ZQ4Y4RXH2M1S4J0000002G 2027-01-31T09:30+01:00",
    )
)
def move(
    schedule_id: IdArgument,
    when: Annotated[str, typer.Argument(metavar="WHEN", help=f"When to deliver: {AHEAD_FORMS}.")],
    *,
    given: NamespaceOptions,
) -> None:
    """Move a scheduled message to another time."""
    moment = parse_ahead(when, datetime.datetime.now(datetime.UTC), "WHEN")
    with given.client() as client:
        moved = client.schedules.move(schedule_id, deliver_at=moment)
    if given.as_json:
        print_json(_document(moved))
    else:
        stdout.print(f"moved to [bold]{time_text(moved.due_ms)}[/]")


@app.command(epilog=examples("millstream schedule stats", "millstream schedule stats orders --json"))
def stats(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only this topic.")] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Count scheduled messages per topic.

    What has become of messages is counted since the broker started.
    """
    with given.client() as client:
        found = client.schedules.stats(topic)
    if given.as_json:
        print_json(document_of(found))
        return
    print_table(
        ("topic", "pending", "next due", "fired", "cancelled", "moved", "expired", "disk"),
        [
            (
                entry.topic,
                entry.pending,
                time_text(entry.next_due_ms) if entry.next_due_ms else None,
                entry.fired,
                entry.cancelled,
                entry.moved,
                entry.expired,
                bytes_text(entry.size_bytes),
            )
            for entry in found
        ],
        empty="nothing was ever scheduled",
        numbers="pending|fired|cancelled|moved|expired|disk",
    )


@app.command(
    epilog=examples(
        "millstream schedule repeat nightly reports '0 3 * * *' '{\"kind\": \"daily\"}' --timezone Europe/Berlin",
        "millstream schedule repeat heartbeat health '*/5 * * * *' ping --catch-up none",
    )
)
def repeat(
    name: NameArgument,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to publish to.")],
    cron: Annotated[
        str,
        typer.Argument(
            metavar="CRON", help="A cron expression: five fields, six with seconds, or a word such as @daily."
        ),
    ],
    value: Annotated[
        str | None,
        typer.Argument(metavar="VALUE", help="The value of each message; with a key, none is a deletion marker."),
    ] = None,
    timezone: Annotated[
        str,
        typer.Option(
            "--timezone", "-z", metavar="ZONE", help="The time zone of the cron fields, such as Europe/Berlin."
        ),
    ] = "UTC",
    key: Annotated[str | None, typer.Option("--key", "-k", metavar="TEXT", help="Key of every message.")] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    catch_up: Annotated[
        Literal["none", "latest", "all"],
        typer.Option("--catch-up", metavar="none|latest|all", help="Which missed occurrences to make up for."),
    ] = "latest",
    priority: PriorityOption = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Create it paused; `millstream schedule resume` starts it.")
    ] = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Publish a message repeatedly, by a cron expression.

    This replaces the recurring schedule of that name.
    """
    with given.client() as client:
        made = client.schedules.repeat(
            name,
            topic,
            cron,
            None if value is None else os.fsencode(value),
            key=None if key is None else os.fsencode(key),
            headers=parse_headers(header or []) or None,
            priority=None if priority is None else parse_priority(priority),
            timezone=timezone,
            paused=paused,
            catch_up=catch_up,
        )
    _print_one(made, given.as_json)


@app.command(epilog=examples("millstream schedule repeating", "millstream schedule repeating nightly --json"))
def repeating(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show only this one, in detail.")] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """List recurring schedules, or show one."""
    with given.client() as client:
        if name is not None:
            _print_one(client.schedules.show_repeating(name), given.as_json)
            return
        found = client.schedules.repeating()
    if given.as_json:
        print_json([_whole_document(entry) for entry in found])
        return
    print_table(
        ("name", "topic", "cron", "time zone", "next", "last", "published"),
        [
            (
                entry.name,
                entry.topic,
                entry.cron,
                entry.timezone,
                "paused" if entry.paused else time_text(entry.next_ms) if entry.next_ms else None,
                time_text(entry.last_ms) if entry.last_ms else None,
                entry.published,
            )
            for entry in found
        ],
        empty="no recurring schedules",
        numbers="published",
    )


@app.command(epilog=examples("millstream schedule pause nightly"))
def pause(name: NameArgument, *, given: NamespaceOptions) -> None:
    """Pause a recurring schedule."""
    with given.client() as client:
        _print_one(client.schedules.pause(name), given.as_json)


@app.command(epilog=examples("millstream schedule resume nightly"))
def resume(name: NameArgument, *, given: NamespaceOptions) -> None:
    """Resume a recurring schedule from now on.

    Occurrences during the pause are not made up for.
    """
    with given.client() as client:
        _print_one(client.schedules.resume(name), given.as_json)


@app.command(epilog=examples("millstream schedule stop nightly", "millstream schedule stop nightly --yes"))
def stop(name: NameArgument, yes: YesOption = False, *, given: NamespaceOptions) -> None:
    """Delete a recurring schedule."""
    confirm(f"Delete the recurring schedule {name}?", yes=yes)
    with given.client() as client:
        client.schedules.stop(name)
    print_done(f"deleted schedule [bold]{name}[/]", as_json=given.as_json, schedule=name, deleted=True)


def _print_one(entry: Repeating, as_json: bool) -> None:
    if as_json:
        print_json(_whole_document(entry))
        return
    now = datetime.datetime.now(datetime.UTC)
    next_text = f"{time_text(entry.next_ms)} (in {_ahead_text(entry.next_ms, now)})" if entry.next_ms else None
    print_facts(
        [
            ("name", Text(entry.name, style="bold")),
            ("topic", entry.topic),
            ("cron", f"{entry.cron} ({entry.timezone})"),
            ("next", "paused" if entry.paused else next_text),
            ("last", time_text(entry.last_ms) if entry.last_ms else None),
            ("published", count_text(entry.published)),
            ("catch up", entry.catch_up),
            ("priority", entry.priority),
            ("key", _text(entry.key)),
            ("value", _text(entry.value)),
        ]
    )


def _document(schedule: ScheduleSummary | ScheduleInfo | Repeating) -> dict[str, Any]:
    """As JSON, with the key as text where it is one."""
    document: dict[str, Any] = document_of(schedule)
    document.pop("value", None)
    document.pop("key")
    return {**document, **json_bytes("key", schedule.key)}


def _whole_document(schedule: ScheduleInfo | Repeating) -> dict[str, Any]:
    return {**_document(schedule), **json_content(schedule.key, schedule.headers, schedule.value)}


def _ahead_text(time_ms: int, now: datetime.datetime) -> str:
    return duration_text(max(0, time_ms - round(now.timestamp() * 1000)))


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "surrogateescape")
