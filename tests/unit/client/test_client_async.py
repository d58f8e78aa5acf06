"""The asynchronous client keeps the promises of the synchronous one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable

import pytest
from fake_broker import FakeBroker, Fault

import millstream
from millstream import aio
from millstream.client.address import Target
from millstream.client.asynchronous import client as client_module
from millstream.client.asynchronous.producer import AsyncProducer
from millstream.client.messages import TopicPartition
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    OutOfSequence,
    PayloadTooLarge,
    QuotaExceeded,
    RequestTimeout,
    ShuttingDown,
    Throttled,
    TopicNotFound,
    Unauthorized,
)
from tests.waiting import eventually_async

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%05d" % number for number in range(start, start + count)]


def run(fake: FakeBroker, scenario: Callable[[aio.Client], Awaitable[object]], timeout_s: float = 10) -> None:
    """Run a scenario with a connected client, and see that it leaves no task behind."""

    async def main() -> None:
        async with asyncio.timeout(30), aio.connect(fake.address, timeout_s=timeout_s) as client:
            await scenario(client)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


# --- publish ---------------------------------------------------------------------------------------------------------


def test_tasks_that_publish_together_share_batches_and_get_their_own_receipts(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        first = await client.publish("t", b"first", key=b"k", headers={"a": "b"})
        assert (first.offset, first.label) == (0, "disk")
        receipts = await asyncio.gather(*(client.publish("t", value) for value in numbered(500)))
        assert [receipt.offset for receipt in receipts] == list(range(1, 501))
        assert len({receipt.id for receipt in receipts}) == 500

    run(fake, scenario)
    assert fake.values("t") == [b"first", *numbered(500)]
    assert len(fake.publishes) < 30


@pytest.mark.parametrize("stay_awake", [True, False])
def test_who_waits_for_confirmations_lets_the_loop_know_when_one_is_due(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch, stay_awake: bool
) -> None:
    """So that it can stay awake for it; who only sends does not wait."""
    steps: list[bool] = []
    stays_us: list[int] = []

    class Watch:
        def __init__(self, _loop: object, stay_us: int) -> None:
            stays_us.append(stay_us)

        def step(self, _link: object, *, awaits_disk: bool = False) -> None:
            steps.append(awaits_disk)

    monkeypatch.setattr(client_module, "Vigil", Watch)

    async def main() -> None:
        async with aio.connect(fake.address, stay_awake=stay_awake) as client:
            for value in numbered(3):
                await client.publish("t", value)
            await asyncio.gather(*(client.publish("t", value) for value in numbered(5)))
            async with client.producer("t", linger_ms=0) as producer:
                await producer.send(b"sent")

    asyncio.run(main())
    assert steps == [True, False] * 4
    assert [bool(stay_us) for stay_us in stays_us] == [stay_awake]


def test_a_program_that_publishes_to_ever_new_topics_does_not_keep_something_of_each(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten to twenty KB of it, and a task; those that are in use stay."""
    monkeypatch.setattr(client_module, "_PUBLISHERS_MAX", 5)
    monkeypatch.setattr(client_module, "_UNUSED_S", 0.0)

    async def scenario(client: aio.Client) -> None:
        for round_ in range(3):
            for number in range(40):
                await client.publish(f"topic-{number}", b"%d" % round_)
        assert len(client._publishers) <= 6
        assert len(asyncio.all_tasks()) < 20
        # All at once, so that some are opened while others are being sent to.
        await asyncio.gather(*(client.publish(f"topic-{n % 40}", b"more", key=b"k") for n in range(400)))

    run(fake, scenario)
    for number in range(40):
        assert sorted(fake.values(f"topic-{number}")) == sorted([b"0", b"1", b"2", *[b"more"] * 10])


