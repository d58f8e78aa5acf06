"""`millstream queue`: topics read by queue groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.text import Text

from millstream.cli.arguments import parse_pairs
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.output import (
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
from millstream.cli.rendering import json_content
from millstream.cli.terminal import terminal_safe
from millstream.durations import format_ms

if TYPE_CHECKING:
    from millstream.client.queue_requests import QueuedMessage, QueueInfo

app = Commands(no_args_is_help=True, help="Look at queues, change their settings, pause and empty them.")

_LANES = ("critical", "high", "normal", "low", "background")
_VALUE_SHOWN = 60
#: As people say it.
_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")]
GroupArgument = Annotated[str, typer.Argument(metavar="[GROUP]", help="The queue group.")]


@app.command("list", epilog=examples("millstream queue list", "millstream queue list orders --json"))
def list_queues(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Only queues of this topic.")] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """List queues and what is in them."""
    with given.client() as client:
        queues = client.queues.list(topic)
    if given.as_json:
        print_json(document_of(queues))
        return
    print_table(
        ("topic", "group", "ready", "leased", "waiting", "consumers", "state"),
        [
            (
                queue.topic,
                queue.group,
                Text(count_text(queue.ready), style="yellow" if queue.ready and not queue.consumers else ""),
                queue.leased,
                queue.waiting,
                queue.consumers,
                _state_text(queue.paused, queue.failed),
            )
            for queue in queues
        ],
        empty="no queues; one is made when somebody leases from a topic",
        numbers="ready|leased|waiting|consumers",
    )


@app.command(epilog=examples("millstream queue show orders billing", "millstream queue show orders --json | jq .lanes"))
def show(topic: TopicArgument, group: GroupArgument = "default", *, given: NamespaceOptions) -> None:
    """Show a queue: where its messages are, who is working on them, and its settings."""
    with given.client() as client:
        queue = client.queues.describe(topic, group)
    if given.as_json:
        print_json(document_of(queue))
    else:
        _print_queue(queue)


@app.command(
    "set",
    epilog=examples(
        "millstream queue set orders billing retry=durable",
        "millstream queue set orders billing retry=standard,max_retries=5 lease_ms=2m",
        "# one unsettled message per key at a time",
        "millstream queue set orders billing ordering=key",
        "millstream queue set orders billing fair_by=header:tenant",
    ),
)
def set_policy(
    topic: TopicArgument,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The queue group.")],
    settings: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="The settings to change.")],
    *,
    given: NamespaceOptions,
) -> None:
    """Change settings of a queue group.

    What is not named stays as it is.

    A group is created by its first use: a worker that starts, or `millstream lease TOPIC --group GROUP`.
    """
    changes = {name: _WORDS.get(value, value) for name, value in parse_pairs(settings, "setting").items()}
    with given.client() as client:
        client.queues.configure(topic, group, **changes)
    said = terminal_safe(", ".join(f"{name}={value}" for name, value in changes.items()))
    print_done(
        f"changed [bold]{topic}/{group}[/]: {escape(said)}",
        as_json=given.as_json,
        topic=topic,
        group=group,
        changed=changes,
    )


@app.command(epilog=examples("millstream queue pause orders billing"))
def pause(topic: TopicArgument, group: GroupArgument = "default", *, given: NamespaceOptions) -> None:
    """Pause a queue: hand out no messages.

    What is leased can still be settled.
    """
    with given.client() as client:
        client.queues.pause(topic, group)
    print_done(f"paused [bold]{topic}/{group}[/]", as_json=given.as_json, topic=topic, group=group, paused=True)


@app.command(epilog=examples("millstream queue resume orders billing"))
def resume(topic: TopicArgument, group: GroupArgument = "default", *, given: NamespaceOptions) -> None:
    """Resume a queue: hand out messages again."""
    with given.client() as client:
        client.queues.resume(topic, group)
    print_done(f"resumed [bold]{topic}/{group}[/]", as_json=given.as_json, topic=topic, group=group, paused=False)


@app.command(
    epilog=examples(
        "millstream queue peek orders billing",
        "# what failed and waits for its next try",
        "millstream queue peek orders billing --state waiting --limit 50",
    )
)
def peek(
    topic: TopicArgument,
    group: GroupArgument = "default",
    state: Annotated[
        str, typer.Option("--state", metavar="STATE", help="Only messages in this state: ready, leased or waiting.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1000, help="Show at most this many.")] = 10,
    *,
    given: NamespaceOptions,
) -> None:
    """Look at messages of a queue without leasing them, oldest first."""
    if state not in ("", "ready", "leased", "waiting"):
        raise UsageProblem(f"--state {state!r} is unknown: use ready, leased or waiting")
    wanted: Literal["", "ready", "leased", "waiting"] = state  # type: ignore[assignment]
    with given.client() as client:
        messages = client.queues.peek(topic, group, state=wanted, limit=limit)
    if given.as_json:
        print_json([_document(message) for message in messages])
        return
    print_table(
        ("id", "state", "deliveries", "stored", "key", "value", "note"),
        [
            (
                message.id,
                message.state,
                message.deliveries,
                time_text(message.append_time_ms),
                _shown(message.key),
                _shown(message.value),
                _note(message),
            )
            for message in messages
        ],
        empty="no messages",
        numbers="deliveries",
    )


@app.command(epilog=examples("millstream queue message 01M7GKBEFSGBA51QG000000000"))
def message(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")], *, given: NamespaceOptions
) -> None:
    """Show where a message stands in each queue of its topic, and every attempt at it."""
    with given.client() as client:
        found = client.queues.message(message_id)
    if given.as_json:
        print_json([_document(entry) for entry in found])
        return
    for entry in found:
        print_facts(
            [
                ("queue", Text(f"{entry.topic}/{entry.group}", style="bold")),
                ("message", f"partition {entry.partition}, offset {entry.offset}"),
                ("state", f"{entry.state}{', ' + note if (note := _note(entry)) else ''}"),
                ("stored", time_text(entry.append_time_ms)),
                ("deliveries", _tries(entry)),
            ]
        )
        if entry.attempts:
            print_table(
                ("delivered", "took", "consumer", "result", "reason"),
                [
                    (
                        time_text(attempt.delivered_ms),
                        duration_text(attempt.ended_ms - attempt.delivered_ms),
                        attempt.consumer,
                        attempt.kind,
                        attempt.reason,
                    )
                    for attempt in entry.attempts
                ],
                numbers="took",
            )
        stdout.print()
    if not found:
        stdout.print("[dim]the topic of this message is not read by any queue group[/]")


@app.command(epilog=examples("millstream queue purge orders billing", "millstream queue purge orders --yes --json"))
def purge(
    topic: TopicArgument, group: GroupArgument = "default", yes: YesOption = False, *, given: NamespaceOptions
) -> None:
    """Settle everything that is in a queue now, as if it had been acked."""
    with given.client() as client:
        depth = client.queues.describe(topic, group).depth
        confirm(f"Settle {plural(depth, 'message')} of {topic}/{group} unread?", yes=yes)
        purged = client.queues.purge(topic, group)
    said = f"purged {plural(purged, 'message')} from [bold]{topic}/{group}[/]"
    print_done(said, as_json=given.as_json, topic=topic, group=group, purged=purged)


@app.command(
    epilog=examples("millstream queue delete orders billing", "millstream queue delete orders billing --yes --force")
)
def delete(
    topic: TopicArgument,
    group: GroupArgument = "default",
    yes: YesOption = False,
    force: Annotated[bool, typer.Option("--force", help="Delete it even while it has consumers.")] = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Delete a queue group and its progress.

    The messages stay in the topic.
    """
    with given.client() as client:
        depth = client.queues.describe(topic, group).depth
        left = f", which has {plural(depth, 'message')} to settle" if depth else ""
        confirm(f"Forget queue group {topic}/{group}{left}, and its progress?", yes=yes)
        client.queues.delete(topic, group, force=force)
    print_done(f"deleted [bold]{topic}/{group}[/]", as_json=given.as_json, topic=topic, group=group, deleted=True)


