"""Retained messages."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import V5, Filter, Properties
from tests.e2e.mqtt.support import Wires, both_versions, not_in_reference, unique


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_3_3_1_5_a_retained_message_is_sent_to_new_subscriptions(
    mqtt: Wires, version: int, qos: int, topic: str
) -> None:
    mqtt.connect(version).publish(topic, b"kept", qos, retain=True)
    for granted in (0, 1, 2):
        reader = mqtt.connect(version)
        reader.subscribe(topic, qos=granted)
        found = reader.message()
        assert (found.topic, found.payload, found.qos) == (topic, b"kept", min(qos, granted))
        assert found.retain, "3.3.1-8 of 3.1.1: it says that it was retained"
        assert not found.dup


@both_versions
def test_3_3_1_5_the_last_one_counts(mqtt: Wires, version: int, topic: str) -> None:
    writer = mqtt.connect(version)
    for payload in (b"old", b"older", b"newest"):
        writer.publish(topic, payload, 1, retain=True)
    reader = mqtt.connect(version)
    reader.subscribe(topic)
    assert reader.message().payload == b"newest"
    reader.nothing()


@both_versions
def test_3_3_1_8_an_ordinary_message_changes_nothing(mqtt: Wires, version: int, topic: str) -> None:
    writer = mqtt.connect(version)
    writer.publish(topic, b"kept", 1, retain=True)
    writer.publish(topic, b"passing", 1)
    writer.publish(topic, b"", 1)
    reader = mqtt.connect(version)
    reader.subscribe(topic)
    assert reader.message().payload == b"kept"
    reader.nothing()


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_3_3_1_6_an_empty_retained_message_deletes_and_is_delivered(
    mqtt: Wires, version: int, qos: int, topic: str
) -> None:
    live, writer = mqtt.connect(version), mqtt.connect(version)
    live.subscribe(topic)
    writer.publish(topic, b"kept", qos, retain=True)
    writer.publish(topic, b"", qos, retain=True)
    assert live.payloads(2) == [b"kept", b""]
    reader = mqtt.connect(version)
    reader.subscribe(topic)
    reader.nothing()


@both_versions
def test_3_3_1_12_established_subscriptions_see_no_retain_flag(mqtt: Wires, version: int, topic: str) -> None:
    reader = mqtt.connect(version)
    reader.subscribe(topic)
    mqtt.connect(version).publish(topic, b"x", 1, retain=True)
    assert not reader.message().retain


@both_versions
def test_wildcards_find_retained_messages(mqtt: Wires, version: int, topic: str) -> None:
    writer = mqtt.connect(version)
    for name in ("a", "b", "a/c", "a/c/d"):
        writer.publish(f"{topic}/{name}", name.encode(), 1, retain=True)
    for filter_, expected in (
        ("+", {b"a", b"b"}),
        ("#", {b"a", b"b", b"a/c", b"a/c/d"}),
        ("a/#", {b"a", b"a/c", b"a/c/d"}),
        ("+/c", {b"a/c"}),
        ("+/+/+", {b"a/c/d"}),
    ):
        reader = mqtt.connect(version)
        reader.subscribe(f"{topic}/{filter_}")
        found = reader.messages(len(expected))
        assert {message.payload for message in found} == expected
        assert all(message.retain for message in found)
        reader.nothing(seconds=0.03)


@both_versions
def test_3_8_4_3_a_repeated_subscribe_sends_retained_messages_again(mqtt: Wires, version: int, topic: str) -> None:
    mqtt.connect(version).publish(topic, b"kept", 1, retain=True)
    reader = mqtt.connect(version)
    for _ in range(2):
        reader.subscribe(topic)
        found = reader.message()
        assert found.payload == b"kept"
        assert found.retain


@both_versions
def test_each_filter_of_a_subscribe_gets_its_retained_messages(mqtt: Wires, version: int, topic: str) -> None:
    writer = mqtt.connect(version)
    writer.publish(f"{topic}/1", b"1", 1, retain=True)
    writer.publish(f"{topic}/2", b"2", 1, retain=True)
    reader = mqtt.connect(version)
    reader.subscribe(f"{topic}/1", f"{topic}/2")
    assert sorted(reader.payloads(2)) == [b"1", b"2"]
    reader.nothing()


@both_versions
@pytest.mark.parametrize("name", ["/", "a b/c.d", "ü//x"])
def test_names_that_are_no_topics_elsewhere_are_retained(mqtt: Wires, version: int, name: str) -> None:
    name = f"{name}{unique('n')}"
    mqtt.connect(version).publish(name, b"kept", 1, retain=True)
    reader = mqtt.connect(version)
    reader.subscribe(name)
    found = reader.message()
    assert (found.topic, found.payload, found.retain) == (name, b"kept", True)


def test_3_3_1_10_retain_handling_1_sends_only_to_new_subscriptions(mqtt: Wires, topic: str) -> None:
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True)
    reader = mqtt.connect(V5)
    reader.subscribe(Filter(topic, 1, retain_handling=1))
    assert reader.message().payload == b"kept"
    reader.subscribe(Filter(topic, 1, retain_handling=1))
    reader.nothing()
    reader.unsubscribe(topic)
    reader.subscribe(Filter(topic, 1, retain_handling=1))
    assert reader.message().payload == b"kept"


def test_3_3_1_10_a_resumed_subscription_is_not_new(mqtt: Wires, topic: str) -> None:
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True)
    reader = mqtt.durable(V5)
    reader.subscribe(Filter(topic, 1, retain_handling=1))
    assert reader.message().payload == b"kept"
    reader.disconnect()
    again = mqtt.durable(V5, reader.client_id)
    again.nothing()
    again.subscribe(Filter(topic, 1, retain_handling=1))
    again.nothing()


def test_3_3_1_11_retain_handling_2_sends_none(mqtt: Wires, topic: str) -> None:
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True)
    reader = mqtt.connect(V5)
    for _ in range(2):
        reader.subscribe(Filter(topic, 1, retain_handling=2))
        reader.nothing()
    reader.subscribe(Filter(topic, 1, retain_handling=0))
    assert reader.message().payload == b"kept"


def test_3_3_1_13_retain_as_published_keeps_the_flag(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.connect(V5), mqtt.connect(V5)
    reader.subscribe(Filter(topic, 1, retain_as_published=True))
    writer.publish(topic, b"no", 1, retain=False)
    writer.publish(topic, b"yes", 1, retain=True)
    assert [(message.payload, message.retain) for message in reader.messages(2)] == [(b"no", False), (b"yes", True)]


@not_in_reference("it sends them")
def test_4_8_2_a_shared_subscription_gets_no_retained_messages(mqtt: Wires, topic: str) -> None:
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True)
    reader = mqtt.connect(V5)
    reader.subscribe(f"$share/{unique('g')}/{topic}", qos=1)
    reader.nothing()


def test_3_3_2_the_properties_of_a_retained_message_are_kept(mqtt: Wires, topic: str) -> None:
    said = Properties(
        payload_format=1,
        content_type="text/plain",
        response_topic=f"{topic}/answer",
        correlation_data=b"\x00\x01",
        user=(("a", "2"), ("c", "3"), ("a", "1")),
    )
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True, properties=said)
    reader = mqtt.connect(V5)
    reader.subscribe(topic)
    assert reader.message().properties == said


def test_3_3_2_5_a_retained_message_expires(mqtt: Wires, topic: str) -> None:
    writer = mqtt.connect(V5)
    writer.publish(f"{topic}/short", b"short", 1, retain=True, properties=Properties(message_expiry_s=1))
    writer.publish(f"{topic}/long", b"long", 1, retain=True, properties=Properties(message_expiry_s=60))
    mqtt.skip(2.1)
    reader = mqtt.connect(V5)
    reader.subscribe(f"{topic}/+")
    found = reader.message()
    assert found.payload == b"long"
    assert found.properties.message_expiry_s is not None
    assert found.properties.message_expiry_s < 60
    reader.nothing()


@both_versions
def test_a_retained_message_stays_for_everybody(mqtt: Wires, version: int, topic: str) -> None:
    """Also after the one who left it is gone."""
    writer = mqtt.connect(version)
    writer.publish(topic, b"kept", 2, retain=True)
    writer.disconnect()
    for _ in range(2):
        reader = mqtt.connect(version)
        reader.subscribe(topic)
        assert reader.message().payload == b"kept"


@not_in_reference("sends a client its own retained messages")
def test_3_8_3_3_no_local_spares_a_client_its_own_retained_messages(mqtt: Wires, topic: str) -> None:
    own, other = mqtt.connect(V5), mqtt.connect(V5)
    own.publish(f"{topic}/own", b"own", 1, retain=True)
    other.publish(f"{topic}/other", b"other", 1, retain=True)
    own.subscribe(Filter(f"{topic}/+", 1, no_local=True))
    assert own.message().payload == b"other"
    own.nothing()
    own.subscribe(Filter(f"{topic}/+", 1))
    assert sorted(own.payloads(2)) == [b"other", b"own"]
