"""Which batches each producer has stored last, so that a retry is answered and not stored twice.

A producer with an identity numbers its messages (u32, wrapping around) per partition.  A batch is accepted when it
continues its producer's sequence, recognised as a repetition when it equals one of the last sixteen, and refused
otherwise.  Sixteen, because no client has more requests in flight on one connection per partition.

An identity is an id and an epoch; a newer epoch fences the older one and starts again at sequence 0.  A producer that
is not known here (new, or forgotten) may start anywhere: after a day of silence there is no retry left to recognise.
Silence is counted by the appends of others: while the broker is down nobody is silent, and a clock that is set ahead
makes nobody so at once.  Whoever has to repeat something after that, above all the broker itself, is still known.

Snapshot file: `u32 magic | u32 crc of the rest | u64 next offset | u32 producers | u32 zero`, then per producer
`u64 id and epoch | i64 last append time | u32 batches | u32 zero` and per batch
`u32 first sequence | u32 last sequence | u64 base offset | i64 append time`.  Producers stand in the order of their
last append, so that a table read back forgets in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from struct import Struct, error
from typing import Final, NamedTuple

from crc32c import crc32c

from millstream.errors import OutOfSequence, ProducerFenced
from millstream.records import BatchHeader

__all__ = ["Duplicate", "ProducerTable", "follows"]

_MAGIC: Final = 0x5250534D
_HEAD: Final = Struct("<II")
_TABLE: Final = Struct("<QII")
_PRODUCER: Final = Struct("<QqII")
_BATCH: Final = Struct("<IIQq")
_SEQUENCE: Final = 0xFFFF_FFFF
_BATCHES_MAX: Final = 16
_PRODUCERS_MAX: Final = 10_000
_IDLE_US_MAX: Final = 24 * 3600 * 1_000_000
#: Time in which nobody appends anything counts for so much at most.
_PAUSE_US_MAX: Final = 20 * 3600 * 1_000_000
_tuple: Final = tuple.__new__  # a named tuple without the detour through its constructor: one is made per batch


class Duplicate(NamedTuple):
    """The batch is stored already, here."""

    base_offset: int
    append_time_us: int


class _Stored(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int
    append_time_us: int


@dataclass(slots=True)
class _Producer:
    epoch: int
    batches: deque[_Stored]
    last_append_us: int


def follows(header: BatchHeader, before: BatchHeader) -> bool:
    """Whether a batch is the next of its producer after another."""
    return header.first_sequence == _next_sequence(before)


def _next_sequence(header: BatchHeader) -> int:
    return (header.first_sequence + header.count) & _SEQUENCE


def _precedes(sequence: int, other: int) -> bool:
    return 0 < (other - sequence) & _SEQUENCE <= _SEQUENCE >> 1


class ProducerTable:
    """The producers of one partition.  Looks with `check`, changes only with `record`, live and in recovery alike."""

    def __init__(self, *, producers_max: int = _PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._producers: dict[int, _Producer] = {}  # in the order of their last append
        self._newest: tuple[int, _Producer] | None = None  # the last of them, with its identity
        self._last_us = 0  # when something was appended last

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, header: BatchHeader, after: BatchHeader | None = None) -> Duplicate | None:
        """None when the batch may be appended, Duplicate when it is stored already.

        `after` is a batch of the same producer that waits for the same append, and so is not recorded yet.
        Raises OutOfSequence when a batch before this one is missing, ProducerFenced when the producer's epoch is over.
        """
        identity = header.producer
        if not identity:
            return None
        if after is not None and after.producer == identity:
            return self._follow(header, _next_sequence(after), ())
        known = self._producers.get(identity >> 16)
        if known is None:
            return None
        epoch = identity & 0xFFFF
        if epoch == known.epoch and known.batches[-1][1] + 1 == header.first_sequence:
            return None  # as it nearly always is; the rest takes care of wrap-around, repetitions and gaps
        if epoch == known.epoch:
            return self._follow(header, (known.batches[-1].last_sequence + 1) & _SEQUENCE, known.batches)
        if epoch < known.epoch:
            raise ProducerFenced(f"producer {identity >> 16} has epoch {known.epoch} by now, this batch has {epoch}")
        return self._follow(header, 0, ())

    def is_past(self, header: BatchHeader) -> bool:
        """Whether a batch comes before all that is remembered of its producer: it was stored, nobody knows where."""
        known = self._same(header)
        return known is not None and _precedes(header.first_sequence, known.batches[0].first_sequence)

    def has_passed(self, header: BatchHeader) -> bool:
        """Whether its producer has a later batch here, so that nothing more can be stored under its number."""
        known = self._same(header)
        return known is not None and _precedes(header.first_sequence, known.batches[-1].first_sequence)

    def _same(self, header: BatchHeader) -> _Producer | None:
        known = self._producers.get(header.producer >> 16)
        return known if known is not None and known.epoch == header.producer & 0xFFFF else None

    def _follow(self, header: BatchHeader, expected: int, batches: deque[_Stored] | tuple[()]) -> Duplicate | None:
        first = header.first_sequence
        if first == expected:
            return None
        last = (first + header.count - 1) & _SEQUENCE
        for stored in reversed(batches):
            if stored.first_sequence == first and stored.last_sequence == last:
                return Duplicate(stored.base_offset, stored.append_time_us)
        raise OutOfSequence(f"producer {header.producer >> 16} sent sequence {first}, expected {expected}")

    def record(self, header: BatchHeader, base_offset: int, append_time_us: int) -> None:
        """Note a batch that was appended.  Call it for every batch, and before the next append, which may snapshot."""
        identity = header.producer
        if not identity:
            return
        if append_time_us > self._last_us:
            if append_time_us - self._last_us > _PAUSE_US_MAX:
                self._excuse(append_time_us)
            self._last_us = append_time_us
        first = header.first_sequence
        stored = _tuple(_Stored, (first, first + header.count - 1 & _SEQUENCE, base_offset, append_time_us))
        newest = self._newest
        if newest is not None and newest[0] == identity:
            # The same producer again: nothing moves in the order of last appends.
            known = newest[1]
            known.batches.append(stored)
            if append_time_us > known.last_append_us:  # what repeats a message has the time of that
                known.last_append_us = append_time_us
            return
        producers = self._producers
        found = producers.pop(identity >> 16, None)
        if found is None or found.epoch != identity & 0xFFFF:
            found = _Producer(identity & 0xFFFF, deque(maxlen=_BATCHES_MAX), append_time_us)
        found.batches.append(stored)
        found.last_append_us = max(found.last_append_us, append_time_us)
        producers[identity >> 16] = found
        self._newest = (identity, found)
        self.forget_idle(append_time_us)

    def _excuse(self, now_us: int) -> None:
        """Do not count a long time in which nothing at all was appended as silence of the producers known so far."""
        excused_us = now_us - self._last_us - _PAUSE_US_MAX
        if excused_us > 0:
            for known in self._producers.values():
                known.last_append_us += excused_us

    def forget_idle(self, now_us: int) -> None:
        """Drop producers that have been silent for a day, and the longest silent ones beyond the limit."""
        producers = self._producers
        while producers:
            oldest = next(iter(producers))
            if len(producers) <= self._producers_max and producers[oldest].last_append_us >= now_us - _IDLE_US_MAX:
                return
            del producers[oldest]
            self._newest = None

    def merge(self, newer: ProducerTable, *, from_offset: int) -> None:
        """Add what another table knows of batches at or behind an offset; this table knows all before it."""
        added = {
            producer_id: batches
            for producer_id, seen in newer._producers.items()
            if (batches := [stored for stored in seen.batches if stored.base_offset >= from_offset])
        }
        if not added:
            return
        self._excuse(min(batches[0].append_time_us for batches in added.values()))
        for producer_id, batches in added.items():
            seen = newer._producers[producer_id]
            known = self._producers.pop(producer_id, None)
            if known is None or known.epoch != seen.epoch:
                known = _Producer(seen.epoch, deque(maxlen=_BATCHES_MAX), 0)
            known.batches.extend(batches)
            known.last_append_us = seen.last_append_us
            self._producers[producer_id] = known
        self._newest = None
        self._last_us = max(self._last_us, newer._last_us)
        self.forget_idle(self._last_us)

    def encode(self, next_offset: int) -> bytes:
        """A snapshot of the table as it is after all batches below an offset."""
        parts = [_TABLE.pack(next_offset, len(self._producers), 0)]
        for producer_id, known in self._producers.items():
            identity = producer_id << 16 | known.epoch
            parts.append(_PRODUCER.pack(identity, known.last_append_us, len(known.batches), 0))
            parts += (_BATCH.pack(*stored) for stored in known.batches)
        body = b"".join(parts)
        return _HEAD.pack(_MAGIC, crc32c(body)) + body

    @classmethod
    def decode(cls, data: bytes, next_offset: int) -> ProducerTable | None:
        """The inverse of `encode`; None unless the snapshot is whole and was taken at this offset.

        One of a newer version has another magic, and then what it knew is found in the log again, as far as that goes
        back.
        """
        if len(data) < _HEAD.size:
            return None
        magic, checksum = _HEAD.unpack_from(data)
        body = memoryview(data)[_HEAD.size :]
        if magic != _MAGIC or checksum != crc32c(body):
            return None
        table = cls()
        try:
            taken_at, count, _ = _TABLE.unpack_from(body)
            at = _TABLE.size
            for _ in range(count):
                identity, last_append_us, batches, _ = _PRODUCER.unpack_from(body, at)
                at += _PRODUCER.size
                end = at + batches * _BATCH.size
                stored = map(_Stored._make, _BATCH.iter_unpack(body[at:end]))
                known = _Producer(identity & 0xFFFF, deque(stored, maxlen=_BATCHES_MAX), last_append_us)
                table._producers[identity >> 16] = known
                table._last_us = max(table._last_us, last_append_us)
                at = end
        except error:  # pragma: no cover - only a snapshot of an unknown make passes its checksum and ends early
            return None
        return table if taken_at == next_offset else None