def test_publishing_on_and_on_does_not_wake_the_background_task(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = AsyncProducer._tick

    def counted(producer: AsyncProducer) -> bool:
        nonlocal looks
        looks += 1
        return look(producer)

    monkeypatch.setattr(AsyncProducer, "_tick", counted)

    async def scenario(client: aio.Client) -> None:
        for value in numbered(300):
            await client.publish("t", value)

    run(fake, scenario)
    assert fake.values("t") == numbered(300)
    assert looks < 100, "once a second, and when something is wrong"


FAULTS = {
    "lost before storing": Fault(store=False, drop=True),
    "lost after storing": Fault(drop=True),
    "lost inside the answer": Fault(cut_at=17),
    "refused for now": Fault(error=Throttled("slow down")),
    "refused by a broker that stops": Fault(error=ShuttingDown("bye")),
    "forgotten by the broker": Fault(error=OutOfSequence("expected 0")),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [0, 2])
def test_no_fault_loses_or_repeats_a_publish(fake: FakeBroker, fault: Fault, at: int) -> None:
    fake.faults.extend([*[Fault() for _ in range(at)], fault])

    async def scenario(client: aio.Client) -> None:
        for number in range(5):
            assert (await client.publish("t", b"%d" % number)).offset == number

    run(fake, scenario)
    assert fake.values("t") == [b"0", b"1", b"2", b"3", b"4"]


def test_a_time_that_no_batch_can_hold_concerns_only_its_own_message(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        good = [client.publish("t", b"a"), client.publish("t", b"b", deliver_at=-5)]
        bad = [client.publish("t", b"x", **{name: 1e300}) for name in ("timestamp", "deliver_at", "delay", "ttl")]
        *stored, timestamp, deliver_at, delay, ttl = await asyncio.gather(*good, *bad, return_exceptions=True)
        assert [receipt.offset for receipt in stored] == [0, 1]
        for refused in (timestamp, deliver_at, delay, ttl):
            assert isinstance(refused, InvalidArgument)

    run(fake, scenario)


def test_a_message_that_is_refused_takes_no_others_with_it(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"first")
        fake.faults.extend([Fault(error=InvalidArgument("one of them")), Fault(), Fault(error=InvalidArgument("it"))])
        a, b, c = await asyncio.gather(
            *(client.publish("t", each) for each in (b"a", b"b", b"c")), return_exceptions=True
        )
        assert (a.offset, c.offset) == (1, 2)
        assert isinstance(b, InvalidArgument)
        fake.faults.append(Fault(error=InvalidArgument("all of them")))
        with pytest.raises(InvalidArgument, match="all of them"):
            await client.publish_many("t", [b"x", b"y"])

    run(fake, scenario)
    assert fake.values("t") == [b"first", b"a", b"c"]


def test_messages_of_a_refused_batch_do_not_fall_behind_later_ones(fake: FakeBroker) -> None:
    """They share a key, and were published in this order, though not one after the answer to the other."""

    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"first", key=b"k")
        fake.hold_answers.clear()
        fake.faults.append(Fault(error=InvalidArgument("one of them")))
        tasks = []
        for number in range(6):
            tasks.append(asyncio.create_task(client.publish("t", b"%d" % number, key=b"k")))
            if number % 2:
                await asyncio.sleep(0.01)  # so that two of them share a batch, and no more
        fake.hold_answers.set()
        await asyncio.gather(*tasks)

    run(fake, scenario)
    assert fake.values("t") == [b"first", *(b"%d" % number for number in range(6))]


def test_what_waits_for_its_time_does_not_wait_for_the_answer_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.client.asynchronous.producer._IDLE_S", 60.0)

    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"a", partition=0)
        await client.publish("t", b"b", partition=1)
        fake.faults.extend([Fault(store=False, silent=True), Fault(error=Throttled("slow down"))])
        unanswered = asyncio.create_task(client.publish("t", b"c", partition=0))
        await asyncio.to_thread(fake.wait_for, lambda: len(fake.publishes) == 3)
        assert (await asyncio.wait_for(client.publish("t", b"d", partition=1), 5)).offset == 1
        fake.drop_all()
        assert (await unanswered).offset == 1

    with FakeBroker(partitions=2) as fake:
        run(fake, scenario, timeout_s=20)


def test_a_refusal_concerns_only_its_own_batch(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"a")
        fake.faults.append(Fault(error=QuotaExceeded("full")))
        with pytest.raises(QuotaExceeded):
            await client.publish("t", b"b")
        assert (await client.publish("t", b"c")).offset == 1
        with pytest.raises(PayloadTooLarge):
            await client.publish("t", bytes(2 << 20))
        with pytest.raises(InvalidArgument):
            await client.publish("t", b"x", fsync="maybe")  # type: ignore[arg-type]

    run(fake, scenario)
    assert fake.values("t") == [b"a", b"c"]


