"""The sparse index of a segment: one entry per few kilobytes answers "where is this offset?" and "where is this time?".

File, little-endian: a header of 64 bytes, then entries of 24 bytes, `u64 offset | u64 position | i64 append time` of
one batch each::

     0 u16 magic "MI"   2 u8 version     3 u8 flags          4 u32 entries       8 u64 bytes of the log file
    16 u64 base offset 24 u64 next offset                   32 i64 first append time, us
    40 i64 last append time, us         48 u64 durable bytes                    56 u32 messages  60 u32 crc of 0..60

Append times never go backwards within a partition, so all three columns ascend and each can be bisected.

The index of the active segment lives in memory.  Its file holds only the header, and of that only `durable bytes` (with
the next offset there) matters: what lies below was confirmed to somebody, so damage there is rot and not a torn write.
The file gets its entries when the segment is sealed, which happens after the log file is synced: a sealed header also
says that everything in the segment is on disk.

Entries carry no checksum of their own, because the checksum would have to be checked on open.  Whoever uses an entry
compares it with the batch it points at, which is self-describing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from struct import Struct
from typing import Final

from crc32c import crc32c

from millstream.errors import NewerData
from millstream.log.cache import FileCache
from millstream.log.storage import Storage

__all__ = [
    "ENTRY_BYTES",
    "INDEX_HEADER_BYTES",
    "MESSAGES_MAX",
    "Entry",
    "IndexFlags",
    "IndexHeader",
    "LiveIndex",
    "StoredIndex",
]

INDEX_HEADER_BYTES: Final = 64
ENTRY_BYTES: Final = 24
#: Of one segment: half of what a header can say.  Packed batches of nothing would bring billions into a few megabytes.
MESSAGES_MAX: Final = 2**31
_MAGIC: Final = 0x494D
_VERSION: Final = 1
_U32_MAX: Final = 2**32 - 1
_HEADER: Final = Struct("<HBBIQQQqqQI")
_CRC: Final = Struct("<I")
_ENTRY: Final = Struct("<QQq")
assert _HEADER.size + _CRC.size == INDEX_HEADER_BYTES

#: Offset, position and append time of a batch.
Entry = tuple[int, int, int]


class IndexFlags(IntFlag):
    """What is known about a segment beyond its numbers."""

    #: Complete and on disk; nothing will be appended.
    SEALED = 1
    #: The active segment as the partition was closed: complete if the log file still has the size that is noted.
    CLEAN = 2
    #: Written by compaction: supersedes every segment between its base offset and its next offset.
    COMPACTED = 4
    #: The producer table was empty at the end of this segment, so there is no snapshot of it.
    NO_PRODUCERS = 8


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The numbers of one segment."""

    flags: int
    entries: int
    log_bytes: int
    base_offset: int
    next_offset: int
    first_append_us: int
    last_append_us: int
    durable_bytes: int
    messages: int

    def encode(self) -> bytes:
        fixed = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.flags,
            self.entries,
            self.log_bytes,
            self.base_offset,
            self.next_offset,
            self.first_append_us,
            self.last_append_us,
            self.durable_bytes,
            min(self.messages, _U32_MAX),
        )
        return fixed + _CRC.pack(crc32c(fixed))

    @classmethod
    def decode(cls, data: bytes) -> IndexHeader | None:
        """The header at the start of an index file; None unless it is whole and matches its checksum.

        Raises NewerData when a newer version wrote it: what it says about the segment must not be made up anew.
        """
        if len(data) < INDEX_HEADER_BYTES:
            return None
        fixed = data[: _HEADER.size]
        if _CRC.unpack_from(data, _HEADER.size)[0] != crc32c(fixed):
            return None
        magic, version, *fields = _HEADER.unpack(fixed)
        if magic == _MAGIC and version > _VERSION:
            raise NewerData(
                f"the index of a segment has version {version}, and this version of Millstream knows {_VERSION}: "
                "use the version that wrote it or a newer one"
            )
        return cls(*fields) if (magic, version) == (_MAGIC, _VERSION) else None


