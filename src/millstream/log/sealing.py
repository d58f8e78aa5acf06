"""What has to reach the disk before appended messages may be confirmed, as objects whose `sync` can run in a thread.

Mostly that is the active segment's file itself.  Around a roll it is more: the name of the new file, and the seal of
the segment that is complete.  Sealing means: cut off
unused room, sync the log file, then store a snapshot of the producer table as of its
end, then put its index in place.  In that order, because a sealed index is recovery's licence not to look at the log
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from millstream.log.index import IndexFlags, LiveIndex
from millstream.log.segment import Segment, segment_name
from millstream.log.storage import File, Storage

__all__ = ["DirectorySync", "Seal", "Seals", "SyncRound", "remove_snapshots_before", "store_index"]


@dataclass(frozen=True, slots=True)
class DirectorySync:
    """The names of new files."""

    storage: Storage
    directory: str

    def sync(self) -> None:
        self.storage.sync_directory(self.directory)


@dataclass(frozen=True, slots=True)
class Seal:
    """A segment that takes no more batches."""

    storage: Storage
    directory: str
    segment: Segment
    file: File
    snapshot: bytes | None  # of the producer table; None when it was empty

    def sync(self) -> None:
        self.segment.give_back_room(self.file)
        self.file.sync()
        next_offset = self.segment.next_offset
        if self.snapshot is not None:
            self.storage.replace(segment_name(self.directory, next_offset, "producers"), self.snapshot)
        self.segment.no_producers = self.snapshot is None
        store_index(self.storage, self.segment)
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


@dataclass(frozen=True, slots=True)
class SyncRound:
    """What `dirty_files` handed out and `mark_durable` has not confirmed yet."""

    next_offset: int
    seals: list[Seal]
    active: Segment
    active_bytes: int


def store_index(storage: Storage, segment: Segment) -> None:
    """Put the index of a segment whose log file is synced in place, sealed."""
    assert isinstance(segment.index, LiveIndex)
    storage.replace(segment.index_path, segment.header(IndexFlags.SEALED).encode() + segment.index.encode())


def remove_snapshots_before(storage: Storage, directory: str, next_offset: int) -> None:
    """Remove the snapshots of the producer table that a newer one has made superfluous."""
    newest = f"{next_offset:020d}.producers"
    for name in storage.names(directory):
        if name.endswith(".producers") and name < newest:
            # A sync here and now may seal a segment beside a round in a thread.
            with suppress(FileNotFoundError):
                storage.remove(f"{directory}/{name}")
