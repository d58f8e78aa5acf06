"""Which messages of a partition have which priority: a bit per message, and nothing where all are normal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from millstream.queues.ranges import RangeSet, pack
from millstream.records import PRIORITY_DEFAULT
from millstream.topics import LANES

__all__ = ["LaneMap"]

#: Of so many batches that were noted late it is known where they begin.
_LATE_KEPT: Final = 1_000
#: Turns a column of priorities into the text of a binary number that has a 1 for each message of one lane.
_DIGITS: Final = tuple(bytes(b"1"[0] if byte == lane else b"0"[0] for byte in range(256)) for lane in range(LANES))


class LaneMap:
    """The priorities of a partition, shared by all its groups.

    Whoever keeps the partition tells it of each batch whose header names another lane than the normal one, and of
    nothing else.
    """

    __slots__ = ("_late", "_sets", "late", "used")

    def __init__(self) -> None:
        self._sets = [RangeSet() for _ in range(LANES)]  # that of the normal lane stays empty
        #: False as long as every message is normal, and then nobody looks any further.
        self.used = False
        #: How often messages were noted that had been in the log before: whoever went past them must look again.
        self.late = 0
        self._late: deque[int] = deque(maxlen=_LATE_KEPT)  # the first offsets of the last ones

    def note(self, offsets: Sequence[int], priorities: Sequence[int], *, late: bool = False) -> None:
        """A batch with priorities is in the log, or was there before (`late`); to hear of it twice changes nothing."""
        base, count = offsets[0], len(offsets)
        if late:
            self.late += 1
            self._late.append(base)
        column = bytes(priorities)
        for lane in range(LANES):
            if lane == PRIORITY_DEFAULT or lane not in column:
                continue
            if offsets[-1] - base == count - 1:
                bits = int(column.translate(_DIGITS[lane])[::-1], 2)
            else:
                bits = pack(base, [offset for offset, some in zip(offsets, column, strict=True) if some == lane])
            self._sets[lane].add_bits(base, bits)
            self.used = True

    def late_from(self, known: int) -> int:
        """Where to look again for whoever has heard of so many late ones, and not of all."""
        count = self.late - known
        return 0 if count > len(self._late) else min(islice(reversed(self._late), count))

    def bits(self, lane: int, start: int, size: int) -> int:
        """The messages of a lane among `size` offsets from `start` on; those of the normal one are in no other."""
        if lane != PRIORITY_DEFAULT:
            return self._sets[lane].bits(start, size)
        others = 0
        for other in self._sets:
            others |= other.bits(start, size)
        return ~others & (1 << size) - 1

    def next_in(self, lane: int, offset: int) -> int | None:
        """Where to look for the next message of a lane: nothing before that is in it."""
        return offset if lane == PRIORITY_DEFAULT else self._sets[lane].next_in(offset)

    def lane_of(self, offset: int) -> int:
        return next((lane for lane, some in enumerate(self._sets) if offset in some), PRIORITY_DEFAULT)

    def forget_below(self, offset: int) -> None:
        """Every group has settled what is below; its memory is free again."""
        for some in self._sets:
            some.forget_below(offset)
