"""PUBLISH and its acknowledgements, in both directions: what is delivered, how often and in which order."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import (
    V5,
    Filter,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
)
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.e2e.mqtt.support import Wires, both_versions, payloads, unique


@both_versions
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("granted", [0, 1, 2])
def test_3_8_4_8_the_delivered_qos_is_the_smaller_of_both(
    mqtt: Wires, version: int, published: int, granted: int, topic: str
) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    assert reader.subscribe(topic, qos=granted) == (granted,)
    assert writer.publish(topic, b"payload", published) < 0x80
    found = reader.message()
    assert (found.topic, found.payload, found.qos) == (topic, b"payload", min(published, granted))
    assert (found.retain, found.dup) == (False, False)
    assert bool(found.packet_id) == bool(found.qos)
    reader.nothing()


@both_versions
def test_basic_a_client_gets_its_own_messages(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    wire.subscribe(topic)
    for qos in (0, 1, 2):
        wire.publish(topic, f"qos {qos}".encode(), qos)
    found = wire.messages(3)
    assert sorted(payloads(found)) == [b"qos 0", b"qos 1", b"qos 2"]
    assert {message.payload: message.qos for message in found} == {b"qos 0": 0, b"qos 1": 1, b"qos 2": 2}


@both_versions
@pytest.mark.parametrize(
    "name", ["plain", "/", "/leading", "trailing/", "a//b", "with space/and.dots", "ünï/cödé/😀", "a/" * 100 + "z"]
)
@pytest.mark.parametrize("qos", [0, 2])
def test_4_7_3_4_topic_names_are_any_text_and_delivered_as_they_are(
    mqtt: Wires, version: int, name: str, qos: int
) -> None:
    name = f"{name}{unique('n')}"
    wire = mqtt.connect(version)
    assert wire.subscribe(name) == (2,)
    assert wire.publish(name, b"x", qos) < 0x80
    assert wire.message().topic == name


@both_versions
@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_384, 90_000])
def test_3_3_3_payloads_of_any_size_and_content(mqtt: Wires, version: int, size: int, topic: str) -> None:
    payload = (bytes(range(256)) * 400)[:size]
    wire = mqtt.connect(version)
    wire.subscribe(topic)
    for qos in (0, 1, 2):
        wire.publish(topic, payload, qos)
    assert wire.payloads(3) == [payload] * 3


@both_versions
def test_2_2_1_5_acknowledgements_carry_the_packet_id(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    for packet_id in (1, 256, 65_535):
        wire.send(Publish(topic, b"x", 1, packet_id=packet_id))
        assert wire.receive(Puback).packet_id == packet_id
        wire.send(Publish(topic, b"x", 2, packet_id=packet_id))
        assert wire.receive(Pubrec).packet_id == packet_id
        wire.send(Pubrel(packet_id))
        assert wire.receive(Pubcomp).packet_id == packet_id


@both_versions
def test_2_2_1_4_a_server_uses_different_ids_for_what_is_in_flight(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    for number in range(10):
        writer.publish(topic, b"%d" % number, 1 + number % 2)
    found = [reader.receive(Publish) for _ in range(10)]
    assert len({message.packet_id for message in found} - {0}) == 10


@both_versions
def test_4_3_3_10_a_repeated_qos_2_publish_is_delivered_once(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"once", 2, packet_id=9))
    assert writer.receive(Pubrec).packet_id == 9
    writer.send(Publish(topic, b"once", 2, dup=True, packet_id=9))
    assert writer.receive(Pubrec).packet_id == 9
    writer.send(Pubrel(9))
    assert writer.receive(Pubcomp).packet_id == 9
    assert reader.message().payload == b"once"
    reader.nothing()


@both_versions
def test_4_3_3_12_after_the_pubcomp_the_same_id_is_a_new_message(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    for payload in (b"first", b"second"):
        writer.send(Publish(topic, payload, 2, packet_id=5))
        writer.receive(Pubrec)
        writer.send(Pubrel(5))
        assert writer.receive(Pubcomp) == Pubcomp(5)
    assert reader.payloads(2) == [b"first", b"second"]


@both_versions
def test_4_3_2_5_after_the_puback_the_same_id_is_a_new_message(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    for payload, dup in ((b"first", False), (b"second", True)):
        writer.send(Publish(topic, payload, 1, dup=dup, packet_id=5))
        writer.receive(Puback)
    found = reader.messages(2)
    assert payloads(found) == [b"first", b"second"]
    assert [message.dup for message in found] == [False, False], "3.3.1-3: a publisher's DUP is not passed on"


@both_versions
def test_4_3_3_11_a_pubrel_for_nothing_is_answered(mqtt: Wires, version: int) -> None:
    wire = mqtt.connect(version)
    wire.send(Pubrel(77))
    answer = wire.receive(Pubcomp)
    assert answer.packet_id == 77
    assert answer.reason == (Reason.PACKET_IDENTIFIER_NOT_FOUND if version == V5 else 0) or answer.reason == 0
    wire.ping()


@both_versions
def test_4_3_acknowledgements_that_nobody_waits_for_do_no_harm(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    wire.subscribe(topic, qos=1)
    wire.publish(topic, b"x", 1)
    wire.message()
    wire.send(Puback(4711), Pubcomp(4712))
    wire.ping()


@both_versions
def test_4_3_3_the_handshake_of_a_delivery(mqtt: Wires, version: int, topic: str) -> None:
    """PUBREC is answered with PUBREL of the same id, also twice; PUBCOMP ends it."""
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.publish(topic, b"x", 2)
    found = reader.receive(Publish)
    reader.send(Pubrec(found.packet_id))
    assert reader.receive(Pubrel) == Pubrel(found.packet_id)
    reader.send(Pubcomp(found.packet_id))
    reader.nothing()


def test_4_4_0_2_a_refusing_pubrec_ends_the_exchange(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    writer.publish(topic, b"unwanted", 2)
    found = reader.receive(Publish)
    reader.send(Pubrec(found.packet_id, Reason.UNSPECIFIED_ERROR))
    reader.nothing(Pubrel)
    reader.drop()
    again = mqtt.durable(V5, reader.client_id)
    assert again.connack.session_present
    again.nothing()
    again.nothing(Pubrel)


def test_4_4_0_2_a_refusing_puback_ends_the_exchange(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    writer.publish(topic, b"unwanted", 1)
    found = reader.receive(Publish)
    reader.send(Puback(found.packet_id, Reason.UNSPECIFIED_ERROR))
    reader.ping()
    reader.drop()
    mqtt.durable(V5, reader.client_id).nothing()


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_4_6_0_6_messages_of_one_topic_keep_their_order(mqtt: Wires, version: int, qos: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    expected = [b"%d" % number for number in range(100)]
    for payload in expected:
        writer.publish(topic, payload, qos)
    assert reader.payloads(100) == expected


@both_versions
def test_4_6_0_6_pipelined_messages_keep_their_order(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.send(*[Publish(topic, b"%d" % number, 1, packet_id=number + 1) for number in range(15)])
    assert [writer.receive(Puback).packet_id for _ in range(15)] == list(range(1, 16)), "4.6.0-2: in order"
    assert reader.payloads(15) == [b"%d" % number for number in range(15)]


@both_versions
def test_4_6_0_3_pubrecs_come_in_the_order_of_the_publishes(mqtt: Wires, version: int, topic: str) -> None:
    writer = mqtt.connect(version)
    writer.send(*[Publish(topic, b"x", 2, packet_id=number + 1) for number in range(15)])
    assert [writer.receive(Pubrec).packet_id for _ in range(15)] == list(range(1, 16))
    writer.send(*[Pubrel(number + 1) for number in range(15)])
    assert [writer.receive(Pubcomp).packet_id for _ in range(15)] == list(range(1, 16))


@both_versions
def test_4_6_0_the_qos_2_messages_of_a_publisher_keep_their_order_between_qos_1(
    mqtt: Wires, version: int, topic: str
) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(topic, qos=0)
    writer.publish(topic, b"one", 2)
    writer.publish(topic, b"two", 1)
    writer.publish(topic, b"three", 2)
    assert reader.payloads(3) == [b"one", b"two", b"three"]


@both_versions
@pytest.mark.parametrize("name", ["a/#", "#", "a/+/b", "+"])
def test_3_3_2_2_a_topic_name_has_no_wildcards(mqtt: Wires, version: int, name: str) -> None:
    wire = mqtt.connect(version)
    wire.send(Publish(name, b"x", 0))
    wire.refused(Reason.TOPIC_NAME_INVALID, Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR)


@both_versions
def test_4_7_3_1_a_topic_name_is_not_empty(mqtt: Wires, version: int) -> None:
    wire = mqtt.connect(version)
    wire.send(Publish("", b"x", 0))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.TOPIC_NAME_INVALID, Reason.MALFORMED_PACKET)


def test_3_4_2_1_a_puback_may_say_that_nobody_listens(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    for qos in (1, 2):
        assert wire.publish(topic, b"x", qos) in (0, Reason.NO_MATCHING_SUBSCRIBERS)


@both_versions
def test_many_readers_get_one_message_each(mqtt: Wires, version: int, topic: str) -> None:
    readers = [mqtt.connect(version) for _ in range(10)]
    for reader in readers:
        reader.subscribe(topic, qos=1)
    mqtt.connect(version).publish(topic, b"to all", 2)
    for reader in readers:
        assert reader.message().payload == b"to all"
        reader.nothing(seconds=0.01)


def test_clients_of_both_versions_talk_to_each_other(mqtt: Wires, topic: str) -> None:
    old, new = mqtt.connect(4), mqtt.connect(V5)
    for wire in (old, new):
        wire.subscribe(topic)
    old.publish(topic, b"from old", 2)
    new.publish(topic, b"from new", 2)
    for wire in (old, new):
        assert wire.payloads(2) == [b"from old", b"from new"]


@both_versions
def test_a_server_takes_packets_in_any_pieces(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    whole = (Subscribe(1, (Filter(topic, 1),)), Publish(topic, b"in pieces", 1, packet_id=2))
    data = b"".join(encode(packet, version) for packet in whole)
    for at in range(len(data)):
        wire.send_bytes(data[at : at + 1])
    assert wire.receive(Suback).packet_id == 1
    assert wire.message().payload == b"in pieces"
