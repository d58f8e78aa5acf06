"""Whatever an MQTT peer sends, in whatever pieces, is packets or one sentence; and what is written can be read."""

from __future__ import annotations

import sys
from typing import Any, Final

from hypothesis import example, given
from hypothesis import strategies as st

from millstream.mqtt.decoders import Peer
from millstream.mqtt.packets import (
    NO_PROPERTIES,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Filter,
    Packet,
    Pingreq,
    Pingresp,
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
    Will,
)
from millstream.mqtt.reader import PacketReader
from millstream.mqtt.reasons import CONNACK_OF_V4, MqttViolation, Reason
from millstream.mqtt.writer import encode
from tests.examples import examples

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
topics = st.text(st.characters(exclude_characters="\0+#", exclude_categories=["Cs"]), min_size=1, max_size=20)
binaries = st.binary(max_size=20) | st.sampled_from([bytes(127), bytes(128), bytes(20_000)])
flags = st.integers(0, 1)
u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFF_FFFF)
ids = st.integers(1, 0xFFFF)
numbers = st.integers(1, 268_435_455)
user = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)

VALUES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "payload_format": flags, "message_expiry_s": u32, "content_type": texts, "response_topic": topics,
    "correlation_data": binaries, "session_expiry_s": u32, "assigned_client_id": texts, "server_keep_alive_s": u16,
    "request_problem_information": flags, "will_delay_s": u32, "request_response_information": flags,
    "response_information": texts, "server_reference": texts, "reason_string": texts, "receive_maximum": ids,
    "topic_alias_maximum": u16, "topic_alias": ids, "maximum_qos": flags, "retain_available": flags,
    "maximum_packet_bytes": st.integers(1, 0xFFFF_FFFF), "wildcards_available": flags,
    "subscription_ids_available": flags, "shared_available": flags, "authentication_method": texts,
}  # fmt: skip
MESSAGE: Final = ["payload_format", "message_expiry_s", "content_type", "response_topic", "correlation_data"]


def some(*names: str, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Properties]:
    optional = {name: VALUES[name] for name in names} | {"user": user} | others
    return st.just(NO_PROPERTIES) | st.fixed_dictionaries({}, optional=optional).map(lambda found: Properties(**found))


GREETINGS: Final = ["session_expiry_s", "receive_maximum", "topic_alias_maximum", "maximum_packet_bytes"]
GREETINGS.append("authentication_method")
in_answer = some("reason_string")
in_auth = st.builds(
    lambda method, data: Properties(authentication_method=method, authentication_data=data), texts, binaries
)
reasons_of_puback = st.sampled_from([0, 0x10, 0x80, 0x87, 0x99])
reasons_of_pubrel = st.sampled_from([0, 0x92])


@st.composite
def publishes(draw: st.DrawFn, version: int, peer: Peer) -> Publish:
    qos = draw(st.integers(0, 2))
    identifiers = {"subscription_ids": st.lists(numbers, max_size=2).map(tuple)} if peer == "server" else {}
    about = draw(some(*MESSAGE, "topic_alias", **identifiers)) if version == 5 else NO_PROPERTIES
    topic = draw(topics | st.just("")) if about.topic_alias else draw(topics)
    dup, packet_id = (draw(st.booleans()), draw(ids)) if qos else (False, 0)
    return Publish(topic, draw(binaries), qos, draw(st.booleans()), dup, packet_id, about)


@st.composite
def connects(draw: st.DrawFn, version: int) -> Connect:
    is_v5 = version == 5
    none = st.just(NO_PROPERTIES)
    will = st.builds(
        Will, topics, binaries, st.integers(0, 2), st.booleans(), some(*MESSAGE, "will_delay_s") if is_v5 else none
    )
    username = draw(st.none() | texts)
    password = draw(st.none() | binaries) if is_v5 or username is not None else None
    client_id = draw(texts)
    informed = ["request_problem_information", "request_response_information"]
    return Connect(
        version,
        client_id,
        draw(st.booleans()) or not (is_v5 or client_id),
        draw(u16),
        username,
        password,
        draw(st.none() | will),
        draw(some(*GREETINGS, *informed) if is_v5 else none),
    )


