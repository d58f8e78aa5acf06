"""Looking at queues: what is where and why.

Nothing here is on the way of a LEASE or SETTLE; it may be slow, so it lets others go first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from millstream.broker.queues.contents import contents
from millstream.broker.queues.group import QueueGroup
from millstream.broker.queues.part import QueuePart
from millstream.broker.registry import Topic
from millstream.errors import GroupNotFound, InvalidArgument, MessageNotFound, StorageFailed, TopicNotFound
from millstream.ids import parse_message_id
from millstream.queues.records import NEVER, Attempt
from millstream.wire import queue_calls

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.queues import Queues

__all__ = ["QueueViews", "place_of"]

_PEEK_MAX: Final = 1_000
#: Parts that are opened before others get their turn.
_OPENED_AT_A_TIME: Final = 8

Handler = Callable[["Session", Any], Awaitable[object]]


class QueueViews:
    """The control calls of queues."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def handlers(self) -> dict[type, Handler]:
        registry = self._queues.registry
        return {
            queue_calls.OpenQueue: registry.open,
            queue_calls.CloseQueue: self._close,
            queue_calls.ConfigureQueue: self._configure,
            queue_calls.DeleteQueue: lambda session, call: registry.delete(session.namespace, call),
            queue_calls.PurgeQueue: self._purge,
            queue_calls.ListQueues: self._list,
            queue_calls.DescribeQueue: self._describe,
            queue_calls.PeekQueue: self._peek,
            queue_calls.DescribeMessage: self._message,
        }

    # --- groups --------------------------------------------------------------------------------------------------

    async def _close(self, session: Session, call: queue_calls.CloseQueue) -> None:
        self._queues.remove_consumer(self._queues.consumer(session, call.consumer))

    async def _configure(self, session: Session, call: queue_calls.ConfigureQueue) -> None:
        await self._queues.registry.configure(session.namespace, call)

    async def _purge(self, session: Session, call: queue_calls.PurgeQueue) -> queue_calls.Purged:
        purged = 0
        for part in self._queues.registry.get(session.namespace, call.topic, call.group).parts():
            purged += part.ledger.purge(part.end)
            await part.record_durably()
            part.wake()
        self._queues.metrics.messages_purged += purged
        return queue_calls.Purged(purged=purged)

    async def _list(self, session: Session, call: queue_calls.ListQueues) -> list[queue_calls.QueueSummary]:
        groups = self._queues.registry.all_groups(session.namespace)
        if call.topic is not None:
            self._queues.topics.registry.get(session.namespace, call.topic)  # or say that there is none
        summaries = []
        for group in [group for group in groups if call.topic in (None, group.topic.name)]:
            with suppress(TopicNotFound, GroupNotFound):  # deleted meanwhile: not on the list any more
                try:
                    await self._open(group)
                    summaries.append(self._summary(group))
                except StorageFailed as error:  # the others can be counted
                    summaries.append(self._summary(group, failed=str(error)))
        return summaries

    def _summary(self, group: QueueGroup, failed: str | None = None) -> queue_calls.QueueSummary:
        ready = leased = waiting = 0
        for part in () if failed else self._touched_parts(group):
            counts = part.ledger.counts(part.end)
            ready += counts.ready
            leased += counts.leased
            waiting += counts.waiting
        return queue_calls.QueueSummary(
            topic=group.topic.name,
            group=group.name,
            depth=ready + leased + waiting,
            ready=ready,
            leased=leased,
            waiting=waiting,
            consumers=len(group.consumers),
            paused=group.policy.paused,
            failed=failed,
        )

    async def _open(self, group: QueueGroup) -> None:
        """Open what is about to be looked at; with thousands of partitions others go first."""
        for count, _ in enumerate(self._touched_parts(group)):
            if count % _OPENED_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _touched_parts(self, group: QueueGroup) -> Iterator[QueuePart]:
        """The parts of partitions that were ever used: looking at a group does not make files."""
        for number in range(len(group.topic.partitions)):
            if not self._queues.topics.is_untouched(group.topic, number):
                yield group.part(number)

    async def _describe(self, session: Session, call: queue_calls.DescribeQueue) -> queue_calls.QueueInfo:
        group = self._queues.registry.get(session.namespace, call.topic, call.group)
        await self._open(group)
        summary = self._summary(group)
        clock_us = self._queues.now_us() - self._queues.behind_us()
        settled: dict[str, int] = {}
        lanes: dict[int, queue_calls.LaneInfo] = {}
        partitions = []
        oldest_us = clock_us
        for part in self._touched_parts(group):
            await asyncio.sleep(0)
            counts = part.ledger.counts(part.end)
            for how, messages in counts.totals.items():
                settled[how] = settled.get(how, 0) + messages
            for lane in part.ledger.lanes(part.keeper.source):
                info = lanes.setdefault(lane.lane, _no_lane(lane.lane))
                info.ready += lane.ready
                info.leased += lane.leased
                info.served += lane.served
                info.last_served_ms = max(info.last_served_ms, lane.last_served_us // 1000)
            depth = counts.ready + counts.leased + counts.waiting
            if depth:
                oldest_us = min(oldest_us, await self._append_time_us(part, part.ledger.committed) or clock_us)
            partitions.append(
                queue_calls.QueuePartitionInfo(
                    partition=part.number,
                    depth=depth,
                    ready=counts.ready,
                    leased=counts.leased,
                    waiting=counts.waiting,
                    settled_below=part.ledger.committed,
                    end=part.end,
                )
            )
        return queue_calls.QueueInfo(
            topic=group.topic.name,
            group=group.name,
            policy={name: getattr(group.policy, name) for name in group.policy.__struct_fields__},
            depth=summary.depth,
            ready=summary.ready,
            leased=summary.leased,
            waiting=summary.waiting,
            settled=settled,
            oldest_ms=max(clock_us - oldest_us, 0) // 1000,
            partitions=partitions,
            lanes=[lanes[number] for number in sorted(lanes)],
            consumers=[consumer.info(consumer.held(group)) for consumer in group.consumers.values()],
        )

    async def _append_time_us(self, part: QueuePart, offset: int) -> int | None:
        await part.keeper.partition.warm(max(offset, part.keeper.source.start))
        run = part.keeper.source.batch_at(offset)
        return run.append_time_us if run is not None else None

    # --- messages ------------------------------------------------------------------------------------------------

    async def _peek(self, session: Session, call: queue_calls.PeekQueue) -> list[queue_calls.QueuedMessage]:
        if not 1 <= call.limit <= _PEEK_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_PEEK_MAX}, not {call.limit}")
        group = self._queues.registry.get(session.namespace, call.topic, call.group)
        states = (call.state,) if call.state else ("ready", "leased", "waiting")
        found: list[queue_calls.QueuedMessage] = []
        for part in self._touched_parts(group):
            offsets = {
                offset for state in states for offset in islice(part.ledger.offsets(state, part.end), call.limit)
            }
            for offset in sorted(offsets)[: call.limit]:
                await asyncio.sleep(0)
                message = await self._look(part, offset)
                if message is not None:
                    found.append(message)
        return sorted(found, key=lambda message: (message.append_time_ms, message.partition, message.offset))[
            : call.limit
        ]

    async def _message(self, session: Session, call: queue_calls.DescribeMessage) -> list[queue_calls.QueuedMessage]:
        topic, number, offset = place_of(self._queues, session.namespace, call.id)
        found = []
        for group in self._queues.registry.on_topic(topic):
            if call.group in (None, group.name):
                message = await self._look(group.part(number), offset)
                if message is not None:
                    found.append(message)
        if not found:
            raise MessageNotFound(f"no queue group of topic {topic.name!r} knows message {call.id}")
        return found

    async def _look(self, part: QueuePart, offset: int) -> queue_calls.QueuedMessage | None:
        await part.keeper.partition.warm(max(offset, part.keeper.source.start))
        run = part.keeper.source.batch_at(offset)
        batches = [batch for batch in run.batches() if offset in batch.offsets()] if run else []
        uid = part.group.topic.partition_uids[part.number]
        content = next((content for batch in batches for at, content in contents(batch, uid) if at == offset), None)
        if content is None:
            return None
        where = part.ledger.look(offset, part.end)
        lease, history = where.lease, where.history
        until_us = lease.deadline_us if lease else where.due_us
        last_us = lease.granted_us if lease else history.attempts[-1].delivered_us if history.attempts else 0
        return queue_calls.QueuedMessage(
            topic=part.group.topic.name,
            group=part.group.name,
            partition=part.number,
            offset=offset,
            state=where.state,  # type: ignore[arg-type]
            deliveries=history.deliveries + (lease is not None),
            failures=history.failures,
            consumer=lease.consumer if lease else "",
            until_ms=until_us // 1000 if until_us < NEVER else 0,
            first_delivery_ms=(history.first_us or last_us) // 1000,
            last_delivery_ms=last_us // 1000,
            attempts=[_attempt(attempt) for attempt in history.attempts],
            **content,
        )


def place_of(queues: Queues, namespace: str, text: str) -> tuple[Topic, int, int]:
    """Topic, partition and offset of the message with an id."""
    place = parse_message_id(text)
    found = queues.topics.registry.place_of(place.partition_uid)
    if found is None or found[0].namespace != namespace:
        raise MessageNotFound(f"no topic of namespace {namespace!r} has a message {text}")
    return *found, place.offset


def _attempt(attempt: Attempt) -> queue_calls.AttemptInfo:
    return queue_calls.AttemptInfo(
        consumer=attempt.consumer,
        delivered_ms=attempt.delivered_us // 1000,
        ended_ms=attempt.ended_us // 1000,
        kind=attempt.kind,
        reason=attempt.reason,
    )


def _no_lane(number: int) -> queue_calls.LaneInfo:
    return queue_calls.LaneInfo(priority=number, ready=0, leased=0, served=0, last_served_ms=0)
