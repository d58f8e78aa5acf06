"""Messages that are due and in their topic already, as their dedup ids say: they have been delivered, by others.

An id that is new to the topic counts from before the move is recorded, because nobody may come with the same id between
the question and the answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from millstream.broker.partition import Partition
from millstream.broker.schedules.messages import Scheduled
from millstream.broker.traffic.duplicates import Duplicates, mark_in
from millstream.clock import Clock
from millstream.errors import MillstreamError, RequestError, StorageFailed

__all__ = ["TargetIds", "Verdict", "judged"]


class TargetIds(NamedTuple):
    """The dedup ids of the partition that messages are moved to."""

    partition: Partition
    ids: Duplicates
    window_us: int

    @classmethod
    def of(cls, partition: Partition, window_ms: int) -> TargetIds | None:
        return cls(partition, partition.duplicates(window_ms), window_ms * 1000) if window_ms else None

    def has(self, mark: bytes, now_us: int) -> bool:
        """Raises Throttled while that is not known."""
        try:
            return self.ids.find(mark, now_us=now_us, window_us=self.window_us) is not None
        except StorageFailed:
            return False  # the disk cannot tell, and what was confirmed long ago had better come twice than never

    def note(self, first: int) -> None:
        with contextlib.suppress(MillstreamError, OSError):  # read from the disk when the partition is opened next
            self.ids.note(first, self.window_us)


class Verdict(NamedTuple):
    """What becomes of messages that are due."""

    #: To be moved.  One that has the id of another of these is neither new nor known yet: its turn comes again.
    new: Sequence[Scheduled]
    #: Offsets of those that the topic has.
    known: Collection[int] = ()
    #: Where the ids of what was moved are noted, if there are any.
    target: TargetIds | None = None

    def stored(self, first: int) -> None:
        """A batch with some of them was stored, or was there before (-1)."""
        if self.target is not None and first >= 0:
            self.target.note(first)


@asynccontextmanager
async def judged(
    messages: Sequence[Scheduled], ids: Callable[[], TargetIds | None], clock: Clock
) -> AsyncIterator[Verdict]:
    """Which messages are new to the topic.  Within the block nobody else can publish one with the same id.

    Raises MillstreamError while that cannot be said.
    """
    marks = {m.offset: mark for m in messages if m.options and (mark := mark_in(m.headers)) is not None}
    target = await _ready(ids) if marks else None
    if target is None:
        yield Verdict(messages)
        return
    target.partition.flush()  # what waits there to be written has no offset yet
    now_us = clock.now_us()
    known: set[int] = set()
    coming: dict[bytes, int] = {}
    for offset, mark in marks.items():
        if target.has(mark, now_us):
            known.add(offset)
        else:
            coming.setdefault(mark, offset)
    # No pause up to here: what was not known is new until the block ends.
    with target.ids.coming(coming.keys()):
        if known:
            await target.partition.sync()  # those that are done with must not outlive those they repeat
        left_out = marks.keys() - coming.values()
        yield Verdict([m for m in messages if m.offset not in left_out], known, target)


async def _ready(ids: Callable[[], TargetIds | None]) -> TargetIds | None:
    try:
        if (target := ids()) is None:
            return None
        await target.ids.known()
        return ids()  # it may have been put away and opened anew meanwhile
    except RequestError:
        return None  # the topic is gone, as the move will find
