"""The line in which deliveries wait: order, fairness and its bound, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.metrics import Metrics
from millstream.broker.traffic import subscriptions as room
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.config import Settings
from millstream.testing.broker import BrokerForTests
from millstream.wire.deliveries import Delivery, decode_delivery
from millstream.wire.frames import FrameType
from millstream.wire.subscription_calls import CloseSubscription, OpenSubscription
from tests.native import NativeClient


class Loop:
    """Keeps what should be called soon."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


@dataclass(eq=False)
class Client:
    namespace: str = "default"
    client_id: str = "test"
    slow: bool = False
    got: list[Delivery] = field(default_factory=list)

    def deliver(self, delivery: Delivery) -> bool:
        if not self.slow:
            self.got.append(delivery)
        return not self.slow


@dataclass
class Chunk:
    buffers: list[bytes]
    next_offset: int


class Log:
    """A message at every offset, a kilobyte each."""

    def read(self, offset: int, _: int, *, before: int) -> Chunk:
        return Chunk([bytes(1024)] * (before - offset), before)


class Partition:
    def __init__(self) -> None:
        self.log = Log()
        self.uid = 7
        self.messages_pushed = 0
        self.audience: Callable[[int, int], None] | None = None
        self.end = 0

    def pushed(self, messages: int, _: bytes) -> None:
        self.messages_pushed += messages

    def publish(self, count: int = 1) -> None:
        before, self.end = self.end, self.end + count
        if self.audience is not None:
            self.audience(before, self.end)


@dataclass
class Topic:
    name: str
    namespace: str
    partitions: list[Partition]


class Topics:
    def __init__(self) -> None:
        self.registry = self
        self.namespaces: dict[str, dict[str, Topic]] = {"default": {}}
        self.on_opened: Any = None
        self.partition = self.add("news")

    def add(self, name: str) -> Partition:
        topic = self.namespaces["default"][name] = Topic(name, "default", [Partition()])
        if self.on_opened is not None:
            self.on_opened(topic, 0, topic.partitions[0])
        return topic.partitions[0]


@pytest.fixture
def topics() -> Topics:
    return Topics()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def subscriptions(topics: Topics, loop: Loop) -> Subscriptions:
    return Subscriptions(topics, loop=loop, metrics=Metrics())  # type: ignore[arg-type]


def subscribe(subscriptions: Subscriptions, client: Client, *patterns: str) -> int:
    opening = subscriptions._open(client, OpenSubscription(patterns=list(patterns)))
    try:
        opening.send(None)  # it waits for nothing, and a loop for each of many hundred would take seconds
    except StopIteration as opened:
        number: int = opened.value.subscription
        return number
    raise AssertionError("it waits")


def test_many_deliveries_take_turns_with_everything_else(
    subscriptions: Subscriptions, topics: Topics, loop: Loop
) -> None:
    clients = [Client() for _ in range(600)]
    for client in clients:
        subscribe(subscriptions, client, "news")
    topics.partition.publish()
    topics.partition.publish()
    assert sum(len(client.got) for client in clients) == 256, "no more in one turn"
    while loop.soon:
        loop.turn()
    assert [[len(delivery.buffers) for delivery in client.got] for client in clients] == [[1, 1]] * 600


def test_who_leaves_or_comes_while_the_line_is_served_gets_the_right_messages(
    subscriptions: Subscriptions, topics: Topics, loop: Loop
) -> None:
    clients = [Client() for _ in range(600)]
    numbers = [subscribe(subscriptions, client, "news") for client in clients]
    topics.partition.publish()
    for client, number in zip(clients, numbers, strict=True):
        if not client.got:
            asyncio.run(subscriptions._close(client, CloseSubscription(subscription=number)))
    late = Client()
    subscribe(subscriptions, late, "news")
    while loop.soon:
        loop.turn()
    assert sum(len(client.got) for client in clients) == 256
    assert late.got == [], "it was published before"
    topics.partition.publish()
    while loop.soon:
        loop.turn()
    assert len(late.got) == 1


