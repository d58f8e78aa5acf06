"""Many topics at once: how much is in each of them, who reads it, and what died."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.broker.groups import Groups
from millstream.broker.registry import Topic
from millstream.broker.topics import Topics
from millstream.errors import GroupNotFound, InvalidArgument, StorageFailed, TopicNotFound
from millstream.queues.letters import dead_letter_topic
from millstream.wire import message_calls as calls

if TYPE_CHECKING:
    from millstream.broker.broker import Session
    from millstream.broker.queues.group import QueueGroup
    from millstream.broker.queues.queues import Queues

__all__ = ["Summaries"]

_LIMIT_MAX: Final = 1_000
_OPENED_AT_A_TIME: Final = 8


class _Host(Protocol):
    topics: Topics
    queues: Queues
    groups: Groups


class Summaries:
    """Answers `topic.summaries`."""

    def __init__(self, host: _Host) -> None:
        self._host = host

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {calls.SummarizeTopics: self.summarize}

    async def summarize(self, session: Session, call: calls.SummarizeTopics) -> calls.TopicSummaries:
        namespace = session.namespace
        if not 1 <= call.limit <= _LIMIT_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_LIMIT_MAX}, not {call.limit}")
        if call.offset < 0:
            raise InvalidArgument(f"offset must not be negative, it is {call.offset}")
        topics = self._host.topics.registry.matching(namespace, call.pattern)
        found = [topic for topic in topics if session.access.sees(namespace, topic.name)]
        if not call.include_dead_letters:
            found = [topic for topic in found if not self._host.topics.registry.holds_letters(topic)]
        streams = Counter(name for group in self._host.groups.summaries(namespace) for name in set(group.topics))
        summaries = []
        for topic in found[call.offset : call.offset + call.limit]:
            await asyncio.sleep(0)
            with suppress(TopicNotFound, GroupNotFound):  # deleted meanwhile
                summaries.append(await self._summary(topic, streams[topic.name]))
        return calls.TopicSummaries(topics=summaries, total=len(found))

    async def _summary(self, topic: Topic, streams: int) -> calls.TopicSummary:
        groups = self._host.queues.registry.on_topic(topic)
        summary = calls.TopicSummary(
            name=topic.name,
            partition_count=len(topic.partitions),
            messages=0,
            size_bytes=0,
            depth=0,
            leased=0,
            waiting=0,
            groups=streams + len(groups),
            dead_letters=0,
            created_ms=topic.created_ms,
        )
        unsettled: Counter[str] = Counter()
        for number in range(len(topic.partitions)):
            if number % _OPENED_AT_A_TIME == 0:
                await asyncio.sleep(0)  # opening a partition takes a moment; others go first
            with _told_in(summary):
                self._add(summary, topic, number, groups, unsettled)
        summary.depth = max(unsettled.values(), default=0)
        with _told_in(summary):
            summary.dead_letters = await self._dead_letters(topic)
        return summary

    def _add(
        self,
        summary: calls.TopicSummary,
        topic: Topic,
        number: int,
        groups: Sequence[QueueGroup],
        unsettled: Counter[str],
    ) -> None:
        topics = self._host.topics
        if topics.is_untouched(topic, number):
            return
        partition = topics.partition_of(topic, number)
        summary.messages += partition.high_watermark - partition.log.start_offset
        summary.size_bytes += partition.log.size_bytes
        for group in groups:
            part = group.part(number)
            counts = part.ledger.counts(part.end)
            unsettled[group.name] += counts.ready + counts.leased + counts.waiting
            summary.leased += counts.leased
            summary.waiting += counts.waiting

    async def _dead_letters(self, topic: Topic) -> int:
        topics, queues = self._host.topics, self._host.queues
        name = dead_letter_topic(topic.name, topic.config.dead_letter_topic)
        if topics.registry.holds_letters(topic):
            name = topic.name
        box = topics.registry.find(topic.namespace, name)
        return 0 if box is None else await queues.letters_in(box)


@contextmanager
def _told_in(summary: calls.TopicSummary) -> Iterator[None]:
    """What cannot be opened is not counted, and everything else is."""
    try:
        yield
    except StorageFailed as error:
        summary.failed = str(error)
