"""Numbers over time in bounded memory: rings of slots, each slot the average, the least and the most of its time.

Every measurement goes into three rings at once: slots of 5 seconds for an hour, of a minute for a day, and of 15
minutes for 30 days.  A slot is known by its number, the time divided by its length, and lies at its number modulo the
size of the ring.  So nothing ever moves, gaps need no filling, and a clock that is set only means that
other slots come next.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

__all__ = ["TIERS", "Point", "Series", "Tier", "TierSize", "Tiers", "join"]

_NEVER: Final = -1
#: Slots whose memory is taken together, when the first of them is used.
_CHUNK: Final = 64
_FIELDS: Final = 4  # average, least, most, and how many measurements


class Series(NamedTuple):
    """What is measured, and of what; nothing named = of the broker."""

    metric: str
    namespace: str = ""
    topic: str = ""
    group: str = ""


class Point(NamedTuple):
    avg: float
    min: float
    max: float
    #: How many measurements.
    weight: int


class TierSize(NamedTuple):
    name: str
    step_ms: int
    slots: int

    @property
    def span_ms(self) -> int:
        return self.step_ms * self.slots


TIERS: Final = (
    TierSize("seconds", 5_000, 720),
    TierSize("minutes", 60_000, 1_440),
    TierSize("quarters", 900_000, 2_880),
)


def join(points: Iterable[Point]) -> Point | None:
    """One point for several."""
    found = [point for point in points if point.weight]
    if not found:
        return None
    weight = sum(point.weight for point in found)
    average = sum(point.avg * point.weight for point in found) / weight
    return Point(average, min(point.min for point in found), max(point.max for point in found), weight)


class _Column:
    """The slots of one series in one ring."""

    __slots__ = ("chunks",)

    def __init__(self, slots: int) -> None:
        self.chunks: list[array[float] | None] = [None] * -(-slots // _CHUNK)

    def get(self, place: int) -> Point | None:
        chunk = self.chunks[place // _CHUNK]
        at = place % _CHUNK * _FIELDS
        if chunk is None or not chunk[at + 3]:
            return None
        return Point(chunk[at], chunk[at + 1], chunk[at + 2], int(chunk[at + 3]))

    def put(self, place: int, point: Point) -> None:
        chunk = self.chunks[place // _CHUNK] or self._begin(place)
        at = place % _CHUNK * _FIELDS
        chunk[at], chunk[at + 1], chunk[at + 2], chunk[at + 3] = point

    def add(self, place: int, value: float) -> None:
        """One more measurement.  Every series has one in every ring, all the time: no points are made for that."""
        chunk = self.chunks[place // _CHUNK] or self._begin(place)
        at = place % _CHUNK * _FIELDS
        weight = chunk[at + 3] + 1
        if weight == 1:
            chunk[at] = chunk[at + 1] = chunk[at + 2] = value
        else:
            chunk[at] += (value - chunk[at]) / weight
            if value < chunk[at + 1]:
                chunk[at + 1] = value
            if value > chunk[at + 2]:
                chunk[at + 2] = value
        chunk[at + 3] = weight

    def _begin(self, place: int) -> array[float]:
        chunk = self.chunks[place // _CHUNK] = array("f", bytes(4 * _FIELDS * _CHUNK))
        return chunk

    def clear(self, place: int) -> None:
        chunk = self.chunks[place // _CHUNK]
        if chunk is not None:
            chunk[place % _CHUNK * _FIELDS + 3] = 0


class Tier:
    """One ring."""

    def __init__(self, size: TierSize) -> None:
        self.size = size
        self._numbers = array("q", [_NEVER]) * size.slots
        self._columns: dict[Series, _Column] = {}
        #: The slot that is being filled, since this object was made.
        self.current = _NEVER

    def add(self, time_ms: int, values: Mapping[Series, float]) -> int | None:
        """Take in measurements; returns the number of a slot that was completed by that, if one was."""
        number = time_ms // self.size.step_ms
        completed = None
        if number != self.current:
            # The first slot may have been begun by a process before this one.  Any other that is there already is of a
            # time that the clock has reached for the second time.
            self._take(number, anew=self.current != _NEVER)
            completed = self.current if self.current != _NEVER else None
            self.current = number
        place = number % self.size.slots
        for series, value in values.items():
            self._column(series).add(place, value)
        return completed

    def put(self, number: int, points: Mapping[Series, Point]) -> None:
        """Take over a slot as it was."""
        self._take(number, anew=True)
        for series, point in points.items():
            self._column(series).put(number % self.size.slots, point)

    def _take(self, number: int, *, anew: bool) -> None:
        place = number % self.size.slots
        if self._numbers[place] != number or anew:
            self._numbers[place] = number
            for column in self._columns.values():
                column.clear(place)

    def _column(self, series: Series) -> _Column:
        column = self._columns.get(series)
        if column is None:
            column = self._columns[series] = _Column(self.size.slots)
        return column

    def forget(self, series: Series) -> None:
        self._columns.pop(series, None)

    def has(self, number: int) -> bool:
        return number >= 0 and self._numbers[number % self.size.slots] == number

    def numbers(self) -> list[int]:
        """The slots that are there, by time."""
        return sorted(number for number in self._numbers if number != _NEVER)

    def slot(self, number: int) -> dict[Series, Point]:
        """Everything that was measured in one slot."""
        if not self.has(number):
            return {}
        place = number % self.size.slots
        points = ((series, column.get(place)) for series, column in self._columns.items())
        return {series: point for series, point in points if point is not None}

    def points(self, series: Series, first: int, after: int) -> Iterator[tuple[int, Point]]:
        """The slots of a series from one number up to another, with their numbers."""
        column = self._columns.get(series)
        if column is not None:
            for number in range(first, after):
                point = column.get(number % self.size.slots) if self.has(number) else None
                if point is not None:
                    yield number, point

    @property
    def memory_bytes(self) -> int:
        chunks = sum(chunk is not None for column in self._columns.values() for chunk in column.chunks)
        return chunks * 4 * _FIELDS * _CHUNK + 8 * self.size.slots


class Tiers:
    """All rings."""

    def __init__(self, sizes: Iterable[TierSize] = TIERS) -> None:
        self.tiers = [Tier(size) for size in sizes]

    def add(self, time_ms: int, values: Mapping[Series, float]) -> dict[Tier, int]:
        """Take in measurements; returns the slots that are complete now."""
        completed = {tier: tier.add(time_ms, values) for tier in self.tiers}
        return {tier: number for tier, number in completed.items() if number is not None}

    def mend(self) -> dict[Tier, list[int]]:
        """After loading: make the coarse slots that were not stored any more out of the fine ones; says which."""
        mended: dict[Tier, list[int]] = {}
        for fine, coarse in zip(self.tiers, self.tiers[1:], strict=False):
            ratio = coarse.size.step_ms // fine.size.step_ms
            missing: dict[int, list[int]] = {}
            for number in fine.numbers():
                if not coarse.has(number // ratio):
                    missing.setdefault(number // ratio, []).append(number)
            for number, parts in missing.items():
                points: dict[Series, list[Point]] = {}
                for part in parts:
                    for series, point in fine.slot(part).items():
                        points.setdefault(series, []).append(point)
                joined = {series: join(some) for series, some in points.items()}
                coarse.put(number, {series: point for series, point in joined.items() if point is not None})
                mended.setdefault(coarse, []).append(number)
        return mended

    def forget(self, series: Series) -> None:
        for tier in self.tiers:
            tier.forget(series)

    def series(self) -> set[Series]:
        return {series for tier in self.tiers for series in tier._columns}

    @property
    def memory_bytes(self) -> int:
        return sum(tier.memory_bytes for tier in self.tiers)

    def query(
        self, series: Series, from_ms: int, until_ms: int, points: int, *, now_ms: int
    ) -> tuple[int, list[tuple[int, Point]]]:
        """At most so many points over a time, from the finest ring that reaches back that far.

        Returns how long each of them stands for, and the points by time; where nothing was measured there is none.
        """
        tier = next((tier for tier in self.tiers if now_ms - from_ms <= tier.size.span_ms), self.tiers[-1])
        size = tier.size
        first = max(from_ms, now_ms - size.span_ms, 0) // size.step_ms
        # Something may be measured in the future, by a clock that has been set back since; not further than a ring.
        after = min(-(-until_ms // size.step_ms), now_ms // size.step_ms + 1 + size.slots)
        wide = max(1, -(-(after - first) // points))
        while (after - 1) // wide - first // wide >= points:  # they begin at multiples of their length, always the same
            wide += 1
        found: dict[int, list[Point]] = {}
        for number, point in tier.points(series, first, after):
            found.setdefault(number // wide, []).append(point)
        step_ms = size.step_ms * wide
        joined = ((number * step_ms, join(some)) for number, some in sorted(found.items()))
        return step_ms, [(time_ms, point) for time_ms, point in joined if point is not None]
