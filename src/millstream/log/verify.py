"""Looking at a partition's files without a broker: is everything there and good, and what is in it?

Reads only.  Meant for a broker that is stopped; beside a running one the end of the log may look torn, because it is
being written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from millstream.log.cache import FileCache
from millstream.log.index import ENTRY_BYTES, INDEX_HEADER_BYTES, IndexFlags, IndexHeader
from millstream.log.scan import Found, scan
from millstream.log.segment import DamagedRange, Segment, Survey, offsets_named, survey
from millstream.log.storage import Storage
from millstream.log.swap import read_index_header
from millstream.records import Batch, BatchHeader

__all__ = ["SegmentFinding", "StoredBatch", "dump", "verify"]

_INTERVAL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SegmentFinding:
    """One segment: what is in it and what is wrong with it."""

    path: str
    base_offset: int
    next_offset: int
    bytes: int
    batches: int
    messages: int
    sealed: bool
    damaged: tuple[DamagedRange, ...]
    problems: tuple[str, ...]  # in words; includes the damage

    @property
    def is_good(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch and where it is stored."""

    path: str
    position: int
    header: BatchHeader
    next_offset: int
    data: bytes

    def open(self) -> Batch:
        """The batch's messages; raises BatchDamaged when they cannot be unpacked."""
        return Batch.parse(self.data, verify=False)


def verify(storage: Storage, directory: str) -> Iterator[SegmentFinding]:
    """Check every segment of a partition: all checksums, the order of offsets, and the index against the log."""
    bases = offsets_named(storage.names(directory), "log")
    expected = bases[0] if bases else 0
    for base, following in zip_longest(bases, bases[1:]):
        finding = _verify_segment(storage, directory, base, expected, following)
        yield finding
        expected = finding.next_offset


def dump(storage: Storage, directory: str, start: int = 0, limit: int | None = None) -> Iterator[StoredBatch]:
    """The good batches from the one with offset `start` on, `limit` of them at most; damage is left out."""
    left = limit
    bases = offsets_named(storage.names(directory), "log")
    for base, following in zip_longest(bases, bases[1:]):
        if following is not None and following <= start:
            continue
        path = _segment(storage, directory, base).path
        file = storage.open(path)
        try:
            for item in scan(file, 0, file.size(), next_offset=base):
                if not isinstance(item, Found) or item.next_offset <= start:
                    continue
                if left is not None:
                    if left <= 0:
                        return
                    left -= 1
                data = item.buffer[item.at : item.at + item.header.length]
                yield StoredBatch(path, item.position, item.header, item.next_offset, data)
        finally:
            file.close()


def _segment(storage: Storage, directory: str, base_offset: int) -> Segment:
    return Segment(storage, FileCache(1), directory, base_offset, interval_bytes=_INTERVAL_BYTES)


def _verify_segment(
    storage: Storage, directory: str, base_offset: int, expected: int, following: int | None
) -> SegmentFinding:
    segment = _segment(storage, directory, base_offset)
    header, index_bytes = read_index_header(storage, segment.index_path)
    sealed = header is not None and bool(header.flags & IndexFlags.SEALED)
    limit = header.next_offset if header is not None and sealed else following
    file = storage.open(segment.path)
    try:
        found = survey(file, base_offset, file.size(), interval_bytes=_INTERVAL_BYTES, limit=limit)
    finally:
        file.close()
    problems = [_describe(damage) for damage in found.damaged]
    if base_offset != expected:
        problems.append(f"starts at offset {base_offset}, but the segment before it ends at {expected}")
    if header is not None:
        problems += _index_problems(storage, segment, header, index_bytes, found)
    elif following is not None:
        # The active segment may have none, or one that a crash has torn: it gets its index when it is sealed.
        problems.append("the index is missing or unreadable; it will be rebuilt")
    return SegmentFinding(
        segment.path,
        base_offset,
        found.next_offset,
        found.size,
        found.batches,
        found.messages,
        sealed,
        tuple(found.damaged),
        tuple(problems),
    )


def _describe(damage: DamagedRange) -> str:
    offsets = f"offsets {damage.first_offset} to {damage.next_offset - 1}"
    if damage.next_offset <= damage.first_offset:
        offsets = f"after offset {damage.first_offset - 1}" if damage.first_offset else "at the start"
    return f"bytes {damage.position} to {damage.end} are damaged ({offsets})"


def _index_problems(
    storage: Storage, segment: Segment, header: IndexHeader, index_bytes: int, found: Survey
) -> list[str]:
    """Where the index disagrees with the log."""
    problems = []
    if header.base_offset != segment.base_offset:
        problems.append(f"the index belongs to a segment that starts at {header.base_offset}")
    complete = IndexFlags.SEALED | IndexFlags.CLEAN
    if not header.flags & complete or (header.flags & IndexFlags.CLEAN and header.log_bytes < found.size):
        # The active segment of a broker that was not closed: the index knows only a part, and that is fine.
        if header.durable_bytes > found.size:
            problems.append(f"{header.durable_bytes} bytes were confirmed, but the file has {found.size}")
        return problems
    if header.log_bytes != found.size:
        problems.append(f"the index was made for {header.log_bytes} bytes, but the file has {found.size}")
    if header.next_offset != found.next_offset:
        problems.append(f"the index ends at offset {header.next_offset}, the segment at {found.next_offset}")
    if index_bytes != INDEX_HEADER_BYTES + ENTRY_BYTES * header.entries:
        problems.append(f"the index should have {header.entries} entries, but the file has {index_bytes} bytes")
    elif not found.damaged and not _entries_hold(storage, segment, header):
        problems.append("the index points at places where no batch starts; it will be rebuilt")
    return problems


def _entries_hold(storage: Storage, segment: Segment, header: IndexHeader) -> bool:
    """Whether every entry points at the batch that it names, whatever the interval was when it was written."""
    segment.take_header(header)
    log = storage.open(segment.path)
    try:
        return all(segment.entry_holds(log, segment.index.entry(number)) for number in range(header.entries))
    finally:
        log.close()
