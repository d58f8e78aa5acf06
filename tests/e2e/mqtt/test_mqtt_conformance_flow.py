"""What keeps either side from being overrun: keep-alive, receive maximum, packet sizes and topic aliases."""

from __future__ import annotations

import time

import pytest

from millstream.mqtt.packets import (
    V5,
    Connack,
    Connect,
    Disconnect,
    Filter,
    Pingreq,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.e2e.mqtt.support import RECEIVE_MAXIMUM, REFERENCE, Wires, both_versions, not_in_reference, unique

# --- keep-alive ------------------------------------------------------------------------------------------------------


@both_versions
def test_3_1_2_22_a_silent_client_is_closed(mqtt: Wires, version: int) -> None:
    wire = mqtt.connect(version, keep_alive_s=2)
    mqtt.skip(1)
    wire.ping()
    mqtt.skip(3.5)
    wire.refused(Reason.KEEP_ALIVE_TIMEOUT)


@both_versions
def test_3_1_2_22_who_says_something_stays(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version, keep_alive_s=2)
    wire.subscribe(topic)
    for _ in range(3):
        mqtt.skip(1.2)
        wire.publish(topic, b"x", 1)
        wire.message()
    wire.ping()


@both_versions
def test_3_1_2_22_to_receive_is_not_to_speak(mqtt: Wires, version: int, topic: str) -> None:
    """The keep-alive counts what a client sends."""
    wire, writer = mqtt.connect(version, keep_alive_s=1), mqtt.connect(version)
    wire.subscribe(topic, qos=0)
    if REFERENCE:
        mqtt.skip(6)  # it looks every few seconds
    else:
        for _ in range(3):
            mqtt.skip(0.6)
            writer.publish(topic, b"x", 1)
    wire.refused(Reason.KEEP_ALIVE_TIMEOUT)


# --- receive maximum -------------------------------------------------------------------------------------------------


def test_3_3_4_9_no_more_is_in_flight_than_a_client_allows(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.connect(V5, receive_maximum=2), mqtt.connect(V5)
    reader.subscribe(topic)
    for number in range(4):
        writer.publish(topic, b"%d" % number, 1)
    first, second = reader.receive(Publish), reader.receive(Publish)
    reader.nothing()
    reader.send(Puback(first.packet_id))
    third = reader.receive(Publish)
    if REFERENCE:
        return  # it forgets to count after the first acknowledgement
    reader.nothing()
    reader.send(Puback(second.packet_id), Puback(third.packet_id))
    assert reader.receive(Publish).payload == b"3"


def test_4_9_0_2_a_qos_2_exchange_counts_until_its_pubcomp(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.connect(V5, receive_maximum=1), mqtt.connect(V5)
    reader.subscribe(topic)
    for number in range(2):
        writer.publish(topic, b"%d" % number, 2)
    first = reader.receive(Publish)
    reader.nothing()
    reader.send(Pubrec(first.packet_id))
    reader.receive(Pubrel)
    reader.nothing()
    reader.send(Pubcomp(first.packet_id))
    assert reader.receive(Publish).payload == b"1"


def test_3_3_4_10_other_packets_and_qos_0_do_not_wait(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.connect(V5, receive_maximum=1), mqtt.connect(V5)
    reader.subscribe(topic, f"{topic}/zero")
    writer.publish(topic, b"blocks", 1)
    writer.publish(topic, b"waits", 1)
    assert reader.receive(Publish).payload == b"blocks"
    reader.ping()
    assert reader.subscribe(f"{topic}/other") == (2,)
    assert reader.publish(f"{topic}/nobody", b"x", 2) < 0x80
    writer.publish(f"{topic}/zero", b"qos 0", 0)
    assert reader.receive(Publish).payload == b"qos 0"


@not_in_reference("it repeats everything at once")
def test_4_9_0_the_window_is_new_after_a_reconnect(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5, receive_maximum=3), mqtt.connect(V5)
    reader.subscribe(topic)
    for number in range(5):
        writer.publish(topic, b"%d" % number, 1)
    for _ in range(3):
        reader.receive(Publish)
    reader.drop()
    again = mqtt.durable(V5, reader.client_id, receive_maximum=2)
    assert [again.receive(Publish).payload for _ in range(2)] == [b"0", b"1"]
    again.nothing()


@not_in_reference("it refuses the message with a PUBREC")
def test_3_3_4_7_a_client_that_sends_more_than_it_may_is_refused(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    maximum = wire.connack.properties.receive_maximum
    assert maximum is not None
    wire.send(*[Publish(topic, b"x", 2, packet_id=number + 1) for number in range(maximum)])
    for _ in range(maximum):
        wire.receive(Pubrec)
    wire.send(Publish(topic, b"x", 2, packet_id=maximum + 1))
    wire.refused(Reason.RECEIVE_MAXIMUM_EXCEEDED)


@not_in_reference("it refuses the message with a PUBREC")
def test_a_client_that_goes_on_talking_is_still_told_why_it_was_refused(mqtt: Wires, topic: str) -> None:
    """It answers whatever it reads, and reads the farewell last: it must not run into a closed connection before."""
    wire = mqtt.connect(V5)
    maximum = wire.connack.properties.receive_maximum
    assert maximum is not None
    wire.send(*[Publish(topic, b"x", 2, packet_id=number + 1) for number in range(maximum + 1)])
    while isinstance(packet := wire.next(), Pubrec):
        time.sleep(0.002)
        wire.send(Pubrel(packet.packet_id))
    while isinstance(packet, Pubcomp):
        packet = wire.next()
    assert isinstance(packet, Disconnect)
    assert packet.reason == Reason.RECEIVE_MAXIMUM_EXCEEDED


def test_4_9_0_3_completed_exchanges_make_room(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    for number in range(60):
        assert wire.publish(topic, b"%d" % number, 2) < 0x80


# --- packet sizes ----------------------------------------------------------------------------------------------------


def test_3_2_2_15_a_packet_beyond_the_servers_maximum_is_refused(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    maximum = wire.connack.properties.maximum_packet_bytes
    assert maximum is not None
    overhead = len(encode(Publish(topic, b"x" * 90_000), V5)) - 90_000
    wire.subscribe(topic)
    wire.publish(topic, b"x" * (maximum - overhead))
    assert len(wire.message().payload) == maximum - overhead
    wire.send_bytes(encode(Publish(topic, b"x" * (maximum - overhead + 10)), V5)[:1000])
    wire.refused(Reason.PACKET_TOO_LARGE)


def test_3_1_2_24_and_25_a_client_gets_nothing_beyond_its_maximum(mqtt: Wires, topic: str) -> None:
    reader, other, writer = mqtt.connect(V5, maximum_packet_bytes=128), mqtt.connect(V5), mqtt.connect(V5)
    for wire in (reader, other):
        wire.subscribe(topic)
    for qos in (0, 1, 2):
        writer.publish(topic, b"." * 128, qos)
        writer.publish(topic, b"small", qos)
    assert reader.payloads(3) == [b"small"] * 3
    assert len(other.messages(6)) == 6
    reader.nothing()


@not_in_reference("the message that it does not send is in flight for ever")
def test_3_1_2_25_a_message_that_is_too_large_does_not_block_the_session(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5, maximum_packet_bytes=128, receive_maximum=1), mqtt.connect(V5)
    reader.subscribe(topic)
    reader.disconnect()
    for payload in (b"." * 200, b"one", b"." * 200, b"two"):
        writer.publish(topic, payload, 1)
    again = mqtt.durable(V5, reader.client_id, maximum_packet_bytes=128, receive_maximum=1)
    assert again.payloads(2) == [b"one", b"two"]
    again.nothing()


# --- topic aliases ---------------------------------------------------------------------------------------------------


def test_3_3_2_12_a_client_may_use_every_alias_up_to_the_maximum(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    maximum = wire.connack.properties.topic_alias_maximum
    assert maximum is not None
    wire.subscribe(f"{topic}/+")
    for alias in (1, maximum):
        wire.publish(f"{topic}/{alias}", b"sets", 1, properties=Properties(topic_alias=alias))
        assert wire.message().topic == f"{topic}/{alias}"
    for alias in (1, maximum):
        wire.publish("", b"uses", 1, properties=Properties(topic_alias=alias))
        found = wire.message()
        assert (found.topic, found.payload) == (f"{topic}/{alias}", b"uses")
        assert found.properties == Properties(), "3.3.2-7: an alias belongs to one connection"


def test_3_3_2_an_alias_can_be_given_to_another_topic(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.subscribe(f"{topic}/+")
    for name in ("a", "b"):
        wire.publish(f"{topic}/{name}", b"sets", 0, properties=Properties(topic_alias=1))
    wire.publish("", b"uses", 0, properties=Properties(topic_alias=1))
    assert [message.topic for message in wire.messages(3)] == [f"{topic}/a", f"{topic}/b", f"{topic}/b"]


def test_3_3_2_8_and_9_wrong_aliases_are_refused(mqtt: Wires, topic: str) -> None:
    good = encode(Publish(topic, b"x", 0, properties=Properties(topic_alias=0x0505)), V5)
    for alias in (b"\x23\x00\x00", b"\x23\x7f\xff"):
        wire = mqtt.connect(V5)
        wire.send_bytes(good.replace(b"\x23\x05\x05", alias))
        wire.refused(Reason.TOPIC_ALIAS_INVALID, Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)


def test_3_3_2_an_alias_that_means_nothing_is_refused(mqtt: Wires) -> None:
    wire = mqtt.connect(V5)
    wire.send(Publish("", b"x", 0, properties=Properties(topic_alias=1)))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.TOPIC_ALIAS_INVALID)


def test_3_3_2_7_aliases_end_with_the_connection(mqtt: Wires, topic: str) -> None:
    wire = mqtt.durable(V5)
    wire.publish(topic, b"x", 1, properties=Properties(topic_alias=1))
    wire.disconnect()
    again = mqtt.durable(V5, wire.client_id)
    again.publish(topic, b"still here", 1)
    again.send(Publish("", b"x", 0, properties=Properties(topic_alias=1)))
    again.refused(Reason.PROTOCOL_ERROR, Reason.TOPIC_ALIAS_INVALID)


@not_in_reference("it uses no aliases")
def test_3_1_2_26_a_server_uses_aliases_within_the_clients_maximum(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.connect(V5, topic_alias_maximum=1), mqtt.connect(V5)
    reader.subscribe(f"{topic}/+")
    for qos in (0, 1, 2):
        writer.publish(f"{topic}/a", b"x", qos)
    first, second, third = reader.messages(3)
    assert (first.topic, first.properties.topic_alias) == (f"{topic}/a", 1)
    assert (second.topic, second.properties.topic_alias) == ("", 1)
    assert (third.topic, third.properties.topic_alias) == ("", 1)
    writer.publish(f"{topic}/b", b"x", 1)
    found = reader.message()
    assert (found.topic, found.properties.topic_alias) in ((f"{topic}/b", None), (f"{topic}/b", 1))


@not_in_reference("it uses no aliases")
def test_3_1_2_24_with_an_alias_as_well_no_packet_is_larger_than_the_client_takes(mqtt: Wires, topic: str) -> None:
    limit = 300
    reader, writer = mqtt.connect(V5, topic_alias_maximum=10, maximum_packet_bytes=limit), mqtt.connect(V5)
    reader.subscribe(f"{topic}/+", qos=1)
    told = Properties(user=(("k", "v" * 120),))  # 126 bytes: with an alias the length of all of them has two bytes
    spare = limit - len(encode(Publish(f"{topic}/0", b"", 1, packet_id=1, properties=told), V5))
    for number in range(8):
        writer.publish(f"{topic}/{number}", bytes(spare - number), 1, properties=told)
    writer.publish(f"{topic}/8", b"last", 1)
    found = []
    while not found or found[-1].payload != b"last":
        found.append(reader.message())
    assert [len(message.payload) for message in found] == [spare - 4, spare - 5, spare - 6, spare - 7, 4]
    assert max(len(encode(message, V5)) for message in found) == limit


def test_3_1_2_27_a_client_that_allows_no_aliases_gets_none(mqtt: Wires, topic: str) -> None:
    for maximum in (None, 0):
        reader = mqtt.connect(V5, topic_alias_maximum=maximum)
        reader.subscribe(topic)
        for qos in (0, 1, 2):
            reader.publish(topic, b"x", qos)
        for message in reader.messages(3):
            assert (message.topic, message.properties.topic_alias) == (topic, None)


@not_in_reference("it uses no aliases")
def test_3_3_2_7_the_servers_aliases_end_with_the_connection(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5, topic_alias_maximum=5), mqtt.connect(V5)
    reader.subscribe(topic)
    writer.publish(topic, b"x", 1)
    assert reader.message().topic == topic
    writer.publish(topic, b"unconfirmed", 1)
    assert reader.receive(Publish).topic == ""
    reader.drop()
    again = mqtt.durable(V5, reader.client_id, topic_alias_maximum=5)
    assert again.message().topic == topic


# --- clients that do not read ----------------------------------------------------------------------------------------


@both_versions
def test_a_client_that_does_not_read_does_not_stop_the_others(mqtt: Wires, version: int, topic: str) -> None:
    slow, quick, writer = mqtt.connect(version), mqtt.connect(version), mqtt.connect(version)
    for wire in (slow, quick):
        wire.subscribe(topic, qos=0)
    begin_s = time.monotonic()
    for _ in range(200):
        writer.publish(topic, b"x" * 50_000, 0)
        quick.message()
    assert time.monotonic() - begin_s < 20
    slow.send(Pingreq())


@not_in_reference("sends packets that are too large, or closes the connection without a word")
@pytest.mark.parametrize("limit", [4, 5, 12])
def test_3_2_0_1_a_client_whose_packets_are_too_small_for_the_connack_is_not_left_waiting(
    mqtt: Wires, limit: int
) -> None:
    wire, client_id = mqtt.open(), unique("c")
    wire.send(Connect(V5, client_id, properties=Properties(maximum_packet_bytes=limit, session_expiry_s=60)))
    said = wire.end()
    assert [(type(packet), packet.reason) for packet in said] == (  # type: ignore[union-attr]
        [(Connack, Reason.PACKET_TOO_LARGE)] if limit >= 5 else []
    )
    assert not mqtt.durable(V5, client_id).connack.session_present


@both_versions
@pytest.mark.parametrize("confirmed", [1, 4, 5])
def test_3_3_4_a_client_that_keeps_most_of_what_it_has_unconfirmed_gets_more_all_the_same(
    mqtt: Wires, version: int, topic: str, confirmed: int
) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(topic, qos=1)
    reader.disconnect()
    window = 10 if version == V5 else RECEIVE_MAXIMUM if REFERENCE else 100
    for number in range(2 * window):
        writer.publish(topic, b"%d" % number, 1)
    again = mqtt.durable(version, reader.client_id, **({"receive_maximum": window} if version == V5 else {}))
    got = [again.receive(Publish) for _ in range(window)]
    again.nothing()
    for message in got[:confirmed]:
        again.send(Puback(message.packet_id))
    assert [again.receive(Publish).payload for _ in range(confirmed)] == [
        b"%d" % (window + number) for number in range(confirmed)
    ]
    again.nothing()


@not_in_reference("sends packets that are too large")
def test_3_1_2_24_an_answer_that_is_too_large_ends_the_connection(mqtt: Wires, topic: str) -> None:
    filters = [f"{topic}/{number}" for number in range(60)]
    wire = mqtt.durable(V5, maximum_packet_bytes=40)
    wire.send(Subscribe(1, tuple(Filter(name, 1) for name in filters)))
    wire.refused(Reason.PACKET_TOO_LARGE)
    wire = mqtt.durable(V5, wire.client_id, maximum_packet_bytes=40)
    wire.send(Unsubscribe(1, tuple(filters)))
    wire.refused(Reason.PACKET_TOO_LARGE)
