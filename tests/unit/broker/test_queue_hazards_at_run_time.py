"""Queues inside a broker in rare company: disks that refuse or cannot be read, logs that lost their end, retention."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.broker.queues import keeper as keeping
from millstream.errors import StorageFailed
from millstream.ids import SCHEDULES
from millstream.log.partition import Chunk, PartitionLog
from millstream.log.segment import Segment
from millstream.log.storage import File
from millstream.queues.ledger import Ledger
from millstream.records import encode_batch
from millstream.testing.storage import Fault, SimulatedStorage
from millstream.wire import calls, queue_calls
from millstream.wire.leases import Settle
from millstream.wire.messages import PublishRequest
from tests.simulated_broker import Client, after_kill, run, started
from tests.unit.broker.test_queues_at_run_time import lives, publish, take_all
from tests.waiting import eventually_async

DONE, DEAD = 0, 2


@pytest.fixture(autouse=True)
def _try_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is tried again every second."""
    monkeypatch.setattr(keeping, "_RETRY_S", 0.1)


def cut_lives(*works: Callable[[Client], Awaitable[None]], storage: SimulatedStorage | None = None) -> None:
    """Run a broker once for each piece of work, on the same disk; each life ends with a power cut."""
    disk = storage or SimulatedStorage(seed=1)

    async def live(work: Callable[[Client], Awaitable[None]]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        await work(await started(disk))

    for work in works:
        asyncio.run(asyncio.wait_for(live(work), 60))
        disk.heal()
        disk.power_cut(lose_everything=True)


async def parked(client: Client, consumer: int, most: int = 10) -> asyncio.Task[list[Any]]:
    task = asyncio.ensure_future(client.lease(consumer, most, wait_ms=10_000))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def _forget_windows(client: Client) -> None:
    """As if others had needed the memory."""
    for keeper in client.broker.queues._keepers.values():
        keeper.source.forget()


# --- wake-ups ----------------------------------------------------------------------------------------------------


def test_a_key_that_retention_sets_free_is_served_to_who_waits() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"retention_messages": 1}))
        for number in range(20):
            await publish(client, [b"%d" % number + bytes(2000)], keys=[b"same"])
        consumer = await client.open_queue(policy={"ordering": "key"})
        (held,) = await client.lease(consumer)
        waiting = await parked(client, consumer)
        await client.broker._life.cleanup.run()
        start = client.broker.topics.partition("default", "orders", 0).log.start_offset
        assert start > held.offset
        for _ in range(5):
            await client.broker.queues.sweep()
        (message,) = await asyncio.wait_for(waiting, 5)
        assert message.offset == start

    lives(work)


def test_a_message_is_not_looked_for_by_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    lease = Ledger.lease

    def counted(ledger: Ledger, *details: Any, **more: Any) -> Any:
        nonlocal looks
        looks += 1
        return lease(ledger, *details, **more)

    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        consumers = [await client.open_queue() for _ in range(50)]
        waiting = [await parked(client, consumer) for consumer in consumers]
        monkeypatch.setattr(Ledger, "lease", counted)
        for number in range(10):
            await publish(client, [b"%d" % number])
            (message,) = await asyncio.wait_for(waiting[number], 5)
            assert message.value == b"%d" % number, "first come, first served"
        assert looks <= 30
        for consumer in reversed(consumers):
            await client.call(queue_calls.CloseQueue(consumer=consumer))

    lives(work)


