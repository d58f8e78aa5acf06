"""What was delivered and came back: parcels that wait for their next try, and parcels that are ready.

Some of what is ready may be *held back*, because another message has to go first; it is not found until it is let go.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Final

from millstream.queues.ranges import RangeSet, normal, offsets_of
from millstream.queues.records import Parcel

__all__ = ["YIELD_US", "Returned"]

#: For so long what came back is kept for another consumer than the one that had it: long enough for one that is asking,
#: too short to be missed if there is none.
YIELD_US: Final = 1_000_000
#: What was taken stays among the firsts until there are so many more than those that count.
_STALE_MAX: Final = 64


class Returned:
    __slots__ = ("_alarms", "_firsts", "_held", "_ready", "_serial", "_waiting", "ready", "waiting")

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Parcel]] = []  # heap by due time
        # Heaps by offset, one for each consumer that had the messages last, so that its own can be passed over.
        self._ready: dict[str, list[tuple[int, int, Parcel]]] = {}
        # A heap of what comes first for each of those consumers, as (offset, serial, consumer); of some of what was
        # taken, too.  There may be as many consumers as messages: a detached lease is one of its own.
        self._firsts: list[tuple[int, int, str]] = []
        self._held: dict[int, Parcel] = {}  # by offset, a message each
        self._alarms: list[int] = []  # heap of moments at which ready messages are open to all
        self._serial = 0  # keeps heaps from comparing parcels
        #: How many messages wait, and how many are ready and not held back.
        self.waiting = 0
        self.ready = 0

    def __iter__(self) -> Iterator[Parcel]:
        return chain(self.waiting_parcels(), self.ready_parcels())

    def waiting_parcels(self) -> Iterator[Parcel]:
        return (parcel for _, _, parcel in self._waiting)

    def ready_parcels(self) -> Iterator[Parcel]:
        heaps = (parcel for heap in self._ready.values() for _, _, parcel in heap)
        return chain(heaps, self._held.values())

    def __bool__(self) -> bool:
        return bool(self.ready or self.waiting or self._held)

    @property
    def held(self) -> int:
        """How many messages are held back."""
        return len(self._held)

    def wait(self, parcel: Parcel) -> None:
        """Keep a parcel until its due time; `due` is what makes it ready, also when that is now."""
        self._serial += 1
        heappush(self._waiting, (parcel.due_us, self._serial, parcel))
        self.waiting += parcel.bits.bit_count()

    def add_ready(self, parcel: Parcel) -> None:
        self.put_back(parcel)
        if parcel.history.last_consumer:
            heappush(self._alarms, parcel.due_us + YIELD_US)

    def put_back(self, parcel: Parcel) -> None:
        """One that was popped and is not for this consumer; its alarm is still there, or that moment is over."""
        self._serial += 1
        last = parcel.history.last_consumer
        heap = self._ready.setdefault(last, [])
        heappush(heap, (parcel.base, self._serial, parcel))
        if heap[0][1] == self._serial:
            self._note_first(last, heap)
        self.ready += parcel.bits.bit_count()

    def _note_first(self, last: str, heap: list[tuple[int, int, Parcel]]) -> None:
        base, serial, _ = heap[0]
        heappush(self._firsts, (base, serial, last))
        if len(self._firsts) > 2 * len(self._ready) + _STALE_MAX:
            self._firsts = [(heap[0][0], heap[0][1], last) for last, heap in self._ready.items()]
            heapify(self._firsts)

    def due(self, now_us: int) -> None:
        """Waits that are over: their messages are ready."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= now_us:
            parcel = heappop(waiting)[2]
            self.waiting -= parcel.bits.bit_count()
            self.add_ready(parcel)
        alarms = self._alarms
        while alarms and alarms[0] <= now_us:
            heappop(alarms)

    def next_due_us(self) -> int | None:
        if self._waiting and self._alarms:
            return min(self._waiting[0][0], self._alarms[0])
        if self._waiting:
            return self._waiting[0][0]
        return self._alarms[0] if self._alarms else None

    def pop(self, consumer: str, now_us: int, *, alone: bool) -> Parcel | None:
        """The oldest ready parcel that this consumer may have."""
        own: tuple[int, int, str] | None = None
        parcel: Parcel | None = None
        while parcel is None and (heap := self._oldest_heap()) is not None:
            first = heappop(self._firsts)
            last = first[2]
            if last and last == consumer and not alone and now_us < heap[0][2].due_us + YIELD_US:
                own = first
                continue
            parcel = heappop(heap)[2]
            if heap:
                self._note_first(last, heap)
            else:
                del self._ready[last]
            self.ready -= parcel.bits.bit_count()
        if own is not None:
            heappush(self._firsts, own)
        return parcel

    def _oldest_heap(self) -> list[tuple[int, int, Parcel]] | None:
        """The heap with the oldest ready parcel; the consumer it belongs to is then the first in `_firsts`."""
        firsts = self._firsts
        while firsts:
            base, serial, last = firsts[0]
            heap = self._ready.get(last)
            if heap is not None and heap[0][:2] == (base, serial):
                return heap
            heappop(firsts)  # it was taken, or is not the first any more
        return None

    def hold(self, parcel: Parcel, bits: int) -> None:
        """Hold some of what was popped back; the parcel is left with the others."""
        for offset in offsets_of(parcel.base, bits):
            self._held[offset] = Parcel(offset, 1, parcel.history, parcel.terms, parcel.due_us)
        rest = parcel.bits ^ bits
        if rest:
            parcel.base, parcel.bits = normal(parcel.base, rest)
        else:
            parcel.bits = 0

    def let_go(self, offset: int) -> None:
        """Nothing goes before this message any more, if it was held back."""
        parcel = self._held.pop(offset, None)
        if parcel is not None:
            self.add_ready(parcel)

    def let_all_go(self) -> None:
        for offset in list(self._held):
            self.let_go(offset)

    def take(self, wanted: RangeSet) -> list[Parcel]:
        """Whatever is here of some messages, waiting or ready; it is not here any more."""
        found: list[Parcel] = []
        waiting, ready = list(self.waiting_parcels()), list(self.ready_parcels())
        self.clear()
        for keep, parcels in ((self.wait, waiting), (self.add_ready, ready)):
            for parcel in parcels:
                chosen = parcel.bits & wanted.bits(parcel.base, parcel.bits.bit_length())
                if chosen:
                    base, bits = normal(parcel.base, chosen)
                    found.append(Parcel(base, bits, parcel.history, parcel.terms, parcel.due_us))
                    parcel.bits ^= chosen
                if parcel.bits:
                    parcel.base, parcel.bits = normal(parcel.base, parcel.bits)
                    keep(parcel)
        return found

    def lowest(self) -> int | None:
        """The first offset of all, whether it waits or is ready."""
        return min((parcel.base for parcel in self), default=None)

    def oldest(self) -> int | None:
        """The first offset that is ready."""
        heap = self._oldest_heap()
        return None if heap is None else heap[0][0]

    def first(self) -> int | None:
        """The first offset that is ready, held back or not."""
        return min((offset for offset in (self.oldest(), *self._held) if offset is not None), default=None)

    def clear(self) -> None:
        self._waiting.clear()
        self._ready.clear()
        self._firsts.clear()
        self._held.clear()
        self._alarms.clear()
        self.waiting = self.ready = 0

    def drop(self, settled: RangeSet) -> None:
        """Let go of what is settled by now."""
        waiting, ready = list(self.waiting_parcels()), list(self.ready_parcels())
        self.clear()
        for keep, parcels in ((self.wait, waiting), (self.add_ready, ready)):
            for parcel in parcels:
                parcel.bits &= ~settled.bits(parcel.base, parcel.bits.bit_length())
                if parcel.bits:
                    parcel.base, parcel.bits = normal(parcel.base, parcel.bits)
                    keep(parcel)
