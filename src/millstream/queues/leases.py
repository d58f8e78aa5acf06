"""Leases by name, by consumer and by deadline; and how messages become leases."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, TypeAlias

from millstream.queues.intake import Request
from millstream.queues.ranges import RangeSet, normal
from millstream.queues.records import FRESH, PLAIN, History, Lease, Terms

__all__ = ["SPAN_MAX", "Grant", "Handout", "Leases", "leased_among"]

#: A lease covers no more offsets than this, so that a mask over them stays small beside the messages.
SPAN_MAX: Final = 65_536
#: With a limit on the total time, messages share a lease only if they were appended within this time of each other.
_BORN_TOGETHER_US: Final = 1_000_000

#: Deadlines of leases that ended stay in the heap until they are this many more than those that count.
_STALE_MAX: Final = 64

#: Makes a lease: its first offset, bits, consumer, history, terms, when it begins and when it ends.
Grant: TypeAlias = Callable[[int, int, str, History, Terms, int, int], Lease]


class Leases:
    __slots__ = ("_by_consumer", "_by_nonce", "_deadlines", "messages")

    def __init__(self) -> None:
        self._by_nonce: dict[int, Lease] = {}
        self._by_consumer: dict[str, dict[int, Lease]] = {}
        self._deadlines: list[tuple[int, int]] = []  # heap of (deadline, nonce), looked at again when it is reached
        #: How many messages are leased.
        self.messages = 0

    def __len__(self) -> int:
        return len(self._by_nonce)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_nonce.values())

    def get(self, nonce: int) -> Lease | None:
        return self._by_nonce.get(nonce)

    def of_consumer(self, consumer: str) -> list[Lease]:
        return list(self._by_consumer.get(consumer, {}).values())

    def add(self, lease: Lease) -> None:
        nonce = lease.nonce
        assert nonce not in self._by_nonce, "a nonce names one lease"
        self._by_nonce[nonce] = lease
        held = self._by_consumer.get(lease.consumer)
        if held is None:
            self._by_consumer[lease.consumer] = {nonce: lease}
        else:
            held[nonce] = lease
        self.messages += lease.bits.bit_count()
        deadlines = self._deadlines
        if len(deadlines) > 2 * len(self._by_nonce) + _STALE_MAX:
            deadlines[:] = [(lease.deadline_us, nonce) for nonce, lease in self._by_nonce.items()]
            heapify(deadlines)
        else:
            heappush(deadlines, (lease.deadline_us, nonce))

    def take(self, lease: Lease, bits: int) -> None:
        """Some of the messages that are left leave the lease; with the last of them it ends."""
        self.messages -= bits.bit_count()
        lease.bits ^= bits
        if not lease.bits:
            nonce = lease.nonce
            del self._by_nonce[nonce]
            held = self._by_consumer[lease.consumer]
            del held[nonce]
            if not held:
                del self._by_consumer[lease.consumer]

    def drop(self, settled: RangeSet) -> None:
        """Let go of what is settled by now."""
        for lease in list(self):
            gone = lease.bits & settled.bits(lease.base, lease.bits.bit_length())
            if gone:
                self.take(lease, gone)

    def next_deadline_us(self) -> int | None:
        """The first moment at which a lease may have to end."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._by_nonce:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def overdue(self, now_us: int) -> Iterator[Lease]:
        """The leases whose deadline has come; the caller ends each of them."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_us:
            _, nonce = heappop(deadlines)
            lease = self._by_nonce.get(nonce)
            if lease is None:
                continue
            if lease.deadline_us > now_us:
                heappush(deadlines, (lease.deadline_us, nonce))  # it was extended
            else:
                yield lease


def leased_among(leases: Iterable[Lease], offsets: Sequence[int]) -> set[int]:
    """Which of some messages, given in order, somebody has."""
    found: set[int] = set()
    for lease in leases:
        base, bits = lease.base, lease.bits
        for offset in offsets[bisect_left(offsets, base) : bisect_left(offsets, base + bits.bit_length())]:
            if bits >> offset - base & 1:
                found.add(offset)
    return found


class Handout:
    """Makes leases for one consumer out of what is found for it, as few as possible."""

    __slots__ = ("_base", "_bits", "_by_lane", "_grant", "_history", "_request", "_terms", "leases")

    def __init__(self, request: Request, grant: Grant) -> None:
        self._request = request
        self._grant = grant
        # What will be the next lease; nothing as long as there are no bits.
        self._base = 0
        self._bits = 0
        self._history = FRESH
        self._terms = PLAIN
        self._by_lane: list[tuple[int, int, History, Terms]] | None = None
        self.leases: list[Lease] = []

    def sort_by_lane(self) -> None:
        """From here on, what is found in turns becomes one lease per lane, the highest lane first."""
        self._by_lane = []

    def add(self, base: int, bits: int, history: History, terms: Terms) -> None:
        if self._by_lane is not None:
            self._by_lane.append((base, bits, history, terms))
            return
        if not bits & 1:
            base, bits = normal(base, bits)
        if self._bits:
            if (
                history is self._history
                and 0 <= base - self._base <= SPAN_MAX - bits.bit_length()
                and (terms is self._terms or _alike(terms, self._terms))
            ):
                self._bits |= bits << base - self._base
                return
            self.finish()
        self._base, self._bits = base, bits
        self._history = history
        self._terms = terms

    @property
    def found(self) -> bool:
        return bool(self._bits or self._by_lane or self.leases)

    def finish(self) -> list[Lease]:
        if self._by_lane is not None:
            found, self._by_lane = self._by_lane, None
            for some in sorted(found, key=_lane_of):
                self.add(*some)
        if self._bits:
            request, terms = self._request, self._terms
            now_us = request.now_us
            deadline_us = now_us + 1000 * (terms.lease_ms or request.lease_ms)
            self.leases.append(
                self._grant(self._base, self._bits, request.consumer, self._history, terms, now_us, deadline_us)
            )
            self._bits = 0
        return self.leases


def _lane_of(found: tuple[int, int, History, Terms]) -> int:
    return found[3].lane


def _alike(one: Terms, other: Terms) -> bool:
    return one[1:] == other[1:] and abs(one.born_us - other.born_us) <= _BORN_TOGETHER_US
