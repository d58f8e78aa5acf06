"""Arguments as users write them, turned into what travels: bytes, microseconds, entries of a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from json import dumps
from typing import Any, Final, TypeAlias, TypedDict

import msgspec

from millstream.durations import Duration, parse_ms
from millstream.entries import AnyEntry, Entry, Priority, broker_options, lane_of
from millstream.errors import InvalidArgument
from millstream.records import PRIORITY_DEFAULT, encode_headers

__all__ = [
    "HeaderItems",
    "Headers",
    "Key",
    "SendOptions",
    "Value",
    "check_conditions",
    "checked_rate",
    "encode_call",
    "key_bytes",
    "make_entry",
    "microseconds",
    "value_bytes",
]

Value: TypeAlias = bytes | bytearray | memoryview | str | None
Key: TypeAlias = bytes | str | None
Headers: TypeAlias = Mapping[str, str | bytes]
#: As `Message.header_items` has them: a name may be there several times.
HeaderItems: TypeAlias = Iterable[tuple[str, str | bytes]]
_TIME_US_MAX: Final = (1 << 63) - 1
_encode_json: Final = msgspec.json.Encoder().encode


class SendOptions(TypedDict, total=False):
    """Options of a message besides its value, key and headers."""

    #: The value, as JSON; bytes in it become base64 text.  None counts as not given: for null, give the text "null".
    json: Any
    #: The partition, instead of the one that the key decides.
    partition: int | None
    #: The priority in queues.
    priority: Priority | None
    #: Deliver the message this much later.
    delay: Duration | None
    #: Deliver the message at this time.
    deliver_at: float | datetime | None
    #: The age after which queues no longer deliver the message.
    ttl: Duration | None
    #: When the message was made, if not now.
    timestamp: float | datetime | None
    #: Messages with the same id are stored once within the topic's `dedup_window_ms`.
    dedup_id: str | None
    #: How often queues try the message again, instead of what the group says.
    max_retries: int | None
    #: How long a lease of the message lasts, instead of what the group says.
    lease: Duration | None


def microseconds(when: float | datetime) -> int:
    """A point in time: a datetime (naive means local time, as in `datetime.timestamp`), or seconds since 1970."""
    try:
        seconds = when.timestamp() if isinstance(when, datetime) else when
        time_us = round(seconds * 1_000_000)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{when!r} is not a time: use a datetime or seconds since 1970") from None
    return _in_range(time_us, when)


def _in_range(time_us: int, said: object) -> int:
    """A batch has 64 bits for a time."""
    if not -_TIME_US_MAX <= time_us <= _TIME_US_MAX:
        raise InvalidArgument(f"{said!r} is too far from now to be a time")
    return time_us


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
            text = msgspec.json.encode(json)
        except (BufferError, TypeError, ValueError, OverflowError, RecursionError) as problem:
            raise InvalidArgument(f"json= cannot be written as JSON: {problem}") from None
        if b"null" in text:
            _check_numbers(json)
        return text
    if value is None:
        return None
    if isinstance(value, str):
        return _encode(value, "a value")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(f"a value is bytes or str, not {type(value).__name__}; use json= for anything else")


def _check_numbers(value: Any) -> None:
    """Refuse what would be stored as null although it is a number."""
    try:
        dumps(msgspec.to_builtins(value), allow_nan=False)
    except ValueError:
        raise InvalidArgument("json= cannot be written as JSON: it has NaN or an infinity") from None
    except (TypeError, RecursionError):  # what only the other encoder can write, such as JSON in a `msgspec.Raw`
        pass


def key_bytes(key: Key) -> bytes | None:
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return _encode(key, "a key")
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise InvalidArgument(f"a key is bytes or str, not {type(key).__name__}")


def checked_rate(rate: float | None) -> float | None:
    """A number per second.  JSON has no word for the others, and sends none: no limit."""
    if isinstance(rate, float) and not math.isfinite(rate):
        raise InvalidArgument(f"rate is a number per second, not {rate}")
    return rate


def check_conditions(given: Mapping[str, object], kind: type) -> None:
    """Refuse what `kind`, a TypedDict, does not have: a condition that nobody looks at would choose everything."""
    known = kind.__annotations__.keys()
    unknown = given.keys() - known
    if unknown:
        raise InvalidArgument(f"there is no condition {min(unknown)!r}; use {', '.join(sorted(known))}")


def encode_call(call: msgspec.Struct) -> bytes:
    """A request as it travels.  Raises InvalidArgument for a text in it that is none: names come from anywhere."""
    try:
        return _encode_json(call)
    except UnicodeEncodeError as problem:
        said = str(problem.object)
        raise InvalidArgument(f"{said[:80]!r} cannot be written as UTF-8: it has half of a surrogate pair") from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidArgument(_unsendable(call)) from None


def _unsendable(call: msgspec.Struct) -> str:
    for field in msgspec.structs.fields(call):
        value = getattr(call, field.name)
        try:
            _encode_json(value)
        except Exception:
            return f"{field.encode_name} cannot be sent: {value!r} is or has something that JSON cannot represent"
    return "the request has something that JSON cannot represent"


def _encode(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} cannot be written as UTF-8: it has half of a surrogate pair") from None


def make_entry(
    value: Value,
    key: Key = None,
    headers: Headers | HeaderItems | None = None,
    *,
    json: Any = None,
    partition: int | None = None,
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
    if partition is not None and type(partition) is not int:
        raise InvalidArgument(f"partition is a number, not {partition!r}")
    plain = headers is None and priority is delay is deliver_at is ttl is timestamp is None
    if plain and dedup_id is None and max_retries is None and lease is None:
        if name is not None:
            return body, name
        if body is not None:
            return body
        raise InvalidArgument("a message needs a value; only a deletion marker with a key may go without one")
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("use delay= or deliver_at=, not both")
    due_us = 0
    if delay is not None:
        delay_ms = parse_ms(delay, "delay")
        due_us = _from_now_us(delay_ms, delay) if delay_ms else 0
    elif deliver_at is not None:
        due_us = max(0, microseconds(deliver_at))  # what is past is delivered at once
    options: dict[str, str] = {}
    marked = b""
    named = b"" if headers is None else _encode_headers(headers)
    if dedup_id is not None or max_retries is not None or lease is not None:
        marked = _encode(dedup_id, "a dedup id") if isinstance(dedup_id, str) else b""
        options = broker_options(dedup_id, max_retries, None if lease is None else parse_ms(lease, "lease"))
        named += encode_headers(options)
    # As `Entry(...)`, which hands its arguments on by a function of Python's.
    return tuple.__new__(
        Entry,
        (
            body,
            name,
            named,
            PRIORITY_DEFAULT if priority is None else lane_of(priority),
            due_us,
            0 if ttl is None else _from_now_us(parse_ms(ttl, "ttl"), ttl),
            0 if timestamp is None else microseconds(timestamp),
            bool(options),
            marked,
        ),
    )


def _from_now_us(wait_ms: int, said: object) -> int:
    return _in_range(time.time_ns() // 1000 + wait_ms * 1000, said)


def _encode_headers(headers: Headers | HeaderItems) -> bytes:
    try:
        return encode_headers(headers)
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument(f"headers are a mapping of str to str or bytes, not {headers!r}") from None
