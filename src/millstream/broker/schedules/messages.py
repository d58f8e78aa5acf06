"""Messages of a schedule log: found by offset wherever they stand, and made into batches for their topic."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from struct import Struct
from typing import Any, Final, Generic, NamedTuple, TypeVar

from millstream.errors import StorageFailed
from millstream.ids import OFFSET_BITS, message_id
from millstream.log.partition import PartitionLog
from millstream.options import SCHEDULED_ID
from millstream.records import PRIORITY_DEFAULT, Batch, Columns, encode_batch
from millstream.slicing import batches_of

__all__ = ["Collected", "Scheduled", "collect", "due_rows", "make_batches", "open_messages"]

T = TypeVar("T")

#: Messages that fire together travel in batches of about this size.
_BATCH_BYTES: Final = 1024 * 1024
_BATCH_MESSAGES: Final = 10_000
#: What a message takes besides its value, key and headers, about.
_MESSAGE_OVERHEAD_BYTES: Final = 64
#: Where messages lie close together many batches are read at once, where they do not, one by one.
_READ_BYTES: Final = 256 * 1024
_CLOSE: Final = 16
#: So much is read before others have their turn, and each read counts for a little.
_TURN_BYTES: Final = 1024 * 1024
_TURN_READ_BYTES: Final = 16 * 1024
_OPTIONS: Final = int(Columns.OPTIONS)
_NAME: Final = SCHEDULED_ID.encode()
_ID_BYTES: Final = 26
_ID_HEADER: Final = Struct("<H").pack(len(_NAME)) + _NAME + Struct("<I").pack(_ID_BYTES)


class Scheduled(NamedTuple):
    """A message as it was published."""

    offset: int
    value: bytes | None
    key: bytes | None
    headers: bytes
    priority: int
    due_us: int
    expiry_us: int
    timestamp_us: int
    append_time_us: int
    #: Its headers may speak to the broker.
    options: bool

    def id(self, uid: int) -> str:
        """`uid` is that of the schedule log."""
        return message_id(self.append_time_us, uid, self.offset)

    @property
    def due_ms(self) -> int:
        """Rounded up: never early."""
        return -(-self.due_us // 1000)

    @property
    def size_bytes(self) -> int:
        return len(self.value or b"") + len(self.key or b"") + len(self.headers)


def due_rows(batch: Batch) -> list[int]:
    """When each message of a batch is due, as rows (see schedules/timers.py)."""
    return [
        -(-due_us // 1000) << OFFSET_BITS | offset
        for due_us, offset in zip(batch.deliver_at_us() or (), batch.offsets(), strict=True)
    ]


def open_messages(batch: Batch, wanted: Sequence[int] | None = None) -> list[Scheduled]:
    """The messages of a batch, or those at some of its offsets."""
    header, offsets = batch.header, batch.offsets()
    columns: list[tuple[Sequence[Any] | None, Any]] = [
        (offsets, 0),
        (batch.values(), None),
        (batch.keys(), None),
        (batch.raw_headers(), b""),
        (batch.priorities(), PRIORITY_DEFAULT),
        (batch.deliver_at_us(), 0),
        (batch.expiry_us(), 0),
        (batch.timestamps_us(), header.base_timestamp_us),
        (None, header.append_time_us),
        (None, bool(header.flags & _OPTIONS)),
    ]
    chosen: list[Iterable[Any]]
    if wanted is None or (len(wanted) == batch.count and list(wanted) == list(offsets)):
        chosen = [repeat(default) if column is None else column for column, default in columns]
    else:
        places = list(_places(offsets, wanted))
        chosen = [repeat(default) if column is None else map(column.__getitem__, places) for column, default in columns]
    return list(map(Scheduled._make, zip(*chosen, strict=False)))


def _places(offsets: Sequence[int], wanted: Iterable[int]) -> Iterator[int]:
    """Where some offsets stand among all of a batch, which ascend; those that are not there are left out."""
    for offset in wanted:
        place = bisect_left(offsets, offset)
        if place < len(offsets) and offsets[place] == offset:
            yield place


class Collected(NamedTuple, Generic[T]):
    """What was found at some offsets."""

    found: dict[int, T]
    #: How many of the offsets were looked at, and what the messages there take.
    looked_at: int
    size_bytes: int


async def collect(
    log: PartitionLog,
    offsets: Sequence[int],
    before: int,
    keep: Callable[[Scheduled], T],
    *,
    bytes_max: int | None = None,
) -> Collected[T]:
    """What is to be kept of the messages at these offsets, which ascend; those that are damaged are left out.

    Each batch is read and opened once, however many of its messages are wanted.  Others have their turn meanwhile.
    Ends early, behind a whole batch, when the messages take more than `bytes_max`.  Raises StorageFailed.
    """
    found: dict[int, T] = {}
    at = size = 0
    turn_bytes = _TURN_BYTES
    while (at := bisect_left(offsets, log.start_offset, at)) < len(offsets):  # some may be removed meanwhile
        close = offsets[-1] - offsets[at] < _CLOSE * (len(offsets) - at)
        chunk = log.read(offsets[at], _READ_BYTES if close else 1, before=before)
        if chunk.next_offset <= offsets[at]:
            raise StorageFailed(f"the log {log.directory} cannot be read at offset {offsets[at]}")
        for batch in batches_of(chunk.buffers):
            first, at = at, bisect_left(offsets, batch.next_offset, at)
            if first < at:
                turn_bytes -= len(batch.block) if batch.header.codec else batch.header.length
                for message in open_messages(batch, offsets[first:at]):
                    found[message.offset] = keep(message)
                    size += message.size_bytes
                if bytes_max is not None and size > bytes_max:
                    return Collected(found, at, size)
        at = bisect_left(offsets, chunk.next_offset, at)  # beyond what is damaged
        turn_bytes -= _TURN_READ_BYTES
        if turn_bytes < 0:
            turn_bytes = _TURN_BYTES
            await asyncio.sleep(0)
    return Collected(found, at, size)


def make_batches(messages: Iterable[Scheduled], uid: int) -> Iterator[tuple[list[Scheduled], bytearray]]:
    """Batches for the topic: the messages as they were published, each with the id under which it was scheduled."""
    batch: list[Scheduled] = []
    size = 0
    for message in messages:
        if batch and (size > _BATCH_BYTES or len(batch) == _BATCH_MESSAGES):
            yield batch, _encode(batch, uid)
            batch, size = [], 0
        batch.append(message)
        size += message.size_bytes + _MESSAGE_OVERHEAD_BYTES
    if batch:
        yield batch, _encode(batch, uid)


def _encode(messages: Sequence[Scheduled], uid: int) -> bytearray:
    _, values, keys, headers, priorities, _, expiry, timestamps, _, options = zip(*messages, strict=True)
    return encode_batch(
        values,
        keys=None if all(key is None for key in keys) else keys,
        headers=[raw + _ID_HEADER + message.id(uid).encode() for raw, message in zip(headers, messages, strict=True)],
        priorities=None if set(priorities) == {PRIORITY_DEFAULT} else priorities,
        expiry_us=expiry if any(expiry) else None,
        timestamps_us=timestamps if len(set(timestamps)) > 1 else None,
        base_timestamp_us=timestamps[0],
        options=any(options),
    )
