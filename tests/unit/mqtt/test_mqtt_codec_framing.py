"""Framing, texts and properties: what all MQTT packets have in common."""

from __future__ import annotations

import sys

import pytest

from millstream.mqtt.packets import (
    NO_PROPERTIES,
    Connack,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Publish,
    Suback,
)
from millstream.mqtt.properties import encode_properties
from millstream.mqtt.reader import PacketReader
from millstream.mqtt.reasons import MqttViolation, Reason
from millstream.mqtt.writer import encode, encode_publish
from tests.mqtt_bytes import packet, properties, read, reader, refusal, text

CONNECT = packet(0x10, text("MQTT"), b"\x04\x02\x00\x3c", text("c"))
PUBLISH = encode(Publish("a/b", b"hello", 1, packet_id=7), 5)


def publish_with(*parts: bytes) -> bytes:
    return packet(0x30, text("a"), properties(*parts), b"payload")


# Framing


def test_bytes_may_arrive_one_by_one() -> None:
    reading = reader(5)
    found: list[Packet] = []
    for byte in PUBLISH + PUBLISH:
        reading.feed(bytes((byte,)))
        found += reading.packets()
    assert found == [Publish("a/b", b"hello", 1, packet_id=7)] * 2


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_may_lie_in_any_kind_of_memory(kind: type) -> None:
    memory = bytearray(PUBLISH)
    reading = reader(5)
    reading.feed(kind(memory))
    (found,) = reading.packets()
    memory[:] = bytes(len(memory))
    assert found == Publish("a/b", b"hello", 1, packet_id=7)
    assert type(found.payload) is bytes


def test_who_stops_reading_early_gets_the_rest_later() -> None:
    reading = reader(5)
    reading.feed(encode(Puback(1), 5) + encode(Puback(2), 5) + PUBLISH[:4])
    reader_of_one = reading.packets()
    assert next(reader_of_one) == Puback(1)
    assert reading.has_more
    reading.feed(PUBLISH[4:])
    del reader_of_one
    assert list(reading.packets()) == [Puback(2), Publish("a/b", b"hello", 1, packet_id=7)]
    assert not reading.has_more


def test_packets_before_a_violation_are_read_and_none_after_it() -> None:
    reading = reader(5)
    reading.feed(encode(Puback(1), 5) + b"\x00\x00" + encode(Puback(2), 5))
    found = reading.packets()
    assert next(found) == Puback(1)
    for _ in range(2):
        with pytest.raises(MqttViolation, match="packet type 0 is reserved") as raised:
            list(reading.packets())
        assert raised.value.reason is Reason.MALFORMED_PACKET
        reading.feed(encode(Puback(3), 5))


def test_a_packet_that_is_too_long_is_refused_when_its_length_is_known() -> None:
    reading = reader(5, bytes_max=1000)
    reading.feed(b"\x30\xe5\x07")  # 997 bytes follow, which makes 1000
    assert list(reading.packets()) == []
    reading = reader(5, bytes_max=1000)
    reading.feed(b"\x30\xe6")
    assert list(reading.packets()) == []
    reading.feed(b"\x07")
    with pytest.raises(MqttViolation, match="a PUBLISH of 1001 bytes is longer than the 1000 allowed") as raised:
        list(reading.packets())
    assert raised.value.reason is Reason.PACKET_TOO_LARGE


def test_an_idle_reader_holds_no_memory() -> None:
    reading = reader(5)
    reading.feed(PUBLISH * 1000)
    assert len(list(reading.packets())) == 1000
    assert not hasattr(reading, "__dict__")
    held = [getattr(reading, name) for name in PacketReader.__slots__]
    assert sys.getsizeof(reading) + sum(sys.getsizeof(value) for value in held if isinstance(value, bytes)) < 200


