"""What is closed hands out nothing more, and keeps no connection even if that was just being opened."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_broker import FakeSubscriptions
from fake_queues import FakeQueues

import millstream
from millstream import aio
from millstream.errors import ConnectionLost, MillstreamError
from millstream.testing.broker import BrokerForTests
from tests.either import EitherClient
from tests.waiting import eventually, eventually_async


@pytest.fixture
def fake() -> Iterator[FakeSubscriptions]:
    with FakeSubscriptions() as broker:
        broker.topic("t")
        yield broker


def close_while_it_connects(fake: FakeSubscriptions, use: Callable[[], Any], close: Callable[[], None]) -> None:
    """Cut it off, and close it when it has come back as far as asking who is there."""
    asked, go_on = threading.Event(), threading.Event()

    def answer_late() -> None:
        asked.set()
        assert go_on.wait(20)

    fake.drop_all()
    eventually(lambda: not fake._peers)
    fake.before["Hello"] = answer_late
    using = threading.Thread(target=use, daemon=True)
    using.start()
    assert asked.wait(20)
    close()
    go_on.set()
    using.join(20)
    assert not using.is_alive()


@pytest.mark.parametrize("kind", ["stream", "subscribe"])
def test_what_is_closed_while_it_connects_again_keeps_no_connection(fake: FakeSubscriptions, kind: str) -> None:
    with millstream.connect(fake.address, timeout_s=20) as client:
        reader = getattr(client, kind)("t")
        assert reader.next(0.01) is None
        close_while_it_connects(fake, reader.next, reader.close)
        eventually(lambda: not fake._peers)


@pytest.mark.parametrize("kind", ["producer", "stream", "subscribe", "queue"])
def test_what_is_closed_with_its_client_while_it_opens_keeps_no_connection(fake: FakeSubscriptions, kind: str) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer_late() -> None:
        asked.set()
        assert go_on.wait(20)

    async def main() -> None:
        client = await aio.connect(fake.address, timeout_s=20)
        fake.before["Hello"] = answer_late

        async def open_it() -> None:
            await getattr(client, kind)("t")

        opening = asyncio.create_task(open_it())
        await asyncio.to_thread(asked.wait, 20)
        await client.close()
        go_on.set()
        with contextlib.suppress(MillstreamError):
            await opening
        await eventually_async(lambda: not fake._peers)

    asyncio.run(main())


def test_a_client_that_is_closed_while_it_connects_again_keeps_no_connection(fake: FakeSubscriptions) -> None:
    client = millstream.connect(fake.address, timeout_s=20)

    def publish() -> None:
        with contextlib.suppress(ConnectionLost):
            client.publish("t", b"x")

    close_while_it_connects(fake, publish, client.close)
    eventually(lambda: not fake._peers)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("kind", ["producer", "stream", "subscribe", "queue"])
def test_a_client_that_is_closed_opens_nothing_more(kind: str, asynchronous: bool) -> None:
    """Nobody kept it alive, and nobody would have closed it."""
    options = {"acks": "none"} if kind == "producer" else {}
    with FakeQueues() as fake:
        fake.topic("t")
        either = EitherClient(fake.address, asynchronous=asynchronous)
        either.do(either.client.publish("t", b"x"))  # the topic is known
        either.do(either.client.close())
        connections = fake.connections
        with pytest.raises(ConnectionLost, match="the client is closed"):
            either.do(getattr(either.client, kind)("t", **options))
        assert fake.connections == connections
        if either.loop is not None:
            either.loop.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_client_that_is_closed_publishes_nothing_more(fake: FakeSubscriptions, asynchronous: bool) -> None:
    either = EitherClient(fake.address, asynchronous=asynchronous)
    either.do(either.client.publish("t", b"x"))
    either.do(either.client.close())
    for value in (b"y", "y"):
        with pytest.raises(ConnectionLost, match=r"the client is closed$"):  # and not: it may or may not be stored
            either.do(either.client.publish("t", value))
    if either.loop is not None:
        either.loop.close()


@pytest.mark.parametrize("kind", ["producer", "stream", "subscribe", "queue"])
def test_what_another_thread_opens_while_its_client_is_closed_keeps_no_connection(kind: str) -> None:
    asked, go_on = threading.Event(), threading.Event()
    opened: list[object] = []

    def answer_late() -> None:
        asked.set()
        assert go_on.wait(20)

    def open_it(client: millstream.Client) -> None:
        with contextlib.suppress(ConnectionLost):
            opened.append(getattr(client, kind)("t"))

    with FakeQueues() as fake:
        fake.topic("t")
        client = millstream.connect(fake.address, timeout_s=20)
        fake.before["Hello"] = answer_late
        opening = threading.Thread(target=open_it, args=(client,), daemon=True)
        opening.start()
        assert asked.wait(20)
        client.close()
        go_on.set()
        opening.join(20)
        assert not opening.is_alive()
        eventually(lambda: not fake._peers)
        assert not opened, "it is of no use, and nobody would have said so"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_queue_that_is_closed_leases_nothing_and_says_so_at_once(broker: BrokerForTests, asynchronous: bool) -> None:
    """The asynchronous one asked on a connection that was gone, and waited for as long as a request may take."""
    either = EitherClient(broker.address, asynchronous=asynchronous)
    either.do(either.client.publish("t", b"0"))
    queue = either.do(either.client.queue("t"))
    either.do(queue.close())
    begun_s = time.monotonic()
    with pytest.raises(ConnectionLost, match="the queue is closed"):
        either.do(queue.lease(1))
    assert time.monotonic() - begun_s < 5
    either.end()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("kind", ["stream", "group", "subscribe"])
def test_what_is_closed_hands_out_nothing_more(broker: BrokerForTests, kind: str, asynchronous: bool) -> None:
    """What had come already was still handed out, after the group was left and others got the same."""
    either = EitherClient(broker.address, asynchronous=asynchronous)
    client = either.client
    either.do(client.publish("t", b"0"))

    def open_one() -> Any:
        options = {"group": "g"} if kind == "group" else {}
        reader = either.do(client.subscribe("t") if kind == "subscribe" else client.stream("t", **options))
        either.do(client.publish_many("t", [b"x"] * 10))
        return reader

    reader = open_one()
    assert either.next(reader) is not None
    either.do(reader.close())
    assert either.next(reader) is None
    reader = open_one()
    assert _taken_by_who_closes_it(either, reader) == 1
    reader = open_one()
    assert either.next(reader) is not None
    either.do(reader.close())
    assert _lists_of(either, reader) == []
    either.end()


def _taken_by_who_closes_it(either: EitherClient, reader: Any) -> int:
    async def take() -> int:
        taken = 0
        async for _ in reader:
            taken += 1
            await reader.close()
        return taken

    if either.loop is not None:
        return either.loop.run_until_complete(take())
    taken = 0
    for _ in reader:
        taken += 1
        reader.close()
    return taken


def _lists_of(either: EitherClient, reader: Any) -> list[Any]:
    async def take() -> list[Any]:
        return [messages async for messages in reader.batches()]

    return list(reader.batches()) if either.loop is None else either.loop.run_until_complete(take())


@pytest.mark.parametrize("kind", ["stream", "queue", "subscribe", "producer"])
def test_what_was_never_opened_can_be_closed_and_is_not_opened_any_more(broker: BrokerForTests, kind: str) -> None:
    """In a `finally` that is reached before the first message it was an AttributeError."""

    async def main() -> None:
        async with aio.connect(broker.address) as client:
            opening: Any = getattr(client, kind)("t")
            await opening.close()
            await opening.close()
            if kind != "producer":
                assert [message async for message in opening] == []
            with pytest.raises(ConnectionLost, match="closed before it was opened"):
                await opening

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["stream", "queue", "subscribe"])
def test_what_is_closed_while_it_is_opened_is_closed_when_it_is_open(broker: BrokerForTests, kind: str) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t")
            opening: Any = getattr(client, kind)("t")

            async def read() -> list[Any]:
                return [message async for message in opening]

            reading = asyncio.create_task(read())
            await asyncio.sleep(0)
            await opening.close()
            async with asyncio.timeout(10):
                assert await reading == []

    asyncio.run(main())
