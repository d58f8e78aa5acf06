"""`millstream publish`: messages from the command line, a file or a pipe into a topic."""

from __future__ import annotations

import base64
import datetime
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, NamedTuple, TypedDict

import typer

from millstream.cli.arguments import parse_ahead, parse_headers
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, NamespaceOption, open_client
from millstream.cli.failure import UsageProblem
from millstream.cli.output import (
    JsonOption,
    bytes_text,
    count_text,
    examples,
    plural,
    print_json,
    print_table,
    stderr,
    stdout,
)
from millstream.cli.progress import Meter
from millstream.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from millstream.client import Client, Receipt

__all__ = ["EPILOG", "publish"]

EPILOG: Final = examples(
    "millstream publish orders 'first order' 'second order'",
    "millstream publish orders --key c-17 --header source=web '{\"total\": 12}'",
    "# deliver it in ten minutes; `millstream schedule` shows and cancels it",
    "millstream publish reminders --delay 10m 'call back'",
    "# one message per line",
    "tail -F access.log | millstream publish web.access",
    "# copy a topic, with keys and headers",
    "millstream consume a --no-follow --json | millstream publish b --json-lines",
)

_LINES_PER_REPORT: Final = 1000  # often enough for a smooth bar, rare enough to cost nothing
_BAR_FROM_BYTES: Final = 4 * 1024 * 1024


class _Outgoing(NamedTuple):
    value: bytes | None
    key: bytes | None
    headers: dict[str, str] | None


class _Due(TypedDict, total=False):
    delay: str
    deliver_at: datetime.datetime


class _Summary(NamedTuple):
    messages: int
    payload_bytes: int
    seconds: float


def publish(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where the messages go.")],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE", help="One message each; without any, lines are read.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="TEXT", help="Key of every message: same key, same order.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read lines from this file; - is standard input."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Take the input as one message, not one per line.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Each line is an object with value, key and headers.")
    ] = False,
    key_separator: Annotated[
        str | None, typer.Option("--key-separator", metavar="TEXT", help="Each line is key, separator, value.")
    ] = None,
    tombstone: Annotated[
        bool, typer.Option("--tombstone", help="A message without a value: removes the key from a compacted topic.")
    ] = False,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", metavar="N", min=0, help="Instead of the key's one.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--delay", metavar="SPAN", help="Deliver after this time, such as 30s or 2d.")
    ] = None,
    deliver_at: Annotated[
        str | None, typer.Option("--deliver-at", metavar="WHEN", help="Deliver at this time: 2027-01-31T09:30.")
    ] = None,
    compression: Annotated[
        Literal["lz4", "zstd"] | None, typer.Option("--compression", metavar="lz4|zstd", help="Compress batches.")
    ] = None,
    as_json: JsonOption = False,
    broker: BrokerOption = DEFAULT_BROKER,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
) -> None:
    """Publish messages to a topic.

    Values given as arguments are confirmed one by one, with a receipt for each. Without any, lines of the file or of
    standard input are sent in batches, with a summary at the end.
    """
    if values and (file is not None or whole or json_lines or key_separator is not None):
        raise UsageProblem("give either values or an input to read, not both")
    if sum((whole, json_lines, key_separator is not None)) > 1:
        raise UsageProblem("--whole, --json-lines and --key-separator exclude each other")
    if tombstone and (values or file is not None or key is None):
        raise UsageProblem("--tombstone takes a --key and no value")
    due = _due(delay, deliver_at)
    fixed_key = _argument_bytes(key) if key is not None else None
    headers = parse_headers(header or []) or None
    if values or tombstone:
        bodies = [None] if tombstone else [_argument_bytes(value) for value in values or []]
        outgoing = [_Outgoing(body, fixed_key, headers) for body in bodies]
        with open_client(broker, namespace) as client:
            _publish_values(client, topic, outgoing, partition=partition, due=due, as_json=as_json)
        return
    with open_client(broker, namespace) as client, _open_input(file) as stream:
        if whole:
            outgoing = [_Outgoing(stream.read(), fixed_key, headers)]
            _publish_values(client, topic, outgoing, partition=partition, due=due, as_json=as_json)
            return
        if stream.isatty():
            stderr.print("[dim]one message per line; Ctrl-D ends[/]")
        if json_lines:
            messages = _from_json_lines(stream, fixed_key, headers)
        elif key_separator is not None:
            messages = _from_keyed_lines(stream, key_separator.encode(), headers)
        else:
            messages = (_Outgoing(line.removesuffix(b"\n"), fixed_key, headers) for line in stream)
        size = _size(stream)
        shown = not stream.isatty() and (size is None or size >= _BAR_FROM_BYTES)
        with Meter(f"publishing to {topic}", size, shown=shown) as meter:
            summary = _publish_stream(client, topic, messages, meter, partition, due, compression)
        _print_summary(topic, summary, as_json=as_json)


