"""About when a message was stored, from memory alone: who watches a thousand queues must not read a thousand logs."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from millstream.log.partition import PartitionLog

__all__ = ["Ages"]

#: Marks closer than this say nothing new.
_SPACING_US: Final = 1_000_000
#: When there are so many, some go: the further back, the less exact, and never more memory.
_MARKS_MAX: Final = 64
_THINNED: Final = _MARKS_MAX // 4


class Ages:
    """Offsets of one partition with their append times, a second apart or more."""

    __slots__ = ("_offsets", "_times_us", "due_us")

    def __init__(self, log: PartitionLog) -> None:
        """Begin with the first and the last message of each segment, whose times are known without a read."""
        self._offsets: list[int] = []
        self._times_us: list[int] = []
        #: An append at this time or later is worth a mark.
        self.due_us = 0
        for segment in log.segments[-_MARKS_MAX // 4 :]:
            if segment.size:
                self.note(segment.base_offset, segment.first_append_us)
                self.note(segment.next_offset - 1, segment.last_append_us)

    def note(self, offset: int, time_us: int, before_us: int = 0) -> None:
        """A batch that begins here was appended, and the one before it at `before_us`.  Called from `due_us` on."""
        if before_us and time_us - before_us >= _SPACING_US:
            # What was last before a pause would otherwise seem to have come in the middle of it.
            self._mark(offset - 1, before_us)
        self._mark(offset, time_us)

    def _mark(self, offset: int, time_us: int) -> None:
        if self._offsets and offset <= self._offsets[-1]:
            return
        if len(self._offsets) >= _MARKS_MAX:
            self._thin()
        self._offsets.append(offset)
        self._times_us.append(time_us)
        self.due_us = time_us + _SPACING_US

    def _thin(self) -> None:
        """Drop a quarter of the marks, no two in a row: those that a line between their neighbours comes closest to.

        The marks around a pause therefore stay.
        """
        offsets, times_us = self._offsets, self._times_us

        def missed_us(place: int) -> int:
            low, high = offsets[place - 1], offsets[place + 1]
            low_us, high_us = times_us[place - 1], times_us[place + 1]
            return abs(low_us + (high_us - low_us) * (offsets[place] - low) // (high - low) - times_us[place])

        for place in sorted(sorted(range(1, len(offsets) - 1, 2), key=missed_us)[:_THINNED], reverse=True):
            del offsets[place], times_us[place]

    def learn(self, offset: int, time_us: int) -> None:
        """Take note of the time of a message that somebody has read from disk."""
        place = bisect_right(self._offsets, offset)
        if place and self._offsets[place - 1] == offset:
            self._times_us[place - 1] = time_us
        elif len(self._offsets) < 2 * _MARKS_MAX:
            self._offsets.insert(place, offset)
            self._times_us.insert(place, time_us)

    def time_us(self, offset: int, *, end: int, end_us: int) -> int:
        """About when an offset was appended, by the marks around it.  The last message, `end` - 1, is of `end_us`."""
        place = bisect_right(self._offsets, offset)
        if not place:
            return self._times_us[0] if self._times_us else end_us
        low, low_us = self._offsets[place - 1], self._times_us[place - 1]
        if low == offset:
            return low_us
        if place < len(self._offsets):
            high, high_us = self._offsets[place], self._times_us[place]
        else:
            high, high_us = end - 1, end_us
        if high <= low:
            return low_us
        return low_us + (high_us - low_us) * min(offset - low, high - low) // (high - low)
