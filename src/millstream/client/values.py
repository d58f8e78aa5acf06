"""Arguments as users write them, turned into what travels: bytes, microseconds, columns.

A message on its way into a batch is an *entry*: plain bytes if it has nothing but a value, `(value, key)` if it has a
key, and the seven fields of `Entry` otherwise.  So the common message costs no object of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import mmh3
import msgspec

from millstream.client.single import encode_single
from millstream.errors import InvalidArgument
from millstream.records import PRIORITY_DEFAULT, encode_headers, encode_parts

__all__ = [
    "AnyEntry",
    "Entry",
    "Headers",
    "Key",
    "SendOptions",
    "Value",
    "encode_entries",
    "entry_bytes",
    "key_partition",
    "make_entry",
    "microseconds",
]

Value: TypeAlias = bytes | bytearray | memoryview | str | None
Key: TypeAlias = bytes | str | None
Headers: TypeAlias = Mapping[str, str | bytes]

PRIORITY_MAX: Final = 4
#: What a value costs besides its bytes: its entry in the column of ends, and a share of the header.
ENTRY_OVERHEAD_BYTES: Final = 6

_PLAIN: Final[set[type]] = {bytes}
_KEYED: Final[set[type]] = {tuple}


class SendOptions(TypedDict, total=False):
    """What can be said about a message besides value, key and headers."""

    json: Any
    partition: int | None
    priority: int | None
    delay: float | timedelta | None
    deliver_at: float | datetime | None
    ttl: float | timedelta | None
    timestamp: float | datetime | None


class Entry(NamedTuple):
    """A message with every column it may have."""

    value: bytes | None
    key: bytes | None
    headers: bytes
    priority: int
    deliver_at_us: int
    expiry_us: int
    timestamp_us: int


AnyEntry: TypeAlias = bytes | tuple[bytes | None, bytes | None] | Entry


def key_partition(key: bytes, partitions: int) -> int:
    """Where a key lives: murmur3 (32 bit, seed 0, unsigned) modulo the number of partitions, in every language."""
    number: int = mmh3.hash(key, 0, False)
    return number % partitions


def microseconds(when: float | datetime) -> int:
    """A point in time: a datetime (naive means local time, as in `datetime.timestamp`), or seconds since 1970."""
    seconds = when.timestamp() if isinstance(when, datetime) else when
    try:
        return round(seconds * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{when!r} is not a time: use a datetime or seconds since 1970") from None


def _span_us(name: str, span: float | timedelta) -> int:
    seconds = span.total_seconds() if isinstance(span, timedelta) else span
    if not isinstance(seconds, int | float) or seconds < 0:
        raise InvalidArgument(f"{name}={span!r} is not a length of time: use seconds or a timedelta, 0 or more")
    return round(seconds * 1_000_000)


def value_bytes(value: Value, json: Any = None) -> bytes | None:
    """The bytes of a value; None is a deletion marker."""
    if type(value) is bytes:
        if json is not None:
            raise InvalidArgument("a message has a value or json=, not both")
        return value
    if json is not None:
        if value is not None:
            raise InvalidArgument("a message has a value or json=, not both")
        try:
            return msgspec.json.encode(json)
        except (TypeError, ValueError, OverflowError) as problem:
            raise InvalidArgument(f"json= cannot be written as JSON: {problem}") from None
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(f"a value is bytes or str, not {type(value).__name__}; use json= for anything else")


def key_bytes(key: Key) -> bytes | None:
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise InvalidArgument(f"a key is bytes or str, not {type(key).__name__}")


def make_entry(
    value: Value,
    key: Key = None,
    headers: Headers | None = None,
    *,
    json: Any = None,
    partition: int | None = None,  # noqa: ARG001 - chosen by the caller; here so that options can be passed on whole
    priority: int | None = None,
    delay: float | timedelta | None = None,
    deliver_at: float | datetime | None = None,
    ttl: float | timedelta | None = None,
    timestamp: float | datetime | None = None,
) -> AnyEntry:
    """Check a message's arguments and give it the smallest form that holds them."""
    body, name = value_bytes(value, json), key_bytes(key)
    if headers is None and priority is delay is deliver_at is ttl is timestamp is None:
        if name is not None:
            return body, name
        if body is not None:
            return body
        raise InvalidArgument("a message needs a value; only a deletion marker with a key may go without one")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= PRIORITY_MAX):
        raise InvalidArgument(f"priority is a number from 0 to {PRIORITY_MAX}, not {priority!r}")
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("use delay= or deliver_at=, not both")
    now_us = time.time_ns() // 1000
    due_us = 0
    if delay is not None:
        due_us = now_us + _span_us("delay", delay)
    elif deliver_at is not None:
        due_us = microseconds(deliver_at)
    return Entry(
        body,
        name,
        _encode_headers(headers),
        PRIORITY_DEFAULT if priority is None else priority,
        due_us,
        0 if ttl is None else (due_us or now_us) + _span_us("ttl", ttl),
        0 if timestamp is None else microseconds(timestamp),
    )


