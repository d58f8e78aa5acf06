"""The durable changes of a ledger, in a shape that msgpack can carry.

    ["start", offset, settled]           the group begins here and has settled all below `settled`; nothing that was
                                         said before holds any more
    ["settled", how, spans]              done with; how = acked, dead, expired, evicted, purged, gone
    ["returned", spans, due_us, deliveries, failures, first_us, attempts, terms]
                                         failed or given back: what is known of these messages from now on; with
                                         due_us = NEVER they are set aside, not delivered any more and not settled
    ["cut", end]                         the log lost everything from there on; what was said about it does not hold
    ["totals", {how: count}, complete]   in snapshots: how messages came to be settled so far, and whether all that
                                         were not acked stand before it by name

Spans are a flat list: an offset, then how many messages from there on, or a little-endian bitmap of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from millstream.queues.ranges import normal
from millstream.queues.records import FRESH, NEVER, PLAIN, Attempt, Fact, History, Parcel, Terms

__all__ = [
    "CUT",
    "RETURNED",
    "SETTLED",
    "START",
    "TOTALS",
    "aside_fact",
    "cut_fact",
    "end_of",
    "parcels_of",
    "returned_fact",
    "settled_below",
    "settled_fact",
    "spans_of",
    "start_fact",
]

START: Final = "start"
SETTLED: Final = "settled"
RETURNED: Final = "returned"
TOTALS: Final = "totals"
CUT: Final = "cut"

#: A run of offsets may be as long as the log; it is read in pieces of this size.
_PIECE: Final = 65_536
#: Names and reasons of one ledger of which there is one copy each.
_KNOWN_MAX: Final = 1_000


def start_fact(offset: int, settled: int) -> Fact:
    return [START, offset, settled]


def settled_fact(how: str, spans: Iterable[tuple[int, int]]) -> Fact:
    return [SETTLED, how, _write_spans(spans)]


def settled_below(how: str, start: int, end: int) -> Fact:
    return [SETTLED, how, [start, end - start]]


def returned_fact(parcel: Parcel) -> Fact:
    history = parcel.history
    return [
        RETURNED,
        _write_spans([(parcel.base, parcel.bits)]),
        parcel.due_us,
        history.deliveries,
        history.failures,
        history.first_us,
        [list(attempt) for attempt in history.attempts],
        list(parcel.terms or PLAIN),
    ]


def aside_fact(spans: Iterable[tuple[int, int]]) -> Fact:
    return [RETURNED, _write_spans(spans), NEVER, *FRESH[:3], [], list(PLAIN)]


def cut_fact(end: int) -> Fact:
    return [CUT, end]


def end_of(fact: Fact) -> int:
    """A fact says something about offsets below this, and about none from there on."""
    if fact[0] in (START, CUT):
        return int(fact[-1])
    spans = fact[2] if fact[0] == SETTLED else fact[1] if fact[0] == RETURNED else ()
    return max((base + bits.bit_length() for base, bits in _last_of(spans)), default=0)


def spans_of(fact: Fact) -> Iterator[tuple[int, int]]:
    """What a `settled` fact is about, as (base, bits)."""
    return _read_spans(fact[2])


def parcels_of(fact: Fact, known: dict[str, str]) -> Iterator[Parcel]:
    """What a `returned` fact makes known.  Words that are in `known` already are not kept a second time."""
    _, spans, due_us, deliveries, failures, first_us, attempts, terms = fact
    history = History(deliveries, failures, first_us, tuple(_attempt(known, *attempt) for attempt in attempts))
    shared = PLAIN if tuple(terms) == PLAIN else Terms(*terms)
    for base, bits in _read_spans(spans):
        yield Parcel(base, bits, history, shared, due_us)


def _attempt(
    known: dict[str, str], consumer: str, delivered_us: int, ended_us: int, kind: str, reason: str = ""
) -> Attempt:
    """A million messages may have failed for one reason, each with words of its own."""
    if len(known) >= _KNOWN_MAX:
        known.clear()
    consumer, kind, reason = (known.setdefault(word, word) for word in (consumer, kind, reason))
    return Attempt(consumer, delivered_us, ended_us, kind, reason)


def _write_spans(spans: Iterable[tuple[int, int]]) -> list[Any]:
    written: list[Any] = []
    for base, bits in spans:
        if not bits:
            continue
        if not bits & 1:
            base, bits = normal(base, bits)
        if bits & bits + 1:
            written += (base, bits.to_bytes(bits.bit_length() + 7 >> 3, "little"))
        elif written and isinstance(written[-1], int) and written[-2] + written[-1] == base:
            # Leases are acked in the order they were granted more often than not: one run instead of many.
            written[-1] += bits.bit_length()
        else:
            written += (base, bits.bit_length())
    return written


def _last_of(written: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """As much of spans as it takes to know where they end."""
    for base, size in zip(written[::2], written[1::2], strict=True):
        if isinstance(size, int):
            yield base + size - 1, 1
        else:
            yield base, int.from_bytes(size, "little")


def _read_spans(written: Sequence[Any]) -> Iterator[tuple[int, int]]:
    for base, size in zip(written[::2], written[1::2], strict=True):
        if not isinstance(size, int):
            yield base, int.from_bytes(size, "little")
            continue
        for start in range(base, base + size, _PIECE):
            yield start, (1 << min(_PIECE, base + size - start)) - 1
