"""The batches of one partition one after the other, from an offset on or from the end backwards.

What is read at a time is small, and a segment that was not looked at since the start is checked away from the loop, so
that somebody who looks through a million messages keeps nobody waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from millstream.broker.partition import Partition
from millstream.records import Batch
from millstream.slicing import batches_of

__all__ = ["Backward", "Forward", "Reader"]

#: A window that turns out larger than this many reads is made smaller.
_WINDOW_READS: Final = 4


class Reader(Protocol):
    """One partition, in one direction."""

    #: Forward: the next offset to look at.  Backward: the first that was looked at.
    position: int

    async def peek(self) -> Batch | None:
        """The next batch; None when there is none."""

    def covers(self, offset: int) -> bool:
        """Whether a message of the next batch was not looked at yet."""

    def passed(self, offset: int) -> None:
        """A message was looked at."""

    def drop(self) -> None:
        """The next batch was looked at as a whole."""


class Forward:
    """`locate` finds the partition, each time: one that nobody uses may be put away meanwhile."""

    def __init__(self, locate: Callable[[], Partition], first: int, read_bytes: int) -> None:
        self.position = first
        self._locate = locate
        self._read_bytes = read_bytes
        self._batches: deque[Batch] = deque()
        self._following = first

    async def peek(self) -> Batch | None:
        while not self._batches:
            partition = self._locate()
            self.position = max(self.position, partition.log.start_offset)
            if self.position >= partition.high_watermark:
                return None
            await partition.warm(self.position)
            if self.position < partition.log.start_offset:
                continue  # retention was faster
            chunk = partition.log.read(self.position, self._read_bytes, before=partition.high_watermark)
            if chunk.next_offset <= self.position:
                return None
            self._batches.extend(batches_of(chunk.buffers))
            self._following = chunk.next_offset
            if not self._batches:
                self.position = chunk.next_offset
        return self._batches[0]

    def covers(self, offset: int) -> bool:
        return offset >= self.position

    def passed(self, offset: int) -> None:
        self.position = offset + 1

    def drop(self) -> None:
        done = self._batches.popleft()
        self.position = done.next_offset if self._batches else self._following


class Backward:
    """As Forward, from `end` down to `floor`.  The log is read forwards, a window at a time."""

    def __init__(self, locate: Callable[[], Partition], end: int, floor: int, read_bytes: int) -> None:
        self.position = end
        self._locate = locate
        self._floor = floor
        self._read_bytes = read_bytes
        self._batches: list[Batch] = []
        self._low = end
        self._step = 0

    async def peek(self) -> Batch | None:
        while not self._batches:
            partition = self._locate()
            floor = max(self._floor, partition.log.start_offset)
            if self.position <= floor:
                return None
            if not self._step:
                self._step = self._guess(partition)
            self._low = max(floor, self.position - self._step)
            await self._fill(partition)
            if not self._batches:
                self.position = self._low  # nothing is left there, or it cannot be read
        return self._batches[-1]

    def _guess(self, partition: Partition) -> int:
        """How many messages make a read, if they are as large as the others."""
        log = partition.log
        mean_bytes = log.size_bytes // max(1, log.next_offset - log.start_offset)
        return max(1, self._read_bytes // max(1, mean_bytes))

    async def _fill(self, partition: Partition) -> None:
        """Read everything between `_low` and `position`, or less if that is too much."""
        log, size = partition.log, 0
        offset = self._low
        while offset < self.position:
            await partition.warm(offset)
            if offset < log.start_offset:
                offset = log.start_offset
                continue
            chunk = log.read(offset, self._read_bytes, before=partition.high_watermark)
            if chunk.next_offset <= offset:
                break
            offset = chunk.next_offset
            for batch in batches_of(chunk.buffers):
                if batch.base_offset < self.position:
                    self._batches.append(batch)
                    size += batch.header.length
            if size > _WINDOW_READS * self._read_bytes and self._step > 1:
                self._step //= _WINDOW_READS
                self._batches, size = [], 0
                self._low = offset = max(self._low, self.position - max(1, self._step))
        if size < self._read_bytes // 2:
            self._step *= 2

    def covers(self, offset: int) -> bool:
        return self._floor <= offset < self.position

    def passed(self, offset: int) -> None:
        self.position = offset

    def drop(self) -> None:
        done = self._batches.pop()
        self.position = done.base_offset if self._batches else min(done.base_offset, self._low)