def _argument_bytes(text: str) -> bytes:
    """The bytes as the shell passed them, even when they are not UTF-8."""
    return os.fsencode(text)


def _due(delay: str | None, deliver_at: str | None) -> _Due:
    """When the messages are delivered, as the client takes it."""
    if delay is not None and deliver_at is not None:
        raise UsageProblem("--delay and --deliver-at exclude each other")
    if deliver_at is not None:
        return {"deliver_at": parse_ahead(deliver_at, datetime.datetime.now(datetime.UTC), "--deliver-at")}
    return {} if delay is None else {"delay": delay}


def _publish_values(
    client: Client,
    topic: str,
    outgoing: Iterable[_Outgoing],
    *,
    partition: int | None,
    due: _Due,
    as_json: bool,
) -> None:
    receipts = [
        client.publish(topic, message.value, key=message.key, headers=message.headers, partition=partition, **due)
        for message in outgoing
    ]
    if as_json:
        print_json([_receipt_document(receipt) for receipt in receipts])
        return
    print_table(
        ("id", "partition", "offset", "survives"),
        [(receipt.id, receipt.partition, receipt.offset, _survives(receipt.label)) for receipt in receipts],
        numbers="partition|offset",
    )


def _publish_stream(
    client: Client,
    topic: str,
    messages: Iterable[_Outgoing],
    meter: Meter,
    partition: int | None,
    due: _Due,
    compression: Literal["lz4", "zstd"] | None,
) -> _Summary:
    """Send what comes in through a producer, which batches, retries and pushes back when the broker is slower."""
    count = sent_bytes = reported_bytes = 0
    started = time.monotonic()
    with client.producer(topic, compression=compression, partition=partition) as producer:
        for message in messages:
            producer.send(message.value, message.key, message.headers, **due)
            count += 1
            sent_bytes += len(message.value or b"") + 1
            if count % _LINES_PER_REPORT == 0:
                meter.advance(sent_bytes - reported_bytes, plural(count, "message"))
                reported_bytes = sent_bytes
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


def _from_keyed_lines(lines: Iterable[bytes], separator: bytes, headers: dict[str, str] | None) -> Iterator[_Outgoing]:
    if not separator:
        raise UsageProblem("--key-separator must not be empty")
    for number, line in enumerate(lines, 1):
        key, found, value = line.removesuffix(b"\n").partition(separator)
        if not found:
            raise UsageProblem(f"line {number} has no separator {separator.decode()!r}")
        yield _Outgoing(value, key, headers)


def _from_json_lines(lines: Iterable[bytes], key: bytes | None, headers: dict[str, str] | None) -> Iterator[_Outgoing]:
    """Objects as `millstream consume --json` prints them; what they do not say comes from the options."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as problem:
            raise UsageProblem(f"line {number} is not JSON: {problem}") from None
        if not isinstance(document, dict) or not {"value", "value_base64"} & document.keys():
            raise UsageProblem(f"line {number} is not an object with a value")
        found_key = _document_bytes(document, "key", number)
        found_headers = document.get("headers") or {}
        if not isinstance(found_headers, dict) or not all(isinstance(text, str) for text in found_headers.values()):
            raise UsageProblem(f"line {number} has headers that are not names with texts")
        yield _Outgoing(
            _document_bytes(document, "value", number),
            found_key if found_key is not None else key,
            {**(headers or {}), **found_headers} or None,
        )


def _document_bytes(document: dict[str, Any], name: str, number: int) -> bytes | None:
    """A text as it is, bytes as base 64 under `<name>_base64`, and any other JSON value as JSON."""
    encoded = document.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (ValueError, TypeError):
            raise UsageProblem(f"line {number} has a {name}_base64 that is not base 64") from None
    value = document.get(name)
    if value is None:
        return None
    try:
        return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageProblem(f"line {number} has a {name} with half a surrogate pair, which is not text") from None


def _receipt_document(receipt: Receipt) -> dict[str, object]:
    return {
        "id": receipt.id,
        "topic": receipt.topic,
        "partition": receipt.partition,
        "offset": receipt.offset,
        "label": receipt.label,
        **({"scheduled": True} if receipt.scheduled else {}),
    }


def _survives(label: str) -> str:
    meanings = {"memory": "nothing (memory)", "os": "a crash (os)", "disk": "a power cut (disk)"}
    return meanings.get(label, label)
