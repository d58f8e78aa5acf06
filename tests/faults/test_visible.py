"""When readers see a message: with `visible=written` before it is on disk, which its publisher still waits for."""

from __future__ import annotations

import asyncio

import pytest

from millstream.errors import ConfigInvalid, StorageFailed
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import calls
from millstream.wire.leases import Settle
from tests.simulated_broker import Client, after_power_cut, run, started

ORDERS = "topics/default/orders"


def hold_up_syncs(storage: SimulatedStorage) -> None:
    """What is published to a new topic is written, but not on disk before this is over."""
    storage.inject(Fault.NO_FILES, times=100, when=lambda it: it.kind == "sync_directory" and ORDERS in it.path)


async def visible_of(client: Client) -> object:
    info = await client.call(calls.DescribeTopic(name="orders"))
    assert isinstance(info, calls.TopicInfo)
    return info.config["visible"]


@pytest.mark.parametrize(
    ("broker", "topic", "early"),
    [
        ("confirmed", "", False),
        ("confirmed", "written", True),
        ("written", "", True),
        ("written", "confirmed", False),
    ],
)
def test_a_topic_or_else_the_broker_says_whether_readers_wait_for_the_disk(
    broker: str, topic: str, early: bool
) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage, visible=broker)
        await client.call(calls.CreateTopic(name="orders", config={"visible": topic}))
        assert await visible_of(client) == (topic or broker)
        consumer = await client.open_queue()
        hold_up_syncs(storage)
        stored = client.send([b"a"])
        await client.broker._life.committer.drain()
        assert not stored.done(), "nobody is told that it survives a power cut before it does"
        seen = [b"a"] if early else []
        assert await client.read_all() == seen
        assert [message.value for message in await client.lease(consumer)] == seen
        storage.heal()
        assert await stored == 0
        assert await client.read_all() == [b"a"]
        await client.broker.stop()

    run(scenario)


def test_a_publisher_is_answered_although_who_was_told_of_its_message_first_has_failed() -> None:
    """Nobody asked the disk for a sync then, until somebody else published."""

    class Oops(Exception):
        pass

    def fail(_before: int, _after: int) -> None:
        raise Oops

    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        await client.call(calls.CreateTopic(name="orders", config={"visible": "written"}))
        partition = client.broker.topics.partition("default", "orders", 0)
        partition.listeners.append(fail)
        with pytest.raises(Oops):
            client.send([b"a"])
        assert partition.high_watermark == 1
        await asyncio.wait_for(client.broker._life.committer.drain(), 5)
        assert partition.durable_offset == 1
        partition.listeners.remove(fail)
        await client.broker.stop()

    run(scenario)


def test_a_change_holds_for_what_is_published_after_it() -> None:
    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        hold_up_syncs(storage)
        waiting = [client.send([b"a"])]
        await client.broker._life.committer.drain()
        assert await client.read_all() == []
        await client.call(calls.AlterTopic(name="orders", config={"visible": "written"}))
        waiting.append(client.send([b"b"]))
        assert await client.read_all() == [b"a", b"b"], "which shows what stands before it as well"
        await client.call(calls.AlterTopic(name="orders", config={"visible": "confirmed"}))
        waiting.append(client.send([b"c"]))
        await client.broker._life.committer.drain()
        assert await client.read_all() == [b"a", b"b"], "what was seen stays to be seen"
        storage.heal()
        assert [await stored for stored in waiting] == [0, 1, 2]
        assert await client.read_all() == [b"a", b"b", b"c"]
        await client.broker.stop()

    run(scenario)


def test_what_was_settled_before_it_was_on_disk_is_forgotten_with_it() -> None:
    """The next message has the same offset, and nobody has seen that one."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders", config={"visible": "written"}))
        await client.send([b"kept"])
        consumer = await client.open_queue(policy={"ack_durability": "sync"})
        storage.inject(Fault.SYNC_ERROR, when=lambda it: it.kind == "sync" and f"{ORDERS}/0/" in it.path)
        stored = client.send([b"lost"])
        leased = await client.lease(consumer)
        assert [message.value for message in leased] == [b"kept", b"lost"]
        with pytest.raises(StorageFailed, match="in doubt"):
            await stored
        await client.settle(Settle.ACK, *leased)
        client = await after_power_cut(client, storage, lose_everything=True)
        assert await client.read_all() == [b"kept"]
        await client.send([b"next"])
        assert [message.value for message in await client.lease(await client.open_queue())] == [b"next"]
        await client.broker.stop()

    run(scenario)


def test_another_word_is_refused_with_those_that_there_are() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage(seed=1))
        with pytest.raises(ConfigInvalid, match=r"one of confirmed, written$"):
            await client.call(calls.CreateTopic(name="orders", config={"visible": "soon"}))
        await client.broker.stop()

    run(scenario)
