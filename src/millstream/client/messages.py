"""What users hold in their hands: messages that were read, receipts for messages that were published.

Messages are built a whole batch at a time by `map` over columns, so a message has only what differs from its
neighbours; everything else (topic, partition, append time) sits in one `Source` that the batch shares, and what costs
time (ids, headers as text, datetimes) is worked out when asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from millstream.durations import Duration
from millstream.errors import InvalidArgument
from millstream.headers import readable_headers
from millstream.ids import SCHEDULES, message_id, schedule_uid
from millstream.records import PRIORITY_DEFAULT, Batch, Buffer, Columns, decode_headers
from millstream.traceparent import TraceContext, context_of
from millstream.wire.messages import PublishResult

__all__ = [
    "BatchFailure",
    "Message",
    "Outgoing",
    "ProducerStats",
    "Receipt",
    "Source",
    "TopicPartition",
    "batches_in",
    "make_messages",
    "messages_of",
    "moment",
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CONTROL: Final = int(Columns.CONTROL)
_PRIORITY, _EXPIRY = int(Columns.PRIORITY), int(Columns.EXPIRY)
_RARE: Final = _PRIORITY | _EXPIRY


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


def moment(time_us: int) -> datetime:
    """A point in time as a datetime in UTC, exact to the microsecond; the nearest that Python has, beyond its years."""
    try:
        return _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:  # a producer may say what it likes, and a reader must get past it
        return (datetime.max if time_us > 0 else datetime.min).replace(tzinfo=UTC)


class _Rare(NamedTuple):
    """Columns that few batches have, as they came: nobody pays for looking into them who does not ask."""

    offsets: Sequence[int]
    lanes: bytes
    expiries: bytes

    @classmethod
    def of(cls, batch: Batch) -> _Rare:
        flags, at, block = batch.header.flags, batch.sections, memoryview(batch.block)
        return cls(
            batch.offsets(),
            bytes(block[at.priority : at.priority + batch.count]) if flags & _PRIORITY else b"",
            bytes(block[at.expiry : at.expiry + 8 * batch.count]) if flags & _EXPIRY else b"",
        )

    def lane(self, offset: int) -> int:
        return self.lanes[bisect_left(self.offsets, offset)] if self.lanes else PRIORITY_DEFAULT

    def expiry_us(self, offset: int) -> int:
        at = 8 * bisect_left(self.offsets, offset)
        return array("q", self.expiries[at : at + 8])[0] if self.expiries else 0


class Source:
    """What all messages of one batch have in common."""

    __slots__ = ("append_time_us", "base_timestamp_us", "commit", "epoch", "holding", "place", "rare", "reply", "uid")

    def __init__(
        self,
        place: TopicPartition,
        uid: int,
        append_time_us: int,
        base_timestamp_us: int,
        commit: Callable[[Message], object] | None,
        reply: Callable[..., Any] | None = None,
        holding: int = 0,
    ) -> None:
        self.place = place
        self.uid = uid
        self.append_time_us = append_time_us
        self.base_timestamp_us = base_timestamp_us
        #: These must not keep the stream or the client alive: messages are invisible to the garbage collector.
        self.commit = commit
        self.reply = reply
        #: Of its partition, by a member of a group: see `Ownership`.
        self.holding = holding
        #: Of the broker, when they were stored.
        self.epoch = 0
        self.rare: _Rare | None = None

    def __deepcopy__(self, _: object) -> Source:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a message cannot be pickled, because it is settled, committed and replied to where it was received: "
            "pass on message.value, message.key and message.headers, or what else is needed of it"
        )


class Message(msgspec.Struct, gc=False, eq=False):
    """One message as it was read.  `value` is None for a deletion marker of a compacted topic."""

    offset: int
    value: bytes | None
    source: Source
    key: bytes | None = None
    raw_headers: bytes | None = None
    own_timestamp_us: int | None = None

    @property
    def topic(self) -> str:
        return self.source.place.topic

    @property
    def partition(self) -> int:
        return self.source.place.partition

    @property
    def timestamp_us(self) -> int:
        """When the message was made, by the producer's clock; microseconds since 1970, UTC."""
        own = self.own_timestamp_us
        return self.source.base_timestamp_us if own is None else own

    @property
    def timestamp(self) -> datetime:
        return moment(self.timestamp_us)

    @property
    def append_time(self) -> datetime:
        """When the broker stored the message."""
        return moment(self.source.append_time_us)

    @property
    def priority(self) -> int:
        """0 critical, 1 high, 2 normal, 3 low, 4 background."""
        rare = self.source.rare
        return PRIORITY_DEFAULT if rare is None else rare.lane(self.offset)

    @property
    def expiry_us(self) -> int:
        """When queues stop delivering the message, from its `ttl`: microseconds since 1970, UTC; 0 = never."""
        rare = self.source.rare
        return 0 if rare is None else rare.expiry_us(self.offset)

    @property
    def expiry(self) -> datetime | None:
        """`expiry_us` as a datetime; None = never."""
        expiry_us = self.expiry_us
        return moment(expiry_us) if expiry_us else None

    @property
    def id(self) -> str:
        """The message id: a ULID that says where the message is."""
        return message_id(self.source.append_time_us, self.source.uid, self.offset)

    @property
    def headers(self) -> dict[str, str]:
        """Headers as text; if a name is repeated, its last value.  `header_items` has all of them, as bytes."""
        return {name: value.decode("utf-8", "replace") for name, value in decode_headers(self.raw_headers)}

    @property
    def trace_context(self) -> TraceContext | None:
        """The trace that the message belongs to, as its header `traceparent` says; None when it has none."""
        return context_of(readable_headers(self.raw_headers))

    def header_items(self) -> list[tuple[str, bytes]]:
        return decode_headers(self.raw_headers)

    @property
    def text(self) -> str:
        """The value as text.  Raises InvalidArgument if it is not UTF-8."""
        try:
            return self._present().decode()
        except UnicodeDecodeError as problem:
            raise InvalidArgument(f"the value of {self!r} is not UTF-8 text: {problem}") from None

    def json(self, kind: Any = Any) -> Any:
        """The value as JSON, checked against the type `kind` if given.  Raises InvalidArgument if it does not fit."""
        try:
            return msgspec.json.decode(self._present(), type=kind)
        except msgspec.DecodeError as problem:
            raise InvalidArgument(f"the value of {self!r} does not fit: {problem}") from None

    def commit(self) -> Any:
        """Record that this message, and all before it in its partition, are done.  Await it on an async stream."""
        if self.source.commit is None:
            raise InvalidArgument("only messages of a stream with a group can be committed")
        return self.source.commit(self)

    def reply(
        self,
        value: bytes | str | None = None,
        *,
        json: Any = None,
        key: bytes | str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Any:
        """Answer a request.  Await it with an asynchronous client.

        Returns a receipt, or None if the requester is gone.  Raises NoReplyAddress if this is not a request.
        """
        if self.source.reply is None:
            raise InvalidArgument("this message did not come from a client; use client.reply(message, ...)")
        return self.source.reply(self, value, json=json, key=key, headers=headers)

    def _present(self) -> bytes:
        if self.value is None:
            raise InvalidArgument(f"{self!r} is a deletion marker and has no value")
        return self.value

    def __repr__(self) -> str:
        value = self.value
        shown = repr(value) if value is None or len(value) <= 40 else f"{value[:40]!r}... ({len(value)} bytes)"
        return f"<{type(self).__name__} {self.topic}/{self.partition} @{self.offset} key={self.key!r} value={shown}>"


_M = TypeVar("_M", bound=Message)


def batches_in(buffer: Buffer) -> Iterator[Batch]:
    """The batches of an answer that hold messages for users, each of them checked.  Raises BatchDamaged."""
    at, end = 0, len(buffer)
    while at < end:
        batch = Batch.parse(buffer, at)
        at += batch.header.length
        if not batch.header.flags & _CONTROL:
            yield batch


def messages_of(
    batch: Batch,
    place: TopicPartition,
    uid: int,
    commit: Callable[[Message], object] | None,
    reply: Callable[..., Any] | None = None,
    holding: int = 0,
) -> list[Message]:
    """All messages of a batch.  Copies what it needs: the batch's buffer may be reused afterwards."""
    header = batch.header
    source = Source(place, uid, header.append_time_us, header.base_timestamp_us, commit, reply, holding)
    source.epoch = header.leader_epoch
    return make_messages(batch, source, Message)


def make_messages(batch: Batch, source: Source, kind: type[_M]) -> list[_M]:
    """As `messages_of`, for any kind of message, with a source of its own."""
    if batch.header.flags & _RARE:
        source.rare = _Rare.of(batch)
    keys, headers, timestamps = batch.keys(), batch.raw_headers(), batch.timestamps_us()
    offsets, values = batch.offsets(), batch.values()
    if headers is None and timestamps is None:
        if keys is None:
            return list(map(kind, offsets, values, repeat(source)))
        return list(map(kind, offsets, values, repeat(source), keys))
    columns = (keys or repeat(None), headers or repeat(None), timestamps or repeat(None))
    return list(map(kind, offsets, values, repeat(source), *columns))


class Receipt(msgspec.Struct, gc=False, frozen=True):
    """Proof of a publish: where the message is, and (`label`) what it survives."""

    topic: str
    partition: int
    offset: int
    #: What the message survives: memory, os (a crash of the process), disk (a power cut) or replicated.
    label: str
    append_time_us: int
    partition_uid: int
    #: Whether the message is delivered later.  Until then it is named by its id, and by its offset among the scheduled
    #: messages.
    scheduled: bool = False
    #: Whether the message was stored before, by a publish with the same dedup id or by an earlier try of this one.
    duplicate: bool = False

    @property
    def id(self) -> str:
        return message_id(self.append_time_us, self.partition_uid, self.offset)

    @property
    def timestamp(self) -> datetime:
        """When the broker stored the message."""
        return moment(self.append_time_us)


def receipt(place: TopicPartition, uid: int, result: PublishResult) -> Receipt:
    """The receipt for the first message of a batch, which may have gone to the log of schedules beside a partition."""
    topic, partition = place
    scheduled = partition >= SCHEDULES
    if scheduled:
        partition, uid = partition ^ SCHEDULES, schedule_uid(uid)
    stored_us, again = result.append_time_us, result.duplicate
    return Receipt(topic, partition, result.base_offset, result.label, stored_us, uid, scheduled, again)


def receipts(place: TopicPartition, uid: int, result: PublishResult, count: int) -> Iterator[Receipt]:
    """The receipts for all messages of a batch."""
    first = receipt(place, uid, result)
    if count == 1:
        return iter((first,))
    topic, partition, offset, *rest = (getattr(first, name) for name in Receipt.__struct_fields__)
    return map(Receipt, repeat(topic), repeat(partition), range(offset, offset + count), *map(repeat, rest))


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A message for `publish_many` that is more than a value.  Its fields are as the arguments of `publish`."""

    value: bytes | str | None = None
    key: bytes | str | None = None
    headers: Mapping[str, str | bytes] | None = None
    json: Any = None
    partition: int | None = None
    priority: int | str | None = None
    delay: Duration | None = None
    deliver_at: float | datetime | None = None
    ttl: Duration | None = None
    timestamp: float | datetime | None = None
    dedup_id: str | None = None
    max_retries: int | None = None
    lease: Duration | None = None


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """What `on_error` is told about messages of a producer that were not confirmed."""

    topic: str
    partition: int
    messages: int
    error: Exception
    #: True if they may be stored nevertheless, because the connection ended before the answer came.
    in_doubt: bool


@dataclass(slots=True)
class ProducerStats:
    """Counters of one producer."""

    #: A message that is sent again counts again.
    messages_sent: int = 0
    messages_confirmed: int = 0
    messages_failed: int = 0
    batches_sent: int = 0
    batches_confirmed: int = 0
    bytes_sent: int = 0
    retries: int = 0
    connections: int = 0
    buffered_bytes: int = 0
    #: How the broker sees the topic: normal, warning, critical or overloaded.
    flow_level: str = "normal"
    #: How long batches were held back because the broker asked for it.
    throttled_ms: int = 0
