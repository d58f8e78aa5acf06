"""Reading a broker's files without the broker: for backfill, backups and tests, and as the oracle for the other way.

Nothing is locked, repaired or written.  A broker may use the directory at the same time; what is seen then is what it
has written so far, up to the last whole batch, and files that it removes are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from millstream.errors import (
    DataDamaged,
    InvalidArgument,
    OffsetOutOfRange,
    PartitionNotFound,
    StorageFailed,
    TopicNotFound,
)
from millstream.log.format import check_format
from millstream.log.index import INDEX_HEADER_BYTES, IndexFlags, IndexHeader
from millstream.log.scan import Damage, Found, scan
from millstream.log.segment import offsets_named, segment_name
from millstream.log.storage import DiskFile, DiskStorage, File
from millstream.log.swap import read_index_header
from millstream.names import DEFAULT_NAMESPACE
from millstream.records import HEADER_BYTES, VERSION, BatchHeader, batch_next_offset
from millstream.slicing import batches_of
from millstream.spark.walking import NO_LIMIT, walk

__all__ = ["Offsets", "SegmentDirectory"]

_START: Final = b"MS%c" % VERSION  # magic and version: what a batch starts with
_WINDOW_BYTES: Final = 4 * 1024 * 1024
_LOOKS_MAX: Final = 10
_ENTRY: Final = np.dtype([("offset", "<i8"), ("position", "<i8"), ("time_us", "<i8")])


@dataclass(frozen=True, slots=True)
class Offsets:
    """The first offset of a partition, and the one that its next message gets."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _SegmentFile:
    """A log file, and what its index says."""

    directory: str
    base_offset: int
    size: int
    header: IndexHeader | None
    following: int | None  # where the next one begins

    @property
    def path(self) -> str:
        return segment_name(self.directory, self.base_offset, "log")

    @property
    def index_path(self) -> str:
        return segment_name(self.directory, self.base_offset, "index")

    @property
    def is_complete(self) -> bool:
        """Whether the index describes all of the file."""
        complete = IndexFlags.SEALED | IndexFlags.CLEAN
        return self.header is not None and bool(self.header.flags & complete) and self.header.log_bytes == self.size

    @property
    def confirmed(self) -> tuple[int, int]:
        """How many bytes were confirmed to somebody, and the offset there: what is bad behind them is a torn write."""
        if self.following is not None:
            return self.size, self.following
        if self.header is None:
            return 0, self.base_offset
        return min(self.header.durable_bytes, self.size), self.header.next_offset

    def missing(self, reached: int) -> Iterator[tuple[int, int]]:
        """The offsets that must be behind the last batch, but are not: the file lost its end, or the next is gone."""
        if self.header is None:
            return
        end = self.header.next_offset
        # Compaction may have taken out the last messages of a segment.
        complete = self.header.flags & IndexFlags.COMPACTED and self.header.log_bytes <= self.size
        if reached < end and not complete:
            yield reached, end
        if self.following is not None and max(reached, end) < self.following:
            yield max(reached, end), self.following


class _ReadOnlyStorage(DiskStorage):
    def open(self, path: str, *, create: bool = False) -> File:
        assert not create
        return DiskFile(os.open(self._at(path), os.O_RDONLY | os.O_CLOEXEC), path, self.holding)