# --- disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{}, {"message_ttl_ms": 3_600_000}, {"ordering": "key"}, {"fair_by": "key:."}, {"priorities": True}]
)
def test_nothing_is_lost_to_a_disk_that_cannot_be_read(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {name: value for name, value in config.items() if name in ("ordering", "fair_by")}
    topic = {name: value for name, value in config.items() if name == "message_ttl_ms"}
    read, bad = PartitionLog.read, True

    def broken(log: PartitionLog, offset: int, max_bytes: int, *, before: int) -> Chunk:
        if bad and "orders/0" in log.directory and not log.directory.endswith("state") and offset >= 20:
            raise StorageFailed("cannot read the log: input/output error")
        return read(log, offset, max_bytes, before=min(before, 20) if bad and offset < 20 else before)

    async def work(client: Client) -> None:
        nonlocal bad
        await client.call(calls.CreateTopic(name="orders", config=topic))
        for number in range(6):
            lanes: dict[str, Any] = {"priorities": [number % 2] * 10} if "priorities" in config else {}
            await publish(client, [b"x"] * 10, keys=[b"%d.%d" % (number, n) for n in range(10)], **lanes)
        consumer = await client.open_queue(policy=policy)
        monkeypatch.setattr(PartitionLog, "read", broken)
        _forget_windows(client)
        offsets: list[int] = []
        for _ in range(3):
            offsets += [message.offset for message in await client.lease(consumer)]
        waiting = await parked(client, consumer, 100)
        bad = False
        offsets += [message.offset for message in await asyncio.wait_for(waiting, 5)]
        while more := await client.lease(consumer, wait_ms=100):
            offsets += [message.offset for message in more]
        assert sorted(offsets) == list(range(60))

    lives(work)


def test_a_segment_that_cannot_be_checked_at_once_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for number in range(40):
            await client.send([b"%d" % number + bytes(2000)])
        leased = await client.lease(await client.open_queue(policy={"retry": "standard,initial=0ms"}), 40)
        await client.settle(Settle.NACK, leased[3])

    async def look(client: Client) -> None:
        verify, failures = Segment.verify, 3

        def sometimes(segment: Segment) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise OSError(5, "Input/output error")
            return verify(segment)

        monkeypatch.setattr(Segment, "verify", sometimes)
        consumer = await client.open_queue()
        found: set[int] = set()
        async with asyncio.timeout(20):
            while len(found) < 40:
                found |= {message.offset for message in await client.lease(consumer, wait_ms=10_000)}

    lives(fill, look)


def test_an_ack_that_is_repeated_after_the_disk_was_full_is_as_durable_as_it_says() -> None:
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"a", b"b"])
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        storage.inject(Fault.NO_SPACE, when=lambda operation: "0.state" in operation.path)
        with pytest.raises(StorageFailed):
            await client.settle(Settle.ACK, leased[0])
        storage.heal()
        assert await client.settle(Settle.ACK, leased[0]) == [DONE]

    async def second(client: Client) -> None:
        assert await take_all(client, await client.open_queue()) == [b"b"]

    cut_lives(first, second, storage=storage)


def test_what_was_purged_while_the_disk_was_full_is_written_down_later() -> None:
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"a", b"b"])
        await client.open_queue()
        storage.inject(Fault.NO_SPACE, when=lambda operation: "0.state" in operation.path)
        with pytest.raises(StorageFailed):
            await client.call(queue_calls.PurgeQueue(topic="orders", group="default"))
        storage.heal()
        await client.broker.stop()

    async def second(client: Client) -> None:
        assert await take_all(client, await client.open_queue()) == []

    cut_lives(first, second, storage=storage)


def test_cleanup_keeps_a_rejected_message_until_its_letter_is_written() -> None:
    storage = SimulatedStorage(seed=1)

    async def work(client: Client) -> None:
        config = {"cleanup": "settled", "retention_messages": 1}
        await client.call(calls.CreateTopic(name="orders", config=config))
        for number in range(40):
            await client.send([b"%d" % number + bytes(2000)])
        leased = await client.lease(await client.open_queue(), 40)
        storage.inject(Fault.NO_SPACE, when=lambda operation: "0.state" in operation.path, times=10_000)
        with pytest.raises(StorageFailed):
            await client.settle(Settle.REJECT, leased[3])
        await client.settle(Settle.ACK, *leased[:3], *leased[4:])
        await client.broker._life.cleanup.run()
        _forget_windows(client)
        storage.heal()
        await eventually_async(lambda: _letters(client))
        assert [value[:1] for value in await _letters(client)] == [b"3"]
        await client.broker._life.cleanup.run()
        assert client.broker.topics.partition("default", "orders", 0).log.start_offset > 30
        await client.broker.stop()

    cut_lives(work, storage=storage)