def test_a_line_that_grows_too_long_counts_instead_of_keeping(
    subscriptions: Subscriptions, topics: Topics, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_WAITING_BYTES_MAX", 10 * 1024)
    clients = [Client() for _ in range(300)]
    for client in clients:
        subscribe(subscriptions, client, "news")
    for _ in range(50):
        topics.partition.publish()
    while loop.soon:
        loop.turn()
    topics.partition.publish()
    while loop.soon:
        loop.turn()
    for client in clients:
        got = sum(len(delivery.buffers) for delivery in client.got)
        assert got < 20
        assert got + sum(delivery.missed for delivery in client.got) == 51


def test_a_line_that_is_full_does_not_grow_by_what_it_counts(
    subscriptions: Subscriptions, topics: Topics, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_WAITING_BYTES_MAX", 10 * 1024)
    clients = [Client() for _ in range(300)]
    for client in clients:
        subscribe(subscriptions, client, "#")
    other = topics.add("other")
    for _ in range(500):
        topics.partition.publish()
        other.publish(2)
    assert len(subscriptions._jobs) < 30
    while loop.soon:
        loop.turn()
    for client in clients:
        got = sum(len(delivery.buffers) for delivery in client.got)
        assert got + sum(delivery.missed for delivery in client.got) == 1500


def test_small_messages_do_not_make_the_line_longer_than_its_bound(
    subscriptions: Subscriptions, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_WAITING_BYTES_MAX", 10 * 1024)
    monkeypatch.setattr(topics.partition.log, "read", lambda *_, before: Chunk([b"x"], before))
    for _ in range(300):
        subscribe(subscriptions, Client(), "news")
    for _ in range(500):
        topics.partition.publish()
    assert len(subscriptions._jobs) < 100


def test_a_subscriber_that_raises_ends_the_deliveries_of_nobody_else(
    subscriptions: Subscriptions, topics: Topics, loop: Loop
) -> None:
    class Broken(Client):
        def deliver(self, _: Delivery) -> bool:
            raise ValueError("a bug")

    clients: list[Client] = [Client() for _ in range(299)]
    for client in (*clients, Broken(), last := Client()):
        subscribe(subscriptions, client, "news")
    for _ in range(2):
        topics.partition.publish()
        while loop.soon:
            loop.turn()
    assert [len(client.got) for client in (*clients, last)] == [2] * 300


def test_a_slow_client_is_told_what_it_missed_when_it_reads_again_even_if_nothing_follows(
    subscriptions: Subscriptions, topics: Topics
) -> None:
    slow, quick = Client(slow=True), Client()
    for client in (slow, quick):
        subscribe(subscriptions, client, "news")
    for _ in range(3):
        topics.partition.publish(2)
    assert len(quick.got) == 3
    slow.slow = False
    subscriptions.drained(slow)
    assert [(delivery.missed, delivery.buffers) for delivery in slow.got] == [(6, ())]
    topics.partition.publish()
    assert [delivery.missed for delivery in slow.got] == [6, 0]


@pytest.mark.parametrize("reason", ["the line is full", "the log cannot be read"])
def test_what_the_line_did_not_take_is_told_even_if_nothing_follows(
    subscriptions: Subscriptions, topics: Topics, loop: Loop, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    clients = [Client() for _ in range(300)]
    for client in clients:
        subscribe(subscriptions, client, "news")
    topics.partition.publish()
    if reason == "the line is full":
        monkeypatch.setattr(room, "_WAITING_BYTES_MAX", 0)
    else:
        monkeypatch.setattr(topics.partition.log, "read", broken)
    topics.partition.publish(2)
    topics.partition.publish()
    while loop.soon:
        loop.turn()
    for client in clients:
        assert [(delivery.missed, len(delivery.buffers)) for delivery in client.got] == [(0, 1), (3, 0)]


def broken(*_: object, **__: object) -> Chunk:
    raise OSError("the disk is gone")


def test_what_did_not_fit_into_one_turn_is_told_even_if_nothing_follows(tmp_path: Path) -> None:
    """The socket takes all that was accepted at once: there is no pause, and so no end of a pause."""
    settings = Settings.model_validate(
        {
            "server": {"frame_bytes_max": 65_536, "connection_memory_bytes": 65_536},
            "topics": {"max_message_bytes": 32_768},
        }
    )
    with BrokerForTests(tmp_path, settings=settings) as broker, NativeClient(broker.address) as native:
        number = native.call("sub.open", patterns=["news"])["subscription"]
        rooms = broker.broker.subscriptions

        async def five_at_once() -> None:
            (subscription,) = (held[number] for held in rooms._by_session.values())
            for _ in range(5):
                rooms.send(subscription, "news", 0, 7, [bytes(10_000)], 1)

        broker.run(five_at_once())
        frames = [native.receive() for _ in range(3)]
        assert [kind for kind, _, _ in frames] == [FrameType.DELIVERY] * 3
        told = [decode_delivery(payload) for _, _, payload in frames]
        assert [(delivery.missed, len(delivery.batches)) for delivery in told] == [(0, 10_000), (0, 10_000), (3, 0)]


def test_partitions_know_nothing_of_subscriptions_unless_there_are_some(
    subscriptions: Subscriptions, topics: Topics
) -> None:
    assert topics.partition.audience is None
    client = Client()
    number = subscribe(subscriptions, client, "news")
    assert topics.partition.audience is not None
    asyncio.run(subscriptions._close(client, CloseSubscription(subscription=number)))
    assert topics.partition.audience is None


def test_a_partition_that_was_closed_for_being_idle_is_heard_again(broker: BrokerForTests) -> None:
    with NativeClient(broker.address) as native, NativeClient(broker.address) as publisher:
        publisher.call("topic.create", name="news")
        publisher.publish("news", [b"one"])
        native.call("sub.open", patterns=["news"])
        topics = broker.broker.topics
        topic = topics.registry.get("default", "news")

        async def close_idle() -> None:
            topics.close_idle(topic, 0)

        broker.run(close_idle())
        assert topic.partitions[0] is None, "subscribers do not keep it open"
        publisher.publish("news", [b"two"])
        assert native.receive()[0] == 10
