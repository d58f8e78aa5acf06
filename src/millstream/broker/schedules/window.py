"""Where the due times of one partition's schedules are: near ones in memory, all others on disk.

All rows (due time, offset) go to the *buffer*, and from there, thousands at a time, into runs of the due index.  Rows
that are due before the *horizon* are also in the agenda's timers.  The horizon moves on with time and takes rows from
the runs, and from the buffer, with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from heapq import merge
from itertools import chain
from typing import Final

from millstream.clock import Clock
from millstream.ids import OFFSET_BITS
from millstream.log.due_index import DueIndex
from millstream.schedules.agenda import Agenda

__all__ = ["DueWindow"]

#: Memory holds what is due within this time, and what comes due beyond is fetched when half of it has passed.
_WINDOW_MS: Final = 600_000
#: Rows of a run.  Sorting them takes some 20 ms in which nobody else runs; fewer would mean more files.
RUN_ROWS: Final = 32_768

#: Reads the rows of a range of offsets from the log, a piece at a time: where the piece ends, and its rows.
ReadRows = Callable[[int, int], AsyncIterator[tuple[int, list[int]]]]


class DueWindow:
    """The rows of one schedule log.  All methods are called on the event loop; what blocks runs in a thread."""

    def __init__(self, agenda: Agenda, index: DueIndex, *, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._agenda = agenda
        self._index = index
        self._clock = clock
        self._loop = loop
        #: Rows that are in no run yet, from this offset on.
        self._buffer: list[int] = []
        self._buffer_from = 0
        #: Rows on their way to a run.
        self._writing: list[int] = []
        self._horizon_ms = 0
        self._tending = False

    @property
    def moves_ms(self) -> int:
        """When the horizon has to move on; while it does, that is later."""
        return self._horizon_ms + (_WINDOW_MS if self._tending else -_WINDOW_MS // 2)

    @property
    def wants_tending(self) -> bool:
        return not self._tending and (len(self._buffer) >= RUN_ROWS or self._is_late)

    @property
    def _is_late(self) -> bool:
        return self._clock.now_us() // 1000 >= self._horizon_ms - _WINDOW_MS // 2

    def enter(self, rows: list[int]) -> None:
        """Add the rows of messages that have become visible."""
        self._buffer += rows
        horizon = self._horizon_ms << OFFSET_BITS
        self._agenda.timers.add(row for row in rows if row < horizon)

    def rows_from(self, due_ms: int) -> Iterator[int]:
        """All rows that are due at or after a time, in order, stale ones too, as of now.

        The iterator reads files: it is made for a thread, in which nothing may be looked at that changes meanwhile.
        """
        known = chain([*self._buffer, *self._writing], self._agenda.moved_rows())
        return merge(self._index.rows_from(due_ms), _in_order(row for row in known if row >> OFFSET_BITS >= due_ms))

    # --- start ---------------------------------------------------------------------------------------------------

    async def load(self, read_rows: ReadRows, start_offset: int) -> None:
        """Take over the runs that are there, and read from the log what is pending and in none of them."""
        index = self._index
        index.runs.clear()
        self._buffer = []
        await self._loop.run_in_executor(None, index.load)
        self.remove_settled()
        last = index.runs[-1].first_offset if index.runs else -1
        async for first, end, rows in self._unindexed(read_rows):
            if len(rows) >= RUN_ROWS or end <= last:
                index.add(await self._loop.run_in_executor(None, index.write, first, end, rows))
            else:
                self._buffer += rows
        self._buffer_from = max((run.end_offset for run in index.runs), default=start_offset)
        await self._move_horizon()

    async def _unindexed(self, read_rows: ReadRows) -> AsyncIterator[tuple[int, int, list[int]]]:
        """What is pending and in no run, in pieces that do not reach across a run: first offset, end, rows."""
        bounds = [run.first_offset for run in self._index.runs]
        start = end = -1
        rows: list[int] = []
        for first, stop in self._agenda.uncovered(self._index.covered()):
            if rows and any(end <= bound < first for bound in bounds):
                yield start, end, rows
                rows = []
            async for next_offset, more in read_rows(first, stop):
                start = start if rows else first
                first = end = next_offset
                rows += more
                if len(rows) >= RUN_ROWS:
                    yield start, end, rows
                    rows = []
        if rows:
            yield start, end, rows

    # --- as time goes on -----------------------------------------------------------------------------------------

    async def tend(self) -> None:
        """Move a full buffer to disk and what comes near to memory: one thing at a time.

        Raises OSError.  Then nothing is lost: what is in no run stays in memory, and in the log.
        """
        if self._tending:
            return
        self._tending = True
        try:
            while self._is_late:
                await self._move_horizon()
            while len(self._buffer) >= RUN_ROWS:
                await self._write_run()
        finally:
            self._tending = False

    async def _write_run(self) -> None:
        pending = list(self._agenda.unsettled(self._buffer))
        if len(pending) < RUN_ROWS // 2:
            self._buffer = pending  # most were due soon and are gone: not worth a file
            return
        end = self._agenda.end
        self._writing, self._buffer = pending, []
        try:
            run = await self._loop.run_in_executor(None, self._index.write, self._buffer_from, end, pending)
        except OSError:
            self._buffer[:0] = pending
            raise
        finally:
            self._writing = []
        self._index.add(run)
        self._buffer_from = end
        # What is near is in memory already; the cursor steps over it.
        await self._loop.run_in_executor(None, self._index.read, run, self._horizon_ms)

    async def _move_horizon(self) -> None:
        """Take everything into memory that comes due in the time ahead."""
        horizon_ms = self._clock.now_us() // 1000 + _WINDOW_MS
        old, new = self._horizon_ms << OFFSET_BITS, horizon_ms << OFFSET_BITS
        for run in self._index.runs:
            if run.next_due_ms is not None and run.next_due_ms < horizon_ms:
                rows = await self._loop.run_in_executor(None, self._index.read, run, horizon_ms)
                self._agenda.timers.add_sorted(self._agenda.unsettled(rows))
        # From here on without a pause, so that no row comes in between.
        self._agenda.timers.add(row for row in (*self._buffer, *self._writing) if old <= row < new)
        self._horizon_ms = horizon_ms

    def remove_settled(self) -> None:
        """Remove runs in which nothing is pending any more.  Raises OSError."""
        if not self._tending:
            for run in [it for it in self._index.runs if self._agenda.all_settled(it.first_offset, it.end_offset)]:
                self._index.remove(run)


def _in_order(rows: Iterable[int]) -> Iterator[int]:
    """Sorted when the first one is asked for."""
    yield from sorted(rows)
