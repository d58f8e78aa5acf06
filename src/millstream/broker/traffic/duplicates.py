"""Messages that were published before: the dedup ids of one partition, read from its log when they are first needed.

After a restart, or when a partition is opened again, what its log holds of the window is read in the background.  Until
that is done a message with an id cannot be judged: its publisher is asked to try again, which the SDK does by itself,
and the doors that speak text wait.  Others publish on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import structlog

from millstream.errors import BatchDamaged, InvalidArgument, MillstreamError, Throttled
from millstream.options import DEDUP_ID
from millstream.records import Batch, BatchHeader, Columns, check_batch, decode_headers
from millstream.traffic.dedup import DedupWindow, Seen, fingerprint

if TYPE_CHECKING:
    from millstream.broker.partition import Partition

__all__ = ["Duplicates", "mark_of", "no_window", "refuse_id"]

_log = structlog.get_logger("millstream.duplicates")

_OPTIONS: Final = int(Columns.OPTIONS)
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


def refuse_id(batch: memoryview) -> None:
    """For a topic without a window: as `mark_of`, for whoever does something for a message before it is stored."""
    if BatchHeader(batch).flags & _OPTIONS:
        mark_of(batch, check_batch(batch, 0, len(batch)), 0)


def _has_id(batch: memoryview) -> bool:
    try:
        return _marks(Batch.parse(batch, verify=False))[0] is not None
    except BatchDamaged:  # headers that nobody can read are for those who read them
        return False


def no_window() -> InvalidArgument:
    """What is said of a dedup id that nobody would look at: who gives one relies on it."""
    return InvalidArgument(
        "the topic has no dedup window, so a dedup id would be ignored: set one with "
        "`millstream topic alter TOPIC -c dedup_window_ms=10m`, or leave the id out"
    )


def _marks(batch: Batch) -> list[bytes | None]:
    raw = batch.raw_headers()
    if raw is None:
        return [None] * batch.header.count
    found = [dict(decode_headers(headers)).get(DEDUP_ID) for headers in raw]
    return [None if dedup_id is None else fingerprint(dedup_id) for dedup_id in found]


class Duplicates:
    """The dedup ids of one partition."""

    def __init__(self, partition: Partition, loop: asyncio.AbstractEventLoop, *, now_us: int, window_us: int) -> None:
        self._partition = partition
        self._window = DedupWindow()
        start = partition.log.offset_at_time(now_us - window_us)
        end = partition.log.next_offset
        #: Kept: the loop itself does not keep tasks.
        self._reading = loop.create_task(self._read(start, end, window_us)) if start < end else None

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    async def known(self) -> None:
        """Come back when the ids are known, or after ten seconds; for clients that do not try again by themselves."""
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=_READ_S_MAX)

    def find(self, mark: bytes, *, now_us: int, window_us: int) -> Seen | None:
        """The message that came before with this id.  Raises Throttled while that is not known yet."""
        if self._reading is not None:
            raise Throttled("the broker is still reading which dedup ids this partition has seen; try again")
        return self._window.find(mark, now_us=now_us, window_us=window_us)

    def remember(
        self, marks: Mapping[bytes, tuple[int, int]], counts: Sequence[int], first: int, append_time_us: int
    ) -> None:
        """Note the ids of batches that were just appended: each with the place of its batch, and its window."""
        offsets = list(accumulate(counts, initial=first))
        for mark, (place, window_us) in marks.items():
            self.add(mark, offsets[place], append_time_us, window_us=window_us)

    def add(self, mark: bytes, offset: int, append_time_us: int, *, window_us: int) -> None:
        self._window.add(mark, Seen(offset, append_time_us), window_us=window_us)

    async def _read(self, offset: int, end: int, window_us: int) -> None:
        partition = self._partition
        try:
            while offset < end:
                await partition.warm(offset)
                offset = max(offset, partition.log.start_offset)
                chunk = partition.log.read(offset, _READ_BYTES, before=end)
                for buffer in chunk.buffers:
                    self._note(buffer, window_us)
                if chunk.next_offset <= offset:
                    break
                offset = chunk.next_offset
                await asyncio.sleep(0)
        except (MillstreamError, OSError) as error:
            _log.error("dedup ids cannot be read", directory=partition.log.directory, reason=str(error))
        finally:
            self._reading = None

    def _note(self, buffer: bytes, window_us: int) -> None:
        at = 0
        while at < len(buffer):
            header = BatchHeader(buffer, at)
            if header.flags & _OPTIONS:
                batch = Batch.parse(buffer, at, verify=False)
                for mark, offset in zip(_marks(batch), batch.offsets(), strict=True):
                    time_us = header.append_time_us
                    # The first one is the original; whatever else has its id was sent on purpose (a replay).
                    if mark and self._window.find(mark, now_us=time_us, window_us=window_us) is None:
                        self.add(mark, offset, time_us, window_us=window_us)
            at += header.length