def packets(version: int, peer: Peer) -> st.SearchStrategy[Packet]:
    """Every packet that this peer may send after CONNECT and that `encode` writes."""
    is_v5 = version == 5
    none = st.just(NO_PROPERTIES)
    success = st.just(0)
    both = [
        publishes(version, peer),
        *(
            st.builds(kind, ids, reasons_of_puback if is_v5 else success, in_answer if is_v5 else none)
            for kind in (Puback, Pubrec)
        ),
        *(
            st.builds(kind, ids, reasons_of_pubrel if is_v5 else success, in_answer if is_v5 else none)
            for kind in (Pubrel, Pubcomp)
        ),
    ]
    if peer == "client":
        v5_filter = st.builds(Filter, topics, st.integers(0, 2), st.just(False), st.booleans(), st.integers(0, 2))
        filters = v5_filter if is_v5 else st.builds(Filter, topics, st.integers(0, 2))
        identifier = some(subscription_ids=st.tuples(numbers)) if is_v5 else none
        several = st.lists(filters, min_size=1, max_size=3).map(tuple)
        names = st.lists(topics, min_size=1, max_size=3).map(tuple)
        ours: list[st.SearchStrategy[Any]] = [
            st.builds(Subscribe, ids, several, identifier),
            st.builds(Unsubscribe, ids, names, some() if is_v5 else none),
            st.just(Pingreq()),
        ]
        if is_v5:
            ours.append(st.builds(Disconnect, st.sampled_from([0, 4, 0x80, 0x93, 0x99]), some(
                "session_expiry_s", "reason_string")))  # fmt: skip
            ours.append(st.builds(Auth, st.sampled_from([0x18, 0x19]), in_auth))
        return st.one_of(*both, *ours)
    reasons = st.sampled_from([0, 1, 2, 0x80] + [0x87, 0x8F, 0xA2] * is_v5)
    told = ["assigned_client_id", "server_keep_alive_s", "response_information", "server_reference", "reason_string"]
    told += ["maximum_qos", "retain_available", "wildcards_available", "subscription_ids_available", "shared_available"]
    refused = st.sampled_from([0x80, 0x84, 0x87, 0x9F] if is_v5 else [code for code in CONNACK_OF_V4 if code])
    greeting = some(*GREETINGS, *told) if is_v5 else none
    theirs: list[st.SearchStrategy[Any]] = [
        st.builds(Connack, success, st.booleans(), greeting),
        st.builds(Connack, refused, st.just(False), greeting),
        st.builds(Suback, ids, st.lists(reasons, min_size=1, max_size=3).map(tuple), in_answer if is_v5 else none),
        st.just(Pingresp()),
    ]
    if is_v5:
        unsubscribed = st.lists(st.sampled_from([0, 0x11, 0x87]), min_size=1, max_size=3).map(tuple)
        theirs.append(st.builds(Unsuback, ids, unsubscribed, in_answer))
        theirs.append(st.builds(Disconnect, st.sampled_from([0x8E, 0x9C, 0xA2]), some(
            "server_reference", "reason_string")))  # fmt: skip
        theirs.append(st.builds(Auth, st.just(0x18), in_auth))
    else:
        theirs.append(st.builds(Unsuback, ids))
    return st.one_of(*both, *theirs)


VERSIONS: Final = [4, 5]
PEERS: Final[list[Peer]] = ["client", "server"]
CONVERSATIONS: Final = {
    (version, peer): st.lists(packets(version, peer), min_size=1, max_size=4) for version in VERSIONS for peer in PEERS
}
which = st.sampled_from(sorted(CONVERSATIONS))
pieces = st.lists(st.integers(1, 300), max_size=30)


def read_in_pieces(reading: PacketReader, data: bytes, sizes: list[int]) -> list[Packet]:
    found: list[Packet] = []
    at = 0
    for size in sizes:
        reading.feed(memoryview(data)[at : at + size])
        found += reading.packets()
        at += size
    reading.feed(data[at:])
    found += reading.packets()
    return found


@given(st.data(), which, pieces)
@examples(63)
def test_what_is_written_is_read_in_any_pieces(data: st.DataObject, kind: tuple[int, Peer], sizes: list[int]) -> None:
    version, peer = kind
    said = data.draw(CONVERSATIONS[kind])
    reading = PacketReader(bytes_max=1_000_000, peer=peer, version=version)
    if peer == "client" and data.draw(st.booleans()):
        said = [data.draw(connects(version)), *said]
        reading.version = 0
    written = b"".join(encode(packet, version) for packet in said)
    assert read_in_pieces(reading, written, sizes) == said
    assert reading.version == version
    assert sum(sys.getsizeof(getattr(reading, name)) for name in ("_data", "_partial")) < 100


