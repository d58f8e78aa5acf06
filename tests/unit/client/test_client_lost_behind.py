"""A connection that is gone already, behind what was not read or not handed out yet: the broker has taken that back.

Others may have it by now, and be done with it.  A soak saw that: a message came again after its ack was confirmed.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator
from types import ModuleType

import pytest
from fake_queues import FakeQueues

import millstream
from millstream import aio
from millstream.client import settling
from millstream.client.asynchronous import queue as async_queue
from millstream.client.blocking import queue as blocking_queue
from millstream.wire.frames import FrameType
from tests.waiting import eventually, eventually_async


@pytest.fixture
def fake() -> Iterator[FakeQueues]:
    with FakeQueues() as broker:
        yield broker


def pass_time(monkeypatch: pytest.MonkeyPatch, module: ModuleType, ms: int = 50) -> None:
    honest = module.monotonic_ms
    monkeypatch.setattr(module, "monotonic_ms", lambda: honest() + ms)


def get_to_know(client: millstream.Client, queue: millstream.Queue) -> None:
    """Have a message of the topic: whoever has to look up where the first one came from finds out by that."""
    client.publish("t", b"first")
    assert set(queue.ack(queue.lease(1, wait="10s"))) == {millstream.Settled.DONE}


def unsettled(fake: FakeQueues) -> int:
    return sum(held.left.bit_count() for held in list(fake.leases.values()))


def lease_and_lose(fake: FakeQueues, consumer: int) -> None:
    """What the consumer has asked for is sent to it, its connection ends, and somebody else acks all of it."""
    fake.open_gate.set()
    eventually(lambda: unsettled(fake))
    fake._consumers[consumer][1].drop()
    eventually(lambda: fake.consumer_is_gone(consumer))
    with millstream.connect(fake.address) as other, other.queue("t") as queue:
        taken = queue.lease(10, wait="10s")
        assert {message.delivery_count for message in taken} == {2}
        assert set(queue.ack(taken)) == {millstream.Settled.DONE}


@pytest.mark.parametrize("ask", ["next", "iterate"])
def test_what_lay_unread_until_its_connection_was_gone_is_not_handed_out(
    fake: FakeQueues, client: millstream.Client, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    with client.queue("t", timeout_s=0.1) as queue:
        get_to_know(client, queue)
        fake.open_gate.clear()
        client.publish("t", b"x")
        assert queue.next(0) is None
        eventually(lambda: len(fake.lease_requests) > 1)
        lease_and_lose(fake, 1)
        pass_time(monkeypatch, blocking_queue)
        assert (list(queue) if ask == "iterate" else [queue.next(0.1)]) in ([], [None])


def test_nor_is_it_to_who_has_asked_for_just_so_many(
    fake: FakeQueues, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.queue("t") as queue:
        get_to_know(client, queue)
        client.publish("t", b"x")
        honest = queue._send

        def send(transport: object, *frames: bytes) -> None:
            """Nothing happens here until everything has happened elsewhere."""
            if frames[0][5] != FrameType.LEASE:  # the thread beside it may have something to say first
                honest(transport, *frames)  # type: ignore[arg-type]
                return
            monkeypatch.setattr(queue, "_send", honest)
            honest(transport, *frames)  # type: ignore[arg-type]
            eventually(lambda: select.select([transport], [], [], 0)[0])  # the answer is here, though nobody reads it
            lease_and_lose(fake, 1)
            pass_time(monkeypatch, blocking_queue)

        monkeypatch.setattr(queue, "_send", send)
        assert queue.lease(1) == []


def test_what_was_leased_ahead_is_not_handed_out_when_its_connection_is_gone(
    fake: FakeQueues, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a fifth of a second until somebody looked, and all the while what others had was handed out."""
    monkeypatch.setattr(settling, "LOOK_MS", 0)
    monkeypatch.setattr(blocking_queue, "_UNSEEN_S", 0.0)
    client.publish_many("t", [b"1", b"2", b"3"])
    with client.queue("t", timeout_s=0.1) as queue:
        messages = iter(queue)
        assert next(messages).value == b"1"
        lease_and_lose(fake, 1)
        assert list(messages) == []


def test_what_was_acked_when_it_was_sent_is_handed_out_all_the_same(
    fake: FakeQueues, client: millstream.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "LOOK_MS", 0)
    monkeypatch.setattr(blocking_queue, "_UNSEEN_S", 0.0)
    client.publish_many("t", [b"1", b"2", b"3"])
    with client.queue("t", timeout_s=0.1, auto_ack=True) as queue:
        messages = iter(queue)
        assert next(messages).value == b"1"
        fake._consumers[1][1].drop()
        eventually(lambda: fake.consumer_is_gone(1))
        assert [next(messages).value for _ in range(2)] == [b"2", b"3"]


@pytest.mark.parametrize("ask", ["next", "lease"])
def test_nor_by_the_asynchronous_client(fake: FakeQueues, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), aio.connect(fake.address) as client, client.queue("t") as queue:
            await client.publish("t", b"first")
            await queue.ack(await queue.lease(1, wait="10s"))
            fake.open_gate.clear()
            await client.publish("t", b"x")
            asked = asyncio.ensure_future(queue.next(0.1) if ask == "next" else _leased(queue))
            await eventually_async(lambda: len(fake.lease_requests) > 1)
            lease_and_lose(fake, 1)  # while this loop stands still
            pass_time(monkeypatch, async_queue)
            assert await asked is None

    asyncio.run(main())


async def _leased(queue: aio.Queue) -> aio.QueueMessage | None:
    return next(iter(await queue.lease(1, wait="100ms")), None)
