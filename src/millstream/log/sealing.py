"""What has to reach the disk before appended messages may be confirmed, as objects whose `sync` can run in a thread.

Mostly that is the active segment's file itself.  Around a roll it is more: the name of the new file, and the seal of
the segment that is complete.  Sealing means: cut off unused room, sync the log file, then store a snapshot of the
producer table as of its end, then put its index in place.  In that order, because a sealed index is recovery's licence
not to look at the log file.

Snapshot and index are notes that spare recovery a scan.  Where the disk has no room for them, or no more files can be
opened, they are put off: the messages are on disk, and nobody has to do without them.  A directory that cannot be
opened for its sync puts off the confirmation itself: `sync` raises NotOpened, and the next round tries again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from millstream.log.index import IndexFlags, LiveIndex
from millstream.log.segment import Segment, segment_name
from millstream.log.storage import NO_FILES, NO_ROOM, File, NotOpened, Storage

__all__ = ["DirectorySync", "Seal", "Seals", "SyncRound", "remove_snapshots_before", "store_index"]


@dataclass(frozen=True, slots=True)
class DirectorySync:
    """The names of new files."""

    storage: Storage
    directory: str

    def sync(self) -> None:
        self.storage.sync_directory(self.directory)


@dataclass(slots=True)
class Seal:
    """A segment that takes no more batches."""

    storage: Storage
    directory: str
    segment: Segment
    file: File
    snapshot: bytes | None  # of the producer table; None when it was empty
    synced: bool = False
    stored: bool = False

    def sync(self) -> None:
        """Have the messages on disk."""
        if not self.synced:
            self.segment.give_back_room(self.file)
            self.file.sync()
            self.synced = True

    def store(self) -> None:
        """Leave the notes; `stored` says whether that was possible now."""
        next_offset = self.segment.next_offset
        self.segment.no_producers = self.snapshot is None
        notes = {self.segment.index_path: _sealed_index(self.segment)}
        if self.snapshot is not None:
            notes = {segment_name(self.directory, next_offset, "producers"): self.snapshot, **notes}
        if all(_write_aside(self.storage, path, data) for path, data in notes.items()):
            try:
                for path in notes:
                    self.storage.rename(f"{path}.tmp", path)
                    self.storage.sync_directory(self.directory)
            except NotOpened:
                return  # what is in place already is true, and is put there once more
            self.stored = True
            with suppress(OSError):  # nobody looks at them any more
                remove_snapshots_before(self.storage, self.directory, next_offset)


@dataclass(frozen=True, slots=True)
class Seals:
    """Segments that were completed one after the other, to be sealed in that order.

    A seal says that everything before it is on disk, and its snapshot that the producers' batches are.  If a later one
    came first, a power cut could take messages in between, and their producer would be told that they are stored.
    """

    seals: Sequence[Seal]

    def sync(self) -> None:
        for seal in self.seals:
            seal.sync()
        for seal in self.seals:
            seal.store()
            if not seal.stored:
                return


@dataclass(frozen=True, slots=True)
class SyncRound:
    """What `dirty_files` handed out and `mark_durable` has not confirmed yet."""

    next_offset: int
    seals: list[Seal]
    active: Segment
    active_bytes: int


def _write_aside(storage: Storage, path: str, data: bytes) -> bool:
    """Have the next contents of a file on disk under another name; False when there is no room for them.

    Or when no file can be opened now.  Whatever else fails, a sync above all, is another matter.
    """
    try:
        file = storage.open(f"{path}.tmp", create=True)
    except OSError as problem:
        if problem.errno in (*NO_ROOM, *NO_FILES):
            return False
        raise
    try:
        # A leftover of an earlier try may be longer than what we write now.
        file.truncate(0)
        try:
            file.write(data, 0)
        except OSError as problem:
            if problem.errno in NO_ROOM:
                return False
            raise
        file.sync()
    finally:
        file.close()
    return True


def _sealed_index(segment: Segment) -> bytes:
    assert isinstance(segment.index, LiveIndex)
    return segment.header(IndexFlags.SEALED).encode() + segment.index.encode()


def store_index(storage: Storage, segment: Segment) -> None:
    """Put the index of a segment whose log file is synced in place, sealed."""
    storage.replace(segment.index_path, _sealed_index(segment))


def remove_snapshots_before(storage: Storage, directory: str, next_offset: int) -> None:
    """Remove the snapshots of the producer table that a newer one has made superfluous."""
    newest = f"{next_offset:020d}.producers"
    for name in storage.names(directory):
        if name.endswith(".producers") and name < newest:
            # A sync here and now may seal a segment beside a round in a thread.
            with suppress(FileNotFoundError):
                storage.remove(f"{directory}/{name}")
