"""Parts of a stored batch, as stored batches: what a queue hands out when a lease ends in the middle of one.

Offsets, times and everything else about a message stay as they are; both checksums are made anew, so that a reader
checks a part exactly as it checks a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Final, TypeVar

from crc32c import crc32c

from millstream.records import CRC_FROM, HEADER_BYTES, Batch, BatchHeader, Buffer, Columns, encode_batch, stamp

__all__ = ["select_messages", "slice_batch"]

T = TypeVar("T")

_FIXED: Final = int(Columns.FIXED_VALUES)
_OPTIONS: Final = int(Columns.OPTIONS)
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


def select_messages(batch: Buffer, places: Sequence[int]) -> bytes:
    """The messages at some places of a batch, in ascending order and not compressed."""
    whole = Batch.parse(batch, verify=False)
    header = whole.header
    offsets = [whole.offsets()[place] for place in places]
    base = offsets[0]
    has_gaps = offsets[-1] - base + 1 != len(offsets)
    values, raw_headers = whole.values(), _pick(whole.raw_headers(), places)
    part = encode_batch(
        [values[place] for place in places],
        keys=_pick(whole.keys(), places),
        headers=None if raw_headers is None else [row or b"" for row in raw_headers],
        priorities=_pick(whole.priorities(), places),
        deliver_at_us=_pick(whole.deliver_at_us(), places),
        expiry_us=_pick(whole.expiry_us(), places),
        timestamps_us=_pick(whole.timestamps_us(), places),
        offsets=[offset - base for offset in offsets] if has_gaps else None,
        options=bool(header.flags & _OPTIONS),
        base_timestamp_us=header.base_timestamp_us,
        producer=header.producer,
        first_sequence=header.first_sequence + places[0] & 0xFFFF_FFFF,
    )
    return _finish(part, header, base)


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
