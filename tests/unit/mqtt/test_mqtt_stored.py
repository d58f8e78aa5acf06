"""A message of MQTT in the log: other doors understand it, and MQTT reads it back as it was."""

from __future__ import annotations

from millstream.entries import Entry
from millstream.headers import decode_headers
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import NO_PROPERTIES, Properties
from millstream.mqtt.stored import entry_of, message_of
from millstream.options import CORRELATION_ID, REPLY_TO

NOW_US = 1_000_000


def stored(message: Message) -> list[tuple[str, bytes]]:
    entry = entry_of(message, key=None, now_us=NOW_US)
    assert isinstance(entry, Entry)
    return decode_headers(entry.headers)


def with_properties(**properties: object) -> Message:
    return Message("a/b", b"x", qos=1, client_id="device7", properties=Properties(**properties))  # type: ignore[arg-type]


def test_a_plain_message_costs_one_short_header() -> None:
    assert stored(Message("a/b", b"x", qos=1, client_id="device7")) == [("mqtt", b"1:device7")]


def test_a_message_of_another_door_costs_nothing() -> None:
    assert entry_of(Message("a/b", b"x"), key=None, now_us=NOW_US) == b"x"
    assert message_of("a/b", b"x", []) == Message("a/b", b"x")


def test_the_key_and_the_expiry_have_columns_of_their_own() -> None:
    entry = entry_of(Message("ä", b"x", expiry_us=77), key=b"\xc3\xa4", now_us=NOW_US)
    assert entry == Entry(b"x", b"\xc3\xa4", b"", 2, 0, 77, 0)
    counted = entry_of(with_properties(message_expiry_s=3), key=None, now_us=NOW_US)
    assert isinstance(counted, Entry)
    assert counted.expiry_us == NOW_US + 3_000_000


def test_other_doors_see_user_properties_and_the_content_type_as_headers() -> None:
    message = with_properties(content_type="text/plain", user=(("k", "1"), ("j", "2"), ("k", "3")))
    assert stored(message)[1:] == [("content-type", b"text/plain"), ("k", b"1"), ("j", b"2"), ("k", b"3")]


def test_other_doors_can_answer_a_request() -> None:
    message = with_properties(response_topic="replies/device7", correlation_data=b"\x00\xff")
    assert stored(message)[1:] == [(REPLY_TO, b"replies.device7"), (CORRELATION_ID, b"\x00\xff")]


def test_a_response_topic_that_is_no_topic_is_no_reply_address_for_others() -> None:
    message = with_properties(response_topic="replies of.7/")
    assert REPLY_TO not in dict(stored(message))
    assert message_of("a/b", b"x", stored(message)) == message


def test_requests_of_other_doors_can_be_answered_by_mqtt() -> None:
    message = message_of("a/b", b"?", [("k", b"v"), (REPLY_TO, b"_inbox.12ab"), (CORRELATION_ID, b"4294967296")])
    assert message.properties == Properties(
        response_topic="_inbox/12ab", correlation_data=b"4294967296", user=(("k", "v"),)
    )


def test_mqtt_3_3_2_17_user_properties_arrive_unaltered_even_with_names_that_mean_something() -> None:
    user = (("mqtt", "2r:x"), ("content-type", "odd"), (REPLY_TO, "a.b"), (CORRELATION_ID, "1"), ("", ""))
    for message in (
        with_properties(user=user),
        with_properties(user=user, content_type="application/json"),
        Message("a/b", b"x", properties=Properties(user=user)),
    ):
        assert message_of("a/b", b"x", stored(message)) == message


def test_mqtt_3_3_2_14_a_reply_address_that_cannot_be_published_to_is_no_response_topic() -> None:
    for name, value in ((REPLY_TO, b"a.#"), (REPLY_TO, b"a/b"), (REPLY_TO, b""), ("mqtt-response-topic", b"a/+")):
        properties = message_of("a/b", b"x", [(name, value)]).properties
        assert properties == Properties(user=((name, value.decode()),))


def test_headers_that_mqtt_cannot_say_are_left_out_or_made_readable() -> None:
    long = b"x" * 65_536
    grows = b"\xff" * 30_000  # a replacement character has three bytes
    headers = [("long", long), ("content-type", long), (CORRELATION_ID, long), ("grows", grows), ("a\0", b"\xff\x00b")]
    assert message_of("a/b", b"x", headers).properties == Properties(user=(("a\ufffd", "\ufffd\ufffdb"),))


def test_a_header_of_another_door_that_happens_to_be_called_mqtt_is_a_user_property() -> None:
    for value in (b"hello", b"", b"3", b"\xff", b"0", b"1", b"2", b"1r", b"0ru1", b"yes: 1", b"12:30", b"1u3:x"):
        message = message_of("a/b", b"x", [("mqtt", value)])
        assert message.qos == 2
        assert message.properties.user[0][0] == "mqtt"


def test_a_deletion_marker_is_an_empty_payload() -> None:
    assert message_of("a/b", None, []).payload == b""


def test_a_message_without_properties_shares_the_empty_ones() -> None:
    assert message_of("a/b", b"x", [("mqtt", b"0:me")]).properties is NO_PROPERTIES