class LiveIndex:
    """The index of a segment that is being written, in memory."""

    __slots__ = ("_interval", "_offsets", "_positions", "_times", "due")

    def __init__(self, interval_bytes: int) -> None:
        self._interval = interval_bytes
        self._offsets = array("q")
        self._positions = array("q")
        self._times = array("q")
        self.due = 0  # a batch at this position or behind it gets an entry

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, position: int, time_us: int) -> None:
        """Add an entry; the caller has seen that position >= due."""
        self._offsets.append(offset)
        self._positions.append(position)
        self._times.append(time_us)
        self.due = position + self._interval

    def entry(self, number: int) -> Entry:
        return self._offsets[number], self._positions[number], self._times[number]

    def last_at_offset(self, offset: int) -> Entry | None:
        """The last entry whose batch starts at or before an offset."""
        return self._before(bisect_right(self._offsets, offset))

    def last_at_position(self, position: int) -> Entry | None:
        """The last entry at or before a position."""
        return self._before(bisect_right(self._positions, position))

    def last_before_time(self, time_us: int) -> Entry | None:
        """The last entry that was appended before a time."""
        return self._before(bisect_left(self._times, time_us))

    def _before(self, number: int) -> Entry | None:
        return self.entry(number - 1) if number else None

    def replace_before(self, position: int, other: LiveIndex) -> None:
        """Take the entries before a position from another index."""
        kept = bisect_left(self._positions, position)
        self._offsets[:kept] = other._offsets
        self._positions[:kept] = other._positions
        self._times[:kept] = other._times

    def encode(self) -> bytes:
        """The entries as they stand in the file."""
        rows = array("q", bytes(ENTRY_BYTES * len(self)))
        rows[0::3], rows[1::3], rows[2::3] = self._offsets, self._positions, self._times
        return rows.tobytes()

    @classmethod
    def decode(cls, data: bytes, interval_bytes: int) -> LiveIndex:
        """The inverse of `encode`."""
        rows = array("q", data)
        index = cls(interval_bytes)
        index._offsets, index._positions, index._times = rows[0::3], rows[1::3], rows[2::3]
        index.due = index._positions[-1] + interval_bytes if rows else 0
        return index


class StoredIndex:
    """The index of a sealed segment, looked up in its file: memory must not grow with the size of the log."""

    __slots__ = ("_entries", "_files", "_path", "_storage")

    def __init__(self, files: FileCache, storage: Storage, path: str, entries: int) -> None:
        self._files = files
        self._storage = storage
        self._path = path
        self._entries = entries

    def __len__(self) -> int:
        return self._entries

    def entry(self, number: int) -> Entry:
        file = self._files.get(self._storage, self._path)
        data = file.read(INDEX_HEADER_BYTES + ENTRY_BYTES * number, ENTRY_BYTES)
        if len(data) < ENTRY_BYTES:
            return 0, 0, 0  # cut short since it was opened; such an entry matches no batch
        offset, position, time_us = _ENTRY.unpack(data)
        return offset, position, time_us

    def last_at_offset(self, offset: int) -> Entry | None:
        return self._search(lambda entry: entry[0] <= offset)

    def last_at_position(self, position: int) -> Entry | None:
        return self._search(lambda entry: entry[1] <= position)

    def last_before_time(self, time_us: int) -> Entry | None:
        return self._search(lambda entry: entry[2] < time_us)

    def _search(self, holds: Callable[[Entry], bool]) -> Entry | None:
        """The last entry for which a condition holds that holds for a prefix of the entries."""
        found = None
        low, high = 0, self._entries
        while low < high:
            middle = (low + high) // 2
            entry = self.entry(middle)
            if holds(entry):
                low, found = middle + 1, entry
            else:
                high = middle
        return found
