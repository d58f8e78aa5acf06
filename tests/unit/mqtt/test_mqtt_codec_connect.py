"""CONNECT, CONNACK, AUTH and DISCONNECT: how a connection begins and ends."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import Auth, Connack, Connect, Disconnect, Properties, Publish, Will
from millstream.mqtt.reasons import CONNACK_OF_V4, MqttViolation, Reason
from millstream.mqtt.writer import encode
from tests.mqtt_bytes import packet, properties, read, reader, refusal, text

V4_HEAD = text("MQTT") + b"\4"
V5_HEAD = text("MQTT") + b"\5"


def connect(version: int, flags: int, *payload: bytes, about: bytes = b"\0") -> bytes:
    head = V5_HEAD if version == 5 else V4_HEAD
    return packet(0x10, head, bytes((flags, 0, 60)), about if version == 5 else b"", *payload)


def test_a_connect_says_who_comes_and_what_is_left_when_it_goes() -> None:
    will = Will("gone/c", b"bye", 1, True)
    for version in (4, 5):
        data = connect(
            version, 0xEE, text("c"), b"\0" if version == 5 else b"", text("gone/c"), text("bye"), text("u"), text("p")
        )
        assert read(data, 0) == Connect(version, "c", True, 60, "u", b"p", will)


def test_a_connect_of_version_5_has_properties_and_so_has_its_will() -> None:
    about = Properties(
        session_expiry_s=0xFFFF_FFFF, receive_maximum=1, maximum_packet_bytes=1, topic_alias_maximum=0,
        request_response_information=1, request_problem_information=0, user=(("k", "v"),),
        authentication_method="m", authentication_data=b"\0",
    )  # fmt: skip
    will = Will(
        "w", b"", properties=Properties(will_delay_s=9, payload_format=1, message_expiry_s=1, content_type="t",
                                        response_topic="r", correlation_data=b"\xff", user=(("k", "v"),)),
    )  # fmt: skip
    greeting = Connect(5, "", False, 0, None, b"only a password", will, about)
    assert read(encode(greeting, 5), 0) == greeting


def test_properties_that_may_be_repeated_are_not_read_without_end() -> None:
    pair = ("k", "v")
    most, more = Properties(user=(pair,) * 1_000), Properties(user=(pair,) * 1_001)
    for fine in (Connect(5, "c", properties=most), Connect(5, "c", will=Will("w", b"", properties=most))):
        assert read(encode(fine, 5), 0) == fine
    for wrong in (Connect(5, "c", properties=more), Connect(5, "c", will=Will("w", b"", properties=more))):
        violation = refusal(encode(wrong, 5), 0)
        assert violation.reason is Reason.QUOTA_EXCEEDED
        assert "more than 1000" in violation.message
    assert refusal(encode(Publish("a", b"", properties=more), 5)).reason is Reason.QUOTA_EXCEEDED


def test_the_version_is_known_after_the_connect() -> None:
    for version in (4, 5):
        reading = reader(0)
        reading.feed(connect(version, 2, text("c")) + encode(Publish("a", b"x"), version))
        assert [type(found) for found in reading.packets()] == [Connect, Publish]
        assert reading.version == version


def test_mqtt_3_1_0_1_the_first_packet_is_a_connect() -> None:
    for first in (0x30, 0x40, 0x82, 0xC0, 0xE0, 0xF0):
        assert refusal(bytes((first, 0)), 0).reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_1_0_2_a_second_connect_is_a_protocol_error() -> None:
    for version in (4, 5):
        assert refusal(connect(version, 2, text("c")) * 2, 0).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("name", "level", "answer_in"),
    [
        ("MQTT", 3, 4), ("MQTT", 6, 5), ("MQTT", 0, 4), ("MQIsdp", 3, 4), ("MQTT", 0x84, 4), ("MQTT", 0x85, 5),
        ("mqtt", 4, 0), ("MQTTX", 5, 0), ("", 5, 0), ("MQIsdp", 4, 0),
    ],
)  # fmt: skip
def test_mqtt_3_1_2_1_and_3_1_2_2_other_protocols_are_refused_as_they_can_be_told(
    name: str, level: int, answer_in: int
) -> None:
    reading = reader(0)
    reading.feed(packet(0x10, text(name), bytes((level, 2, 0, 60)), text("c")))
    with pytest.raises(MqttViolation, match=r"MQTT 3\.1\.1 and 5 are spoken here") as raised:
        list(reading.packets())
    assert raised.value.reason is Reason.UNSUPPORTED_PROTOCOL_VERSION
    assert reading.version == answer_in


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_2_3_the_reserved_flag_is_malformed(version: int) -> None:
    assert refusal(connect(version, 3, text("c")), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_2_9_a_will_that_was_announced_must_be_there(version: int) -> None:
    assert refusal(connect(version, 6, text("c")), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("flags", [0x08, 0x10, 0x18])
def test_mqtt_3_1_2_11_a_qos_without_a_will_is_malformed(version: int, flags: int) -> None:
    assert refusal(connect(version, flags | 2, text("c")), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_2_12_a_will_with_qos_3_is_malformed(version: int) -> None:
    about = b"\0" if version == 5 else b""
    read(connect(version, 0x16, text("c"), about, text("w"), text("")), 0)
    assert refusal(connect(version, 0x1E, text("c"), about, text("w"), text("")), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_2_13_retain_without_a_will_is_malformed(version: int) -> None:
    assert refusal(connect(version, 0x22, text("c")), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_2_16_a_user_name_that_was_not_announced_is_malformed(version: int) -> None:
    assert refusal(connect(version, 2, text("c"), text("u")), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_2_17_and_19_what_was_announced_must_be_there(version: int) -> None:
    assert refusal(connect(version, 0x82, text("c")), 0).reason is Reason.MALFORMED_PACKET
    assert refusal(connect(version, 0xC2, text("c"), text("u")), 0).reason is Reason.MALFORMED_PACKET


def test_mqtt_v4_3_1_2_22_a_password_without_a_user_name_is_malformed() -> None:
    assert refusal(connect(4, 0x42, text("c"), text("p")), 0).reason is Reason.MALFORMED_PACKET
    read(connect(5, 0x42, text("c"), text("p")), 0)


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_3_3_the_client_identifier_must_be_there(version: int) -> None:
    assert refusal(connect(version, 2), 0).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_1_3_4_and_11_and_12_names_are_utf_8(version: int) -> None:
    about = b"\0" if version == 5 else b""
    wrong = text(b"\xed\xa0\x80")
    assert refusal(connect(version, 2, wrong), 0).reason is Reason.MALFORMED_PACKET
    assert refusal(connect(version, 6, text("c"), about, wrong, text("")), 0).reason is Reason.MALFORMED_PACKET
    assert refusal(connect(version, 0x82, text("c"), wrong), 0).reason is Reason.MALFORMED_PACKET


def test_mqtt_v4_3_1_3_8_no_identifier_needs_a_clean_session() -> None:
    assert refusal(connect(4, 0, text("")), 0).reason is Reason.CLIENT_IDENTIFIER_NOT_VALID
    read(connect(4, 2, text("")), 0)
    read(connect(5, 0, text("")), 0)


@pytest.mark.parametrize("topic", ["", "a/+", "#"])
def test_a_will_needs_a_topic_to_be_published_to(topic: str) -> None:
    for version in (4, 5):
        data = connect(version, 6, text("c"), b"\0" if version == 5 else b"", text(topic), text("x"))
        assert refusal(data, 0).reason is Reason.TOPIC_NAME_INVALID


@pytest.mark.parametrize(
    "wrong", [b"\x21\0\0", b"\x27\0\0\0\0", b"\x17\x02", b"\x19\x02", b"\x16\0\1a"], ids=lambda data: f"{data[0]:#04x}"
)
def test_properties_of_a_connect_have_ranges(wrong: bytes) -> None:
    """Receive maximum, packet size, problem and response information, authentication data without a method."""
    assert refusal(connect(5, 2, text("c"), about=properties(wrong)), 0).reason is Reason.PROTOCOL_ERROR


def test_a_connect_has_no_property_of_its_will_and_the_other_way_round() -> None:
    delay, receive_maximum = properties(b"\x18\0\0\0\1"), properties(b"\x21\0\1")
    assert refusal(connect(5, 2, text("c"), about=delay), 0).reason is Reason.MALFORMED_PACKET
    data = connect(5, 6, text("c"), receive_maximum, text("w"), text("x"))
    assert refusal(data, 0).reason is Reason.MALFORMED_PACKET


# CONNACK


def test_connack_of_version_5_in_bytes() -> None:
    assert encode(Connack(0, True), 5) == b"\x20\3\1\0\0"
    assert encode(Connack(0x86), 5) == b"\x20\3\0\x86\0"


def test_the_return_codes_of_a_connack_of_v4() -> None:
    for reason, code in CONNACK_OF_V4.items():
        assert encode(Connack(reason), 4) == bytes((0x20, 2, 0, code))
        assert read(encode(Connack(reason), 4), 4, "server") == Connack(reason)
    assert encode(Connack(Reason.QUOTA_EXCEEDED), 4) == b"\x20\2\0\3"
    assert encode(Connack(0xEE), 4) == b"\x20\2\0\3"
    assert encode(Connack(Reason.UNSUPPORTED_PROTOCOL_VERSION), 0) == b"\x20\2\0\1"
    assert refusal(b"\x20\2\0\6", 4, "server").reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_2_2_1_reserved_flags_of_a_connack_are_malformed(version: int) -> None:
    data = packet(0x20, b"\2\0", b"\0" if version == 5 else b"")
    assert refusal(data, version, "server").reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_2_2_6_a_refused_connection_has_no_session(version: int) -> None:
    written = encode(Connack(Reason.NOT_AUTHORIZED, session_present=True), version)
    assert read(written, version, "server") == Connack(Reason.NOT_AUTHORIZED)
    wrong = written[:2] + b"\1" + written[3:]
    assert refusal(wrong, version, "server").reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_2_2_8_a_connack_has_one_of_its_reasons() -> None:
    assert refusal(packet(0x20, b"\0\x8e\0"), 5, "server").reason is Reason.PROTOCOL_ERROR


# DISCONNECT and AUTH


def test_a_disconnect_may_leave_out_what_is_normal() -> None:
    assert read(b"\xe0\0", 4) == read(b"\xe0\0", 5) == read(b"\xe0\1\0", 5) == read(b"\xe0\2\0\0", 5) == Disconnect()
    assert read(b"\xe0\1\4", 5) == Disconnect(Reason.DISCONNECT_WITH_WILL)
    assert encode(Disconnect(), 5) == b"\xe0\0"
    assert encode(Disconnect(0x8B), 5) == b"\xe0\1\x8b"


def test_a_disconnect_of_v4_has_nothing_in_it() -> None:
    assert refusal(b"\xe0\1\0", 4).reason is Reason.MALFORMED_PACKET
    assert refusal(b"\xe0\0", 4, "server").reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_14_2_1_a_disconnect_has_one_of_its_reasons() -> None:
    for wrong in (0x01, 0x10, 0x87, 0x8E, 0x9C, 0xFF):
        assert refusal(bytes((0xE0, 1, wrong))).reason is Reason.PROTOCOL_ERROR
    assert read(b"\xe0\1\x8e", peer="server") == Disconnect(Reason.SESSION_TAKEN_OVER)
    assert refusal(b"\xe0\1\4", peer="server").reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_14_2_2_only_a_client_changes_its_session_expiry() -> None:
    data = packet(0xE0, b"\0", properties(b"\x11\0\0\0\x09"))
    assert read(data) == Disconnect(properties=Properties(session_expiry_s=9))
    assert refusal(data, peer="server").reason is Reason.MALFORMED_PACKET


def test_mqtt_3_15_2_1_an_auth_has_one_of_its_reasons_and_a_method() -> None:
    method = properties(b"\x15\0\1m")
    assert read(packet(0xF0, b"\x18", method)) == Auth(0x18, Properties(authentication_method="m"))
    assert refusal(packet(0xF0, b"\0", method)).reason is Reason.PROTOCOL_ERROR
    assert refusal(packet(0xF0, b"\x87", method)).reason is Reason.PROTOCOL_ERROR
    assert refusal(packet(0xF0)).reason is Reason.PROTOCOL_ERROR
    assert refusal(packet(0xF0, b"\x18")).reason is Reason.PROTOCOL_ERROR
    assert refusal(packet(0xF0, b"\x19", method), peer="server").reason is Reason.PROTOCOL_ERROR


def test_mqtt_v4_has_no_auth() -> None:
    assert refusal(b"\xf0\0", 4).reason is Reason.MALFORMED_PACKET
    assert encode(Auth(), 4) == b""
