"""The survey: every topic and group with its numbers, in one pass over memory.

Nothing is opened and nothing is read for it.  A partition that nobody has used since the broker started is *cold*: what
is in it counts from the moment when somebody opens it.  `Finder` does that for those that groups read, a few at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.group import Standing
from millstream.broker.groups import Groups
from millstream.broker.metrics import Metrics
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.broker.traffic.flow import Flow
from millstream.clock import Clock
from millstream.dead_letters import DEAD_LETTER_GROUP
from millstream.errors import MillstreamError
from millstream.queues.records import LaneStatistics

if TYPE_CHECKING:
    from millstream.broker.queues.group import QueueGroup
    from millstream.broker.queues.part import QueuePart
    from millstream.broker.queues.queues import Queues
    from millstream.broker.schedules.schedules import Schedules

__all__ = ["Finder", "Host", "QueueRow", "StreamRow", "Survey", "TopicRow", "take_survey"]

#: Partitions that are opened only to know how full their queues are.
_FOUND_MAX: Final = 2_000
_FOUND_AT_A_TIME: Final = 50
#: Topics that are looked at before others get their turn: a few milliseconds.
_AT_A_TIME: Final = 200


class Host(Protocol):
    """The broker, as far as this room is concerned."""

    metrics: Metrics
    topics: Topics
    queues: Queues
    groups: Groups
    schedules: Schedules
    flow: Flow


@dataclass(slots=True)
class TopicRow:
    """One topic.  What is counted is counted since the broker started."""

    namespace: str
    topic: str
    partitions: int = 0
    cold: int = 0
    #: In the log now.
    messages: int = 0
    log_bytes: int = 0
    #: Offsets that cannot be read any more, as far as anybody has come upon them.
    damaged: int = 0
    published: int = 0
    published_bytes: int = 0
    #: Handed out, by whatever way.
    consumed: int = 0
    acked: int = 0
    #: Nacked, rejected, or not answered in time.
    failed: int = 0
    dead: int = 0
    #: Not settled, in the queue group that has most.
    depth: int = 0
    leased: int = 0
    waiting: int = 0
    scheduled: int = 0
    #: For a topic of dead letters: how many are there.
    dead_letters: int = 0
    throttle_ms: int = 0


@dataclass(slots=True)
class QueueRow:
    """One queue group on its topic."""

    namespace: str
    topic: str
    group: str
    ready: int = 0
    leased: int = 0
    waiting: int = 0
    #: Of the oldest message that is not settled; 0 when there is none.
    oldest_ms: int = 0
    consumers: int = 0
    paused: int = 0
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    nacked: int = 0
    rejected: int = 0
    timed_out: int = 0
    dead: int = 0
    expired: int = 0
    removed: int = 0
    #: By priority; nothing as long as nobody has used any.
    lanes: list[LaneStatistics] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return self.ready + self.leased + self.waiting


@dataclass(slots=True)
class StreamRow:
    """One stream group on one of its topics."""

    namespace: str
    topic: str
    group: str
    lag: int = 0
    oldest_ms: int = 0
    members: int = 0
    rebalancing: int = 0
    paused: int = 0


@dataclass(slots=True)
class Survey:
    """Everything at one moment."""

    time_ms: int
    monotonic_ms: int
    namespaces: int
    topics: list[TopicRow] = field(default_factory=list)
    queues: list[QueueRow] = field(default_factory=list)
    streams: list[StreamRow] = field(default_factory=list)
    journal_bytes: int = 0


async def take_survey(host: Host, clock: Clock) -> Survey:
    """Look at everything, once.  Where there is very much others get their turn in between."""
    registry = host.topics.registry
    now_us = clock.now_us()
    survey = Survey(now_us // 1000, clock.monotonic_ms(), len(registry.namespaces))
    # By age: the oldest keep their series where there are too many.
    topics = sorted(registry.all_topics(), key=lambda topic: topic.created_ms)
    for count, topic in enumerate(topics, 1):
        if count % _AT_A_TIME == 0:
            await asyncio.sleep(0)
        if not topic.deleting:
            row = _topic_row(host, topic)
            if registry.holds_letters(topic):
                row.dead_letters = _letters(host, topic, row.messages)
            for group in host.queues.registry.on_topic(topic):
                queue = _queue_row(group, now_us)
                survey.queues.append(queue)
                _add(row, queue)
            survey.topics.append(row)
            for beside in topic.beside.values():
                partition = getattr(beside, "partition", None)  # a journal has one, as a partition of its own
                survey.journal_bytes += partition.log.size_bytes if partition is not None else 0
    for standing in host.groups.standings():
        survey.streams += _stream_rows(host, standing, now_us)
    return survey


def _topic_row(host: Host, topic: Topic) -> TopicRow:
    row = TopicRow(topic.namespace, topic.name, partitions=len(topic.partitions), **topic.departed)
    for partition in topic.partitions:
        if partition is None:
            row.cold += 1
            continue
        row.messages += partition.high_watermark - partition.log.start_offset
        row.log_bytes += partition.log.size_bytes
        row.damaged += sum(after - first for first, after in partition.log.recovery.damaged)
        row.published += partition.messages_published
        row.published_bytes += partition.bytes_published
        row.consumed += partition.messages_fetched + partition.messages_pushed
    row.scheduled = host.schedules.pending(topic)
    row.throttle_ms = host.flow.level_of(topic)[1]
    return row


def _letters(host: Host, topic: Topic, stored: int) -> int:
    group = host.queues.registry.known(topic, DEAD_LETTER_GROUP)
    parts = group.open_parts() if group is not None else []
    return sum(part.depth() for part in parts) if parts else stored


def _queue_row(group: QueueGroup, now_us: int) -> QueueRow:
    row = QueueRow(
        group.topic.namespace,
        group.topic.name,
        group.name,
        consumers=len(group.consumers),
        paused=int(group.policy.paused),
        delivered=group.delivered,
        redelivered=group.redelivered,
        nacked=group.nacked,
        rejected=group.rejected,
        timed_out=group.timed_out,
    )
    oldest_us = now_us
    for part in group.open_parts():
        counts = part.counts()
        row.ready += counts.ready
        row.leased += counts.leased
        row.waiting += counts.waiting
        row.acked += part.settled_since(counts, "acked")
        row.dead += part.settled_since(counts, "dead")
        row.expired += part.settled_since(counts, "expired")
        row.removed += part.removed
        if counts.ready or counts.leased or counts.waiting:
            oldest_us = min(oldest_us, part.keeper.partition.stored_us(part.ledger.committed))
        lanes = part.ledger.lanes(part.keeper.source)
        if lanes:
            row.lanes = [_sum(*two) for two in zip(row.lanes, lanes, strict=True)] if row.lanes else lanes
    row.oldest_ms = (now_us - oldest_us) // 1000
    return row


def _sum(one: LaneStatistics, other: LaneStatistics) -> LaneStatistics:
    return LaneStatistics(
        one.lane,
        one.ready + other.ready,
        one.leased + other.leased,
        one.served + other.served,
        max(one.last_served_us, other.last_served_us),
    )


def _add(row: TopicRow, queue: QueueRow) -> None:
    row.consumed += queue.delivered
    row.acked += queue.acked
    row.failed += queue.nacked + queue.rejected + queue.timed_out
    row.dead += queue.dead
    row.depth = max(row.depth, queue.depth)
    row.leased += queue.leased
    row.waiting += queue.waiting


def _stream_rows(host: Host, standing: Standing, now_us: int) -> Iterable[StreamRow]:
    rows: dict[str, StreamRow] = {}
    for at, committed in standing.positions.items():
        topic = host.topics.registry.find(standing.namespace, at.topic)
        if topic is None or at.partition >= len(topic.partitions):
            continue
        row = rows.get(at.topic)
        if row is None:
            row = rows[at.topic] = StreamRow(standing.namespace, at.topic, standing.name, members=standing.members)
            row.rebalancing = int(standing.phase == "rebalancing")
            row.paused = int(standing.paused)
        partition: Any = topic.partitions[at.partition]
        if partition is not None:
            position = max(partition.log.start_offset, committed or 0)
            lag = max(0, partition.high_watermark - position)
            row.lag += lag
            if lag:
                row.oldest_ms = max(row.oldest_ms, (now_us - partition.stored_us(position)) // 1000)
    return rows.values()


class Finder:
    """Opens what groups read and nobody has used since the start: a backlog must not be silent until its consumer is
    back."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._left = _FOUND_MAX
        self._places: Iterator[tuple[Topic, int, list[str]]] | None = None
        self._done = False

    async def find(self) -> None:
        """A few of them.  Called now and then; costs nothing when all are found."""
        if self._done:
            return
        if self._places is None:
            self._places = iter(list(self._candidates()))
        some = list(islice(self._places, min(_FOUND_AT_A_TIME, self._left)))
        self._left -= len(some)
        self._done = not some
        for topic, number, names in some:
            await asyncio.sleep(0)  # opening takes a moment; others go first
            try:
                await self._open(topic, number, names)
            except (OSError, MillstreamError):
                continue  # whoever uses it is told why

    def _candidates(self) -> Iterator[tuple[Topic, int, list[str]]]:
        """Cold partitions with the names of their queue groups; first those that stream groups read."""
        registry = self._host.topics.registry
        for standing in self._host.groups.standings():
            for at in standing.positions:
                topic = registry.find(standing.namespace, at.topic)
                if topic is not None and at.partition < len(topic.partitions):
                    yield topic, at.partition, []
        for topic in registry.all_topics():
            names = [group.name for group in self._host.queues.registry.on_topic(topic)]
            if registry.holds_letters(topic):
                names.append(DEAD_LETTER_GROUP)
            if names and not topic.deleting:
                for number in range(len(topic.partitions)):
                    yield topic, number, names

    async def _open(self, topic: Topic, number: int, names: list[str]) -> None:
        topics, queues = self._host.topics, self._host.queues
        if topic.deleting or number >= len(topic.partitions) or topics.is_untouched(topic, number):
            return
        topics.partition_of(topic, number)
        for name in names:
            part = queues.part(topic, name, number)
            if part.depth():
                await _learn(part)


async def _learn(part: QueuePart) -> None:
    """See how old the oldest message is, once and exactly."""
    offset = max(part.ledger.committed, part.keeper.source.start)
    partition = part.keeper.partition
    await partition.warm(offset)
    run = part.keeper.source.batch_at(offset)
    if run is not None and not part.closed:
        partition.ages.learn(max(offset, run.base_offset), run.append_time_us)
