"""Background housekeeping: retention, compaction, forgotten groups."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Protocol

import structlog

from millstream.broker.groups import Groups
from millstream.broker.metrics import Metrics
from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.patience import PatientClock
from millstream.broker.queues.queues import Queues
from millstream.broker.registry import Topic
from millstream.broker.state import StateLog
from millstream.broker.topics import Topics
from millstream.errors import StorageFailed
from millstream.log.compaction import DIRTY_SHARE_MIN, Compaction
from millstream.log.retention import Retention
from millstream.topics import TopicConfig

__all__ = ["Cleanup", "Tended"]

_log = structlog.get_logger("millstream.cleanup")

#: State logs hold the newest fact of each key and nothing else, so their deletion markers need not stay.
_STATE_CONFIG: Final = TopicConfig(cleanup="compact", tombstone_retention_ms=0, retention_ms=0)
#: Partitions that nobody uses are looked after a few at a time: each costs a scan of its tail.
_IDLE_PER_ROUND: Final = 200
#: To know whether a partition has files takes a look at the disk, and ten thousand may have none.
_LOOKS_AT_A_TIME: Final = 100
#: Segments that are rolled before they are full: each costs a few syncs.  Ten thousand topics that were made together
#: take turns; where there are many with tiny limits, their segments become larger than they should.
_ROLLS_PER_ROUND: Final = 200


@dataclass(slots=True)
class Tended:
    """What came of looking after partitions."""

    partitions: int = 0
    segments_deleted: int = 0
    compacted: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    rolls_left: float = inf


class _Host(Protocol):
    metrics: Metrics
    patience: PatientClock
    topics: Topics
    groups: Groups
    queues: Queues


class Cleanup:
    """One round at a time; blocking work runs in a thread, and only the swap of files on the loop."""

    def __init__(
        self, host: _Host, opener: PartitionOpener, state_logs: list[StateLog], stopping: asyncio.Event
    ) -> None:
        self._host = host
        self._opener = opener
        self._state_logs = state_logs
        self._stopping = stopping
        self._idle = host.topics.idle_partitions()
        self._unrolled_uid: int | None = None  # the first partition that the last round had no roll left for

    async def run(self) -> None:
        """One round; ends early when the broker stops."""
        round_ = Tended(rolls_left=_ROLLS_PER_ROUND)
        for log in self._state_logs:
            await self._tend(log.partition, _STATE_CONFIG, tended=round_)
        for topic, partition in self._in_turn():
            await self._tend(partition, topic.config, topic, tended=round_)
        # Nobody reads these, but their messages grow old all the same.
        left = _IDLE_PER_ROUND
        for looks, (topic, number) in enumerate(self._idle, 1):
            if self._stopping.is_set():
                return
            before = round_.partitions
            problem = await self._tend_stored(topic, number, tended=round_)
            left -= problem is not None or round_.partitions > before
            if not left:
                break
            if looks % _LOOKS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        else:
            self._idle = self._host.topics.idle_partitions()  # all done: the next round begins anew
        self._host.queues.warn_of_removed()
        now_ms = self._host.patience.now_us() // 1000
        await self._host.groups.forget_idle(self._opener.settings.groups.offsets_retention_ms, now_ms)

    def _in_turn(self) -> list[tuple[Topic, Partition]]:
        """The partitions in use, beginning with the one that the last round had no roll left for."""
        partitions = list(self._host.topics.open_partitions())
        uid, self._unrolled_uid = self._unrolled_uid, None
        first = next((place for place, (_, it) in enumerate(partitions) if it.uid == uid), 0) if uid is not None else 0
        return partitions[first:] + partitions[:first]

    async def tend_now(self, topic: Topic | None, *, roll: bool) -> Tended:
        """Look after one topic, or everything, without waiting for the next round.

        What is worth a rewrite is decided as ever, except that somebody asked for it: any dead weight is enough.
        Raises StorageFailed if a partition of that one topic cannot be opened, when the others are done.
        """
        tended, failure, looks = Tended(), None, 0
        if topic is None:
            for log in self._state_logs:
                await self._tend(log.partition, _STATE_CONFIG, tended=tended, roll=roll, dirty_share_min=0)
        for some in [topic] if topic is not None else list(self._host.topics.registry.all_topics()):
            for number in range(len(some.partitions)):
                looks += 1
                if looks % _LOOKS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                if not some.deleting and not self._stopping.is_set():
                    problem = await self._tend_stored(some, number, tended=tended, roll=roll, dirty_share_min=0)
                    failure = failure or problem
        self._host.queues.warn_of_removed()
        if topic is not None and failure is not None:
            raise failure
        return tended

    async def rewrite(self, log: StateLog) -> None:
        """Leave a state log with the newest fact of each key and nothing else."""
        await self._tend(log.partition, _STATE_CONFIG, roll=True, dirty_share_min=0)
        await log.partition.sync()

    async def _tend_stored(self, topic: Topic, number: int, **how: Any) -> StorageFailed | None:
        """Look after a partition that has files, and close it if it was not open before.  Returns what went wrong."""
        topics = self._host.topics
        try:
            if not topics.is_untouched(topic, number):
                was_open = topic.partitions[number] is not None
                await self._tend(topics.partition_of(topic, number), topic.config, topic, **how)
                if not was_open:
                    topics.close_idle(topic, number)
        except StorageFailed as error:
            _log.error("a partition cannot be looked after", topic=topic.name, partition=number, reason=str(error))
            return error
        return None

    async def _tend(
        self,
        partition: Partition,
        config: TopicConfig,
        topic: Topic | None = None,
        *,
        tended: Tended | None = None,
        roll: bool = False,
        dirty_share_min: float = DIRTY_SHARE_MIN,
    ) -> None:
        if self._stopping.is_set():
            return
        await asyncio.sleep(0)
        tended = tended or Tended()
        async with partition.maintenance:
            if partition.failed is not None:
                return
            tended.partitions += 1
            tended.bytes_before += partition.log.size_bytes
            try:
                if roll:
                    partition.log.roll()
                    await partition.sync()
                if config.deletes:
                    tended.segments_deleted += self._retain(partition, config, topic)
                # Afterwards, because it needs room on the disk, and may fail for want of it.
                if not roll and self._may_roll(partition, config, topic, tended):
                    partition.log.roll()
                    await partition.sync()
                if config.compacts:
                    tended.compacted += await self._compact(partition, config, dirty_share_min)
                tended.bytes_after += partition.log.size_bytes
            except Exception as error:  # whatever it is, it costs this partition its turn and nobody else anything
                unexpected = not isinstance(error, OSError | StorageFailed)
                directory = partition.log.directory
                _log.error("cleanup failed", directory=directory, reason=str(error), exc_info=unexpected)
                if partition.log.failure is not None:
                    partition.fail(partition.log.failure)

    def _below(self, partition: Partition, config: TopicConfig, topic: Topic | None) -> int | None:
        """Where retention has to stop whatever the limits say."""
        if config.cleanup != "settled" or topic is None:
            return None
        # Without a group nothing is settled: the first one will want everything there is.
        return self._host.queues.settled_below(topic, topic.partition_uids.index(partition.uid)) or 0

    def _may_roll(self, partition: Partition, config: TopicConfig, topic: Topic | None, tended: Tended) -> bool:
        """Whether the active segment is to be rolled before it is full, and it is its turn."""
        now_us, log = self._host.patience.now_us(), partition.log
        below = self._below(partition, config, topic)
        wanted = config.deletes and _retention(config).decide_roll(log.segments, now_us=now_us, below=below)
        if not wanted and not (config.compacts and Compaction.wants_roll(log, now_us=now_us)):
            return False
        if tended.rolls_left <= 0:
            if self._unrolled_uid is None:
                self._unrolled_uid = partition.uid
            return False
        tended.rolls_left -= 1
        return True

    def _retain(self, partition: Partition, config: TopicConfig, topic: Topic | None) -> int:
        below = self._below(partition, config, topic)
        removed = partition.log.retain(_retention(config), self._host.patience.now_us(), below=below)
        self._host.metrics.segments_deleted += removed
        if removed:
            _log.info("segments deleted", directory=partition.log.directory, segments=removed)
        return removed

    async def _compact(self, partition: Partition, config: TopicConfig, dirty_share_min: float) -> bool:
        """Rewrite in a thread, swap on the loop.  Traffic goes on meanwhile."""
        compaction = Compaction.plan(
            partition.log,
            now_us=self._host.patience.now_us(),
            tombstone_retention_ms=config.tombstone_retention_ms,
            dirty_share_min=dirty_share_min,
            retention=_retention(config) if config.deletes else None,
        )
        if compaction is None:
            return False
        await self._opener.loop.run_in_executor(None, compaction.rewrite, self._stopping.is_set)
        swapped = False
        for done in compaction.swaps() if partition.failed is None else ():
            if done:
                swapped = True
                self._host.queues.log_rewritten(partition)
            await asyncio.sleep(0)  # there may be hundreds, and each takes some syncs
        if not swapped:
            return False
        self._host.metrics.compactions += 1
        _log.info("compacted", directory=partition.log.directory)
        return True


def _retention(config: TopicConfig) -> Retention:
    return Retention(
        max_age_ms=config.retention_ms or None,
        max_bytes=config.retention_bytes or None,
        max_messages=config.retention_messages or None,
    )
