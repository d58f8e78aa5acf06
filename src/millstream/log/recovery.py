"""Bringing a partition back from what its directory holds: after a clean close, a crash, a power cut, or rot.

What counts as proof:

- A sealed index says that its segment is complete and on disk.  Such segments are opened by reading 64 bytes each.
- `durable bytes` in the index of the active segment says how much of it was confirmed.
- Behind that, the first place that is not a good batch is a torn write and ends the log.  What was cut off is thrown
  away if it contains no whole batch, and otherwise moved aside to `{base}-{position}.damaged`, or `-2.damaged` if
  there is one: it was never confirmed, but somebody may want to look.
- Damage anywhere else is rot: messages that were confirmed cannot be read any more.  The range is reported, readers
  step over it, the bytes stay where they are, and their offsets are not used again.

Everything that survives is made durable before it is shown to anybody, since a process that was killed may have left it
in the page cache only.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from millstream.log.cache import FileCache
from millstream.log.index import ENTRY_BYTES, INDEX_HEADER_BYTES, IndexFlags, IndexHeader
from millstream.log.producers import ProducerTable
from millstream.log.scan import Found, scan
from millstream.log.sealing import store_index
from millstream.log.segment import DamagedRange, Segment, Survey, offsets_named, segment_name, survey
from millstream.log.storage import File, Storage
from millstream.log.swap import finish_swaps, read_index_header, remove_segment
from millstream.records import Columns

__all__ = ["Recovered", "RecoveryReport", "recover"]

_REWRITE_BYTES: Final = 1024 * 1024


@dataclass(slots=True)
class RecoveryReport:
    """What opening a partition found and did.  Damage that later reads come upon is added."""

    clean: bool = True  # closed in order: nothing had to be scanned
    truncated_bytes: int = 0
    damaged: list[tuple[int, int]] = field(default_factory=list)  # first offset, next offset
    moved_aside: list[str] = field(default_factory=list)
    rebuilt_indexes: int = 0
    seconds: float = 0.0

    def add_damaged(self, ranges: list[DamagedRange] | tuple[DamagedRange, ...]) -> None:
        for damage in ranges:
            offsets = (damage.first_offset, damage.next_offset)
            if offsets not in self.damaged:
                self.damaged.append(offsets)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A partition's segments, the active one last."""

    segments: list[Segment]
    producers: ProducerTable
    report: RecoveryReport
    new: bool  # the name of its only file is not synced yet


@dataclass(slots=True)
class _Candidate:
    """A log file, and what its index header claims about it."""

    segment: Segment
    header: IndexHeader | None
    size: int
    index_bytes: int

    @property
    def is_sealed(self) -> bool:
        return self._describes_all() and bool(self.header and self.header.flags & IndexFlags.SEALED)

    @property
    def is_clean(self) -> bool:
        if not self.size:
            return self.header is None or not self.header.durable_bytes
        return self._describes_all() and bool(self.header and self.header.flags & IndexFlags.CLEAN)

    @property
    def proves_predecessors(self) -> bool:
        """Confirmed bytes here mean that everything before was confirmed as well."""
        return self.header is not None and _proves(self.header)

    def _describes_all(self) -> bool:
        header = self.header
        return header is not None and (header.log_bytes, _index_bytes(header)) == (self.size, self.index_bytes)


def _proves(header: IndexHeader) -> bool:
    return bool(header.durable_bytes or header.flags & IndexFlags.SEALED)


def _index_bytes(header: IndexHeader) -> int:
    return INDEX_HEADER_BYTES + ENTRY_BYTES * header.entries


def recover(storage: Storage, directory: str, *, interval_bytes: int, files: FileCache) -> Recovered:
    """Open what the directory holds; an empty one becomes a partition that starts at offset 0."""
    return _Recovery(storage, directory, interval_bytes, files).run()


