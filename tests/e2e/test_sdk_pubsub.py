"""Subscriptions over real sockets: who gets what, what the slow ones miss, and what happens when a broker goes away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from millstream.client import Client
from millstream.errors import InvalidArgument, InvalidName, QuotaExceeded
from millstream.testing.broker import BrokerForTests
from tests.native import NativeClient
from tests.waiting import eventually

PATIENCE_S = 10.0


@pytest.fixture
def client(broker: BrokerForTests) -> Iterator[Client]:
    with millstream.connect(broker.address) as connected:
        yield connected


def test_everybody_with_a_matching_pattern_gets_a_copy(client: Client) -> None:
    exact = client.subscribe("orders.eu.created")
    one_level = client.subscribe("orders.*.created")
    rest = client.subscribe("orders.#")
    other = client.subscribe("invoices.#")
    receipt = client.publish("orders.eu.created", b"first", key="k", headers={"a": "b"})
    for subscription in (exact, one_level, rest):
        message = subscription.next(PATIENCE_S)
        assert message is not None
        assert (message.topic, message.value, message.key) == ("orders.eu.created", b"first", b"k")
        assert (message.id, message.headers) == (receipt.id, {"a": "b"})
    client.publish("invoices.eu", b"second")
    only = other.next(PATIENCE_S)
    assert only is not None
    assert only.value == b"second"
    assert exact.next(0) is one_level.next(0) is rest.next(0) is None


def test_several_matching_patterns_of_one_subscriber_bring_one_copy(client: Client) -> None:
    subscription = client.subscribe("orders.#", "*.created", "orders.created")
    client.publish_many("orders.created", [b"a", b"b"])
    client.publish("orders.created", b"c")
    assert [message.value for message in take(subscription, 3)] == [b"a", b"b", b"c"]
    assert subscription.next(0.1) is None


def test_topics_and_partitions_that_appear_later_are_covered(client: Client) -> None:
    subscription = client.subscribe("late.*")
    client.create_topic("late.one", partitions=2)
    for partition in range(2):
        client.publish("late.one", f"p{partition}", partition=partition)
    client.alter_topic("late.one", partitions=3)
    client.publish("late.one", "p2", partition=2)
    client.publish("late.two", "other")
    assert {message.text for message in take(subscription, 4)} == {"p0", "p1", "p2", "other"}


def test_a_subscriber_gets_what_comes_from_now_on_in_order(client: Client) -> None:
    client.publish("news", b"before")
    subscription = client.subscribe("news")
    with client.producer("news", linger_ms=1) as producer:
        for number in range(5_000):
            producer.send(b"%d" % number)
    assert [message.value for message in take(subscription, 5_000)] == [b"%d" % number for number in range(5_000)]
    assert subscription.missed == 0


def test_batches_and_timeouts(client: Client) -> None:
    subscription = client.subscribe("news", timeout_s=1)
    client.publish_many("news", [b"a", b"b", b"c"])
    assert [[message.value for message in batch] for batch in subscription.batches()] == [[b"a", b"b", b"c"]]
    client.publish("news", b"d")
    assert [message.value for message in subscription] == [b"d"]


def test_namespaces_do_not_hear_each_other(broker: BrokerForTests, client: Client) -> None:
    client.create_namespace("elsewhere")
    with millstream.connect(broker.address, namespace="elsewhere") as other:
        theirs, ours = other.subscribe("#"), client.subscribe("#")
        client.publish("news", b"ours")
        other.publish("news", b"theirs")
        assert [message.value for message in take(ours, 1)] == [b"ours"]
        assert [message.value for message in take(theirs, 1)] == [b"theirs"]


def test_a_closed_subscription_gets_nothing_and_costs_nothing(broker: BrokerForTests, client: Client) -> None:
    client.publish("news", b"before")
    subscription = client.subscribe("#")
    partition = broker.broker.topics.partition("default", "news", 0)
    eventually(lambda: partition.audience is not None)
    subscription.close()
    assert list(subscription) == []
    eventually(lambda: partition.audience is None)
    assert broker.broker.metrics.subscriptions == broker.broker.metrics.patterns == 0


def test_what_is_not_a_pattern_is_refused(client: Client) -> None:
    with pytest.raises(InvalidName, match="is not valid"):
        client.subscribe("a.#.b")
    with pytest.raises(InvalidArgument, match="at least one pattern"):
        client.subscribe()


def test_a_client_has_a_thousand_patterns_at_most(broker: BrokerForTests) -> None:
    with NativeClient(broker.address) as native:
        native.call("sub.open", patterns=[f"a.{number}" for number in range(999)])
        native.call("sub.open", patterns=["b", "b"])
        with pytest.raises(QuotaExceeded, match="1000 patterns"):
            native.call("sub.open", patterns=["c"])


def test_a_slow_subscriber_misses_messages_is_told_and_slows_down_nobody(broker: BrokerForTests) -> None:
    """It has a window of some megabytes; beyond it the broker drops for this subscriber alone."""
    frame, total = bytes(1024 * 512), 120
    with millstream.connect(broker.address) as publisher, millstream.connect(broker.address) as reader:
        slow, quick = reader.subscribe("video"), reader.subscribe("video")
        for number in range(total):
            publisher.publish("video", frame, fsync="never")
            assert [message.offset for message in take(quick, 1)] == [number]
        assert broker.broker.metrics.messages_missed > 0
        got: list[int] = []

        def all_is_known() -> bool:
            message = slow.next(0.05)  # the last news may be a number without a message
            if message is not None:
                got.append(message.offset)
            return len(got) + slow.missed == total

        eventually(all_is_known)
        assert slow.missed > total // 2
        assert got == sorted(got)
        publisher.publish("video", b"again")
        message = slow.next(PATIENCE_S)
        assert message is not None
        assert message.value == b"again"


def test_a_subscription_comes_back_after_the_broker_does(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path / "data") as first:
        port = int(first.address.rsplit(":", 1)[1])
        client = millstream.connect(first.address)
        subscription = client.subscribe("news")
        client.publish("news", b"one")
        assert [message.value for message in take(subscription, 1)] == [b"one"]
    got: list[bytes | None] = []
    reading = threading.Thread(target=lambda: got.extend(message.value for message in take(subscription, 1)))
    reading.start()
    with BrokerForTests(tmp_path / "data", port=port) as second:
        eventually(lambda: second.broker.metrics.subscriptions == 1)
        client.publish("news", b"two")
        reading.join(PATIENCE_S)
        assert got == [b"two"]
        assert subscription.reconnects == 1
        client.close()


def test_many_subscribers_are_served_in_slices(broker: BrokerForTests) -> None:
    """More than one turn of the broker's loop takes, so that the line is really used."""
    natives = [NativeClient(broker.address) for _ in range(20)]
    for native in natives:
        for _ in range(30):
            native.call("sub.open", patterns=["news"])
    with millstream.connect(broker.address) as client:
        client.publish("news", b"one")
        client.publish("news", b"two")
    for native in natives:
        kinds = [native.receive()[0] for _ in range(60)]
        assert kinds == [10] * 60
        native.close()
    assert broker.broker.metrics.deliveries == 1_200


