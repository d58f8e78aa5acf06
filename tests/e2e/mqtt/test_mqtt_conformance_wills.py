"""Wills: the last words of clients that are lost."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import V4, V5, Connect, Disconnect, Properties, Will
from millstream.mqtt.reasons import Reason
from tests.e2e.mqtt.support import Wires, both_versions, not_in_reference


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_3_1_2_8_the_will_of_a_lost_client_is_published(mqtt: Wires, version: int, qos: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"gone", qos)).drop()
    found = watcher.message()
    assert (found.topic, found.payload, found.qos, found.retain) == (topic, b"gone", qos, False)
    watcher.nothing()


@both_versions
def test_3_1_2_8_closing_without_a_disconnect_is_a_loss(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"gone", 1)).close()
    assert watcher.message().payload == b"gone"


@both_versions
def test_3_1_2_10_a_disconnect_takes_the_will_back(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"gone", 1)).disconnect()
    watcher.nothing()


def test_3_14_4_3_a_disconnect_with_will_publishes_it(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    mqtt.connect(V5, will=Will(topic, b"as asked", 1)).disconnect(Reason.DISCONNECT_WITH_WILL)
    assert watcher.message().payload == b"as asked"


@not_in_reference("it publishes wills after reason 4 only")
def test_3_1_2_8_only_a_normal_disconnect_takes_the_will_back(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    mqtt.connect(V5, will=Will(topic, b"in trouble", 1)).disconnect(Reason.UNSPECIFIED_ERROR)
    assert watcher.message().payload == b"in trouble"


@both_versions
def test_3_1_2_8_a_client_that_breaks_the_protocol_has_its_will_published(
    mqtt: Wires, version: int, topic: str
) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    bad = mqtt.connect(version, will=Will(topic, b"thrown out", 1))
    bad.send_bytes(b"\xf7\x00")
    bad.end()
    assert watcher.message().payload == b"thrown out"


@both_versions
def test_3_1_2_22_a_silent_client_has_its_will_published(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    silent = mqtt.connect(version, keep_alive_s=1, will=Will(topic, b"silent", 1))
    mqtt.skip(2)
    assert watcher.message().payload == b"silent"
    silent.refused(Reason.KEEP_ALIVE_TIMEOUT)


@both_versions
def test_3_1_2_15_a_will_can_be_retained(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"kept", 1, retain=True)).drop()
    assert not watcher.message().retain
    late = mqtt.connect(version)
    late.subscribe(topic)
    found = late.message()
    assert (found.payload, found.retain) == (b"kept", True)


@both_versions
def test_3_1_2_14_an_ordinary_will_is_not_retained(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"passing", 1)).drop()
    watcher.message()
    late = mqtt.connect(version)
    late.subscribe(topic)
    late.nothing()


@both_versions
def test_a_will_waits_for_a_session_that_is_away(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.durable(version)
    watcher.subscribe(topic)
    watcher.disconnect()
    live = mqtt.connect(version)
    live.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"gone", 1)).drop()
    live.message()
    assert mqtt.durable(version, watcher.client_id).message().payload == b"gone"


@both_versions
def test_a_will_goes_wherever_the_client_may_publish(mqtt: Wires, version: int, topic: str) -> None:
    name = f"$device/{topic}"
    reader = mqtt.connect(version)
    reader.subscribe(name)
    mqtt.connect(version, will=Will(name, b"gone")).drop()
    assert reader.message().payload == b"gone"


@both_versions
def test_an_empty_will_is_published(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    mqtt.connect(version, will=Will(topic, b"", 1)).drop()
    assert watcher.message().payload == b""


@both_versions
def test_3_1_4_3_a_takeover_publishes_the_will_of_the_first_connection(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    first = mqtt.connect(version, will=Will(topic, b"taken over", 1))
    second = mqtt.connect(version, first.client_id)
    assert watcher.message().payload == b"taken over"
    second.disconnect()
    watcher.nothing()


def test_3_1_2_8_a_durable_session_of_311_has_its_will_at_once(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V4)
    watcher.subscribe(topic)
    lost = mqtt.durable(V4, will=Will(topic, b"gone", 1))
    lost.drop()
    assert watcher.message().payload == b"gone"
    again = mqtt.durable(V4, lost.client_id)
    again.drop()
    watcher.nothing()


def test_3_3_2_a_will_has_properties(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    said = Properties(
        payload_format=1,
        content_type="text/plain",
        response_topic="a/b",
        correlation_data=b"\x01",
        user=(("a", "2"), ("c", "3")),
    )
    mqtt.connect(V5, will=Will(topic, b"gone", 1, properties=said)).drop()
    assert watcher.message().properties == said


def test_3_1_3_a_will_waits_for_its_delay(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    mqtt.durable(V5, expiry_s=60, will=Will(topic, b"later", 1, properties=Properties(will_delay_s=2))).drop()
    watcher.nothing(seconds=0.5)
    mqtt.skip(3)
    found = watcher.message()
    assert found.payload == b"later"
    assert found.properties == Properties(), "the delay is not passed on"


def test_3_1_3_9_a_client_that_comes_back_in_time_has_no_will(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    will = Will(topic, b"never", 1, properties=Properties(will_delay_s=2))
    lost = mqtt.durable(V5, expiry_s=60, will=will)
    lost.drop()
    again = mqtt.durable(V5, lost.client_id, expiry_s=60)
    assert again.connack.session_present
    mqtt.skip(3.1)
    watcher.nothing()


@not_in_reference("it waits for the delay without a session")
def test_3_1_2_8_without_a_session_there_is_no_delay(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    mqtt.connect(V5, expiry_s=0, will=Will(topic, b"now", 1, properties=Properties(will_delay_s=300))).drop()
    assert watcher.message().payload == b"now"


def test_3_1_2_8_the_end_of_the_session_ends_the_delay(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    will = Will(topic, b"at the end", 1, properties=Properties(will_delay_s=300))
    mqtt.durable(V5, expiry_s=1, will=will).drop()
    watcher.nothing(seconds=0.3)
    mqtt.skip(2.5)
    assert watcher.message().payload == b"at the end"


@not_in_reference("it forgets the will")
def test_3_1_2_8_a_clean_start_ends_the_session_and_so_the_delay(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    will = Will(topic, b"session over", 1, properties=Properties(will_delay_s=300))
    lost = mqtt.durable(V5, expiry_s=600, will=will)
    lost.drop()
    watcher.nothing(seconds=0.3)
    mqtt.connect(V5, lost.client_id, clean=True)
    assert watcher.message().payload == b"session over"


def test_a_will_may_expire(mqtt: Wires, topic: str) -> None:
    """Its time begins when it is published."""
    watcher = mqtt.connect(V5)
    watcher.subscribe(topic)
    mqtt.connect(V5, will=Will(topic, b"gone", 1, properties=Properties(message_expiry_s=30))).drop()
    assert watcher.message().properties.message_expiry_s in (29, 30)


@not_in_reference("it takes any text for a will's topic")
@both_versions
def test_a_will_needs_a_topic_name(mqtt: Wires, version: int) -> None:
    wire = mqtt.open(version)
    wire.send(Connect(version, "w", will=Will("a/+/b", b"x")))
    wire.refused(Reason.TOPIC_NAME_INVALID, Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR, 3)


@both_versions
def test_disconnect_then_close_is_no_loss(mqtt: Wires, version: int, topic: str) -> None:
    watcher = mqtt.connect(version)
    watcher.subscribe(topic)
    wire = mqtt.connect(version, will=Will(topic, b"gone", 1))
    wire.send(Disconnect())
    wire.close()
    watcher.nothing()
