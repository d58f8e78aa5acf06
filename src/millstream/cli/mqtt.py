"""`millstream mqtt`: sessions of MQTT clients, and retained messages."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

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
from millstream.cli.terminal import terminal_safe
from millstream.errors import MessageNotFound

if TYPE_CHECKING:
    from millstream.client.mqtt import SessionInfo, SessionSubscription, SessionSummary

app = Commands(no_args_is_help=True, help="Manage MQTT clients, their sessions and retained messages.")

_VERSIONS = {4: "3.1.1", 5: "5.0"}
_SHOWN = 60

ClientArgument = Annotated[str, typer.Argument(metavar="CLIENT", help="The client id.")]
MaxOption = Annotated[
    int, typer.Option("--max", "-m", min=1, max=1_000_000, metavar="N", help="Show at most this many.")
]


@app.command(epilog=examples("millstream mqtt status", "millstream mqtt status --everywhere --json"))
def status(
    everywhere: Annotated[bool, typer.Option("--everywhere", "-e", help="Show all namespaces, not only one.")] = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Show in figures who is connected, what is remembered and what is retained."""
    with given.client() as client:
        found = client.mqtt.overview(everywhere=everywhere)
    if given.as_json:
        print_json(document_of(found))
        return
    print_facts(
        [
            ("namespace", found.namespace or "all of them"),
            ("connected", count_text(found.connected)),
            ("sessions", f"{found.sessions:,}, {found.durable:,} that last, {found.away:,} of those away"),
            ("subscriptions", count_text(found.subscriptions)),
            ("retained", f"{plural(found.retained, 'message')}, {bytes_text(found.retained_bytes)}"),
            ("received", f"{plural(found.received, 'message')} since the start, in all namespaces"),
            ("sent", plural(found.sent, "message")),
            ("dropped", Text(plural(found.dropped, "message"), style="yellow" if found.dropped else "")),
        ]
    )


@app.command(
    epilog=examples(
        "millstream mqtt sessions",
        "millstream mqtt sessions sensor- --away",
        "# who has most to catch up",
        "millstream mqtt sessions --json | jq 'sort_by(-.waiting)[:10]'",
    )
)
def sessions(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only client ids that begin with this; without it, all.")
    ] = "",
    connected: Annotated[bool, typer.Option("--connected", help="Only sessions whose client is connected.")] = False,
    away: Annotated[bool, typer.Option("--away", help="Only sessions whose client is not connected.")] = False,
    max_sessions: MaxOption = 100,
    *,
    given: NamespaceOptions,
) -> None:
    """List the sessions of clients, connected or remembered."""
    if connected and away:
        raise UsageProblem("--connected and --away leave nothing: say one of them")
    which = True if connected else False if away else None
    with given.client() as client:
        found = list(islice(client.mqtt.sessions(prefix, connected=which), max_sessions))
    if given.as_json:
        print_json(document_of(found))
        return
    print_table(
        ("client", "state", "version", "address", "lasts", "subscriptions", "in flight", "waiting", "dropped"),
        [
            (
                one.client_id,
                _state(one),
                _VERSIONS.get(one.version),
                one.address,
                duration_text(one.expiry_s * 1000) if one.expiry_s else None,
                one.subscriptions,
                one.in_flight,
                one.waiting + one.queued,
                one.dropped,
            )
            for one in found
        ],
        empty="no sessions",
        numbers="subscriptions|in flight|waiting|dropped",
    )


@app.command(epilog=examples("millstream mqtt session sensor-7"))
def session(client_id: ClientArgument, *, given: NamespaceOptions) -> None:
    """Show a session: its connection, its subscriptions and what waits for it."""
    with given.client() as client:
        found = client.mqtt.session(client_id)
    if given.as_json:
        print_json(document_of(found))
        return
    print_facts(_facts(found))
    if found.subscribed:
        stdout.print()
        print_table(
            ("filter", "QoS", "options"),
            [(one.filter, one.qos, _options(one)) for one in found.subscribed],
            numbers="QoS",
        )
    if found.behind:
        stdout.print()
        print_table(
            ("waits in", "partition", "offset", "messages"),
            [(place.topic, place.partition, place.offset, place.end - place.offset) for place in found.behind],
            numbers="partition|offset|messages",
        )


