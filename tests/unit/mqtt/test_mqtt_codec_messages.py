"""PUBLISH and its answers, SUBSCRIBE and UNSUBSCRIBE and theirs."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import (
    Filter,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.mqtt_bytes import packet, properties, read, refusal, text

ANSWERS = [(0x40, Puback), (0x50, Pubrec), (0x62, Pubrel), (0x70, Pubcomp)]


def about(version: int, *parts: bytes) -> bytes:
    return properties(*parts) if version == 5 else b""


# PUBLISH


@pytest.mark.parametrize("version", [4, 5])
def test_a_publish_in_bytes(version: int) -> None:
    assert read(packet(0x30, text("a/b"), about(version), b"x"), version) == Publish("a/b", b"x")
    assert read(packet(0x3D, text("a"), b"\1\2", about(version)), version) == Publish("a", b"", 2, True, True, 258)


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_3_1_2_a_repetition_with_qos_0_is_malformed(version: int) -> None:
    assert refusal(packet(0x38, text("a"), about(version)), version).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("first", [0x36, 0x37, 0x3E, 0x3F])
def test_mqtt_3_3_1_4_qos_3_is_malformed(version: int, first: int) -> None:
    assert refusal(packet(first, text("a"), b"\0\1", about(version)), version).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_3_2_1_a_publish_has_a_topic(version: int) -> None:
    for body in (b"", b"\0", b"\0\2a", text(b"a\xff") + about(version)):
        assert refusal(packet(0x30, body), version).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_4_7_3_1_an_empty_topic_is_a_protocol_error(version: int) -> None:
    assert refusal(packet(0x30, text(""), about(version)), version).reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_3_2_8_an_empty_topic_needs_an_alias_and_none_is_0() -> None:
    alias = properties(b"\x23\0\5")
    assert read(packet(0x30, text(""), alias)) == Publish("", b"", properties=Properties(topic_alias=5))
    assert refusal(packet(0x30, text("a"), properties(b"\x23\0\0"))).reason is Reason.TOPIC_ALIAS_INVALID


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_2_2_1_3_a_publish_with_qos_has_an_identifier(version: int) -> None:
    for first in (0x32, 0x34):
        assert refusal(packet(first, text("a"), b"\0\0", about(version)), version).reason is Reason.PROTOCOL_ERROR
        assert refusal(packet(first, text("a"), b"\1"), version).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("topic", ["", "a/+", "a/#"])
def test_mqtt_3_3_2_14_a_response_topic_has_no_wildcard(topic: str) -> None:
    assert refusal(packet(0x30, text("a"), properties(b"\x08", text(topic)))).reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_3_4_6_a_client_sends_no_subscription_identifier() -> None:
    data = packet(0x30, text("a"), properties(b"\x0b\x80\x01\x0b\x07"))
    assert refusal(data).reason is Reason.PROTOCOL_ERROR
    assert read(data, peer="server") == Publish("a", b"", properties=Properties(subscription_ids=(128, 7)))
    zero = packet(0x30, text("a"), properties(b"\x0b\0"))
    assert refusal(zero, peer="server").reason is Reason.PROTOCOL_ERROR


def test_properties_of_any_length_are_read() -> None:
    for size in (100, 120, 130, 20_000, 65_535):
        message = Publish("a", b"x" * 300, properties=Properties(correlation_data=bytes(size)))
        assert read(encode(message, 5)) == message


# Its answers


@pytest.mark.parametrize(("first", "kind"), ANSWERS)
def test_an_answer_may_leave_out_success(first: int, kind: type) -> None:
    for version in (4, 5):
        assert read(bytes((first, 2, 1, 2)), version) == kind(258)
        assert encode(kind(258), version) == bytes((first, 2, 1, 2))
    assert read(bytes((first, 3, 0, 1, 0))) == read(bytes((first, 4, 0, 1, 0, 0))) == kind(1)
    assert read(packet(first, b"\0\1\0", properties(b"\x1f\0\1r"))) == kind(1, 0, Properties(reason_string="r"))


@pytest.mark.parametrize(("first", "kind"), ANSWERS)
def test_an_answer_has_nothing_behind_its_fields(first: int, kind: type) -> None:
    assert refusal(bytes((first, 3, 0, 1, 0)), 4).reason is Reason.MALFORMED_PACKET
    assert refusal(bytes((first, 5, 0, 1, 0, 0, 0)), 5).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize(("first", "allowed", "wrong"), [(0x40, 0x10, 0x92), (0x50, 0x97, 0x01)])
def test_mqtt_3_4_2_1_and_3_5_2_1_answers_to_a_publish_have_their_reasons(first: int, allowed: int, wrong: int) -> None:
    read(bytes((first, 3, 0, 1, allowed)))
    assert refusal(bytes((first, 3, 0, 1, wrong))).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("first", [0x62, 0x70])
def test_mqtt_3_6_2_1_and_3_7_2_1_the_second_half_of_qos_2_has_its_reasons(first: int) -> None:
    read(bytes((first, 3, 0, 1, 0x92)))
    assert refusal(bytes((first, 3, 0, 1, 0x10))).reason is Reason.PROTOCOL_ERROR


# SUBSCRIBE and UNSUBSCRIBE


@pytest.mark.parametrize("version", [4, 5])
def test_a_subscribe_in_bytes(version: int) -> None:
    data = packet(0x82, b"\0\1", about(version), text("a/+"), b"\1", text("#"), b"\2")
    assert read(data, version) == Subscribe(1, (Filter("a/+", 1), Filter("#", 2)))


def test_the_options_of_a_subscription() -> None:
    data = packet(0x82, b"\0\1", properties(b"\x0b\xff\xff\xff\x7f"), text("a"), b"\x2e", text("b"), b"\x10")
    assert read(data) == Subscribe(
        1, (Filter("a", 2, True, True, 2), Filter("b", retain_handling=1)), Properties(subscription_ids=(268_435_455,))
    )


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_8_3_2_a_subscribe_without_a_filter_is_a_protocol_error(version: int) -> None:
    assert refusal(packet(0x82, b"\0\1", about(version)), version).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("version", [4, 5])
def test_a_filter_without_options_is_malformed(version: int) -> None:
    assert refusal(packet(0x82, b"\0\1", about(version), text("a")), version).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("first", [0x82, 0xA2])
def test_mqtt_4_7_3_1_an_empty_filter_is_a_protocol_error(version: int, first: int) -> None:
    options = b"\0" if first == 0x82 else b""
    assert refusal(packet(first, b"\0\1", about(version), text(""), options), version).reason is Reason.PROTOCOL_ERROR


def test_mqtt_3_8_3_4_no_local_in_a_shared_subscription_is_a_protocol_error() -> None:
    assert refusal(packet(0x82, b"\0\1\0", text("$share/g/a"), b"\4")).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("options", [0x40, 0x80, 0xC1])
def test_mqtt_3_8_3_5_reserved_options_are_malformed(options: int) -> None:
    assert refusal(packet(0x82, b"\0\1\0", text("a"), bytes((options,)))).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("options", [0x03, 0x30])
def test_qos_3_and_retain_handling_3_are_protocol_errors(options: int) -> None:
    assert refusal(packet(0x82, b"\0\1\0", text("a"), bytes((options,)))).reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("options", [3, 4, 8, 0x10, 0x80])
def test_mqtt_v4_3_8_3_4_reserved_bits_beside_the_qos_are_malformed(options: int) -> None:
    assert refusal(packet(0x82, b"\0\1", text("a"), bytes((options,))), 4).reason is Reason.MALFORMED_PACKET


@pytest.mark.parametrize("identifiers", [b"\x0b\0", b"\x0b\1\x0b\2"])
def test_a_subscribe_has_one_identifier_that_is_not_0(identifiers: bytes) -> None:
    data = packet(0x82, b"\0\1", properties(identifiers), text("a"), b"\0")
    assert refusal(data).reason is Reason.PROTOCOL_ERROR


def test_a_suback_answers_every_filter() -> None:
    for version in (4, 5):
        answer = Suback(1, (0, 1, 2, 0x80))
        assert read(encode(answer, version), version, "server") == answer
        assert refusal(packet(0x90, b"\0\1", about(version)), version, "server").reason is Reason.PROTOCOL_ERROR
    assert refusal(packet(0x90, b"\0\1\x87"), 4, "server").reason is Reason.PROTOCOL_ERROR
    assert refusal(packet(0x90, b"\0\1\0\x11"), 5, "server").reason is Reason.PROTOCOL_ERROR


@pytest.mark.parametrize("version", [4, 5])
def test_mqtt_3_10_3_2_an_unsubscribe_without_a_filter_is_a_protocol_error(version: int) -> None:
    data = packet(0xA2, b"\0\1", about(version), text("a"), text("b/#"))
    assert read(data, version) == Unsubscribe(1, ("a", "b/#"))
    violation = refusal(packet(0xA2, b"\0\1", about(version)), version)
    assert violation.reason is Reason.PROTOCOL_ERROR
    assert str(violation) == "an UNSUBSCRIBE has no topic filter"


def test_an_unsuback_has_reasons_in_version_5_only() -> None:
    answer = Unsuback(1, (0, 0x11))
    assert encode(answer, 4) == b"\xb0\2\0\1"
    assert read(b"\xb0\2\0\1", 4, "server") == Unsuback(1)
    assert read(encode(answer, 5), 5, "server") == answer
    assert refusal(b"\xb0\3\0\1\0", 4, "server").reason is Reason.MALFORMED_PACKET
    assert refusal(b"\xb0\4\0\1\0\1", 5, "server").reason is Reason.PROTOCOL_ERROR
