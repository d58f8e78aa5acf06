"""What a client knows about topics, and the calls of the control protocol as users write their arguments."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final, Literal, NoReturn

from millstream.client.arguments import as_list
from millstream.client.messages import TopicPartition
from millstream.client.values import microseconds
from millstream.entries import AnyEntry, is_delayed, message_bytes, routing_key
from millstream.errors import InvalidArgument, PartitionNotFound, PayloadTooLarge, ProtocolViolation
from millstream.ids import SCHEDULES
from millstream.partitioning import key_partition
from millstream.wire import (
    access_calls,
    admin_calls,
    calls,
    letter_calls,
    message_calls,
    mqtt_calls,
    pipeline_calls,
    queue_calls,
    schedule_calls,
    stage_calls,
    stats_calls,
    subscription_calls,
    trace_calls,
    webhook_calls,
)

__all__ = [
    "FETCH_WAIT_MS",
    "Place",
    "Topic",
    "commit_call",
    "is_repeatable",
    "offsets_call",
    "remember_topic",
    "reset_call",
]

#: How long the broker keeps a fetch that finds nothing.
FETCH_WAIT_MS: Final = 10_000
#: A topic's partitions can become more; looked up again after this long.
METADATA_AGE_S: Final = 60.0
#: Topics that a client remembers: a program may publish to ever new ones, and each is quickly looked up again.
_REMEMBERED_MAX: Final = 10_000

#: Where to read from: a word, a point in time, or an offset.
Place = Literal["earliest", "latest"] | datetime | int

#: Calls that may be made again when their answer is lost: they only look, or say the same thing twice.
_REPEATABLE: Final = (
    calls.DescribeBroker,
    calls.ListNamespaces,
    calls.DescribeTopic,
    calls.ListTopics,
    calls.Metadata,
    calls.ListOffsets,
    calls.NewProducer,
    calls.CommitOffsets,
    calls.CommittedOffsets,
    calls.ListGroups,
    calls.DescribeGroup,
    queue_calls.ListQueues,
    queue_calls.DescribeQueue,
    queue_calls.ConfigureQueue,
    queue_calls.PeekQueue,
    queue_calls.DescribeMessage,
    queue_calls.Explain,
    schedule_calls.ListSchedules,
    schedule_calls.DescribeSchedule,
    schedule_calls.CancelSchedules,
    schedule_calls.MoveSchedule,
    schedule_calls.ScheduleStats,
    schedule_calls.ListRepeating,
    schedule_calls.DescribeRepeating,
    schedule_calls.PauseRepeating,
    message_calls.BrowseMessages,
    message_calls.FindMessage,
    message_calls.SummarizeTopics,
    letter_calls.ListLetters,
    letter_calls.ShowLetter,
    letter_calls.CountLetters,
    letter_calls.ListReplays,
    letter_calls.ShowReplay,
    letter_calls.AbortReplay,
    access_calls.ListKeys,
    access_calls.SetQuota,
    access_calls.ShowQuota,
    access_calls.ListAudit,
    admin_calls.CheckHealth,
    admin_calls.ListConnections,
    admin_calls.ShowConfig,
    mqtt_calls.DescribeMqtt,
    mqtt_calls.ListRetained,
    mqtt_calls.ListSessions,
    mqtt_calls.ShowRetained,
    mqtt_calls.ShowSession,
    pipeline_calls.ListPipelines,
    pipeline_calls.ShowPipeline,
    stage_calls.ListStages,
    stats_calls.DescribeOverview,
    stats_calls.Metrics,
    stats_calls.ReadHistory,
    subscription_calls.DescribeFlow,
    trace_calls.FindTraces,
    trace_calls.ShowPassport,
    webhook_calls.DescribeWebhook,
    webhook_calls.ListWebhooks,
)


def is_repeatable(call: calls.Call) -> bool:
    return isinstance(call, _REPEATABLE)


class Topic:
    """A topic as a publisher sees it."""

    __slots__ = ("_next", "loaded_s", "message_bytes_max", "name", "places", "raw_name", "uids")

    def __init__(self, metadata: calls.TopicMetadata, loaded_s: float) -> None:
        self.name = metadata.name
        self.raw_name = metadata.name.encode()
        self.uids = metadata.partition_uids
        self.places = [TopicPartition(self.name, number) for number in range(len(self.uids))]
        self.message_bytes_max = metadata.max_message_bytes
        self.loaded_s = loaded_s
        self._next = random.randrange(len(self.uids))

    @classmethod
    def of(cls, name: str, found: list[calls.TopicMetadata], loaded_s: float) -> Topic:
        """Of what the broker answers to somebody who asks for this one."""
        if not found or not found[0].partition_uids:
            raise ProtocolViolation(f"the broker says nothing about topic {name!r}; is its version another one?")
        return cls(found[0], loaded_s)

    def choose(self, entry: AnyEntry, partition: int | None) -> int:
        """Where a single message goes: the partition asked for, its key's, or the next in turn.

        With SCHEDULES added if it is delayed.
        """
        chosen = self._choose(entry, partition)
        return chosen | SCHEDULES if is_delayed(entry) else chosen

    def place(self, chosen: int) -> TopicPartition:
        """What `choose` said, as a name."""
        return self.places[chosen] if chosen < SCHEDULES else TopicPartition(self.name, chosen)

    def uid(self, chosen: int) -> int:
        return self.uids[chosen & ~SCHEDULES]

    def _choose(self, entry: AnyEntry, partition: int | None) -> int:
        if partition is not None:
            if type(partition) is not int or not 0 <= partition < len(self.uids):
                self._no_partition(partition)
            return partition
        if type(entry) is not bytes and (key := routing_key(entry)) is not None:
            return key_partition(key, len(self.uids))
        self._next = chosen = (self._next + 1) % len(self.uids)
        return chosen

    def check_size(self, entry: AnyEntry) -> None:
        size = message_bytes(entry)
        if size > self.message_bytes_max:
            raise PayloadTooLarge(f"the message has {size} bytes, topic {self.name!r} allows {self.message_bytes_max}")

    def _no_partition(self, partition: int) -> NoReturn:
        raise PartitionNotFound(f"topic {self.name!r} has partitions 0 to {len(self.uids) - 1}, not {partition!r}")


def remember_topic(topics: dict[str, Topic], name: str, found: list[calls.TopicMetadata], loaded_s: float) -> Topic:
    """Add what the broker answers to somebody who asks for a topic to what a client knows."""
    topic = Topic.of(name, found, loaded_s)
    if len(topics) >= _REMEMBERED_MAX and name not in topics:
        topics.clear()
    topics[name] = topic
    return topic


def offsets_call(
    topic: str, at: Literal["earliest", "latest", "durable"] | datetime, partitions: list[int] | None
) -> calls.ListOffsets:
    if isinstance(at, datetime):
        # Rounded up: an offset before the moment asked for would be a surprise.
        timestamp_ms = -(-microseconds(at) // 1000)
        return calls.ListOffsets(topic=topic, at="timestamp", timestamp_ms=timestamp_ms, partitions=partitions)
    if at not in ("earliest", "latest", "durable"):
        raise InvalidArgument(f"offsets can be asked for at 'earliest', 'latest', 'durable' or a datetime, not {at!r}")
    return calls.ListOffsets(topic=topic, at=at, partitions=partitions)


def reset_call(
    group: str, topic: str, to: str, value: int | datetime | None, partitions: Iterable[int] | None, dry_run: bool
) -> calls.ResetOffsets:
    if to not in ("earliest", "latest", "timestamp", "offset", "shift"):
        raise InvalidArgument(f"a group is reset to earliest, latest, timestamp, offset or shift, not {to!r}")
    number = microseconds(value) // 1000 if isinstance(value, datetime) else value
    return calls.ResetOffsets(
        group=group,
        topic=topic,
        to=to,  # type: ignore[arg-type]
        value=number,
        partitions=None if partitions is None else as_list("partitions", partitions),
        dry_run=dry_run,
    )


def commit_call(
    group: str,
    offsets: Mapping[TopicPartition, int] | Mapping[tuple[str, int], int],
    member_id: str = "",
    generation: int = 0,
    instance_id: str | None = None,
    epoch: int | None = None,
) -> calls.CommitOffsets:
    try:
        entries = [
            calls.OffsetEntry(topic=topic, partition=partition, offset=offset)
            for (topic, partition), offset in offsets.items()
        ]
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument(
            f"offsets are a mapping such as {{('orders', 0): 17}}, from topic and partition to offset, not {offsets!r}"
        ) from None
    return calls.CommitOffsets(
        group=group,
        offsets=entries,
        member_id=member_id,
        generation=generation,
        instance_id=instance_id,
        epoch=epoch,
    )
