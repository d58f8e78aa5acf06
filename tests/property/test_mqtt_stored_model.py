"""Whatever a client publishes is read back from the log as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.entries import alike, encode_alike, encode_entries
from millstream.headers import decode_headers
from millstream.mqtt.messages import Message, with_payload
from millstream.mqtt.packets import Properties
from millstream.mqtt.stored import entry_of, message_of
from millstream.mqtt.topics import check_topic_name
from millstream.options import CORRELATION_ID, REPLY_TO
from millstream.records import Batch

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
topic = st.one_of(
    st.sampled_from(["a/b", "_inbox/1f", "a.b", "a b/", "/"]),
    text.filter(lambda name: name and not {"+", "#"} & set(name)),
)
name = st.one_of(text, st.sampled_from(["mqtt", "content-type", "mqtt-response-topic", REPLY_TO, CORRELATION_ID]))
properties = st.builds(
    Properties,
    payload_format=st.sampled_from([None, 0, 1]),
    content_type=st.none() | text,
    response_topic=st.none() | topic,
    correlation_data=st.none() | st.binary(max_size=20),
    user=st.lists(st.tuples(name, text), max_size=4).map(tuple),
)
messages = st.builds(
    Message,
    topic=topic,
    payload=st.binary(max_size=20),
    qos=st.integers(0, 2),
    retain=st.booleans(),
    properties=properties,
    client_id=text,
    expiry_us=st.integers(0, 1 << 60),
)


@given(sent=st.lists(messages, min_size=1, max_size=4), keyed=st.booleans())
def test_a_batch_gives_back_the_messages_that_went_into_it(sent: list[Message], keyed: bool) -> None:
    entries = [entry_of(message, key=message.topic.encode() if keyed else None, now_us=5) for message in sent]
    batch = Batch.parse(b"".join(encode_entries(entries, base_timestamp_us=5)), verify=False)
    headers, expiry = batch.raw_headers(), batch.expiry_us()
    for at, message in enumerate(sent):
        check_topic_name(message.topic)
        told = decode_headers(headers[at] if headers else None)
        assert message_of(message.topic, batch.values()[at], told, expiry[at] if expiry else 0) == message


@given(message=messages, payloads=st.lists(st.binary(max_size=20), min_size=1, max_size=4), keyed=st.booleans())
def test_messages_that_differ_in_their_payloads_are_stored_as_if_each_came_alone(
    message: Message, payloads: list[bytes], keyed: bool
) -> None:
    entry = entry_of(message, key=message.topic.encode() if keyed else None, now_us=5)
    one_by_one = [
        entry_of(with_payload(message, payload), key=message.topic.encode() if keyed else None, now_us=5)
        for payload in payloads
    ]
    assert alike(entry, payloads) == one_by_one
    assert encode_alike(entry, payloads, base_timestamp_us=5) == encode_entries(one_by_one, base_timestamp_us=5)


@given(headers=st.lists(st.tuples(name, st.binary(max_size=20)), max_size=5))
def test_headers_of_any_kind_become_properties_that_mqtt_can_say(headers: list[tuple[str, bytes]]) -> None:
    properties = message_of("a", b"", headers).properties
    for said in (properties.content_type or "", *(part for pair in properties.user for part in pair)):
        assert "\0" not in said
        said.encode()
    if properties.response_topic is not None:
        check_topic_name(properties.response_topic)
