"""The log of one partition: ordered segments, one writer.

Appending stamps batches, joins what arrived together into one object, writes it with one call, and keeps that very
object for the readers at the end of the log, if there are any.  Reading hands out whole batches and never looks at
messages.

Appended is not yet durable.  The owner takes `dirty_files`, syncs each of them (in a thread, if it likes), and reports
back with `mark_durable`; until then it must not show the messages to anybody, which it does by passing the high
watermark as `before` to `read`.  When a sync fails it calls `fail`: nothing more is appended, what was durable stays
readable, and a restart recovers what is provably there.

Not safe for use from several threads.  Made for threads are only `sync` of what `dirty_files` returns, `Segment.verify`
and compaction's rewrite.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NoReturn

from millstream.errors import OffsetOutOfRange, StorageFailed
from millstream.log.cache import FileCache, TailCache
from millstream.log.index import MESSAGES_MAX, IndexFlags, LiveIndex
from millstream.log.reading import Chunk, StoredReader, read_tail
from millstream.log.recovery import RecoveryReport, recover
from millstream.log.retention import Retention
from millstream.log.sealing import DirectorySync, Seal, Seals, SyncRound, remove_snapshots_before, store_index
from millstream.log.segment import Segment, Verified, segment_name
from millstream.log.storage import File, NotOpened, Storage, Syncable, parent_of
from millstream.log.swap import put_in_place, remove_segment, remove_superseded
from millstream.records import stamp

__all__ = ["Chunk", "LogConfig", "PartitionLog"]

#: Bytes are kept for readers at the end of the log.  After this much without any, a batch is written from where it was
#: received, without a copy; who comes back reads the files once.
_UNREAD_BYTES_MAX: Final = 1024 * 1024
#: Rounds of this size and less spend more time on the file's end than on its bytes.
_PREPARED_ROUND_BYTES_MAX: Final = 64 * 1024
_DURABLE_STEP_BYTES: Final = 4 * 1024 * 1024  # how often the confirmed size is noted: costs one small write each


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How a partition's files are cut."""

    segment_bytes: int = 64 * 1024 * 1024
    index_interval_bytes: int = 4096
    #: `close` leaves an index for an active segment of this size or more.  Scanning a smaller one at the next start
    #: costs less than the syncs that it needs, which thousands of small partitions would feel when the broker stops.
    notes_bytes_min: int = 0


