"""Parts of a stored batch, as stored batches: what a queue hands out when a lease ends in the middle of one.

Offsets, times and everything else about a message stay as they are; both checksums are made anew, so that a reader
checks a part exactly as it checks a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from typing import Final, TypeVar

from crc32c import crc32c

from millstream.records import (
    CRC_FROM,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Batch,
    BatchHeader,
    Buffer,
    Columns,
    encode_batch,
    stamp,
)

__all__ = ["select_messages", "slice_batch"]

T = TypeVar("T")

_FIXED: Final = int(Columns.FIXED_VALUES)
_OPTIONS: Final = int(Columns.OPTIONS)
_OFFSETS: Final = int(Columns.OFFSETS)
_PRIORITY: Final = int(Columns.PRIORITY)
_EXPIRY: Final = int(Columns.EXPIRY)
_TIMESTAMPS: Final = int(Columns.TIMESTAMPS)
_KEYS: Final = int(Columns.KEYS)
_HEADERS: Final = int(Columns.HEADERS)
_UNUSUAL: Final = int(Columns.DELIVER_AT | Columns.KEY_NULLS | Columns.VALUE_NULLS)
_PADDING: Final = tuple(bytes(n) for n in range(8))
#: A header in which everything is still to be filled in.
_BLANK: Final = Struct("<HBB").pack(MAGIC, VERSION, 0) + bytes(HEADER_BYTES - 4)
_TAIL: Final = Struct("<IQqIHBB")  # count, producer, base timestamp, first sequence, columns, priorities, zero
_U32: Final = Struct("<I")
_LENGTH_AND_CRC: Final = Struct("<II")


def slice_batch(batch: Buffer, first: int, last: int) -> bytes:
    """The messages `first` up to but not including `last`, which are places in the batch, not offsets."""
    header = BatchHeader(batch)
    assert 0 <= first < last <= header.count, "a part has at least one message, and no more than the whole"
    if header.flags & ~_FIXED or header.codec:
        return select_messages(batch, range(first, last))
    view = memoryview(batch)
    count = last - first
    heap_at = HEADER_BYTES + (4 * header.count + 11 & ~7)
    ends = view[HEADER_BYTES + 4 * first : HEADER_BYTES + 4 * last + 4].cast("I")
    start, stop = ends[0], ends[count]
    if header.flags & _FIXED:
        # Values of one size: the ends of any `count` of them are those of the first ones.
        new_ends: Buffer = view[HEADER_BYTES : HEADER_BYTES + 4 * count + 4]
    else:
        new_ends = array("I", [end - start for end in ends]).tobytes()
    part = bytearray(view[:HEADER_BYTES])
    part += new_ends
    part += bytes(-len(part) & 7)
    part += view[heap_at + start : heap_at + stop]
    part += bytes(-len(part) & 7)
    _U32.pack_into(part, 36, count)
    _U32.pack_into(part, 56, header.first_sequence + first & 0xFFFF_FFFF)
    return _finish(part, header, header.base_offset + first)


def select_messages(batch: Buffer | Batch, places: Sequence[int]) -> bytes:
    """The messages at some places of a batch, in ascending order and not compressed."""
    whole = batch if isinstance(batch, Batch) else Batch.parse(batch, verify=False)
    header = whole.header
    first = places[0]
    deltas: Sequence[int] = ()
    if header.flags & _OFFSETS:
        all_offsets = whole.offsets()
        base = all_offsets[first]
        if all_offsets[places[-1]] - base >= len(places):
            deltas = [all_offsets[place] - base for place in places]
    else:
        base = whole.base_offset + first
        if places[-1] - first >= len(places):
            deltas = [place - first for place in places]
    if header.flags & _UNUSUAL:
        return _finish(_encoded_anew(whole, places, deltas or None), header, base)
    at, block = whole.sections, memoryview(whole.block)
    flags = header.flags & ~_OFFSETS
    count, lanes = len(places), header.priorities
    sections: list[Buffer] = [_BLANK]
    if deltas:
        flags |= _OFFSETS
        sections += (array("I", deltas).tobytes(), _PADDING[4 * (count & 1)])
    if flags & _PRIORITY:
        column = bytes(block[at.priority : at.priority + whole.count])
        chosen = bytes([column[place] for place in places])
        lanes = sum(1 << lane for lane in set(chosen))
        sections += (chosen, _PADDING[-count & 7])
    if flags & _EXPIRY:
        sections.append(_times(block, at.expiry, whole.count, places))
    if flags & _TIMESTAMPS:
        sections.append(_times(block, at.timestamps, whole.count, places))
    heaps: list[Buffer] = []
    if flags & _KEYS:
        _cut(block, at.key_ends, at.keys, whole.count, places, sections, heaps)
    if flags & _HEADERS:
        _cut(block, at.header_ends, at.headers, whole.count, places, sections, heaps)
    size = at.value_bytes // whole.count if flags & _FIXED else 0
    _cut(block, at.value_ends, at.values, whole.count, places, sections, heaps, size)
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


def _times(block: memoryview, at: int, count: int, places: Sequence[int]) -> bytes:
    column = block[at : at + 8 * count].cast("q")
    return array("q", [column[place] for place in places]).tobytes()


def _cut(
    block: memoryview,
    ends_at: int,
    heap_at: int,
    count: int,
    places: Sequence[int],
    sections: list[Buffer],
    heaps: list[Buffer],
    size: int = 0,
) -> None:
    """The ends and bytes of some items of a column, each of `size` bytes unless that is 0.

    Of those that are not wanted next to nothing is looked at.
    """
    ends = block[ends_at : ends_at + 4 * count + 4].cast("I")
    first, last = places[0], places[-1]
    start, stop = ends[first], ends[last + 1]
    chosen = len(places)
    # Where all have one size, or the first ones are wanted, the ends are those of the first ones.
    new_ends: Buffer = block[ends_at : ends_at + 4 * chosen + 4]
    if last - first + 1 == chosen:
        heaps.append(block[heap_at + start : heap_at + stop])
        if first and not size:
            new_ends = array("I", [end - start for end in ends[first : last + 2].tolist()]).tobytes()
    else:
        # Slices of bytes, as those of a memoryview cost three times as much.
        heap = bytes(block[heap_at + start : heap_at + stop])
        if size:
            items = [heap[at : at + size] for at in [(place - first) * size for place in places]]
        else:
            known = ends.tolist() if 4 * chosen > count else ends
            items = [heap[known[place] - start : known[place + 1] - start] for place in places]
            new_ends = array("I", accumulate(map(len, items), initial=0)).tobytes()
        heaps += items
        stop = start + sum(map(len, items))
    sections.append(new_ends)
    if not chosen & 1:
        sections.append(_PADDING[4])
    heaps.append(_PADDING[start - stop & 7])


def _encoded_anew(whole: Batch, places: Sequence[int], deltas: Sequence[int] | None) -> bytearray:
    """What is rare, nulls and times of delivery, is taken apart and put together again."""
    header = whole.header
    values, raw_headers = whole.values(), _pick(whole.raw_headers(), places)
    return encode_batch(
        [values[place] for place in places],
        keys=_pick(whole.keys(), places),
        headers=None if raw_headers is None else [row or b"" for row in raw_headers],
        priorities=_pick(whole.priorities(), places),
        deliver_at_us=_pick(whole.deliver_at_us(), places),
        expiry_us=_pick(whole.expiry_us(), places),
        timestamps_us=_pick(whole.timestamps_us(), places),
        offsets=deltas,
        options=bool(header.flags & _OPTIONS),
        base_timestamp_us=header.base_timestamp_us,
        producer=header.producer,
        first_sequence=header.first_sequence + places[0] & 0xFFFF_FFFF,
    )


def _pick(column: Sequence[T] | None, places: Sequence[int]) -> list[T] | None:
    return None if column is None else [column[place] for place in places]


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
