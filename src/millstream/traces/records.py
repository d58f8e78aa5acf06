"""Records of what happened to messages, as they are stored: one for all messages that it happened to together.

A record names its messages by the uid of their partition and a bitmap of offsets, so that a nack of a thousand costs
what a nack of one costs.  Of the first of them it also says when they were stored, their key and their trace: that is
what people look for, and by the time they do the messages may be gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from millstream.queues.ranges import offsets_of

__all__ = ["FAILURES", "KINDS", "Kind", "Record", "Search", "Subject", "decode_record", "encode_record", "marker"]

Kind: TypeAlias = Literal[
    "published",
    "stored",
    "scheduled",
    "moved",
    "fired",
    "cancelled",
    "leased",
    "acked",
    "nacked",
    "timeout",
    "returned",
    "rejected",
    "dead_lettered",
    "expired",
    "evicted",
    "purged",
    "replayed",
    "waiting",
]
#: All of them, in the order in which they happen if they happen at the same time.
KINDS: Final[tuple[str, ...]] = get_args(Kind)
#: What somebody who looks for trouble wants to see.
FAILURES: Final = frozenset(("nacked", "timeout", "returned", "rejected", "dead_lettered", "expired", "evicted"))


class Subject(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One of the messages of a record."""

    offset: int
    append_ms: int
    key: bytes | None = None
    #: 16 bytes; None = it came without one.
    trace: bytes | None = None


class Record(msgspec.Struct, array_like=True):
    """Something that happened to some messages of one partition at one time."""

    kind: Kind
    time_ms: int
    #: The partition's uid, as `marker` makes it.
    place: bytes
    #: Bit i of `bits`, a little-endian number, stands for `base` + i.
    base: int
    bits: bytes
    group: str = ""
    consumer: str = ""
    #: When they were leased, of what ends a lease; otherwise 0.
    since_ms: int = 0
    error: str = ""
    note: str = ""
    #: The id of another message.
    link: str = ""
    #: The first of the messages; all of them, unless they are too many.
    subjects: Sequence[Subject] = ()

    def has(self, offset: int) -> bool:
        place = offset - self.base
        return 0 <= place < len(self.bits) * 8 and bool(self.bits[place >> 3] >> (place & 7) & 1)

    @property
    def mask(self) -> int:
        return int.from_bytes(self.bits, "little")

    def offsets(self) -> Iterable[int]:
        return offsets_of(self.base, self.mask)

    @property
    def messages(self) -> int:
        return self.mask.bit_count()


_decoder: Final = msgspec.msgpack.Decoder(Record)
encode_record: Final = msgspec.msgpack.Encoder().encode


def decode_record(data: bytes) -> Record:
    return _decoder.decode(data)


def marker(uid: int) -> bytes:
    """How a partition is named in records: always these four bytes, so that they can be searched for."""
    return uid.to_bytes(4)


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody looks for; all conditions that are set must hold."""

    #: Partitions, as `marker` makes them; None = any.
    places: frozenset[bytes] | None = None
    offset: int | None = None
    key: bytes | None = None
    trace: bytes | None = None
    from_ms: int = 0
    #: 0 = no limit.
    until_ms: int = 0
    failures_only: bool = False

    def may_match(self, data: bytes) -> bool:
        """Whether there may be something in some bytes that are, or hold, encoded records."""
        if self.trace is not None and self.trace not in data:
            return False
        if self.key is not None and self.key not in data:
            return False
        # Looking for many things takes longer than reading.
        return self.places is None or len(self.places) > _NEEDLES_MAX or any(place in data for place in self.places)

    def matches(self, record: Record) -> bool:
        if self.places is not None and record.place not in self.places:
            return False
        if self.offset is not None and not record.has(self.offset):
            return False
        if self.failures_only and record.kind not in FAILURES:
            return False
        return record.time_ms >= self.from_ms and not 0 < self.until_ms <= record.time_ms

    def subjects(self, record: Record) -> Iterator[Subject]:
        """The messages of a record that are looked for."""
        for subject in record.subjects:
            if self.offset not in (None, subject.offset) or self.key not in (None, subject.key):
                continue
            if self.trace in (None, subject.trace):
                yield subject

    def others(self, record: Record) -> int:
        """How many messages that the record does not know by name there are, if those may be looked for."""
        if self.key is not None or self.trace is not None:
            return 0
        if any(subject.offset == self.offset for subject in record.subjects):
            return 0
        return record.messages - len(record.subjects)


_NEEDLES_MAX: Final = 16