def test_no_answer_in_time_raises(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"a")
        fake.faults.extend([Fault(store=False, silent=True)] * 2)
        with pytest.raises(RequestTimeout):
            await client.publish("t", b"lost")
        fake.faults.clear()
        await client.publish("t", b"b")

    run(fake, scenario, timeout_s=0.5)
    assert fake.values("t") == [b"a", b"b"]


def test_publish_many_and_json(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        receipts = await client.publish_many("t", [b"a", "b", millstream.Outgoing(json=[1], key="k")])
        assert [receipt.offset for receipt in receipts] == [0, 1, 2]
        assert await client.broker() == {"software": "fake"}
        assert await client.ping() < 5

    run(fake, scenario)
    assert fake.values("t") == [b"a", b"b", b"[1]"]


def test_a_cancelled_publish_harms_nobody(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"a")
        fake.hold_answers.clear()
        doomed = asyncio.create_task(client.publish("t", b"b"))
        await asyncio.sleep(0.05)
        doomed.cancel()
        other = asyncio.create_task(client.publish("t", b"c"))
        await asyncio.sleep(0.01)
        fake.hold_answers.set()
        assert (await other).offset == 2

    run(fake, scenario)


def test_connecting_to_nobody_says_what_to_do(fake: FakeBroker) -> None:
    fake.stop_listening()

    async def main() -> None:
        with pytest.raises(ConnectionLost, match="millstream serve"):
            await aio.connect(fake.address, timeout_s=1)

    asyncio.run(main())


def test_goodbye_is_followed_by_a_new_connection(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"a")
        fake.say_goodbye()
        await asyncio.sleep(0.05)
        await client.publish("t", b"b")
        assert fake.connections == 2

    run(fake, scenario)


# --- producer --------------------------------------------------------------------------------------------------------


def test_a_producer_batches_and_keeps_order(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(0, 3000, 3):
                await producer.send(b"%05d" % number)
                await producer.send(b"%05d" % (number + 1), b"key")
                await producer.send(f"{number + 2:05d}", headers={"h": "v"})
        assert producer.stats.messages_confirmed == 3000

    run(fake, scenario)
    assert fake.values("t") == numbered(3000)
    assert len(fake.publishes) < 100


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("at", [0, 5])
def test_no_fault_loses_repeats_or_reorders(fake: FakeBroker, fault: Fault, at: int) -> None:
    fake.faults.extend([*[Fault() for _ in range(at)], fault])

    async def scenario(client: aio.Client) -> None:
        async with client.producer("t", batch_messages=7, linger_ms=1) as producer:
            for value in numbered(150):
                await producer.send(value)

    run(fake, scenario)
    assert fake.values("t") == numbered(150)


def test_linger_sends_what_nobody_fills_up(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=10)
        for count in (1, 2, 3):
            await producer.send(b"x")
            await asyncio.to_thread(fake.wait_for, lambda: "t" in fake.topics and len(fake.values("t")) == count)  # noqa: B023

    run(fake, scenario)


def test_a_full_buffer_makes_send_wait_then_refuses(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer(
            "t", batch_messages=1, linger_ms=1000, buffer_bytes=1000, window=1, send_timeout_s=0.05
        )
        fake.hold_answers.clear()
        taken = 0
        try:
            for value in numbered(100):
                await producer.send(value)
                taken += 1
        except RequestTimeout:
            pass
        assert 5 < taken < 20
        fake.hold_answers.set()
        await producer.close()
        assert fake.values("t") == numbered(taken)

    run(fake, scenario)


def test_errors_surface_and_the_producer_goes_on(fake: FakeBroker) -> None:
    failures: list[millstream.BatchFailure] = []

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=1, on_error=failures.append)
        fake.faults.append(Fault(error=QuotaExceeded("full")))
        await producer.send(b"a")
        with pytest.raises(QuotaExceeded):
            await producer.flush()
        await producer.send(b"b")
        await producer.close()
        with pytest.raises(InvalidArgument):
            await producer.send(b"c")

    run(fake, scenario)
    assert fake.values("t") == [b"b"]
    assert len(failures) == 1


def test_what_is_sent_while_the_producer_closes_is_refused(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=60_000)
        await producer.send(b"a")
        fake.hold_answers.clear()
        closing = asyncio.create_task(producer.close())
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)  # the flush is under way
        with pytest.raises(InvalidArgument):
            await producer.send(b"b")
        fake.hold_answers.set()
        await closing

    run(fake, scenario)
    assert fake.values("t") == [b"a"]


@pytest.mark.parametrize("by_client", [False, True])
def test_a_second_close_waits_for_the_first(fake: FakeBroker, by_client: bool) -> None:
    """It came back at once, and a program that ended then cancelled the first one, with its messages."""

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=60_000)
        await producer.send(b"a")
        fake.hold_answers.clear()
        first = asyncio.create_task(producer.close())
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
        second = asyncio.create_task(client.close() if by_client else producer.close())
        done, _ = await asyncio.wait([second], timeout=0.1)
        assert not done, "it did not wait"
        fake.hold_answers.set()
        await second
        assert first.done()
        assert producer.stats.messages_confirmed == 1

    run(fake, scenario)


