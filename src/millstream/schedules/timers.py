"""Due times of the near future, in the order in which they come due.

Rows live in buckets of one second, eight bytes each, unsorted: adding a row is one append.  A bucket is sorted once,
when its second is the next to come, and from then on a cursor moves through it.  Nothing is ever taken out of the
middle: whoever cancels or moves a message notes that elsewhere and drops the row when it comes due.

A *row* is `due_ms << OFFSET_BITS | offset`: rows compare as (due time, offset), which is the order of delivery.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

from millstream.ids import OFFSET_BITS

__all__ = ["Timers"]

_SECOND_MS: Final = 1000
_OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
#: More rows than this are not put into a sorted bucket one by one, which moves all that are behind each.
_INSERTED_MAX: Final = 16


class Timers:
    """Rows by due time.  The millisecond is the unit: due times are rounded up before they come here."""

    __slots__ = ("_buckets", "_count", "_cursor", "_late", "_open", "_open_second", "_seconds")

    def __init__(self) -> None:
        #: Within a bucket a row is `millisecond of the second << OFFSET_BITS | offset`, which fits 64 bits.
        self._buckets: dict[int, array[int]] = {}
        self._seconds: list[int] = []  # a heap of the buckets' keys
        #: The bucket that is being worked off, sorted.
        self._open: list[int] = []
        self._open_second = -1
        self._cursor = 0
        #: Rows that came for a second before the open one: few, so a heap will do.
        self._late: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Iterable[int]) -> None:
        buckets = self._buckets
        count = 0
        opened: list[int] = []  # of the open bucket
        for row in rows:
            count += 1
            second, millisecond = divmod(row >> OFFSET_BITS, _SECOND_MS)
            if second <= self._open_second:
                if second < self._open_second:
                    heappush(self._late, row)
                else:
                    opened.append(row - (second * _SECOND_MS << OFFSET_BITS))
                continue
            bucket = buckets.get(second)
            if bucket is None:
                bucket = self._bucket(second)
            bucket.append(millisecond << OFFSET_BITS | row & _OFFSET_MASK)
        self._enter(opened)
        self._count += count

    def _enter(self, rows: list[int]) -> None:
        """Add rows to the bucket that is being worked off: few one by one, many by sorting it anew."""
        if len(rows) < _INSERTED_MAX:
            for row in rows:
                insort(self._open, row, self._cursor)
        else:
            self._open = sorted(self._open[self._cursor :] + rows)
            self._cursor = 0

    def add_sorted(self, rows: Sequence[int]) -> None:
        """As `add`, for many rows in ascending order: a bucket at a time instead of a row at a time."""
        at = 0
        while at < len(rows):
            second = (rows[at] >> OFFSET_BITS) // _SECOND_MS
            start = second * _SECOND_MS << OFFSET_BITS
            end = bisect_left(rows, start + (_SECOND_MS << OFFSET_BITS), at)
            if second <= self._open_second:
                self.add(rows[at:end])
            else:
                self._bucket(second).extend([row - start for row in rows[at:end]])
                self._count += end - at
            at = end

    def _bucket(self, second: int) -> array[int]:
        bucket = self._buckets.get(second)
        if bucket is None:
            bucket = self._buckets[second] = array("Q")
            heappush(self._seconds, second)
        return bucket

    def next_due_ms(self) -> int | None:
        """When the earliest row comes due."""
        if self._late:
            return self._late[0] >> OFFSET_BITS
        if not self._turn():
            return None
        return self._open_second * _SECOND_MS + (self._open[self._cursor] >> OFFSET_BITS)

    def take(self, now_ms: int, limit: int) -> list[int]:
        """Remove and return what is due, earliest first, at most `limit` rows."""
        rows: list[int] = []
        while len(rows) < limit:
            if self._late:
                if self._late[0] >> OFFSET_BITS > now_ms:
                    break
                rows.append(heappop(self._late))
            elif self._turn():
                start_ms = self._open_second * _SECOND_MS
                first_not_due = max(0, now_ms - start_ms + 1) << OFFSET_BITS
                room = min(len(self._open), self._cursor + limit - len(rows))
                end = bisect_left(self._open, first_not_due, self._cursor, room)
                if end == self._cursor:
                    break
                start = start_ms << OFFSET_BITS
                rows += [start + row for row in self._open[self._cursor : end]]
                self._cursor = end
            else:
                break
        self._count -= len(rows)
        return rows

    def _turn(self) -> bool:
        """Open the next bucket if the last one is worked off; False when there is none."""
        if self._cursor < len(self._open):
            return True
        if not self._seconds:
            self._open, self._open_second, self._cursor = [], -1, 0
            return False
        self._open_second = heappop(self._seconds)
        self._open = sorted(self._buckets.pop(self._open_second))
        self._cursor = 0
        return True
