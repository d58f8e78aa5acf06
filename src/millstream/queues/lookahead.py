"""Offsets that were seen ahead of their turn, in order and in little memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from millstream.queues.intake import Pick, present
from millstream.queues.ranges import RangeSet, normal, pack
from millstream.queues.records import BatchView, LogSource

__all__ = ["SEEN_MAX", "OffsetQueue", "free_offsets", "picks_of", "picks_within"]

#: How many messages a queue group remembers beyond what it has taken, per partition, in 8 bytes each.  Beyond that it
#: looks no further until some of them are taken.
SEEN_MAX: Final = 1_000_000

#: Taken entries are cut off when there are this many of them, and more than half of all.
_CUT_MIN: Final = 1024


class OffsetQueue:
    """Rising offsets, first in, first out."""

    __slots__ = ("_first", "_offsets")

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._first = 0

    def __bool__(self) -> bool:
        return len(self._offsets) > self._first

    def push(self, offset: int) -> None:
        self._offsets.append(offset)

    def extend(self, offsets: Iterable[int]) -> None:
        self._offsets.extend(offsets)

    def pop(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> Sequence[int]:
        """The next ones: so many, or all there are."""
        taken = self._offsets[self._first : self._first + count]
        self._forget(self._first + len(taken))
        return taken

    def skip_below(self, offset: int) -> int:
        """Leave out what is below an offset, without a look at each; returns how many."""
        before = self._first
        first = bisect_left(self._offsets, offset, before)
        self._forget(first)
        return first - before

    def _forget(self, first: int) -> None:
        """Begin at this place."""
        if first >= _CUT_MIN and 2 * first > len(self._offsets):
            del self._offsets[:first]
            first = 0
        self._first = first


def free_offsets(view: BatchView, start: int, end: int, taken: RangeSet) -> int:
    """Which messages of a batch nobody has taken, as bits from `start` on."""
    size = end - start
    return present(view, start) & ~taken.bits(start, size) & (1 << size) - 1


def picks_of(
    source: LogSource,
    offsets: list[int],
    taken: RangeSet,
    gone: Callable[[int, int], None],
    *,
    only_free: bool = False,
) -> tuple[list[Pick], list[int]]:
    """Take messages from anywhere in the log: picks within batches, and those that cannot be read just now.

    `gone` is told of those that the log has lost.  `only_free` leaves out those that were taken since they were seen.
    """
    picks: list[Pick] = []
    unread: list[int] = []
    offsets.sort()
    at = 0
    while at < len(offsets):
        base = offsets[at]
        view = source.batch_at(base)
        end = bisect_left(offsets, view.next_offset, at + 1) if view is not None else at + 1
        size = offsets[end - 1] - base + 1
        bits = (1 << size) - 1 if size == end - at else pack(base, offsets[at:end])
        if only_free:
            bits &= ~taken.bits(base, size)
        taken.add_bits(base, bits)
        if view is not None:
            picks += picks_within(source, base, bits, gone)
        elif bits:
            unread.append(base)
        at = end
    return picks, unread


def picks_within(source: LogSource, base: int, bits: int, gone: Callable[[int, int], None]) -> Iterator[Pick]:
    """As `picks_of`, for messages close together (bit i is `base` + i); ends at the first that cannot be read."""
    while bits:
        base, bits = normal(base, bits)
        view = source.batch_at(base)
        if view is None:
            return
        if view.base_offset <= base:
            size = view.next_offset - base
            inside = bits & (1 << size) - 1
            there = inside & present(view, base)
            if there:
                yield Pick(view, *normal(base, there))
        else:
            size = view.base_offset - base
            inside, there = bits & (1 << size) - 1, 0
        if inside ^ there:
            gone(base, inside ^ there)
        base, bits = base + size, bits >> size