async def _letters(client: Client) -> list[bytes]:
    if client.broker.topics.registry.find("default", "orders.dlq") is None:
        return []
    return [value or b"" for value in await client.read_all("orders.dlq")]


@pytest.mark.parametrize("publish_first", [False, True])
def test_what_a_power_cut_took_from_the_log_does_not_settle_what_comes_in_its_place(publish_first: bool) -> None:
    """With fsync=interval a message can be delivered and acked before it is on disk; its ack may survive it."""
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"kept"])
        await client.call(calls.AlterTopic(name="orders", config={"fsync": "never"}))
        await _send_unsynced(client, [b"lost"] * 3)
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        assert len(leased) == 4
        assert await client.settle(Settle.ACK, *leased[:3]) == [DONE] * 3
        await client.settle(Settle.NACK, leased[3], value=3_600_000)

    async def second(client: Client) -> None:
        await client.call(calls.AlterTopic(name="orders", config={"fsync": "group"}))
        if publish_first:
            await client.send([b"new"] * 2)
        consumer = await client.open_queue()
        if not publish_first:
            assert await client.lease(consumer) == []
            await client.send([b"new"] * 2)
        info = await client.call(queue_calls.DescribeQueue(topic="orders", group="default"))
        assert isinstance(info, queue_calls.QueueInfo)
        assert (info.depth, info.ready) == (2, 2)

    async def third(client: Client) -> None:
        await client.send([b"newer"] * 2)
        assert await take_all(client, await client.open_queue()) == [b"new"] * 2 + [b"newer"] * 2

    cut_lives(first, second, third, storage=storage)


@pytest.mark.parametrize("refuses", ["to write", "to open"])
def test_nothing_comes_in_the_place_of_lost_messages_before_their_settles_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """A disk that refused just then was passed over, and after the next power cut the new messages were settled."""
    storage = SimulatedStorage(seed=1)
    open_file, is_broken = storage.open, False

    def broken_open(path: str, *, create: bool = False) -> File:
        if is_broken and ".state/" in path:
            raise OSError(errno.EIO, "the disk does not answer")
        return open_file(path, create=create)

    monkeypatch.setattr(storage, "open", broken_open)

    async def first(client: Client) -> None:
        nonlocal is_broken
        await client.call(calls.CreateTopic(name="orders", config={"fsync": "never"}))
        await _send_unsynced(client, [b"lost"] * 3)
        leased = await client.lease(await client.open_queue(policy={"ack_durability": "sync"}))
        assert await client.settle(Settle.ACK, *leased) == [DONE] * 3
        is_broken = refuses == "to open"

    async def second(client: Client) -> None:
        nonlocal is_broken
        await client.call(calls.AlterTopic(name="orders", config={"fsync": "group"}))
        storage.inject(
            Fault.NO_SPACE,
            when=lambda operation: operation.kind == "write" and ".state/" in operation.path,
            times=1000 if refuses == "to write" else 0,
        )
        for _ in range(2):
            with pytest.raises(StorageFailed):
                await client.send([b"refused"])
        storage.heal()
        is_broken = False
        await client.send([b"new"] * 2)

    async def third(client: Client) -> None:
        await client.send([b"newer"])
        assert await take_all(client, await client.open_queue()) == [b"new"] * 2 + [b"newer"]

    cut_lives(first, second, third, storage=storage)


async def _send_unsynced(client: Client, values: list[bytes]) -> None:
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    batch = encode_batch(values, base_timestamp_us=1)
    client.broker.publish(
        client.session,
        PublishRequest("orders", 0, 1, 0, memoryview(batch)),
        lambda error, _label, base, _time, _again: stored.set_result(base),
    )
    client.broker.flush()
    await stored


# --- time --------------------------------------------------------------------------------------------------------


def test_what_expired_while_the_broker_was_down_is_not_counted() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for _ in range(40):
            await publish(client, [bytes(2000)], expiry_us=[client.broker._clock.now_us() + 1_000])
        await publish(client, [b"stays"])
        await client.open_queue()

    async def look(client: Client) -> None:
        await client.open_queue()

        async def swept() -> bool:
            for _ in range(5):
                await client.broker.queues.sweep()
            summaries = await client.call(queue_calls.ListQueues())
            assert isinstance(summaries, list)
            return bool(summaries[0].depth == 1)

        await eventually_async(swept)

    lives(fill, look)


