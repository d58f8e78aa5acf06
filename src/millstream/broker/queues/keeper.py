"""What the queue groups of one partition share: its log, its journal, and the knowledge of priorities in it.

Priorities stand in the headers of batches.  As long as no producer used any, nobody looks for them; from the first one
on, every batch is looked at when it becomes visible.  What was there before is surveyed in the background, and the
journal remembers how far there was nothing to find, so that a restart does not read an old backlog again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from millstream.broker.journal import Fact, Journal
from millstream.broker.partition import Partition
from millstream.broker.queues.source import LogWindows, PartitionSource, StoredRun, Unchecked
from millstream.errors import MillstreamError, StorageFailed
from millstream.records import PRIORITY_DEFAULT, Batch, BatchHeader, Columns

if TYPE_CHECKING:
    from millstream.broker.queues.part import QueuePart
    from millstream.broker.queues.queues import Queues

__all__ = ["PartitionKeeper"]

_log = structlog.get_logger("millstream.queues")

_ENTITY: Final = "lanes"
_NORMAL: Final = 1 << PRIORITY_DEFAULT
_PRIORITY: Final = int(Columns.PRIORITY)
_SURVEY_BYTES: Final = 512 * 1024
#: When to try again what the disk could not read.
_RETRY_S: Final = 1.0


class PartitionKeeper:
    """Follows a partition on behalf of its queue groups."""

    def __init__(self, host: Queues, partition: Partition, journal: Journal, windows: LogWindows) -> None:
        self.partition = partition
        self.journal = journal
        self.source = PartitionSource(partition, windows)
        self.parts: list[QueuePart] = []
        self._host = host
        self._warming = False
        self._closed = False
        #: The first message that is not normal, as far as that is known.
        self._lanes_from: int | None = None
        #: Everything below was looked at by this process or one before.
        self._surveyed = 0
        #: From here on priorities are in the map of the source.
        self._mapped_from = partition.high_watermark
        self._surveys = 0
        #: From where to where nobody could read what priorities new messages have.
        self._missed: tuple[int, int] | None = None
        for kind, offset in journal.claim(_ENTITY, self._snapshot):
            if kind == "seen":
                self._lanes_from = offset
            else:
                self._surveyed = offset
        partition.listeners.append(self._advanced)

    def add(self, part: QueuePart) -> None:
        self.parts.append(part)
        known = self._surveyed if self._lanes_from is None else self._lanes_from
        start = max(part.ledger.committed, known, self.source.start)
        if start < self._mapped_from:
            end, self._mapped_from = self._mapped_from, start
            self._surveys += 1
            self._host.own(self._survey(start, end))
        elif not self._surveys:
            self._surveyed = self.partition.high_watermark

    def close(self) -> None:
        self._closed = True
        self.partition.listeners.remove(self._advanced)
        self.source.forget()

    def _advanced(self, before: int, after: int) -> None:
        if self.partition.has_lanes:
            self._look(before, after)
        for part in self.parts:
            part.wake()

    # --- cold segments -------------------------------------------------------------------------------------------

    def warm(self) -> None:
        """If somebody asked for what could not be read, make it readable, away from the loop; then go on."""
        if not self._warming and (self.source.cold is not None or self.source.trouble is not None):
            self._warming = True
            self._host.own(self._warm())

    async def warmed(self, offset: int) -> None:
        """Have a segment checked, however often it takes."""
        while not self._closed:
            try:
                await self.partition.warm(offset)
                return
            except MillstreamError as error:
                _log.warning("a queue cannot be read", directory=self.partition.log.directory, reason=str(error))
                await asyncio.sleep(_RETRY_S)

    async def run_at(self, offset: int) -> StoredRun | None:
        """The run with an offset or, if there is none, the next one, checked first if need be; None at the log's end.

        Raises StorageFailed when it cannot be read.
        """
        offset = max(offset, self.source.start)
        await self.partition.warm(offset)
        while True:
            try:
                return self.source.read_at(offset)
            except Unchecked as unchecked:
                if self._closed or self.partition.failed is not None:  # then nothing is checked any more
                    raise StorageFailed(self.partition.failed or "the log is closed") from None
                await self.partition.warm(unchecked.offset)

    async def _warm(self) -> None:
        source = self.source
        try:
            while (offset := source.cold) is not None and not self._closed:
                try:
                    await self.partition.warm(offset)
                except MillstreamError as error:
                    source.trouble = error
                source.cold = None
            if source.trouble is not None:
                _log.warning(
                    "a queue cannot be read", directory=self.partition.log.directory, reason=str(source.trouble)
                )
                source.trouble = None
                await asyncio.sleep(_RETRY_S)
        finally:
            self._warming = False
        for part in list(self.parts):
            part.wake()

    # --- priorities ----------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """The broker stops: note how far there is nothing to find."""
        for fact in self._snapshot():
            self.journal.record(_ENTITY, fact)

    def forget_below(self, offset: int) -> None:
        """Nobody needs to know priorities below."""
        self.source.lanes.forget_below(offset)
        self._mapped_from = max(self._mapped_from, min(offset, self.partition.high_watermark))

    def _snapshot(self) -> list[Fact]:
        if self._lanes_from is not None:
            return [["seen", self._lanes_from]]
        return [["surveyed", self._surveyed if self._surveys else self.partition.high_watermark]]

    def _look(self, offset: int, end: int) -> None:
        """Take note of the priorities of messages that became visible."""
        while offset < end:
            run = self.source.batch_at(offset)
            if run is None:  # the disk cannot be read right now
                if self._missed is None:
                    self._surveys += 1
                    self._host.own(self._catch_up())
                    self._missed = (offset, end)
                else:
                    self._missed = (self._missed[0], end)
                return
            if run.priorities != _NORMAL:
                for batch in run.batches():
                    if batch.header.priorities != _NORMAL:
                        self._note(batch)
            offset = run.next_offset

    def _note(self, batch: Batch, *, late: bool = False) -> None:
        if batch.header.flags & _PRIORITY:
            at = batch.sections.priority
            self.source.lanes.note(batch.offsets(), memoryview(batch.block)[at : at + batch.count], late=late)
        if self._lanes_from is None or batch.base_offset < self._lanes_from:
            self._lanes_from = batch.base_offset
            self.journal.record(_ENTITY, ["seen", self._lanes_from])

    async def _catch_up(self) -> None:
        """Look at what could not be read when it became visible."""
        while self._missed is not None:
            start, end = self._missed
            await self._look_through(start, end)
            self._missed = None if self._missed[1] == end else (end, self._missed[1])
        self._survey_ended()

    async def _survey(self, start: int, end: int) -> None:
        """Look at everything between two offsets; messages are delivered meanwhile."""
        await self._look_through(start, end)
        self._survey_ended()

    async def _look_through(self, offset: int, end: int) -> None:
        """A piece at a time, and however often it takes."""
        log = self.partition.log
        while offset < end and not self._closed:
            try:
                following = await self._survey_some(max(offset, log.start_offset), end)
            except MillstreamError as error:
                # Until it can be read nobody says that it has been looked at.
                _log.warning("priorities of a backlog cannot be read", directory=log.directory, reason=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if following <= offset:
                break
            offset = following

    def _survey_ended(self) -> None:
        self._surveys -= 1
        if not self._surveys:
            self._surveyed = self.partition.high_watermark
        if self.source.lanes.used:
            for part in list(self.parts):
                part.wake()

    async def _survey_some(self, offset: int, end: int) -> int:
        """Returns where to go on."""
        await self.partition.warm(offset)
        await asyncio.sleep(0)
        if self._closed:
            return offset
        log = self.partition.log
        chunk = log.read(max(offset, log.start_offset), _SURVEY_BYTES, before=end)
        for buffer in chunk.buffers:
            at = 0
            while at < len(buffer):
                header = BatchHeader(buffer, at)
                if header.priorities != _NORMAL:
                    self._note(Batch.parse(buffer, at, verify=False), late=True)
                at += header.length
        return chunk.next_offset
