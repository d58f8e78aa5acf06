"""Compaction: keep the newest message of each key, over all segments that are sealed.

Messages without a key stay.  A message with a key and a null value (a tombstone) deletes its key; it stays visible for
`tombstone_retention_ms`, so that readers which are not too far behind see it, and then goes as well.

Two steps, so that the long one can run in a thread while the partition works on:

1. `rewrite` reads the segments, and writes what survives to `.new` files beside them.  It takes as long as they are
   large, so it gives up when the log goes away or its owner stops; the next round begins anew.
2. `swaps` puts each result in the place of its inputs, oldest first (swap.py says how).  That order matters: no
   tombstone must go before everything it deletes has gone.

Offsets never change, so survivors stand in batches with an offset column.  Small batches are merged, up to 1 MiB, if
they were appended within the same second: a merged batch has the append time of its newest message, and search by time
stays right to within that second.  The identity of producers is dropped; the producer table keeps it.

Memory is bounded by one map from keys (as 16-byte digests) to their newest offset.  It covers the segments that were
never compacted, since among the others each key occurs once already, and is applied to all.  When it is full the rest
waits for the next round.

The active segment is left alone until it is full, or an hour old: then `wants_roll` says that it should be rolled, if
that makes enough to be worth a round.  Otherwise a slow log would be cut into segments that nobody merges.

Damaged segments are left as they are, for somebody to look at.  A tombstone behind one stays too: what it deletes might
be in there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from millstream.errors import BatchDamaged
from millstream.log.index import MESSAGES_MAX, IndexFlags, LiveIndex
from millstream.log.merging import MERGED_US, Merger
from millstream.log.partition import PartitionLog
from millstream.log.retention import Retention
from millstream.log.scan import Found, scan
from millstream.log.segment import Segment, Verified
from millstream.log.storage import File, Storage
from millstream.records import Batch, BatchHeader, Columns

__all__ = ["DIRTY_SHARE_MIN", "Compaction", "open_readable"]

_KEYS_MAX: Final = 1_000_000  # about 150 MB while a compaction runs
DIRTY_SHARE_MIN: Final = 0.2  # less than this is not worth reading all the rest for
_ACTIVE_US_MAX: Final = 3600 * 1_000_000  # how long the oldest message of an active segment waits for it to fill up
_VERBATIM_BYTES: Final = 64 * 1024
_KEYS: Final = int(Columns.KEYS)
_CONTROL: Final = int(Columns.CONTROL)


class _GivenUp(Exception):
    """Nobody wants the result any more."""


@dataclass(frozen=True, slots=True)
class _Replacement:
    inputs: list[Segment]
    output: Segment


class Compaction:
    """One round over one partition: `plan`, `rewrite` (in a thread), `swap`."""

    #: Batches that were appended within this time may become one.
    _merged_us = MERGED_US
    #: What else removes messages from this log, as whole segments: results must not be too coarse for it.
    _retention = Retention()

    def __init__(
        self, log: PartitionLog, segments: list[Segment], storage: Storage, *, horizon_us: int, keys_max: int
    ) -> None:
        """Use `plan`."""
        self._log = log
        self._segments = segments
        self._storage = storage
        self._horizon_us = horizon_us
        self._keys_max = keys_max
        self._is_over: Callable[[], bool] = lambda: False
        self._newest: dict[bytes, int] = {}
        self._verified: list[Verified] = []  # of segments that turned out to be damaged
        self._replacements: list[_Replacement] = []

    @classmethod
    def plan(
        cls,
        log: PartitionLog,
        *,
        now_us: int,
        tombstone_retention_ms: int = 24 * 3600 * 1000,
        dirty_share_min: float = DIRTY_SHARE_MIN,
        keys_max: int = _KEYS_MAX,
        retention: Retention | None = None,
    ) -> Compaction | None:
        """A compaction, if enough was sealed since the last one to be worth it.  Reads no data."""
        segments: list[Segment] = []
        for segment in log.segments[:-1]:
            if not segment.stored:
                break
            segments.append(segment)
        if not _is_worth_it(segments, dirty_share_min):
            return None
        horizon_us = now_us - tombstone_retention_ms * 1000
        compaction = cls(log, segments, log.storage, horizon_us=horizon_us, keys_max=keys_max)
        compaction._retention = retention or cls._retention
        return compaction

    @staticmethod
    def wants_roll(log: PartitionLog, *, now_us: int) -> bool:
        """Whether the active segment has waited long enough to be full, and a compaction would follow if it were."""
        active = log.segments[-1]
        waited = bool(active.size) and now_us - active.first_append_us > _ACTIVE_US_MAX
        return waited and _is_worth_it(log.segments, DIRTY_SHARE_MIN)

    def rewrite(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Write the new segments beside the old ones.  Safe in a thread.  Raises OSError; then nothing was changed.

        Asked between batches: when `is_over` says so, or the log takes nothing any more because it goes away, it gives
        up, and there is nothing to swap.
        """
        self._is_over = is_over
        try:
            tombstones_stay = False
            for group in self._groups(self._map_keys()):
                if not self._is_damaged(group):
                    self._rewrite_group(group, tombstones_stay)
                tombstones_stay = tombstones_stay or self._is_damaged(group)
        except BaseException as problem:
            for replacement in self._replacements:
                _remove_new_files(self._storage, replacement.output)
            self._replacements.clear()
            if not isinstance(problem, _GivenUp):
                raise

    def swaps(self) -> Iterator[bool]:
        """Put the new segments in place, one with each step; on the thread that owns the log, free between steps.

        Each takes a few syncs.  Says whether it is in place.  Raises StorageFailed, and then the log has failed.
        """
        for verified in self._verified:
            if not verified.segment.damaged:
                verified.segment.doubt()
                self._log.accept(verified)
        going = True
        for replacement in self._replacements:
            going = going and self._log.swap(replacement.inputs, replacement.output)
            if not going:
                # Retention has taken an input away.  Later results count on the earlier ones, so all of them go.
                _remove_new_files(self._storage, replacement.output)
            yield going

    def _map_keys(self) -> list[Segment]:
        """Note the newest offset of each key; returns the segments up to which that is complete."""
        newest = self._newest
        mapped: list[Segment] = []
        for segment in self._segments:
            if not segment.compacted:
                if len(newest) >= self._keys_max:
                    break
                for found in self._batches(segment):
                    batch = self._open(found)
                    for key, offset in zip(batch.keys() or (), batch.offsets(), strict=True) if batch else ():
                        if key is not None:
                            newest[_digest(key)] = offset
            mapped.append(segment)
        return mapped

    def _groups(self, segments: list[Segment]) -> Iterator[list[Segment]]:
        """Neighbours that fit into one segment together; damaged ones alone."""
        group: list[Segment] = []
        size = messages = 0
        for segment in segments:
            size += segment.size
            messages += segment.messages
            if group and (
                self._is_damaged([segment])
                or self._is_damaged(group)
                or size > self._log.config.segment_bytes
                or messages > MESSAGES_MAX
                or self._retention.is_coarse(size, messages, segment.last_append_us - group[0].first_append_us)
            ):
                yield group
                group, size, messages = [], segment.size, segment.messages
            group.append(segment)
        if group:
            yield group

    def _is_damaged(self, group: list[Segment]) -> bool:
        return any(it.damaged or any(verified.segment is it for verified in self._verified) for it in group)

    def _rewrite_group(self, group: list[Segment], tombstones_stay: bool) -> None:
        """Write what survives of a few segments as one, unless they are fine as they are."""
        if len(group) == 1 and group[0].compacted and not self._has_garbage(group[0], tombstones_stay):
            return
        writer = _Writer(self._storage, group[0])
        try:
            merger = Merger(writer.write, merged_us=self._merged_us)
            for segment in group:
                for found in self._batches(segment):
                    batch = self._open(found)
                    places = None if batch is None else self._survivors(batch, tombstones_stay)
                    if batch is None or (places is None and found.header.length >= _VERBATIM_BYTES):
                        merger.flush()
                        writer.copy(found)
                    else:
                        merger.add(batch, range(batch.count) if places is None else places)
                if self._is_damaged([segment]):
                    writer.discard()
                    return
            merger.flush()
            self._replacements.append(_Replacement(group, writer.finish(group)))
        except BaseException:
            writer.discard()
            raise

    def _has_garbage(self, segment: Segment, tombstones_stay: bool) -> bool:
        for found in self._batches(segment):
            batch = self._open(found)
            if batch is not None and self._survivors(batch, tombstones_stay) is not None:
                return True
        return False

    def _open(self, found: Found) -> Batch | None:
        """The batch, if it may hold something that goes; otherwise it stays as it is."""
        return _open_keyed(found)

    def _survivors(self, batch: Batch, tombstones_stay: bool) -> list[int] | None:
        """The places of the messages that stay; None when all do."""
        keys = batch.keys() or ()
        values = batch.values()
        may_drop = not tombstones_stay and batch.append_time_us <= self._horizon_us
        newest = self._newest
        places = [
            place
            for place, (key, value, offset) in enumerate(zip(keys, values, batch.offsets(), strict=True))
            if key is None or (newest.get(_digest(key), offset) <= offset and not (value is None and may_drop))
        ]
        return None if len(places) == batch.count else places

    def _batches(self, segment: Segment) -> Iterator[Found]:
        """The good batches of a segment; one that turns out to be damaged is noted and not rewritten."""
        file = self._storage.open(segment.path)
        try:
            for item in scan(file, 0, segment.size, next_offset=segment.base_offset, limit=segment.next_offset):
                if self._log.failure is not None or self._is_over():
                    raise _GivenUp
                if isinstance(item, Found):
                    yield item
                elif not self._is_damaged([segment]):
                    self._verified.append(segment.verify(everything=True))
        finally:
            file.close()


