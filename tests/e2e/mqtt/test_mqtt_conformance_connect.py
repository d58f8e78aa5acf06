"""CONNECT and CONNACK.  Names carry the numbers of the normative statements; of version 5 where the versions differ."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import (
    V4,
    V5,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Properties,
    Publish,
    Will,
)
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.e2e.mqtt.support import (
    KEEP_ALIVE_MAX_S,
    PACKET_BYTES_MAX,
    RECEIVE_MAXIMUM,
    REFERENCE,
    TOPIC_ALIAS_MAXIMUM,
    Wires,
    both_versions,
    not_in_reference,
    unique,
)


@both_versions
def test_3_1_0_1_the_first_packet_must_be_a_connect(mqtt: Wires, version: int, topic: str) -> None:
    for packet in (Pingreq(), Publish(topic, b"x"), Disconnect()):
        wire = mqtt.open(version)
        wire.send(packet)
        assert not [packet for packet in wire.end() if isinstance(packet, Pingresp | Connack)]


@both_versions
def test_3_1_0_2_a_second_connect_ends_the_connection(mqtt: Wires, version: int) -> None:
    wire = mqtt.connect(version)
    wire.send(Connect(version, wire.client_id))
    wire.refused(Reason.PROTOCOL_ERROR)


@both_versions
def test_3_1_2_1_another_protocol_name_is_refused(mqtt: Wires, version: int) -> None:
    wire = mqtt.open(version)
    wire.send_bytes(encode(Connect(version, unique("c")), version).replace(b"MQTT", b"MQTX"))
    wire.refused(Reason.UNSUPPORTED_PROTOCOL_VERSION, 1)


@both_versions
def test_3_1_2_2_another_protocol_level_is_refused_with_the_right_code(mqtt: Wires, version: int) -> None:
    for level in (b"\x00", b"\x06", b"\x7f"):
        wire = mqtt.open(version)
        head = b"\x00\x04MQTT"
        wire.send_bytes(encode(Connect(version, unique("c")), version).replace(head + bytes([version]), head + level))
        said = wire.end_bytes()
        assert said in (b"", b"\x20\x02\x00\x01") or (said[:1], said[2:4]) == (b"\x20", b"\x00\x84")


@both_versions
def test_3_1_2_3_the_reserved_connect_flag_must_be_zero(mqtt: Wires, version: int) -> None:
    data = bytearray(encode(Connect(version, unique("c")), version))
    data[9] |= 1
    wire = mqtt.open(version)
    wire.send_bytes(bytes(data))
    wire.refused(Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR)


@both_versions
def test_3_1_2_11_13_will_flags_without_a_will_are_refused(mqtt: Wires, version: int) -> None:
    for flags in (0b0000_1000, 0b0001_0000, 0b0010_0000):
        data = bytearray(encode(Connect(version, unique("c")), version))
        data[9] |= flags
        wire = mqtt.open(version)
        wire.send_bytes(bytes(data))
        wire.refused(Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR)


@both_versions
def test_3_1_2_12_a_will_cannot_have_qos_3(mqtt: Wires, version: int, topic: str) -> None:
    data = bytearray(encode(Connect(version, unique("c"), will=Will(topic, b"x", 1)), version))
    data[9] |= 0b0001_1000
    wire = mqtt.open(version)
    wire.send_bytes(bytes(data))
    wire.refused(Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR, Reason.QOS_NOT_SUPPORTED)


def test_3_1_2_22_in_311_a_password_needs_a_user_name(mqtt: Wires) -> None:
    data = bytearray(encode(Connect(V4, unique("c"), username="u", password=b"p"), V4))
    data[9] &= 0b0111_1111
    wire = mqtt.open(V4)
    wire.send_bytes(bytes(data))
    wire.refused()


@both_versions
def test_3_1_3_5_every_short_alphanumeric_client_id_is_allowed(mqtt: Wires, version: int) -> None:
    for client_id in ("0123456789abcdefghijklm", "ABCDEFGHIJKLMNOPQRSTUVW", "nopqrstuvwxyzXYZ"):
        mqtt.connect(version, client_id).disconnect()


@both_versions
@pytest.mark.parametrize("client_id", ["a" * 200, "with space/and.dots", "ü€😀", "$#+"])
def test_3_1_3_4_a_client_id_is_any_text(mqtt: Wires, version: int, client_id: str) -> None:
    mqtt.connect(version, client_id).disconnect()


def test_3_1_3_6_and_7_an_empty_client_id_is_replaced_and_told(mqtt: Wires) -> None:
    for clean in (True, False):
        one = mqtt.connect(V5, "", clean=clean)
        other = mqtt.connect(V5, "", clean=clean)
        assert one.connack.properties.assigned_client_id
        assert other.connack.properties.assigned_client_id
        assert one.connack.properties.assigned_client_id != other.connack.properties.assigned_client_id
        one.ping()


def test_3_2_2_16_an_assigned_client_id_brings_its_session_back(mqtt: Wires, topic: str) -> None:
    wire = mqtt.durable(V5, "")
    assigned = wire.connack.properties.assigned_client_id
    assert assigned is not None
    wire.subscribe(topic, qos=1)
    wire.disconnect()
    again = mqtt.durable(V5, assigned)
    assert again.connack.session_present
    assert again.connack.properties.assigned_client_id is None


def test_3_1_3_7_in_311_an_empty_client_id_needs_a_clean_session(mqtt: Wires) -> None:
    mqtt.connect(V4, "", clean=True).ping()
    wire = mqtt.open(V4)
    answer = wire.connect(Connect(V4, "", False))
    assert (answer.reason, answer.session_present) == (Reason.CLIENT_IDENTIFIER_NOT_VALID, False)
    wire.end()


@both_versions
def test_3_1_4_3_a_second_connection_takes_the_client_id_over(mqtt: Wires, version: int) -> None:
    first = mqtt.connect(version)
    second = mqtt.connect(version, first.client_id)
    said = first.end()
    told = [packet.reason for packet in said if isinstance(packet, Disconnect)]
    # The reference closes without a word.
    assert told == ([Reason.SESSION_TAKEN_OVER] if version == V5 and not REFERENCE else [])
    second.ping()


@both_versions
def test_3_1_4_3_the_session_itself_is_taken_over(mqtt: Wires, version: int, topic: str) -> None:
    first = mqtt.durable(version)
    first.subscribe(topic, qos=1)
    second = mqtt.durable(version, first.client_id)
    assert second.connack.session_present
    first.end()
    mqtt.connect(version).publish(topic, b"to the second", qos=1)
    assert second.message().payload == b"to the second"


@both_versions
def test_3_1_4_6_after_a_refused_connect_nothing_is_processed(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    data = bytearray(encode(Connect(version, unique("c")), version))
    data[9] |= 1
    wire = mqtt.open(version)
    wire.send_bytes(bytes(data) + encode(Publish(topic, b"x"), version))
    wire.end()
    watcher.nothing()


@both_versions
def test_3_1_4_5_a_client_need_not_wait_for_the_connack(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    wire = mqtt.open(version)
    wire.send(Connect(version, unique("c")), Publish(topic, b"early"), Pingreq())
    assert isinstance(wire.next(), Connack)
    assert isinstance(wire.next(), Pingresp)
    assert watcher.message().payload == b"early"


@both_versions
def test_3_2_0_2_there_is_one_connack(mqtt: Wires, version: int) -> None:
    wire = mqtt.connect(version)
    wire.nothing(Connack)


@both_versions
def test_3_2_2_2_a_clean_start_has_no_session(mqtt: Wires, version: int) -> None:
    first = mqtt.durable(version)
    first.disconnect()
    again = mqtt.connect(version, first.client_id, clean=True)
    assert not again.connack.session_present


@both_versions
def test_3_2_2_3_session_present_tells_whether_there_was_one(mqtt: Wires, version: int) -> None:
    first = mqtt.durable(version)
    assert not first.connack.session_present
    first.disconnect()
    assert mqtt.durable(version, first.client_id).connack.session_present


def test_3_2_2_the_connack_says_what_the_server_can(mqtt: Wires) -> None:
    said = mqtt.connect(V5, keep_alive_s=60).connack.properties
    assert said.receive_maximum == RECEIVE_MAXIMUM
    assert said.topic_alias_maximum == TOPIC_ALIAS_MAXIMUM
    assert said.maximum_packet_bytes == PACKET_BYTES_MAX
    # Whatever is possible need not be said.
    assert said.maximum_qos is None
    assert said.retain_available in (None, 1)
    assert said.wildcards_available in (None, 1)
    assert said.subscription_ids_available in (None, 1)
    assert said.shared_available in (None, 1)
    assert said.server_keep_alive_s in (None, 60)


def test_3_1_2_21_a_keep_alive_that_is_too_long_is_replaced(mqtt: Wires) -> None:
    for asked in (KEEP_ALIVE_MAX_S * 2, 0):
        wire = mqtt.connect(V5, keep_alive_s=asked)
        assert wire.connack.properties.server_keep_alive_s == KEEP_ALIVE_MAX_S


@not_in_reference("it never shortens a session's life")
def test_3_2_2_3_2_a_session_expiry_beyond_the_limit_is_cut_and_told(mqtt: Wires) -> None:
    assert mqtt.connect(V5, expiry_s=3600).connack.properties.session_expiry_s in (None, 3600)
    cut = mqtt.connect(V5, expiry_s=0xFFFF_FFFF).connack.properties.session_expiry_s
    assert cut is not None
    assert 0 < cut < 0xFFFF_FFFF


def test_3_1_2_28_no_response_information_unless_it_is_asked_for(mqtt: Wires) -> None:
    for asked in (None, 0):
        wire = mqtt.connect(V5, request_response_information=asked)
        assert wire.connack.properties.response_information is None
    assert mqtt.connect(V5, request_response_information=1).connack.reason == 0


@not_in_reference("has no response information")
@pytest.mark.parametrize("letter", ["", "+", "#"])
def test_4_10_1_response_information_is_the_beginning_of_topic_names(mqtt: Wires, letter: str) -> None:
    wire = mqtt.connect(V5, unique("c") + letter, request_response_information=1)
    told = wire.connack.properties.response_information
    assert told == (None if letter else f"responses/{wire.client_id}")


def test_4_12_0_1_an_unknown_authentication_method_is_refused(mqtt: Wires) -> None:
    wire = mqtt.open(V5)
    answer = wire.connect(
        Connect(V5, unique("c"), properties=Properties(authentication_method="ORACLE", authentication_data=b"\x00"))
    )
    assert answer.reason == Reason.BAD_AUTHENTICATION_METHOD
    wire.end()


def test_4_12_0_6_an_auth_packet_without_a_method_is_an_error(mqtt: Wires) -> None:
    wire = mqtt.connect(V5)
    wire.send(Auth(Reason.REAUTHENTICATE, Properties(authentication_method="ORACLE")))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.BAD_AUTHENTICATION_METHOD)


def test_3_1_2_11_4_a_receive_maximum_of_zero_is_an_error(mqtt: Wires) -> None:
    good = encode(Connect(V5, unique("c"), properties=Properties(receive_maximum=7)), V5)
    wire = mqtt.open(V5)
    wire.send_bytes(good.replace(b"\x21\x00\x07", b"\x21\x00\x00"))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)


def test_3_1_2_11_4_a_maximum_packet_size_of_zero_is_an_error(mqtt: Wires) -> None:
    good = encode(Connect(V5, unique("c"), properties=Properties(maximum_packet_bytes=777)), V5)
    wire = mqtt.open(V5)
    wire.send_bytes(good.replace(b"\x27\x00\x00\x03\x09", b"\x27\x00\x00\x00\x00"))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)


@both_versions
def test_3_14_0_1_a_server_says_no_disconnect_before_a_connack(mqtt: Wires, version: int) -> None:
    wire = mqtt.open(version)
    wire.send(Pingreq())
    assert not [packet for packet in wire.end() if isinstance(packet, Disconnect)]


@both_versions
def test_3_12_4_1_a_ping_is_answered(mqtt: Wires, version: int) -> None:
    wire = mqtt.connect(version)
    wire.send(Pingreq(), Pingreq())
    assert isinstance(wire.next(), Pingresp)
    assert isinstance(wire.next(), Pingresp)


@both_versions
def test_3_14_4_2_a_disconnect_ends_the_connection_and_nothing_after_it_counts(
    mqtt: Wires, version: int, topic: str
) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    wire = mqtt.connect(version)
    wire.send(Disconnect(), Publish(topic, b"too late"))
    assert wire.end() == []
    watcher.nothing()


def test_3_14_2_2_a_session_without_expiry_cannot_get_one_at_the_end(mqtt: Wires) -> None:
    wire = mqtt.connect(V5, expiry_s=0)
    wire.send(Disconnect(0, Properties(session_expiry_s=60)))
    wire.refused(Reason.PROTOCOL_ERROR)


@both_versions
def test_user_name_and_password_may_be_said_to_a_server_that_asks_for_none(mqtt: Wires, version: int) -> None:
    wire = mqtt.open(version)
    assert wire.connect(Connect(version, unique("c"), True, 60, "somebody", b"\x00\xff")).reason == 0
