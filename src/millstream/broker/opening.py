"""Opening the log of a partition: everything that takes, and what is said when it had to be repaired first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from millstream.broker.committer import Committer
from millstream.broker.logs import details
from millstream.broker.metrics import Metrics
from millstream.broker.partition import Partition
from millstream.clock import Clock
from millstream.config import Settings
from millstream.errors import StorageFailed
from millstream.log.cache import FileCache, TailCache
from millstream.log.memory import MemoryStorage
from millstream.log.partition import LogConfig, PartitionLog
from millstream.log.storage import Storage

__all__ = ["PartitionOpener"]

_log = structlog.get_logger("millstream.topics")

_NOTES_BYTES_MIN: Final = 256 * 1024


@dataclass(slots=True)
class PartitionOpener:
    """Everything it takes to open a partition, in one place."""

    storage: Storage
    settings: Settings
    clock: Clock
    loop: asyncio.AbstractEventLoop
    committer: Committer
    metrics: Metrics
    files: FileCache
    tail: TailCache
    flush_later: Callable[[Partition], None]
    on_failed: Callable[[Partition, str], None]
    #: What the batches of users' messages are stamped with.
    epoch: int = 0
    #: What logs count that hold no messages of users; nobody asks for it.
    uncounted: Metrics = field(default_factory=Metrics)

    def open(
        self,
        directory: str,
        uid: int,
        *,
        segment_bytes: int,
        ephemeral: MemoryStorage | None = None,
        counted: bool = True,
        schedules: bool = False,
    ) -> Partition:
        """A partition ready for traffic, repaired first if need be.  `counted`: its messages are users' messages."""
        # Paths repeat between storages, so files in memory have a cache of their own.
        files = FileCache(limit=16) if ephemeral is not None else self.files
        try:
            log = self._open_log(ephemeral or self.storage, directory, segment_bytes, files, self.tail)
        except StorageFailed:
            raise
        except Exception as error:  # whatever it is, it is the trouble of this log and of no other
            raise StorageFailed(f"the log {directory} cannot be opened: {error!r}") from error
        if counted:
            log.leader_epoch = self.epoch
        return Partition(
            log,
            uid=uid,
            committer=None if ephemeral is not None else self.committer,
            clock=self.clock,
            loop=self.loop,
            metrics=self.metrics if counted else self.uncounted,
            schedules=schedules,
            on_flush_needed=self.flush_later,
            on_failed=self.on_failed,
        )

    def repair(self, directory: str, segment_bytes: int) -> None:
        """Leave a partition's files in order.  Safe in a thread, before anybody has opened it."""
        try:
            self._open_log(self.storage, directory, segment_bytes, FileCache(limit=8), TailCache(bytes_max=0)).close()
        except Exception as error:  # tried again, and refused, when it is used; the others are well
            unexpected = not isinstance(error, OSError | StorageFailed)
            _log.error("a partition could not be repaired", directory=directory, reason=str(error), exc_info=unexpected)

    def _open_log(
        self, storage: Storage, directory: str, segment_bytes: int, files: FileCache, tail: TailCache
    ) -> PartitionLog:
        log = PartitionLog.open(
            storage,
            directory,
            config=LogConfig(
                segment_bytes=segment_bytes,
                index_interval_bytes=self.settings.storage.index_interval_bytes,
                notes_bytes_min=_NOTES_BYTES_MIN,
            ),
            files=files,
            tail=tail,
        )
        report = log.recovery
        if report.truncated_bytes or report.damaged or report.moved_aside or report.rebuilt_indexes:
            _log.warning(
                "partition repaired",
                directory=directory,
                truncated_bytes=report.truncated_bytes,
                damaged=report.damaged,
                moved_aside=report.moved_aside,
                rebuilt_indexes=report.rebuilt_indexes,
            )
        elif details.on:
            ends = {"first": log.start_offset, "end": log.next_offset}
            _log.debug("log opened", directory=directory, segments=len(log.segments), **ends)
        return log
