"""Moves: one that was cut short is finished before the next to the same place, and nothing is kept for ever."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.partition import Partition
from millstream.broker.state import all_batches
from millstream.broker.transfer import Target, Transfer, deliver
from millstream.ids import SCHEDULES
from millstream.records import Batch, assign_producer, encode_batch
from millstream.testing.broker import BrokerForTests
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire.calls import CreateTopic
from millstream.wire.schedule_calls import ListSchedules
from tests.simulated_broker import after_kill, run, started
from tests.unit.broker.test_queues_at_run_time import publish
from tests.waiting import eventually_async


def test_the_next_move_waits_for_the_one_that_was_cut_short(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = broker.broker.topics

    async def move_twice() -> tuple[list[bytes | None], list[int], int]:
        for name in ("source", "target"):
            await topics.create("default", CreateTopic(name=name))
        transfer = topics.transfer(topics.registry.get("default", "source"), 0)
        target = Target("default", "target", 0)

        def cut(_: Target) -> Partition:
            raise asyncio.CancelledError

        with monkeypatch.context() as patched:
            patched.setattr(transfer, "_resolve", cut)
            with pytest.raises(asyncio.CancelledError):
                await transfer.move(target, encode_batch([b"first"], base_timestamp_us=1))
        assert transfer.undone == 1
        assert await transfer.move(target, encode_batch([b"second"], base_timestamp_us=1)) == 1
        log = topics.partition(*target).log
        buffers = log.read(0, 1 << 20, before=log.next_offset).buffers
        batches = []
        for data in buffers:
            at = 0
            while at < len(data):
                batches.append(Batch.parse(data, at))
                at += batches[-1].header.length
        values = [value for batch in batches for value in batch.values()]
        return values, [batch.header.first_sequence for batch in batches], transfer.undone

    assert broker.run(move_twice()) == ([b"first", b"second"], [0, 1], 0)


def test_what_comes_behind_a_gap_takes_nothing_along_that_is_stored_already(broker: BrokerForTests) -> None:
    """A staged batch that nobody can read any more leaves such a gap."""
    topics = broker.broker.topics

    async def move_around_a_gap() -> list[bytes | None]:
        await topics.create("default", CreateTopic(name="target"))
        target = Target("default", "target", 0)
        batches = [
            encode_batch([value], base_timestamp_us=1, producer=7 << 16, first_sequence=number)
            for number, value in ((0, b"first"), (2, b"third"))
        ]
        await deliver(lambda target: topics.partition(*target), target, batches)
        log = topics.partition(*target).log
        return [value for batch in all_batches(log) for value in batch.values()]

    assert broker.run(move_around_a_gap()) == [b"first", b"third"]


def test_nothing_is_remembered_of_targets_that_are_gone(broker: BrokerForTests) -> None:
    topics = broker.broker.topics

    async def move_to_many() -> tuple[list[int], list[object]]:
        await topics.create("default", CreateTopic(name="lasting"))
        source = topics.registry.get("default", "lasting")
        transfer = topics.transfer(source, 0)
        bases = []
        for name in ("one", "two", "one", "lasting"):
            if name != "lasting":
                await topics.create("default", CreateTopic(name=name))
            for value in (b"1", b"2"):
                batch = encode_batch([value], base_timestamp_us=1)
                bases.append(await transfer.move(Target("default", name, 0), batch))
            if name != "lasting":
                await topics.delete("default", name)
        await topics.journal(source, 0).checkpoint()
        return bases, [*transfer._turns, *transfer._sequences]

    expected = [0, 1, 0, 1, 0, 1, 0, 1], [Target("default", "lasting", 0)]
    assert broker.run(move_to_many()) == expected


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("another", [False, True])
def test_a_move_that_is_cancelled_while_it_is_written_down_happens(orderly: bool, another: bool) -> None:
    """It will be on disk, with all that it means, so it must not be forgotten, nor its number be used again."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        for name in ("source", "target"):
            await client.call(CreateTopic(name=name))
        topics, target = client.broker.topics, Target("default", "target", 0)
        transfer = topics.transfer(topics.registry.get("default", "source"), 0)
        await transfer.move(target, encode_batch([b"0"], base_timestamp_us=1))
        moving = asyncio.ensure_future(transfer.move(target, encode_batch([b"1"], base_timestamp_us=1)))
        while not transfer._journal._in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        if another:
            await transfer.move(target, encode_batch([b"2"], base_timestamp_us=1))
        if orderly:
            await client.broker.stop()
            client = await started(storage)
        else:
            client = await after_kill(client, storage)
        partition = client.broker.topics.partition(*target)
        await eventually_async(lambda: partition.high_watermark == 2 + another)
        assert await client.read_all("target") == [b"0", b"1", b"2"][: 2 + another]
        await client.broker.stop()

    run(scenario)


