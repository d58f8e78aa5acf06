"""The batch: messages that travel, are stored and are served together, byte for byte the same everywhere.

A producer builds a batch, the broker stamps 24 bytes of its header and appends it, consumers and Spark read the same
bytes.  Little-endian, columns instead of rows, so that one message costs no bytecode in the broker, numpy and Arrow can
view the columns in place, and message `i` is found without walking the ones before it.

Header, 64 bytes (`*` = stamped by the broker when it appends)::

     0 u16 magic "MS"        2 u8 version      3 u8 codec          4 u32 length of the whole batch, a multiple of 8
     8 u32 crc of 36..end   12 u32 epoch*     16 u64 base offset*  24 i64 append time, us*     32 u32 crc of 0..32*
    36 u32 count            40 u64 producer id << 16 | epoch       48 i64 base timestamp, us   56 u32 first sequence
    60 u16 columns present  62 u8 priorities present (bit n = lane n)                          63 u8 zero

Two checksums, because two parties write: the producer's covers what it wrote and never changes, the stamp's covers what
the broker patched plus the length and the producer's checksum.  Together they cover every bit.

Behind the header stands the prelude, which answers questions without unpacking anything: the earliest deliver-at (i64)
if there is a DELIVER_AT column, and offset deltas (u32 each) if compaction took messages out (otherwise the offset of
message `i` is base + i).  Then the block, compressed as a whole if the codec says so (see compression.py).
The block is a row of sections, each padded to 8 bytes::

    priority u8*n | deliver-at i64*n | expiry i64*n | timestamp i64*n | key validity bits | key ends u32*(n+1)
    | header ends u32*(n+1) | value validity bits | value ends u32*(n+1) | keys | headers | values

Ends are cumulative from 0: exactly an Arrow offset buffer.  Validity bits are Arrow's too: bit i set = not null.
How the headers of a message are written is in headers.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntFlag
from itertools import accumulate
from struct import Struct
from sys import byteorder
from typing import Final, Required, TypedDict, Unpack

from crc32c import crc32c

from millstream.columns import (
    Buffer,
    check_ends,
    check_priorities,
    check_steps,
    cut_fixed,
    read_validity,
    write_validity,
)
from millstream.compression import RAW_BLOCK_BYTES_MAX, Codec, compress, decompress, decompress_produced
from millstream.errors import BatchDamaged, PayloadTooLarge
from millstream.headers import decode_headers, encode_headers

__all__ = [
    "HEADER_BYTES",
    "PRIORITY_DEFAULT",
    "RAW_BLOCK_BYTES_MAX",
    "Batch",
    "BatchHeader",
    "Buffer",
    "Codec",
    "Columns",
    "assign_producer",
    "batch_next_offset",
    "check_batch",
    "decode_headers",
    "encode_batch",
    "encode_headers",
    "encode_parts",
    "read_header",
    "stamp",
    "verify_batch",
]

assert byteorder == "little", "columns are viewed in place; a big-endian machine would need to swap them"

MAGIC: Final = 0x534D
VERSION: Final = 1
HEADER_BYTES: Final = 64
STAMP_BYTES: Final = 32  # what the stamp's checksum covers
CRC_FROM: Final = 36  # where the producer's checksum starts
PRIORITY_DEFAULT: Final = 2
#: Bounded by the u32 ends and by what a reader must hold at once; far above what fits a frame.
COUNT_MAX: Final = 4_000_000
#: What a producer may put into one: a hundred bytes of zstd could otherwise hold millions, and keep everybody waiting.
PRODUCED_MAX: Final = 100_000

_HEADER: Final = Struct("<HBBIIIQqIIQqIHBB")
_HEAD: Final = Struct("<HBBIIIQqI")  # the 36 bytes before the producer's checksum starts
_TAIL: Final = Struct("<IQqIHBB")  # the 28 bytes of the header that the checksum covers
_STAMP: Final = Struct("<IQq")
_U32: Final = Struct("<I")
_I64: Final = Struct("<q")
_U64: Final = Struct("<Q")
_PADDING: Final = tuple(bytes(n) for n in range(8))
assert _HEADER.size == _HEAD.size + _TAIL.size == HEADER_BYTES
assert _HEAD.size == CRC_FROM


class Columns(IntFlag):
    """Which columns a batch has; zero means plain values and nothing to look into."""

    PRIORITY = 1
    DELIVER_AT = 2
    EXPIRY = 4
    TIMESTAMPS = 8
    KEYS = 16
    KEY_NULLS = 32
    HEADERS = 64
    VALUE_NULLS = 128
    OFFSETS = 256
    #: All values have one size: a hint that lets a reader cut the heap in one call.
    FIXED_VALUES = 512
    #: The batch speaks to the broker's readers, not to users.
    CONTROL = 1024
    #: The headers of some messages speak to the broker: see options.py.
    OPTIONS = 2048


_KNOWN_COLUMNS: Final = int(sum(Columns))
# Plain integers: an IntFlag operation costs a microsecond, which a batch of one would feel.
_PRIORITY, _DELIVER_AT, _EXPIRY, _TIMESTAMPS = 1, 2, 4, 8
_KEYS, _KEY_NULLS, _HEADERS, _VALUE_NULLS = 16, 32, 64, 128
_OFFSETS, _FIXED_VALUES, _OPTIONS = 256, 512, 2048
_NOT_FROM_PRODUCERS: Final = ~_KNOWN_COLUMNS | int(Columns.OFFSETS | Columns.CONTROL)


class BatchHeader:
    """The 64 bytes as fields."""

    __slots__ = (
        "append_time_us",
        "base_offset",
        "base_timestamp_us",
        "codec",
        "count",
        "crc",
        "first_sequence",
        "flags",
        "leader_epoch",
        "length",
        "priorities",
        "producer",
        "stamp_crc",
        "version",
    )

    version: int
    codec: int
    length: int
    crc: int
    leader_epoch: int
    base_offset: int
    append_time_us: int
    stamp_crc: int
    count: int
    producer: int
    base_timestamp_us: int
    first_sequence: int
    flags: int
    priorities: int

    def __init__(self, buffer: Buffer, position: int = 0) -> None:
        (
            magic,
            self.version,
            self.codec,
            self.length,
            self.crc,
            self.leader_epoch,
            self.base_offset,
            self.append_time_us,
            self.stamp_crc,
            self.count,
            self.producer,
            self.base_timestamp_us,
            self.first_sequence,
            self.flags,
            self.priorities,
            _,
        ) = _HEADER.unpack_from(buffer, position)
        if magic != MAGIC:
            raise BatchDamaged(f"no batch starts at byte {position}")
        if self.version != VERSION:
            raise BatchDamaged(f"batch version {self.version} at byte {position} is unknown; this is version {VERSION}")

    @property
    def producer_id(self) -> int:
        return self.producer >> 16

    @property
    def producer_epoch(self) -> int:
        return self.producer & 0xFFFF


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header of a stored batch; raises BatchDamaged unless its stamp proves that it can be believed."""
    if len(buffer) - position < HEADER_BYTES:
        raise BatchDamaged(f"the batch at byte {position} ends inside its header")
    header = BatchHeader(buffer, position)
    if crc32c(memoryview(buffer)[position : position + STAMP_BYTES]) != header.stamp_crc:
        raise BatchDamaged(f"the batch header at byte {position} does not match its checksum")
    if header.length < HEADER_BYTES or header.length & 7:
        raise BatchDamaged(f"the batch at byte {position} claims {header.length} bytes")
    return header