def _encode_headers(headers: Headers | None) -> bytes:
    try:
        return encode_headers(headers)
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument(f"headers are a mapping of str to str or bytes, not {headers!r}") from None


def entry_bytes(entry: AnyEntry) -> int:
    """How much of a batch an entry takes, near enough."""
    if type(entry) is bytes:
        return len(entry) + ENTRY_OVERHEAD_BYTES
    value, key = entry[0], entry[1]
    size = len(value or b"") + len(key or b"") + 2 * ENTRY_OVERHEAD_BYTES  # type: ignore[arg-type]
    return size if len(entry) == 2 else size + len(entry[2]) + 40  # type: ignore[arg-type]


def encode_entries(
    entries: Sequence[AnyEntry],
    *,
    base_timestamp_us: int,
    producer: int = 0,
    first_sequence: int = 0,
    codec: int = 0,
    plain: bool = False,
) -> tuple[bytes, bytes]:
    """A batch in two pieces.  Values alone, and values with keys, need no loop over the messages.

    `plain` says that all entries are known to be bytes.
    """
    if len(entries) == 1 and type(entries[0]) is bytes and not codec:
        return encode_single(
            entries[0], base_timestamp_us=base_timestamp_us, producer=producer, first_sequence=first_sequence
        )
    kinds = _PLAIN if plain else set(map(type, entries))
    if kinds == _PLAIN:
        return encode_parts(
            entries,  # type: ignore[arg-type]
            base_timestamp_us=base_timestamp_us,
            producer=producer,
            first_sequence=first_sequence,
            codec=codec,
        )
    if kinds == _KEYED:
        columns: dict[str, Any] = dict(zip(("values", "keys"), zip(*entries, strict=True), strict=True))
    else:
        columns = _columns(entries, base_timestamp_us)
    return encode_parts(
        **columns,
        base_timestamp_us=base_timestamp_us,
        producer=producer,
        first_sequence=first_sequence,
        codec=codec,
    )


def _columns(entries: Sequence[AnyEntry], base_timestamp_us: int) -> dict[str, Any]:
    full = [
        entry
        if isinstance(entry, Entry)
        else Entry(*((entry, None) if isinstance(entry, bytes) else entry), b"", PRIORITY_DEFAULT, 0, 0, 0)
        for entry in entries
    ]
    values, keys, headers, priorities, due, expiry, timestamps = zip(*full, strict=True)
    columns: dict[str, Any] = {"values": values}
    if any(key is not None for key in keys):
        columns["keys"] = keys
    if any(headers):
        columns["headers"] = headers
    if any(priority != PRIORITY_DEFAULT for priority in priorities):
        columns["priorities"] = priorities
    if any(due):
        columns["deliver_at_us"] = due
    if any(expiry):
        columns["expiry_us"] = expiry
    if any(timestamps):
        columns["timestamps_us"] = [own or base_timestamp_us for own in timestamps]
    return columns