class _Writer:
    """The `.new` files of one output segment."""

    def __init__(self, storage: Storage, first: Segment) -> None:
        self._storage = storage
        self._output = output = first.successor()
        # The name of the index first: see swap.py.
        self._index_file = _create(storage, f"{output.index_path}.new")
        storage.sync_directory(output.directory)
        self._file = _create(storage, f"{output.path}.new")
        self._index = LiveIndex(output.interval_bytes)

    def write(self, batch: bytes | bytearray | memoryview, base_offset: int, append_time_us: int) -> None:
        output = self._output
        if output.size >= self._index.due:
            self._index.add(base_offset, output.size, append_time_us)
        self._file.write(batch, output.size)
        output.size += len(batch)
        output.messages += BatchHeader(batch).count

    def copy(self, found: Found) -> None:
        batch = memoryview(found.buffer)[found.at : found.at + found.header.length]
        self.write(batch, found.header.base_offset, found.header.append_time_us)

    def finish(self, inputs: Sequence[Segment]) -> Segment:
        """Sync everything; returns the segment as it will be once it is swapped in."""
        output = self._output
        output.next_offset = inputs[-1].next_offset
        output.first_append_us, output.last_append_us = inputs[0].first_append_us, inputs[-1].last_append_us
        output.no_producers = inputs[-1].no_producers
        output.index = self._index
        header = output.header(IndexFlags.SEALED).encode()
        self._index_file.write(header + self._index.encode(), 0)
        for file in (self._file, self._index_file):
            file.sync()
            file.close()
        self._storage.sync_directory(output.directory)
        return output

    def discard(self) -> None:
        self._file.close()
        self._index_file.close()
        _remove_new_files(self._storage, self._output)


def _is_worth_it(segments: Sequence[Segment], dirty_share_min: float) -> bool:
    """Whether so much was never compacted that all the rest is worth reading for it."""
    dirty_bytes = sum(segment.size for segment in segments if not segment.compacted and not segment.damaged)
    return bool(dirty_bytes) and dirty_bytes >= dirty_share_min * sum(segment.size for segment in segments)


def _create(storage: Storage, path: str) -> File:
    file = storage.open(path, create=True)
    file.truncate(0)
    return file


def _remove_new_files(storage: Storage, output: Segment) -> None:
    for path in (f"{output.path}.new", f"{output.index_path}.new"):
        if storage.exists(path):
            storage.remove(path)


def _open_keyed(found: Found) -> Batch | None:
    """The batch, if it has keys that can be read; otherwise it stays as it is."""
    if not found.header.flags & _KEYS or found.header.flags & _CONTROL:
        return None
    return open_readable(found)


def open_readable(found: Found) -> Batch | None:
    """The batch, if all of it can be read.  What cannot is between its producer and its consumers."""
    try:
        batch = Batch.parse(found.buffer, found.at, verify=False)
        batch.check()
    except BatchDamaged:
        return None
    return batch


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()