def check(data: bytes, version: int, peer: Peer, sizes: list[int]) -> tuple[list[Packet], Reason | None]:
    reading = PacketReader(bytes_max=50_000, peer=peer, version=version)
    found: list[Packet] = []
    at = 0
    try:
        for size in [*sizes, max(len(data), 1)]:
            reading.feed(data[at : at + size])
            at += size
            for packet in reading.packets():
                found.append(packet)
                encode(packet, reading.version)
    except MqttViolation as violation:
        assert isinstance(violation.reason, Reason)
        assert violation.reason >= 0x80
        assert str(violation)
        assert "\n" not in str(violation)
        return found, violation.reason
    return found, None


@given(st.binary(max_size=100), st.sampled_from([0, 4, 5]), st.sampled_from(PEERS), pieces)
@examples(94)
@example(b"\x10\xff\xff\xff\xff", 0, "client", [])
def test_any_bytes_are_packets_or_a_violation(data: bytes, version: int, peer: Peer, sizes: list[int]) -> None:
    check(data, version, peer, sizes)


@given(st.integers(0, 255), st.binary(max_size=60), st.sampled_from([4, 5]), st.sampled_from(PEERS))
@examples(125)
def test_any_body_is_a_packet_or_a_violation(first: int, body: bytes, version: int, peer: Peer) -> None:
    check(bytes((first, len(body))) + body, version, peer, [])


changes = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 3)), min_size=1, max_size=3)


@given(st.data(), which, changes, pieces)
@examples(50)
def test_a_packet_with_wrong_bytes_is_a_packet_or_a_violation(
    data: st.DataObject, kind: tuple[int, Peer], changes: list[tuple[int, int, int]], sizes: list[int]
) -> None:
    version, peer = kind
    said = data.draw(CONVERSATIONS[kind])
    if peer == "client" and data.draw(st.booleans()):
        said, version = [data.draw(connects(version)), *said], 0
    written = bytearray(b"".join(encode(packet, kind[0]) for packet in said))
    for where, value, removed in changes:
        at = where % (len(written) + 1)
        written[at : at + removed] = bytes((value,))
    whole = check(bytes(written), version, peer, [])
    assert check(bytes(written), version, peer, sizes) == whole


@given(st.integers(0, 255), st.binary(min_size=1, max_size=5), st.sampled_from([0, 4, 5]), st.sampled_from(PEERS))
def test_the_beginning_of_a_packet_is_refused_the_same_in_any_pieces(
    first: int, length: bytes, version: int, peer: Peer
) -> None:
    data = bytes((first,)) + length
    assert check(data, version, peer, [1] * len(data)) == check(data, version, peer, [])


@given(st.integers(0, 268_435_455), st.integers(2, 1_000_000), st.sampled_from([0x30, 0x3D, 0x82, 0xE0]))
def test_a_packet_is_refused_by_its_length_before_it_arrives(length: int, bytes_max: int, first: int) -> None:
    reading = PacketReader(bytes_max=bytes_max, version=5)
    head = bytes((first,))
    rest = length
    while True:
        head += bytes((rest & 0x7F | (0x80 if rest > 0x7F else 0),))
        rest >>= 7
        if not rest:
            break
    reading.feed(head)
    try:
        list(reading.packets())
        reason = None
    except MqttViolation as violation:
        reason = violation.reason
    if len(head) + length > bytes_max:
        assert reason is Reason.PACKET_TOO_LARGE
    else:
        assert reason is not Reason.PACKET_TOO_LARGE


@given(st.data(), st.sampled_from(VERSIONS), st.integers(0, 100))
def test_nothing_longer_than_asked_for_is_written(data: st.DataObject, version: int, bytes_max: int) -> None:
    packet = data.draw(packets(version, "server"))
    written = encode(packet, version, bytes_max)
    assert len(written) <= bytes_max
    whole = encode(packet, version)
    if len(whole) <= bytes_max:
        assert written == whole
    elif written:
        reading = PacketReader(bytes_max=bytes_max, peer="server", version=version)
        reading.feed(written)
        assert [type(found) for found in reading.packets()] == [type(packet)]