# --- many --------------------------------------------------------------------------------------------------------


def test_who_looks_at_many_messages_lets_others_go_first() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"] * 100)
        consumer = await client.open_queue()
        leased = [message for _ in range(100) for message in await client.lease(consumer, 1)]
        looking = asyncio.ensure_future(
            client.call(queue_calls.PeekQueue(topic="orders", group="default", state="leased", limit=100))
        )
        turns = 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 100, "each of them means a search through all leases"
        assert len(looking.result()) == len(leased)  # type: ignore[arg-type]

    lives(work)


def test_a_backlog_that_expires_all_at_once_keeps_nobody_waiting() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", partitions=5))
        await client.open_queue()
        for partition in range(5):
            for _ in range(5):
                values = [b"x"] * 10_000
                await publish(client, values, partition=partition, expiry_us=[1] * 10_000)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.ensure_future(count_turns())
        for _ in range(5):
            await client.broker.queues.sweep()
        counting.cancel()
        assert client.broker.metrics.messages_expired == 250_000
        assert turns >= 10

    lives(work)


def test_ending_a_lease_does_not_look_at_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"x"] * 20)
        short, long = await client.open_queue(lease_ms=100), await client.open_queue(lease_ms=60_000)
        for consumer in (long, short):
            for _ in range(10):
                await client.lease(consumer, 1)
        part = client.broker.queues.registry.get("default", "orders", "default").part(0)
        monkeypatch.setattr(part.ledger._leases.__class__, "__iter__", lambda _: pytest.fail("looked at all leases"))
        await eventually_async(lambda: client.broker.metrics.leases_expired >= 10)
        monkeypatch.undo()
        assert client.broker.metrics.leases_expired == 10

    lives(work)


def test_priorities_that_could_not_be_read_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"lanes": "strict"}))
        await publish(client, [b"normal"] * 50)
        await publish(client, [b"urgent"], priorities=[0])

    async def in_trouble(client: Client) -> None:
        def broken(*_: object, **__: object) -> Chunk:
            raise StorageFailed("cannot read the log: input/output error")

        with monkeypatch.context() as patched:
            await client.call(queue_calls.ListQueues())
            client.broker.topics.partition("default", "orders", 0)
            client.broker.topics.journal(client.broker.topics.registry.get("default", "orders"), 0)
            patched.setattr(PartitionLog, "read", broken)
            await client.open_queue()
            for _ in range(20):
                await asyncio.sleep(0.01)

    async def again(client: Client) -> None:
        consumer = await client.open_queue()
        await eventually_async(lambda: next(iter(client.broker.queues._keepers.values())).source.lanes.used)
        (message,) = await client.lease(consumer, 1)
        assert message.value == b"urgent"

    lives(fill, in_trouble, again)


def test_priorities_of_new_messages_that_could_not_be_read_are_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(client: Client) -> None:
        def broken(*_: object, **__: object) -> Chunk:
            raise StorageFailed("cannot read the log: input/output error")

        await client.call(calls.CreateTopic(name="orders", config={"lanes": "strict"}))
        consumer = await client.open_queue()
        await publish(client, [b"normal"])
        with monkeypatch.context() as patched:
            patched.setattr(PartitionLog, "read", broken)
            for number in range(3):
                await publish(client, [b"urgent %d" % number], priorities=[0])
        await eventually_async(lambda: next(iter(client.broker.queues._keepers.values())).source.lanes.used)
        values = [message.value for message in await client.lease(consumer, 4)]
        assert values == [b"urgent 0", b"urgent 1", b"urgent 2", b"normal"]

    lives(work)


