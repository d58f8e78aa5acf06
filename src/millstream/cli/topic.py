"""`millstream topic`: the logs that messages are kept in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from millstream.cli.arguments import parse_duration, parse_size, parse_topic_config
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.message import PEEK_EPILOG, peek
from millstream.cli.output import (
    bytes_text,
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

app = Commands(no_args_is_help=True, help="Create, inspect, change and delete topics.")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The name: levels separated by dots, such as orders.eu.created")
]
ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="A setting of the topic; may be repeated."),
]


@app.command(
    epilog=examples(
        "millstream topic create orders --partitions 6",
        "# keep the newest message of each key, forever",
        "millstream topic create prices -c cleanup=compact -c retention_ms=0",
    )
)
def create(
    name: NameArgument,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", "-p", metavar="N", min=1, help="Number of partitions, which are ordered sequences."
        ),
    ] = 1,
    config: ConfigOption = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Succeed if the topic already exists.")] = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Create a topic."""
    settings = parse_topic_config(config or [])
    with given.client() as client:
        client.create_topic(name, partitions=partitions, config=settings, if_missing=if_missing)
        info = client.topic(name)
    if given.as_json:
        print_json(document_of(info))
    else:
        stdout.print(f"topic [bold]{info.name}[/] with {plural(info.partition_count, 'partition')}")


