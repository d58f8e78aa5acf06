"""SUBSCRIBE and UNSUBSCRIBE: filters, options and what overlaps."""

from __future__ import annotations

import pytest

from millstream.mqtt.packets import V5, Filter, Properties, Publish, Suback, Subscribe, Unsuback, Unsubscribe
from millstream.mqtt.reasons import Reason
from tests.e2e.mqtt.support import REFERENCE, Wires, both_versions, not_in_reference, unique


@both_versions
def test_3_8_4_1_and_2_a_subscribe_is_answered_with_its_id(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    wire.send(Subscribe(777, (Filter(topic, 1),)))
    assert wire.next() == Suback(777, (1,))


@both_versions
def test_3_9_3_1_there_is_one_answer_per_filter_in_their_order(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    assert wire.subscribe(*[Filter(f"{topic}/{at}", qos) for at, qos in enumerate((2, 0, 1, 1))]) == (2, 0, 1, 1)


@both_versions
def test_3_8_4_4_many_filters_in_one_packet_are_as_many_packets(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    wire.subscribe(*[f"{topic}/{at}" for at in range(50)], qos=1)
    for at in (0, 49):
        wire.publish(f"{topic}/{at}", b"x", 1)
        assert wire.message().topic == f"{topic}/{at}"


@both_versions
def test_3_8_4_3_the_same_filter_again_replaces_the_subscription(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    assert reader.subscribe(topic, qos=2) == (2,)
    assert reader.subscribe(topic, qos=0) == (0,)
    writer.publish(topic, b"x", 2)
    assert reader.message().qos == 0
    reader.nothing()


@both_versions
@pytest.mark.parametrize("name", ["waiting", "no topic of its own"])
def test_3_8_4_4_what_waits_is_not_lost_when_a_filter_gets_a_lower_qos(
    mqtt: Wires, version: int, topic: str, name: str
) -> None:
    reader, writer = mqtt.durable(version, clean=version == V5), mqtt.connect(version)
    name = f"{topic}/{name}"
    reader.subscribe(name, qos=1)
    reader.disconnect()
    waiting = [b"%d" % number for number in range(150)]  # more than a client is given at a time
    for payload in waiting:
        writer.publish(name, payload, 1)
    again = mqtt.durable(version, reader.client_id)
    assert again.subscribe(name, qos=0) == (0,)
    assert again.payloads(len(waiting)) == waiting
    writer.publish(name, b"new", 1)
    message = again.message()
    assert (message.payload, message.qos) == (b"new", 0)
    again.nothing()


@both_versions
@pytest.mark.parametrize(
    ("filter_", "matching", "other"),
    [
        ("a/b", ["a/b"], ["a", "a/b/c", "a/B", "/a/b", "a/b/"]),
        ("a/+", ["a/b", "a/"], ["a", "a/b/c"]),
        ("a/#", ["a", "a/b", "a/b/c", "a/"], ["b", "ab"]),
        ("+/b", ["a/b", "/b"], ["b", "a/b/c"]),
        ("a/+/c", ["a/b/c", "a//c"], ["a/c", "a/b/b/c"]),
        ("+", ["a"], ["/a", "a/"]),
        ("/+", ["/a", "/"], ["a"]),
        ("+/+", ["a/b", "/a"], ["a"]),
        ("a/+/#", ["a/b", "a/b/c"], ["a"]),
    ],
)
def test_4_7_1_wildcards(
    mqtt: Wires, version: int, filter_: str, matching: list[str], other: list[str], topic: str
) -> None:
    """Below a level of this test's own."""
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/{filter_}", qos=1)
    for name in (*other, *matching):
        writer.publish(f"{topic}/{name}", name.encode(), 1)
    assert sorted(reader.payloads(len(matching))) == sorted(name.encode() for name in matching)
    reader.nothing(seconds=0.05)


@both_versions
def test_4_7_1_wildcards_of_everything(mqtt: Wires, version: int, topic: str) -> None:
    for filter_ in ("#", "+/+", "+/#"):
        reader = mqtt.connect(version)
        reader.subscribe(Filter(filter_, 1, retain_handling=2 if version == V5 else 0))
        mqtt.connect(version).publish(topic, b"everywhere", 1)
        while (found := reader.message()).retain:
            pass  # of other tests
        assert (found.topic, found.payload) == (topic, b"everywhere")


@both_versions
def test_4_7_2_1_wildcards_do_not_match_dollar_topics(mqtt: Wires, version: int) -> None:
    reader = mqtt.connect(version)
    level = unique("d")
    reader.subscribe(f"+/{level}", f"+/{level}/#", qos=1)
    writer = mqtt.connect(version)
    for qos in (0, 1, 2):
        # A client of 3.1.1 cannot be told that it may not; whether or not it may, it goes on (3.3.5-2).
        assert writer.publish(f"$other/{level}", b"hidden", qos) in (0, 0x10, Reason.NOT_AUTHORIZED)
    reader.nothing()
    writer.publish(f"other/{level}", b"seen", 1)
    assert reader.message().payload == b"seen"


@both_versions
def test_4_7_2_the_server_tells_about_itself_under_sys(mqtt: Wires, version: int) -> None:
    reader = mqtt.connect(version)
    reader.subscribe("$SYS/#", qos=0)
    mqtt.skip(12)
    assert reader.message(15).topic.startswith("$SYS/")


@both_versions
@pytest.mark.parametrize("filter_", ["a/#/b", "a#", "#a", "a+", "a/+b", "a/b+/c", ""])
def test_4_7_1_1_and_2_wrong_filters_are_refused(mqtt: Wires, version: int, filter_: str) -> None:
    wire = mqtt.connect(version)
    wire.subscribe_refused(
        Filter(filter_, 1), Reason.TOPIC_FILTER_INVALID, Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR
    )


@both_versions
def test_3_3_4_2_overlapping_subscriptions_deliver_the_highest_qos(mqtt: Wires, version: int, topic: str) -> None:
    """Once for all of them, or once for each."""
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(Filter(f"{topic}/#", 2), Filter(f"{topic}/+", 1))
    writer.publish(f"{topic}/x", b"overlap", 2)
    found = [reader.message()]
    reader.ping()
    found += [packet for packet in reader.inbox if isinstance(packet, Publish)]
    if not REFERENCE:  # it delivers once, with the QoS of the first that it finds
        assert [message.qos for message in found] in ([2], [2, 1], [1, 2])


@both_versions
@pytest.mark.parametrize("filters", [("{}", "{}/#"), ("{}/#", "#"), ("+/+", "{}")])
def test_overlapping_subscriptions_of_a_durable_session(
    mqtt: Wires, version: int, filters: tuple[str, ...], topic: str
) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    reader.subscribe(
        *[Filter(filter_.format(topic), 1, retain_handling=2 if version == V5 else 0) for filter_ in filters]
    )
    reader.disconnect()
    writer.publish(topic, b"overlap", 1)
    again = mqtt.durable(version, reader.client_id)
    while (found := again.message()).retain:
        pass  # of other tests
    assert found.payload == b"overlap"
    again.disconnect()


@both_versions
def test_3_10_4_unsubscribe_ends_delivery(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/0", f"{topic}/1", f"{topic}/2")
    reader.send(Unsubscribe(555, (f"{topic}/0",)))
    assert reader.next() == Unsuback(555, (0,) if version == V5 else ())
    for at in range(3):
        writer.publish(f"{topic}/{at}", b"%d" % at, 1)
    assert reader.payloads(2) == [b"1", b"2"]
    reader.nothing()


@both_versions
def test_3_10_4_5_an_unsubscribe_from_nothing_is_answered(mqtt: Wires, version: int, topic: str) -> None:
    wire = mqtt.connect(version)
    wire.subscribe(topic)
    expected = (Reason.NO_SUBSCRIPTION_EXISTED, 0) if version == V5 else ()
    assert wire.unsubscribe(f"{topic}/never", topic) == expected


@both_versions
def test_3_10_4_1_filters_are_compared_as_they_are_written(mqtt: Wires, version: int, topic: str) -> None:
    reader, writer = mqtt.connect(version), mqtt.connect(version)
    reader.subscribe(f"{topic}/+", qos=1)
    reader.unsubscribe(f"{topic}/a", f"{topic}/#")
    writer.publish(f"{topic}/a", b"x", 1)
    assert reader.message().payload == b"x"


def test_3_8_3_3_no_local_spares_a_client_its_own_messages(mqtt: Wires, topic: str) -> None:
    one, other = mqtt.connect(V5), mqtt.connect(V5)
    for wire in (one, other):
        wire.subscribe(Filter(topic, 2, no_local=True))
    one.publish(topic, b"from one", 1)
    assert other.message().payload == b"from one"
    one.nothing()
    other.publish(topic, b"from other", 0)
    assert one.message().payload == b"from other"
    other.nothing()


def test_3_8_3_3_no_local_also_while_away(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V5)
    reader.subscribe(Filter(topic, 1, no_local=True))
    reader.publish(topic, b"own", 1)
    reader.disconnect()
    mqtt.connect(V5).publish(topic, b"other", 1)
    again = mqtt.durable(V5, reader.client_id)
    assert again.message().payload == b"other"
    again.nothing()


@not_in_reference("it takes both")
def test_3_8_3_4_no_local_and_shared_do_not_go_together(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.send(Subscribe(1, (Filter(f"$share/g/{topic}", 1, no_local=True),)))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)


def test_3_3_4_3_deliveries_carry_the_subscription_identifier(mqtt: Wires, topic: str) -> None:
    one, two = mqtt.connect(V5), mqtt.connect(V5)
    one.subscribe(topic, properties=Properties(subscription_ids=(456_789,)))
    two.subscribe(topic, properties=Properties(subscription_ids=(2,)))
    two.subscribe(f"{topic}/#", properties=Properties(subscription_ids=(3,)))
    two.publish(topic, b"x", 1)
    assert one.message().properties.subscription_ids == (456_789,)
    found = [two.message()]
    two.ping()
    found += [packet for packet in two.inbox if isinstance(packet, Publish)]
    assert sorted(number for message in found for number in message.properties.subscription_ids) == [2, 3]


def test_3_3_4_4_a_subscription_without_identifier_adds_none(mqtt: Wires, topic: str) -> None:
    reader = mqtt.connect(V5)
    reader.subscribe(topic)
    reader.publish(topic, b"x", 1)
    assert reader.message().properties.subscription_ids == ()


def test_3_8_4_3_a_new_subscribe_changes_the_identifier(mqtt: Wires, topic: str) -> None:
    reader = mqtt.connect(V5)
    reader.subscribe(topic, properties=Properties(subscription_ids=(1,)))
    reader.subscribe(topic, properties=Properties(subscription_ids=(268_435_455,)))
    reader.publish(topic, b"x", 1)
    assert reader.message().properties.subscription_ids == (268_435_455,)


def test_subscription_identifiers_are_kept_with_the_session(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable(V5)
    reader.subscribe(topic, properties=Properties(subscription_ids=(12,)))
    reader.disconnect()
    mqtt.connect(V5).publish(topic, b"x", 1)
    assert mqtt.durable(V5, reader.client_id).message().properties.subscription_ids == (12,)


def test_retained_messages_carry_the_subscription_identifier(mqtt: Wires, topic: str) -> None:
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True)
    reader = mqtt.connect(V5)
    reader.subscribe(topic, properties=Properties(subscription_ids=(7,)))
    assert reader.message().properties.subscription_ids == (7,)


@not_in_reference("it does not look")
def test_3_3_4_6_a_client_says_no_subscription_identifier(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.send(Publish(topic, b"x", 0, properties=Properties(subscription_ids=(5,))))
    wire.refused(Reason.PROTOCOL_ERROR, Reason.MALFORMED_PACKET)


# --- shared subscriptions --------------------------------------------------------------------------------------------


@both_versions
def test_4_8_2_each_message_goes_to_one_member_of_a_group(mqtt: Wires, version: int, topic: str) -> None:
    group, other_group = unique("g"), unique("g")
    members = [mqtt.connect(version) for _ in range(3)]
    for member in members:
        assert member.subscribe(f"$share/{group}/{topic}/#", qos=1) == (1,)
    alone, plain = mqtt.connect(version), mqtt.connect(version)
    alone.subscribe(f"$share/{other_group}/{topic}/#", qos=1)
    plain.subscribe(f"{topic}/#", qos=1)
    writer = mqtt.connect(version)
    expected = sorted(b"%d" % number for number in range(12))
    for number in range(12):
        writer.publish(f"{topic}/x", b"%d" % number, 1)
    assert sorted(alone.payloads(12)) == expected
    assert sorted(plain.payloads(12)) == expected
    shares = []
    for member in members:
        member.nothing(kind=Suback, seconds=0.05)
        shares.append([packet.payload for packet in member.inbox if isinstance(packet, Publish)])
    assert sorted(payload for share in shares for payload in share) == expected
    assert all(shares), "everybody has something to do"


@both_versions
def test_4_8_2_who_unsubscribes_or_leaves_gets_no_more(mqtt: Wires, version: int, topic: str) -> None:
    filter_ = f"$share/{unique('g')}/{topic}"
    one, two, three = (mqtt.connect(version) for _ in range(3))
    for member in (one, two, three):
        member.subscribe(filter_, qos=1)
    one.unsubscribe(filter_)
    two.disconnect()
    writer = mqtt.connect(version)
    for number in range(6):
        writer.publish(topic, b"%d" % number, 1)
    assert sorted(three.payloads(6)) == sorted(b"%d" % number for number in range(6))
    one.nothing()


def test_4_8_2_3_the_qos_is_that_of_the_member(mqtt: Wires, topic: str) -> None:
    member = mqtt.connect(V5)
    member.subscribe(f"$share/{unique('g')}/{topic}", qos=0)
    mqtt.connect(V5).publish(topic, b"x", 2)
    assert member.message().qos == 0


def test_4_8_2_a_shared_and_a_plain_subscription_of_one_client_are_two(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.subscribe(f"$share/{unique('g')}/{topic}", topic, qos=1)
    wire.publish(topic, b"x", 1)
    assert wire.payloads(2) == [b"x", b"x"]
    wire.nothing()


@not_in_reference("it takes them for ordinary filters")
@both_versions
@pytest.mark.parametrize("filter_", ["$share/g", "$share//a", "$share/g+/a", "$share/g#/a", "$share/g/"])
def test_4_8_2_1_and_2_wrong_shares_are_refused(mqtt: Wires, version: int, filter_: str) -> None:
    wire = mqtt.connect(version)
    wire.subscribe_refused(
        Filter(filter_, 1), Reason.TOPIC_FILTER_INVALID, Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR
    )


@not_in_reference("it closes the connection for one wrong filter of many")
def test_3_9_3_2_one_wrong_filter_of_many_fails_alone(mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    reasons = wire.subscribe(topic, "$share//x", qos=1)
    assert reasons[0] == 1
    assert reasons[1] >= 0x80


@not_in_reference("sends a message for each of the subscriptions")
@pytest.mark.parametrize("lasts", [False, True])
def test_3_8_3_3_a_subscription_without_local_messages_says_nothing_about_how_they_come_by_another(
    mqtt: Wires, topic: str, lasts: bool
) -> None:
    wire, other = mqtt.durable() if lasts else mqtt.connect(), mqtt.connect()
    wire.subscribe(Filter(topic, 2, no_local=True), properties=Properties(subscription_ids=(1,)))
    wire.subscribe(Filter(f"{topic}/#", 1), properties=Properties(subscription_ids=(2,)))
    wire.publish(topic, b"mine", 2)
    mine = wire.message()
    assert (mine.payload, mine.qos, mine.properties.subscription_ids) == (b"mine", 1, (2,))
    other.publish(topic, b"theirs", 2)
    theirs = wire.message()
    assert (theirs.payload, theirs.qos, sorted(theirs.properties.subscription_ids)) == (b"theirs", 2, [1, 2])
