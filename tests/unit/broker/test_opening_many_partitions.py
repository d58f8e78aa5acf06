"""Topics of thousands of partitions: a queue group opens all of them, and nobody else stands still meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from millstream.broker.registry import Topic
from millstream.errors import GroupNotFound, QueueFull, TopicNotFound
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls
from millstream.wire.subscription_calls import DescribeFlow
from tests.simulated_broker import Client, run, started

PARTITIONS = 120


async def most_opened_at_once(client: Client, name: str, work: Awaitable[object]) -> int:
    """How many partitions of a topic were opened in one turn of the loop, where it was most."""
    task = asyncio.ensure_future(work)
    most = before = 0
    while not task.done():
        await asyncio.sleep(0)
        topic = client.broker.topics.registry.find("default", name)
        opened = sum(partition is not None for partition in topic.partitions) if topic is not None else 0
        most, before = max(most, opened - before), opened
    await task
    assert before == PARTITIONS
    return most


def test_opening_a_queue_on_many_partitions_lets_others_go_first() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS))
        assert await most_opened_at_once(client, "orders", client.open_queue()) <= 8
        await client.broker.stop()

    run(scenario)


def test_a_topic_of_many_partitions_that_a_pattern_was_waiting_for_lets_others_go_first() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        consumer = await client.open_queue("orders.*")
        made = client.call(calls.CreateTopic(name="orders.eu", partitions=PARTITIONS))
        assert await most_opened_at_once(client, "orders.eu", made) <= 8
        await client.send([b"one"], topic="orders.eu")
        assert [message.value for message in await client.lease(consumer, wait_ms=1000)] == [b"one"]
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize(
    "look",
    [queue_calls.DescribeQueue(topic="orders"), DescribeFlow(topic="orders"), queue_calls.ListQueues()],
    ids=["describe", "flow", "list"],
)
def test_looking_at_a_queue_on_many_partitions_lets_others_go_first(look: object) -> None:
    """After a restart nothing of it is open."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS))
        await client.open_queue()
        await client.broker.stop()
        client = await started(storage)
        assert await most_opened_at_once(client, "orders", client.call(look)) <= 8
        await client.broker.stop()

    run(scenario)


def test_a_queue_that_is_opened_while_its_topic_is_deleted_leaves_nothing_behind() -> None:
    """Its directory may belong to another topic of the same name by then."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS))
        topic: Topic = client.broker.topics.registry.get("default", "orders")
        opening = asyncio.ensure_future(client.open_queue())
        while not any(topic.partitions):  # noqa: ASYNC110
            await asyncio.sleep(0)
        topic.deleting = True  # as the deletion's first fact makes it, while the opening is under way
        with pytest.raises(TopicNotFound):
            await opening
        await client.call(calls.DeleteTopic(name="orders"))
        with pytest.raises(TopicNotFound):
            client.broker.topics.partition_of(topic, 0)
        assert storage.names("topics/default") == []
        await client.broker.stop()

    run(scenario)


def test_who_opens_a_queue_that_is_being_deleted_is_told_so() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders"))
        await client.call(queue_calls.CloseQueue(consumer=await client.open_queue()))
        await client.call(calls.AlterTopic(name="orders", partitions=400))
        topic: Topic = client.broker.topics.registry.get("default", "orders")
        opening = asyncio.ensure_future(client.open_queue())
        while not topic.partitions[1]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await client.call(queue_calls.DeleteQueue(topic="orders"))
        with pytest.raises(GroupNotFound, match="was deleted"):
            await opening
        # A new one of its name begins anew, and nothing of the old one takes messages away from it.
        await client.send([b"one"])
        consumer = await client.open_queue()
        assert [message.value for message in await client.lease(consumer, wait_ms=1000)] == [b"one"]
        await client.broker.stop()

    run(scenario)


def test_a_topic_that_is_deleted_while_queues_are_listed_is_not_on_the_list() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        for name in ("orders", "others"):
            await client.call(calls.CreateTopic(name=name, partitions=PARTITIONS))
            await client.open_queue(name)
        await client.broker.stop()
        client = await started(storage)
        topic: Topic = client.broker.topics.registry.get("default", "orders")
        listing = asyncio.ensure_future(client.call(queue_calls.ListQueues()))
        while not any(topic.partitions):  # noqa: ASYNC110
            await asyncio.sleep(0)
        topic.deleting = True  # as the deletion's first fact makes it
        found = await listing
        assert isinstance(found, list)
        assert [summary.topic for summary in found] == ["others"]
        topic.deleting = False
        await client.broker.stop()

    run(scenario)


def test_publishing_to_a_topic_with_a_depth_limit_does_not_count_what_waits_for_every_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a thousand partitions each count took 6 ms in which nobody else was served."""

    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS, config={"max_depth": 100}))
        counts = 0
        depth = client.broker.queues.depth

        def counted(topic: Topic) -> int:
            nonlocal counts
            counts += 1
            return depth(topic)

        monkeypatch.setattr(client.broker.queues, "depth", counted)
        for _ in range(100):
            await client.send([b"x"])
        assert counts < 50
        with pytest.raises(QueueFull, match="has 100 messages"):
            await client.send([b"x"])
        await client.broker.stop()

    run(scenario)


def test_the_depth_limit_of_a_topic_that_was_made_again_is_counted_anew() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        for _ in range(3):
            await client.call(calls.CreateTopic(name="orders", config={"max_depth": 2}))
            await client.send([b"x", b"x"])
            with pytest.raises(QueueFull, match="has 2 messages"):
                await client.send([b"x"])
            await client.call(calls.DeleteTopic(name="orders"))
        await client.broker.stop()

    run(scenario)
