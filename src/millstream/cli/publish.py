"""`millstream publish`: messages from the command line, a file or a pipe into a topic."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal, NamedTuple

import typer

from millstream.cli.arguments import AHEAD_FORMS, PriorityOption, parse_ahead, parse_headers, parse_priority, parse_span
from millstream.cli.connection import NamespaceOptions
from millstream.cli.failure import UsageProblem
from millstream.cli.json_lines import LineMessage, read_json_lines
from millstream.cli.output import (
    bytes_text,
    count_text,
    examples,
    plural,
    print_json,
    print_table,
    stderr,
    stdout,
)
from millstream.cli.progress import Meter, told_of_a_wait
from millstream.errors import InvalidArgument, MillstreamError

if TYPE_CHECKING:
    from millstream.client import Client, Receipt
    from millstream.client.values import Headers, SendOptions

__all__ = ["EPILOG", "publish"]

EPILOG: Final = examples(
    "millstream publish orders 'first order' 'second order'",
    "millstream publish orders --key c-17 --header source=web '{\"total\": 12}'",
    "# deliver it in ten minutes; `millstream schedule` shows and cancels it",
    "millstream publish reminders --delay 10m 'call back'",
    "millstream publish mails --priority critical --ttl 1h 'your code is 1234'",
    "# one message per line",
    "tail -F access.log | millstream publish web.access",
    "# copy a topic, with keys, headers, priorities, and times to the millisecond",
    "millstream consume a --no-follow --json | millstream publish b --json-lines",
)

_LINES_PER_REPORT: Final = 1000  # often enough for a smooth bar, rare enough to cost nothing
_BAR_FROM_BYTES: Final = 4 * 1024 * 1024


class _Summary(NamedTuple):
    messages: int
    payload_bytes: int
    seconds: float


def publish(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to publish to.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="VALUE", help="One message each. Without values, lines are read as messages."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", "-k", metavar="TEXT", help="Key of every message. Messages with the same key keep their order."
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", "-H", metavar="NAME=VALUE", help="A header, as text or as base64:...; may be repeated."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read lines from this file; - is standard input."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Publish the whole input as one message, not each line.")
    ] = False,
    json_lines: Annotated[
        bool,
        typer.Option("--json-lines", help="Each line is a JSON object with value, key, headers and so on; see above."),
    ] = False,
    key_separator: Annotated[
        str | None,
        typer.Option("--key-separator", metavar="TEXT", help="Each line is a key, this separator and a value."),
    ] = None,
    tombstone: Annotated[
        bool,
        typer.Option(
            "--tombstone", help="Publish a message without a value, which removes the key from a compacted topic."
        ),
    ] = False,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            "-p",
            metavar="N",
            min=0,
            help="The partition to publish to, instead of the one that the key selects.",
        ),
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="SPAN", help="Deliver after this long, such as 30s or 2d.")
    ] = None,
    deliver_at: Annotated[
        str | None, typer.Option("--deliver-at", metavar="WHEN", help=f"When to deliver: {AHEAD_FORMS}.")
    ] = None,
    priority: PriorityOption = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            "--ttl", metavar="SPAN", help="The age after which queues no longer deliver the message, such as 30s or 2d."
        ),
    ] = None,
    dedup_id: Annotated[
        str | None,
        typer.Option(
            "--dedup-id",
            metavar="TEXT",
            help="An id for the message, which is stored once, however often it is published.",
        ),
    ] = None,
    max_retries: Annotated[
        int | None,
        typer.Option(
            "--max-retries", metavar="N", min=0, help="Number of retries, instead of what the queue's policy says."
        ),
    ] = None,
    compression: Annotated[
        Literal["lz4", "zstd"] | None, typer.Option("--compression", metavar="lz4|zstd", help="Compress batches.")
    ] = None,
    *,
    given: NamespaceOptions,
) -> None:
    """Publish messages to a topic.

    Values given as arguments are confirmed one by one, with a receipt for each. Without values, the lines of the file
    or of standard input are sent in batches, with a summary at the end.

    With --json-lines, an object may have value, key, headers, partition, priority, ttl, delay, deliver_at, timestamp,
    dedup_id, max_retries and lease. It may also be one that `millstream consume --json` has printed. In that case its
    topic, partition, offset and id only say where the message was, and are ignored. What a line does not say is taken
    from the options.
    """
    if values and (file is not None or whole or json_lines or key_separator is not None):
        raise UsageProblem("give either values or an input to read, not both")
    if sum((whole, json_lines, key_separator is not None)) > 1:
        raise UsageProblem("--whole, --json-lines and --key-separator exclude each other")
    if tombstone and (values or file is not None or key is None):
        raise UsageProblem("--tombstone takes a --key and no value")
    if dedup_id is not None and not (whole or tombstone or len(values or ()) == 1):
        raise UsageProblem("--dedup-id names one message: give one value, or dedup_id in each line of --json-lines")
    options = _due(delay, deliver_at)
    if partition is not None:
        options["partition"] = partition
    if priority is not None:
        options["priority"] = parse_priority(priority)
    if ttl is not None:
        options["ttl"] = parse_span(ttl, "--ttl")
    if dedup_id is not None:
        options["dedup_id"] = dedup_id
    if max_retries is not None:
        options["max_retries"] = max_retries
    fixed_key = _argument_bytes(key) if key is not None else None
    headers = parse_headers(header or []) or None
    if values or tombstone:
        bodies: list[bytes | None] = [None] if tombstone else [_argument_bytes(value) for value in values or []]
        with given.client() as client:
            _publish_values(client, topic, bodies, fixed_key, headers, options, as_json=given.as_json)
        return
    with given.client() as client, _open_input(file) as stream:
        if whole:
            _publish_values(client, topic, [stream.read()], fixed_key, headers, options, as_json=given.as_json)
            return
        if stream.isatty():
            stderr.print("[dim]one message per line; Ctrl-D ends[/]")
        if json_lines:
            messages = read_json_lines(stream, fixed_key, headers)
        elif key_separator is not None:
            messages = _from_keyed_lines(stream, _argument_bytes(key_separator), headers)
        else:
            messages = (LineMessage(line.removesuffix(b"\n"), fixed_key, headers) for line in stream)
        size = _size(stream)
        shown = not stream.isatty() and (size is None or size >= _BAR_FROM_BYTES)
        with Meter(f"publishing to {topic}", size, shown=shown) as meter:
            summary = _publish_stream(client, topic, messages, meter, options, compression)
        _print_summary(topic, summary, as_json=given.as_json)


def _argument_bytes(text: str) -> bytes:
    """The bytes as the shell passed them, even when they are not UTF-8."""
    return os.fsencode(text)


def _due(delay: str | None, deliver_at: str | None) -> SendOptions:
    """When the messages are delivered, as the client takes it."""
    if delay is not None and deliver_at is not None:
        raise UsageProblem("--delay and --deliver-at exclude each other")
    if deliver_at is not None:
        return {"deliver_at": parse_ahead(deliver_at, datetime.datetime.now(datetime.UTC), "--deliver-at")}
    return {} if delay is None else {"delay": parse_span(delay, "--delay")}


def _publish_values(
    client: Client,
    topic: str,
    bodies: Sequence[bytes | None],
    key: bytes | None,
    headers: Headers | None,
    options: SendOptions,
    *,
    as_json: bool,
) -> None:
    receipts: list[Receipt] = []
    try:
        for body in bodies:
            with told_of_a_wait("not confirmed yet; still trying"):  # as long as there is hope, half a minute at most
                receipts.append(client.publish(topic, body, key=key, headers=headers, **options))
    except MillstreamError:
        if receipts:  # what is stored stays stored, and whoever sends again must know
            _print_receipts(receipts, as_json=as_json)
            at = f"value {len(receipts) + 1} of {len(bodies)}"
            stderr.print(f"[yellow]note:[/]  stopped at {at}; those before it are published")
        raise
    _print_receipts(receipts, as_json=as_json)


def _print_receipts(receipts: Sequence[Receipt], *, as_json: bool) -> None:
    if as_json:
        print_json([_receipt_document(receipt) for receipt in receipts])
        return
    again = any(receipt.duplicate for receipt in receipts)
    print_table(
        ("id", "partition", "offset", "survives", *(["duplicate"] if again else [])),
        [
            (
                receipt.id,
                receipt.partition,
                None if receipt.scheduled else receipt.offset,  # it gets one when it is due
                _survives(receipt.label),
                *([receipt.duplicate] if again else []),
            )
            for receipt in receipts
        ],
        numbers="partition|offset",
    )


def _publish_stream(
    client: Client,
    topic: str,
    messages: Iterable[LineMessage],
    meter: Meter,
    options: SendOptions,
    compression: Literal["lz4", "zstd"] | None,
) -> _Summary:
    """Send what comes in through a producer, which batches, retries and pushes back when the broker is slower."""
    count = sent_bytes = reported_bytes = 0
    started = time.monotonic()
    with client.producer(topic, compression=compression, partition=options.pop("partition", None)) as producer:
        try:
            for message in messages:
                try:
                    producer.send(message.value, message.key, message.headers, **(options | message.options))
                except InvalidArgument as problem:
                    raise UsageProblem(f"message {count + 1}: {problem}") from None
                count += 1
                sent_bytes += len(message.value or b"") + 1
                if count % _LINES_PER_REPORT == 0:
                    meter.advance(sent_bytes - reported_bytes, plural(count, "message"))
                    reported_bytes = sent_bytes
        except MillstreamError:
            with suppress(MillstreamError):
                producer.flush()
            if confirmed := producer.stats.messages_confirmed:  # whoever sends the rest must know
                stderr.print(f"[yellow]note:[/]  published before it: {plural(confirmed, 'message')}")
            raise
        producer.flush()
    return _Summary(count, sent_bytes - count, time.monotonic() - started)


def _print_summary(topic: str, summary: _Summary, *, as_json: bool) -> None:
    count, payload_bytes, seconds = summary
    if as_json:
        print_json({"topic": topic, "messages": count, "bytes": payload_bytes, "seconds": round(seconds, 3)})
        return
    rate = f", {count_text(count / seconds)} messages/s" if count >= _LINES_PER_REPORT else ""
    amount = f"{plural(count, 'message')} ({bytes_text(payload_bytes)})"
    stdout.print(f"published {amount} to [bold]{topic}[/] in {seconds:.2f} s{rate}")


@contextmanager
def _open_input(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = file.open("rb")
    except OSError as problem:
        raise UsageProblem(f"cannot read {file}: {problem.strerror}") from None
    with stream:
        yield stream


def _size(stream: BinaryIO) -> int | None:
    """How much there is to read, if that can be known: of a file, not of a pipe."""
    try:
        return os.fstat(stream.fileno()).st_size or None
    except (OSError, ValueError):
        return None


def _from_keyed_lines(lines: Iterable[bytes], separator: bytes, headers: Headers | None) -> Iterator[LineMessage]:
    if not separator:
        raise UsageProblem("--key-separator must not be empty")
    for number, line in enumerate(lines, 1):
        key, found, value = line.removesuffix(b"\n").partition(separator)
        if not found:
            raise UsageProblem(f"line {number} has no separator {os.fsdecode(separator)!r}")
        yield LineMessage(value, key, headers)


def _receipt_document(receipt: Receipt) -> dict[str, object]:
    return {
        "id": receipt.id,
        "topic": receipt.topic,
        "partition": receipt.partition,
        "offset": receipt.offset,
        "label": receipt.label,
        "duplicate": receipt.duplicate,
        **({"scheduled": True} if receipt.scheduled else {}),
    }


def _survives(label: str) -> str:
    meanings = {"memory": "nothing (memory)", "os": "a crash (os)", "disk": "a power cut (disk)"}
    return meanings.get(label, label)
