"""What is still to come of one schedule log.

Every message of the log below `end` is pending until it is *settled*: fired, cancelled, expired or lost to damage.  So
there is no list of what is pending, only bitmaps of what is not, and ten million pending messages cost nothing here.
Due times are found in the messages themselves; only those that were moved are remembered, by offset.

`apply` is the one way in which durable state changes, live and in replay.  Facts are tuples that msgpack can carry:
(`fired` | `cancelled` | `expired` | `lost`, bitmap), (`moved`, offset, due_ms), and (`agenda`, bitmaps, moved), which
stands for all facts before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

from pyroaring import BitMap64

from millstream.ids import OFFSET_BITS
from millstream.schedules.timers import Timers

__all__ = ["Agenda", "Fact", "State", "settled_fact"]

Fact: TypeAlias = Sequence[Any]
Settlement: TypeAlias = Literal["fired", "cancelled", "expired", "lost"]
#: `gone`: settled so long ago that its record has been removed.  `unknown`: there never was such a message.
State: TypeAlias = Literal["pending", "firing", "fired", "cancelled", "expired", "lost", "gone", "unknown"]

_OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
#: Rarer than `fired`, so that "settled but none of these" says fired.
_SPECIAL: Final[tuple[Settlement, ...]] = ("cancelled", "expired", "lost")


def settled_fact(kind: Settlement, offsets: Iterable[int]) -> Fact:
    return kind, BitMap64(offsets).serialize()


class Agenda:
    """The pending messages of one partition.  Offsets are those of its schedule log."""

    def __init__(self) -> None:
        #: Where the log starts now, and the end of what was announced with `extend`.
        self.start = self.end = 0
        #: Messages whose time is near, and all that were moved.
        self.timers = Timers()
        self._settled = BitMap64()
        self._special = {kind: BitMap64() for kind in _SPECIAL}
        self._moved: dict[int, int] = {}
        self._firing = BitMap64()
        #: Messages about to be cancelled or moved: how many decisions about each are on their way to the disk.
        self._held: Counter[int] = Counter()
        self._held_rows: list[int] = []

    # --- looking -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many messages are still to come."""
        return self.end - self.start - len(self._settled)

    @property
    def moved(self) -> int:
        return len(self._moved)

    def state(self, offset: int) -> State:
        if not 0 <= offset < self.end:
            return "unknown"
        if offset < self.start:
            return "gone"
        if offset in self._settled:
            return next((kind for kind in _SPECIAL if offset in self._special[kind]), "fired")
        return "firing" if offset in self._firing else "pending"

    def has_lapsed(self, offset: int) -> bool:
        """Whether a message was or may have been given up, so that it is none that another can be a repetition of."""
        return offset < self.start or any(offset in offsets for offsets in self._special.values())

    def counts(self) -> dict[str, int]:
        """How many messages of the log are in each state."""
        counts: dict[str, int] = {kind: len(offsets) for kind, offsets in self._special.items()}
        counts["fired"] = len(self._settled) - sum(counts.values())
        counts["pending"] = self.pending
        return counts

    def due_ms(self, offset: int, stored_due_ms: int) -> int:
        """When a message comes due, given what it says itself."""
        return self._moved.get(offset, stored_due_ms)

    def first_pending(self) -> int:
        """The first offset that is not settled; everything before it can go."""
        low, high = self.start, self.end
        while low < high:  # settled up to the middle, or not?
            middle = (low + high + 1) // 2
            if self._settled.range_cardinality(self.start, middle) == middle - self.start:
                low = middle
            else:
                high = middle - 1
        return low

    def all_settled(self, first: int, end: int) -> bool:
        """Whether nothing in a range of offsets is still to come."""
        first = max(first, self.start)
        return first >= end or self._settled.range_cardinality(first, end) == end - first

    def settled(self) -> Container[int]:
        """The offsets that are settled now; later changes do not show."""
        return cast(Container[int], self._settled.copy())

    def unsettled_between(self, first: int, end: int) -> int:
        """How many messages of a range of offsets are not settled, whether they were announced or not."""
        return end - first - self._settled.range_cardinality(first, end)

    def pending_before(self, end: int) -> int:
        """How many messages before an offset are still to come."""
        return self.unsettled_between(self.start, min(max(end, self.start), self.end))

    def unsettled(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows whose messages are not settled, also of messages that were moved to another time since."""
        settled = self._settled
        if not settled and not self.start:
            return rows
        return [row for row in rows if row & _OFFSET_MASK not in settled and row & _OFFSET_MASK >= self.start]

    def current(self, rows: Iterable[int]) -> Iterator[int]:
        """The rows that hold: their message is not settled, and was not moved to another time since."""
        settled, moved = self._settled, self._moved
        for row in rows:
            offset = row & _OFFSET_MASK
            if offset not in settled and moved.get(offset, row >> OFFSET_BITS) == row >> OFFSET_BITS:
                yield row

    def moved_rows(self) -> Iterator[int]:
        """The rows of what was moved, as of now, however late they are looked at, and in whatever thread."""
        return (due_ms << OFFSET_BITS | offset for offset, due_ms in self._moved.copy().items())

    def uncovered(self, covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Ranges with pending messages, outside of ranges that are known; first, and first after."""
        missing = BitMap64()
        if self.start < self.end:
            missing.add_range(self.start, self.end)
        for first, end in covered:
            missing.remove_range(first, end)
        missing -= self._settled
        ranges: list[tuple[int, int]] = []
        while missing:
            first = missing.min()
            end = _run_end(missing, first)
            ranges.append((first, end))
            missing.remove_range(first, end)
        return ranges

    # --- time ----------------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int) -> list[int]:
        """Rows of messages that are due, in the order of delivery.  They are `firing` until settled or given back."""
        firing, held = self._firing, self._held
        due: list[int] = []
        while len(due) < limit and (rows := self.timers.take(now_ms, limit - len(due))):
            for row in self.current(rows):
                offset = row & _OFFSET_MASK
                if offset in held:
                    self._held_rows.append(row)
                # Moved away and back again, a message has two rows of the same time.
                elif offset not in firing and offset >= self.start:
                    firing.add(offset)
                    due.append(row)
        return due

    def give_back(self, rows: Iterable[int]) -> None:
        """Take back rows that were due and could not be delivered now."""
        for row in rows:
            self._firing.discard(row & _OFFSET_MASK)
        self.timers.add(rows)

    def hold(self, offsets: Iterable[int]) -> None:
        """Do not deliver these until `release`, as often as this."""
        self._held.update(offsets)

    def release(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._held[offset] -= 1
            if not self._held[offset]:
                del self._held[offset]
        rows, self._held_rows = self._held_rows, []
        self.timers.add(rows)

    # --- facts ---------------------------------------------------------------------------------------------------

    def extend(self, end: int) -> None:
        """The log goes up to here now."""
        self.end = max(self.end, end)

    def trim(self, start: int) -> None:
        """The log starts here now."""
        self.start = max(self.start, start)
        self.end = max(self.end, start)
        for offsets in (self._settled, *self._special.values()):
            offsets.remove_range(0, self.start)
        for offset in [offset for offset in self._moved if offset < self.start]:
            del self._moved[offset]

    def apply(self, fact: Fact) -> None:
        match fact:
            case ["moved", offset, due_ms]:
                if offset not in self._settled:
                    self._moved[offset] = due_ms
                    self.timers.add((due_ms << OFFSET_BITS | offset,))
            case ["agenda", settled, special, moved]:
                self._settled = BitMap64.deserialize(settled)
                self._special = {kind: BitMap64.deserialize(special[kind]) for kind in _SPECIAL}
                self._moved = dict(moved)
                self.timers = Timers()
                self.timers.add(self.moved_rows())
            case [("fired" | "cancelled" | "expired" | "lost") as kind, offsets]:
                self._settle(kind, BitMap64.deserialize(offsets))

    def _settle(self, kind: Settlement, offsets: BitMap64) -> None:
        self._settled |= offsets
        self._firing -= offsets
        if kind != "fired":
            self._special[kind] |= offsets
        if self._moved:
            for offset in offsets:
                self._moved.pop(offset, None)

    def snapshot(self) -> Fact:
        """One fact that stands for all facts so far."""
        for offsets in (self._settled, *self._special.values()):
            offsets.run_optimize()
        special = {kind: offsets.serialize() for kind, offsets in self._special.items()}
        return "agenda", self._settled.serialize(), special, list(self._moved.items())


def _run_end(offsets: BitMap64, first: int) -> int:
    """The end of the run of neighbours that begins with `first`."""
    low, high = first + 1, offsets.max() + 1
    while low < high:
        middle = (low + high + 1) // 2
        if offsets.contains_range(first, middle):
            low = middle
        else:
            high = middle - 1
    return low