def verify_batch(buffer: Buffer, position: int, header: BatchHeader) -> None:
    """Check the contents of a stored batch, which must be in the buffer whole, against the producer's checksum."""
    end = position + header.length
    if end > len(buffer):
        raise BatchDamaged(f"the batch at byte {position} ends {end - len(buffer)} bytes early")
    if crc32c(memoryview(buffer)[position + CRC_FROM : end]) != header.crc:
        raise BatchDamaged(f"the batch at byte {position} does not match its checksum")


def check_batch(buffer: Buffer, position: int, end: int) -> BatchHeader:
    """Check a batch as it comes from a producer, before it is stamped: framing, checksum, and that its columns add up.

    Columns are looked at as a whole (columns.py), never message by message.  A packed one is unpacked: who reads it
    when it is stored could not get past it if that failed.
    """
    if end - position < HEADER_BYTES:
        raise BatchDamaged("the batch is shorter than its header")
    header = BatchHeader(buffer, position)
    if header.length != end - position or header.length & 7:
        raise BatchDamaged(f"the batch claims {header.length} bytes, but {end - position} arrived")
    if crc32c(memoryview(buffer)[position + CRC_FROM : end]) != header.crc:
        raise BatchDamaged("the batch does not match its checksum")
    count, flags = header.count, header.flags
    if not 0 < count <= PRODUCED_MAX:
        raise BatchDamaged(f"the batch claims {count} messages; it may have 1 to {PRODUCED_MAX}")
    if flags & _NOT_FROM_PRODUCERS:
        raise BatchDamaged(f"the batch has columns that a producer may not send (flags {flags:#x})")
    if not flags & ~_FIXED_VALUES and not header.codec:
        # Plain values, which is what most batches are: the same sum as in _Sections, without the object.
        last_end_at = HEADER_BYTES + 4 * count
        if last_end_at + 4 <= header.length:
            (value_bytes,) = _U32.unpack_from(buffer, position + last_end_at)
            if ((last_end_at + 11) & ~7) + ((value_bytes + 7) & ~7) == header.length:
                if flags:
                    check_steps(buffer, position + HEADER_BYTES, count, value_bytes)
                else:
                    check_ends(buffer, position + HEADER_BYTES, count)
                return header
        raise BatchDamaged("the batch's columns do not add up to its length")
    start = position + HEADER_BYTES + (8 if flags & _DELIVER_AT else 0)
    if header.codec:
        block = decompress_produced(header.codec, memoryview(buffer)[start:end])
        _Sections(block, 0, len(block), count, flags).check(block, count, flags)
    else:
        _Sections(buffer, start, end, count, flags).check(buffer, count, flags)
    return header


