"""A segment: one file of consecutive batches, `{base offset}.log`, with its sparse index, `{base offset}.index`.

Everything here trusts the bytes it reads: they were written by this process, or surveyed and found good.  A segment
that was written by an earlier process is cold; `verify` (which may run in a thread) surveys it, and `accept` takes the
result over, after which damaged places are known and stepped around.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from millstream.errors import BatchDamaged
from millstream.log.cache import FileCache
from millstream.log.index import ENTRY_BYTES, INDEX_HEADER_BYTES, Entry, IndexFlags, IndexHeader, LiveIndex, StoredIndex
from millstream.log.producers import ProducerTable
from millstream.log.scan import Damage, cut_batches, scan
from millstream.log.storage import NO_ROOM, File, Storage
from millstream.records import HEADER_BYTES, BatchHeader, Buffer, Columns, batch_next_offset, read_header

__all__ = ["DamagedRange", "Segment", "Survey", "Verified", "offsets_named", "segment_name", "survey"]

_STEP_BYTES: Final = 8192  # how much a search reads at once: a little more than lies between two index entries
#: More than this in one write is not worth preparing room for.
_PREPARED_WRITE_BYTES_MAX: Final = 32 * 1024
_ROOM_BYTES_MAX: Final = 256 * 1024
_ZEROS: Final = memoryview(bytes(_ROOM_BYTES_MAX))
_NO_EPOCH: Final = 1 << 32  # one more than the header has room for
_STEPS: Final = 64  # from batch to batch cost less than one search in an index that is stored
_OFFSETS: Final = int(Columns.OFFSETS)


def segment_name(directory: str, base_offset: int, suffix: str) -> str:
    """The path of a segment's file; offsets are padded so that names sort like numbers."""
    return f"{directory}/{base_offset:020d}.{suffix}"


def offsets_named(names: Iterable[str], suffix: str) -> list[int]:
    """The offsets in the names of files with a suffix, ascending; whatever else lies around is not ours."""
    stems = (name.partition(".")[0] for name in names if name.endswith(f".{suffix}"))
    return sorted(int(stem) for stem in stems if len(stem) == 20 and stem.isdecimal())


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Offsets that cannot be read, and the bytes of the segment where they were."""

    first_offset: int
    next_offset: int
    position: int
    end: int


@dataclass(slots=True)
class Survey:
    """What a scan of a segment's file found."""

    index: LiveIndex
    size: int  # without the room behind the last batch
    next_offset: int
    reached: int  # the offset behind the last batch; less than next_offset when the end is missing
    first_append_us: int = 0
    last_append_us: int = 0
    messages: int = 0
    batches: int = 0
    damaged: list[DamagedRange] = field(default_factory=list)
    scanned: int = 0  # how much of the file was looked at


def survey(
    file: File,
    base_offset: int,
    size: int,
    *,
    interval_bytes: int,
    limit: int | None = None,
    producers: ProducerTable | None = None,
) -> Survey:
    """Scan a segment's file up to `size` and rebuild everything that is known about it.

    `limit` is the segment's next offset if that is known; damage at the end then extends up to it.  Batches are
    recorded in `producers` as they come.
    """
    index = LiveIndex(interval_bytes)
    found = Survey(index, 0, base_offset, base_offset, scanned=size)
    for item in scan(file, 0, size, next_offset=base_offset, limit=limit):
        if isinstance(item, Damage):
            _note_damage(found, item)
            found.size = item.end
            continue
        header = item.header
        found.size = item.position + header.length
        _end_damage(found, header.base_offset)
        if item.position >= index.due:
            index.add(header.base_offset, item.position, header.append_time_us)
        if producers is not None:
            producers.record(header, header.base_offset, header.append_time_us)
        if not found.batches:
            found.first_append_us = header.append_time_us
        found.last_append_us = max(found.last_append_us, header.append_time_us)
        found.batches += 1
        found.messages += header.count
        found.next_offset = found.reached = item.next_offset
    if limit is not None:
        _end_damage(found, limit)
        found.next_offset = max(found.next_offset, limit)
    return found


def _note_damage(found: Survey, damage: Damage) -> None:
    if found.damaged and found.damaged[-1].end == damage.position:
        before = found.damaged.pop()
        found.damaged.append(DamagedRange(before.first_offset, before.next_offset, before.position, damage.end))
    else:
        found.damaged.append(DamagedRange(found.next_offset, found.next_offset, damage.position, damage.end))