def test_async_subscribers_get_the_same(broker: BrokerForTests) -> None:
    async def run() -> None:
        async with millstream.aio.connect(broker.address) as client:
            async with client.subscribe("orders.*", "logs.#") as subscription:
                await client.publish("orders.eu", b"a")
                await client.publish("logs.app.web", b"b")
                await client.publish("other", b"c")
                assert [(await subscription.next(PATIENCE_S)).value for _ in range(2)] == [b"a", b"b"]  # type: ignore[union-attr]
                assert await subscription.next(0.05) is None
            async for message in client.subscribe("tick", timeout_s=0.2):
                raise AssertionError(f"nobody published {message!r}")

    asyncio.run(run())


def test_a_slow_async_subscriber_does_not_fill_its_memory(broker: BrokerForTests) -> None:
    async def run() -> None:
        async with millstream.aio.connect(broker.address) as client:
            slow = await client.subscribe("video")
            for _ in range(120):
                await client.publish("video", bytes(1024 * 512), fsync="never")
            assert slow._ahead_bytes < 4 * 1024 * 1024
            got = 0
            async with asyncio.timeout(6 * PATIENCE_S):
                while got + slow.missed < 120:
                    # The last news may be a number without a message.
                    got += await slow.next(0.05) is not None
            assert slow.missed > 0

    asyncio.run(run())


def test_an_async_subscription_comes_back_after_the_broker_does(tmp_path: Path) -> None:
    async def run() -> None:
        first = BrokerForTests(tmp_path / "data").start()
        port = int(first.address.rsplit(":", 1)[1])
        async with millstream.aio.connect(first.address) as client, client.subscribe("news") as subscription:
            await asyncio.to_thread(first.stop)
            waiting = asyncio.create_task(subscription.next(PATIENCE_S))
            await asyncio.sleep(0)
            with BrokerForTests(tmp_path / "data", port=port) as second:
                await asyncio.to_thread(eventually, lambda: second.broker.metrics.subscriptions == 1)
                await client.publish("news", b"two")
                message = await waiting
                assert message is not None
                assert message.value == b"two"
                await subscription.close()
                await client.close()

    asyncio.run(run())


def take(subscription: millstream.Subscription, count: int) -> list[millstream.Message]:
    taken: list[millstream.Message] = []
    while len(taken) < count:
        message = subscription.next(PATIENCE_S)
        assert message is not None, f"only {len(taken)} of {count} messages came"
        taken.append(message)
    return taken


# --- durable -----------------------------------------------------------------------------------------------------


def test_a_durable_subscription_keeps_what_was_not_acked_for_a_client_that_returns(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as publisher:
        publisher.publish("orders.eu", "before")
        with millstream.connect(broker.address) as client:
            subscription = client.subscribe("orders.*", durable="audit")
            publisher.publish("orders.eu", "seen and acked")
            publisher.publish("orders.us", "seen")
            for _ in range(2):
                message = subscription.next(PATIENCE_S)
                assert message is not None
                if message.text == "seen and acked":
                    message.ack(wait=True)
        publisher.publish("orders.eu", "while away")
        publisher.publish("orders.asia", "a topic that is new")
        with millstream.connect(broker.address) as client, client.subscribe("orders.*", durable="audit") as back:
            got = []
            for _ in range(3):
                message = back.next(PATIENCE_S)
                assert message is not None
                got.append(message.text)
                message.ack()
            assert sorted(got) == ["a topic that is new", "seen", "while away"]
            assert back.next(0.2) is None


def test_a_durable_subscription_has_one_pattern_and_others_take_no_options(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="one pattern"):
        client.subscribe("a", "b", durable="x")
    with pytest.raises(InvalidArgument, match="only a durable subscription"):
        client.subscribe("a", prefetch=3)
