"""One world: what MQTT publishes, the SDK reads in every way it has, and the other way round."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import millstream
from millstream.client import Client
from millstream.mqtt.packets import V4, V5, Filter, Properties
from tests.e2e.mqtt.support import REFERENCE, Millstream, Server, Wires, both_versions, unique

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has one door")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    assert isinstance(server, Millstream)
    with millstream.connect(server.broker.address) as connected:
        yield connected


@pytest.fixture
def native(topic: str) -> str:
    """The same topic as the SDK calls it."""
    return topic.replace("/", ".")


# --- MQTT to the SDK -------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_stream_reads_what_mqtt_publishes(
    mqtt: Wires, client: Client, version: int, qos: int, topic: str, native: str
) -> None:
    client.create_topic(native)
    writer = mqtt.connect(version)
    for number in range(5):
        assert writer.publish(topic, b"%d" % number, qos) < 0x80
    writer.ping()
    with client.stream(native, start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(5)]
    assert [message.value for message in found if message is not None] == [b"%d" % number for number in range(5)]


@both_versions
def test_a_confirmed_publish_is_stored_already(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    client.create_topic(native)
    writer = mqtt.connect(version)
    for number, qos in enumerate((1, 2), start=1):
        writer.publish(topic, b"x", qos)
        assert sum(client.offsets(native).values()) == number


@both_versions
def test_a_queue_leases_what_mqtt_publishes(mqtt: Wires, client: Client, version: int, topic: str, native: str) -> None:
    client.create_topic(native)
    with client.queue(native, group="workers") as work:
        mqtt.connect(version).publish(topic, b"do it", 1)
        message = work.next(timeout_s=10)
        assert message is not None
        assert message.value == b"do it"
        message.ack()


@both_versions
def test_subscriptions_get_what_mqtt_publishes(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    """Stored or not."""
    with client.subscribe(f"{native}.*") as subscription:
        writer = mqtt.connect(version)
        for qos in (0, 1, 2):
            writer.publish(f"{topic}/x", b"%d" % qos, qos)
            message = subscription.next(timeout_s=10)
            assert message is not None
            assert (message.topic, message.value) == (f"{native}.x", b"%d" % qos)


def test_properties_are_headers(mqtt: Wires, client: Client, topic: str, native: str) -> None:
    client.create_topic(native)
    said = Properties(content_type="text/plain", user=(("color", "red"), ("größe", "XL"), ("color", "blue")))
    mqtt.connect(V5).publish(topic, b"x", 1, properties=said)
    with client.stream(native, start="earliest") as stream:
        message = stream.next(timeout_s=10)
    assert message is not None
    items = message.header_items()
    assert [value for name, value in items if name == "color"] == [b"red", b"blue"]
    assert message.headers["größe"] == "XL"
    assert message.headers["content-type"] == "text/plain"


def test_message_expiry_is_a_time_to_live(mqtt: Wires, client: Client, topic: str, native: str) -> None:
    client.create_topic(native)
    writer = mqtt.connect(V5)
    writer.publish(topic, b"short", 1, properties=Properties(message_expiry_s=5))
    writer.publish(topic, b"long", 1)
    mqtt.skip(6)
    with client.queue(native, group="late") as work:
        message = work.next(timeout_s=10)
        assert message is not None
        assert message.value == b"long"
        message.ack()


# --- the SDK to MQTT -------------------------------------------------------------------------------------------------


@both_versions
@pytest.mark.parametrize("granted", [0, 1, 2])
def test_mqtt_reads_what_the_sdk_publishes(
    mqtt: Wires, client: Client, version: int, granted: int, topic: str, native: str
) -> None:
    reader = mqtt.connect(version)
    reader.subscribe(f"{topic}/#", qos=granted)
    client.publish(f"{native}.x", b"from the SDK", headers={"color": "red"}, key="k")
    found = reader.message()
    assert (found.topic, found.payload, found.qos) == (f"{topic}/x", b"from the SDK", granted)
    assert (found.retain, found.dup) == (False, False)
    assert version == V4 or ("color", "red") in found.properties.user


@both_versions
def test_a_durable_session_reads_on_what_the_sdk_published_meanwhile(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    client.create_topic(native, partitions=3)
    client.publish(native, b"before the subscription")
    reader = mqtt.durable(version)
    reader.subscribe(topic)
    reader.disconnect()
    expected = [b"%d" % number for number in range(30)]
    for payload in expected:
        client.publish(native, payload, key=payload)
    again = mqtt.durable(version, reader.client_id)
    assert sorted(again.payloads(30)) == sorted(expected)
    again.nothing()
    client.publish(native, b"live again")
    assert again.message().payload == b"live again"


@both_versions
def test_a_durable_session_finds_a_topic_that_was_made_while_it_was_away(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    reader = mqtt.durable(version)
    reader.subscribe(f"{topic}/#")
    reader.disconnect()
    client.create_topic(f"{native}.new", partitions=2)
    for number in range(4):
        client.publish(f"{native}.new", b"%d" % number)
    assert sorted(mqtt.durable(version, reader.client_id).payloads(4)) == [b"0", b"1", b"2", b"3"]


@both_versions
def test_a_durable_session_and_a_stream_see_the_same(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic, qos=1)
    writer.publish(topic, b"mqtt", 1)
    client.publish(native, b"native")
    writer.publish(topic, b"mqtt again", 2)
    expected = [b"mqtt", b"native", b"mqtt again"]
    assert reader.payloads(3) == expected
    with client.stream(native, start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(3)]
    assert [message.value for message in found if message is not None] == expected


@both_versions
def test_values_of_nothing_and_time_to_live(mqtt: Wires, client: Client, version: int, topic: str, native: str) -> None:
    reader = mqtt.connect(version)
    reader.subscribe(topic)
    client.publish(native, None, key="k")
    assert reader.message().payload == b""
    client.publish(native, b"x", ttl="1h")
    found = reader.message()
    # The SDK counts by this machine's clock, which may be behind one that skipped some time.
    assert version == V4 or 3500 < (found.properties.message_expiry_s or 0) <= 3600


@both_versions
def test_a_producer_reaches_mqtt_in_order(mqtt: Wires, client: Client, version: int, topic: str, native: str) -> None:
    client.create_topic(native)
    reader = mqtt.connect(version)
    reader.subscribe(topic, qos=1)
    expected = [b"%d" % number for number in range(500)]
    with client.producer(native, linger_ms=1) as producer:
        for payload in expected:
            producer.send(payload)
    assert reader.payloads(500) == expected


def test_a_shared_subscription_gets_what_the_sdk_publishes(
    mqtt: Wires, client: Client, topic: str, native: str
) -> None:
    members = [mqtt.connect(V5), mqtt.connect(V5)]
    for member in members:
        member.subscribe(f"$share/one/{topic}", qos=1)
    for number in range(10):
        client.publish(native, b"%d" % number)
    found = []
    while len(found) < 10:
        for member in members:
            try:
                found.append(member.message(0.05).payload)
            except AssertionError:
                continue
    assert sorted(found) == sorted(b"%d" % number for number in range(10))


def test_no_local_means_the_same_client_and_not_the_sdk(mqtt: Wires, client: Client, topic: str, native: str) -> None:
    reader = mqtt.connect(V5)
    reader.subscribe(Filter(topic, 1, no_local=True))
    reader.publish(topic, b"own", 1)
    client.publish(native, b"other")
    assert reader.message().payload == b"other"
    reader.nothing()


@pytest.mark.parametrize("value", ["0", "1r", "yes"])
def test_a_header_of_the_sdk_that_happens_to_be_called_mqtt_arrives_and_decides_nothing(
    mqtt: Wires, client: Client, topic: str, native: str, value: str
) -> None:
    reader = mqtt.durable()
    reader.subscribe(Filter(topic, 2, retain_as_published=True))
    client.publish(native, b"x", headers={"mqtt": value})
    message = reader.message()
    assert (message.qos, message.retain, message.properties.user) == (2, False, (("mqtt", value),))


# --- requests and replies --------------------------------------------------------------------------------------------


def test_mqtt_asks_and_the_sdk_replies(mqtt: Wires, client: Client, topic: str, native: str) -> None:
    requester = mqtt.connect(V5)
    requester.subscribe(f"{topic}/answers", qos=1)
    with client.subscribe(native) as requests:
        asked = Properties(response_topic=f"{topic}/answers", correlation_data=b"\x00\xff7")
        requester.publish(topic, b"6 * 7", 1, properties=asked)
        request = requests.next(timeout_s=10)
        assert request is not None
        request.reply(b"42", headers={"by": "the SDK"})
    answer = requester.message()
    assert (answer.topic, answer.payload) == (f"{topic}/answers", b"42")
    assert answer.properties.correlation_data == b"\x00\xff7"
    assert ("by", "the SDK") in answer.properties.user


def test_the_sdk_asks_and_mqtt_replies(mqtt: Wires, client: Client, topic: str, native: str) -> None:
    responder = mqtt.connect(V5)
    responder.subscribe(topic, qos=1)
    replies: list[bytes | None] = []
    asking = threading.Thread(target=lambda: replies.append(client.request(native, b"6 * 7", timeout="10s").value))
    asking.start()
    request = responder.message()
    assert request.payload == b"6 * 7"
    assert request.properties.response_topic
    said = Properties(correlation_data=request.properties.correlation_data)
    assert responder.publish(request.properties.response_topic, b"42", 1, properties=said) < 0x80
    asking.join(15)
    assert replies == [b"42"]


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_name_like_that_of_an_inbox_is_one_like_any_where_nobody_has_such_an_inbox(
    mqtt: Wires, version: int, qos: int
) -> None:
    name = f"_inbox/{unique('me')}"
    here, away, writer = mqtt.connect(version), mqtt.durable(version), mqtt.durable(version)
    here.subscribe(name, qos=qos)
    away.subscribe("_inbox/+", qos=2)
    assert writer.publish(name, b"1", qos) < 0x80
    assert (here.message().payload, away.message().payload) == (b"1", b"1")
    away.disconnect()
    assert writer.publish(name, b"2", qos) < 0x80
    again = mqtt.durable(version, away.client_id)
    assert [it.payload for it in again.messages(1)] == [b"2"]
    again.nothing()


# --- what is stored --------------------------------------------------------------------------------------------------


@both_versions
def test_what_nobody_declared_and_nobody_waits_for_is_not_stored(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    reader = mqtt.connect(version)
    reader.subscribe(topic)
    mqtt.connect(version).publish(topic, b"x", 1)
    assert reader.message().payload == b"x"
    assert native not in {described.name for described in client.topics()}


@both_versions
def test_a_durable_reader_makes_a_topic_of_it(
    mqtt: Wires, client: Client, version: int, topic: str, native: str
) -> None:
    mqtt.durable(version).subscribe(topic, qos=1)
    mqtt.connect(version).publish(topic, b"x", 1)
    with client.stream(native, start="earliest") as stream:
        message = stream.next(timeout_s=10)
    assert message is not None
    assert message.value == b"x"