def test_half_a_packet_holds_what_has_arrived_and_not_what_was_announced() -> None:
    reading = reader(5, bytes_max=200_000_000)
    reading.feed(b"\x30\xff\xff\xff\x3f" + bytes(100))
    assert list(reading.packets()) == []
    held = [getattr(reading, name) for name in PacketReader.__slots__]
    assert sum(sys.getsizeof(value) for value in held) < 1000


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01", b"MQUE\x01", b"\x00", b"\x1f"])
def test_another_protocol_is_refused_by_its_first_byte(data: bytes) -> None:
    assert refusal(data, version=0).reason in (Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)


def test_mqtt_1_5_5_1_a_length_in_more_bytes_than_needed_is_malformed() -> None:
    assert refusal(b"\xc0\x80\x00").reason is Reason.MALFORMED_PACKET
    padded_connect = packet(0x10, text("MQTT"), b"\x05\x02\x00\x3c\x00", text("c"))
    assert refusal(b"\x10" + bytes((padded_connect[1] | 0x80, 0)) + padded_connect[2:], 0).reason == 0x81


def test_mqtt_v4_a_length_in_more_bytes_than_needed_is_read() -> None:
    """3.1.1 does not forbid it, and there are devices that always write as many."""
    assert read(b"\xc0\x80\x80\x00", version=4) == Pingreq()
    read(b"\x10" + bytes((CONNECT[1] | 0x80, 0)) + CONNECT[2:], version=0)


def test_a_length_of_five_bytes_is_malformed() -> None:
    assert refusal(b"\x30\xff\xff\xff\xff").reason is Reason.MALFORMED_PACKET


# MQTT 2.1.3: flags

WRONG_FLAGS = [
    first
    for first in range(256)
    if first >> 4 not in (0, 3) and first & 0x0F != (2 if first >> 4 in (6, 8, 10) else 0)
]  # fmt: skip


def test_mqtt_2_1_3_1_reserved_flags_are_malformed_in_every_packet() -> None:
    """Also MQTT-3.6.1-1, MQTT-3.8.1-1, MQTT-3.10.1-1, MQTT-3.14.1-1 and MQTT-3.15.1-1."""
    for first in WRONG_FLAGS:
        if first >> 4 in (1, 4, 5, 6, 7, 8, 10, 12, 14, 15):
            assert refusal(bytes((first, 2, 0, 1))).reason is Reason.MALFORMED_PACKET, first
        if first >> 4 in (2, 4, 5, 6, 7, 9, 11, 13, 14, 15):
            assert refusal(bytes((first, 2, 0, 1)), peer="server").reason is Reason.MALFORMED_PACKET, first


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_sends_none_of_the_servers_packets(version: int) -> None:
    for first in (0x20, 0x90, 0xB0, 0xD0):
        assert refusal(bytes((first, 2, 0, 0)), version).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("version", [4, 5])
def test_a_server_sends_none_of_the_clients_packets(version: int) -> None:
    for first in (0x10, 0x82, 0xA2, 0xC0):
        assert refusal(bytes((first, 2, 0, 0)), version, "server").reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("first", [0x40, 0x50, 0x62, 0x70, 0x82, 0xA2])
def test_mqtt_2_2_1_3_packet_identifier_0_is_a_protocol_error(first: int) -> None:
    for version in (4, 5):
        assert refusal(packet(first, b"\0\0"), version).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("first", [0x40, 0x50, 0x62, 0x70, 0x82, 0xA2])
def test_a_packet_that_ends_within_its_identifier_is_malformed(first: int) -> None:
    for version in (4, 5):
        assert refusal(packet(first, b"\1"), version).reason is Reason.MALFORMED_PACKET


def test_pings_have_nothing_in_them() -> None:
    for version in (4, 5):
        assert read(b"\xc0\0", version) == Pingreq()
        assert read(b"\xd0\0", version, "server") == Pingresp()
        assert refusal(b"\xc0\1\0", version).reason is Reason.MALFORMED_PACKET


# MQTT 1.5.4: texts


