"""Messages as a client sends them: in JSON, one or many; as they are, with options beside them; as CloudEvents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec

from millstream.entries import AnyEntry, Entry, broker_options, lane_of
from millstream.errors import InvalidArgument, MillstreamError, PayloadTooLarge
from millstream.headers import encode_headers
from millstream.records import PRIORITY_DEFAULT
from millstream.values import Encoding, from_header, from_headers, from_json, from_raw

__all__ = [
    "MESSAGES_MAX",
    "AddressedMessage",
    "FsyncQuery",
    "NewMessage",
    "PublishQuery",
    "cloud_event",
    "entries_of",
    "media_type",
    "raw_message",
    "said_lane",
    "trace_headers",
]

#: In one request; more would keep everybody else waiting for too long.
MESSAGES_MAX: Final = 10_000
#: W3C asks for so much of a `tracestate` to be passed on.  Every message of a request gets it: more would make
#: gigabytes of a few kilobytes.
_TRACE_BYTES_MAX: Final = 512
_YEAR_9999_MS: Final = 253_402_300_799_999

TimeMs = Annotated[int, msgspec.Meta(ge=0, le=_YEAR_9999_MS)]
SpanMs = Annotated[int, msgspec.Meta(ge=0, le=_YEAR_9999_MS // 10)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Fsync = Literal["", "group", "interval", "always", "never"]


class NewMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message to publish."""

    #: Text, JSON or base64: see `encoding`.  null is a deletion marker and needs a key.
    value: msgspec.Raw
    key: str | None = None
    #: A list stands for a name that occurs several times; behind `base64:` is base64.
    headers: dict[str, str | list[str]] | None = None
    #: Of the value.  `auto`: a string is text, anything else is JSON, stored as it was sent.
    encoding: Encoding = "auto"
    key_encoding: Literal["text", "base64"] = "text"
    partition: Count | None = None
    #: critical, high, normal, low, background, or a number from 0 to 4.
    priority: str | int | None = None
    delay_ms: SpanMs | None = None
    deliver_at_ms: TimeMs | None = None
    #: A queue does not deliver it any more after this time.
    ttl_ms: SpanMs | None = None
    #: When it was made; now, if it is not said.
    timestamp_ms: TimeMs | None = None
    dedup_id: str | None = None
    max_retries: Count | None = None
    lease_ms: SpanMs | None = None