async def cut_short(transfer: Transfer, value: bytes, target: str) -> None:
    """A move that was recorded, and no more."""
    await transfer._name()
    batch = encode_batch([value], base_timestamp_us=1)
    assign_producer(batch, transfer._producer << 16, 0)
    intent = ["intent", transfer._number + 1, "default", target, 0, 0, bytes(batch)]
    await transfer._intend(intent, (), None)


@pytest.mark.parametrize("trouble", ["topics/default/a/0.state/", "topics/default/full/"], ids=["journal", "target"])
def test_a_move_that_cannot_be_finished_after_a_crash_keeps_no_other_from_it(trouble: str) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage, segment_bytes=1 << 24)
        for name in ("a", "b", "full", "target"):
            await client.call(CreateTopic(name=name))
        await client.send([bytes(300_000)], topic="full")
        topics = client.broker.topics
        for source, target in (("a", "full"), ("a", "target"), ("b", "target")):
            transfer = topics.transfer(topics.registry.get("default", source), 0)
            await cut_short(transfer, source.encode(), target)
        await topics.journal(topics.registry.get("default", "a"), 0).checkpoint()
        storage.inject(Fault.NO_SPACE, times=10**6, when=lambda operation: operation.path.startswith(trouble))
        client = await after_kill(client, storage)
        moved = 1 if trouble.endswith("state/") else 2
        partition = client.broker.topics.partition("default", "target", 0)
        await eventually_async(lambda: partition.high_watermark == moved)
        await client.broker.stop()
        storage.heal()
        client = await started(storage, segment_bytes=1 << 24)
        for name, end in (("full", 2), ("target", 2)):
            partition = client.broker.topics.partition("default", name, 0)
            await eventually_async(lambda partition=partition, end=end: partition.high_watermark == end)
        await client.broker.stop()

    run(scenario)


def test_a_move_that_cannot_be_finished_after_a_crash_keeps_no_schedule_from_its_time() -> None:
    """As of dead letters, whose topic cannot be written to."""

    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage, segment_bytes=1 << 24)
        for name in ("orders", "full"):
            await client.call(CreateTopic(name=name))
        await client.send([bytes(300_000)], topic="full")
        topics = client.broker.topics
        await cut_short(topics.transfer(topics.registry.get("default", "orders"), 0), b"letter", "full")
        await cut_short(topics.transfer(topics.registry.get("default", "orders"), 0), b"fired", "orders")
        now_us = client.broker.now_us()
        due_us = [now_us + 1_000_000, now_us + 3_600_000_000]
        await publish(client, [b"soon", b"later"], partition=SCHEDULES, deliver_at_us=due_us)
        await topics.journal(topics.registry.get("default", "orders"), 0).checkpoint()
        trouble = "topics/default/full/"
        storage.inject(Fault.NO_SPACE, times=10**6, when=lambda operation: operation.path.startswith(trouble))
        client = await after_kill(client, storage)
        partition = client.broker.topics.partition("default", "orders", 0)
        await eventually_async(lambda: partition.high_watermark == 2)
        assert await client.read_all() == [b"fired", b"soon"]
        listed = await asyncio.wait_for(client.call(ListSchedules(topic="orders")), 20)
        assert isinstance(listed, list)
        assert len(listed) == 1
        await client.broker.stop()

    run(scenario)
