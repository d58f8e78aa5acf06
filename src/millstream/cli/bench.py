"""`millstream bench`: how fast is this broker from here?"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from millstream.cli.arguments import parse_size, parse_topic_config
from millstream.cli.bundles import Commands
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.load import Measured, Work, run_workers
from millstream.cli.output import count_text, examples, print_json, print_table, stderr
from millstream.cli.progress import Meter

if TYPE_CHECKING:
    from millstream.client import Client

app = Commands(no_args_is_help=True, help="Measure throughput and latency of a broker.")

MessagesOption = Annotated[
    int, typer.Option("--messages", "-m", metavar="N", min=1, help="How many messages, over all producers.")
]
SizeOption = Annotated[
    str, typer.Option("--size", "-s", metavar="BYTES", help="Size of a message, such as 100 or 1KiB.")
]
PartitionsOption = Annotated[
    int, typer.Option("--partitions", "-p", metavar="N", min=1, help="Number of partitions of the topic.")
]
ProducersOption = Annotated[
    int, typer.Option("--producers", metavar="N", min=1, max=256, help="Number of processes that publish.")
]
ConsumersOption = Annotated[
    int, typer.Option("--consumers", metavar="N", min=1, max=256, help="Number of processes that consume.")
]
AcksOption = Annotated[
    Literal["none", "leader", "all"],
    typer.Option("--acks", metavar="none|leader|all", help="What a publish waits for."),
]
LingerOption = Annotated[
    int,
    typer.Option("--linger-ms", metavar="N", min=0, help="How long a batch waits for more messages, in milliseconds."),
]
CompressionOption = Annotated[
    Literal["lz4", "zstd"] | None, typer.Option("--compression", metavar="lz4|zstd", help="Compress batches.")
]
ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="A setting of the topic, such as fsync=interval."),
]

_SIZE_MAX: Final = 8 * 1024 * 1024


@app.command(
    epilog=examples(
        "millstream bench publish",
        "millstream bench publish --producers 4 --partitions 4 --size 1KiB",
        "# what a request handler sees: one at a time, each confirmed",
        "millstream bench publish --one-by-one --messages 10000",
    )
)
def publish(
    messages: MessagesOption = 1_000_000,
    size: SizeOption = "100",
    partitions: PartitionsOption = 1,
    producers: ProducersOption = 1,
    acks: AcksOption = "leader",
    linger_ms: LingerOption = 5,
    compression: CompressionOption = None,
    one_by_one: Annotated[bool, typer.Option("--one-by-one", help="Wait for each message's receipt.")] = False,
    config: ConfigOption = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Publish as fast as possible to a topic that is deleted afterwards."""
    message_bytes = _size(size)
    with given.client() as client, _scratch_topic(client, partitions, config) as topic:
        base: dict[str, Any] = {"broker": given.broker, "namespace": given.namespace, "topic": topic, "acks": acks}
        works = _producers(
            producers,
            messages,
            role="publish_one" if one_by_one else "publish",
            message_bytes=message_bytes,
            linger_ms=linger_ms,
            compression=compression,
            **base,
        )
        _show({"publish": _run("publishing", works, messages)}, as_json=given.as_json)


