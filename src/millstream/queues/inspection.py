"""Looking into a ledger without touching it: where a message is, what lies in which state, what stands before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Final

from millstream.queues.book import Book
from millstream.queues.dispenser import Dispenser
from millstream.queues.keyed import OnePerKey
from millstream.queues.leases import Leases
from millstream.queues.ranges import offsets_of
from millstream.queues.records import NEVER, Lease, LogSource, Parcel, Whereabouts
from millstream.queues.returned import YIELD_US
from millstream.queues.why import Surroundings

__all__ = ["first_ready", "look", "offsets_in", "surroundings"]

#: How many offsets are looked at in one go.
_WINDOW: Final = 65_536


def look(book: Book, leases: Leases, offset: int, end: int) -> Whereabouts:
    if not book.origin <= offset < end:
        return Whereabouts("gone")
    if offset in book.settled:
        ending, reason = book.endings.of(offset)
        return Whereabouts("settled", ending=ending, reason=reason)
    if offset in book.aside:
        return Whereabouts("waiting", due_us=NEVER)
    for lease in leases:
        if _has(lease, offset):
            return Whereabouts("leased", lease.history, lease)
    for state, parcels in (("waiting", book.returned.waiting_parcels()), ("ready", book.returned.ready_parcels())):
        for parcel in parcels:
            if _has(parcel, offset):
                return Whereabouts(state, parcel.history, None, parcel.due_us)
    return Whereabouts("ready")


def offsets_in(book: Book, leases: Leases, state: str, end: int) -> Iterator[int]:
    """In order, and no further than the caller reads."""
    if state == "leased":
        return _in_order(leases)
    if state == "waiting":
        aside = (offset for base, bits in book.aside_spans() for offset in offsets_of(base, bits))
        return merge(_in_order(book.returned.waiting_parcels()), aside)
    assert state == "ready", f"no list is kept of what is {state}"
    fresh = (offset for start, bits in _fresh(book, end) for offset in offsets_of(start, bits))
    return merge(_in_order(book.returned.ready_parcels()), fresh)


def first_ready(book: Book, end: int) -> int | None:
    """The first that is ready, without a look at the others: there may be as many parcels as messages."""
    fresh, again = book.taken.floor, book.returned.first()
    if again is None or fresh < min(again, end):
        return fresh if fresh < end else None
    return again


def surroundings(book: Book, leases: Leases, dispenser: Dispenser, offset: int, source: LogSource) -> Surroundings:
    """What stands between a ready message and its delivery."""
    where = look(book, leases, offset, source.end)
    again = sum(_below(parcel, offset) for parcel in book.returned.ready_parcels())
    held_by = None
    if dispenser.strict:
        older = (parcel for parcel in book.returned if parcel.base < offset)
        held_by = min((some.base for some in (*leases, *older)), default=None)
    elif isinstance(dispenser.intake, OnePerKey):
        held_by = dispenser.intake.holder_of(source, offset)
    held_by = _another(held_by, offset)
    if last := where.history.last_consumer:
        open_us = where.due_us + YIELD_US
        return Surroundings(ahead=again, held_by=held_by, strict=dispenser.strict, kept_from=last, open_us=open_us)
    if dispenser.strict:
        return Surroundings(ahead=_fresh_below(book, offset), held_by=held_by, strict=True)
    if isinstance(dispenser.intake, OnePerKey):
        beyond = not dispenser.intake.sees(offset)
        return Surroundings(ahead=again + _fresh_below(book, offset), held_by=held_by, beyond=beyond)
    if dispenser.lanes is not None:
        lane = source.lanes.lane_of(offset)
        ahead = sum(
            (bits & source.lanes.bits(lane, start, bits.bit_length())).bit_count()
            for start, bits in _fresh(book, offset)
        )
        return Surroundings(ahead=ahead, lane=lane)
    return Surroundings(ahead=book.returned.ready + _fresh_below(book, offset))


def _another(holder: int | None, offset: int) -> int | None:
    """Who holds a message up; one that came back holds its own key, or the queue, and waits for nobody."""
    return None if holder == offset else holder


def _fresh(book: Book, end: int) -> Iterator[tuple[int, int]]:
    """What has never been delivered, as (base, bits)."""
    for start in range(book.taken.floor, end, _WINDOW):
        size = min(_WINDOW, end - start)
        yield start, ~book.taken.bits(start, size) & (1 << size) - 1


def _fresh_below(book: Book, offset: int) -> int:
    return sum(bits.bit_count() for _, bits in _fresh(book, offset))


def _below(some: Parcel, offset: int) -> int:
    return (some.bits & (1 << max(offset - some.base, 0)) - 1).bit_count()


def _has(some: Parcel | Lease, offset: int) -> bool:
    return offset >= some.base and bool(some.bits >> offset - some.base & 1)


def _in_order(parcels: Iterable[Parcel | Lease]) -> Iterator[int]:
    return merge(*(offsets_of(some.base, some.bits) for some in parcels))
