"""Topics of thousands of partitions: a queue group opens all of them, and nobody else stands still meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from millstream.broker.opening import PartitionOpener
from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.clock import SystemClock
from millstream.errors import GroupNotFound, QueueFull, StorageFailed, TopicNotFound
from millstream.partitioning import key_partition
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls
from millstream.wire.letter_calls import ReplayLetters
from millstream.wire.message_calls import SummarizeTopics
from millstream.wire.queue_calls import Explain
from millstream.wire.schedule_calls import Repeat
from millstream.wire.subscription_calls import DescribeFlow
from tests.simulated_broker import Client, run, started

PARTITIONS = 120


class InAYear(SystemClock):
    def now_us(self) -> int:
        return super().now_us() + 366 * 86_400_000_000


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


@pytest.mark.parametrize(
    "look",
    [Explain(topic="orders"), SummarizeTopics(), SummarizeTopics(pattern="bills")],
    ids=["why", "all", "letters"],
)
def test_asking_about_a_topic_whose_partitions_are_in_use_lets_others_go_first(look: object) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS, config={"max_depth": 10_000}))
        await client.call(calls.CreateTopic(name="bills", config={"dead_letter_topic": "orders"}))
        await client.open_queue()
        await asyncio.gather(*[client.send([b"x"], partition=number) for number in range(PARTITIONS)])
        await client.broker.stop()
        client = await started(storage)
        assert await most_opened_at_once(client, "orders", client.call(look)) <= 8
        await client.broker.stop()

    run(scenario)


def test_a_replay_to_a_topic_with_a_limit_and_many_partitions_lets_others_go_first() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS, config={"max_depth": 10_000}))
        await client.call(calls.CreateTopic(name="orders.dlq"))
        await client.open_queue()
        await client.send([b"x"], topic="orders.dlq")
        await client.broker.stop()
        client = await started(storage)

        async def replay() -> None:
            await client.call(ReplayLetters(everything=True, target="orders"))
            while not client.broker.metrics.dead_letters_replayed:  # noqa: ASYNC110
                await asyncio.sleep(0)

        assert await most_opened_at_once(client, "orders", replay()) <= 8
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize(
    "look",
    [
        calls.ResetOffsets(group="g", topic="orders", to="earliest", dry_run=True),
        calls.ResetOffsets(group="g", topic="orders", to="timestamp", value=0, dry_run=True),
        calls.DescribeGroup(name="g"),
    ],
    ids=["reset", "reset to a time", "describe"],
)
def test_looking_at_a_stream_group_on_many_partitions_lets_others_go_first(look: object) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS))
        await asyncio.gather(*[client.send([b"x"], partition=number) for number in range(PARTITIONS)])
        ends = [calls.OffsetEntry(topic="orders", partition=number, offset=1) for number in range(PARTITIONS)]
        await client.call(calls.CommitOffsets(group="g", offsets=ends))
        await client.broker.stop()
        client = await started(storage)
        assert await most_opened_at_once(client, "orders", client.call(look)) <= 8
        await client.broker.stop()

    run(scenario)


def test_recurring_schedules_that_are_due_on_many_partitions_let_others_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restart each of them opened its partition in the same turn of the loop: a second for 400 topics."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS))
        keys = {key_partition(key, PARTITIONS): key for key in (f"{n}".encode() for n in range(20 * PARTITIONS))}
        for number, key in keys.items():
            await client.call(Repeat(name=f"s{number}", topic="orders", cron="@yearly", key=key, value=b"x"))
        await client.broker.stop()
        client = await started(storage)
        recurring = client.broker.schedules.recurring
        monkeypatch.setattr(recurring, "_clock", InAYear())

        async def publish() -> None:
            recurring.look()
            while any(recurring.show("default", f"s{number}").published == 0 for number in keys):  # noqa: ASYNC110
                await asyncio.sleep(0)

        assert await most_opened_at_once(client, "orders", publish()) <= 8
        await client.broker.stop()

    run(scenario)


def test_a_reset_while_its_topic_is_deleted_says_so() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS))
        begin = calls.OffsetEntry(topic="orders", partition=0, offset=0)
        await client.call(calls.CommitOffsets(group="g", offsets=[begin]))
        resetting = asyncio.ensure_future(client.call(calls.ResetOffsets(group="g", topic="orders", to="latest")))
        await asyncio.sleep(0)
        # As the deletion's first fact makes it: a deletion by a call may wait for the disk until the reset is over.
        client.broker.topics.registry.get("default", "orders").deleting = True
        with pytest.raises(TopicNotFound):
            await resetting
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize("to", ["latest", "timestamp"])
def test_a_reset_at_any_moment_of_its_topics_deletion_leaves_nothing_behind(to: Literal["latest", "timestamp"]) -> None:
    """A new topic of that name would start in the middle for the group."""

    async def scenario() -> None:
        client = await started(SimulatedStorage())
        kept = calls.OffsetEntry(topic="kept", partition=0, offset=0)
        await client.call(calls.CreateTopic(name="kept"))
        await client.call(calls.CommitOffsets(group="g", offsets=[kept]))
        reset = calls.ResetOffsets(group="g", topic="orders", to=to, value=0)
        for turns in range(60):
            await client.call(calls.CreateTopic(name="orders", partitions=4))
            deleting = asyncio.ensure_future(client.call(calls.DeleteTopic(name="orders")))
            for _ in range(turns):
                await asyncio.sleep(0)
            with contextlib.suppress(TopicNotFound):
                await client.call(reset)
            await deleting
            assert await client.call(calls.CommittedOffsets(group="g")) == [kept], turns
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

        def counted(topic: Topic, *, of_open: bool) -> int:
            nonlocal counts
            counts += 1
            return depth(topic, of_open=of_open)

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


@pytest.mark.parametrize("is_queue", [True, False])
def test_the_first_publish_to_many_partitions_with_a_depth_limit_lets_others_go_first(is_queue: bool) -> None:
    """After a restart nothing is open, and what waits must be counted."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        config = {"max_depth": PARTITIONS + 2}
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS, config=config))
        if is_queue:
            await client.open_queue()
        await asyncio.gather(*[client.send([b"x"], partition=number) for number in range(PARTITIONS)])
        await client.broker.stop()
        client = await started(storage)
        topic = client.broker.topics.registry.get("default", "orders")

        async def until_all_are_open() -> None:
            await client.send([b"x"])
            while None in topic.partitions:  # noqa: ASYNC110 - it goes on turn by turn
                await asyncio.sleep(0)

        assert await most_opened_at_once(client, "orders", until_all_are_open()) <= 8
        await client.send([b"x"])
        with pytest.raises(QueueFull, match=f"has {PARTITIONS + 2} messages"):
            await client.send([b"x"])
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize("overflow", ["reject", "evict"])
@pytest.mark.parametrize("is_queue", [True, False])
def test_a_depth_limit_holds_also_where_one_of_many_partitions_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, is_queue: bool, overflow: str
) -> None:
    """Every publish tried again to open them, failed in the background, and was taken whatever the limit was."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        config = {"max_depth": PARTITIONS + 2, "overflow": overflow}
        await client.call(calls.CreateTopic(name="orders", partitions=PARTITIONS, config=config))
        if is_queue:
            await client.open_queue()
        await asyncio.gather(*[client.send([b"x"], partition=number) for number in range(PARTITIONS)])
        await client.broker.stop()
        client = await started(storage)
        open_one = PartitionOpener.open

        def refused(opener: PartitionOpener, directory: str, uid: int, **how: Any) -> Partition:
            if directory.endswith("/orders/5"):
                raise StorageFailed("the disk is gone")
            return open_one(opener, directory, uid, **how)

        with capture_logs() as entries, monkeypatch.context() as broken:
            broken.setattr(PartitionOpener, "open", refused)
            await client.send([b"x"])  # nobody knows yet
            for _ in range(10):
                await asyncio.sleep(0)
            for _ in range(20):
                with pytest.raises(StorageFailed, match="the disk is gone"):
                    await client.send([b"x"])
        assert [(entry["log_level"], entry["event"]) for entry in entries] == [
            ("warning", "what waits cannot be counted")
        ]
        await client.send([b"x"])
        if overflow == "reject":
            with pytest.raises(QueueFull, match=f"has {PARTITIONS + 2} messages"):
                await client.send([b"x"])
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize("asked", [False, True], ids=["a round", "at once"])
def test_cleanup_of_many_partitions_without_files_lets_others_go_first(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="untouched", partitions=1000))
        await client.call(calls.CreateTopic(name="used"))
        await client.send([b"x"], topic="used")
        topics = client.broker.topics
        looks = [0]
        is_untouched = topics.is_untouched

        def counted(topic: Topic, number: int) -> bool:
            looks[-1] += 1
            return is_untouched(topic, number)

        monkeypatch.setattr(topics, "is_untouched", counted)
        cleanup = client.broker._life.cleanup
        task = asyncio.ensure_future(cleanup.tend_now(None, roll=False) if asked else cleanup.run())
        while not task.done():
            looks.append(0)
            await asyncio.sleep(0)
        await task
        assert sum(looks) >= 1000, "each of them may have files"
        assert max(looks) <= 100
        await client.broker.stop()

    run(scenario)


@pytest.mark.parametrize(
    "call",
    [
        calls.ListOffsets(topic="orders", at="latest", partitions=[0] * 100_000),
        calls.ResetOffsets(group="g", topic="orders", to="earliest", partitions=[0] * 100_000),
    ],
    ids=["list", "reset"],
)
def test_a_partition_that_is_named_again_and_again_is_looked_at_once(call: object) -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders"))
        begin = calls.OffsetEntry(topic="orders", partition=0, offset=0)
        await client.call(calls.CommitOffsets(group="g", offsets=[begin]))
        asking = asyncio.ensure_future(client.call(call))
        turns = 0
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(await asking) == 1  # type: ignore[arg-type]
        assert turns < 1000
        await client.broker.stop()

    run(scenario)


def test_many_names_in_one_question_let_others_go_first() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        await client.call(calls.CreateTopic(name="orders"))
        asking = asyncio.ensure_future(client.call(calls.Metadata(topics=["orders"] * 50_000)))
        turns = 0
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(await asking) == 50_000  # type: ignore[arg-type]
        assert turns >= 100
        await client.broker.stop()

    run(scenario)
