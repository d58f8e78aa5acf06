"""Producers of the asynchronous client: they keep the promises of the synchronous one's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from functools import partial

import pytest
from async_scenarios import numbered, run
from fake_broker import FAULTS, FakeBroker, FakePartition, Fault

import millstream
from millstream import aio
from millstream.errors import (
    ConnectionLost,
    InvalidArgument,
    MillstreamError,
    PartitionNotFound,
    QuotaExceeded,
    RequestTimeout,
)
from tests.forgetful import forget_to_pause
from tests.waiting import eventually, eventually_async


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


def test_text_keys_headers_and_the_rest_need_no_closer_look(fake: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: aio.Client) -> None:
        async with client.producer("t", linger_ms=1000) as producer:
            await producer.send(b"first")
            with monkeypatch.context() as patch:
                patch.setattr(producer, "add", None)
                await producer.send("text")
                await producer.send(json=[1], key="k", headers={"h": "v"}, priority="high", ttl=60)

    run(fake, scenario)
    assert fake.values("t") == [b"first", b"text", b"[1]"]


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


async def closing(client: aio.Client, fake: FakeBroker) -> tuple[aio.Producer, asyncio.Task[None]]:
    """A producer whose close waits for the broker, which answers when `hold_answers` is set."""
    producer = await client.producer("t", linger_ms=60_000)
    await producer.send(b"a")
    fake.hold_answers.clear()
    first = asyncio.create_task(producer.close())
    await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
    return producer, first


@pytest.mark.parametrize("by_client", [False, True])
def test_a_second_close_waits_for_the_first(fake: FakeBroker, by_client: bool) -> None:
    """It came back at once, and a program that ended then cancelled the first one, with its messages."""

    async def scenario(client: aio.Client) -> None:
        producer, first = await closing(client, fake)
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
        producer, first = await closing(client, fake)
        second = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(ConnectionLost):  # the first one's messages, which nobody was told of
            await asyncio.wait_for(second, 10)
        fake.hold_answers.set()

    run(fake, scenario)


def test_a_second_close_waits_no_longer_than_it_was_asked_to(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer, first = await closing(client, fake)
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


@pytest.mark.parametrize("asyncio_forgets", [False, True])
def test_without_confirmations_a_broker_that_takes_nothing_is_waited_for(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch, asyncio_forgets: bool
) -> None:
    """Everything was taken at once, whatever `buffer_bytes` said; close cut off what the broker had not read yet."""
    if asyncio_forgets:
        forget_to_pause(monkeypatch)
    values = [b"%d" % number * 50_000 for number in range(100, 300)]  # more than the system keeps for a socket
    taken: list[bytes] = []

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer(
            "t", acks="none", linger_ms=1, batch_bytes=1 << 18, buffer_bytes=1 << 20, send_timeout_s=0.2
        )
        fake.hold_answers.clear()
        with contextlib.suppress(RequestTimeout):
            for value in values:
                await producer.send(value)
                taken.append(value)
        assert len(taken) < len(values)
        assert producer.stats.buffered_bytes >= 1 << 20
        with pytest.raises(RequestTimeout):
            await producer.flush(0.05)
        fake.hold_answers.set()
        await producer.close()

    run(fake, scenario)
    assert fake.values("t") == taken


def test_without_confirmations_flush_does_not_wait_for_what_others_go_on_to_send(fake: FakeBroker) -> None:
    fake.faults.extend(Fault(delay_s=0.002) for _ in range(100_000))  # or the system would always have room

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", acks="none", linger_ms=1, batch_bytes=1 << 18)

        async def pour() -> None:
            while True:
                await producer.send(bytes(20_000))

        pouring = asyncio.create_task(pour())
        await eventually_async(lambda: producer.stats.buffered_bytes > 1 << 20)
        await producer.flush(5)
        pouring.cancel()
        with contextlib.suppress(MillstreamError):
            await producer.close(0.01)

    run(fake, scenario)


def test_without_confirmations_a_flush_ends_when_somebody_closes_the_producer(fake: FakeBroker) -> None:
    """All of it was with the system already, and none of it waited: nobody was told that it never will be sent."""

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", acks="none", linger_ms=0, batch_bytes=1 << 20)
        connection = await producer._link.get(None)
        sock: socket.socket = connection._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        fake.hold_answers.clear()
        while not connection.unsent:
            await producer.send(bytes(1_000_000))
            await asyncio.sleep(0.1)  # the broker reads what it can
        assert producer.stats.buffered_bytes == 0
        flushing = asyncio.create_task(producer.flush())
        await asyncio.sleep(0)
        with pytest.raises(RequestTimeout):
            await producer.close(0.1)
        async with asyncio.timeout(5):
            await flushing
        fake.hold_answers.set()

    run(fake, scenario)


def test_without_confirmations_a_connection_that_is_lost_is_not_waited_for(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", acks="none", linger_ms=1, batch_bytes=1 << 18)
        fake.hold_answers.clear()
        for number in range(100, 300):
            await producer.send(b"%d" % number * 50_000)
        flushing = asyncio.create_task(producer.flush())
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
        fake.drop_all()
        fake.hold_answers.set()
        await flushing
        await producer.send(b"last")
        await producer.close()

    run(fake, scenario)
    eventually(lambda: fake.values("t")[-1] == b"last")


def test_without_confirmations_close_waits_until_the_broker_has_taken_everything(fake: FakeBroker) -> None:
    """What the system had taken was lost with the socket, if the broker said anything before it had read it."""
    fake.faults.extend(Fault(delay_s=0.02) for _ in range(20))

    async def scenario(client: aio.Client) -> None:
        async with client.producer("t", acks="none", batch_messages=1) as producer:
            for value in numbered(20):
                await producer.send(value)
        assert fake.values("t") == numbered(20)

    run(fake, scenario)


@pytest.mark.parametrize("loss", [RequestTimeout, ConnectionLost])
def test_without_confirmations_close_says_that_the_broker_has_not_taken_everything(
    fake: FakeBroker, loss: type[MillstreamError]
) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", acks="none")
        fake.hold_answers.clear()
        await producer.send(b"a")
        await producer.flush()
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)
        closing = asyncio.create_task(producer.close(0.2 if loss is RequestTimeout else 20))
        await asyncio.sleep(0)
        if loss is ConnectionLost:
            fake.drop_all()
        with pytest.raises(loss, match="what was sent last may be lost"):
            await closing
        fake.hold_answers.set()

    run(fake, scenario)


def test_without_confirmations_a_broker_that_goes_and_has_not_taken_everything_is_told_of(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t", acks="none", linger_ms=1)
        fake.hold_answers.clear()
        await producer.send(b"a")
        await producer.flush()
        await asyncio.to_thread(fake.wait_for, lambda: fake.publishes)  # it reads nothing behind this one
        fake.say_goodbye()
        await eventually_async(lambda: producer._leaving)
        fake.drop_all()
        fake.hold_answers.set()
        await asyncio.wait(producer._leaving)
        with pytest.raises(ConnectionLost, match="what was sent last may be lost"):
            await producer.send(b"b")
        await producer.send(b"c")
        await producer.close()

    run(fake, scenario)
    assert fake.values("t")[-1] == b"c", "it goes on"


def test_messages_are_delivered_while_it_is_looked_for_new_partitions(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        answer = threading.Event()
        async with client.producer("t", linger_ms=1) as producer:
            await producer.send(b"a")
            await producer.flush()
            fake.topics["t"].append(FakePartition(uid=101))
            fake.before["Metadata"] = partial(answer.wait, 20)
            producer._outbox.topic.loaded_s -= 61  # a minute later
            for value in (b"b", b"c"):
                await producer.send(value)
                await eventually_async(lambda: fake.values("t")[-1] == value, within_s=5)  # noqa: B023
            assert not fake.before, "nobody has asked"
            answer.set()
            await eventually_async(lambda: len(producer._outbox.topic.uids) == 2)

    run(fake, scenario)


def test_a_producer_can_be_closed_while_it_is_looked_for_new_partitions(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        answer = threading.Event()
        async with client.producer("t", linger_ms=1) as producer:
            fake.before["Metadata"] = partial(answer.wait, 20)
            producer._outbox.topic.loaded_s -= 61
            await producer.send(b"a")
            await eventually_async(lambda: not fake.before)
        answer.set()

    run(fake, scenario)
    assert fake.values("t") == [b"a"]


def test_a_close_that_is_cancelled_at_its_very_end_says_so_and_has_closed(fake: FakeBroker) -> None:
    """It took the cancellation for the end of its own task, and whoever had cancelled it waited for ever."""

    async def scenario(client: aio.Client) -> None:
        producer = await client.producer("t")
        await producer.send(b"a")
        connections = len(fake._peers)
        closing = asyncio.create_task(producer.close())
        while not producer._task.cancelling():  # noqa: ASYNC110 - in that very turn of the loop
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
        await eventually_async(lambda: len(fake._peers) == connections - 1)
        await producer.close()

    run(fake, scenario)
    assert fake.values("t") == [b"a"]


def test_a_producer_that_is_refused_keeps_no_connection(fake: FakeBroker) -> None:
    async def scenario(client: aio.Client) -> None:
        await client.ping()
        connections = len(fake._peers)
        with pytest.raises(PartitionNotFound):
            await client.producer("t", partition=7)
        await eventually_async(lambda: fake.connections == 2 and len(fake._peers) == connections)

    run(fake, scenario)
