"""Due times on disk: what a schedule log says about the far future, sorted, so that memory holds only what is near.

The index is a set of *runs*.  A run is a file that is written once: the due times of what was pending of a range of
offsets, sorted by (due time, offset).  It says which range that is, so nothing else has to be remembered: whatever is
pending and in no run is read from the log again.  A run that is missing or damaged is therefore no loss.

A row is `due_ms << OFFSET_BITS | offset`, as everywhere; in the file it is two columns::

     0 u32 magic "MSDU"   4 u32 crc of 8..end   8 u64 first offset   16 u64 offset after the last   24 u64 count
    32 i64 due time (ms) * count | u64 offset * count

Rows are read in order and a cursor remembers how far.  It is not stored: rows that were read are in memory, and a
restart reads them again, skipping what is settled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from struct import Struct
from typing import Final

from crc32c import crc32c

from millstream.ids import OFFSET_BITS
from millstream.log.storage import File, Storage

__all__ = ["DueIndex", "Run"]

_MAGIC: Final = 0x5544534D
_HEADER: Final = Struct("<IIQQQ")
_DUE: Final = Struct("<q")
_CRC_FROM: Final = 8
_ENDING: Final = ".due"
_OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
_READ_ROWS: Final = 8192
_LIST_ROWS: Final = 64


@dataclass(slots=True, eq=False)
class Run:
    """The pending messages of a range of offsets, as they were when it was written."""

    path: str
    first_offset: int
    end_offset: int
    count: int
    last_due_ms: int
    #: Rows before this one were handed out.
    cursor: int = 0
    #: Due time of the row at the cursor; None when all were handed out.
    next_due_ms: int | None = None


class DueIndex:
    """The runs of one schedule log.  `load`, `write` and `read` may be used in a thread, one at a time."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        #: In the order of their offsets.
        self.runs: list[Run] = []

    def __len__(self) -> int:
        """How many rows were not handed out yet."""
        return sum(run.count - run.cursor for run in self.runs)

    def load(self) -> None:
        """Find the runs that are there.  One that cannot be believed is removed.  Raises OSError."""
        for name in self._storage.names(self._directory):
            path = f"{self._directory}/{name}"
            data = self._storage.read_all(path) if name.endswith(_ENDING) else b""
            run = _parse(path, data)
            if run is None:
                self._storage.remove(path)
            else:
                self.runs.append(run)

    def covered(self) -> list[tuple[int, int]]:
        """The ranges of offsets whose due times are here."""
        return [(run.first_offset, run.end_offset) for run in self.runs]

    def next_due_ms(self) -> int | None:
        """Due time of the earliest row that was not handed out."""
        return min((run.next_due_ms for run in self.runs if run.next_due_ms is not None), default=None)

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, first_offset: int, end_offset: int, rows: Sequence[int]) -> Run:
        """Store the rows of a range, durably; `add` makes them part of the index.  Raises OSError."""
        rows = sorted(rows)
        due = array("q", [row >> OFFSET_BITS for row in rows])
        offsets = array("Q", [row & _OFFSET_MASK for row in rows])
        body = due.tobytes() + offsets.tobytes()
        head = _HEADER.pack(_MAGIC, 0, first_offset, end_offset, len(rows))
        crc = crc32c(body, crc32c(head[_CRC_FROM:]))
        path = f"{self._directory}/{first_offset:020d}{_ENDING}"
        self._storage.make_directory(self._directory)
        self._storage.replace(path, _HEADER.pack(_MAGIC, crc, first_offset, end_offset, len(rows)) + body)
        return Run(path, first_offset, end_offset, len(rows), due[-1], next_due_ms=due[0])

    def add(self, run: Run) -> None:
        self.runs.insert(bisect_left(self.runs, run.first_offset, key=lambda it: it.first_offset), run)

    def remove(self, run: Run) -> None:
        """Nothing in it is pending any more.  Raises OSError."""
        self.runs.remove(run)
        self._storage.remove(run.path)

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, run: Run, before_ms: int) -> list[int]:
        """Rows of a run from its cursor on that are due before a time; moves the cursor.  Raises OSError."""
        rows: list[int] = []
        for piece in self._pieces(run, run.cursor):
            end = bisect_left(piece, before_ms << OFFSET_BITS)
            rows += piece[:end]
            if end < len(piece):
                run.next_due_ms = piece[end] >> OFFSET_BITS
                break
        else:
            run.next_due_ms = None
        run.cursor += len(rows)
        return rows

    def rows_from(self, due_ms: int) -> Iterator[int]:
        """All rows that are due at or after a time, handed out or not, in order.  Raises OSError."""
        return merge(*(self._from(run, due_ms) for run in self.runs if run.last_due_ms >= due_ms))

    def _from(self, run: Run, due_ms: int) -> Iterator[int]:
        file = self._storage.open(run.path)
        try:
            start = bisect_left(range(run.count), due_ms, key=lambda place: _due_at(file, place))
        finally:
            file.close()
        # Few at first: whoever looks at all runs at once wants the first rows of most of them and no more.
        for piece in self._pieces(run, start, _LIST_ROWS):
            yield from piece

    def _pieces(self, run: Run, start: int, size: int = _READ_ROWS) -> Iterator[list[int]]:
        """Rows from a place on, some at a time."""
        while start < run.count:
            count = min(size, run.count - start)
            file = self._storage.open(run.path)
            try:
                due = array("q", file.read(_HEADER.size + 8 * start, 8 * count))
                offsets = array("Q", file.read(_HEADER.size + 8 * (run.count + start), 8 * count))
            finally:
                file.close()
            yield [at << OFFSET_BITS | offset for at, offset in zip(due, offsets, strict=True)]
            start += count
            size = min(_READ_ROWS, 2 * size)


def _due_at(file: File, place: int) -> int:
    due_ms: int = _DUE.unpack(file.read(_HEADER.size + 8 * place, 8))[0]
    return due_ms


def _parse(path: str, data: bytes) -> Run | None:
    """The run that a file holds, if it is whole."""
    if len(data) <= _HEADER.size:
        return None
    magic, crc, first_offset, end_offset, count = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEADER.size + 16 * count or crc32c(memoryview(data)[_CRC_FROM:]) != crc:
        return None
    due = memoryview(data)[_HEADER.size : _HEADER.size + 8 * count].cast("q")
    return Run(path, first_offset, end_offset, count, due[count - 1], next_due_ms=due[0])
