"""auto_ack: messages are settled when they are sent, and nobody gets them again."""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import pytest

import millstream
from millstream import Settled, aio
from millstream.errors import InvalidArgument, ReceiptInvalid
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually


def fill(client: millstream.Client, count: int) -> None:
    client.create_topic("t", if_missing=True)
    client.publish_many("t", [b"%d" % at for at in range(count)])


def test_messages_are_done_when_they_are_delivered(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 3)
        with client.queue("t", auto_ack=True, timeout_s=10) as queue:
            first = queue.next(10)
            assert first is not None
            assert client.queues.describe("t").depth == 0
            assert (queue.stats.delivered, queue.stats.acked) == (3, 3)
            first.ack()  # harmless
            first.ack(wait=True)
            assert queue.ack([first]) == [Settled.DONE]
            with pytest.raises(ReceiptInvalid, match="auto_ack"):
                first.nack("too late")
            with pytest.raises(ReceiptInvalid, match="auto_ack"):
                queue.release([first])
            assert [message.value for message in islice(queue, 2)] == [b"1", b"2"], "what came ahead is not dropped"
        assert first.ack() is None
        with client.queue("t", timeout_s=0.2) as queue:
            assert list(queue) == []


def test_more_than_the_prefetch_comes_as_room_is_made(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        fill(client, 1000)
        with client.queue("t", auto_ack=True, prefetch=20, timeout_s=10) as queue:
            first = queue.next(10)
            assert first is not None
            assert client.queues.describe("t").depth >= 1000 - 30, "no more than was asked for"
            assert [message.offset for message in islice(queue, 999)] == list(range(1, 1000))
            fill(client, 5)  # for requests of the loop that is over
            eventually(lambda: client.queues.describe("t").depth == 0)
            began_s = time.monotonic()
            assert [message.value for message in queue.lease(max=4, wait="60s")] == [b"0", b"1", b"2", b"3"]
            assert [message.value for message in queue.lease(max=4, wait="60s")] == [b"4"]
            assert time.monotonic() - began_s < 5, "what came for the loop is there at once"


def test_what_comes_while_somebody_begins_to_ask_is_handed_out_at_once(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the connection before the broker is asked may find what the loop had asked for."""
    monkeypatch.setattr("millstream.client.blocking.queue._UNSEEN_S", 0.0)
    monkeypatch.setattr("millstream.client.blocking.queue._NEGLECT_S", 60.0)  # so nobody reads in the background
    with millstream.connect(broker.address) as client:
        fill(client, 1)
        with client.queue("t", auto_ack=True, prefetch=20, timeout_s=10) as queue:
            for _ in queue:
                break  # another request is under way
            fill(client, 1)
            eventually(lambda: client.queues.describe("t").depth == 0)
            began_s = time.monotonic()
            assert [message.value for message in queue.lease(max=4, wait="60s")] == [b"0"]
            assert time.monotonic() - began_s < 5


def test_a_worker_does_not_take_it(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client, pytest.raises(InvalidArgument, match="worker"):
        client.worker("t", auto_ack=True)


def test_the_asynchronous_client(broker: BrokerForTests) -> None:
    async def work() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t")
            await client.publish_many("t", [b"%d" % at for at in range(100)])
            async with client.queue("t", auto_ack=True, prefetch=10, timeout_s=10) as queue:
                seen = []
                async for message in queue:
                    seen.append(message.offset)
                    if len(seen) == 100:
                        break
                assert seen == list(range(100))
                await message.ack(wait=True)
                with pytest.raises(ReceiptInvalid, match="auto_ack"):
                    message.nack("too late")
            assert (await client.queues.describe("t")).depth == 0
            await client.publish("t", b"x")
            assert len(await client.queues.lease("t", auto_ack=True)) == 1
            assert (await client.queues.describe("t")).depth == 0
            with pytest.raises(InvalidArgument, match="worker"):
                client.worker("t", auto_ack=True)

    asyncio.run(work())


def test_keys_go_on_without_a_word(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.create_topic("t")
        client.publish_many("t", [millstream.Outgoing(value=b"%d" % at, key=b"k") for at in range(10)])
        with client.queue("t", auto_ack=True, ordering="key", timeout_s=10) as queue:
            assert [message.offset for message in islice(queue, 10)] == list(range(10))


def test_what_comes_for_somebody_who_has_gone_is_kept_for_the_next(broker: BrokerForTests) -> None:
    async def work() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t")
            async with client.queue("t", auto_ack=True, prefetch=10) as queue:
                assert await queue.next(0.05) is None  # its request stays with the broker
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(queue.lease(5, wait="10s"), 0.1)
                await client.publish("t", b"the only one")
                message = await queue.next(10)
                assert message is not None
                assert message.value == b"the only one"

    asyncio.run(work())


def test_what_came_as_its_caller_was_cancelled_is_kept_for_the_next(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t")
            await client.publish("t", b"the only one")
            async with client.queue("t", auto_ack=True, prefetch=10) as queue:

                async def is_cancelled() -> None:
                    raise asyncio.CancelledError

                with monkeypatch.context() as patch:
                    patch.setattr(queue, "_name", is_cancelled)
                    with pytest.raises(asyncio.CancelledError):
                        await queue.lease(5, wait="10s")
                async with asyncio.timeout(5):  # it is there: nobody waits for others to come
                    found = await queue.lease(5, wait="10s")
                assert [message.value for message in found] == [b"the only one"]
                assert found[0].id

    asyncio.run(work())


def test_what_came_as_its_caller_was_interrupted_is_kept_for_the_next(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = broker.connect()
    client.create_topic("t")
    client.publish("t", b"the only one")
    with client.queue("t", auto_ack=True, prefetch=10) as queue:

        def is_interrupted() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(queue, "_name", is_interrupted)
            with pytest.raises(KeyboardInterrupt):
                queue.lease(5, wait="10s")
        began_s = time.monotonic()
        found = queue.lease(5, wait="10s")
        assert time.monotonic() - began_s < 5, "it is there: nobody waits for others to come"
        assert [message.value for message in found] == [b"the only one"]
        assert found[0].id
