"""What a client sends in one go is taken as one, and yet every message of it is what it would be alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import millstream
from millstream.broker.mqtt.publishing import Owed, Publishing
from millstream.broker.transfer import Target
from millstream.client import Client
from millstream.entries import Entry
from millstream.mqtt.packets import (
    V4,
    V5,
    Connect,
    Filter,
    Packet,
    Properties,
    Puback,
    Publish,
    Pubrec,
    Suback,
    Subscribe,
)
from millstream.mqtt.reasons import Reason
from millstream.partitioning import key_partition
from millstream.records import PRIORITY_DEFAULT
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wire, Wires, both_versions, unique
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} does not store what it is sent")

QOS = (1, 1, 0, 2, 2, 1, 0, 0, 1, 2)


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream(mqtt={"receive_maximum": 1_000})
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Millstream) -> Iterator[Client]:
    with millstream.connect(server.broker.address) as connected:
        yield connected


@pytest.fixture
def native(topic: str) -> str:
    """The same topic as the SDK calls it."""
    return topic.replace("/", ".")


def stored(client: Client, native: str, count: int) -> list[bytes | None]:
    with client.stream(native, start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(count)]
        assert stream.next(timeout_s=0.05) is None
    return [message.value for message in found if message is not None]


def answers(wire: Wire, count: int) -> list[Packet]:
    return [wire.next() for _ in range(count)]


# --- in their order --------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "live"])
def test_messages_of_every_kind_in_one_go_are_answered_and_arrive_in_their_order(
    mqtt: Wires, client: Client, version: int, is_stored: bool, topic: str, native: str
) -> None:
    if is_stored:
        client.create_topic(native)
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/#", qos=0)
    qos = QOS * 10
    ids = [writer.packet_id() if one else 0 for one in qos]
    writer.send(
        *(
            Publish(topic if number % 7 else f"{topic}/x", b"%d" % number, one, number % 11 == 0, packet_id=packet_id)
            for number, (one, packet_id) in enumerate(zip(qos, ids, strict=True))
        )
    )
    owed = [(Puback if one == 1 else Pubrec, packet_id) for one, packet_id in zip(qos, ids, strict=True) if one]
    found = [(type(packet), packet.packet_id) for packet in answers(writer, len(owed))]  # type: ignore[union-attr]
    assert found == owed
    messages = reader.messages(len(qos))
    for name in (topic, f"{topic}/x"):
        numbers = [int(message.payload) for message in messages if message.topic == name]
        assert numbers == [number for number in range(len(qos)) if (topic if number % 7 else f"{topic}/x") == name]


def test_what_is_published_before_a_subscription_does_not_come_to_it(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect()
    wire.send(
        Publish(topic, b"before"), Subscribe(wire.packet_id(), (Filter(topic),)), Publish(topic, b"after"),
    )  # fmt: skip
    assert wire.receive(Suback).reasons == (0,)
    assert wire.message().payload == b"after"
    wire.nothing()


def test_thousands_of_messages_in_one_go_are_all_stored(mqtt: Wires, client: Client, topic: str, native: str) -> None:
    client.create_topic(native)
    writer = mqtt.connect(V4)
    writer.send(*(Publish(topic, b"%d" % number) for number in range(3_000)))
    writer.publish(topic, b"3000", 1)
    assert stored(client, native, 3_001) == [b"%d" % number for number in range(3_001)]


def test_a_subscriber_of_another_door_gets_every_message_that_is_not_stored(
    mqtt: Wires, client: Client, topic: str, native: str
) -> None:
    with client.subscribe(native) as subscription:
        mqtt.connect().send(*(Publish(topic, b"%d" % number) for number in range(5)))
        found = [subscription.next(timeout_s=10) for _ in range(5)]
    assert [message.value for message in found if message is not None] == [b"0", b"1", b"2", b"3", b"4"]
    assert client.topics(native) == []


def test_every_answer_counts_as_a_packet(
    mqtt: Wires, client: Client, server: Millstream, topic: str, native: str
) -> None:
    client.create_topic(native)
    writer = mqtt.connect()
    metrics = server.broker.broker.metrics
    before = metrics.mqtt_packets_sent
    writer.send(*(Publish(topic, b"x", 1, packet_id=writer.packet_id()) for _ in range(5)))
    answers(writer, 5)
    eventually(lambda: metrics.mqtt_packets_sent == before + 5)


# --- each for itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_that_is_too_large_does_not_take_others_with_it(
    mqtt: Wires, client: Client, qos: int, lasts: bool, topic: str, native: str
) -> None:
    client.create_topic(native, config={"max_message_bytes": 1_000})
    writer = mqtt.durable() if lasts else mqtt.connect()
    said = [b"small", b"large" * 1_000, b"smaller"]
    writer.send(*(Publish(topic, payload, qos, packet_id=writer.packet_id() if qos else 0) for payload in said))
    reasons = [packet.reason for packet in answers(writer, 3 if qos else 0)]  # type: ignore[union-attr]
    assert reasons == ([Reason.SUCCESS, Reason.QUOTA_EXCEEDED, Reason.SUCCESS] if qos else [])
    writer.ping()
    assert stored(client, native, 2) == [b"small", b"smaller"]


# --- exactly once, and no more than others ---------------------------------------------------------------------------


def test_a_quota_holds_for_messages_that_are_stored_exactly_once(
    mqtt: Wires, client: Client, topic: str, native: str
) -> None:
    namespace = unique("team")
    client.create_namespace(namespace)
    client.set_quota(namespace, publish_messages_per_s=1)
    writer = mqtt.open()
    lasting = Properties(session_expiry_s=60)
    writer.connect(Connect(V5, unique("c"), username=f"{namespace}:me", password=b"", properties=lasting))
    writer.subscribe(topic, qos=1)
    assert {writer.publish(topic, b"x", 2) for _ in range(10)} == {Reason.SUCCESS, Reason.QUOTA_EXCEEDED}


def test_a_full_queue_takes_no_more_messages_exactly_once(mqtt: Wires, client: Client) -> None:
    queue = unique("q")
    client.create_topic(queue, config={"max_depth": 1})
    worker, writer = mqtt.connect(), mqtt.durable()
    worker.subscribe(f"$share/workers/$queue/{queue}")
    assert writer.publish(f"$queue/{queue}", b"1", 2) == Reason.SUCCESS
    assert writer.publish(f"$queue/{queue}", b"2", 2) == Reason.QUOTA_EXCEEDED


def test_what_is_stored_exactly_once_in_many_partitions_keeps_its_order_in_each(
    mqtt: Wires, server: Millstream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = unique("q")
    client.create_topic(name, partitions=2)
    writer = mqtt.durable()
    broker = server.broker.broker
    world = broker.mqtt.worlds["default"]
    keys = {key_partition(key, 2): key for key in (b"%d" % number for number in range(20))}
    move = broker.mqtt.store.transfer.move

    async def slow(target: Target, batch: bytearray, *rest: Any, **more: Any) -> int:
        await asyncio.sleep(0.01)
        return await move(target, batch, *rest, **more)

    async def publish() -> None:
        """Two reads: one with something for both partitions, and one with something for the second of them."""
        monkeypatch.setattr(broker.mqtt.store.transfer, "move", slow)
        publishing = Publishing(world, world.own, lambda _: None, world.sessions[writer.client_id])
        for number, partition in enumerate((0, 1, 1)):
            entry = Entry(b"%d" % number, keys[partition], b"", PRIORITY_DEFAULT, 0, 0, 0)
            publishing.put(name, entry, Owed(2, number + 1))
            if number:
                publishing.flush()

    server.broker.run(publish())
    with client.stream(name, start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(3)]
    assert [message.value for message in found if message is not None and message.partition == 1] == [b"1", b"2"]