def _end_damage(found: Survey, next_offset: int) -> None:
    """Give damage that was noted just now its last offset, which only the batch behind it knows."""
    if found.damaged and found.damaged[-1].first_offset == found.next_offset < next_offset:
        last = found.damaged.pop()
        found.damaged.append(DamagedRange(last.first_offset, next_offset, last.position, last.end))


@dataclass(frozen=True, slots=True)
class Verified:
    """A survey and the segment it is of."""

    segment: Segment
    found: Survey


class Segment:
    """One file of a partition's log."""

    __slots__ = (
        "_cold_bytes",
        "_cold_next_offset",
        "_files",
        "_storage",
        "base_offset",
        "compacted",
        "damaged",
        "directory",
        "first_append_us",
        "index",
        "index_path",
        "interval_bytes",
        "last_append_us",
        "messages",
        "next_offset",
        "no_producers",
        "path",
        "room_end",
        "size",
        "stored",
        "verified",
    )

    def __init__(
        self, storage: Storage, files: FileCache, directory: str, base_offset: int, *, interval_bytes: int
    ) -> None:
        self._storage = storage
        self._files = files
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.directory = directory
        self.path = segment_name(directory, base_offset, "log")
        self.index_path = segment_name(directory, base_offset, "index")
        self.interval_bytes = interval_bytes
        self.index: LiveIndex | StoredIndex = LiveIndex(interval_bytes)
        self.size = 0
        self.room_end = 0  # up to here the file has been written before, if that is more than `size`
        self.messages = 0
        self.first_append_us = 0
        self.last_append_us = 0
        self.stored = False  # sealed, and its index is on disk
        self.compacted = False
        self.no_producers = False  # known: the producer table was empty at the end of this segment
        self.verified = True  # False: cold, do not serve before `accept`
        self.damaged: tuple[DamagedRange, ...] = ()
        self._cold_bytes = self._cold_next_offset = 0  # how much of the segment an earlier process wrote

    def __repr__(self) -> str:
        return f"Segment({self.path}, offsets {self.base_offset}..{self.next_offset}, {self.size} bytes)"

    def successor(self) -> Segment:
        """An empty segment of the same base offset, for compaction to fill."""
        fresh = Segment(
            self._storage, self._files, self.directory, self.base_offset, interval_bytes=self.interval_bytes
        )
        fresh.compacted = True
        return fresh

    def take_header(self, header: IndexHeader) -> None:
        """Become the cold segment that an index header describes."""
        self.next_offset, self.size, self.messages = header.next_offset, header.log_bytes, header.messages
        self.first_append_us, self.last_append_us = header.first_append_us, header.last_append_us
        self.stored = bool(header.flags & IndexFlags.SEALED)
        self.compacted = bool(header.flags & IndexFlags.COMPACTED)
        # What is known of the end of an active segment is not true any more after the next append.
        self.no_producers = self.stored and bool(header.flags & IndexFlags.NO_PRODUCERS)
        # An empty file has nothing to verify.
        self.verified = not header.log_bytes
        self._cold_bytes, self._cold_next_offset = header.log_bytes, header.next_offset
        if self.stored:
            self.index = StoredIndex(self._files, self._storage, self.index_path, header.entries)
        else:
            data = self._storage.read_all(self.index_path)
            end = INDEX_HEADER_BYTES + ENTRY_BYTES * header.entries
            self.index = LiveIndex.decode(data[INDEX_HEADER_BYTES:end], self.interval_bytes)

    def take_survey(self, found: Survey) -> None:
        """Become the segment that was surveyed."""
        self.next_offset, self.size, self.messages = found.next_offset, found.size, found.messages
        self.first_append_us, self.last_append_us = found.first_append_us, found.last_append_us
        self.index = found.index
        self.damaged = tuple(found.damaged)
        self.verified = True

    def header(self, flags: int, *, durable_bytes: int | None = None, next_offset: int | None = None) -> IndexHeader:
        """The index header that describes the segment now."""
        flags |= IndexFlags.COMPACTED if self.compacted else 0
        flags |= IndexFlags.NO_PRODUCERS if self.no_producers else 0
        return IndexHeader(
            flags,
            len(self.index),
            self.size,
            self.base_offset,
            self.next_offset if next_offset is None else next_offset,
            self.first_append_us,
            self.last_append_us,
            self.size if durable_bytes is None else durable_bytes,
            self.messages,
        )

    def append(self, file: File, data: Buffer, next_offset: int, time_us: int, *, room_max: int = 0) -> None:
        """Write whole stamped batches at the end.  After an OSError nothing here has changed, but the file may have.

        With `room_max` the file grows in steps, by zeros behind what is written.  Syncing bytes that were written into
        such room takes a file system less time (two thirds to an eighth on ext4), because it need not write down where
        the file ends.
        """
        end = self.size + len(data)
        if end <= self.room_end or room_max <= 0 or len(data) > _PREPARED_WRITE_BYTES_MAX:
            file.write(data, self.size)
        else:
            # As much as there is already: a partition with a few messages does not take the space of many.
            self._append_with_room(file, data, min(self.size, room_max, _ROOM_BYTES_MAX))
        if not self.size:
            self.first_append_us = time_us
        self.size = end
        self.last_append_us = time_us
        self.messages += next_offset - self.next_offset
        self.next_offset = next_offset

    def _append_with_room(self, file: File, data: Buffer, room: int) -> None:
        try:
            file.write(b"".join((data, _ZEROS[:room])), self.size)
        except OSError as problem:
            if problem.errno not in NO_ROOM:
                raise
            # There may be just enough space for the messages.  Some zeros may be there, to be cut off later.
            file.write(data, self.size)
        self.room_end = self.size + len(data) + room

    def give_back_room(self, file: File) -> None:
        """Let the file end where its batches do."""
        if self.room_end > self.size:
            file.truncate(self.size)
        self.room_end = 0

    def use_stored_index(self) -> None:
        """Let go of the index in memory, now that it is in its file."""
        self._files.drop(self._storage, self.index_path)
        self.index = StoredIndex(self._files, self._storage, self.index_path, len(self.index))

    # Reading

    def read(self, position: int, bytes_max: int, before: int) -> tuple[bytes, int, int]:
        """Whole batches from a position on: the bytes, the offset behind them, and the position there.

        At least one batch, even if it is larger than `bytes_max`; none (b"", -1, position) when the first one reaches
        beyond offset `before`.
        """
        file = self._files.get(self._storage, self.path)
        end = self._readable_end(position)
        data = file.read(position, self._size_to_read(position, bytes_max, end))
        start = self._cut_from(data, position, before)
        stop, next_offset = cut_batches(data, start, len(data), before)
        if next_offset < 0 and start:
            # The entry stands at a batch that does not fit any more: everything before it does.
            return data[:start], BatchHeader(data, start).base_offset, position + start
        if next_offset < 0:
            # A header whose stamp is checked: a length that is a lie must not make us read gigabytes.
            length = read_header(data if len(data) >= HEADER_BYTES else file.read(position, HEADER_BYTES)).length
            if length <= len(data):
                return b"", -1, position
            # The index may have pushed the file out of the cache.
            data = self._files.get(self._storage, self.path).read(position, length)
            stop, next_offset = cut_batches(data, 0, len(data), before)
            if next_offset < 0:
                return b"", -1, position
        return data if stop == len(data) else data[:stop], next_offset, position + stop

    def _size_to_read(self, position: int, bytes_max: int, end: int) -> int:
        """At most `bytes_max`; where that is much, up to a batch that the index knows: cutting off the rest copies.

        Where no batch begins on the way, the one that is here is larger than that, and its header says how large.
        """
        if bytes_max >= end - position or bytes_max <= _STEPS * self.interval_bytes:
            return min(bytes_max, end - position)
        entry = self.index.last_at_position(position + bytes_max)
        if entry is None or entry[1] >= end:
            return bytes_max
        return entry[1] - position if entry[1] > position else HEADER_BYTES

    def _readable_end(self, position: int) -> int:
        for damage in self.damaged:
            if damage.position > position:
                return damage.position
        return self.size

    def _cut_from(self, data: bytes, position: int, before: int) -> int:
        """Where to start looking for the last whole batch in what was read: the index spares us most of a long way."""
        if len(data) <= max(self.interval_bytes, HEADER_BYTES) or len(data) <= _STEPS * BatchHeader(data).length:
            return 0
        entry = self.index.last_at_position(position + len(data) - HEADER_BYTES)
        if entry is not None and entry[0] > before:
            entry = self.index.last_at_offset(before)
        if entry is None or entry[1] <= position or not self._holds(entry, data, entry[1] - position):
            return 0
        return entry[1] - position

    @staticmethod
    def _holds(entry: Entry, data: bytes, at: int) -> bool:
        """Whether the batch that an index entry points at is the one it claims; a flipped bit must not misguide us."""
        try:
            header = read_header(data, at)
        except BatchDamaged:
            return False
        return (header.base_offset, header.append_time_us) == (entry[0], entry[2])

    @staticmethod
    def entry_holds(file: File, entry: Entry) -> bool:
        """Whether an index entry describes the batch that it points at."""
        return Segment._holds(entry, file.read(entry[1], HEADER_BYTES), 0)

    def locate(self, offset: int) -> int:
        """Position of the batch with an offset, or of the first one behind it, or of the damage that hides it."""
        entry = self.index.last_at_offset(offset)
        return self._search(entry, lambda _, next_offset: next_offset > offset, offset)

    def locate_time(self, time_us: int) -> int | None:
        """The first offset in the segment that was appended at or after a time."""
        entry = self.index.last_before_time(time_us)
        position = self._search(entry, lambda header, _: header.append_time_us >= time_us, -1)
        return self._header_at(position).base_offset if position < self.size else None

    def first_epoch(self) -> int:
        """The leader epoch of the first batch that can be read; later than any where there is none."""
        position = self._search(None, lambda *_: True, -1)
        return self._epoch_at(position) if position < self.size else _NO_EPOCH

    def locate_epoch_after(self, epoch: int) -> int | None:
        """The first offset in the segment that was appended in a later epoch."""
        index = self.index
        number = bisect_right(range(len(index)), epoch, key=lambda number: self._epoch_at(index.entry(number)[1]))
        entry = index.entry(number - 1) if number else None
        position = self._search(entry, lambda header, _: header.leader_epoch > epoch, -1)
        return self._header_at(position).base_offset if position < self.size else None

    def _epoch_at(self, position: int) -> int:
        return self._header_at(position).leader_epoch

    def _header_at(self, position: int) -> BatchHeader:
        return read_header(self._files.get(self._storage, self.path).read(position, HEADER_BYTES))

    def _search(self, entry: Entry | None, wanted: Callable[[BatchHeader, int], bool], offset: int) -> int:
        """Step from batch to batch, from an index entry on, to the first that is wanted or to damage over `offset`."""
        file = self._files.get(self._storage, self.path)
        position = 0
        if entry is not None and entry[1] < self.size:
            position = entry[1] if self.entry_holds(file, entry) else 0
        window, window_at = b"", position
        while position < self.size:
            damage = self.damage_at(position)
            if damage is not None:
                if damage.first_offset <= offset < damage.next_offset:
                    return position
                if damage.end > position:
                    position = damage.end
                    continue
            at = position - window_at
            if not 0 <= at <= len(window) - HEADER_BYTES:
                window, window_at, at = file.read(position, _STEP_BYTES), position, 0
            header = read_header(window, at)
            if not header.flags & _OFFSETS:
                next_offset = header.base_offset + header.count
            else:
                prelude = file.read(position, HEADER_BYTES + 8 + 4 * header.count)
                next_offset = batch_next_offset(prelude, 0, header)
            if wanted(header, next_offset):
                return position
            position += header.length
        return position

    def damage_at(self, position: int) -> DamagedRange | None:
        """The damaged range that starts at a position."""
        if not self.damaged:
            return None
        number = bisect_right(self.damaged, position, key=lambda damage: damage.position) - 1
        return self.damaged[number] if number >= 0 and self.damaged[number].position == position else None

    # Verification

    def verify(self, *, everything: bool = False) -> Verified:
        """Survey what an earlier process left, or everything in a segment that is sealed.

        Safe in a thread: opens its own file and changes nothing.
        """
        size, limit = self._cold_bytes, self._cold_next_offset
        if everything:
            size, limit = self.size, self.next_offset
        file = self._storage.open(self.path)
        try:
            found = survey(file, self.base_offset, size, interval_bytes=self.interval_bytes, limit=limit)
        finally:
            file.close()
        return Verified(self, found)

    def accept(self, found: Survey) -> bool:
        """Take over what `verify` found; returns whether the index in the file disagrees with it."""
        self.damaged = tuple(found.damaged)
        self.verified = True
        if isinstance(self.index, LiveIndex):
            self.index.replace_before(found.scanned, found.index)
            return False
        file = self._files.get(self._storage, self.index_path)
        index = found.index
        if found.scanned < self.size:
            # This process has written the rest, and sealed the segment since.
            data = file.read(INDEX_HEADER_BYTES, ENTRY_BYTES * len(self.index))
            index = LiveIndex.decode(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES], self.interval_bytes)
            index.replace_before(found.scanned, found.index)
        if file.read(INDEX_HEADER_BYTES, ENTRY_BYTES * len(index) + 1) == index.encode():
            return False
        self.index = index
        return True

    def doubt(self) -> None:
        """Something read from this segment made no sense: treat all of it as written by somebody else."""
        self._cold_bytes, self._cold_next_offset = self.size, self.next_offset
        self.verified = False