@app.command(
    "list",
    epilog=examples(
        "millstream topic list",
        "# * stands for one level, # for all that follow",
        "millstream topic list 'orders.#'",
    ),
)
def list_topics(
    pattern: Annotated[str | None, typer.Argument(help="Only topics that match, such as orders.* or orders.#")] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """List topics."""
    with given.client() as client:
        topics = client.topics(pattern)
    if given.as_json:
        print_json(document_of(topics))
        return
    print_table(
        ("topic", "partitions", "keeps", "created"),
        [(topic.name, topic.partition_count, _keeps(topic.config), time_text(topic.created_ms)) for topic in topics],
        empty="no topics" if pattern is None else f"no topics match {pattern}",
        numbers="partitions",
    )


@app.command(
    epilog=examples(
        "millstream topic show orders", "millstream topic show orders --json | jq .partitions[0].next_offset"
    )
)
def show(name: NameArgument, *, given: NamespaceOptions) -> None:
    """Show a topic: its settings, and the offsets, size and damage of each partition."""
    with given.client() as client:
        info = client.topic(name)
    if given.as_json:
        print_json(document_of(info))
        return
    messages = sum(partition.next_offset - partition.start_offset for partition in info.partitions)
    print_facts(
        [
            ("topic", Text(info.name, style="bold")),
            ("created", time_text(info.created_ms)),
            ("keeps", _keeps(info.config)),
            ("holds", f"{plural(messages, 'message')}, {bytes_text(sum(p.size_bytes for p in info.partitions))}"),
            ("settings", ", ".join(f"{key}={_value_text(key, value)}" for key, value in info.config.items() if value)),
        ]
    )
    stdout.print()
    print_table(
        ("partition", "first", "next", "readable to", "messages", "size", "files", "state"),
        [
            (
                partition.partition,
                partition.start_offset,
                partition.next_offset,
                partition.high_watermark,
                partition.next_offset - partition.start_offset,
                bytes_text(partition.size_bytes),
                partition.segments,
                _state(partition.failed, partition.damaged_ranges),
            )
            for partition in info.partitions
        ],
        numbers="partition|first|next|readable to|messages|size|files",
    )


@app.command(
    epilog=examples(
        "millstream topic alter orders -c retention_ms=30d",
        "# keys move to other partitions when their number grows",
        "millstream topic alter orders --partitions 12",
    )
)
def alter(
    name: NameArgument,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", metavar="N", min=1, help="Grow to this many partitions.")
    ] = None,
    config: ConfigOption = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Change the settings of a topic, or give it more partitions."""
    settings = parse_topic_config(config or [])
    if not settings and partitions is None:
        raise UsageProblem("nothing to change: give --config or --partitions")
    with given.client() as client:
        client.alter_topic(name, config=settings or None, partitions=partitions)
        info = client.topic(name)
    if given.as_json:
        print_json(document_of(info))
    else:
        changes = [f"{key}={value}" for key, value in settings.items()]
        changes += [plural(partitions, "partition")] if partitions is not None else []
        stdout.print(f"topic [bold]{info.name}[/] now has {', '.join(changes)}")


app.command(epilog=PEEK_EPILOG)(peek)


@app.command(
    epilog=examples("millstream topic flow orders", "millstream topic flow orders --json | jq '{measured, level}'")
)
def flow(name: NameArgument, *, given: NamespaceOptions) -> None:
    """Show how far behind the consumers of a topic's queues are, and whether its publishers are slowed down."""
    with given.client() as client:
        info = client.flow(name)
    if given.as_json:
        print_json(document_of(info))
        return
    limits = [f"lag {duration_text(info.throttle_lag_ms)}"] if info.throttle_lag_ms else []
    limits += [f"depth {info.throttle_depth:,}"] if info.throttle_depth else []
    catch_up = "-" if info.catch_up_ms is None else duration_text(info.catch_up_ms)
    unmeasured = "nobody has published for a while; measuring begins with the next publish" if limits else ""
    unmeasured = unmeasured or "the topic has no limit (throttle_lag_ms, throttle_depth)"
    print_facts(
        [
            ("topic", Text(info.topic, style="bold")),
            ("level", info.level if info.measured else f"not measured: {unmeasured}"),
            ("waiting", f"{plural(info.depth, 'message')}, the oldest for {duration_text(info.lag_ms)}"),
            ("trend", info.trend if info.measured else "-"),
            ("caught up in", catch_up),
            ("confirmations delayed by", duration_text(info.delay_ms)),
            ("slow down", info.advice),
            ("limits", ", ".join(limits) or "none: publishers are never slowed down"),
        ]
    )


@app.command(epilog=examples("millstream topic delete orders", "millstream topic delete orders --yes"))
def delete(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Delete it even if groups are reading it.")] = False,
    yes: YesOption = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Delete a topic and every message in it."""
    with given.client() as client:
        if not yes:
            info = client.topic(name)
            messages = sum(partition.next_offset - partition.start_offset for partition in info.partitions)
            confirm(f"Delete topic {name} with {plural(messages, 'message')}?", yes=yes)
        client.delete_topic(name, force=force)
    print_done(f"deleted topic [bold]{name}[/]", as_json=given.as_json, topic=name, deleted=True)


def _value_text(key: str, value: object) -> object:
    """A setting in words, 7d or 64MiB, if `--config` would take them for just that."""
    if isinstance(value, int) and key.endswith("_ms"):
        text = duration_text(value).replace(" ", "")
        return text if parse_duration(text) == value else value
    if isinstance(value, int) and "bytes" in key:
        text = bytes_text(value).replace(" ", "")
        return text if parse_size(text) == value else value
    return value


def _keeps(config: Mapping[str, Any]) -> str:
    """What stays in a topic, in words."""
    if config.get("mode") == "ephemeral":
        return "in memory"
    limits = []
    if age_ms := config.get("retention_ms"):
        limits.append(duration_text(age_ms))
    if size := config.get("retention_bytes"):
        limits.append(bytes_text(size))
    if messages := config.get("retention_messages"):
        limits.append(plural(messages, "message"))
    cleanup = config.get("cleanup", "delete")
    newest = "newest per key" if "compact" in cleanup else ""
    if cleanup == "compact" or not limits:
        return newest or "everything"
    return f"{newest}, {', '.join(limits)}" if newest else ", ".join(limits)


def _state(failed: str | None, damaged_ranges: Sequence[tuple[int, int]]) -> Text:
    if failed:
        return Text(f"read-only: {failed}", style="red")
    if damaged_ranges:
        ranges = ", ".join(f"{first}-{end - 1}" for first, end in damaged_ranges)
        return Text(f"damaged: {ranges}", style="yellow")
    return Text("ok", style="green")
