"""A partition's log as queues see it: run after run of messages, and never a disk that keeps the loop waiting.

A *run* is a batch, or several small neighbours taken as one: a producer that publishes message by message makes batches
of one, and nothing a queue decides about a thousand of them differs from what it decides about a batch of a thousand.

The log is read in windows of many runs.  All groups of a partition share them, and all partitions share a bound on the
memory they take: a queue that is drained reads each byte about once, however few messages each lease takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final, TypeVar

from millstream.broker.partition import Partition
from millstream.errors import MillstreamError, OffsetOutOfRange
from millstream.queues.ranges import normal, pack
from millstream.queues.records import LaneMap
from millstream.records import Batch, BatchHeader, Columns, batch_next_offset
from millstream.slicing import select_messages, slice_batch

__all__ = ["LogWindows", "PartitionSource", "StoredRun", "Unchecked"]

T = TypeVar("T")
Piece = bytes | memoryview

_WINDOW_BYTES: Final = 256 * 1024
_WINDOW_BYTES_MIN: Final = 16 * 1024
_WINDOWS_BYTES_MAX: Final = 8 * 1024 * 1024
#: Of one partition: lanes, waiting messages and groups read at different places, but not at many.
_WINDOWS_MAX: Final = 16
#: Neighbours become one run as long as it stays small, and what is said of its age stays true.
_RUN_BYTES_MAX: Final = 64 * 1024
_RUN_US_MAX: Final = 10_000

_OFFSETS: Final = int(Columns.OFFSETS)
_ALONE: Final = int(Columns.OFFSETS | Columns.CONTROL)
# length, base offset, append time, count, flags, priorities
_BRIEF: Final = Struct("<4xI8xQq4xI20xHB")


class StoredRun:
    """Consecutive messages where they lie in a window, opened only when somebody asks for more than headers say."""

    __slots__ = (
        "_batches",
        "_bounds",
        "_buffer",
        "_end",
        "_starts",
        "append_time_us",
        "base_offset",
        "count",
        "flags",
        "length",
        "next_offset",
        "priorities",
    )

    def __init__(self, buffer: bytes, position: int) -> None:
        self._buffer = buffer
        length, base, time_us, count, flags, priorities = _BRIEF.unpack_from(buffer, position)
        self._starts = [position]
        self._end = position + length
        self._bounds = [base]  # of the batches: the first offset of each
        self._batches: list[Batch] | None = None
        self.length = length
        self.base_offset = base
        self.count = count
        self.flags = flags
        self.priorities = priorities
        #: That of the youngest, so that nothing is said to be older than it is.
        self.append_time_us = time_us
        if flags & _OFFSETS:
            self.next_offset = batch_next_offset(buffer, position, BatchHeader(buffer, position))
        else:
            self.next_offset = base + count

    def grow(self) -> None:
        """Take in the batches that follow in the buffer, as long as they are neighbours and small."""
        buffer, end = self._buffer, self._end
        latest_us = self.append_time_us + _RUN_US_MAX
        while end < len(buffer) and not self.flags & _ALONE:
            length, base, time_us, count, flags, priorities = _BRIEF.unpack_from(buffer, end)
            if self.length + length > _RUN_BYTES_MAX or time_us > latest_us:
                break
            if base != self.next_offset or flags & _ALONE:
                break
            self._starts.append(end)
            self._bounds.append(base)
            end += length
            self.length += length
            self.count += count
            self.next_offset = base + count
            self.flags |= flags
            self.priorities |= priorities
            self.append_time_us = time_us
        self._end = end

    @property
    def has_gaps(self) -> bool:
        """Whether compaction took messages out."""
        return bool(self.flags & _OFFSETS)

    # --- columns -------------------------------------------------------------------------------------------------

    def batches(self) -> list[Batch]:
        """The batches, opened; they were verified when their segment was, or written by this process."""
        if self._batches is None:
            self._batches = [Batch.parse(self._buffer, start, verify=False) for start in self._starts]
        return self._batches

    def offsets(self) -> Sequence[int]:
        return self.batches()[0].offsets() if self.has_gaps else range(self.base_offset, self.next_offset)

    def values(self) -> Sequence[bytes | None]:
        return self._column(Batch.values, None) or ()

    def keys(self) -> Sequence[bytes | None] | None:
        return self._column(Batch.keys, None)

    def raw_headers(self) -> Sequence[bytes | None] | None:
        return self._column(Batch.raw_headers, None)

    def expiry_us(self) -> Sequence[int] | None:
        return self._column(Batch.expiry_us, 0)

    def _column(self, read: Callable[[Batch], Sequence[T] | None], absent: T) -> Sequence[T] | None:
        batches = self.batches()
        if len(batches) == 1:
            return read(batches[0])
        columns = [read(batch) for batch in batches]
        if not any(column is not None for column in columns):
            return None
        joined: list[T] = []
        for batch, column in zip(batches, columns, strict=True):
            joined += [absent] * batch.count if column is None else column
        return joined

    # --- bytes ---------------------------------------------------------------------------------------------------

    def pieces(self, start: int, bits: int) -> list[Piece]:
        """The messages whose offset minus `start` is a set bit: whole batches as they are, the others cut.

        Some other messages may be among them; who knows the bits can tell.
        """
        if self.has_gaps or bits & bits + 1:
            return self._selected(start, bits)
        end = start + bits.bit_length()
        if end <= max(start, self.base_offset):
            return []
        if start <= self.base_offset and self.next_offset <= end:
            return [self._bytes(0, len(self._starts))]
        bounds = self._bounds
        first = max(bisect_right(bounds, start) - 1, 0)
        last = bisect_right(bounds, end - 1) - 1
        pieces: list[Piece] = []
        if start > bounds[first] or (first == last and end < self._after(first)):
            pieces.append(self._cut(first, start, end))
            first += 1
        whole_to = last if end < self._after(last) else last + 1
        if first < whole_to:
            pieces.append(self._bytes(first, whole_to))
        if first <= whole_to == last:
            pieces.append(self._cut(last, start, end))
        return pieces

    def _selected(self, start: int, bits: int) -> list[Piece]:
        # The bits of this run only, once: a lease may cover many runs.
        base = self.base_offset
        bits = (bits >> base - start if base >= start else bits << start - base) & (1 << self.next_offset - base) - 1
        if not bits:
            return []
        if self.has_gaps:
            bits = pack(0, [place for place, offset in enumerate(self.offsets()) if bits >> offset - base & 1])
            return [select_messages(self.batches()[0], bits)] if bits else []
        pieces: list[Piece] = []
        bounds = self._bounds
        while bits:
            offset, bits = normal(base, bits)
            number = bisect_right(bounds, offset) - 1 if len(bounds) > 1 else 0
            first, base = bounds[number], self._after(number)
            chosen = bits & (1 << base - offset) - 1
            bits >>= base - offset
            if 2 * chosen.bit_count() > base - first:
                pieces.append(self._bytes(number, number + 1))  # copying the half would cost more than sending the rest
            else:
                pieces.append(select_messages(self.batches()[number], chosen << offset - first))
        return pieces

    def _after(self, number: int) -> int:
        return self._bounds[number + 1] if number + 1 < len(self._bounds) else self.next_offset

    def _bytes(self, first: int, last: int) -> Piece:
        """Whole batches, not copied."""
        start = self._starts[first]
        end = self._starts[last] if last < len(self._starts) else self._end
        return self._buffer if end - start == len(self._buffer) else memoryview(self._buffer)[start:end]

    def _cut(self, number: int, start: int, end: int) -> bytes:
        base = self._bounds[number]
        return slice_batch(self._bytes(number, number + 1), max(start - base, 0), min(end, self._after(number)) - base)


class _Window:
    """Runs that were read together: everything from offset `start` up to `end`."""

    __slots__ = ("_bounds", "_runs", "end", "size", "source", "start")

    def __init__(self, source: PartitionSource, start: int, end: int, buffers: Sequence[bytes]) -> None:
        self.source = source
        self.end = end
        self._runs = list(_runs(buffers))
        self._bounds = [run.base_offset for run in self._runs]
        # Whoever asks for the middle of a batch reads its beginning, too.
        self.start = min([start, *self._bounds[:1]])
        self.size = sum(map(len, buffers))

    def find(self, offset: int) -> StoredRun | None:
        """The run with an offset or, in a gap, the next one."""
        runs = self._runs
        number = bisect_right(self._bounds, offset) - 1
        if number >= 0 and runs[number].next_offset > offset:
            return runs[number]
        return runs[number + 1] if number + 1 < len(runs) else None


def _end_of(window: _Window) -> int:
    return window.end


def _runs(buffers: Sequence[bytes]) -> Iterator[StoredRun]:
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            run = StoredRun(buffer, at)
            run.grow()
            at += run.length
            yield run


class LogWindows:
    """The windows of all partitions; the one that was not used for longest goes first."""

    def __init__(self, bytes_max: int = _WINDOWS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._windows: OrderedDict[_Window, None] = OrderedDict()

    def added(self, window: _Window) -> None:
        self._windows[window] = None
        self._bytes += window.size
        while self._bytes > self._bytes_max and len(self._windows) > 1:
            oldest = next(iter(self._windows))
            self.remove(oldest)
            oldest.source.lost = (oldest.start, oldest.end)

    def remove(self, window: _Window) -> None:
        window.source.windows.remove(window)
        del self._windows[window]
        self._bytes -= window.size

    def used(self, window: _Window) -> None:
        self._windows.move_to_end(window)


class Unchecked(Exception):
    """What was asked for, or lies behind it, is in a segment that must be checked first, away from the loop."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


