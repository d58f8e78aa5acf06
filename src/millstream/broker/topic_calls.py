"""The control calls about namespaces, topics and producers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from millstream.broker.access.permissions import looks_inside
from millstream.errors import InvalidArgument
from millstream.wire import calls

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.broker.partition import Partition
    from millstream.broker.sessions import Session

__all__ = ["TopicCalls", "check_is_there"]

_LIST_LIMIT_MAX: Final = 10_000
#: To know whether a partition has files takes a look at the disk.
_LOOKS_AT_A_TIME: Final = 100


class TopicCalls:
    """Answers the calls about topics, and tells groups, queues and the like what was deleted."""

    def __init__(self, host: Broker) -> None:
        self._host = host
        self._topics = host.topics

    def handlers(self) -> dict[type, Callable[[Session, Any], Awaitable[object]]]:
        return {
            calls.CreateNamespace: lambda _, call: self._topics.create_namespace(call.name),
            calls.DeleteNamespace: self._delete_namespace,
            calls.ListNamespaces: self._list_namespaces,
            calls.CreateTopic: self._create_topic,
            calls.DescribeTopic: self._describe_topic,
            calls.ListTopics: self._list_topics,
            calls.AlterTopic: self._alter_topic,
            calls.DeleteTopic: self._delete_topic,
            calls.Metadata: self._metadata,
            calls.ListOffsets: self._list_offsets,
            calls.NewProducer: self._new_producer,
        }

    async def _list_namespaces(self, session: Session, _: calls.ListNamespaces) -> list[str]:
        return sorted(name for name in self._topics.registry.namespaces if session.access.may("any", name))

    async def _delete_namespace(self, _: Session, call: calls.DeleteNamespace) -> None:
        forget = partial(self._forget_namespace, call.name)
        await self._topics.delete_namespace(call.name, force=call.force, forget=forget)
        # Not before: a batch may wait for a topic that takes nothing, until that is gone.
        await self._host.stages.forget_namespace(call.name)

    async def _forget_namespace(self, name: str) -> None:
        host = self._host
        await host.schedules.recurring.forget_namespace(name)
        await host.replays.forget_namespace(name)
        await host.mqtt.forget_namespace(name)
        await host.groups.forget_namespace(name)
        await host.queues.registry.forget_namespace(name)
        await host.webhooks.forget_namespace(name)
        await host.quotas.forget(name)
        await host.pipelines.forget_namespace(name)

    async def _create_topic(self, session: Session, call: calls.CreateTopic) -> calls.TopicInfo:
        return await self._topics.create(session.namespace, call, in_new=self._host.settings.topics.auto_create)

    async def _describe_topic(self, session: Session, call: calls.DescribeTopic) -> calls.TopicInfo:
        return await self._topics.describe(session.namespace, call.name)

    async def _list_topics(self, session: Session, call: calls.ListTopics) -> list[calls.TopicInfo]:
        if not 1 <= call.limit <= _LIST_LIMIT_MAX:
            raise InvalidArgument(f"limit must be between 1 and {_LIST_LIMIT_MAX}, not {call.limit}")
        topics = self._topics.registry.matching(session.namespace, call.pattern)
        sees = session.access.sees
        found = [topic for topic in topics if topic.name > call.after and sees(session.namespace, topic.name)]
        return [self._topics.info(topic) for topic in found[: call.limit]]

    async def _alter_topic(self, session: Session, call: calls.AlterTopic) -> calls.TopicInfo:
        return await self._topics.alter(session.namespace, call)

    async def _delete_topic(self, session: Session, call: calls.DeleteTopic) -> None:
        readers = self._host.groups.readers_of(session.namespace, call.name)
        topic = self._topics.registry.find(session.namespace, call.name)
        readers += (
            [group.name for group in self._host.queues.registry.on_topic(topic) if group.consumers] if topic else []
        )
        if readers and not call.force:
            raise InvalidArgument(f"topic {call.name!r} is being read by group {readers[0]!r}; stop it or use force")
        await self._topics.delete(session.namespace, call.name)
        await self._host.groups.refresh(session.namespace)

    async def _metadata(self, session: Session, call: calls.Metadata) -> list[calls.TopicMetadata]:
        return await self._topics.metadata(session.namespace, call)

    async def _list_offsets(self, session: Session, call: calls.ListOffsets) -> list[calls.OffsetEntry]:
        topic = self._topics.registry.get(session.namespace, call.topic)
        # Each once: a frame has room for millions of numbers.
        numbers = range(len(topic.partition_uids)) if call.partitions is None else dict.fromkeys(call.partitions)
        if call.at == "timestamp" and call.timestamp_ms is None:
            raise InvalidArgument("offsets at a timestamp need timestamp_ms")
        if call.at == "epoch" and call.epoch is None:
            raise InvalidArgument("offsets at the end of an epoch need epoch")
        offsets: dict[int, int] = {}
        unsynced: dict[int, Partition] = {}
        for looks, number in enumerate(numbers):
            if looks % _LOOKS_AT_A_TIME == 0:
                await asyncio.sleep(0)
            if number in range(len(topic.partitions)) and self._topics.is_untouched(topic, number):
                offsets[number] = 0
                continue
            await asyncio.sleep(0)  # opening takes a moment; others go first
            partition = self._topics.partition(session.namespace, call.topic, number)
            if call.at == "earliest":
                offsets[number] = partition.log.start_offset
            elif call.at == "latest":
                offsets[number] = partition.high_watermark
            elif call.at == "durable":
                offsets[number] = _durable_end(partition)
                if partition.failed is None and offsets[number] < partition.high_watermark:
                    unsynced[number] = partition
            elif call.at == "epoch":
                assert call.epoch is not None
                offsets[number] = min(partition.log.end_of_epoch(call.epoch), partition.high_watermark)
            else:
                assert call.timestamp_ms is not None
                offsets[number] = min(partition.log.offset_at_time(call.timestamp_ms * 1000), partition.high_watermark)
        await asyncio.gather(*(partition.sync() for partition in unsynced.values()))  # which share the disk's syncs
        offsets |= {number: _durable_end(partition) for number, partition in unsynced.items()}
        return [calls.OffsetEntry(topic=call.topic, partition=number, offset=offsets[number]) for number in numbers]

    async def _new_producer(self, _: Session, __: calls.NewProducer) -> calls.ProducerIdentity:
        return calls.ProducerIdentity(producer_id=await self._topics.new_producer_id(), epoch=0)


def _durable_end(partition: Partition) -> int:
    """The end of what is visible and on disk.  In memory, where a sync does nothing, it is the end."""
    return min(partition.durable_offset, partition.high_watermark) if partition.is_durable else partition.high_watermark


def check_is_there(host: Broker, namespace: str, call: object) -> None:
    """Raises NamespaceNotFound where a call would find nothing because there is no such namespace."""
    if namespace in host.topics.registry.namespaces or not looks_inside(call):
        return
    # Groups may wait in a namespace until it is made, and clients of MQTT may do without it.
    if not host.groups.summaries(namespace) and not host.mqtt.has_any(namespace):
        host.topics.registry.topics(namespace)
