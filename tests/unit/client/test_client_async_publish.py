"""Publishing with the asynchronous client: it keeps the promises of the synchronous one."""

from __future__ import annotations

import asyncio
import time

import pytest
from async_scenarios import numbered, run
from fake_broker import FAULTS, FakeBroker, FakePartition, Fault, flow_notice

import millstream
from millstream import aio
from millstream.client import metadata
from millstream.client.asynchronous import client as client_module
from millstream.client.asynchronous.producer import AsyncProducer
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    PartitionNotFound,
    PayloadTooLarge,
    QuotaExceeded,
    RequestTimeout,
    Throttled,
)


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


def test_many_of_all_kinds_are_published_in_their_order_without_a_task_or_a_callback_each(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"first")
        monkeypatch.setattr(aio.Producer, "add", None)  # the way for what must be looked at
        messages = [millstream.Outgoing(value=value, key="k", headers={"a": "b"}) for value in numbered(300)]
        receipts = await client.publish_many("t", [item for value in messages for item in (value, "text", b"plain")])
        assert [receipt.offset for receipt in receipts] == list(range(1, 901))

    run(fake, scenario)
    assert fake.values("t") == [b"first", *(item for value in numbered(300) for item in (value, b"text", b"plain"))]


def test_many_that_are_cancelled_harm_nobody(fake: FakeBroker, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"first")
        fake.hold_answers.clear()
        doomed = asyncio.create_task(client.publish_many("t", numbered(3)))
        await asyncio.to_thread(fake.wait_for, lambda: len(fake.publishes) == 2)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        fake.hold_answers.set()
        assert (await client.publish("t", b"last")).offset == 4

    run(fake, scenario)
    assert fake.values("t") == [b"first", *numbered(3), b"last"]
    assert not caplog.records


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


@pytest.mark.parametrize("topic", ["t", ""])
@pytest.mark.parametrize("batched", [False, True])
def test_nobody_is_slowed_down_by_a_notice_of_a_broker_that_is_gone(
    fake: FakeBroker, topic: str, batched: bool
) -> None:
    """Who asked for it is not there any more to take it back."""

    async def scenario(client: aio.Client) -> None:
        async with client.producer("t", linger_ms=0) as producer:

            async def send(value: bytes) -> None:
                if batched:
                    await producer.send(value)
                    await producer.flush()
                else:
                    await client.publish("t", value)

            fake.faults.append(Fault(before=flow_notice(topic, 5000)))
            await send(b"told")
            fake.drop_all()
            started_s = time.monotonic()
            await send(b"one")
            await send(b"two")
            assert time.monotonic() - started_s < 4

    run(fake, scenario, timeout_s=20)


# --- topics that are not what they were, and clients that are closed ------------------------------------------------


def test_a_topic_that_was_made_again_with_fewer_partitions_is_looked_up_again() -> None:
    """Keys that belonged to the partitions that were gone were refused for ever."""

    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"before")
        fake.topics["t"] = [FakePartition(uid=200)]
        fake.faults.append(Fault(error=PartitionNotFound("topic 't' has partition 0, not 3")))
        with pytest.raises(PartitionNotFound):
            await client.publish("t", b"refused")
        receipts = await asyncio.gather(*(client.publish("t", value, key=value) for value in numbered(8)))
        assert [(receipt.partition, receipt.partition_uid) for receipt in receipts] == [(0, 200)] * 8

    with FakeBroker(partitions=4) as fake:
        run(fake, scenario)
        assert sorted(fake.values("t"), key=str) == numbered(8)


def test_what_waits_while_its_topic_is_changed_is_published_afterwards(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that the producer was closed, by a client that had none."""
    monkeypatch.setattr(client_module, "_PUBLISH_BUFFER_BYTES", 1)

    async def scenario(client: aio.Client) -> None:
        await client.publish("t", b"0")
        fake.hold_answers.clear()
        first = asyncio.create_task(client.publish("t", b"1"))
        await asyncio.to_thread(fake.wait_for, lambda: len(fake.publishes) == 2)
        waiting = asyncio.create_task(client.publish("t", b"2"))
        await asyncio.sleep(0.01)
        changing = asyncio.create_task(client._forget("t"))
        await asyncio.sleep(0.01)
        fake.hold_answers.set()
        await asyncio.gather(first, waiting, changing)

    run(fake, scenario)
    assert fake.values("t") == [b"0", b"1", b"2"]


@pytest.mark.parametrize("messages", [[b"ok", b"x" * 200], [millstream.Outgoing(value=b"ok"), "x" * 200]])
def test_of_messages_one_of_which_is_too_large_none_is_stored(messages: list[bytes]) -> None:
    async def scenario(client: aio.Client) -> None:
        for _ in range(2):  # a topic that is new, and one that is known
            with pytest.raises(PayloadTooLarge) as caught:
                await client.publish_many("t", messages)
            assert caught.value.confirmed == {}

    with FakeBroker(max_message_bytes=100) as fake:
        run(fake, scenario)
        assert fake.publishes == []


def test_the_exception_that_ends_a_block_is_not_replaced_by_what_its_client_has_to_report(fake: FakeBroker) -> None:
    async def main() -> None:
        async with aio.connect(fake.address) as client:
            producer = await client.producer("t", linger_ms=60_000)
            await producer.send(b"x")
            fake.faults.append(Fault(error=QuotaExceeded("no room")))
            raise ValueError("what the program has to say")

    with pytest.raises(ValueError, match="what the program has to say"):
        asyncio.run(main())
    assert fake.publishes, "it was sent nevertheless"


def test_a_program_that_publishes_to_ever_new_topics_does_not_remember_all_of_them(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would grow for as long as it runs."""
    monkeypatch.setattr(metadata, "_REMEMBERED_MAX", 10)

    async def scenario(client: aio.Client) -> None:
        for number in range(35):
            await client.publish(f"t{number}", b"x")
            assert len(client._topics) <= 10

    run(fake, scenario)