def stamp(view: memoryview, position: int, *, base_offset: int, append_time_us: int, leader_epoch: int) -> None:
    """Write the broker's fields into a batch, in place."""
    _STAMP.pack_into(view, position + 12, leader_epoch, base_offset, append_time_us)
    _U32.pack_into(view, position + 32, crc32c(view[position : position + STAMP_BYTES]))


def assign_producer(batch: bytearray, producer: int, first_sequence: int) -> None:
    """Give a batch that is not stamped yet an identity."""
    _U64.pack_into(batch, 40, producer)
    _U32.pack_into(batch, 56, first_sequence)
    _U32.pack_into(batch, 8, crc32c(memoryview(batch)[CRC_FROM:]))


def batch_next_offset(buffer: Buffer, position: int, header: BatchHeader) -> int:
    """The offset after the batch's last message; needs the batch's prelude in the buffer."""
    if not header.flags & _OFFSETS:
        return header.base_offset + header.count
    at = position + HEADER_BYTES + (8 if header.flags & _DELIVER_AT else 0) + 4 * (header.count - 1)
    if at + 4 > len(buffer):
        raise BatchDamaged(f"the batch at byte {position} ends inside its offsets")
    delta: int = _U32.unpack_from(buffer, at)[0]
    return header.base_offset + delta + 1