@app.command(epilog=examples("millstream bench consume", "millstream bench consume --consumers 2 --partitions 4"))
def consume(
    messages: MessagesOption = 1_000_000,
    size: SizeOption = "100",
    partitions: PartitionsOption = 1,
    consumers: ConsumersOption = 1,
    compression: CompressionOption = None,
    config: ConfigOption = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Fill a topic, then read it as fast as possible."""
    message_bytes = _size(size)
    with given.client() as client, _scratch_topic(client, partitions, config) as topic:
        base: dict[str, Any] = {
            "broker": given.broker, "namespace": given.namespace, "topic": topic, "message_bytes": message_bytes,
        }  # fmt: skip
        _run("filling", _producers(1, messages, role="publish", compression=compression, **base), messages)
        readers = _consumers(consumers, messages, **base)
        _show({"consume": _run("consuming", readers, messages)}, as_json=given.as_json)
        _delete_group(client, readers)


@app.command(epilog=examples("millstream bench both", "millstream bench both --size 1KiB --config fsync=interval"))
def both(
    messages: MessagesOption = 1_000_000,
    size: SizeOption = "100",
    partitions: PartitionsOption = 1,
    producers: ProducersOption = 1,
    consumers: ConsumersOption = 1,
    acks: AcksOption = "leader",
    linger_ms: LingerOption = 5,
    compression: CompressionOption = None,
    config: ConfigOption = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Publish and consume at the same time."""
    message_bytes = _size(size)
    with given.client() as client, _scratch_topic(client, partitions, config) as topic:
        base: dict[str, Any] = {
            "broker": given.broker, "namespace": given.namespace, "topic": topic, "message_bytes": message_bytes,
        }  # fmt: skip
        writers = _producers(
            producers, messages, role="publish", acks=acks, linger_ms=linger_ms, compression=compression, **base
        )
        readers = _consumers(consumers, messages, **base)
        measured = _run("publishing and consuming", [*writers, *readers], 2 * messages)
        _show({"publish": measured[: len(writers)], "consume": measured[len(writers) :]}, as_json=given.as_json)
        _delete_group(client, readers)


@app.command(epilog=examples("millstream bench latency", "millstream bench latency --rate 10000 --seconds 30"))
def latency(
    rate: Annotated[
        int, typer.Option("--rate", "-r", metavar="N", min=1, max=1_000_000, help="Messages per second.")
    ] = 1000,
    seconds: Annotated[
        int, typer.Option("--seconds", metavar="N", min=1, max=86_400, help="How long to measure, in seconds.")
    ] = 10,
    size: SizeOption = "100",
    partitions: PartitionsOption = 1,
    acks: AcksOption = "leader",
    linger_ms: LingerOption = 0,
    config: ConfigOption = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Measure the time from sending a message to its receipt by a consumer, at a fixed rate."""
    message_bytes = _size(size)
    if message_bytes < 8:
        raise UsageProblem("--size must be at least 8 here: each message carries its time")
    with given.client() as client, _scratch_topic(client, partitions, config) as topic:
        base: dict[str, Any] = {
            "broker": given.broker, "namespace": given.namespace, "topic": topic, "message_bytes": message_bytes,
            "messages": rate * seconds,
        }  # fmt: skip
        sender = Work("publish_paced", acks=acks, linger_ms=linger_ms, rate=rate, **base)
        measured = _run("measuring", [sender, Work("consume_timed", **base)], 2 * rate * seconds)
    _show({"publish": measured[:1], "consume": measured[1:]}, as_json=given.as_json)


def _size(text: str) -> int:
    size = parse_size(text)
    if size is None or not 1 <= size <= _SIZE_MAX:
        raise UsageProblem(f"--size {text!r} is not allowed: use a size such as 100 or 1KiB, at most 8MiB")
    return size


@contextmanager
def _scratch_topic(client: Client, partitions: int, config: Sequence[str] | None) -> Iterator[str]:
    """A topic of our own: measuring must never write into anybody's data."""
    topic = f"bench.{secrets.token_hex(4)}"
    client.create_topic(topic, partitions=partitions, config=parse_topic_config(config or []))
    try:
        yield topic
    finally:
        client.delete_topic(topic, force=True)


def _delete_group(client: Client, readers: Sequence[Work]) -> None:
    group = readers[0].group
    if group is not None:
        client.delete_group(group)


def _producers(count: int, messages: int, **work: Any) -> list[Work]:
    shares = [messages // count + (number < messages % count) for number in range(count)]
    return [Work(messages=share, seed=number, **work) for number, share in enumerate(shares)]


def _consumers(count: int, messages: int, **work: Any) -> list[Work]:
    # A single reader needs no group; it would only measure how long joining takes.
    group = f"bench-{secrets.token_hex(4)}" if count > 1 else None
    return [Work("consume", messages=messages, group=group, **work) for _ in range(count)]


def _run(what: str, works: Sequence[Work], messages: int) -> list[Measured]:
    with Meter(what, messages) as meter:
        return run_workers(works, meter.advance)


def _show(sides: dict[str, list[Measured]], *, as_json: bool) -> None:
    results = {name: _summary(measured) for name, measured in sides.items()}
    if as_json:
        print_json(results)
        return
    print_table(
        ("", "messages", "msg/s", "MB/s", "p50", "p99", "p99.9", "CPU/msg"),
        [
            (
                name,
                result["messages"],
                count_text(result["messages_per_s"]),
                f"{result['mb_per_s']:,.1f}",
                *(_latency_text(result["latency_us"], quantile) for quantile in ("p50", "p99", "p99.9")),
                f"{result['cpu_us_per_message']:,.2f} us",
            )
            for name, result in results.items()
        ],
        numbers="messages|msg/s|MB/s|p50|p99|p99.9|CPU/msg",
    )
    stderr.print("[dim]CPU is that of the clients; the broker's is not in it[/]")


def _summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """All workers of one side as one: from the first start to the last end."""
    messages = sum(entry.messages for entry in measured)
    seconds = max(entry.ended_s for entry in measured) - min(entry.started_s for entry in measured)
    latencies_us = sorted(latency for entry in measured for latency in entry.latencies_us)
    return {
        "messages": messages,
        "seconds": round(seconds, 4),
        "messages_per_s": round(messages / seconds) if seconds > 0 else 0,
        "mb_per_s": round(sum(entry.payload_bytes for entry in measured) / 1e6 / seconds, 3) if seconds > 0 else 0.0,
        "cpu_us_per_message": round(sum(entry.cpu_s for entry in measured) * 1e6 / max(1, messages), 3),
        "latency_us": {
            name: latencies_us[min(len(latencies_us) - 1, int(len(latencies_us) * share))]
            for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
            if latencies_us
        },
    }


def _latency_text(latencies_us: dict[str, int], quantile: str) -> str | None:
    value = latencies_us.get(quantile)
    return None if value is None else f"{value / 1000:,.2f} ms"
