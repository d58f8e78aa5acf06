"""Walking over stored batches: fast where they are known to be good, suspicious where they are not.

`find_batch` and `cut_batches` look at lengths and offsets only and serve reads of data that this process wrote or has
verified.  `scan` believes nothing: it checks both checksums of every batch and the order of their offsets, and steps
over damage to the next batch that proves itself.  Recovery, verification and compaction are built on it.

A file may be longer than its batches: zeros behind the last one are room for those to come (see `Segment.append`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final

from crc32c import crc32c

from millstream.errors import BatchDamaged, NewerData
from millstream.log.storage import File
from millstream.records import (
    HEADER_BYTES,
    STAMP_BYTES,
    VERSION,
    BatchHeader,
    Buffer,
    Columns,
    batch_next_offset,
    read_header,
    verify_batch,
)

__all__ = ["Damage", "Found", "cut_batches", "find_batch", "scan"]

_WINDOW_BYTES: Final = 1024 * 1024
_ALIGNMENT: Final = 8  # every batch is a multiple of 8 bytes long, so every batch starts at one
_START: Final = b"MS\x01"  # magic and version: what a batch starts with
_STAMP_CRC: Final = Struct("<I")
_OFFSETS: Final = int(Columns.OFFSETS)
_BRIEF: Final = Struct("<4xI8xQ12xI20xH")  # length, base offset, count and flags of a batch header


def find_batch(buffer: Buffer, offset: int) -> int:
    """Position of the batch with an offset, in batches that compaction has not touched and that include the offset."""
    position = 0
    while True:
        length, base_offset, count, _ = _BRIEF.unpack_from(buffer, position)
        if offset < base_offset + count:
            return position
        position += length


def cut_batches(buffer: Buffer, position: int, end: int, before: int) -> tuple[int, int]:
    """Where to cut so that only whole batches below offset `before` remain: the position, and the offset that follows.

    Looks from `position`, where a batch starts, to `end`.  (position, -1) when not even the first batch fits.
    """
    next_offset = -1
    while position + HEADER_BYTES <= end:
        length, base_offset, count, flags = _BRIEF.unpack_from(buffer, position)
        if length < HEADER_BYTES:
            raise BatchDamaged(f"the batch at byte {position} claims {length} bytes")
        stop = position + length
        if stop > end:
            break
        if flags & _OFFSETS:
            after = batch_next_offset(buffer, position, BatchHeader(buffer, position))
        else:
            after = base_offset + count
        if after > before:
            break
        position, next_offset = stop, after
    return position, next_offset


@dataclass(slots=True)
class Found:
    """A batch that matches its checksums; `buffer[at:at + header.length]` are its bytes."""

    position: int
    header: BatchHeader
    next_offset: int
    buffer: bytes
    at: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no batch; `end` is where the next batch starts, or where the scan ends."""

    position: int
    end: int
    reason: str


def scan(
    file: File, position: int, end: int, *, next_offset: int, limit: int | None = None
) -> Iterator[Found | Damage]:
    """Everything between two positions of a segment file, in order, without a gap.

    `next_offset` is the lowest offset the first batch may have, `limit` the highest offset that any batch may reach.
    Zeros up to the end are room, which ends the scan, unless offsets below `limit` should have been there.
    Raises NewerData at a batch of a newer version.
    """
    window = b""
    window_at = position
    while position < end:
        at = position - window_at
        if at + HEADER_BYTES > len(window):
            window, window_at, at = file.read(position, min(_WINDOW_BYTES, end - position)), position, 0
        header = None
        try:
            header = read_header(window, at)
            stop = position + header.length
            if stop > end:
                raise BatchDamaged(f"the batch ends {stop - end} bytes behind the end of the file")
            if at + header.length > len(window):
                size = min(max(_WINDOW_BYTES, header.length), end - position)
                window, window_at, at = file.read(position, size), position, 0
            verify_batch(window, at, header)
            after = batch_next_offset(window, at, header)
            if not next_offset <= header.base_offset < after or (limit is not None and after > limit):
                raise BatchDamaged(f"the batch has offset {header.base_offset}, which is not in order here")
        except BatchDamaged as problem:
            if header is None:
                _refuse_newer(window, at)
                if (limit is None or next_offset >= limit) and _is_room(file, position, end):
                    return
                resume = _find_start(file, position + _ALIGNMENT, end, next_offset, limit)
            else:
                # The stamp vouches for the length.  Searching inside the batch instead could take a batch that
                # somebody published as the contents of a message for one of ours.
                resume = min(position + header.length, end)
            yield Damage(position, resume, str(problem))
            position = resume
            continue
        yield Found(position, header, after, window, at)
        position, next_offset = stop, after


def _refuse_newer(window: bytes, at: int) -> None:
    """Raise NewerData for a batch that only a newer version can have written: cut off as damage it would be lost.

    Every version has magic, version and stamp where this one has them, so rot in a version is not taken for another.
    """
    if len(window) - at < HEADER_BYTES or window[at : at + 2] != _START[:2] or window[at + 2] <= VERSION:
        return
    (stamp_crc,) = _STAMP_CRC.unpack_from(window, at + STAMP_BYTES)
    if crc32c(memoryview(window)[at : at + STAMP_BYTES]) == stamp_crc:
        raise NewerData(
            f"a batch has version {window[at + 2]}, and this version of Millstream knows {VERSION}: "
            "use the version that wrote it or a newer one"
        )


def _is_room(file: File, position: int, end: int) -> bool:
    while position < end:
        window = file.read(position, min(_WINDOW_BYTES, end - position))
        if not window or window.count(0) != len(window):
            return False
        position += len(window)
    return True


def _find_start(file: File, position: int, end: int, next_offset: int, limit: int | None) -> int:
    """The next position where a batch starts that matches its checksums and fits the order of offsets, or `end`."""
    while position < end:
        window = file.read(position, min(_WINDOW_BYTES, end - position))
        at = window.find(_START)
        while at >= 0:
            if (position + at) % _ALIGNMENT == 0 and _is_batch(file, position + at, end, next_offset, limit):
                return position + at
            at = window.find(_START, at + 1)
        if len(window) < len(_START):
            break
        position += len(window) - (len(_START) - 1)
    return end


def _is_batch(file: File, position: int, end: int, next_offset: int, limit: int | None) -> bool:
    try:
        header = read_header(file.read(position, HEADER_BYTES))
        if position + header.length > end or header.base_offset < next_offset or not header.count:
            return False
        batch = file.read(position, header.length)
        verify_batch(batch, 0, header)
        return limit is None or batch_next_offset(batch, 0, header) <= limit
    except BatchDamaged:
        return False
