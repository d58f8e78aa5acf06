"""Messages that were published before: the dedup ids of one partition, read from its log when they are first needed.

After a restart, or when a partition is opened again, what its log holds of the window is read in the background.  Until
that is done a message with an id cannot be judged: its publisher is asked to try again, which the SDK does by itself,
and the doors that speak text wait.  Messages without ids are not held up.  Where the disk cannot be read, messages with
ids are refused, and each refused message makes the reading go on from where it stopped.

What is scheduled is judged twice: among what is scheduled when it is published, and here when it is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import structlog

from millstream.errors import BatchDamaged, InvalidArgument, MillstreamError, StorageFailed, Throttled
from millstream.headers import decode_headers, readable_headers
from millstream.options import DEDUP_ID
from millstream.records import Batch, BatchHeader, Columns, check_batch
from millstream.traffic.dedup import DedupWindow, Seen, fingerprint

if TYPE_CHECKING:
    from millstream.broker.partition import Partition

__all__ = ["Duplicates", "mark_in", "mark_of", "no_window", "refuse_id"]

_log = structlog.get_logger("millstream.duplicates")

_OPTIONS: Final = int(Columns.OPTIONS)
_NAME: Final = DEDUP_ID.encode()
_READ_BYTES: Final = 1024 * 1024
_READ_S_MAX: Final = 10.0


def mark_of(batch: memoryview, header: BatchHeader, window_ms: int) -> bytes | None:
    """The fingerprint of the message's dedup id, if it has one.

    Raises InvalidArgument when it is not alone, or when there is no window in which it would be looked for.
    """
    if not window_ms:
        if header.count == 1 and _has_id(batch):  # ids travel alone: nobody looks into many messages for one
            raise no_window()
        return None
    marks = _marks(Batch.parse(batch, verify=False))
    if len(marks) > 1 and any(marks):
        # The answer to a publish has room for one message that was there before.
        raise InvalidArgument("a message with a dedup id must be the only one of its batch")
    return marks[0]


def mark_in(headers: bytes) -> bytes | None:
    """The fingerprint of the dedup id among the headers of one message, if it has one."""
    if _NAME not in headers:
        return None
    dedup_id = dict(readable_headers(headers)).get(DEDUP_ID)
    return None if dedup_id is None else fingerprint(dedup_id)


def refuse_id(batch: memoryview) -> None:
    """For a topic without a window: as `mark_of`, for whoever does something for a message before it is stored."""
    if BatchHeader(batch).flags & _OPTIONS:
        mark_of(batch, check_batch(batch, 0, len(batch)), 0)


def _has_id(batch: memoryview) -> bool:
    try:
        return _marks(Batch.parse(batch, verify=False))[0] is not None
    except BatchDamaged:  # headers that nobody can read are for those who read them
        return False


def no_window(missing: str = "") -> InvalidArgument:
    """What is said of a dedup id that nobody would look at, maybe because of a missing topic: who gives one relies on
    it.
    """
    if missing:
        return InvalidArgument(
            f"topic {missing!r} does not exist, and one that is made by a publish has no dedup window: create it with "
            f"`millstream topic create {missing} -c dedup_window_ms=10m`, or leave the id out"
        )
    return InvalidArgument(
        "the topic has no dedup window, so a dedup id would be ignored: set one with "
        "`millstream topic alter TOPIC -c dedup_window_ms=10m`, or leave the id out"
    )


def _marks(
    batch: Batch, decode: Callable[[bytes | None], list[tuple[str, bytes]]] = decode_headers
) -> list[bytes | None]:
    raw = batch.raw_headers()
    if raw is None:
        return [None] * batch.header.count
    found = [dict(decode(headers)).get(DEDUP_ID) for headers in raw]
    return [None if dedup_id is None else fingerprint(dedup_id) for dedup_id in found]


class Duplicates:
    """The dedup ids of one partition."""

    def __init__(self, partition: Partition, loop: asyncio.AbstractEventLoop, *, now_us: int, window_us: int) -> None:
        self._partition = partition
        self._loop = loop
        self._window = DedupWindow()
        #: What is still to be read: from here, up to there.
        self._offset = partition.log.offset_at_time(now_us - window_us)
        self._end = partition.log.next_offset
        #: Why the last try to read it has ended before that.
        self._failure = ""
        #: Kept: the loop itself does not keep tasks.
        self._reading: asyncio.Task[None] | None = None
        #: Ids of messages on their way here, and what is done when they have arrived.
        self._coming: dict[bytes, asyncio.Future[None]] = {}
        self._read_on(window_us)

    @property
    def is_reading(self) -> bool:
        """Whether there are ids that cannot be judged yet."""
        return self._reading is not None or bool(self._coming)

    async def known(self) -> None:
        """Come back when the ids are known, or after ten seconds; for clients that do not try again by themselves."""
        ahead: set[asyncio.Future[None]] = set(self._coming.values())
        if self._reading is not None:
            ahead.add(self._reading)
        if ahead:
            await asyncio.wait(ahead, timeout=_READ_S_MAX)

    @contextmanager
    def coming(self, marks: Collection[bytes]) -> Iterator[None]:
        """Meanwhile messages with these ids are moved here.  Others with the same ids have to wait for them."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        self._coming.update(dict.fromkeys(marks, arrived))
        try:
            yield
        finally:
            for mark in marks:
                del self._coming[mark]
            arrived.set_result(None)

    def find(self, mark: bytes, *, now_us: int, window_us: int) -> Seen | None:
        """The message that came before with this id.  Raises Throttled or StorageFailed while that is not known."""
        if mark in self._coming:
            raise Throttled("a scheduled message with this dedup id is being delivered; try again")
        if self._reading is not None:
            raise Throttled("the broker is still reading which dedup ids this partition has seen; try again")
        if self._failure:
            self._offset = max(self._offset, self._partition.log.offset_at_time(now_us - window_us))
            failure, self._failure = self._failure, ""
            self._read_on(window_us)
            raise StorageFailed(f"the dedup ids that this partition has seen cannot be read: {failure}")
        return self._find(mark, now_us, window_us)

    def _find(self, mark: bytes, now_us: int, window_us: int) -> Seen | None:
        seen, lapsed = self._window.find(mark, now_us=now_us, window_us=window_us), self._partition.lapsed
        return None if seen is not None and lapsed is not None and lapsed(seen.offset) else seen

    def remember(
        self, marks: Mapping[bytes, tuple[int, int]], counts: Sequence[int], first: int, append_time_us: int
    ) -> None:
        """Note the ids of batches that were just appended: each with the place of its batch, and its window."""
        offsets = list(accumulate(counts, initial=first))
        for mark, (place, window_us) in marks.items():
            self.add(mark, offsets[place], append_time_us, window_us=window_us)

    def note(self, first: int, window_us: int) -> None:
        """Note the ids in the batch that begins here, which was stored without a question.  Raises StorageFailed."""
        for buffer in self._partition.log.read(first, 1, before=self._partition.high_watermark).buffers:
            self._note(buffer, window_us)

    def add(self, mark: bytes, offset: int, append_time_us: int, *, window_us: int) -> None:
        self._window.add(mark, Seen(offset, append_time_us), window_us=window_us)

    def _read_on(self, window_us: int) -> None:
        if self._offset < self._end:
            self._reading = self._loop.create_task(self._read(window_us))

    async def _read(self, window_us: int) -> None:
        partition = self._partition
        self._failure = "the broker stopped reading"  # unless it comes to the end
        try:
            while self._offset < self._end:
                await partition.warm(self._offset)
                self._offset = max(self._offset, partition.log.start_offset)
                chunk = partition.log.read(self._offset, _READ_BYTES, before=self._end)
                for buffer in chunk.buffers:
                    self._note(buffer, window_us)
                if chunk.next_offset <= self._offset:
                    break
                self._offset = chunk.next_offset
                await asyncio.sleep(0)
            self._failure = ""
        except (MillstreamError, OSError) as error:
            self._failure = str(error)
            _log.error("dedup ids cannot be read", directory=partition.log.directory, reason=str(error))
        finally:
            self._reading = None

    def _note(self, buffer: bytes, window_us: int) -> None:
        at = 0
        while at < len(buffer):
            header = BatchHeader(buffer, at)
            if header.flags & _OPTIONS:
                batch = Batch.parse(buffer, at, verify=False)
                for mark, offset in zip(_marks(batch, readable_headers), batch.offsets(), strict=True):
                    time_us = header.append_time_us
                    # The first one is the original; whatever else has its id was sent on purpose (a replay).
                    if mark and self._find(mark, time_us, window_us) is None:
                        self.add(mark, offset, time_us, window_us=window_us)
            at += header.length
