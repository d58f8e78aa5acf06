"""What version 5 adds to messages, and how it passes through."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import V4, V5, Disconnect, Properties, Puback, Publish, Pubrec, Suback, Unsuback
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.e2e.mqtt.support import Wires, not_in_reference


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_3_3_2_a_message_whose_life_is_0_reaches_whoever_is_there_and_waits_for_nobody(
    mqtt: Wires, topic: str, qos: int
) -> None:
    here, away, writer = mqtt.connect(V5), mqtt.durable(V5), mqtt.connect(V5)
    here.subscribe(topic, qos=qos)
    brief = Properties(message_expiry_s=0)
    writer.publish(topic, b"live", qos, properties=brief)
    assert here.message().payload == b"live"
    away.subscribe(topic, qos=2)  # from now on it is stored
    writer.publish(topic, b"stored", qos, properties=brief)
    assert (here.message().payload, away.message().payload) == (b"stored", b"stored")
    away.disconnect()
    writer.publish(topic, b"missed", qos, properties=brief)
    assert here.message().payload == b"missed"
    mqtt.skip(1.5)
    mqtt.durable(V5, away.client_id).nothing()


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("is_away", [False, True])
def test_3_3_2_properties_pass_unaltered(mqtt: Wires, qos: int, is_away: bool, topic: str) -> None:
    """Statements 3.3.2-4 and, in the order of the properties below, -20, -15, -16, -17 with -18."""
    said = Properties(
        payload_format=1,
        content_type="text/plain; charset=utf-8",
        response_topic="answers/ü/to me",
        correlation_data=bytes(range(256)),
        user=(("a", "2"), ("c", "3"), ("a", "1"), ("", ""), ("ü", "😀" * 10)),
    )
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    if is_away and qos:
        reader.disconnect()
    writer.publish(topic, b"text", qos, properties=said)
    if is_away and qos:
        reader = mqtt.durable(V5, reader.client_id)
    found = reader.message()
    assert (found.qos, found.properties) == (qos, said)


@pytest.mark.parametrize(
    "said",
    [
        Properties(),
        Properties(payload_format=0),
        Properties(content_type=""),
        Properties(correlation_data=b""),
        Properties(response_topic="a/b"),
        Properties(user=(("millstream-key", "x"), ("mqtt", "y"), ("content-type", "z"))),
    ],
    ids=["none", "bytes", "empty type", "empty correlation", "mappable response", "names we use"],
)
def test_3_3_2_small_properties_pass_unaltered(mqtt: Wires, said: Properties, topic: str) -> None:
    reader = mqtt.durable(V5)
    reader.subscribe(topic)
    for qos in (0, 1):
        reader.publish(topic, b"x", qos, properties=said)
        found = reader.message().properties
        if said.payload_format == 0:
            assert found.payload_format in (0, None), "0 is the same as nothing"
        else:
            assert found == said


def test_clients_of_311_get_messages_without_their_properties(mqtt: Wires, topic: str) -> None:
    reader = mqtt.connect(V4)
    reader.subscribe(topic)
    mqtt.connect(V5).publish(topic, b"x", 2, properties=Properties(content_type="a", user=(("b", "c"),)))
    assert reader.message().payload == b"x"


def test_request_and_response(mqtt: Wires, topic: str) -> None:
    requester, responder = mqtt.connect(V5), mqtt.connect(V5)
    requester.subscribe(f"{topic}/answers")
    responder.subscribe(f"{topic}/requests")
    said = Properties(response_topic=f"{topic}/answers", correlation_data=b"334")
    requester.publish(f"{topic}/requests", b"request", 1, properties=said)
    request = responder.message()
    assert request.properties == said
    assert request.properties.response_topic is not None
    responder.publish(
        request.properties.response_topic,
        b"response",
        1,
        properties=Properties(correlation_data=request.properties.correlation_data),
    )
    response = requester.message()
    assert (response.payload, response.properties.correlation_data) == (b"response", b"334")


@not_in_reference("it does not look")
def test_3_3_2_14_a_response_topic_has_no_wildcards(mqtt: Wires, topic: str) -> None:
    for name in ("a/#", "+/b"):
        wire = mqtt.connect(V5)
        wire.send(Publish(topic, b"x", 0, properties=Properties(response_topic=name)))
        wire.refused(Reason.PROTOCOL_ERROR, Reason.TOPIC_NAME_INVALID, Reason.MALFORMED_PACKET)


def test_3_3_2_5_a_message_expires_before_it_is_delivered(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    reader.disconnect()
    for qos in (1, 2):
        writer.publish(topic, b"expires", qos, properties=Properties(message_expiry_s=1))
        writer.publish(topic, b"stays", qos, properties=Properties(message_expiry_s=10))
    mqtt.skip(2.5)
    again = mqtt.durable(V5, reader.client_id)
    found = again.messages(2)
    assert [message.payload for message in found] == [b"stays", b"stays"]
    for message in found:
        assert message.properties.message_expiry_s is not None
        assert 6 <= message.properties.message_expiry_s < 10, "3.3.2-6: less the time that it waited"
    again.nothing()


def test_3_3_2_6_a_message_that_does_not_wait_has_its_whole_time(mqtt: Wires, topic: str) -> None:
    reader = mqtt.connect(V5)
    reader.subscribe(topic)
    for qos in (0, 1, 2):
        reader.publish(topic, b"x", qos, properties=Properties(message_expiry_s=100))
        assert reader.message().properties.message_expiry_s in (99, 100)


@not_in_reference("it publishes payloads of any kind as text")
def test_3_3_2_4_a_payload_that_says_it_is_text_may_be_checked(mqtt: Wires, topic: str) -> None:
    """Checked or not: the message is refused as the standard says, or passes as it is."""
    reader, writer = mqtt.connect(V5), mqtt.connect(V5)
    reader.subscribe(topic)
    reason = writer.publish(topic, b"\xff\xfe", 1, properties=Properties(payload_format=1))
    assert reason in (0, Reason.PAYLOAD_FORMAT_INVALID)
    if reason == 0:
        assert reader.message().payload == b"\xff\xfe"


def test_3_1_2_29_no_explanations_for_clients_that_want_none(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5, request_problem_information=0)
    wire.subscribe(topic)
    wire.publish(topic, b"x", 1)
    wire.publish(topic, b"x", 2)
    wire.messages(2)
    wire.unsubscribe(topic, "never")
    wire.send(Publish(topic, b"x", 1, packet_id=9), Publish(topic, b"x", 2, packet_id=10))
    for answer in (wire.receive(Puback), wire.receive(Pubrec)):
        assert (answer.properties.reason_string, answer.properties.user) == (None, ())
    wire.nothing(Suback)
    wire.nothing(Unsuback)


@not_in_reference("it says nothing but the code")
def test_a_client_that_breaks_the_protocol_is_told_why(mqtt: Wires) -> None:
    wire = mqtt.connect(V5)
    wire.send_bytes(b"\x36\x00")
    farewell = wire.end()[-1]
    assert isinstance(farewell, Disconnect)
    assert farewell.reason == Reason.MALFORMED_PACKET
    assert farewell.properties.reason_string
    assert farewell.properties.session_expiry_s is None, "3.14.2-2"


def test_user_properties_in_connect_subscribe_and_disconnect_are_allowed(mqtt: Wires, topic: str) -> None:
    said = Properties(user=(("who", "a test"), ("who", "still")))
    wire = mqtt.connect(V5, user=said.user)
    assert wire.subscribe(topic, properties=said) == (2,)
    wire.disconnect(0, said)


def test_2_2_2_2_a_property_twice_is_an_error(mqtt: Wires, topic: str) -> None:
    good = encode(Publish(topic, b"", 0, properties=Properties(payload_format=1, user=(("\x01", ""),))), V5)
    # payload format twice, in as many bytes as payload format and a user property
    wire = mqtt.connect(V5)
    wire.send_bytes(good.replace(b"\x01\x01\x26\x00\x01\x01\x00\x00", b"\x01\x01\x01\x01\x01\x01\x01\x01"))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)
