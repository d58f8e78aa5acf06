"""Bytes that are no MQTT: the connection ends, nothing else does.  4.8.0-1 of 3.1.1, 4.13.1-1 and 4.13.2-1 of 5."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import V4, V5, Connack, Connect
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.e2e.mqtt.support import REFERENCE, Wires, both_versions, unique

#: What the reference takes without complaint, although it may not.
LENIENT = {
    "2_1_3_1 PINGREQ with flags",
    "2_1_3_1 DISCONNECT with flags",
    "2_1_3_1 PUBACK with flags",
    "2_1_3_1 PUBREC with flags",
    "2_1_3_1 PUBCOMP with flags",
    "PINGREQ with a body",
    "SUBACK from a client",
    "UNSUBACK from a client",
    "PINGRESP from a client",
    "payload format 2",
}

#: Packets after a successful CONNECT, that are wrong in both versions.
WRONG = {
    "2_1_2 packet type 0": b"\x00\x00",
    "2_1_3_1 SUBSCRIBE without its flags": b"\x80\x06\x00\x01\x00\x01a\x00",
    "2_1_3_1 UNSUBSCRIBE without its flags": b"\xa0\x05\x00\x01\x00\x01a",
    "3_6_1_1 PUBREL without its flags": b"\x60\x02\x00\x01",
    "2_1_3_1 PINGREQ with flags": b"\xc1\x00",
    "2_1_3_1 DISCONNECT with flags": b"\xe1\x00",
    "2_1_3_1 PUBACK with flags": b"\x41\x02\x00\x01",
    "2_1_3_1 PUBREC with flags": b"\x51\x02\x00\x01",
    "2_1_3_1 PUBCOMP with flags": b"\x71\x02\x00\x01",
    "2_1_4 a length of five bytes": b"\x30\xff\xff\xff\xff\x01",
    "3_3_1_4 PUBLISH with QoS 3": b"\x36\x06\x00\x01a\x00\x01x",
    "PUBLISH that ends in its topic": b"\x30\x03\x00\x05a",
    "2_2_1 PUBLISH without a packet id": b"\x32\x03\x00\x01a",
    "2_2_1_3 PUBLISH with packet id 0": b"\x32\x05\x00\x01a\x00\x00",
    "1_5_4_1 a topic with half a surrogate": b"\x30\x06\x00\x03\xed\xa0\x80x",
    "1_5_4_1 a topic that is no UTF-8": b"\x30\x05\x00\x02\xc3\x28x",
    "1_5_4_1 a topic in a longer form than needed": b"\x30\x05\x00\x02\xc0\xafx",
    "1_5_4_2 a topic with U+0000": b"\x30\x05\x00\x02a\x00x",
    "SUBSCRIBE that ends in its id": b"\x82\x01\x00",
    "CONNACK from a client": b"\x20\x02\x00\x00",
    "SUBACK from a client": b"\x90\x03\x00\x01\x00",
    "UNSUBACK from a client": b"\xb0\x02\x00\x01",
    "PINGRESP from a client": b"\xd0\x00",
    "PUBACK without an id": b"\x40\x00",
    "PINGREQ with a body": b"\xc0\x01\x00",
}
WRONG_IN_4 = {
    "3_8_3_3 SUBSCRIBE without a filter": b"\x82\x02\x00\x01",
    "3_8_3_4 SUBSCRIBE with QoS 3": b"\x82\x06\x00\x01\x00\x01a\x03",
    "3_8_3_4 SUBSCRIBE with reserved bits": b"\x82\x06\x00\x01\x00\x01a\x40",
    "2_3_1_1 SUBSCRIBE with packet id 0": b"\x82\x06\x00\x00\x00\x01a\x00",
    "SUBSCRIBE that ends before its QoS": b"\x82\x05\x00\x01\x00\x01a",
    "3_10_3_2 UNSUBSCRIBE without a filter": b"\xa2\x02\x00\x01",
    "2_3_1_1 UNSUBSCRIBE with packet id 0": b"\xa2\x05\x00\x00\x00\x01a",
    "AUTH, which 3.1.1 does not know": b"\xf0\x00",
}
WRONG_IN_5 = {
    "3_8_3_2 SUBSCRIBE without a filter": b"\x82\x03\x00\x01\x00",
    "3_8_3 SUBSCRIBE with QoS 3": b"\x82\x07\x00\x01\x00\x00\x01a\x03",
    "3_8_3_5 SUBSCRIBE with reserved bits": b"\x82\x07\x00\x01\x00\x00\x01a\x40",
    "3_8_3 SUBSCRIBE with retain handling 3": b"\x82\x07\x00\x01\x00\x00\x01a\x30",
    "2_2_1_3 SUBSCRIBE with packet id 0": b"\x82\x07\x00\x00\x00\x00\x01a\x00",
    "3_8_2 SUBSCRIBE with subscription identifier 0": b"\x82\x09\x00\x01\x02\x0b\x00\x00\x01a\x00",
    "3_10_3_2 UNSUBSCRIBE without a filter": b"\xa2\x03\x00\x01\x00",
    "a property that does not exist": b"\x30\x06\x00\x01a\x02\x7f\x00",
    "a property of another packet": b"\x30\x07\x00\x01a\x03\x13\x00\x05",
    "properties longer than the packet": b"\x30\x05\x00\x01a\x10x",
    "payload format 2": b"\x30\x06\x00\x01a\x02\x01\x02",
    "a user property that is no UTF-8": b"\x30\x0b\x00\x01a\x07\x26\x00\x01\xff\x00\x01b",
    "3_15_1_1 AUTH with flags": b"\xf1\x00",
}


@both_versions
@pytest.mark.parametrize("name", [*WRONG, *WRONG_IN_4, *WRONG_IN_5])
def test_4_13_a_malformed_packet_ends_the_connection(mqtt: Wires, version: int, name: str) -> None:
    data = WRONG.get(name) or (WRONG_IN_4 if version == V4 else WRONG_IN_5).get(name)
    if data is None:
        pytest.skip("of the other version")
    if REFERENCE and name in LENIENT:
        pytest.skip(f"{REFERENCE} takes it")
    wire = mqtt.connect(version)
    wire.send_bytes(data)
    wire.refused(
        Reason.MALFORMED_PACKET,
        Reason.PROTOCOL_ERROR,
        Reason.TOPIC_NAME_INVALID,
        Reason.QOS_NOT_SUPPORTED,
        Reason.PACKET_TOO_LARGE,
    )
    mqtt.connect(version, wire.client_id).ping()


@both_versions
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 20,
        b"\x10\x00",
        b"\x10\x02\x00\x04",
        b"\x11\x10\x00\x04MQTT\x04\x02\x00\x3c\x00\x04abcd",
    ],
    ids=["HTTP", "TLS", "zeros", "an empty CONNECT", "half a CONNECT", "2_1_3_1 CONNECT with flags"],
)
def test_3_1_4_1_what_is_no_connect_is_not_let_in(mqtt: Wires, version: int, data: bytes) -> None:
    wire = mqtt.open(version)
    wire.send_bytes(data)
    for packet in wire.end():
        assert isinstance(packet, Connack)
        assert packet.reason


@both_versions
def test_3_1_3_4_a_client_id_is_utf_8(mqtt: Wires, version: int) -> None:
    data = encode(Connect(version, "abcdefgh"), version)
    for wrong in (b"abc\xc3\x28fgh", b"abc\xed\xa0\x80gh", b"abc\x00efgh"):
        wire = mqtt.open(version)
        wire.send_bytes(data.replace(b"abcdefgh", wrong))
        wire.refused()


@both_versions
def test_a_connect_that_never_ends_is_not_waited_for(mqtt: Wires, version: int) -> None:
    if REFERENCE:
        pytest.skip(f"{REFERENCE} waits for minutes")
    wire, whole = mqtt.open(version), encode(Connect(version, unique("c")), version)
    wire.send_bytes(whole[:8])
    mqtt.skip(60)
    assert wire.end() == []


@both_versions
def test_1_5_4_3_a_byte_order_mark_is_a_character(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    name = f"\ufeff{topic}"
    wire.subscribe(name, topic)
    wire.publish(name, b"marked", 1)
    assert wire.message().topic == name
    wire.nothing()


def test_1_5_5_1_a_length_in_more_bytes_than_needed_is_malformed(mqtt: Wires) -> None:
    if REFERENCE:
        pytest.skip(f"{REFERENCE} takes it")
    wire = mqtt.connect(V5)
    wire.send_bytes(b"\xc0\x80\x00")
    wire.refused(Reason.MALFORMED_PACKET)
