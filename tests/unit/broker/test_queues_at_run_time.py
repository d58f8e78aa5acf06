"""Queues inside a broker: what restarts, retention, priorities and large batches do to them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from millstream.broker.broker import Broker
from millstream.broker.queues.steady_time import SteadyTime
from millstream.broker.registry import Topic
from millstream.clock import SystemClock
from millstream.config import Settings
from millstream.errors import InvalidArgument, MillstreamError
from millstream.records import encode_batch
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls
from millstream.wire.leases import LeasePart, LeaseRequest, Scope, Settle, SettleEntry, encode_lease_result
from millstream.wire.messages import PublishRequest
from tests.simulated_broker import Client, run, started


def lives(*works: Callable[[Client], Awaitable[None]]) -> None:
    """Run a broker once for each piece of work, on the same disk; each life ends in order."""
    storage = SimulatedStorage(seed=1)

    async def live(work: Callable[[Client], Awaitable[None]]) -> None:
        client = await started(storage)
        await work(client)
        await client.broker.stop()

    for work in works:
        asyncio.run(asyncio.wait_for(live(work), 60))


def topic_of(client: Client, name: str = "orders") -> Topic:
    return client.broker.topics.registry.get("default", name)


async def publish(
    client: Client, values: list[bytes], *, topic: str = "orders", partition: int = 0, **columns: object
) -> None:
    stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def confirmed(error: MillstreamError | None, _label: int, base: int, _time: int, _again: bool) -> None:
        stored.set_exception(error) if error else stored.set_result(base)

    batch = encode_batch(values, base_timestamp_us=1, **columns)  # type: ignore[arg-type]
    client.broker.publish(client.session, PublishRequest(topic, partition, 1, 0, memoryview(batch)), confirmed)
    client.broker.flush()
    await stored


async def take_all(client: Client, consumer: int, *, most: int = 100) -> list[bytes | None]:
    found: list[bytes | None] = []
    while messages := await client.lease(consumer, most, wait_ms=300):
        found += [message.value for message in messages]
        await client.settle(Settle.ACK, *messages)
    return found


# --- restarts ----------------------------------------------------------------------------------------------------


def test_a_backlog_in_cold_segments_is_warmed_away_from_the_loop_and_delivered() -> None:
    values = [b"%04d" % n + bytes(200) for n in range(400)]

    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for start in range(0, 400, 20):
            await client.send(values[start : start + 20])

    async def drain(client: Client) -> None:
        log = client.broker.topics.partition("default", "orders", 0).log
        assert len(log.segments) > 4
        assert log.cold_segment(0) is not None
        consumer = await client.open_queue()
        assert await client.lease(consumer) == [], "nobody waits for a disk on the loop"
        assert await take_all(client, consumer) == values

    lives(fill, drain)


def test_what_failed_before_a_restart_is_not_mistaken_for_gone_while_its_segment_is_cold() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for number in range(40):
            await client.send([b"%d" % number + bytes(2000)])
        leased = await client.lease(await client.open_queue(policy={"retry": "standard,initial=0ms"}), 40)
        await client.settle(Settle.ACK, *leased[:3], *leased[4:])
        await client.settle(Settle.NACK, leased[3])

    async def look(client: Client) -> None:
        (message,) = await client.lease(await client.open_queue(), wait_ms=5000)
        assert (message.offset, message.part.failures) == (3, 1)

    lives(fill, look)


def test_priorities_of_a_backlog_are_known_after_a_restart() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"lanes": "strict"}))
        await publish(client, [b"normal"] * 500)
        await publish(client, [b"urgent"] * 5, priorities=[0] * 5)

    async def again(client: Client) -> None:
        consumer = await client.open_queue()
        await asyncio.gather(*client.broker.queues._tasks)
        assert [message.value for message in await client.lease(consumer, 6)] == [b"urgent"] * 5 + [b"normal"]

    lives(fill, again, again)


def test_a_priority_that_does_not_exist_is_the_normal_one() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"lanes": "strict"}))
        consumer = await client.open_queue()
        waiting = asyncio.ensure_future(client.lease(consumer, wait_ms=5_000))
        await publish(client, [b"odd"], priorities=[7])
        (odd,) = await waiting
        assert odd.value == b"odd"
        await publish(client, [b"normal"], priorities=[2])
        await publish(client, [b"odd"], priorities=[7])
        await publish(client, [b"urgent"], priorities=[0])
        assert await take_all(client, consumer) == [b"urgent", b"normal", b"odd"]

    lives(work)


def test_a_backlog_without_priorities_is_surveyed_once() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"x"] * 100)

    async def first(client: Client) -> None:
        await client.open_queue()
        assert client.broker.queues._tasks, "what was published before anybody looked"

    async def second(client: Client) -> None:
        await client.open_queue()
        assert not client.broker.queues._tasks, "the journal knows that there is nothing to find"

    lives(fill, first, second)


def test_groups_of_a_topic_that_a_crash_deleted_half_do_not_come_back() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.open_queue(policy={"ordering": "strict"})
        topic = topic_of(client)
        await client.broker.topics._record({topic.key: {**topic.document(), "deleting": True}})

    async def look(client: Client) -> None:
        assert "orders" not in client.broker.topics.registry.topics("default")
        await client.call(calls.CreateTopic(name="orders"))

    async def look_again(client: Client) -> None:
        assert await client.call(queue_calls.ListQueues()) == []

    lives(fill, look, look_again)


def test_a_group_that_a_crash_deleted_half_begins_anew() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.send([b"a", b"b"])
        await take_all(client, await client.open_queue())
        group = client.broker.queues.registry.get("default", "orders", "default")
        await client.broker.queues.registry._record({group.key: None})  # and its journal is not told any more

    async def again(client: Client) -> None:
        assert await client.call(queue_calls.ListQueues()) == []
        (first, _) = await client.lease(await client.open_queue())
        await client.settle(Settle.ACK, first)

    async def once_more(client: Client) -> None:
        assert await take_all(client, await client.open_queue()) == [b"b"]

    lives(fill, again, once_more)


def test_patterns_survive_and_hold_for_topics_that_came_later() -> None:
    async def fill(client: Client) -> None:
        await client.call(calls.CreateTopic(name="news.eu"))
        await client.open_queue("news.#", group="readers", policy={"max_deliveries": 7})
        await client.call(calls.CreateTopic(name="news.us"))
        await client.call(calls.CreateTopic(name="news.us.dlq"))

    async def look(client: Client) -> None:
        summaries = await client.call(queue_calls.ListQueues())
        assert isinstance(summaries, list)
        assert [entry.topic for entry in summaries] == ["news.eu", "news.us"], "dead letters are not news"
        with pytest.raises(InvalidArgument, match="pattern"):
            await client.call(queue_calls.DeleteQueue(topic="news.us", group="readers"))
        await client.call(queue_calls.DeleteQueue(topic="news.#", group="readers"))
        assert await client.call(queue_calls.ListQueues()) == []

    async def nothing(client: Client) -> None:
        assert await client.call(queue_calls.ListQueues()) == []

    lives(fill, look, nothing)


# --- retention ---------------------------------------------------------------------------------------------------


def test_a_topic_with_cleanup_settled_keeps_what_somebody_has_to_do() -> None:
    async def work(client: Client) -> None:
        config = {"cleanup": "settled", "retention_messages": 1}
        await client.call(calls.CreateTopic(name="orders", config=config))
        for number in range(40):
            await client.send([b"%d" % number + bytes(2000)])
        log = client.broker.topics.partition("default", "orders", 0).log
        await client.broker._life.cleanup.run()
        assert log.start_offset == 0, "there is no group yet: the first one will want everything"
        slow = await client.open_queue(group="slow")
        fast = await client.open_queue(group="fast")
        assert len(await take_all(client, fast)) == 40
        await client.broker._life.cleanup.run()
        assert log.start_offset == 0
        held = await client.lease(slow, 40)
        await client.settle(Settle.ACK, *held[:20])
        await client.broker._life.cleanup.run()
        assert 10 < log.start_offset <= 20
        await client.settle(Settle.ACK, *held[20:])
        await client.broker._life.cleanup.run()
        assert log.start_offset > 30

    lives(work)


def test_what_retention_takes_is_not_waited_for() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"retention_messages": 1}))
        for number in range(40):
            await client.send([b"%d" % number + bytes(2000)])
        consumer = await client.open_queue()
        held = await client.lease(consumer, 5)
        await client.broker._life.cleanup.run()
        start = client.broker.topics.partition("default", "orders", 0).log.start_offset
        assert start > 5
        assert client.broker.queues.depth(topic_of(client)) == 40 - start
        assert [message.offset for message in await client.lease(consumer)] == list(range(start, 40))
        await client.settle(Settle.NACK, *held)
        assert await client.lease(consumer) == [], "what was leased is gone, too"

    lives(work)


def test_a_compacted_topic_is_a_queue_of_what_is_left() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", config={"cleanup": "compact"}))
        for number in range(60):
            await publish(client, [b"%d" % number + bytes(1000)] * 2, keys=[b"same", b"k%d" % number])
        early = await client.open_queue(group="early")
        held = await client.lease(early, 40)
        await client.broker._life.cleanup.run()
        consumer = await client.open_queue(group="late")
        found = await take_all(client, consumer)
        assert 60 < len(found) < 120
        assert len(set(found)) == 60
        await client.settle(Settle.NACK, *held, value=0)
        again = [message.offset for message in await client.lease(early, 20)]
        assert again == [message.offset for message in held if message.key != b"same"]

    lives(work)


# --- size --------------------------------------------------------------------------------------------------------


def test_answers_fit_into_a_frame_whatever_batches_look_like() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders", partitions=2, config={"segment_bytes": 1 << 26}))
        await publish(client, [bytes(1_000_000)] * 5 + [b"tiny"] * 1000 + [bytes(1_000_000)])
        await publish(client, [b"other"] * 3)
        consumer = await client.open_queue()
        found: Counter[int] = Counter()
        for _ in range(20):
            answers: list[list[LeasePart]] = []
            client.broker.lease(client.session, LeaseRequest(consumer, 50_000, 2_500_000, 0), answers.append)  # type: ignore[arg-type]
            assert sum(map(len, encode_lease_result(1, answers[0]))) <= 2_500_000 + 100
            for part in answers[0]:
                found.update(part.start + bit for bit in range(part.span) if part.granted >> bit & 1)
        assert sorted(found) == list(range(1009))
        assert set(found.values()) == {1}, "what did not fit is delivered later, and nothing twice"

    lives(work)


def test_the_size_of_a_lease_is_bounded_when_messages_come_back() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [bytes(1000)] * 100)
        consumer = await client.open_queue(policy={"retry": "standard,initial=0ms"})
        held = await client.lease(consumer, 100)
        await client.settle(Settle.NACK, *held)
        answers: list[list[LeasePart]] = []
        client.broker.lease(client.session, LeaseRequest(consumer, 100, 20_000, 0), answers.append)  # type: ignore[arg-type]
        assert 5 < sum(part.granted.bit_count() for part in answers[0]) < 20

    lives(work)


# --- looking ahead -----------------------------------------------------------------------------------------------


def test_a_long_look_ahead_goes_on_while_somebody_waits_and_only_then() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        for _ in range(400):
            await publish(client, [b"x" * 600] * 200, keys=[b"same"] * 200)
        await publish(client, [b"found"], keys=[b"other"])
        consumer = await client.open_queue(policy={"ordering": "key"})
        part = client.broker.queues.part(topic_of(client), "default", 0)
        (held,) = await client.lease(consumer)
        assert held.value != b"found"
        assert await client.lease(consumer) == []
        await asyncio.sleep(0.05)
        ledger, timer = part.ledger, part._timer
        assert timer is None or ledger.next_wakeup_us(), "nobody waits, so nobody looks"
        await client.call(queue_calls.ConfigureQueue(topic="orders", policy={"paused": True}))
        waiting = asyncio.ensure_future(client.lease(consumer, wait_ms=10_000))
        await asyncio.sleep(0.05)
        assert part._timer is None or ledger.next_wakeup_us(), "nor while the group is paused"
        await client.call(queue_calls.ConfigureQueue(topic="orders", policy={"paused": False}))
        assert [message.value for message in await waiting] == [b"found"]

    lives(work)


# --- metrics and limits ------------------------------------------------------------------------------------------


def test_what_happens_is_counted() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"old"], expiry_us=[1])
        await client.send([b"%d" % n for n in range(9)])
        consumer = await client.open_queue()
        held = await client.lease(consumer)
        nonce = held[0].part.nonce
        await client.settle(Settle.ACK, *held[:4])
        await client.settle(Settle.NACK, held[4])
        await client.settle(Settle.REJECT, held[5])
        await client.settle(Settle.RELEASE, held[6])
        assert await client.settle(Settle.ACK, held[6]) == [40]
        client.broker.settle(client.session, [SettleEntry(Settle.ACK, nonce + 1, Scope.REST)], lambda _: None)
        for _ in range(5):
            await client.broker.queues.sweep()
        metrics = client.broker.metrics
        assert (metrics.leases_granted, metrics.messages_leased) == (1, 9)
        assert (metrics.messages_acked, metrics.messages_nacked, metrics.messages_rejected) == (4, 1, 1)
        assert (metrics.messages_released, metrics.settles_refused) == (1, 2)
        assert (metrics.messages_dead_lettered, metrics.messages_expired) == (1, 1)

    lives(work)


def test_nobody_waits_for_what_is_leased_elsewhere() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        queues, topic = client.broker.queues, topic_of(client)
        await client.send([b"a", b"b"])
        assert queues.depth(topic) == 2, "without a group everything waits"
        assert queues.settled_below(topic, 0) is None
        consumer = await client.open_queue()
        since_us = queues.waiting_since_us(topic)
        assert since_us is not None
        held = await client.lease(consumer)
        assert (queues.depth(topic), queues.waiting_since_us(topic)) == (2, None)
        await client.settle(Settle.ACK, held[0])
        assert (queues.depth(topic), queues.settled_below(topic, 0)) == (1, 1)
        await client.send([b"c", b"d"])
        assert queues.evict(topic, 0, 1) == 1
        assert [message.value for message in await client.lease(consumer)] == [b"d"]

    lives(work)


@pytest.mark.parametrize("poison", [False, True])
def test_a_consumer_that_fails_with_most_of_its_messages_is_served_last_where_poison_is_watched(poison: bool) -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        bad = await client.open_queue(policy={"poison": poison, "retry": "simple,max_retries=0"})
        await client.send([b"x"] * 30)
        await client.settle(Settle.NACK, *await client.lease(bad))
        good = await client.open_queue()
        first_in_line = asyncio.ensure_future(client.lease(bad, wait_ms=200))
        await asyncio.sleep(0)
        second_in_line = asyncio.ensure_future(client.lease(good, wait_ms=200))
        await asyncio.sleep(0)
        await client.send([b"y"])
        got = [len(await waiting) for waiting in (first_in_line, second_in_line)]
        assert got == ([0, 1] if poison else [1, 0])

    lives(work)


def test_topics_with_consumers_are_deleted_only_by_force() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await client.open_queue()
        with pytest.raises(InvalidArgument, match="default"):
            await client.call(calls.DeleteTopic(name="orders"))
        await client.call(calls.DeleteTopic(name="orders", force=True))

    lives(work)


# --- time --------------------------------------------------------------------------------------------------------


class SetClock:
    def __init__(self) -> None:
        self.wall_us = 1_000_000_000
        self.monotonic = 0

    def now_us(self) -> int:
        return self.wall_us

    def monotonic_ms(self) -> int:
        return self.monotonic

    elapsed_ms = monotonic_ms

    def advance(self, ms: int) -> None:
        self.wall_us += ms * 1000
        self.monotonic += ms


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_steady_time_takes_no_part_in_jumps_and_comes_back_slowly(jump_s: int) -> None:
    clock = SetClock()
    steady = SteadyTime(clock)
    clock.advance(500)
    assert steady.now_us() == clock.wall_us
    before_us = steady.now_us()
    clock.wall_us += jump_s * 1_000_000
    assert steady.now_us() == before_us, "also within the same millisecond"
    assert steady.behind_us == -jump_s * 1_000_000
    clock.advance(30_000)
    passed_s = (steady.now_us() - before_us) / 1e6
    assert 26.9 <= passed_s <= 33.1
    for _ in range(12 * 3600):
        clock.advance(1000)
        steady.now_us()
    assert steady.now_us() == clock.wall_us


def test_steady_time_follows_small_corrections() -> None:
    clock = SetClock()
    steady = SteadyTime(clock)
    clock.advance(1000)
    clock.wall_us += 300_000
    assert steady.now_us() == clock.wall_us


class Corrected(SystemClock):
    correction_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.correction_us


async def with_clock(clock: Corrected, clock_wait_ms: int = 600_000) -> Client:
    settings = Settings.model_validate({"storage": {"free_bytes_min": 0, "clock_wait_ms": clock_wait_ms}})
    broker = Broker(settings, SimulatedStorage(seed=1), rng=random.Random(1), clock=clock)
    await broker.start()
    return Client(broker)


def test_messages_do_not_expire_early_after_the_clock_was_set_back() -> None:
    async def scenario() -> None:
        clock = Corrected()
        client = await with_clock(clock)
        clock.correction_us = -3_600_000_000
        for name, config in (("short", {"message_ttl_ms": 600_000}), ("own", {}), ("tried", {})):
            await client.call(calls.CreateTopic(name=name, config=config))
        policy = {"retry": "standard,total=10m"}
        consumers = {name: await client.open_queue(name, policy=policy) for name in ("short", "own", "tried")}
        await publish(client, [b"x"], topic="short")
        await publish(client, [b"x"], topic="own", expiry_us=[clock.now_us() + 600_000_000])
        await publish(client, [b"x"], topic="tried")
        for _ in range(5):
            await client.broker.queues.sweep()
        for consumer in consumers.values():
            leased = await client.lease(consumer)
            assert [message.value for message in leased] == [b"x"]
            assert await client.settle(Settle.NACK, *leased) == [1], "it is tried again, not given up"
        await client.broker.stop()

    run(scenario)


def test_messages_expire_in_time_after_the_clock_was_set_ahead_where_that_counts_at_once() -> None:
    hours_us = 8 * 3_600_000_000

    async def scenario() -> None:
        clock = Corrected()
        client = await with_clock(clock, clock_wait_ms=0)
        for name, config in (("short", {"message_ttl_ms": 600_000}), ("own", {}), ("tried", {})):
            await client.call(calls.CreateTopic(name=name, config=config))
        policy = {"retry": "standard,total=10m"}
        consumers = {name: await client.open_queue(name, policy=policy) for name in ("short", "own", "tried")}
        for when_us in (0, hours_us):  # before and afterwards
            clock.correction_us = when_us
            await publish(client, [b"x"], topic="short")
            await publish(client, [b"x"], topic="own", expiry_us=[clock.now_us() + 600_000_000])
            await publish(client, [b"x"], topic="tried")
        for _ in range(5):
            await client.broker.queues.sweep()
        for name in ("short", "own"):
            info = await client.call(queue_calls.DescribeQueue(topic=name))
            assert isinstance(info, queue_calls.QueueInfo)
            assert info.depth == 1, "what was published eight hours ago is gone, and nothing else"
            assert info.oldest_ms < 60_000
        clock.correction_us += 599_000_000
        leased = {name: await client.lease(consumer) for name, consumer in consumers.items()}
        assert [len(leased[name]) for name in consumers] == [1, 1, 2]
        clock.correction_us += 2_000_000
        assert await client.settle(Settle.NACK, *leased["tried"]) == [2, 2], "the time for trying is over"
        for name in ("short", "own"):
            await client.settle(Settle.RELEASE, *leased[name])
            assert await client.lease(consumers[name]) == []
        await client.broker.stop()

    run(scenario)


def test_a_lease_lasts_as_long_as_it_was_given_when_the_clock_is_set_ahead() -> None:
    async def scenario() -> None:
        clock = Corrected()
        client = await with_clock(clock)
        await client.call(calls.CreateTopic(name="orders"))
        consumer = await client.open_queue()
        await publish(client, [b"x"])
        leased = await client.lease(consumer)
        clock.correction_us = 8 * 3_600_000_000
        await client.broker.queues.sweep()
        assert await client.settle(Settle.ACK, *leased) == [0]
        await client.broker.stop()

    run(scenario)


def test_messages_of_a_key_that_a_consumer_had_before_the_group_was_ordered_go_on_one_by_one() -> None:
    async def work(client: Client) -> None:
        await client.call(calls.CreateTopic(name="orders"))
        await publish(client, [b"1", b"2", b"3"], keys=[b"a"] * 3)
        consumer = await client.open_queue()
        other = Client(client.broker)
        assert len(await other.lease(await other.open_queue())) == 3
        await client.call(queue_calls.ConfigureQueue(topic="orders", policy={"ordering": "key"}))
        client.broker.session_closed(other.session)
        waiting = asyncio.ensure_future(client.lease(consumer, wait_ms=5000))
        for expected in (b"1", b"2", b"3"):
            (message,) = await waiting
            assert message.value == expected
            waiting = asyncio.ensure_future(client.lease(consumer, wait_ms=5000))
            await asyncio.sleep(0)
            assert not waiting.done()
            await client.settle(Settle.ACK, message)
        await client.call(queue_calls.CloseQueue(consumer=consumer))
        assert await waiting == []

    lives(work)