class _Sections:
    """Where each section of an unpacked block starts; raises BatchDamaged unless they fill the block exactly."""

    __slots__ = (
        "deliver_at",
        "expiry",
        "header_ends",
        "headers",
        "key_ends",
        "key_validity",
        "keys",
        "priority",
        "timestamps",
        "value_bytes",
        "value_ends",
        "value_validity",
        "values",
    )

    def __init__(self, buffer: Buffer, start: int, end: int, count: int, flags: int) -> None:
        eights = 8 * count
        ends = (4 * count + 11) & ~7  # n + 1 numbers of 4 bytes, padded
        bits = ((count + 7 >> 3) + 7) & ~7
        at = start
        # Most batches have none of the four special columns: one test instead of four.
        if flags & 15:
            if flags & _PRIORITY:
                self.priority = at
                at += (count + 7) & ~7
            if flags & _DELIVER_AT:
                self.deliver_at = at
                at += eights
            if flags & _EXPIRY:
                self.expiry = at
                at += eights
            if flags & _TIMESTAMPS:
                self.timestamps = at
                at += eights
        if flags & _KEY_NULLS:
            self.key_validity = at
            at += bits
        if flags & _KEYS:
            self.key_ends = at
            at += ends
        if flags & _HEADERS:
            self.header_ends = at
            at += ends
        if flags & _VALUE_NULLS:
            self.value_validity = at
            at += bits
        self.value_ends = at
        at += ends
        if at > end:
            raise BatchDamaged("the batch's columns are longer than the batch")
        if flags & _KEYS:
            self.keys = at
            at += (_U32.unpack_from(buffer, self.key_ends + 4 * count)[0] + 7) & ~7
        if flags & _HEADERS:
            self.headers = at
            at += (_U32.unpack_from(buffer, self.header_ends + 4 * count)[0] + 7) & ~7
        self.values = at
        self.value_bytes: int = _U32.unpack_from(buffer, self.value_ends + 4 * count)[0]
        if at + ((self.value_bytes + 7) & ~7) != end:
            raise BatchDamaged("the batch's columns do not add up to its length")

    def check(self, block: Buffer, count: int, flags: int) -> None:
        """Raise BatchDamaged unless what stands in the sections makes sense as well."""
        if flags & _PRIORITY:
            check_priorities(memoryview(block)[self.priority : self.priority + count])
        if flags & _KEYS:
            check_ends(block, self.key_ends, count)
        if flags & _HEADERS:
            check_ends(block, self.header_ends, count)
        if flags & _FIXED_VALUES:
            check_steps(block, self.value_ends, count, self.value_bytes)
        else:
            check_ends(block, self.value_ends, count)


