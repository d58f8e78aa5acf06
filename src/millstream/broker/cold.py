"""Segments that nobody has read since the broker started: each is checked once, however many wait to read it."""

from __future__ import annotations

import asyncio

from millstream.errors import NewerData, StorageFailed
from millstream.log.partition import PartitionLog
from millstream.log.segment import Segment, Verified

__all__ = ["ColdChecks"]


class ColdChecks:
    """The checks of one log that are under way, in threads."""

    def __init__(self, log: PartitionLog, loop: asyncio.AbstractEventLoop) -> None:
        self._log = log
        self._loop = loop
        self._under_way: dict[Segment, asyncio.Future[StorageFailed | None]] = {}

    def check(self, cold: Segment) -> asyncio.Future[StorageFailed | None]:
        """Done when the log knows what is in the segment, or why that cannot be known.  Shared: not to be cancelled."""
        told = self._under_way.get(cold)
        if told is None:
            told = self._loop.create_future()
            try:
                job = self._loop.run_in_executor(None, cold.verify)
            except Exception as error:  # no thread can be started, mostly: the next who asks tries again
                told.set_result(_failure(error))
                return told
            self._under_way[cold] = told
            job.add_done_callback(lambda done: self._end(cold, done))
        return told

    def _end(self, cold: Segment, done: asyncio.Future[Verified]) -> None:
        told, failure = self._under_way.pop(cold), None
        try:
            if cold in self._log.segments:  # otherwise retention or compaction has taken it away meanwhile
                self._log.accept(done.result())
        except Exception as error:  # whatever it is, somebody waits for the answer
            failure = _failure(error)
        told.set_result(failure)


def _failure(error: Exception) -> StorageFailed:
    if isinstance(error, NewerData):
        return error
    return StorageFailed(f"a stored segment cannot be checked: {error}")
