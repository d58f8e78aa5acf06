"""Topics over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from millstream.server.http.endpoints import Exchange, Family, NoQuery
from millstream.wire import calls, message_calls, queue_calls, subscription_calls

__all__ = ["family"]

family = Family("topics", "Named logs, split into partitions.")

Whole = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TopicsQuery(msgspec.Struct, forbid_unknown_fields=True):
    #: Only topics that match, such as `orders.*` or `orders.#`.
    pattern: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 50
    offset: Whole = 0
    #: Include dead letter topics.
    include_dead_letters: bool = False


class NewTopic(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    #: Number of partitions, which are ordered sequences.
    partitions: int = 1
    config: dict[str, Any] = {}
    #: Succeed if the topic already exists.
    if_missing: bool = False


class TopicChanges(msgspec.Struct, forbid_unknown_fields=True):
    #: Settings to change; the others stay as they are.
    config: dict[str, Any] = {}
    #: Grow to this many; there are never fewer.
    partitions: int | None = None


class ForceQuery(msgspec.Struct, forbid_unknown_fields=True):
    #: Delete it even while groups read it.
    force: bool = False


class OffsetsQuery(msgspec.Struct, forbid_unknown_fields=True):
    #: `durable` is the end after a sync: no power cut takes what lies before it.
    at: Literal["earliest", "latest", "durable", "timestamp"] = "latest"
    #: The first message that was stored at or after this time.
    timestamp_ms: Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)] | None = None
    #: May be repeated; without it, all partitions.
    partition: list[int] = []


class PartitionOffset(msgspec.Struct):
    partition: int
    offset: int


class GroupLanes(msgspec.Struct):
    """The priorities of one queue group; empty until a message with a priority was asked for."""

    group: str
    lanes: list[queue_calls.LaneInfo]


@family.get("/topics", query=TopicsQuery, answer=list[message_calls.TopicSummary])
async def list_topics(exchange: Exchange[TopicsQuery, None]) -> list[message_calls.TopicSummary]:
    """List topics by name, with what is in them and who reads them."""
    query = exchange.query
    found: message_calls.TopicSummaries = await exchange.call(
        message_calls.SummarizeTopics(
            pattern=query.pattern,
            offset=query.offset,
            limit=query.limit,
            include_dead_letters=query.include_dead_letters,
        )
    )
    exchange.answer_headers.update(
        {"x-total-count": str(found.total), "x-limit": str(query.limit), "x-offset": str(query.offset)}
    )
    return found.topics


@family.post("/topics", body=NewTopic, answer=calls.TopicInfo, status=201)
async def create_topic(exchange: Exchange[NoQuery, NewTopic]) -> Any:
    """Create a topic."""
    new = exchange.body
    return await exchange.call(
        calls.CreateTopic(name=new.name, partitions=new.partitions, config=new.config, if_missing=new.if_missing)
    )


@family.get("/topics/{topic}", answer=calls.TopicInfo)
async def show_topic(exchange: Exchange[NoQuery, None]) -> Any:
    """Show a topic, with its partitions and its configuration."""
    return await exchange.call(calls.DescribeTopic(name=exchange.path["topic"]))


@family.patch("/topics/{topic}", body=TopicChanges, answer=calls.TopicInfo)
async def change_topic(exchange: Exchange[NoQuery, TopicChanges]) -> Any:
    """Change settings of a topic, or give it more partitions."""
    name, changes = exchange.path["topic"], exchange.body
    await exchange.call(calls.AlterTopic(name=name, config=changes.config, partitions=changes.partitions))
    return await exchange.call(calls.DescribeTopic(name=name))


@family.delete("/topics/{topic}", query=ForceQuery)
async def delete_topic(exchange: Exchange[ForceQuery, None]) -> None:
    """Delete a topic and every message in it."""
    await exchange.call(calls.DeleteTopic(name=exchange.path["topic"], force=exchange.query.force))


@family.get("/topics/{topic}/offsets", query=OffsetsQuery, answer=list[PartitionOffset])
async def list_offsets(exchange: Exchange[OffsetsQuery, None]) -> list[PartitionOffset]:
    """Show where the partitions of a topic begin or end, or their first offsets at or after a time."""
    query = exchange.query
    call = calls.ListOffsets(
        topic=exchange.path["topic"],
        at=query.at,
        timestamp_ms=query.timestamp_ms,
        partitions=query.partition or None,
    )
    entries: list[calls.OffsetEntry] = await exchange.call(call)
    return [PartitionOffset(entry.partition, entry.offset) for entry in entries]


@family.get("/topics/{topic}/flow", permission="any", answer=subscription_calls.FlowInfo)
async def show_flow(exchange: Exchange[NoQuery, None]) -> Any:
    """Show how far behind the consumers of a topic's queues are, and whether its publishers are slowed down."""
    return await exchange.call(subscription_calls.DescribeFlow(topic=exchange.path["topic"]))


@family.get("/topics/{topic}/lanes", answer=list[GroupLanes])
async def list_lanes(exchange: Exchange[NoQuery, None]) -> list[GroupLanes]:
    """Show the priorities of each queue group of a topic: what waits, what is leased, and what was served."""
    topic = exchange.path["topic"]
    found: list[GroupLanes] = []
    for queue in await exchange.call(queue_calls.ListQueues(topic=topic)):
        info: queue_calls.QueueInfo = await exchange.call(queue_calls.DescribeQueue(topic=topic, group=queue.group))
        found.append(GroupLanes(queue.group, info.lanes))
    return found