def _print_queue(queue: QueueInfo) -> None:
    settings = {name: value for name, value in queue.policy.items() if value not in ("", 0, False)}
    print_facts(
        [
            ("queue", Text(f"{queue.topic}/{queue.group}", style="bold")),
            ("ready", queue.ready),
            ("leased", queue.leased),
            ("waiting", queue.waiting),
            ("oldest", duration_text(queue.oldest_ms) if queue.oldest_ms else None),
            ("settled", ", ".join(f"{count_text(number)} {how}" for how, number in queue.settled.items() if number)),
            ("settings", ", ".join(f"{name}={_setting(name, value)}" for name, value in settings.items())),
        ]
    )
    stdout.print()
    print_table(
        ("consumer", "client", "address", "leased", "asks for", "delivered", "acked", "failed", "takes"),
        [
            (
                consumer.name,
                consumer.client_id,
                consumer.address,
                consumer.leased,
                consumer.requested,
                consumer.delivered,
                consumer.acked,
                consumer.failed,
                duration_text(round(consumer.avg_ms)) if consumer.acked else None,
            )
            for consumer in queue.consumers
        ],
        empty="no consumers",
        numbers="leased|asks for|delivered|acked|failed|takes",
    )
    stdout.print()
    print_table(
        ("partition", "ready", "leased", "waiting", "settled below", "end"),
        [(p.partition, p.ready, p.leased, p.waiting, p.settled_below, p.end) for p in queue.partitions],
        numbers="partition|ready|leased|waiting|settled below|end",
    )
    if queue.lanes:
        stdout.print()
        print_table(
            ("priority", "ready", "leased", "served", "last"),
            [
                (
                    _LANES[lane.priority],
                    lane.ready,
                    lane.leased,
                    lane.served,
                    time_text(lane.last_served_ms) if lane.last_served_ms else None,
                )
                for lane in queue.lanes
            ],
            numbers="ready|leased|served",
        )


def _setting(name: str, value: object) -> object:
    """As `millstream queue set` takes it."""
    return format_ms(value) if name.endswith("_ms") and isinstance(value, int) else value


def _state_text(paused: bool, failed: str | None) -> Text | str:
    if failed:
        return Text(f"not readable: {failed}", style="red")
    return Text("paused", style="yellow") if paused else "running"


def _document(message: QueuedMessage) -> dict[str, Any]:
    document: dict[str, Any] = document_of(message)
    del document["key"], document["value"]
    return {**document, **json_content(message.key, message.headers, message.value)}


def _tries(message: QueuedMessage) -> str:
    if message.state in ("settled", "gone"):
        return "not remembered"  # `millstream trace` may know
    return f"{message.deliveries}, of which {message.failures} failed"


def _note(message: QueuedMessage) -> str:
    if message.state == "leased":
        return f"by {message.consumer} until {time_text(message.until_ms)}"
    if message.state == "waiting":
        return f"until {time_text(message.until_ms)}" if message.until_ms else "set aside"
    return ""


def _shown(data: bytes | None) -> str | None:
    if data is None:
        return None
    text = data.decode("utf-8", "surrogateescape")
    return terminal_safe(text[:_VALUE_SHOWN]) + ("..." if len(text) > _VALUE_SHOWN else "")