class Batch:
    """A stored batch opened for reading.  Columns are unpacked when asked for, all messages at once."""

    __slots__ = ("_prelude", "base_offset", "block", "count", "header", "next_offset", "sections")

    def __init__(self, header: BatchHeader, block: Buffer, at: _Sections, offsets: array[int] | None) -> None:
        self.header = header
        self.count = header.count
        self.base_offset = header.base_offset
        self.next_offset = header.base_offset + (header.count if offsets is None else offsets[-1] + 1)
        self.block = block
        self.sections = at
        self._prelude = offsets

    @classmethod
    def parse(cls, buffer: Buffer, position: int = 0, *, verify: bool = True) -> Batch:
        """Open the batch at a position.  Raises BatchDamaged; with verify=False both checksums are taken as checked."""
        header = read_header(buffer, position) if verify else BatchHeader(buffer, position)
        if verify:
            verify_batch(buffer, position, header)
        end = position + header.length
        start = position + HEADER_BYTES
        flags = header.flags
        if end > len(buffer) or header.count > COUNT_MAX or not header.count or flags & ~_KNOWN_COLUMNS:
            raise BatchDamaged(f"the batch at byte {position} is not one that this version of Millstream can read")
        if flags & _DELIVER_AT:
            start += 8
        offsets = None
        if flags & _OFFSETS:
            size = 4 * header.count
            offsets = array("I", bytes(memoryview(buffer)[start : min(start + size, end)]))
            start += (size + 7) & ~7
        if header.codec:
            block: Buffer = decompress(header.codec, memoryview(buffer)[start:end])
            sections = _Sections(block, 0, len(block), header.count, flags)
        else:
            block = buffer
            sections = _Sections(buffer, start, end, header.count, flags)
        return cls(header, block, sections, offsets)

    def check(self) -> None:
        """Raise BatchDamaged if some column cannot be read, which a broker would not have stored."""
        self.sections.check(self.block, self.count, self.header.flags)

    @property
    def append_time_us(self) -> int:
        return self.header.append_time_us

    @property
    def earliest_deliver_at_us(self) -> int | None:
        """The first due time among the delayed messages of this batch."""
        due = [at for at in self.deliver_at_us() or () if at]
        return min(due) if due else None

    def offsets(self) -> Sequence[int]:
        base = self.base_offset
        if self._prelude is None:
            return range(base, base + self.count)
        return [base + delta for delta in self._prelude]

    def values(self) -> list[bytes | None]:
        """All values; None where the value is null (a tombstone)."""
        at = self.sections
        if self.header.flags & _FIXED_VALUES and at.value_bytes:
            values = cut_fixed(self.block, at.values, at.value_bytes, self.count)
        else:
            values = self._cut(at.value_ends, at.values)
        return self._with_nulls(values, at.value_validity) if self.header.flags & _VALUE_NULLS else values

    def keys(self) -> list[bytes | None] | None:
        """All keys, or None when no message of the batch has one."""
        if not self.header.flags & _KEYS:
            return None
        keys = self._cut(self.sections.key_ends, self.sections.keys)
        return self._with_nulls(keys, self.sections.key_validity) if self.header.flags & _KEY_NULLS else keys

    def raw_headers(self) -> list[bytes | None] | None:
        """The headers of each message as stored (see decode_headers), or None when no message has any."""
        if not self.header.flags & _HEADERS:
            return None
        return self._cut(self.sections.header_ends, self.sections.headers)

    def timestamps_us(self) -> list[int] | None:
        """When each message was made, or None when all share the header's base timestamp."""
        return self._longs(self.sections.timestamps) if self.header.flags & _TIMESTAMPS else None

    def deliver_at_us(self) -> list[int] | None:
        return self._longs(self.sections.deliver_at) if self.header.flags & _DELIVER_AT else None

    def expiry_us(self) -> list[int] | None:
        return self._longs(self.sections.expiry) if self.header.flags & _EXPIRY else None

    def priorities(self) -> list[int] | None:
        if not self.header.flags & _PRIORITY:
            return None
        column = bytes(memoryview(self.block)[self.sections.priority : self.sections.priority + self.count])
        check_priorities(column)
        return list(column)

    def _cut(self, ends_at: int, heap_at: int) -> list[bytes | None]:
        count = self.count
        check_ends(self.block, ends_at, count)
        ends = array("I", bytes(memoryview(self.block)[ends_at : ends_at + 4 * count + 4])).tolist()
        # One copy of the heap, then slices of bytes: slicing a memoryview per message costs three times as much.
        heap = bytes(memoryview(self.block)[heap_at : heap_at + ends[count]])
        return list(map(heap.__getitem__, map(slice, ends, ends[1:])))

    def _with_nulls(self, values: list[bytes | None], validity_at: int) -> list[bytes | None]:
        marks = read_validity(self.block, validity_at, self.count)
        return [value if valid else None for value, valid in zip(values, marks, strict=True)]

    def _longs(self, at: int) -> list[int]:
        return array("q", bytes(memoryview(self.block)[at : at + 8 * self.count])).tolist()


class BatchColumns(TypedDict, total=False):
    """What `encode_parts` can be told besides the values."""

    base_timestamp_us: Required[int]
    keys: Sequence[bytes | None] | None
    headers: Sequence[bytes] | None
    priorities: Sequence[int] | None
    deliver_at_us: Sequence[int] | None
    expiry_us: Sequence[int] | None
    timestamps_us: Sequence[int] | None
    offsets: Sequence[int] | None
    options: bool
    producer: int
    first_sequence: int
    codec: int


def encode_batch(values: Sequence[bytes | None], **columns: Unpack[BatchColumns]) -> bytearray:
    """A batch ready to be stamped and appended.  `headers` are as encode_headers makes them, `offsets` start at 0."""
    head, tail = encode_parts(values, **columns)
    return bytearray(head) + tail


