"""The durable part of a ledger: what is settled, what came back, and the facts that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from millstream.queues.endings import ACKED, Endings
from millstream.queues.facts import (
    CUT,
    RETURNED,
    SETTLED,
    START,
    TOTALS,
    aside_fact,
    parcels_of,
    returned_fact,
    settled_fact,
    spans_of,
    start_fact,
)
from millstream.queues.ranges import RangeSet, normal
from millstream.queues.records import FRESH, NEVER, Dead, Fact, History, Parcel
from millstream.queues.returned import Returned

__all__ = ["Book"]

#: How many offsets are spoken of in one go.
_WINDOW: Final = 65_536


class Book:
    """Sets of offsets and parcels, changed by facts alone: `apply` is the only way in, live and in replay."""

    __slots__ = (
        "_acked",
        "_aside_end",
        "_facts",
        "_known",
        "_past",
        "aside",
        "endings",
        "freed",
        "keeps_dead",
        "origin",
        "returned",
        "settled",
        "taken",
        "told",
        "totals",
    )

    def __init__(self) -> None:
        #: The first offset that concerns the group.
        self.origin = 0
        self.settled = RangeSet()
        #: What is settled, leased, returned or set aside; the rest has never been delivered.  Not durable in itself.
        self.taken = RangeSet()
        self.returned = Returned()
        #: Dead letters that the group gave up on: neither delivered any more nor settled, until somebody settles them.
        self.aside = RangeSet()
        self._aside_end = 0
        #: Whether messages are dead letters already, which stay where they are; asked when some are given up on.
        self.keeps_dead: Callable[[], bool] | None = None
        #: How messages came to be settled.
        self.totals: dict[str, int] = {"acked": 0}
        #: Told of everything that is settled, as (base, bits).
        self.freed: Callable[[int, int], None] | None = None
        #: Told of what is given up without having become a dead letter: how, first offset and bits.
        self.told: list[Callable[[str, int, int], None]] = []
        self._facts: list[Fact] = []
        self._acked: list[tuple[int, int]] = []
        #: What became of those that were not acked.
        self.endings = Endings()
        self._past: list[Parcel] | None = []
        #: Names of consumers and reasons: many messages have the same.
        self._known: dict[str, str] = {}

    def apply(self, fact: Fact) -> None:
        kind = fact[0]
        if kind == SETTLED:
            for base, bits in spans_of(fact):
                self.taken.add_bits(base, bits)
                self._settle(fact[1], base, bits)
        elif kind == RETURNED:
            for parcel in parcels_of(fact, self._known):
                self.taken.add_bits(parcel.base, parcel.bits)
                if parcel.due_us >= NEVER:
                    self._set_aside(parcel.base, parcel.bits)
                elif self._past is None:
                    self.returned.wait(parcel)
                else:
                    self._past.append(parcel)
        elif kind == START:
            _, self.origin, floor = fact
            self.settled = RangeSet(floor)
            self.taken = RangeSet(floor)
            self.returned.clear()
            self.aside, self._aside_end = RangeSet(), 0
            self.endings.clear()
            if self._past is not None:
                self._past.clear()
        elif kind == CUT:
            self._cut(fact[1])
        else:
            assert kind == TOTALS, f"a ledger knows no fact {kind!r}"
            self.totals = {"acked": 0, **fact[1]}
            self.endings.complete = len(fact) > 2 and bool(fact[2])

    def _cut(self, end: int) -> None:
        assert self._past is not None, "a log loses its end only while nobody is there"
        self.origin = min(self.origin, end)
        self.settled.cut(end)
        self.endings.cut(end)
        self.taken.cut(end)
        self.aside.cut(end)
        self._aside_end = min(self._aside_end, end)
        for parcel in self._past:
            parcel.bits &= (1 << max(end - parcel.base, 0)) - 1

    def open(self, now_us: int | None) -> None:
        """End the replay: what the last fact says of each message holds, unless the message is settled.

        How much of a wait has passed is judged by the clock, which may have been set meanwhile.  So no wait that goes
        on is made longer than it was when it began.
        """
        past, self._past = self._past or [], None
        known = RangeSet()
        for parcel in reversed(past):
            size = parcel.bits.bit_length()
            over = self.settled.bits(parcel.base, size) | self.aside.bits(parcel.base, size)
            bits = parcel.bits & ~(over | known.bits(parcel.base, size))
            if bits:
                known.add_bits(parcel.base, bits)
                parcel.base, parcel.bits = normal(parcel.base, bits)
                if now_us is not None and parcel.history.attempts:
                    parcel.due_us = min(parcel.due_us, now_us + parcel.due_us - parcel.history.attempts[-1].ended_us)
                self.returned.wait(parcel)

    def record(self, fact: Fact) -> None:
        """Apply a new fact and keep it for `drain`."""
        assert self._past is None, "what comes now must not be taken for the past"
        if fact[0] != RETURNED:
            self._write_acked()  # what it settles, or makes void, was settled otherwise before
        self.apply(fact)
        self._facts.append(fact)

    def ack(self, base: int, bits: int) -> None:
        """As `record` of an ack of messages that were leased; of many such `drain` makes one fact."""
        self.settled.add_bits(base, bits)
        self.totals["acked"] += bits.bit_count()
        self._acked.append((base, bits))
        if self.freed is not None:
            self.freed(base, bits)

    def discard(self, how: str, base: int, bits: int) -> None:
        if how != "gone":
            self._tell(how, base, bits)
        self.record(settled_fact(how, [(base, bits)]))

    def announce_below(self, how: str, end: int) -> None:
        """Say what is about to be settled below an offset."""
        settled = self.settled
        for base in range(settled.floor, end if self.told else 0, _WINDOW):
            size = min(_WINDOW, end - base)
            bits = ~settled.bits(base, size) & (1 << size) - 1
            if bits:
                self._tell(how, *normal(base, bits))

    def _tell(self, how: str, base: int, bits: int) -> None:
        for told in self.told:
            told(how, base, bits)

    def bury(self, base: int, bits: int, reason: str, error: str, history: History) -> tuple[Dead, ...]:
        """Settle messages that become dead letters; the fact is the caller's to record.

        What is a dead letter already becomes no other one: whoever looks for it would not find it any more.
        """
        base, bits = normal(base, bits)
        if self.keeps_dead is not None and self.keeps_dead():
            self.record(aside_fact([(base, bits)]))
            return ()
        fact = settled_fact("dead", [(base, bits)])
        self.taken.add_bits(base, bits)
        self._settle("dead", base, bits, reason)
        return (Dead(base, bits, reason, error, history, fact),)

    def aside_spans(self) -> Iterator[tuple[int, int]]:
        """What is set aside and was not settled since, as (base, bits) in order."""
        for start in range(self.settled.floor, self._aside_end, _WINDOW):
            size = min(_WINDOW, self._aside_end - start)
            bits = self.aside.bits(start, size) & ~self.settled.bits(start, size)
            if bits:
                yield normal(start, bits)

    def acked(self, base: int, bits: int) -> bool:
        """Whether these messages are settled, and not because they became dead letters: then an ack is too late."""
        size = bits.bit_length()
        return self.settled.bits(base, size) & bits == bits and not self.endings.died(base, bits)

    def drain(self) -> list[Fact]:
        self._write_acked()
        facts, self._facts = self._facts, []
        return facts

    def snapshot(self, leased: Iterable[Parcel]) -> list[Fact]:
        """Facts that make the same book; what is leased comes back with the history it had before."""
        facts: list[Fact] = [start_fact(self.origin, self.settled.floor)]
        if self.settled.above:
            facts.append(settled_fact("", self.settled.spans()))
        facts += self.endings.facts(self.origin)
        # After the others, because it counts what they settle.
        facts.append([TOTALS, dict(self.totals), self.endings.complete])
        facts += [returned_fact(parcel) for parcel in (*self.returned, *leased) if parcel.history != FRESH]
        if self._aside_end > self.settled.floor:
            facts.append(aside_fact(self.aside_spans()))
        return facts

    def _settle(self, how: str, base: int, bits: int, reason: str = "") -> None:
        settled = self.settled
        before = settled.floor + settled.above
        settled.add_bits(base, bits)
        count = settled.floor + settled.above - before
        if count:
            self.totals[how] = self.totals.get(how, 0) + count
        if how != ACKED:
            self.endings.note(how, base, bits, reason)
        if self.freed is not None:
            self.freed(base, bits)

    def _set_aside(self, base: int, bits: int) -> None:
        self.aside.add_bits(base, bits)
        self._aside_end = max(self._aside_end, base + bits.bit_length())
        if self.freed is not None:
            self.freed(base, bits)

    def _write_acked(self) -> None:
        if self._acked:
            self._facts.append(settled_fact("acked", self._acked))
            self._acked = []
