"""Sessions: what is kept while a client is away, and what happens to exchanges that a lost connection interrupted."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import V4, V5, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel
from tests.e2e.mqtt.support import Wires, both_versions, payloads, unique


@both_versions
def test_3_1_2_4_a_clean_start_forgets_subscriptions_and_messages(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    reader.disconnect()
    writer.publish(topic, b"missed", 1)
    again = mqtt.durable(version, reader.client_id, clean=True)
    assert not again.connack.session_present
    again.nothing()
    writer.publish(topic, b"not subscribed any more", 1)
    again.nothing()


@both_versions
def test_3_1_2_5_a_session_is_resumed_with_its_subscriptions(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/+")
    reader.disconnect()
    again = mqtt.durable(version, reader.client_id)
    assert again.connack.session_present
    writer.publish(f"{topic}/x", b"still subscribed", 2)
    assert again.message().payload == b"still subscribed"


@both_versions
def test_3_1_2_6_no_session_means_a_new_one(mqtt: Wires, version: int) -> None:
    assert not mqtt.durable(version, clean=False).connack.session_present


@both_versions
def test_3_1_2_5_messages_wait_for_a_client_that_is_away(mqtt: Wires, version: int, topic: str) -> None:
    """QoS 1 and 2 must wait; QoS 0 may (3.1.2.4 of 3.1.1, 4.1)."""
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/#")
    reader.disconnect()
    for qos in (0, 1, 2):
        writer.publish(f"{topic}/{qos}", f"qos {qos}".encode(), qos)
    again = mqtt.durable(version, reader.client_id)
    found = again.messages(2)
    if found[0].qos == 0:
        found = [*found[1:], again.message()]
    assert [(message.topic, message.payload, message.qos) for message in sorted(found, key=lambda m: m.qos)] == [
        (f"{topic}/1", b"qos 1", 1),
        (f"{topic}/2", b"qos 2", 2),
    ]
    again.nothing()


@both_versions
@pytest.mark.parametrize("names", ["mappable", "/with space/and//empty levels"])
def test_4_6_0_many_messages_wait_in_order(mqtt: Wires, version: int, names: str) -> None:
    topic = f"{names}/{unique('t')}"
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    reader.drop()
    expected = [b"%d" % number for number in range(120)]
    for payload in expected:
        writer.publish(topic, payload, 1)
    again = mqtt.durable(version, reader.client_id)
    found = again.messages(120)
    assert payloads(found) == expected
    assert not any(message.dup for message in found), "3.3.1-1: they were never sent before"


@both_versions
def test_what_was_confirmed_does_not_come_back(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    for qos in (1, 2):
        writer.publish(topic, b"x", qos)
    reader.messages(2)
    reader.ping()
    reader.drop()
    again = mqtt.durable(version, reader.client_id)
    again.nothing()
    again.nothing(Pubrel)


@both_versions
@pytest.mark.parametrize("qos", [1, 2])
def test_4_4_0_1_an_unconfirmed_publish_is_sent_again_with_its_id(
    mqtt: Wires, version: int, qos: int, topic: str
) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.publish(topic, b"again", qos)
    first = reader.receive(Publish)
    assert not first.dup
    reader.drop()
    again = mqtt.durable(version, reader.client_id)
    repeated = again.message()
    assert (repeated.packet_id, repeated.payload, repeated.qos) == (first.packet_id, b"again", qos)
    assert repeated.dup, "3.3.1-1: a repetition says so"
    again.nothing()


@both_versions
def test_4_4_0_1_an_unconfirmed_pubrel_is_sent_again(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.publish(topic, b"once", 2)
    found = reader.receive(Publish)
    reader.send(Pubrec(found.packet_id))
    assert reader.receive(Pubrel).packet_id == found.packet_id
    reader.drop()
    again = mqtt.durable(version, reader.client_id)
    assert again.receive(Pubrel).packet_id == found.packet_id
    again.nothing(Publish)
    again.send(Pubcomp(found.packet_id))
    again.ping()
    again.drop()
    once_more = mqtt.durable(version, reader.client_id)
    once_more.nothing(Publish)
    once_more.nothing(Pubrel)


@both_versions
def test_4_6_0_1_repetitions_come_in_the_original_order_and_before_what_is_new(
    mqtt: Wires, version: int, topic: str
) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    for number in range(5):
        writer.publish(topic, b"%d" % number, 1)
    first = [reader.receive(Publish) for _ in range(5)]
    reader.drop()
    for number in range(5, 8):
        writer.publish(topic, b"%d" % number, 1)
    again = mqtt.durable(version, reader.client_id)
    found = again.messages(8)
    assert payloads(found) == [b"%d" % number for number in range(8)]
    assert [message.packet_id for message in found[:5]] == [message.packet_id for message in first]
    assert [message.dup for message in found] == [True] * 5 + [False] * 3


@both_versions
def test_4_3_3_10_a_publish_received_before_the_connection_was_lost_is_not_taken_twice(
    mqtt: Wires, version: int, topic: str
) -> None:
    reader, writer = mqtt.connect(version), mqtt.durable(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"once", 2, packet_id=42))
    writer.receive(Pubrec)
    writer.drop()
    again = mqtt.durable(version, writer.client_id)
    assert again.connack.session_present
    again.send(Publish(topic, b"once", 2, dup=True, packet_id=42))
    assert again.receive(Pubrec).packet_id == 42
    again.send(Pubrel(42))
    assert again.receive(Pubcomp).packet_id == 42
    assert reader.message().payload == b"once"
    reader.nothing()


@both_versions
def test_4_3_3_a_pubrel_after_the_connection_was_lost_still_completes(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.durable(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"once", 2, packet_id=43))
    writer.receive(Pubrec)
    writer.drop()
    again = mqtt.durable(version, writer.client_id)
    again.send(Pubrel(43))
    assert again.receive(Pubcomp).packet_id == 43
    assert reader.message().payload == b"once"
    again.send(Pubrel(43))
    assert again.receive(Pubcomp).packet_id == 43
    reader.nothing()


@both_versions
def test_a_clean_start_forgets_received_ids(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.durable(version)
    reader.subscribe(topic)
    writer.send(Publish(topic, b"abandoned", 2, packet_id=44))
    writer.receive(Pubrec)
    writer.drop()
    again = mqtt.durable(version, writer.client_id, clean=True)
    again.send(Publish(topic, b"new", 2, packet_id=44))
    again.receive(Pubrec)
    again.send(Pubrel(44))
    again.receive(Pubcomp)
    assert reader.message().payload in (b"new", b"abandoned")
    found = [packet.payload for packet in reader.inbox if isinstance(packet, Publish)]
    assert found in ([], [b"new"])


def test_4_1_0_2_a_session_of_311_without_clean_session_stays(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V4)
    reader.subscribe(topic)
    reader.disconnect()
    mqtt.skip(2)
    assert mqtt.durable(V4, reader.client_id).connack.session_present


@both_versions
def test_3_1_2_23_a_session_without_expiry_ends_with_its_connection(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version, expiry_s=0), mqtt.connect(version)
    reader.subscribe(topic)
    reader.disconnect()
    writer.publish(topic, b"nobody there", 1)
    again = mqtt.connect(version, reader.client_id, clean=False)
    assert not again.connack.session_present
    again.nothing()


def test_3_1_2_23_a_session_lives_as_long_as_it_asked_to(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V5, expiry_s=2)
    reader.subscribe(topic)
    reader.drop()
    mqtt.skip(0.5)
    again = mqtt.durable(V5, reader.client_id, expiry_s=1)
    assert again.connack.session_present
    again.disconnect()
    mqtt.skip(3.1)
    assert not mqtt.durable(V5, reader.client_id).connack.session_present


@pytest.mark.parametrize("qos", [1, 2])
def test_3_1_2_5_the_last_connection_of_a_session_gets_what_waited(mqtt: Wires, qos: int, topic: str) -> None:
    """It resumes the session, although it says that this ends with it."""
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    reader.disconnect()
    writer.publish(topic, b"waited", qos)
    last = mqtt.connect(V5, reader.client_id, clean=False)
    assert last.connack.session_present
    writer.publish(topic, b"live", qos)
    assert last.payloads(2) == [b"waited", b"live"]
    last.disconnect()
    assert not mqtt.durable(V5, reader.client_id).connack.session_present


def test_4_4_0_1_the_last_connection_of_a_session_completes_its_exchanges(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    for qos in (1, 2, 2):
        writer.publish(topic, b"x", qos)
    found = [reader.receive(Publish) for _ in range(3)]
    reader.send(Pubrec(found[2].packet_id))
    reader.receive(Pubrel)
    reader.drop()
    last = mqtt.connect(V5, reader.client_id, clean=False)
    assert last.receive(Pubrel).packet_id == found[2].packet_id
    assert [message.packet_id for message in last.messages(2)] == [message.packet_id for message in found[:2]]
    last.nothing()


def test_3_1_2_23_a_session_can_become_durable(mqtt: Wires, topic: str) -> None:
    """By the expiry of a later connection."""
    reader, writer = mqtt.durable(V5, expiry_s=60), mqtt.connect(V5)
    reader.subscribe(topic)
    middle = mqtt.connect(V5, reader.client_id, clean=False, expiry_s=0)
    writer.publish(topic, b"one", 1)
    assert middle.message().payload == b"one"
    again = mqtt.durable(V5, reader.client_id)
    if again.connack.session_present:  # taken over before it ended, or not
        again.disconnect()
        writer.publish(topic, b"two", 1)
        assert mqtt.durable(V5, reader.client_id).message().payload == b"two"


def test_4_1_0_1_a_session_does_not_expire_while_it_is_connected(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V5, expiry_s=1)
    reader.subscribe(topic)
    mqtt.skip(3)
    mqtt.connect(V5).publish(topic, b"still here", 1)
    assert reader.message().payload == b"still here"


def test_3_14_2_2_a_disconnect_can_change_the_expiry(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V5, expiry_s=1)
    reader.subscribe(topic)
    reader.disconnect(0, Properties(session_expiry_s=30))
    mqtt.skip(3.1)
    again = mqtt.durable(V5, reader.client_id, expiry_s=30)
    assert again.connack.session_present
    again.disconnect(0, Properties(session_expiry_s=0))
    assert not mqtt.durable(V5, reader.client_id).connack.session_present


def test_a_session_of_311_and_of_5_are_one(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V4)
    reader.subscribe(topic)
    reader.disconnect()
    mqtt.connect(V5).publish(topic, b"across", 1)
    again = mqtt.durable(V5, reader.client_id)
    assert again.connack.session_present
    assert again.message().payload == b"across"


@both_versions
def test_3_10_4_3_an_unsubscribe_does_not_forget_what_is_in_flight(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic)
    writer.publish(topic, b"in flight", 2)
    found = reader.receive(Publish)
    reader.unsubscribe(topic)
    reader.drop()
    again = mqtt.durable(version, reader.client_id)
    assert again.message().packet_id == found.packet_id
    writer.publish(topic, b"new", 2)
    again.nothing()


@both_versions
def test_an_unsubscribed_session_gets_nothing_on_its_return(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic, f"{topic}/kept", qos=1)
    reader.unsubscribe(topic)
    reader.disconnect()
    writer.publish(topic, b"no", 1)
    writer.publish(f"{topic}/kept", b"yes", 1)
    again = mqtt.durable(version, reader.client_id)
    assert again.message().payload == b"yes"
    again.nothing()


@both_versions
def test_the_qos_of_a_waiting_message_is_that_of_the_subscription(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic, qos=1)
    reader.disconnect()
    writer.publish(topic, b"x", 2)
    assert mqtt.durable(version, reader.client_id).message().qos == 1


@both_versions
def test_two_sessions_wait_and_confirm_independently(mqtt: Wires, version: int, topic: str) -> None:
    one, two = mqtt.durable(version), mqtt.durable(version)
    for reader in (one, two):
        reader.subscribe(topic, qos=1)
        reader.disconnect()
    writer = mqtt.connect(version)
    for number in range(3):
        writer.publish(topic, b"%d" % number, 1)
    back = mqtt.durable(version, one.client_id)
    assert back.payloads(3) == [b"0", b"1", b"2"]
    back.disconnect()
    assert mqtt.durable(version, two.client_id).payloads(3) == [b"0", b"1", b"2"]
    mqtt.durable(version, one.client_id).nothing()


@both_versions
def test_confirmations_out_of_order_leave_only_what_is_missing(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic, qos=1)
    for number in range(4):
        writer.publish(topic, b"%d" % number, 1)
    found = [reader.receive(Publish) for _ in range(4)]
    reader.send(Puback(found[3].packet_id), Puback(found[1].packet_id))
    reader.ping()
    reader.drop()
    again = mqtt.durable(version, reader.client_id)
    assert again.payloads(2) == [b"0", b"2"]
    again.nothing()