class SegmentDirectory:
    """The topics of a namespace in a broker's data directory."""

    def __init__(self, path: str | Path, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._path = Path(str(path).removeprefix("file:"))  # Spark hands out paths as URIs
        if not (self._path / "state").is_dir():
            reason = "no broker has used it" if self._path.is_dir() else "there is no such directory"
            raise InvalidArgument(f"{self._path} is not a data directory: {reason}")
        self._namespace = namespace
        self._storage = _ReadOnlyStorage(self._path)
        check_format(self._storage)
        self._topics: dict[str, list[int]] = {}
        self._topics_state: tuple[int, int] | None = None  # of the log that they were read from

    # What there is

    def topics(self) -> dict[str, int]:
        """The topics and how many partitions each has."""
        return {name: len(uids) for name, uids in self._read_topics().items()}

    def partitions(self, topic: str) -> int:
        return len(self._uids(topic))

    def uid(self, topic: str, partition: int) -> int:
        """What the ids of a partition's messages are made of: as of the last look at `topics`, if it was there then."""
        uids = self._topics.get(topic, ())
        if not 0 <= partition < len(uids):
            uids = self._uids(topic)
        if not 0 <= partition < len(uids):
            raise PartitionNotFound(f"topic {topic!r} has no partition {partition}: it has {len(uids)}")
        return uids[partition]

    def _uids(self, topic: str) -> list[int]:
        uids = self._read_topics().get(topic)
        if uids is None:
            raise TopicNotFound(f"topic {topic!r} does not exist in namespace {self._namespace!r} of {self._path}")
        return uids

    def _read_topics(self) -> dict[str, list[int]]:
        """From the log in which the broker remembers them, as long as it does not change."""
        files = self._files("state/topics")
        # Where it ends, not how large it is: there is room behind the end.  Compaction changes nothing that is said.
        state = (len(files), self._end(files[-1])) if files else (0, 0)
        if state == self._topics_state:
            return self._topics
        documents: dict[str, Any] = {}
        prefix = f"topic/{self._namespace}/"
        for batch in batches_of(self._buffers("state/topics", 0, NO_LIMIT, [])):
            for key, value in zip(batch.keys() or (), batch.values(), strict=True):
                name = (key or b"").decode()
                if name.startswith(prefix):
                    documents[name.removeprefix(prefix)] = value and msgspec.json.decode(value)
        self._topics = {
            name: document["partition_uids"]
            for name, document in sorted(documents.items())
            if document is not None and not document.get("deleting", False)
        }
        self._topics_state = state
        return self._topics

    # Messages

    def offsets(self, topic: str, partition: int) -> Offsets:
        self.uid(topic, partition)
        files = self._files(_directory(self._namespace, topic, partition))
        if not files:
            return Offsets(0, 0)
        return Offsets(files[0].base_offset, self._end(files[-1]))

    def offset_at(self, topic: str, partition: int, time_us: int) -> int | None:
        """The first offset that was appended at or after a time."""
        self.uid(topic, partition)
        for segment in self._files(_directory(self._namespace, topic, partition)):
            if segment.is_complete and segment.header is not None and segment.header.last_append_us < time_us:
                continue
            position, next_offset = self._indexed(segment, "time_us", time_us - 1)
            with _opened(self._storage, segment.path) as file:
                for item in scan(file, position, segment.size, next_offset=next_offset, limit=segment.following):
                    if isinstance(item, Found) and item.header.append_time_us >= time_us:
                        return item.header.base_offset
        return None

    def read(
        self, topic: str, partition: int, first: int, until: int, *, damaged: list[tuple[int, int]] | None = None
    ) -> Iterator[memoryview]:
        """Stored batches with the messages from `first` to before `until`, whose checksums have been checked.

        The first batch may begin before `first` and the last end behind `until`.  Raises OffsetOutOfRange when `first`
        is gone or not there yet, and DataDamaged at messages that cannot be read; with a list for `damaged` those
        ranges (first and next offset) are added to it instead, and reading goes on behind them.
        """
        known = self.offsets(topic, partition)
        if not known.start <= first <= known.end:
            raise OffsetOutOfRange(f"{topic}/{partition}: offset {first} is not in {known.start}..{known.end}")
        found: list[tuple[int, int]] = [] if damaged is None else damaged
        for buffer in self._buffers(_directory(self._namespace, topic, partition), first, until, found):
            if found and damaged is None:
                break
            yield buffer
        if found and damaged is None:
            start, end = found[0]
            raise DataDamaged(f"{topic}/{partition}: offsets {start} to {end - 1} are damaged in {self._path}")

    def _files(self, directory: str) -> list[_SegmentFile]:
        """The segments of a partition, in order."""
        names = self._storage.names(directory)
        for _ in range(_LOOKS_MAX):
            files = self._look(directory, names)
            before, names = names, self._storage.names(directory)
            if names == before:
                return files
        raise StorageFailed(f"{self._path}/{directory} changes faster than it can be read")

    def _look(self, directory: str, names: list[str]) -> list[_SegmentFile]:
        """What recovery would take: without the segments that a compacted one has superseded."""
        kept: list[tuple[int, int, IndexHeader | None]] = []
        superseded_until = 0
        for base in offsets_named(names, "log"):
            if base < superseded_until:
                continue
            try:
                size = self._storage.size(segment_name(directory, base, "log"))
            except FileNotFoundError:
                continue  # removed just now
            header, _ = read_index_header(self._storage, segment_name(directory, base, "index"))
            if header is not None and (header.base_offset != base or f"{base:020d}.log.new" in names):
                header = None  # it may be that of a compacted file which is not in its place yet
            if header is not None and header.flags & IndexFlags.COMPACTED and header.log_bytes == size:
                superseded_until = header.next_offset
            kept.append((base, size, header))
        ends = [base for base, _, _ in kept][1:]
        return [
            _SegmentFile(directory, base, size, header, following)
            for (base, size, header), following in zip_longest(kept, ends)
        ]

    def _end(self, segment: _SegmentFile) -> int:
        """The offset behind the last whole batch of the last segment."""
        position, end = segment.confirmed
        with _opened(self._storage, segment.path) as file:
            for item in scan(file, position, segment.size, next_offset=end):
                if isinstance(item, Damage):
                    break
                end = item.next_offset
        return end

    def _indexed(self, segment: _SegmentFile, column: str, wanted: int) -> tuple[int, int]:
        """Position and offset of the last batch in the index whose `column` is not above `wanted`, or of the first."""
        header = segment.header
        if header is not None and segment.is_complete and header.entries:
            data = self._storage.read_all(segment.index_path)[INDEX_HEADER_BYTES:]
            entries = np.frombuffer(data, _ENTRY, len(data) // _ENTRY.itemsize)
            number = int(np.searchsorted(entries[column], wanted, "right")) - 1
            if number >= 0:
                offset, position = int(entries["offset"][number]), int(entries["position"][number])
                with _opened(self._storage, segment.path) as file:
                    start = file.read(position, HEADER_BYTES)
                # An entry has no checksum of its own; the batch that it points at does.
                if len(start) == HEADER_BYTES and start[:3] == _START and BatchHeader(start).base_offset == offset:
                    return position, offset
        return 0, segment.base_offset

    def _buffers(self, directory: str, first: int, until: int, damaged: list[tuple[int, int]]) -> Iterator[memoryview]:
        """Whole batches, after the ranges before them that are damaged have been added to `damaged`."""
        for segment in self._files(directory):
            if segment.following is not None and segment.following <= first:
                continue
            if segment.base_offset >= until:
                break
            for found in self._walk(segment, first, until):
                if isinstance(found, memoryview):
                    yield found
                elif found[0] < until and found[1] > first:
                    damaged.append((max(found[0], first), min(found[1], until)))

    def _walk(self, segment: _SegmentFile, first: int, until: int) -> Iterator[memoryview | tuple[int, int]]:
        """Whole batches of a segment, and in between the ranges of offsets that are damaged."""
        position, next_offset = self._indexed(segment, "offset", first)
        confirmed, confirmed_offset = segment.confirmed
        if confirmed < segment.size and first >= confirmed_offset:
            position, next_offset = confirmed, confirmed_offset
        window = _WINDOW_BYTES
        with _opened(self._storage, segment.path) as file:
            while position < segment.size:
                view = memoryview(file.read(position, min(window, segment.size - position)))
                if not view:
                    break  # shorter than it was
                chunk = walk(view, 0, until=until, verify=True)
                if chunk.stop:
                    header = BatchHeader(view, chunk.last)
                    next_offset = batch_next_offset(view, chunk.last, header)
                    position += chunk.stop
                    if next_offset > first:
                        yield view[: chunk.stop]
                if chunk.problem is None:
                    if chunk.stop < len(view):
                        return  # what follows lies behind `until`
                elif chunk.needs and position + chunk.needs <= segment.size:
                    window = max(_WINDOW_BYTES, chunk.needs)  # it goes on behind the window
                elif position >= confirmed:
                    return  # torn, or still being written
                else:
                    position, resumes_at = _step_over(file, position, confirmed, next_offset, confirmed_offset)
                    if resumes_at > next_offset:
                        yield next_offset, resumes_at
                    next_offset = resumes_at
        yield from segment.missing(next_offset)


def _step_over(file: File, position: int, end: int, next_offset: int, end_offset: int) -> tuple[int, int]:
    """Where the batches behind damage begin: their position and their offset."""
    resumes_at = end
    for item in scan(file, position, end, next_offset=next_offset, limit=end_offset):
        if isinstance(item, Damage):
            resumes_at = item.end
        elif item.position > position:
            return item.position, item.header.base_offset
        else:
            resumes_at = item.position + item.header.length  # its checksums hold, but it cannot be unpacked
    return resumes_at, end_offset


@contextmanager
def _opened(storage: DiskStorage, path: str) -> Iterator[File]:
    try:
        file = storage.open(path)
    except OSError as problem:
        raise StorageFailed(f"cannot read {path}: {problem.strerror or problem}") from None
    try:
        yield file
    finally:
        file.close()


def _directory(namespace: str, topic: str, partition: int) -> str:
    return f"topics/{namespace}/{topic}/{partition}"