class _Recovery:
    def __init__(self, storage: Storage, directory: str, interval_bytes: int, files: FileCache) -> None:
        self._storage = storage
        self._directory = directory
        self._interval_bytes = interval_bytes
        self._files = files
        self._report = RecoveryReport()
        self._tables: dict[int, ProducerTable] = {}  # by base offset: the producers of segments scanned on the way
        self._no_producers_at: set[int] = set()  # offsets at which a header says that the producer table was empty
        self._names_changed = False
        self._orphans: list[str] = []  # indexes without a log file: mostly leftovers
        self._used = 0, 0  # the offsets that the last of them speaks of

    def run(self) -> Recovered:
        finish_swaps(self._storage, self._directory)
        candidates = self._drop_superseded(self._candidates())
        proven = max((i for i, it in enumerate(candidates) if it.proves_predecessors), default=-1)
        segments: list[Segment] = []
        for number, candidate in enumerate(candidates):
            header = candidate.header
            following = candidates[number + 1].segment.base_offset if number + 1 < len(candidates) else None
            if candidate.is_sealed:
                self._take_header(candidate)
            elif (
                number < proven
                or (header is not None and header.flags & IndexFlags.SEALED)
                or (following is not None and self._was_sealed(candidate))
            ):
                self._rebuild(candidate, following)
            else:
                segments += self._recover_tail(candidates[number:])
                break
            segments.append(candidate.segment)
        # If the last file is gone only its index knows which offsets must not be used again.
        lost_from, end = self._used
        is_lost = end > (segments[-1].next_offset if segments else 0)
        if segments and not segments[-1].stored and (is_lost or self._ends_damaged(segments[-1])):
            # Appending behind damage would make it look like the start of what follows.
            self._seal(segments[-1])
        if not segments or segments[-1].stored:
            segments.append(self._create(end if is_lost else segments[-1].next_offset if segments else 0))
        for path in self._orphans:
            self._remove(path)
        if is_lost:
            self._report.clean = False
            if len(segments) == 1:
                self._report.damaged.append((lost_from, end))
        self._report_missing(segments)
        producers = self._recover_producers(segments)
        # A new partition has nothing to lose yet: its first sync takes the name of its file along.
        new = not candidates and not is_lost
        if not new and (self._names_changed or not self._report.clean or not segments[-1].size):
            # Without a clean close even names that we only found may be in the cache only.
            self._storage.sync_directory(self._directory)
        return Recovered(segments, producers, self._report, new)

    def _candidates(self) -> list[_Candidate]:
        names = self._storage.names(self._directory)
        bases = offsets_named(names, "log")
        for base in sorted(set(offsets_named(names, "index")).difference(bases)):
            path = segment_name(self._directory, base, "index")
            self._orphans.append(path)
            header, _ = read_index_header(self._storage, path)
            if header is not None and header.base_offset == base and _proves(header):
                self._used = base, header.next_offset
        return [self._candidate(base) for base in bases]

    def _candidate(self, base_offset: int) -> _Candidate:
        segment = self._segment(base_offset)
        header, index_bytes = read_index_header(self._storage, segment.index_path)
        if header is not None and header.base_offset != base_offset:
            header = None
        return _Candidate(segment, header, self._storage.size(segment.path), index_bytes)

    def _segment(self, base_offset: int) -> Segment:
        return Segment(self._storage, self._files, self._directory, base_offset, interval_bytes=self._interval_bytes)

    def _drop_superseded(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Remove the inputs of a compaction that was interrupted behind the point where it counts.

        And the empty file of a roll that was given up, after which the segment before it went on: it would hide what
        that one has got since.
        """
        kept: list[_Candidate] = []
        sealed_until = superseded_until = 0
        for candidate in candidates:
            base = candidate.segment.base_offset
            if base < superseded_until or (base < sealed_until and not candidate.size):
                remove_segment(self._storage, self._directory, base)
                self._names_changed = True
                continue
            kept.append(candidate)
            if candidate.is_sealed and candidate.header:
                sealed_until = candidate.header.next_offset
                if candidate.header.flags & IndexFlags.COMPACTED:
                    superseded_until = sealed_until
        return kept

    def _was_sealed(self, candidate: _Candidate) -> bool:
        """Whether a segment whose index says nothing any more can only have been sealed.

        If compaction took its last messages out, its batches end before its offsets do, and what follows it would look
        as if it did not belong there: its offsets would be used again.
        """
        if candidate.header is not None:
            return False
        end = 0
        file = self._storage.open(candidate.segment.path)
        try:
            for item in scan(file, 0, candidate.size, next_offset=candidate.segment.base_offset):
                if not isinstance(item, Found):
                    return False  # or a torn write, and nobody was promised anything
                if item.header.flags & Columns.OFFSETS:
                    return True
                end = item.position + item.header.length
        finally:
            file.close()
        # An index gets entries in the end, and room is cut off before.  Of a file that is empty there are no notes.
        return end == candidate.size and candidate.index_bytes > (INDEX_HEADER_BYTES if end else 0)

    def _rebuild(self, candidate: _Candidate, following: int | None) -> None:
        """Make a new index for a segment that is known to be complete; what is damaged in it is rot."""
        segment, header = candidate.segment, candidate.header
        if header is not None and following is not None and header.next_offset > following:
            # Of a compaction whose log file is lost: this is one of its inputs, and the others are there too.  If it
            # were believed, the next recovery would remove them.
            header = None
        limit = header.next_offset if header is not None and header.flags & IndexFlags.SEALED else following
        self._report.clean = False
        file = self._storage.open(segment.path)
        try:
            found = self._survey(segment, file, candidate.size, limit)
            file.sync()
        finally:
            file.close()
        if header is not None:
            segment.compacted = bool(header.flags & IndexFlags.COMPACTED)
            sealed_without = IndexFlags.SEALED | IndexFlags.NO_PRODUCERS
            segment.no_producers = header.flags & sealed_without == sealed_without
            self._note_missing_end(found, header.log_bytes)
        self._take(segment, found)
        self._seal(segment)

    def _recover_tail(self, tail: list[_Candidate]) -> list[Segment]:
        """The segments from the first one on of which nobody knows that it is complete."""
        kept: list[Segment] = []
        for number, candidate in enumerate(tail):
            segment, rest = candidate.segment, tail[number + 1 :]
            kept.append(segment)
            if not rest and candidate.is_clean:
                if candidate.size:
                    self._take_header(candidate)
                break
            self._report.clean = False
            whole = self._recover_torn(candidate)
            if rest and (not whole or rest[0].segment.base_offset != segment.next_offset):
                # What follows was written behind the place where the log turned out to end.
                self._set_aside(rest)
                break
            if rest:
                self._seal(segment)
        return kept

    @staticmethod
    def _ends_damaged(segment: Segment) -> bool:
        return bool(segment.damaged) and segment.damaged[-1].end == segment.size

    def _take_header(self, candidate: _Candidate) -> None:
        header = candidate.header
        assert header is not None
        candidate.segment.take_header(header)
        if header.flags & IndexFlags.NO_PRODUCERS:
            self._no_producers_at.add(header.next_offset)

    def _recover_torn(self, candidate: _Candidate) -> bool:
        """Cut a segment off behind its last good batch; returns whether there was nothing to cut."""
        segment, size = candidate.segment, candidate.size
        durable_bytes, confirmed = 0, segment.base_offset
        if candidate.header is not None:
            durable_bytes, confirmed = candidate.header.durable_bytes, candidate.header.next_offset
        file = self._storage.open(segment.path)
        try:
            found = self._survey(segment, file, size, confirmed if size <= durable_bytes else None)
            if found.size <= durable_bytes < size and found.next_offset < confirmed:
                # Zeros below are no room, since there were batches; and how far the last of them reached, if it is
                # damaged, only the note knows.
                found = self._survey(segment, file, durable_bytes, confirmed)
            end = found.size
            torn = next((damage for damage in found.damaged if damage.end > durable_bytes), None)
            if torn is not None:
                cut = max(torn.position, durable_bytes)
                if torn.end < end:
                    self._save(segment, cut, file.read(cut, end - cut))
                file.truncate(cut)
                self._report.truncated_bytes += end - cut
                found = self._survey(segment, file, cut, confirmed if cut <= durable_bytes else None)
            elif end < size:
                file.truncate(end)
            self._make_durable(file, durable_bytes, found.size)
        finally:
            file.close()
        self._note_missing_end(found, durable_bytes)
        self._take(segment, found)
        self._note_durable(segment)
        return torn is None

    @staticmethod
    def _make_durable(file: File, position: int, end: int) -> None:
        """Sync the survivors, which may be in the page cache only, whatever happened to them before."""
        # A sync that failed may have left pages marked as written that never were; the next sync would succeed without
        # writing them.  Written again they are dirty again.
        while position < end:
            data = file.read(position, min(_REWRITE_BYTES, end - position))
            file.write(data, position)
            position += len(data)
        file.sync()

    def _note_durable(self, segment: Segment) -> None:
        """Leave a note how much is durable by now, so that the next recovery need not do it again."""
        file = self._storage.open(segment.index_path, create=True)
        try:
            file.write(segment.header(0).encode(), 0)
        finally:
            file.close()

    def _survey(self, segment: Segment, file: File, size: int, limit: int | None) -> Survey:
        producers = self._tables[segment.base_offset] = ProducerTable()
        interval = self._interval_bytes
        return survey(file, segment.base_offset, size, interval_bytes=interval, limit=limit, producers=producers)

    @staticmethod
    def _note_missing_end(found: Survey, log_bytes: int) -> None:
        """Report offsets whose bytes are not damaged but gone: the file is shorter than it has been."""
        hidden = found.damaged[-1].next_offset if found.damaged else 0
        if found.size < log_bytes and max(found.reached, hidden) < found.next_offset:
            found.damaged.append(DamagedRange(found.reached, found.next_offset, found.size, found.size))

    def _take(self, segment: Segment, found: Survey) -> None:
        segment.take_survey(found)
        self._report.add_damaged(found.damaged)

    def _seal(self, segment: Segment) -> None:
        store_index(self._storage, segment)
        segment.stored = True
        segment.use_stored_index()
        self._report.rebuilt_indexes += 1

    def _set_aside(self, candidates: list[_Candidate]) -> None:
        for candidate in candidates:
            segment = candidate.segment
            file = self._storage.open(segment.path)
            try:
                found = scan(file, 0, candidate.size, next_offset=segment.base_offset)
                has_batches = any(isinstance(item, Found) for item in found)
            finally:
                file.close()
            if has_batches:
                aside = self._unused_name(segment, 0)
                self._storage.rename(segment.path, aside)
                self._report.moved_aside.append(aside)
            remove_segment(self._storage, self._directory, segment.base_offset)
            self._report.truncated_bytes += candidate.size
            self._names_changed = True

    def _save(self, segment: Segment, position: int, data: bytes) -> None:
        aside = self._unused_name(segment, position)
        self._storage.replace(aside, data)
        self._report.moved_aside.append(aside)

    def _unused_name(self, segment: Segment, position: int) -> str:
        """Where to move something aside: the offsets are used again, and what was moved there before stays."""
        name = f"{self._directory}/{segment.base_offset:020d}-{position}"
        number, aside = 1, f"{name}.damaged"
        while self._storage.exists(aside):
            number += 1
            aside = f"{name}-{number}.damaged"
        return aside

    def _create(self, base_offset: int) -> Segment:
        segment = self._segment(base_offset)
        self._storage.open(segment.path, create=True).close()
        self._names_changed = True
        return segment

    def _report_missing(self, segments: list[Segment]) -> None:
        """A file that is gone from the middle is damage as well."""
        for before, segment in pairwise(segments):
            if before.next_offset < segment.base_offset:
                gap = (before.next_offset, segment.base_offset)
                self._report.damaged.append(gap)

    def _recover_producers(self, segments: list[Segment]) -> ProducerTable:
        """The newest snapshot that is good, plus what the segments behind it say; without one, all segments.

        Nobody is forgotten by the clock here: who was stopped together with the broker has not been silent.
        """
        next_offset = segments[-1].next_offset
        table, known_until = self._newest_snapshot(next_offset)
        sealed_without = False
        for segment in segments:
            if segment.next_offset <= known_until or not segment.size:
                continue
            sealed_without = sealed_without or segment.stored
            seen = self._tables.get(segment.base_offset)
            if seen is None:
                file = self._storage.open(segment.path)
                try:
                    self._survey(segment, file, segment.size, segment.next_offset)
                finally:
                    file.close()
                seen = self._tables[segment.base_offset]
            table.merge(seen, from_offset=known_until)
        if sealed_without and len(table):
            # Compaction drops who the producers were; from then on only a snapshot knows.
            with suppress(OSError):
                self._storage.replace(
                    segment_name(self._directory, next_offset, "producers"), table.encode(next_offset)
                )
        return table

    def _newest_snapshot(self, next_offset: int) -> tuple[ProducerTable, int]:
        offsets = set(offsets_named(self._storage.names(self._directory), "producers"))
        for offset in offsets:
            if offset > next_offset:
                # It knows of batches that were cut off; once as many were appended again it would look right.
                self._remove(segment_name(self._directory, offset, "producers"))
        for offset in sorted(offsets | self._no_producers_at, reverse=True):
            if offset in offsets and offset <= next_offset:
                data = self._storage.read_all(segment_name(self._directory, offset, "producers"))
                table = ProducerTable.decode(data, offset)
                if table is not None:
                    return table, offset
            if offset in self._no_producers_at:
                return ProducerTable(), offset
        return ProducerTable(), 0

    def _remove(self, path: str) -> None:
        self._storage.remove(path)
        self._names_changed = True