def encode_parts(
    values: Sequence[bytes | None],
    *,
    base_timestamp_us: int,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[bytes] | None = None,
    priorities: Sequence[int] | None = None,
    deliver_at_us: Sequence[int] | None = None,
    expiry_us: Sequence[int] | None = None,
    timestamps_us: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    options: bool = False,
    producer: int = 0,
    first_sequence: int = 0,
    codec: int = 0,
) -> tuple[bytes, bytes]:
    """As encode_batch, in two pieces that can be handed to one gathering write without copying the messages again."""
    count = len(values)
    assert count, "a batch holds at least one message"
    flags = _OPTIONS if options else 0
    lanes = 1 << PRIORITY_DEFAULT
    block: list[bytes] = []
    prelude = b""
    if priorities is not None:
        flags |= _PRIORITY
        lanes = 0
        for priority in set(priorities):
            lanes |= 1 << priority
        block += (bytes(priorities), _PADDING[-count & 7])
    if deliver_at_us is not None:
        flags |= _DELIVER_AT
        prelude = _I64.pack(min(filter(None, deliver_at_us), default=0))
        block.append(array("q", deliver_at_us).tobytes())
    if expiry_us is not None:
        flags |= _EXPIRY
        block.append(array("q", expiry_us).tobytes())
    if timestamps_us is not None:
        flags |= _TIMESTAMPS
        block.append(array("q", timestamps_us).tobytes())
    heaps: list[bytes] = []
    if keys is not None:
        flags |= _KEYS
        if None in keys:
            flags |= _KEY_NULLS
            block.append(_validity(keys))
        _add_heap(block, heaps, _without_nulls(keys))
    if headers is not None:
        flags |= _HEADERS
        _add_heap(block, heaps, headers)
    plain: Sequence[bytes]
    try:
        lengths = list(map(len, values))  # type: ignore[arg-type]
        plain = values  # type: ignore[assignment]
    except TypeError:  # None has no length: some value is null, which is rare enough to be found out this way
        flags |= _VALUE_NULLS
        block.append(_validity(values))
        plain = _without_nulls(values)
        lengths = list(map(len, plain))
    size = sum(lengths)
    length = lengths[0]
    if length and lengths.count(length) == count and not flags & _VALUE_NULLS:
        flags |= _FIXED_VALUES
        block.append(array("I", range(0, size + 1, length)).tobytes())
    else:
        block.append(array("I", accumulate(lengths, initial=0)).tobytes())
    if not count & 1:
        block.append(_PADDING[4])
    if size > RAW_BLOCK_BYTES_MAX:
        raise PayloadTooLarge(f"a batch holds {RAW_BLOCK_BYTES_MAX} bytes at most, not {size}")
    if offsets is not None:
        flags |= _OFFSETS
        prelude += array("I", offsets).tobytes() + _PADDING[4 * (count & 1)]
    fixed = _TAIL.pack(count, producer, base_timestamp_us, first_sequence, flags, lanes, 0)
    if codec:
        packed = compress(codec, b"".join((*block, *heaps, *plain, _PADDING[-size & 7])))
        tail = b"".join((fixed, prelude, packed, _PADDING[-len(packed) & 7]))
    else:
        tail = b"".join((fixed, prelude, *block, *heaps, *plain, _PADDING[-size & 7]))
    return _HEAD.pack(MAGIC, VERSION, codec, CRC_FROM + len(tail), crc32c(tail), 0, 0, 0, 0), tail


def _add_heap(block: list[bytes], heaps: list[bytes], items: Sequence[bytes]) -> None:
    ends = array("I", accumulate(map(len, items), initial=0))
    heaps.extend(items)
    heaps.append(_PADDING[-ends[-1] & 7])
    block.append(ends.tobytes())
    if not len(items) & 1:
        block.append(_PADDING[4])


def _without_nulls(items: Sequence[bytes | None]) -> Sequence[bytes]:
    return [item or b"" for item in items] if None in items else items  # type: ignore[return-value]


def _validity(items: Sequence[bytes | None]) -> bytes:
    return write_validity(bytes([item is not None for item in items]))