class PartitionLog:
    """One partition's messages, in files."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        config: LogConfig,
        files: FileCache,
        tail: TailCache,
    ) -> None:
        """Use `open`."""
        recovered = recover(storage, directory, interval_bytes=config.index_interval_bytes, files=files)
        self.directory = directory
        self.config = config
        self.leader_epoch = 0
        self.recovery: RecoveryReport = recovered.report
        self.producers = recovered.producers
        self.last_append_us = 0
        self._storage = storage
        self._files = files
        self._tail = tail.attach()
        self._unread_bytes = 0  # appended since somebody last read at the end
        self._segment_bytes = config.segment_bytes
        self._segments = recovered.segments
        self._bases = [segment.base_offset for segment in recovered.segments]
        for segment in self._segments:
            # An empty segment takes part in the search by time as if it had been written just after its predecessor.
            segment.last_append_us = self.last_append_us = max(segment.last_append_us, self.last_append_us)
        self.start_offset = self._bases[0]
        self.next_offset = self._segments[-1].next_offset
        self.size_bytes = sum(segment.size for segment in self._segments)
        self._active: Segment = self._segments[-1]
        assert isinstance(self._active.index, LiveIndex)
        self._index: LiveIndex = self._active.index
        self._file: File | None = None  # the active segment's file while it has bytes that are not synced
        self._dirty = False
        self._directory_dirty = recovered.new
        #: Nothing was ever stored here, so it is not certain that even its directory's name is on disk.
        self._is_new = not self.next_offset
        self._changed = not recovered.report.clean
        self._seals: list[Seal] = []
        self._rounds: deque[SyncRound] = deque()
        #: What the last round has put on disk: the segment that was active, its bytes, the next offset.
        self._durable: tuple[Segment, int, int] | None = None
        self._durable_noted_bytes = self._active.size
        self._synced_bytes = self.size_bytes
        self._prepare = False  # syncs are frequent, so that it pays to prepare room for what they are of
        self._failure: str | None = None
        self._closed = False  # its files may belong to somebody else by now
        self._reader = StoredReader(self._segments, self._bases, self.accept)

    @classmethod
    def open(
        cls,
        storage: Storage,
        directory: str,
        *,
        config: LogConfig,
        files: FileCache,
        tail: TailCache,
    ) -> PartitionLog:
        """Open a partition, recovering it if need be, or create it.  Everything in an opened log is durable.

        Raises StorageFailed when the disk does not let us read or repair it.
        """
        started = perf_counter()
        try:
            storage.make_directory(directory)
            log = cls(storage, directory, config=config, files=files, tail=tail)
        except OSError as problem:
            raise StorageFailed(f"cannot open the log {directory}: {problem.strerror or problem}") from problem
        log.recovery.seconds = perf_counter() - started
        return log

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def segments(self) -> Sequence[Segment]:
        """All segments, the active one last."""
        return self._segments

    @property
    def messages(self) -> int:
        return sum(segment.messages for segment in self._segments)

    @property
    def failure(self) -> str | None:
        """Why nothing can be appended any more, or None."""
        return self._failure

    # Appending

    def append(self, batches: Sequence[memoryview], counts: Sequence[int], now_us: int) -> int:
        """Stamp, join and write batches that passed check_batch; returns the offset of the first message.

        The views must be writable; the stamp is written into them.  All batches get the same append time, found in
        `last_append_us` afterwards.  Raises StorageFailed, with the OSError as its cause; then nothing was appended,
        and the log goes on unless it says otherwise in `failure`.
        """
        if self._failure is not None:
            raise StorageFailed(self._failure)
        assert batches, "an append has at least one batch"
        active = self._active
        single = len(batches) == 1
        size = len(batches[0]) if single else sum(map(len, batches))
        end = active.next_offset + (counts[0] if single else sum(counts))
        if (active.size + size > self._segment_bytes or end > active.base_offset + MESSAGES_MAX) and active.size:
            self.roll()
            active = self._active
        time_us = self.last_append_us
        if now_us > time_us:
            time_us = now_us
        base_offset = offset = active.next_offset
        position = active.size
        index = self._index
        due = index.due
        entries: list[tuple[int, int]] = []
        for view, count in zip(batches, counts, strict=True):
            stamp(view, 0, base_offset=offset, append_time_us=time_us, leader_epoch=self.leader_epoch)
            if position >= due:
                entries.append((offset, position))
                due = position + self.config.index_interval_bytes
            offset += count
            position += len(view)
        piece = None if single else b"".join(batches)
        if single and self._unread_bytes < _UNREAD_BYTES_MAX:
            piece = bytes(batches[0])
        try:
            file = self._file
            if file is None:
                file = self._file = self._files.pin(self._storage, active.path)
            room_max = self._segment_bytes - active.size - size if self._prepare else 0
            active.append(file, batches[0] if piece is None else piece, offset, time_us, room_max=room_max)
        except OSError as problem:
            self._cut_back(problem)
        for entry in entries:
            index.add(*entry, time_us)
        self.last_append_us = time_us
        self.next_offset = offset
        self.size_bytes += size
        self._dirty = self._changed = True
        self._unread_bytes += size
        if piece is None:
            self._tail.clear()
        else:
            self._tail.add(base_offset, piece)
        return base_offset

    def _cut_back(self, problem: OSError) -> NoReturn:
        """Remove what a failed write may have left; if even that fails, nobody knows where the file ends."""
        text = f"cannot append to {self._active.path}: {problem.strerror or problem}"
        try:
            if self._file is not None:
                self._file.truncate(self._active.size)
                self._active.room_end = 0
        except OSError as another:
            self.fail(f"{text}; cannot cut it back either: {another.strerror or another}")
        raise StorageFailed(text) from problem

    def roll(self) -> None:
        """Start a new segment, unless the active one is empty.  Raises StorageFailed and changes nothing then."""
        if self._failure is not None:
            raise StorageFailed(self._failure)
        active = self._active
        if not active.size:
            return
        fresh = self._make_segment(self.next_offset)
        try:
            # Before there is a name: more may be appended to this segment if that fails.
            sealed_file = self._files.pin(self._storage, active.path)
            file = self._storage.open(fresh.path, create=True)
            file.truncate(0)
            file.close()
        except OSError as problem:
            if self._file is None:
                self._files.unpin(self._storage, active.path)
            raise StorageFailed(f"cannot start {fresh.path}: {problem.strerror or problem}") from problem
        snapshot = self.producers.encode(self.next_offset) if len(self.producers) else None
        self._seals.append(Seal(self._storage, self.directory, active, sealed_file, snapshot))
        self._segments.append(fresh)
        self._bases.append(fresh.base_offset)
        self._active = fresh
        assert isinstance(fresh.index, LiveIndex)
        self._index = fresh.index
        self._file = None
        self._dirty = False
        self._directory_dirty = self._changed = True
        self._durable_noted_bytes = 0

    def give_back_room(self) -> None:
        """Let the active file end where its batches do, because somebody will look at its size.  Raises OSError."""
        active = self._active
        if active.room_end > active.size:
            active.give_back_room(self._files.get(self._storage, active.path))

    def _make_segment(self, base_offset: int) -> Segment:
        interval = self.config.index_interval_bytes
        segment = Segment(self._storage, self._files, self.directory, base_offset, interval_bytes=interval)
        segment.last_append_us = self.last_append_us
        return segment

    # Durability

    @property
    def is_crowded(self) -> bool:
        """Whether too many logs have bytes that are not synced, and so a file that must stay open."""
        return self._files.is_crowded

    @property
    def seals_pending(self) -> bool:
        """Whether a full segment waits to be sealed by the next sync; until then its index stays in memory."""
        return bool(self._seals)

    def dirty_files(self) -> list[Syncable]:
        """What must be synced, in any order, for everything appended so far to be on disk.

        They count as taken: the next call returns only what came since.  Sync all of them, then call `mark_durable`
        with the `next_offset` of now, or `fail`; or `put_off`, if all that went wrong is that one raised NotOpened.
        """
        if self._failure is not None:
            return []
        seals, self._seals = self._seals, []
        work: list[Syncable] = [Seals(seals)] if seals else []
        if self._dirty:
            assert self._file is not None
            work.append(self._file)
            self._dirty = False
        if self._directory_dirty and self._changed:
            work.append(DirectorySync(self._storage, self.directory))
            self._directory_dirty = False
        if self._is_new and self._changed:
            work.append(DirectorySync(self._storage, parent_of(self.directory)))
            self._is_new = False
        if work:
            self._prepare = self.size_bytes - self._synced_bytes <= _PREPARED_ROUND_BYTES_MAX
            self._synced_bytes = self.size_bytes
            self._rounds.append(SyncRound(self.next_offset, seals, self._active, self._active.size))
        return work

    def mark_durable(self, next_offset: int) -> None:
        """Take note that everything below an offset is on disk."""
        rounds = self._rounds
        while rounds and rounds[0].next_offset <= next_offset:
            self._finish(rounds.popleft())

    def put_off(self) -> None:
        """Take back what was handed out last: the names of new files could not be synced yet, everything else was.

        Nothing of it is durable before a later round has gone well.
        """
        self._put_off(self._rounds.popleft())

    def _put_off(self, tried: SyncRound) -> None:
        self._end_seals(tried.seals)
        self._directory_dirty = self._is_new = True  # if only one of them is, the other costs nearly nothing

    def _end_seals(self, seals: Sequence[Seal]) -> None:
        for seal in seals:
            if seal.stored:
                seal.segment.stored = True
                seal.segment.use_stored_index()
                self._files.unpin(self._storage, seal.segment.path)
        # There was no room for the rest: the next sync tries again.
        self._seals[:0] = [seal for seal in seals if not seal.stored]

    def _finish(self, done: SyncRound) -> None:
        self._end_seals(done.seals)
        self._durable = done.active, done.active_bytes, done.next_offset
        if done.active is self._active and done.active_bytes - self._durable_noted_bytes >= _DURABLE_STEP_BYTES:
            self.note_durable()
        if self._file is not None and not self._dirty and not self._rounds:
            self._files.unpin(self._storage, self._active.path)
            self._file = None

    def note_durable(self) -> None:
        """Leave a note how much is on disk, if there is news: a small write.

        Recovery takes damage behind the note for a torn write, which ends the log, and damage before it for rot, which
        costs what is damaged and nothing else.  So the note should not be much older than the messages.
        """
        segment, durable_bytes, next_offset = self._durable or (None, 0, 0)
        if segment is not self._active or durable_bytes <= self._durable_noted_bytes:
            return
        if self._rounds and self._rounds[0].next_offset <= next_offset:
            return  # the note says that segments before this one are complete, and that round may be sealing one
        header = segment.header(0, durable_bytes=durable_bytes, next_offset=next_offset)
        # Not synced, and a failure does not matter: an older note is true as well, only less helpful in recovery.
        with suppress(OSError):
            file = self._storage.open(self._active.index_path, create=True)
            try:
                file.write(header.encode(), 0)
            finally:
                file.close()
        self._durable_noted_bytes = durable_bytes

    def sync(self) -> None:
        """Make everything appended so far durable, here and now.

        Raises StorageFailed, and then the log has failed, unless all that is missing is that a directory can be opened.
        """
        work = self.dirty_files()
        try:
            for file in work:
                file.sync()
        except OSError as problem:
            text = f"cannot sync the log {self.directory}: {problem.strerror or problem}"
            if isinstance(problem, NotOpened):  # directories come last
                self._put_off(self._rounds.pop())
            else:
                self.fail(text)
            raise StorageFailed(text) from problem
        if work:
            # Only our own round: an earlier one may still be under way in a thread.
            self._finish(self._rounds.pop())

    def fail(self, reason: str) -> None:
        """Append nothing from now on: it is not known any more what is on disk beyond what was confirmed."""
        if self._failure is None:
            self._failure = reason

    # Reading

    def read(self, offset: int, max_bytes: int, *, before: int) -> Chunk:
        """Whole batches from the one with `offset` on, or from the first one behind it.

        At least one batch if there is one, otherwise about `max_bytes`, and nothing at or behind offset `before`.
        Raises OffsetOutOfRange and StorageFailed.  A cold segment is verified first, see `cold_segment`.
        """
        if self._closed:
            raise StorageFailed(f"the log {self.directory} is closed")
        if not self.start_offset <= offset <= self.next_offset:
            raise OffsetOutOfRange(f"offset {offset} is not in {self.start_offset}..{self.next_offset}")
        if offset >= before or offset == self.next_offset:
            return Chunk([], offset, None)
        if 0 <= self._tail.first_offset <= offset:
            self._unread_bytes = 0
            return read_tail(self._tail, offset, max_bytes, before, self.next_offset)
        try:
            chunk = self._reader.read(offset, max_bytes, before)
        except OSError as problem:
            raise StorageFailed(f"cannot read the log {self.directory}: {problem.strerror or problem}") from problem
        if chunk.next_offset >= before:
            self._unread_bytes = 0
        return chunk

    def offset_at_time(self, time_us: int) -> int:
        """The first offset that was appended at or after a time, else `next_offset`."""
        return self._found(self._reader.offset_at_time, time_us) if time_us <= self.last_append_us else self.next_offset

    def end_of_epoch(self, epoch: int) -> int:
        """The first offset that was appended in a later epoch, else `next_offset`."""
        return self._found(self._reader.end_of_epoch, epoch) if epoch < self.leader_epoch else self.next_offset

    def _found(self, find: Callable[[int], int | None], wanted: int) -> int:
        if self._closed:
            raise StorageFailed(f"the log {self.directory} is closed")
        try:
            offset = find(wanted)
        except OSError as problem:
            raise StorageFailed(f"cannot read the log {self.directory}: {problem.strerror or problem}") from problem
        return self.next_offset if offset is None else offset

    # Verification of what an earlier process wrote

    def cold_segment(self, offset: int) -> Segment | None:
        """The segment that a read at `offset` would have to verify first, if it would.

        Run its `verify` in a thread and hand the result to `accept`, to keep the read from blocking.
        """
        if 0 <= self._tail.first_offset <= offset:
            return None
        return self._reader.cold_segment(offset)

    def accept(self, verified: Verified) -> None:
        """Take over what a segment's `verify` found: damage is stepped over from now on, a wrong index replaced."""
        segment = verified.segment
        if self._closed or segment not in self._segments:
            return  # removed or replaced meanwhile: storing its index would damage the one that took its place
        differs = not segment.verified and segment.accept(verified.found)
        # Before the disk is asked for room: what is damaged is known from now on, and nobody reads on inside of it.
        self.recovery.add_damaged(segment.damaged)
        self._reader.forget()
        if differs and self._failure is None:
            try:
                store_index(self._storage, segment)
            except OSError as problem:
                raise StorageFailed(f"cannot replace {segment.index_path}: {problem.strerror or problem}") from problem
            segment.use_stored_index()
            self.recovery.rebuilt_indexes += 1

    # Removing

    def retain(self, retention: Retention, now_us: int, *, below: int | None = None) -> int:
        """Remove the segments that a policy no longer keeps; returns how many.  Moves `start_offset`, durably.

        With `below` a segment must also lie below that offset as a whole.
        """
        removals = retention.decide_removals(self._segments, now_us=now_us, below=below)
        if removals.includes_active:
            self.roll()
        return self._remove_oldest(removals.segments)

    def delete_before(self, offset: int) -> int:
        """Remove segments that lie before an offset as a whole; returns the new `start_offset`, at most `offset`."""
        if offset >= self.next_offset:
            self.roll()
        self._remove_oldest(bisect_right([segment.next_offset for segment in self._segments[:-1]], offset))
        return self.start_offset

    def _remove_oldest(self, count: int) -> int:
        # A segment that is being synced or sealed in a thread this very moment must wait for the next time.
        busy = [seal.segment for done in self._rounds for seal in done.seals]
        busy += [done.active for done in self._rounds]
        removed = 0
        try:
            if count and self._directory_dirty:
                # Otherwise a power cut could leave no segment at all, and offsets would start at 0 again.
                self._storage.sync_directory(self.directory)
            while removed < count and self._segments[0] not in busy:
                self._remove_first()
                removed += 1
            if removed:
                self._storage.sync_directory(self.directory)
        except OSError as problem:
            raise StorageFailed(f"cannot remove from {self.directory}: {problem.strerror or problem}") from problem
        return removed

    def _remove_first(self) -> None:
        segment = self._segments[0]
        for seal in self._seals:
            if seal.segment is segment:
                # Never needed from now on, except for what it knows of the producers.
                if seal.snapshot is not None:
                    path = segment_name(self.directory, segment.next_offset, "producers")
                    self._storage.replace(path, seal.snapshot)
                self._seals.remove(seal)
                break
        self._forget_files(segment)
        self._reader.forget()
        del self._segments[0], self._bases[0]
        self.start_offset = self._bases[0]
        self.size_bytes -= segment.size
        remove_segment(self._storage, self.directory, segment.base_offset)

    def swap(self, inputs: Sequence[Segment], output: Segment) -> bool:
        """Put a compacted segment, whose `.new` files are complete and synced, in the place of its inputs.

        Returns False, and changes nothing, when the inputs are not there any more as they were, or the directory cannot
        be opened now.
        """
        first = bisect_left(self._bases, inputs[0].base_offset)
        if self._failure is not None or list(inputs) != self._segments[first : first + len(inputs)]:
            return False
        try:
            names = self._storage.open_directory(self.directory)
        except OSError:
            return False
        for segment in inputs:
            self._forget_files(segment)
        self._reader.forget()
        try:
            put_in_place(self._storage, self.directory, names, output.base_offset)
            # From here on its file is the one that readers find, whatever becomes of the rest.
            self._replace(first, inputs, output)
            remove_superseded(self._storage, self.directory, names, [segment.base_offset for segment in inputs[1:]])
        except OSError as problem:
            self.fail(f"cannot put a compacted segment in place in {self.directory}: {problem.strerror or problem}")
            raise StorageFailed(self._failure) from problem
        finally:
            names.close()
        return True

    def _replace(self, first: int, inputs: Sequence[Segment], output: Segment) -> None:
        output.stored = True
        output.use_stored_index()
        # Readers of the tail would still be served what compaction has removed.
        self._tail.forget_before(output.next_offset, self.next_offset)
        self._segments[first : first + len(inputs)] = [output]
        self._bases[first : first + len(inputs)] = [output.base_offset]
        self.size_bytes += output.size - sum(segment.size for segment in inputs)

    def _forget_files(self, segment: Segment) -> None:
        self._files.drop(self._storage, segment.path)
        self._files.drop(self._storage, segment.index_path)

    # Ending

    def close(self) -> None:
        """Sync, leave notes that spare the next `open` a scan, and let go of all files.

        Raises StorageFailed when that was not possible; the files are released all the same.
        """
        try:
            if self._failure is None and self._changed:
                self.give_back_room()
                self.sync()
                self._leave_notes()
        except OSError as problem:
            raise StorageFailed(f"cannot close the log {self.directory}: {problem.strerror or problem}") from problem
        finally:
            self._release("the log is closed")

    def _leave_notes(self) -> None:
        active = self._active
        if not active.size:
            return  # the seal of the segment before says it all
        if active.size < self.config.notes_bytes_min:
            self.note_durable()
            return
        active.no_producers = not len(self.producers)
        if not active.no_producers:
            snapshot = self.producers.encode(self.next_offset)
            self._storage.replace(segment_name(self.directory, self.next_offset, "producers"), snapshot)
        header = active.header(IndexFlags.CLEAN)
        self._storage.replace(active.index_path, header.encode() + self._index.encode())
        remove_snapshots_before(self._storage, self.directory, self.next_offset)

    def abandon(self) -> None:
        """Let go of all files as they are, because somebody is about to remove them."""
        self._release("the log is closed")

    def delete(self) -> None:
        """Remove the partition from the disk."""
        self._release("the log is deleted")
        try:
            self._storage.remove_tree(self.directory)
        except OSError as problem:
            raise StorageFailed(f"cannot delete {self.directory}: {problem.strerror or problem}") from problem

    def _release(self, reason: str) -> None:
        self.fail(reason)
        self._closed = True
        self._tail.clear()
        self._seals.clear()
        self._file = self._durable = None
        for segment in self._segments:
            self._forget_files(segment)
