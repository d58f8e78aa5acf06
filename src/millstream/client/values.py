"""Arguments as users write them, turned into what travels: bytes, microseconds, columns.

A message on its way into a batch is an *entry*: plain bytes if it has nothing but a value, `(value, key)` if it has a
key, and the seven fields of `Entry` otherwise.  So the common message costs no object of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec

from millstream.client.single import encode_single
from millstream.durations import Duration, parse_ms
from millstream.errors import InvalidArgument
from millstream.options import DEDUP_ID, LEASE_MS, MAX_RETRIES
from millstream.partitioning import key_partition
from millstream.policies import LEASE_MS_MAX, LEASE_MS_MIN
from millstream.records import PRIORITY_DEFAULT, encode_headers, encode_parts
from millstream.retries import RETRIES_MAX

__all__ = [
    "AnyEntry",
    "Entry",
    "Headers",
    "Key",
    "Priority",
    "SendOptions",
    "Value",
    "alone_runs",
    "encode_entries",
    "entry_bytes",
    "is_delayed",
    "key_partition",
    "make_entry",
    "microseconds",
    "routing_key",
]

Value: TypeAlias = bytes | bytearray | memoryview | str | None
Key: TypeAlias = bytes | str | None
Headers: TypeAlias = Mapping[str, str | bytes]
Priority: TypeAlias = int | Literal["critical", "high", "normal", "low", "background"]

#: A priority is a name, or the place of its name here.
PRIORITIES: Final = ("critical", "high", "normal", "low", "background")
#: What a value costs besides its bytes: its entry in the column of ends, and a share of the header.
ENTRY_OVERHEAD_BYTES: Final = 6

_PLAIN: Final[set[type]] = {bytes}
_KEYED: Final[set[type]] = {tuple}


class SendOptions(TypedDict, total=False):
    """What can be said about a message besides value, key and headers."""

    json: Any
    partition: int | None
    priority: Priority | None
    delay: Duration | None
    deliver_at: float | datetime | None
    ttl: Duration | None
    timestamp: float | datetime | None
    dedup_id: str | None
    max_retries: int | None
    lease: Duration | None


class Entry(NamedTuple):
    """A message with every column it may have."""

    value: bytes | None
    key: bytes | None
    headers: bytes
    priority: int
    deliver_at_us: int
    expiry_us: int
    timestamp_us: int
    #: Its headers speak to the broker.
    options: bool = False
    #: With one it must be a batch of its own, so that the broker can recognise it by itself.
    dedup_id: bytes = b""


AnyEntry: TypeAlias = bytes | tuple[bytes | None, bytes | None] | Entry


def microseconds(when: float | datetime) -> int:
    """A point in time: a datetime (naive means local time, as in `datetime.timestamp`), or seconds since 1970."""
    seconds = when.timestamp() if isinstance(when, datetime) else when
    try:
        return round(seconds * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{when!r} is not a time: use a datetime or seconds since 1970") from None


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
    priority: Priority | None = None,
    delay: Duration | None = None,
    deliver_at: float | datetime | None = None,
    ttl: Duration | None = None,
    timestamp: float | datetime | None = None,
    dedup_id: str | None = None,
    max_retries: int | None = None,
    lease: Duration | None = None,
) -> AnyEntry:
    """Check a message's arguments and give it the smallest form that holds them."""
    body, name = value_bytes(value, json), key_bytes(key)
    plain = headers is None and priority is delay is deliver_at is ttl is timestamp is None
    if plain and dedup_id is None and max_retries is None and lease is None:
        if name is not None:
            return body, name
        if body is not None:
            return body
        raise InvalidArgument("a message needs a value; only a deletion marker with a key may go without one")
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("use delay= or deliver_at=, not both")
    now_us = time.time_ns() // 1000
    due_us = 0
    if delay is not None:
        delay_ms = parse_ms(delay, "delay")
        due_us = now_us + delay_ms * 1000 if delay_ms else 0
    elif deliver_at is not None:
        due_us = microseconds(deliver_at)
    options = broker_options(dedup_id, max_retries, lease)
    return Entry(
        body,
        name,
        _encode_headers(headers) + encode_headers(options),
        PRIORITY_DEFAULT if priority is None else _lane(priority),
        due_us,
        0 if ttl is None else now_us + parse_ms(ttl, "ttl") * 1000,
        0 if timestamp is None else microseconds(timestamp),
        bool(options),
        (dedup_id or "").encode(),
    )