def test_a_second_close_ends_with_a_first_one_that_is_cancelled(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=60_000)
        await producer.send(b"a")
        fake.hold_answers.clear()
        first = asyncio.create_task(producer.close())
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
        second = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(ConnectionLost):  # the first one's messages, which nobody was told of
            await asyncio.wait_for(second, 10)
        fake.hold_answers.set()

    run(fake, scenario)


def test_a_second_close_waits_no_longer_than_it_was_asked_to(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=60_000)
        await producer.send(b"a")
        fake.hold_answers.clear()
        first = asyncio.create_task(producer.close())
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
        with pytest.raises(RequestTimeout):
            await producer.close(timeout_s=0.01)
        fake.hold_answers.set()
        await first

    run(fake, scenario)
    assert fake.values("t") == [b"a"]


def test_an_unknown_error_does_not_end_what_delivers(fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task ended, and what was sent afterwards waited for it."""
    tick, raised = aio.Producer._tick, asyncio.Event()

    def fail_once(self: aio.Producer) -> bool:
        if not raised.is_set():
            raised.set()
            raise MemoryError
        return tick(self)

    monkeypatch.setattr(aio.Producer, "_tick", fail_once)

    async def scenario(client: aio.Client) -> None:
        async with await client.producer("t", linger_ms=1) as producer:
            await producer.send(b"a")
            await raised.wait()
            await producer.flush(10)

    run(fake, scenario)
    assert fake.values("t") == [b"a"]


def test_what_is_left_when_a_producer_gives_up_is_reported(fake: FakeBroker) -> None:
    failures: list[millstream.BatchFailure] = []

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", linger_ms=60_000, on_error=failures.append)
        await producer.send(b"a")
        pile = producer._accumulator.sticky
        fake.hold_answers.clear()
        closing = asyncio.create_task(producer.close(timeout_s=0.2))
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
        pile.entries.append(b"b")
        with pytest.raises(RequestTimeout):
            await closing
        fake.hold_answers.set()

    run(fake, scenario)
    assert [(failure.messages, failure.in_doubt) for failure in failures] == [(1, True), (1, False)]


def test_what_cannot_be_delivered_in_time_fails_with_the_reason(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", delivery_timeout_s=0.3, linger_ms=1)
        fake.stop_listening()
        await producer.send(b"a")
        with pytest.raises(RequestTimeout, match="nobody listens"):
            await producer.flush()
        fake.listen()
        await producer.send(b"b")
        await producer.close()

    run(fake, scenario)
    assert fake.values("t") == [b"b"]


def test_acks_none_asks_for_no_answer(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        async with client.producer("t", acks="none") as producer:
            for value in numbered(100):
                await producer.send(value)
        await asyncio.to_thread(fake.wait_for, lambda: "t" in fake.topics and len(fake.values("t")) == 100)

    run(fake, scenario)
    assert set(fake.acks_seen) == {0}


# --- stream ----------------------------------------------------------------------------------------------------------


def fill(fake: FakeBroker, partitions: int = 1, count: int = 30) -> None:
    fake.partitions_default = partitions
    with millstream.connect(fake.address) as client:
        for partition in range(partitions):
            for start in range(0, count, 10):
                client.publish_many(
                    "t", [millstream.Outgoing(value=value, partition=partition) for value in numbered(10, start)]
                )
    fake.grant = [("t", number) for number in range(partitions)]


def test_a_stream_reads_everything_in_order_and_waits_for_more(fake: FakeBroker) -> None:
    fill(fake)

    async def scenario(client: aio.Client) -> None:
        seen = []
        async for message in client.stream("t"):
            seen.append(message.value)
            if len(seen) == 30:
                asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(client.publish("t", b"late")))
            if len(seen) == 31:
                break
        assert seen == [*numbered(30), b"late"]
        async with client.stream("t", timeout_s=0.5, start=25) as stream:
            assert [message.offset async for message in stream] == [25, 26, 27, 28, 29, 30]
        async with client.stream("t", timeout_s=0.5) as stream:
            assert sum([len(messages) async for messages in stream.batches()]) == 31
            assert await stream.next(0) is None
        with pytest.raises(TopicNotFound):
            await client.stream("missing")

    run(fake, scenario)


def test_seek_pause_and_resume(fake: FakeBroker) -> None:
    fill(fake)

    async def scenario(client: aio.Client) -> None:
        async with client.stream("t", timeout_s=10) as stream:
            seen: list[int] = []
            async for message in stream:
                seen.append(message.offset)
                if message.offset == 4:
                    await stream.seek("t", 0, 20)
                if len(seen) == 15:
                    break
            assert seen == [*range(5), *range(20, 30)]
            await stream.seek("t", 0, "earliest")
            assert (await stream.next(10)).offset == 0  # type: ignore[union-attr]
            stream.pause()
            assert await stream.next(0.05) is None
            stream.resume()
            assert (await stream.next(10)).offset == 1  # type: ignore[union-attr]
            assert stream.position() == {T0: 2}
            assert stream.lag() == {T0: 28}

    run(fake, scenario)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_lost_connection_is_not_noticed(fake: FakeBroker, group: str | None) -> None:
    fill(fake, count=60)

    async def scenario(client: aio.Client) -> None:
        seen = []
        async with client.stream("t", group=group, max_bytes=300) as stream:
            async for message in stream:
                seen.append(message.value)
                if len(seen) in (5, 25):
                    fake.drop_all()
                if len(seen) == 40:
                    fake.stop_listening()
                    asyncio.get_running_loop().call_later(0.2, fake.listen)
                if len(seen) == 60:
                    break
        assert seen == numbered(60)

    run(fake, scenario)


def test_a_group_commits_what_is_finished(fake: FakeBroker) -> None:
    fill(fake, partitions=2, count=10)
    told: list[tuple[str, list[TopicPartition]]] = []

    async def on_assigned(partitions: list[TopicPartition]) -> None:
        told.append(("assigned", partitions))

    async def scenario(client: aio.Client) -> None:
        async with client.stream("t", group="g", on_assigned=on_assigned) as stream:
            for _ in range(15):
                assert await stream.next(10) is not None
        assert sum(fake.committed.values()) == 14
        async with client.stream("t", group="g", commit="manual") as stream:
            message = await stream.next(10)
            assert message is not None
            await message.commit()
        assert sum(fake.committed.values()) == 15
        assert not fake.members
        fake.call_errors["JoinGroup"] = deque([Unauthorized("not you")])
        with pytest.raises(Unauthorized):
            await client.stream("t", group="g")

    run(fake, scenario)
    assert told == [("assigned", [T0, T1])]


def test_a_partition_is_committed_before_it_is_given_up_while_others_go_on(fake: FakeBroker) -> None:
    fill(fake, partitions=2, count=10)
    revoked: list[tuple[list[TopicPartition], bool]] = []

    async def scenario(client: aio.Client) -> None:
        def on_revoked(partitions: list[TopicPartition], lost: bool) -> None:
            revoked.append((partitions, lost))

        stream = await client.stream("t", group="g", on_revoked=on_revoked)
        first = await stream.next(10)
        assert first is not None
        kept = 1 - first.partition
        (member,) = fake.members.values()
        await asyncio.to_thread(fake.wait_for, lambda: len(member.owned) == 2)
        member.generation += 1
        member.allowed = [("t", kept)]
        fake.push_rebalance("g")
        await eventually_async(lambda: stream._attention)
        assert ("t", first.partition) in member.owned  # still handling: kept
        following = await stream.next(10)
        assert following is not None
        assert following.partition == kept
        await asyncio.to_thread(fake.wait_for, lambda: member.owned == {("t", kept)})
        assert fake.committed["g", "t", first.partition] == 1
        assert revoked == [([TopicPartition("t", first.partition)], False)]

    run(fake, scenario)


def test_a_refusal_before_the_last_try_is_named_when_that_one_is_not_answered(fake: FakeBroker) -> None:
    async def run() -> None:
        async with aio.connect(fake.address, timeout_s=0.6) as client:
            await client.publish("t", b"warm")
            fake.faults.append(Fault(store=False, error=Throttled("topic 't' is overloaded")))
            fake.faults.extend([Fault(store=False, silent=True)] * 5)
            with pytest.raises(
                RequestTimeout, match=r"may or may not be stored.*refused: topic 't' is overloaded$"
            ) as caught:
                await client.publish("t", b"a")
            assert isinstance(caught.value.__cause__, Throttled)
            fake.faults.clear()

    asyncio.run(run())


# --- many tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", ["calls", "topics"])
def test_tasks_do_not_wait_for_the_patience_of_those_before_them(many: str) -> None:
    """A broker that takes connections and says nothing: all who ask it hear of that when their own time is up."""

    async def main() -> float:
        with socket.create_server(("127.0.0.1", 0), backlog=200) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            client = aio.Client(
                Target.of(address, namespace="default", client_id=None, key=None, timeout_s=0.2, tls=None, ca=None)
            )
            asked = [client.topics() if many == "calls" else client.publish(f"t{at}", b"x") for at in range(40)]
            before_s = time.monotonic()
            answers = await asyncio.gather(*asked, return_exceptions=True)
            took_s = time.monotonic() - before_s
            assert {type(answer) for answer in answers} == {ConnectionLost}
            await client.close()
            return took_s

    took_s = min(asyncio.run(main()) for _ in range(3))
    assert took_s < 1.2, "one after the other it is at least two seconds"


def test_a_client_whose_close_was_cancelled_can_be_closed(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"x")
        fake.faults = deque([Fault(silent=True)])
        late = asyncio.ensure_future(client.publish("t", b"y"))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        await client.close()
        assert client._link.closed
        await asyncio.gather(late, return_exceptions=True)

    run(fake, scenario)


def test_a_stream_that_is_closed_twice_at_a_time_is_revoked_once(fake: FakeBroker) -> None:
    revoked: list[object] = []
    fill(fake)

    async def main() -> None:
        async def on_revoked(partitions: object, lost: bool) -> None:
            revoked.append(partitions)
            assert len(revoked) == 1
            await stream.close()

        async with aio.connect(fake.address) as client:
            stream = await client.stream("t", group="g", on_revoked=on_revoked)
            assert await stream.next(5) is not None
            await asyncio.gather(stream.close(), stream.close())

    asyncio.run(main())
    assert len(revoked) == 1


def test_a_callback_that_raises_does_not_keep_the_client_from_closing_the_rest(fake: FakeBroker) -> None:
    def on_revoked(_: object, lost: bool) -> None:
        raise ValueError("no")

    fill(fake)

    async def main() -> None:
        client = await aio.connect(fake.address)
        stream = await client.stream("t", group="g", on_revoked=on_revoked)
        assert await stream.next(5) is not None
        producers = [await client.producer(f"t{number}", partition=0, linger_ms=60_000) for number in range(8)]
        for producer in producers:
            await producer.send(b"x")
        with pytest.raises(ValueError, match="no"):
            await client.close()

    asyncio.run(main())
    assert [len(fake.values(f"t{number}")) for number in range(8)] == [1] * 8