class PartitionSource:
    """One partition's messages, for all of its queue groups."""

    def __init__(self, partition: Partition, windows: LogWindows) -> None:
        self.partition = partition
        self.lanes = LaneMap()
        self.windows: list[_Window] = []
        self._shared = windows
        #: From where to where the window was that had to give way to others last; and how much is read at a time, which
        #: is less where windows give way before they are used up.
        self.lost = (0, 0)
        self._window_bytes = _WINDOW_BYTES
        #: An offset that was asked for and lies in a segment that must be checked first, away from the loop.
        self.cold: int | None = None
        #: Why the disk could not be read when somebody asked last.
        self.trouble: MillstreamError | None = None

    @property
    def start(self) -> int:
        return self.partition.log.start_offset

    @property
    def end(self) -> int:
        return self.partition.high_watermark

    def batch_at(self, offset: int) -> StoredRun | None:
        """The run with an offset or, if there is none, the next one.

        None at the end of the log, and when it cannot be read just now: then `cold` or `trouble` says why.  Whoever
        asks is in the middle of a decision, so this does not raise.
        """
        try:
            return self.read_at(offset)
        except Unchecked as unchecked:
            self.cold = unchecked.offset
        except MillstreamError as error:
            self.trouble = error
        return None

    def read_at(self, offset: int) -> StoredRun | None:
        """As `batch_at`, but raises StorageFailed, or Unchecked, when the run cannot be read just now."""
        end = self.partition.high_watermark
        while offset < end:
            window = self._window(offset)
            if window is None:
                return None
            run = window.find(offset)
            if run is not None:
                return run
            offset = max(offset, window.end)
        return None

    def _window(self, offset: int) -> _Window | None:
        windows = self.windows
        for window in reversed(windows):
            if window.start <= offset < window.end:
                self._shared.used(window)
                if window is not windows[-1]:  # keep the one that was used last where it is found first
                    windows.remove(window)
                    windows.append(window)
                return window
        return self._read(offset)

    def _read(self, offset: int) -> _Window | None:
        log = self.partition.log
        offset = max(offset, log.start_offset)
        before = max((window for window in self.windows if window.end <= offset), key=_end_of, default=None)
        if before is not None and 8 * (offset - before.end) <= before.end - before.start:
            # A lane passes over little: the log knows where it read on, and searches for any other place.
            near = max(before.end, log.start_offset)
            if log.cold_segment(near) is None:  # whoever asks has seen to what it asked for, and to nothing else
                offset = near
        if log.cold_segment(offset) is not None:
            raise Unchecked(offset)
        try:
            chunk = log.read(offset, self._fitting_bytes(offset), before=self.end)
        except OffsetOutOfRange:
            return None
        if chunk.next_offset <= offset:
            return None
        window = _Window(self, offset, chunk.next_offset, chunk.buffers)
        if len(self.windows) >= _WINDOWS_MAX:
            self._shared.remove(self.windows[0])
        self.windows.append(window)
        self._shared.added(window)
        return window

    def _fitting_bytes(self, offset: int) -> int:
        """How much to read: as much as can be used before the memory is needed for other partitions."""
        start, end = self.lost
        if start <= offset < end:
            self._window_bytes = max(self._window_bytes // 2, _WINDOW_BYTES_MIN)
        else:
            self._window_bytes = min(self._window_bytes + self._window_bytes // 8, _WINDOW_BYTES)
        self.lost = (0, 0)
        return self._window_bytes

    def forget(self) -> None:
        """Let go of everything, because the partition goes away or was rewritten."""
        for window in list(self.windows):
            self._shared.remove(window)
