"""Reading whole batches: from the bytes appended last, or from segment files.

A reader that goes on where its last read ended pays no lookup: the position behind each read is remembered, for the
last few readers of a partition.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from millstream.errors import BatchDamaged
from millstream.log.cache import Tail
from millstream.log.scan import cut_batches, find_batch
from millstream.log.segment import Segment, Verified
from millstream.records import BatchHeader

__all__ = ["Chunk", "StoredReader", "read_tail"]

_CURSORS_MAX: Final = 64
_T = TypeVar("_T")


class Chunk(NamedTuple):
    """Consecutive whole batches.

    `next_offset` is where to read on.  `damaged` are the first and next offset of a range just before these batches
    that cannot be read any more.  The first batch may start before the offset that was asked for.
    """

    buffers: list[bytes]
    next_offset: int
    damaged: tuple[int, int] | None


def read_tail(tail: Tail, offset: int, max_bytes: int, before: int, next_offset: int) -> Chunk:
    """Batches from the tail cache, as the very objects that were appended wherever they fit as a whole.

    `offset` is in the tail and below `before`; `next_offset` is the end of the log.
    """
    bases, pieces = tail.bases, tail.pieces
    number = tail.find(offset)
    piece = pieces[number]
    count = len(bases)
    end = bases[number + 1] if number + 1 < count else next_offset
    size = len(piece)
    if bases[number] != offset or end > before or size > max_bytes:
        return _cut_piece(piece, offset, max_bytes, before)
    buffers = [piece]
    number += 1
    while number < count:
        after = bases[number + 1] if number + 1 < count else next_offset
        piece = pieces[number]
        size += len(piece)
        if size > max_bytes or after > before:
            break
        buffers.append(piece)
        end = after
        number += 1
    return Chunk(buffers, end, None)


def _cut_piece(piece: bytes, offset: int, max_bytes: int, before: int) -> Chunk:
    """A part of one append."""
    start = find_batch(piece, offset)
    stop, end = cut_batches(piece, start, min(len(piece), start + max_bytes), before)
    if end < 0:
        # Not even one batch fits into max_bytes: then one batch it is.
        stop = start + BatchHeader(piece, start).length
        stop, end = cut_batches(piece, start, stop, before)
    return Chunk([piece[start:stop]], end, None) if end >= 0 else Chunk([], offset, None)


class StoredReader:
    """Reads a partition's segment files.  Shares the list of segments with the log, which keeps it current."""

    def __init__(self, segments: list[Segment], bases: list[int], accept: Callable[[Verified], None]) -> None:
        self._segments = segments
        self._bases = bases
        self._accept = accept
        self._cursors: dict[int, tuple[Segment, int]] = {}  # by offset, the one used last at the end
        self._current: Segment | None = None

    def forget(self) -> None:
        """Drop remembered positions, because segments were removed or replaced, or turned out to be damaged."""
        self._cursors.clear()

    def read(self, offset: int, max_bytes: int, before: int) -> Chunk:
        cursor = self._cursors.pop(offset, None)
        doubted: list[Segment] = []
        while True:
            try:
                return self._read(offset, max_bytes, before, cursor)
            except BatchDamaged:
                if self._current is None or self._current in doubted:
                    raise
                # It was good when we looked last.  Look again, as at something unknown, and step over what is bad.
                self._current.doubt()
                doubted.append(self._current)
                cursor = None

    def _read(self, offset: int, max_bytes: int, before: int, cursor: tuple[Segment, int] | None) -> Chunk:
        skipped_from = -1
        segment, position = (self._segment_at(offset), -1) if cursor is None else cursor
        while True:
            self._current = segment
            if not segment.verified:
                self._accept(segment.verify())
            if position < 0:
                position = segment.locate(offset)
            damage = segment.damage_at(position)
            if damage is not None:
                position = damage.end
                if offset < damage.next_offset:
                    skipped_from = max(offset, damage.first_offset) if skipped_from < 0 else skipped_from
                    offset = damage.next_offset
            damaged = (skipped_from, offset) if skipped_from >= 0 else None
            if position < segment.size:
                break
            following = self._segment_after(segment)
            end = max(offset, segment.next_offset)
            if following is None:
                return Chunk([], min(before, end), damaged)
            if following.base_offset > end and skipped_from < 0:
                # The file in between is gone.
                skipped_from = end
            segment, position = following, 0
            offset = max(offset, segment.base_offset)
        data, next_offset, position = segment.read(position, max_bytes, before)
        if not data:
            return Chunk([], min(before, offset), damaged)
        if position == segment.size and segment is not self._segments[-1] and segment.damage_at(position) is None:
            # Compaction may have taken the last messages of the segment out.
            next_offset = min(before, max(next_offset, segment.next_offset))
        self._remember(next_offset, segment, position)
        return Chunk([data], next_offset, damaged)

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        cursors = self._cursors
        cursors[offset] = (segment, position)
        if len(cursors) > _CURSORS_MAX:
            del cursors[next(iter(cursors))]

    def cold_segment(self, offset: int) -> Segment | None:
        """The segment that a read at `offset` would have to verify first, if it would."""
        segment = self._segment_at(offset)
        if not segment.verified:
            return segment
        following = self._segment_after(segment)
        while following is not None and not following.size:
            following = self._segment_after(following)
        if following is None or following.verified or not self._is_over(segment, offset):
            return None
        return following

    def _is_over(self, segment: Segment, offset: int) -> bool:
        """Whether a read at an offset finds nothing more in a segment: what was there is damaged, or compacted away."""
        if offset >= segment.next_offset:
            return True
        cursor = self._cursors.get(offset)
        try:
            position = cursor[1] if cursor is not None and cursor[0] is segment else segment.locate(offset)
        except (OSError, BatchDamaged):
            return False  # the read will say so
        damage = segment.damage_at(position)
        return (position if damage is None else damage.end) >= segment.size

    def offset_at_time(self, time_us: int) -> int | None:
        """The first offset that was appended at or after a time, if there is one."""
        number = bisect_left(self._segments, time_us, key=lambda segment: segment.last_append_us)
        for segment in self._segments[number:]:
            offset = self._asked(segment, lambda segment: segment.locate_time(time_us))
            if offset is not None:
                return offset
        return None

    def end_of_epoch(self, epoch: int) -> int | None:
        """The first offset that was appended in a later epoch, if there is one.  Epochs ascend."""
        number = bisect_right(self._segments, epoch, key=lambda segment: self._asked(segment, Segment.first_epoch))
        before = self._asked(self._segments[number - 1], lambda it: it.locate_epoch_after(epoch)) if number else None
        return before if before is not None or number == len(self._segments) else self._segments[number].base_offset

    def _asked(self, segment: Segment, ask: Callable[[Segment], _T]) -> _T:
        """What a segment answers, looked at anew if it turns out to be damaged."""
        try:
            return ask(segment)
        except BatchDamaged:
            segment.doubt()
            self._accept(segment.verify())
            return ask(segment)

    def _segment_at(self, offset: int) -> Segment:
        return self._segments[max(bisect_right(self._bases, offset) - 1, 0)]

    def _segment_after(self, segment: Segment) -> Segment | None:
        number = bisect_right(self._bases, segment.base_offset)
        return self._segments[number] if number < len(self._segments) else None
