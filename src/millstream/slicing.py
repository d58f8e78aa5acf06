"""The batches of a read, and parts of a batch, as stored batches: what a queue hands out when a lease ends inside one.

Offsets, times and everything else about a message stay as they are; both checksums are made anew, so that a reader
checks a part exactly as it checks a whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress
from struct import Struct
from typing import Final

from crc32c import crc32c

from millstream.columns import check_ascending, check_priorities, marks_of, read_validity, write_validity
from millstream.records import (
    CRC_FROM,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Batch,
    BatchHeader,
    Buffer,
    Columns,
    stamp,
)

__all__ = ["batches_of", "parts_of", "select_messages", "slice_batch"]

_FIXED: Final = int(Columns.FIXED_VALUES)
_OFFSETS: Final = int(Columns.OFFSETS)
_PRIORITY: Final = int(Columns.PRIORITY)
_EXPIRY: Final = int(Columns.EXPIRY)
_TIMESTAMPS: Final = int(Columns.TIMESTAMPS)
_KEYS: Final = int(Columns.KEYS)
_HEADERS: Final = int(Columns.HEADERS)
_DELIVER_AT: Final = int(Columns.DELIVER_AT)
_KEY_NULLS: Final = int(Columns.KEY_NULLS)
_VALUE_NULLS: Final = int(Columns.VALUE_NULLS)
_PADDING: Final = tuple(bytes(n) for n in range(8))
#: A header in which everything is still to be filled in.
_BLANK: Final = Struct("<HBB").pack(MAGIC, VERSION, 0) + bytes(HEADER_BYTES - 4)
_TAIL: Final = Struct("<IQqIHBB")  # count, producer, base timestamp, first sequence, columns, priorities, zero
_U32: Final = Struct("<I")
_I64: Final = Struct("<q")
_LENGTH_AND_CRC: Final = Struct("<II")
_NUMBERS: Final = tuple(range(4096))
#: What a part of a batch has at most, unless a single message is larger.
_PART_MESSAGES: Final = 2000
_PART_BYTES: Final = 2 * 1024 * 1024


def batches_of(buffers: Iterable[Buffer]) -> Iterator[Batch]:
    """The batches of a read, one after the other.  Checksums are not looked at again: whoever made the read did."""
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            batch = Batch.parse(buffer, at, verify=False)
            at += batch.header.length
            yield batch


def parts_of(buffers: Iterable[Buffer], first: int = 0) -> Iterator[Batch]:
    """The batches of a read from the one with an offset on, large ones in parts: whoever pauses holds one of them.

    A batch of 10 MiB may be 64 MiB when it is unpacked, and twice that when it is cut into messages.
    """
    for buffer in buffers:
        view, at = memoryview(buffer), 0
        while at < len(view):
            header = BatchHeader(view, at)
            yield from _parts(view[at : at + header.length], first)
            at += header.length


def _parts(batch: Buffer, first: int) -> Iterator[Batch]:
    whole = Batch.parse(batch, verify=False)
    count, place, is_large = whole.count, bisect_left(whole.offsets(), first), len(whole.block) > _PART_BYTES
    if count <= _PART_MESSAGES and not is_large:
        yield whole
        return
    if whole.header.codec and not is_large:
        batch = select_messages(whole, (1 << count) - 1)
    del whole
    step = _PART_MESSAGES
    while place < count:
        # What is large and compressed is unpacked again for each part, which is what the memory costs.
        part = slice_batch(batch, place, min(place + step, count))
        if len(part) > _PART_BYTES and step > 1:
            step //= 2
            continue
        yield Batch.parse(part, verify=False)
        place += step
        if len(part) < _PART_BYTES // 4:
            step = min(step * 2, _PART_MESSAGES)


def slice_batch(batch: Buffer, first: int, last: int) -> bytes:
    """The messages `first` up to but not including `last`, which are places in the batch, not offsets."""
    header = BatchHeader(batch)
    assert 0 <= first < last <= header.count, "a part has at least one message, and no more than the whole"
    if header.flags & ~_FIXED or header.codec:
        return select_messages(batch, (1 << last) - (1 << first))
    view = memoryview(batch)
    count = last - first
    heap_at = HEADER_BYTES + (4 * header.count + 11 & ~7)
    column = view[HEADER_BYTES + 4 * first : HEADER_BYTES + 4 * last + 4]
    ends = column.cast("I")
    start, stop = ends[0], ends[count]
    if header.flags & _FIXED:
        # Values of one size: the ends of any `count` of them are those of the first ones.
        new_ends: Buffer = view[HEADER_BYTES : HEADER_BYTES + 4 * count + 4]
    else:
        check_ascending(column)
        new_ends = array("I", [end - start for end in ends]).tobytes()
    part = bytearray(view[:HEADER_BYTES])
    part += new_ends
    part += bytes(-len(part) & 7)
    part += view[heap_at + start : heap_at + stop]
    part += bytes(-len(part) & 7)
    _U32.pack_into(part, 36, count)
    _U32.pack_into(part, 56, header.first_sequence + first & 0xFFFF_FFFF)
    return _finish(part, header, header.base_offset + first)


def select_messages(batch: Buffer | Batch, bits: int) -> bytes:
    """The messages of a batch whose places are the set bits, of which there is one at least; not compressed."""
    whole = batch if isinstance(batch, Batch) else Batch.parse(batch, verify=False)
    header = whole.header
    first = (bits & -bits).bit_length() - 1
    bits >>= first
    count, span = bits.bit_count(), bits.bit_length()
    # From here on places count from the first message that is wanted.
    places: Sequence[int] = range(span) if span == count else _places(bits)
    deltas = places
    base = whole.base_offset + first
    if header.flags & _OFFSETS:
        offsets = whole.offsets()[first : first + span]
        base = offsets[0]
        deltas = [offsets[place] - base for place in places]
    at, block = whole.sections, memoryview(whole.block)
    flags, lanes = header.flags & ~(_OFFSETS | _KEY_NULLS | _VALUE_NULLS), header.priorities
    sections: list[Buffer] = [_BLANK]
    due = b""
    if flags & _DELIVER_AT:
        due = _times(block, at.deliver_at + 8 * first, places)
        sections.append(_I64.pack(min(filter(None, memoryview(due).cast("q")), default=0)))
    if deltas[-1] >= count:
        flags |= _OFFSETS
        sections += (array("I", deltas).tobytes(), _PADDING[4 * (count & 1)])
    if flags & _PRIORITY:
        column = bytes(block[at.priority + first : at.priority + first + span])
        chosen = bytes([column[place] for place in places])
        check_priorities(chosen)
        lanes = 1 << chosen[0]
        if chosen.count(chosen[0]) != count:
            lanes = sum(1 << lane for lane in set(chosen))
        sections += (chosen, _PADDING[-count & 7])
    sections.append(due)
    if flags & _EXPIRY:
        sections.append(_times(block, at.expiry + 8 * first, places))
    if flags & _TIMESTAMPS:
        sections.append(_times(block, at.timestamps + 8 * first, places))
    heaps: list[Buffer] = []
    if flags & _KEYS:
        if header.flags & _KEY_NULLS and _cut_nulls(block, at.key_validity, first, places, sections):
            flags |= _KEY_NULLS
        _cut(block, at.key_ends, at.keys, first, places, sections, heaps)
    if flags & _HEADERS:
        _cut(block, at.header_ends, at.headers, first, places, sections, heaps)
    if header.flags & _VALUE_NULLS and _cut_nulls(block, at.value_validity, first, places, sections):
        flags |= _VALUE_NULLS
    size = at.value_bytes // whole.count if flags & _FIXED else 0
    _cut(block, at.value_ends, at.values, first, places, sections, heaps, size)
    part = bytearray().join(sections + heaps)
    _TAIL.pack_into(
        part,
        CRC_FROM,
        count,
        header.producer,
        header.base_timestamp_us,
        header.first_sequence + first & 0xFFFF_FFFF,
        flags,
        lanes,
        0,
    )
    return _finish(part, header, base)


def _places(bits: int) -> list[int]:
    """The numbers of the set bits."""
    marks = marks_of(bits)
    # Numbers that exist cost half of what a range makes of them.
    return list(compress(_NUMBERS if len(marks) <= len(_NUMBERS) else range(len(marks)), marks))


def _times(block: memoryview, at: int, places: Sequence[int]) -> bytes:
    column = block[at : at + 8 * places[-1] + 8].cast("q")
    return array("q", [column[place] for place in places]).tobytes()


def _cut_nulls(block: memoryview, validity_at: int, first: int, places: Sequence[int], sections: list[Buffer]) -> bool:
    """Which of some items of a column are null; nothing is added if none is."""
    span = places[-1] + 1
    marks = read_validity(block, validity_at, span, first)
    if len(places) < span:
        marks = bytes([marks[place] for place in places])
    if 0 not in marks:
        return False
    sections.append(write_validity(marks))
    return True


def _cut(
    block: memoryview,
    ends_at: int,
    heap_at: int,
    first: int,
    places: Sequence[int],
    sections: list[Buffer],
    heaps: list[Buffer],
    size: int = 0,
) -> None:
    """The ends and bytes of some items of a column from the item `first` on, each of `size` bytes unless that is 0.

    Of those that are not wanted next to nothing is looked at.
    """
    chosen, span = len(places), places[-1] + 1
    column = block[ends_at + 4 * first : ends_at + 4 * (first + span) + 4]
    if not size:
        check_ascending(column)
    ends = column.cast("I")
    start, stop = ends[0], ends[span]
    # Where all have one size, or the first ones are wanted, the ends are those of the first ones.
    new_ends: Buffer = block[ends_at : ends_at + 4 * chosen + 4]
    if span == chosen:
        heaps.append(block[heap_at + start : heap_at + stop])
        if first and not size:
            new_ends = array("I", [end - start for end in ends.tolist()]).tobytes()
    else:
        # Slices of bytes, as those of a memoryview cost three times as much.
        heap = bytes(block[heap_at + start : heap_at + stop])
        if size:
            items = [heap[at : at + size] for at in [place * size for place in places]]
            stop = start + size * chosen
        else:
            known = ends.tolist() if 4 * chosen > span else ends
            items = [heap[known[place] - start : known[place + 1] - start] for place in places]
            new_ends = array("I", accumulate(map(len, items), initial=0)).tobytes()
            stop = start + sum(map(len, items))
        heaps += items
    sections.append(new_ends)
    if not chosen & 1:
        sections.append(_PADDING[4])
    heaps.append(_PADDING[start - stop & 7])


def _finish(part: bytearray, header: BatchHeader, base_offset: int) -> bytes:
    with memoryview(part) as view:
        _LENGTH_AND_CRC.pack_into(view, 4, len(part), crc32c(view[CRC_FROM:]))
        stamp(
            view,
            0,
            base_offset=base_offset,
            append_time_us=header.append_time_us,
            leader_epoch=header.leader_epoch,
        )
    return bytes(part)