def test_what_is_scheduled_is_on_disk_before_it_fires_whatever_its_topic_says() -> None:
    """Otherwise a power cut could take the message and leave that it has fired, to its successor's harm."""
    storage = SimulatedStorage(seed=1)

    async def first(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"fsync": "never"}))
        await _schedule(client, [b"lost"] * 3)
        await eventually_async(lambda: client.broker.topics.partition("default", "orders", 0).high_watermark == 3)
        await client.broker.topics.journal(client.broker.topics.registry.get("default", "orders"), 0).sync()

    async def second(client: Client) -> None:
        before = client.broker.topics.partition("default", "orders", 0).high_watermark
        await _schedule(client, [b"new"] * 2)
        await eventually_async(
            lambda: client.broker.topics.partition("default", "orders", 0).high_watermark >= before + 2
        )

    cut_lives(first, second, storage=storage)


async def _schedule(client: Client, values: list[bytes]) -> None:
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    due_us = client.broker._clock.now_us() + 50_000
    batch = encode_batch(values, base_timestamp_us=1, deliver_at_us=[due_us] * len(values))
    client.broker.publish(
        client.session,
        PublishRequest("orders", SCHEDULES, 1, 0, memoryview(batch)),
        lambda error, _label, base, _time, _again: stored.set_result(base),
    )
    client.broker.flush()
    await stored


def test_a_full_topic_gives_up_its_oldest_messages_wherever_they_are() -> None:
    async def work(client: Client) -> None:
        config = {"max_depth": 10, "overflow": "evict"}
        await client.call(calls.CreateTopic(name="orders", partitions=2, config=config))
        await client.open_queue()
        await publish(client, [b"old"] * 10)
        await asyncio.sleep(0.02)
        for _ in range(5):
            await publish(client, [b"new"], partition=1)
        info = await client.call(queue_calls.DescribeQueue(topic="orders", group="default"))
        assert isinstance(info, queue_calls.QueueInfo)
        assert [part.depth for part in info.partitions] == [5, 5]

    lives(work)


def test_a_full_topic_takes_nothing_from_a_group_that_keeps_up() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"max_depth": 10, "overflow": "evict"}))
        await client.open_queue(group="slow")
        fast = await client.open_queue(group="fast")
        await publish(client, [b"x"] * 10)
        await client.settle(Settle.ACK, *await client.lease(fast, 8))
        await publish(client, [b"y"])
        assert [message.value for message in await client.lease(fast)] == [b"x", b"x", b"y"]
        summaries = await client.call(queue_calls.ListQueues())
        assert {some.group: some.depth for some in summaries} == {"slow": 10, "fast": 3}  # type: ignore[attr-defined]

    lives(work)


def test_a_message_whose_headers_cannot_be_read_becomes_a_dead_letter_too() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"x"], headers=[b"\xff\xff\xff"], options=True)
        leased = await client.lease(await client.open_queue())
        assert await client.settle(Settle.REJECT, *leased, reason="bad") == [DEAD]
        await eventually_async(lambda: _letters(client))
        assert await _letters(client) == [b"x"]

    lives(work)


def test_a_topic_that_is_deleted_while_it_is_checked_does_not_keep_the_broker_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever looked for a message there asked again and again, without ever letting anybody else go on."""

    async def scenario() -> None:
        storage = SimulatedStorage(seed=1)
        client = await started(storage)
        await client.call(calls.CreateTopic(name="orders"))
        for _ in range(20):
            await client.send([bytes(4000)])
        await client.open_queue("orders")
        client = await after_kill(client, storage)
        await client.open_queue("orders")
        (part,) = client.broker.queues._routes.values()
        verify, deleted = Segment.verify, threading.Event()

        def slowly(segment: Segment, **options: Any) -> Any:
            found = verify(segment, **options)
            deleted.wait(10)
            return found

        monkeypatch.setattr(Segment, "verify", slowly)
        looking = asyncio.ensure_future(part.keeper.run_at(0))
        await asyncio.sleep(0)
        deleting = asyncio.ensure_future(client.call(calls.DeleteTopic(name="orders", force=True)))
        await eventually_async(lambda: part.keeper.partition.failed is not None)
        deleted.set()
        with pytest.raises(StorageFailed, match="was deleted"):
            await looking
        await deleting
        await client.broker.stop()

    run(scenario)