class AddressedMessage(NewMessage, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A message that says where it goes."""

    topic: str


class FsyncQuery(msgspec.Struct, forbid_unknown_fields=True):
    #: When to confirm, if not as the topic says.
    fsync: Fsync = ""


class PublishQuery(FsyncQuery, forbid_unknown_fields=True):
    """Everything but `fsync` is for bodies that are not JSON."""

    key: str | None = None
    #: `name=value`; may be repeated.  Behind `name=base64:` is base64.
    header: list[str] = []
    partition: Count | None = None
    priority: str | None = None
    delay_ms: SpanMs | None = None
    deliver_at_ms: TimeMs | None = None
    ttl_ms: SpanMs | None = None
    timestamp_ms: TimeMs | None = None
    dedup_id: str | None = None
    max_retries: Count | None = None
    lease_ms: SpanMs | None = None
    #: CloudEvents: an event that comes again is not stored again, told by its source and id.
    dedup: bool = False

    def check_alone(self) -> None:
        """Raise unless nothing is said that belongs into a JSON body."""
        if self == _NO_OPTIONS:
            return
        for name in PublishQuery.__struct_fields__:
            if name != "fsync" and getattr(self, name) != getattr(_NO_OPTIONS, name):
                raise InvalidArgument(f"the body is JSON: say {name} there, for each message")


_NO_OPTIONS: Final = PublishQuery()


# --- into entries ------------------------------------------------------------------------------------------------


def entries_of(
    messages: Sequence[NewMessage], *, now_us: int, extra: Sequence[tuple[str, bytes]] = ()
) -> tuple[list[AnyEntry], list[int | None] | None]:
    """Entries, and the partitions that they ask for, if any does.  `extra` headers go where there are none so named."""
    if not messages:
        raise InvalidArgument("there is no message in the request")
    if len(messages) > MESSAGES_MAX:
        raise PayloadTooLarge(f"a request holds {MESSAGES_MAX} messages at most, not {len(messages)}")
    entries: list[AnyEntry] = []
    try:
        for message in messages:
            entries.append(_entry(message, now_us, extra))
    except MillstreamError as problem:
        raise type(problem)(f"message {len(entries)}: {problem}") from None
    partitions = [message.partition for message in messages]
    return entries, None if partitions.count(None) == len(partitions) else partitions


def _entry(message: NewMessage, now_us: int, extra: Sequence[tuple[str, bytes]]) -> AnyEntry:
    value = from_raw(message.value, message.encoding)
    key = None if message.key is None else from_json(message.key, message.key_encoding, what="key")
    headers = from_headers(message.headers) if message.headers else []
    if extra:
        headers = _added(headers, extra)
    return make_entry(value, key, headers, message, now_us)


def make_entry(
    value: bytes | None,
    key: bytes | None,
    headers: list[tuple[str, bytes]],
    said: NewMessage | PublishQuery,
    now_us: int,
) -> AnyEntry:
    """The smallest form that holds a message."""
    if value is None and key is None:
        raise InvalidArgument("a message needs a value; only a deletion marker with a key may go without one")
    if not headers and (
        said.delay_ms is said.deliver_at_ms is said.ttl_ms is said.timestamp_ms is said.lease_ms is None
        and said.priority is said.dedup_id is None
        and said.max_retries is None
    ):
        return value if key is None else (value, key)  # type: ignore[return-value]
    if said.delay_ms is not None and said.deliver_at_ms is not None:
        raise InvalidArgument("use delay_ms or deliver_at_ms, not both")
    due_us = (said.deliver_at_ms or 0) * 1000
    if said.delay_ms:
        due_us = now_us + said.delay_ms * 1000
    options = broker_options(said.dedup_id, said.max_retries, said.lease_ms)
    return Entry(
        value,
        key,
        encode_headers(headers) + encode_headers(options),
        said_lane(said.priority),
        due_us,
        0 if said.ttl_ms is None else now_us + said.ttl_ms * 1000,
        (said.timestamp_ms or 0) * 1000,
        bool(options),
        (said.dedup_id or "").encode(),
    )


def said_lane(priority: str | int | None) -> int:
    """A priority by its name or its number, which in a query is text as well."""
    if priority is None:
        return PRIORITY_DEFAULT
    is_number = isinstance(priority, str) and len(priority) == 1 and priority.isdecimal()
    return lane_of(int(priority) if is_number else priority)


def _added(headers: list[tuple[str, bytes]], extra: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    names = {name for name, _ in headers}
    return headers + [item for item in extra if item[0] not in names]


# --- bodies that are values --------------------------------------------------------------------------------------


def media_type(headers: Mapping[bytes, bytes]) -> str:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")


def trace_headers(headers: Mapping[bytes, bytes]) -> list[tuple[str, bytes]]:
    """What a request says about the trace that it belongs to."""
    if not 0 < len(headers.get(b"traceparent", b"")) <= _TRACE_BYTES_MAX:
        return []
    said = ((name, headers.get(name.encode())) for name in ("traceparent", "tracestate"))
    return [(name, value) for name, value in said if value is not None and len(value) <= _TRACE_BYTES_MAX]


def raw_message(
    body: bytes, query: PublishQuery, *, now_us: int, extra: Sequence[tuple[str, bytes]] = ()
) -> tuple[list[AnyEntry], list[int | None] | None]:
    """A body that is the value, as it is."""
    headers: list[tuple[str, bytes]] = []
    for text in query.header:
        name, equals, content = text.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"header {text[:80]!r} is not of the form name=value")
        headers.append((name, from_header(name, content)))
    key = None if query.key is None else query.key.encode()
    entry = make_entry(body, key, _added(headers, extra), query, now_us)
    return [entry], None if query.partition is None else [query.partition]


def cloud_event(
    headers: Mapping[bytes, bytes], query: PublishQuery
) -> tuple[list[tuple[str, bytes]], PublishQuery] | None:
    """The attributes of a CloudEvent in binary mode as headers of its message, and the query that it amounts to.

    None when the request carries no event.
    """
    if b"ce-id" not in headers and b"ce-specversion" not in headers:
        return None
    attributes = {
        name.decode("latin-1"): _unquoted(value) for name, value in headers.items() if name.startswith(b"ce-")
    }
    for name in ("ce-specversion", "ce-id", "ce-source", "ce-type"):
        if not attributes.get(name):
            raise InvalidArgument(f"a CloudEvent in binary mode needs the header {name}")
    if attributes["ce-specversion"] != "1.0":
        raise InvalidArgument(f"CloudEvents 1.0 is understood, not {attributes['ce-specversion'][:20]!r}")
    kept = [(name, value.encode()) for name, value in attributes.items()]
    if b"content-type" in headers:
        kept.append(("content-type", headers[b"content-type"]))
    changes: dict[str, Any] = {}
    if query.key is None and "ce-partitionkey" in attributes:
        changes["key"] = attributes["ce-partitionkey"]
    if query.dedup and query.dedup_id is None:
        changes["dedup_id"] = f"{attributes['ce-source']} {attributes['ce-id']}"
    return kept, msgspec.structs.replace(query, **changes)


def _unquoted(value: bytes) -> str:
    try:
        return unquote_to_bytes(value).decode()
    except UnicodeDecodeError:
        raise InvalidArgument("the header of a CloudEvent is not percent-encoded UTF-8") from None