def _lane(priority: Priority) -> int:
    lane = PRIORITIES.index(priority) if priority in PRIORITIES else priority
    if type(lane) is not int or not 0 <= lane < len(PRIORITIES):
        names = ", ".join(PRIORITIES)
        raise InvalidArgument(f"priority is one of {names}, or its number from 0 to 4, not {priority!r}")
    return lane


def broker_options(dedup_id: str | None, max_retries: int | None, lease: Duration | None) -> dict[str, str]:
    """What a publisher asks of the broker for one message, as headers."""
    options: dict[str, str] = {}
    if dedup_id is not None:
        if not dedup_id or not isinstance(dedup_id, str):
            raise InvalidArgument(f"dedup_id is a text that is not empty, not {dedup_id!r}")
        options[DEDUP_ID] = dedup_id
    if max_retries is not None:
        if type(max_retries) is not int or not 0 <= max_retries <= RETRIES_MAX:
            raise InvalidArgument(f"max_retries is a number from 0 to {RETRIES_MAX}, not {max_retries!r}")
        options[MAX_RETRIES] = str(max_retries)
    if lease is not None:
        lease_ms = parse_ms(lease, "lease")
        if not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise InvalidArgument(f"a lease lasts between {LEASE_MS_MIN} ms and 12 hours, not {lease_ms} ms")
        options[LEASE_MS] = str(lease_ms)
    return options


def _encode_headers(headers: Headers | None) -> bytes:
    try:
        return encode_headers(headers)
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument(f"headers are a mapping of str to str or bytes, not {headers!r}") from None


def routing_key(entry: AnyEntry) -> bytes | None:
    """What decides about the partition: the key, or the dedup id, so that a repetition finds the original."""
    if isinstance(entry, bytes):
        return None
    if entry[1] is None and isinstance(entry, Entry):
        return entry.dedup_id or None
    return entry[1]


def is_delayed(entry: AnyEntry) -> bool:
    """Whether a message belongs to the log of schedules."""
    return isinstance(entry, Entry) and entry.deliver_at_us > 0


def entry_bytes(entry: AnyEntry) -> int:
    """How much of a batch an entry takes, near enough."""
    if type(entry) is bytes:
        return len(entry) + ENTRY_OVERHEAD_BYTES
    value, key = entry[0], entry[1]
    size = len(value or b"") + len(key or b"") + 2 * ENTRY_OVERHEAD_BYTES  # type: ignore[arg-type]
    return size if len(entry) == 2 else size + len(entry[2]) + 40  # type: ignore[arg-type]


def alone_runs(entries: Sequence[AnyEntry]) -> list[tuple[int, int]]:
    """Where to cut so that messages that must be alone are: the beginning and end of each batch."""
    runs: list[tuple[int, int]] = []
    start = 0
    for at, entry in enumerate(entries):
        if isinstance(entry, Entry) and entry.dedup_id:
            if at > start:
                runs.append((start, at))
            runs.append((at, at + 1))
            start = at + 1
    if start < len(entries):
        runs.append((start, len(entries)))
    return runs


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
    values, keys, headers, priorities, due, expiry, timestamps, options, _ = zip(*full, strict=True)
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
    if any(options):
        columns["options"] = True
    if any(timestamps):
        columns["timestamps_us"] = [own or base_timestamp_us for own in timestamps]
    return columns