def _facts(found: SessionInfo) -> list[tuple[str, object]]:
    lasts = f"{duration_text(found.expiry_s * 1000)} without its client" if found.expiry_s else "with its connection"
    facts: list[tuple[str, object]] = [
        ("client", Text(terminal_safe(found.client_id), style="bold")),
        ("state", _state(found)),
    ]
    if found.connected:
        facts += [
            ("connected since", time_text(found.connected_ms)),
            ("address", found.address),
            ("version", _VERSIONS.get(found.version)),
            ("keep-alive", duration_text(found.keep_alive_s * 1000) if found.keep_alive_s else "none"),
        ]
    facts += [
        ("lasts", lasts),
        *([("ends", time_text(found.ends_ms))] if found.ends_ms else []),
        ("created", time_text(found.created_ms)),
        ("in flight", plural(found.in_flight, "message")),
        ("waiting", f"{found.waiting:,} in the log, {found.queued:,} in memory"),
        ("dropped", plural(found.dropped, "message")),
        ("receiving", f"{plural(found.receiving, 'message')} of QoS 2"),
        ("will", found.will_topic),
    ]
    return facts


@app.command(
    epilog=examples(
        "millstream mqtt disconnect sensor-7", "millstream mqtt disconnect sensor-7 --reason 'moving to broker 2'"
    )
)
def disconnect(
    client_id: ClientArgument,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="The reason, which clients of version 5 are told.")
    ] = "",
    *,
    given: NamespaceOptions,
) -> None:
    """End the connection of a client.

    The client may come back. Its session stays, and its will is published.
    """
    with given.client() as client:
        there = client.mqtt.disconnect(client_id, reason)
    name = escape(terminal_safe(client_id))
    said = f"disconnected [bold]{name}[/]" if there else f"[bold]{name}[/] was not connected"
    print_done(said, as_json=given.as_json, client=client_id, disconnected=there)


@app.command(epilog=examples("millstream mqtt forget sensor-7 --yes"))
def forget(client_id: ClientArgument, yes: YesOption = False, *, given: NamespaceOptions) -> None:
    """End a session: its subscriptions and what waits for it are gone.

    Its client is disconnected.
    """
    confirm(f"Forget the session of {client_id}, with everything that waits for it?", yes=yes)
    with given.client() as client:
        client.mqtt.forget(client_id)
    said = f"forgot the session of [bold]{escape(terminal_safe(client_id))}[/]"
    print_done(said, as_json=given.as_json, client=client_id, forgotten=True)


@app.command(
    epilog=examples(
        "millstream mqtt retained",
        "millstream mqtt retained 'sensors/+/temperature' --values",
        "# what the broker says about itself",
        "millstream mqtt retained '$SYS/#' --values",
    )
)
def retained(
    topic_filter: Annotated[str, typer.Argument(metavar="[FILTER]", help="A topic, or a filter with + and #.")] = "#",
    values: Annotated[bool, typer.Option("--values", "-v", help="Show their values as well.")] = False,
    max_messages: MaxOption = 100,
    *,
    given: NamespaceOptions,
) -> None:
    """List retained messages."""
    with given.client() as client:
        found: list[Any] = list(islice(client.mqtt.retained(topic_filter), max_messages))
        if values:
            listed, found = found, []
            for one in listed:
                with suppress(MessageNotFound):  # taken out, or over, since it was listed
                    found.append(client.mqtt.retained_message(one.topic))
    if given.as_json:
        print_json(document_of(found))
        return
    print_table(
        ("topic", "size", "QoS", "stored", "expires", *(["value"] if values else [])),
        [
            (
                one.topic,
                bytes_text(one.size),
                one.qos,
                time_text(one.stored_ms) if one.stored_ms else None,
                time_text(one.expiry_ms) if one.expiry_ms else None,
                *([_shown(one.payload)] if values else []),
            )
            for one in found
        ],
        empty="nothing is retained",
        numbers="size|QoS",
    )


@app.command(
    epilog=examples(
        "millstream mqtt clear sensors/7/temperature --yes",
        "millstream mqtt clear 'sensors/#' --dry-run",
    )
)
def clear(
    topic_filter: Annotated[str, typer.Argument(metavar="FILTER", help="A topic, or a filter with + and #.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how many there are.")] = False,
    yes: YesOption = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Remove retained messages.

    Subscribers are not told.
    """
    with given.client() as client:
        number = client.mqtt.clear_retained(topic_filter, dry_run=True)
        if not dry_run and number:
            confirm(f"Take out {plural(number, 'retained message')}?", yes=yes)
            number = client.mqtt.clear_retained(topic_filter)
    said = f"{'would take' if dry_run else 'took'} out {plural(number, 'retained message')}"
    print_done(said, as_json=given.as_json, filter=topic_filter, cleared=number, dry_run=dry_run)


def _state(found: SessionSummary) -> Text:
    return Text("connected", style="green") if found.connected else Text("away", style="yellow")


def _options(one: SessionSubscription) -> str:
    words = [
        f"queue group {one.group}" if one.group else "",
        "no local" if one.no_local else "",
        "retain as published" if one.retain_as_published else "",
        ("", "retained if new", "no retained")[one.retain_handling],
        f"identifier {one.identifier}" if one.identifier else "",
    ]
    return ", ".join(filter(None, words))


def _shown(payload: bytes) -> str:
    text = payload.decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