@pytest.mark.parametrize(
    "wrong", [b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xc0\x80", b"\xff", b"\xf4\x90\x80\x80", b"\xe2\x82"]
)
def test_mqtt_1_5_4_1_surrogates_are_malformed(wrong: bytes) -> None:
    for version in (4, 5):
        end = b"\0" if version == 5 else b""
        assert refusal(packet(0x30, text(b"a" + wrong), end), version).reason is Reason.MALFORMED_PACKET
        assert refusal(packet(0x82, b"\0\1", end, text(wrong), b"\0"), version).reason is Reason.MALFORMED_PACKET
    assert refusal(publish_with(b"\x03", text(wrong))).reason is Reason.MALFORMED_PACKET


def test_mqtt_1_5_4_2_the_null_character_is_malformed() -> None:
    for version in (4, 5):
        end = b"\0" if version == 5 else b""
        assert refusal(packet(0x30, text("a\0b"), end), version).reason is Reason.MALFORMED_PACKET
        assert refusal(packet(0xA2, b"\0\1", end, text("a\0b")), version).reason is Reason.MALFORMED_PACKET
    assert refusal(publish_with(b"\x03", text("\0"))).reason is Reason.MALFORMED_PACKET


def test_mqtt_1_5_4_3_a_byte_order_mark_is_a_character_like_others() -> None:
    assert read(packet(0x30, text(b"\xef\xbb\xbfa"), b"\0")) == Publish("\ufeffa", b"")


def test_mqtt_1_5_7_1_both_texts_of_a_user_property_are_texts() -> None:
    assert refusal(publish_with(b"\x26", text("\0"), text("v"))).reason is Reason.MALFORMED_PACKET
    assert refusal(publish_with(b"\x26", text("k"), text(b"\xff"))).reason is Reason.MALFORMED_PACKET


# MQTT 2.2.2: properties


def test_mqtt_2_2_2_1_the_length_of_the_properties_must_be_there() -> None:
    assert refusal(packet(0x30, text("a"))).reason is Reason.MALFORMED_PACKET
    assert refusal(packet(0x82, b"\0\1")).reason is Reason.MALFORMED_PACKET


def test_properties_must_end_where_they_say() -> None:
    assert refusal(packet(0x30, text("a"), b"\x05\x01\x00")).reason is Reason.MALFORMED_PACKET
    assert refusal(packet(0x30, text("a"), b"\x01\x01\x00")).reason is Reason.MALFORMED_PACKET
    assert refusal(packet(0x30, text("a"), b"\x80")).reason is Reason.MALFORMED_PACKET
    assert refusal(packet(0x30, text("a"), b"\xff\xff\xff\xff\x01")).reason is Reason.MALFORMED_PACKET
    assert refusal(packet(0x30, text("a"), b"\x82\x00\x01\x01")).reason is Reason.MALFORMED_PACKET


def test_an_unknown_property_is_malformed() -> None:
    for identifier in (0x00, 0x04, 0x2B, 0x7F, 0x80, 0xFF):
        violation = refusal(publish_with(bytes((identifier, 0))))
        assert violation.reason is Reason.MALFORMED_PACKET
    assert str(refusal(publish_with(b"\x11\0\0\0\1"))) == "a PUBLISH has no property 0x11"


SINGLE = [
    b"\x01\x01", b"\x02\0\0\0\x09", b"\x03\0\1a", b"\x08\0\1a", b"\x09\0\1a", b"\x23\0\1",
]  # fmt: skip


@pytest.mark.parametrize("single", SINGLE, ids=lambda data: f"{data[0]:#04x}")
def test_a_property_that_stands_twice_is_a_protocol_error(single: bytes) -> None:
    read(publish_with(single))
    assert refusal(publish_with(single, single)).reason is Reason.PROTOCOL_ERROR


def test_a_flag_is_0_or_1() -> None:
    assert refusal(publish_with(b"\x01\x02")).reason is Reason.PROTOCOL_ERROR
    for identifier in (0x24, 0x25, 0x28, 0x29, 0x2A):
        connack = packet(0x20, b"\0\0", properties(bytes((identifier, 2))))
        assert refusal(connack, peer="server").reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_3_2_18_user_properties_keep_their_order_and_repetitions() -> None:
    user = (("b", "1"), ("a", "2"), ("b", "1"), ("", ""))
    found = read(encode(Publish("a", b"", properties=Properties(user=user)), 5))
    assert isinstance(found, Publish)
    assert found.properties.user == user


def test_packets_without_properties_share_one_object() -> None:
    found = read(PUBLISH)
    assert isinstance(found, Publish)
    assert found.properties is NO_PROPERTIES


# Writing


def test_texts_that_mqtt_cannot_carry_are_left_out_of_the_properties() -> None:
    user = (("a", "x" * 65_536), ("b", "\0"), ("c", "\ud800"), ("d", "kept"))
    written = encode_properties(Properties(content_type="\0", correlation_data=bytes(65_536), user=user))
    assert written == encode_properties(Properties(user=(("d", "kept"),)))


def test_mqtt_3_4_2_2_an_answer_is_shortened_to_what_its_reader_accepts() -> None:
    """Also MQTT-3.2.2-19, MQTT-3.2.2-20, MQTT-3.4.2-3, MQTT-3.9.2-1, MQTT-3.9.2-2, MQTT-3.14.2-3 and MQTT-3.14.2-4."""
    both = Properties(reason_string="because", user=(("why", "because"),))
    reason_only = Properties(reason_string="because")
    for make in (
        lambda properties: Puback(1, 0x97, properties),
        lambda properties: Connack(0x97, properties=properties),
        lambda properties: Suback(1, (0x97,), properties),
        lambda properties: Disconnect(0x97, properties),
    ):
        whole, shorter, shortest = (encode(make(value), 5) for value in (both, reason_only, NO_PROPERTIES))
        assert encode(make(both), 5, len(whole)) == whole
        assert encode(make(both), 5, len(whole) - 1) == shorter
        assert encode(make(both), 5, len(shorter) - 1) == shortest
        assert encode(make(both), 5, len(shortest) - 1) == b""


def test_mqtt_3_1_2_24_a_message_that_is_too_long_is_not_shortened() -> None:
    message = Publish("a", b"payload", properties=Properties(user=(("k", "v"),)))
    size = len(encode(message, 5))
    assert encode(message, 5, size)
    assert encode(message, 5, size - 1) == b""


def test_a_short_answer_keeps_to_the_limit_too() -> None:
    assert encode(Puback(1), 5, 4) == b"\x40\2\0\1"
    assert encode(Puback(1), 5, 3) == b""


def test_answers_of_v4_carry_no_reason() -> None:
    assert encode(Puback(1, 0x87, Properties(reason_string="no")), 4) == b"\x40\2\0\1"
    assert encode(Suback(1, (0, 1, 2, 0x80, 0x87, 0x8F)), 4) == b"\x90\x08\0\1\0\1\2\x80\x80\x80"


def test_a_server_of_v4_closes_without_a_word() -> None:
    assert encode(Disconnect(0x8E), 4) == b""


@pytest.mark.parametrize("size", [0, 100, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_a_publish_of_encoded_parts_is_what_the_packet_would_be(size: int) -> None:
    about = Properties(content_type="text/plain")
    for version in (4, 5):
        for qos, retain, dup in ((0, True, False), (1, False, True), (2, False, False)):
            message = Publish(
                "a/b", bytes(size), qos, retain, dup, 7 if qos else 0, about if version == 5 else NO_PROPERTIES
            )
            written = encode_publish(
                b"a/b", memoryview(bytes(size)), version=version, qos=qos, retain=retain, dup=dup, packet_id=7,
                properties=encode_properties(about),
            )  # fmt: skip
            reading = reader(version, bytes_max=3_000_000)
            reading.feed(written)
            assert list(reading.packets()) == [message]
            assert written == encode(message, version)
