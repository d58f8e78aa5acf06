"""MQTT as those who run the broker see it: sessions, retained messages, and what can be done about them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import millstream
from millstream.errors import Forbidden, InvalidArgument, MessageNotFound, SessionNotFound
from millstream.mqtt.packets import V4, V5, Connect, Disconnect, Filter, Properties, Will
from millstream.mqtt.reasons import Reason
from millstream.wire.mqtt_calls import ListRetained, ListSessions, RetainedPage, SessionPage
from tests.e2e.access_world import key_for
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wires, both_versions, unique
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason="these are calls of ours")


@pytest.fixture
def client(server: Millstream) -> millstream.Client:
    return server.broker.connect()


# --- sessions --------------------------------------------------------------------------------------------------------


@both_versions
def test_a_session_shows_its_connection_its_subscriptions_and_its_will(
    mqtt: Wires, client: millstream.Client, version: int, topic: str
) -> None:
    wire = mqtt.connect(version, keep_alive_s=30, will=Will(f"{topic}/gone", b"bye"))
    wire.subscribe(f"{topic}/+", qos=1)
    found = client.mqtt.session(wire.client_id)
    assert (found.connected, found.version, found.keep_alive_s) == (True, version, 30)
    assert found.address.startswith("127.0.0.1:")
    assert found.connected_ms
    assert found.created_ms
    assert (found.expiry_s, found.ends_ms, found.will_topic) == (0, 0, f"{topic}/gone")
    assert [(one.filter, one.qos) for one in found.subscribed] == [(f"{topic}/+", 1)]


def test_the_options_of_subscriptions_are_shown(mqtt: Wires, client: millstream.Client, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.subscribe(Filter(topic, 2, True, True, 2), properties=Properties(subscription_ids=(7,)))
    [one] = client.mqtt.session(wire.client_id).subscribed
    assert (one.qos, one.no_local, one.retain_as_published, one.retain_handling, one.identifier) == (
        2,
        True,
        True,
        2,
        7,
    )


def test_a_queue_is_shown_as_a_subscription_with_its_group(mqtt: Wires, client: millstream.Client, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.subscribe(topic, f"$share/billing/$queue/{topic}")
    found = client.mqtt.session(wire.client_id)
    assert [(one.filter, one.group) for one in found.subscribed] == [
        (f"$share/billing/$queue/{topic}", "billing"),
        (topic, ""),
    ]
    assert found.subscriptions == 2


@both_versions
def test_what_waits_for_a_client_that_is_away_is_counted_where_it_waits(
    mqtt: Wires, client: millstream.Client, version: int, topic: str
) -> None:
    reader, writer = mqtt.durable(version), mqtt.connect(version)
    writer.publish(f"{topic}/a", b"too early", 1)
    reader.subscribe(f"{topic}/#", f"{topic}/a")  # what overlaps counts once
    reader.disconnect()
    for name, number in (("a", 2), ("b", 5), ("not a topic", 3)):
        for _ in range(number):
            writer.publish(f"{topic}/{name}", b"x", 1)
    name = topic.replace("/", ".")
    found = client.mqtt.session(reader.client_id)
    assert not found.connected
    assert found.ends_ms > found.created_ms
    assert found.waiting == 10
    places = [(place.topic, place.end - place.offset) for place in found.behind]
    assert places == [(f"{name}.b", 5), ("_mqtt", 3), (f"{name}.a", 2)]
    [listed] = client.mqtt.sessions(reader.client_id)
    assert (listed.client_id, listed.waiting, listed.subscriptions) == (reader.client_id, 10, 2)
    again = mqtt.durable(version, reader.client_id)
    again.messages(10)
    assert client.mqtt.session(reader.client_id).waiting == 0


def test_a_session_that_reads_with_qos_0_or_does_not_last_has_nothing_waiting(
    mqtt: Wires, client: millstream.Client, topic: str
) -> None:
    durable, passing, writer = mqtt.durable(V5), mqtt.connect(V5), mqtt.connect(V5)
    client.create_topic(topic.replace("/", "."))
    durable.subscribe(topic, qos=0)
    passing.subscribe(topic)
    writer.publish(topic, b"x", 1)
    assert [client.mqtt.session(one.client_id).waiting for one in (durable, passing)] == [0, 0]


def test_messages_that_are_not_confirmed_are_in_flight(mqtt: Wires, client: millstream.Client, topic: str) -> None:
    reader, writer = mqtt.durable(V5), mqtt.connect(V5)
    reader.subscribe(topic, qos=1)
    for _ in range(3):
        writer.publish(topic, b"x", 1)
    eventually(lambda: client.mqtt.session(reader.client_id).in_flight == 3)


def test_messages_larger_than_a_client_takes_are_counted_as_dropped(
    mqtt: Wires, client: millstream.Client, topic: str
) -> None:
    reader, writer = mqtt.connect(V5, maximum_packet_bytes=100), mqtt.connect(V5)
    reader.subscribe(topic)
    writer.publish(topic, b"x" * 200, 1)
    assert client.mqtt.session(reader.client_id).dropped == 1


def test_sessions_are_listed_by_prefix_state_and_page(mqtt: Wires, client: millstream.Client) -> None:
    prefix = unique("page")
    wires = [mqtt.durable(V5, f"{prefix}-{number}") for number in range(5)]
    for wire in wires[3:]:
        wire.disconnect()
    names = [f"{prefix}-{number}" for number in range(5)]
    assert [one.client_id for one in client.mqtt.sessions(prefix)] == names
    assert [one.client_id for one in client.mqtt.sessions(prefix, connected=True)] == names[:3]
    assert [one.client_id for one in client.mqtt.sessions(prefix, connected=False)] == names[3:]
    found, after = [], ""
    while not found or after:
        page: SessionPage = client.call(ListSessions(prefix=prefix, limit=2, after=after), SessionPage)
        found += [one.client_id for one in page.sessions]
        after = page.after
    assert found == names
    with pytest.raises(InvalidArgument, match="limit must be between 1 and 1000"):
        client.call(ListSessions(limit=0), SessionPage)


def test_sessions_of_another_namespace_are_not_seen(server: Millstream, mqtt: Wires) -> None:
    wire = mqtt.open()
    wire.connect(Connect(V5, unique("c"), username="team-a:me"))
    assert wire.client_id not in [one.client_id for one in server.broker.connect().mqtt.sessions()]
    theirs = server.broker.connect(namespace="team-a")
    assert [one.client_id for one in theirs.mqtt.sessions()] == [wire.client_id]
    assert theirs.mqtt.overview().connected == 1


def test_the_overview_counts(mqtt: Wires, client: millstream.Client, topic: str) -> None:
    before = client.mqtt.overview()
    here, away = mqtt.connect(V5), mqtt.durable(V5)
    here.subscribe(topic, f"{topic}/x")
    away.disconnect()
    here.publish(topic, b"kept", 1, retain=True)
    after = client.mqtt.overview()
    fields = ("connected", "sessions", "durable", "away", "subscriptions", "retained", "retained_bytes", "received")
    grown = {name: getattr(after, name) - getattr(before, name) for name in fields}
    assert grown == dict(zip(fields, (1, 2, 1, 1, 2, 1, len(topic) + len("kept"), 1), strict=True))
    assert after.sent > before.sent
    assert client.mqtt.overview(everywhere=True).sessions >= after.sessions


# --- taking action ---------------------------------------------------------------------------------------------------


def test_a_client_is_disconnected_told_why_and_may_come_back(
    mqtt: Wires, client: millstream.Client, topic: str
) -> None:
    watcher = mqtt.connect(V5)
    watcher.subscribe(f"{topic}/gone")
    wire = mqtt.durable(V5, will=Will(f"{topic}/gone", b"lost"))
    wire.subscribe(topic)
    assert client.mqtt.disconnect(wire.client_id, "making room")
    [farewell] = [packet for packet in wire.end() if isinstance(packet, Disconnect)]
    assert (farewell.reason, farewell.properties.reason_string) == (Reason.ADMINISTRATIVE_ACTION, "making room")
    assert watcher.message().payload == b"lost"
    assert not client.mqtt.disconnect(wire.client_id), "it was not connected"
    assert mqtt.durable(V5, wire.client_id).connack.session_present


def test_a_client_of_3_1_1_is_disconnected_without_a_word(mqtt: Wires, client: millstream.Client) -> None:
    wire = mqtt.connect(V4)
    client.mqtt.disconnect(wire.client_id)
    assert wire.end() == []
    with pytest.raises(SessionNotFound, match="there is no MQTT session"):
        client.mqtt.session(wire.client_id)


def test_a_session_that_is_forgotten_is_gone_for_good(tmp_path: Path) -> None:
    server = Millstream(tmp_path)
    wires = Wires(server)
    for client_id, here in (("here", True), ("away", False), ("stays", False)):
        wire = wires.durable(V5, client_id)
        wire.subscribe("a/b")
        if not here:
            wire.disconnect()
    client = server.broker.connect()
    for client_id in ("here", "away"):
        client.mqtt.forget(client_id)
        with pytest.raises(SessionNotFound):
            client.mqtt.forget(client_id)
    wires.close()
    server.stop()
    server = Millstream(tmp_path)
    assert [one.client_id for one in server.broker.connect().mqtt.sessions()] == ["stays"]
    wires = Wires(server)
    assert not wires.durable(V5, "away").connack.session_present
    wires.close()
    server.stop()


# --- retained messages -----------------------------------------------------------------------------------------------


def test_retained_messages_are_listed_shown_and_cleared(mqtt: Wires, client: millstream.Client, topic: str) -> None:
    wire = mqtt.connect(V5)
    told = Properties(content_type="text/plain", user=(("room", "kitchen"),), message_expiry_s=3600)
    for name in ("b", "a/1", "a", "not a topic"):
        wire.publish(f"{topic}/{name}", b"21.5", 1, retain=True, properties=told)
    names = [f"{topic}/{name}" for name in ("a", "a/1", "b", "not a topic")]
    found = list(client.mqtt.retained(f"{topic}/#"))
    assert [one.topic for one in found] == names
    assert {(one.size, one.qos, one.client_id, one.content_type) for one in found} == {
        (4, 1, wire.client_id, "text/plain")
    }
    assert all(3_590_000 < one.expiry_ms - one.stored_ms <= 3_600_000 for one in found)
    assert [one.topic for one in client.mqtt.retained(f"{topic}/+")] == [names[0], *names[2:]]
    page = client.call(ListRetained(filter=f"{topic}/#", limit=2), RetainedPage)
    assert page.after == names[1]
    page = client.call(ListRetained(filter=f"{topic}/#", limit=2, after=page.after), RetainedPage)
    assert ([one.topic for one in page.messages], page.after) == (names[2:], "")

    shown = client.mqtt.retained_message(names[3])
    assert (shown.payload, shown.user_properties) == (b"21.5", [("room", "kitchen")])
    assert client.mqtt.clear_retained(f"{topic}/a/#", dry_run=True) == 2
    assert client.mqtt.clear_retained(f"{topic}/a/#") == 2
    assert client.mqtt.clear_retained(f"{topic}/a/#") == 0
    assert [one.topic for one in client.mqtt.retained(f"{topic}/#")] == names[2:]
    with pytest.raises(MessageNotFound, match="nothing is retained"):
        client.mqtt.retained_message(names[0])
    reader = mqtt.connect(V5)
    reader.subscribe(f"{topic}/#")
    assert [message.topic for message in reader.messages(2)] == names[2:]


def test_what_is_cleared_stays_cleared_after_a_restart(tmp_path: Path) -> None:
    server = Millstream(tmp_path)
    wires = Wires(server)
    for number in range(20):
        wires.connect(V5).publish(f"lamps/{number}/state", b"on", 1, retain=True)
    stored_ms = server.broker.connect().mqtt.retained_message("lamps/7/state").stored_ms
    assert server.broker.connect().mqtt.clear_retained("lamps/1/#") == 1
    wires.close()
    server.stop()
    server = Millstream(tmp_path)
    client = server.broker.connect()
    assert len(list(client.mqtt.retained("lamps/#"))) == 19
    assert client.mqtt.overview().retained_bytes == sum(
        len(f"lamps/{number}/stateon") for number in range(20) if number != 1
    )
    assert abs(client.mqtt.retained_message("lamps/7/state").stored_ms - stored_ms) < 1000
    server.stop()


@pytest.mark.parametrize("wrong", ["", "a/#/b", "a+"])
def test_a_filter_that_is_none_is_refused_with_a_sentence(client: millstream.Client, wrong: str) -> None:
    for ask in (lambda: list(client.mqtt.retained(wrong)), lambda: client.mqtt.clear_retained(wrong)):
        with pytest.raises(InvalidArgument, match="filter"):
            ask()
    with pytest.raises(InvalidArgument, match="topic"):
        client.mqtt.retained_message("a/+")


# --- doors -----------------------------------------------------------------------------------------------------------


def test_the_asyncio_client_has_the_same_names(server: Millstream, mqtt: Wires, topic: str) -> None:
    wire = mqtt.connect(V5)
    wire.publish(topic, b"kept", 1, retain=True)

    async def look() -> None:
        async with millstream.aio.connect(server.broker.address) as client:
            assert [one.client_id async for one in client.mqtt.sessions(wire.client_id)] == [wire.client_id]
            assert (await client.mqtt.session(wire.client_id)).connected
            assert [one.topic async for one in client.mqtt.retained(topic)] == [topic]
            assert (await client.mqtt.retained_message(topic)).payload == b"kept"
            assert await client.mqtt.clear_retained(topic) == 1
            assert (await client.mqtt.overview()).connected >= 1
            assert await client.mqtt.disconnect(wire.client_id)
            with pytest.raises(SessionNotFound):
                await client.mqtt.forget(wire.client_id)

    asyncio.run(look())


def test_rights_bound_what_is_seen_and_done_and_it_is_written_down() -> None:
    server = Millstream(access={"mode": "keys"})
    try:
        admin = server.broker.connect(key=key_for(server.broker, "admin"))
        wire = Wires(server).open()
        wire.connect(Connect(V5, "device", password=key_for(server.broker, "admin").encode()))
        for name in ("mine/a", "theirs/a"):
            wire.publish(name, b"x", 1, retain=True)
        reader = server.broker.connect(key=key_for(server.broker, "read", scopes=["default:mine.#"]))
        assert [one.topic for one in reader.mqtt.retained("mine/#")] == ["mine/a"]
        for forbidden in (
            lambda: list(reader.mqtt.retained()),
            lambda: reader.mqtt.retained_message("theirs/a"),
            lambda: list(reader.mqtt.sessions()),
            lambda: reader.mqtt.clear_retained("mine/#"),
            lambda: reader.mqtt.disconnect(wire.client_id),
            lambda: reader.mqtt.overview(everywhere=True),
        ):
            with pytest.raises(Forbidden):
                forbidden()
        assert reader.mqtt.overview().connected == 1
        admin.mqtt.clear_retained("mine/#")
        admin.mqtt.disconnect(wire.client_id)
        written = {entry.call: (entry.names, entry.outcome) for entry in reversed(admin.audit().entries)}
        assert written["mqtt.clear_retained"] == (["mine/#"], "done")
        assert written["mqtt.disconnect"] == ([wire.client_id], "done")
    finally:
        server.stop()


def test_metrics_show_sessions_and_what_is_retained(mqtt: Wires, client: millstream.Client, topic: str) -> None:
    mqtt.connect(V5).publish(topic, b"kept", 1, retain=True)
    seen = client.mqtt.overview(everywhere=True)
    numbers = dict(line.rsplit(" ", 1) for line in client.metrics().splitlines() if not line.startswith("#"))
    assert int(float(numbers["millstream_mqtt_sessions"])) == seen.sessions
    assert int(float(numbers["millstream_mqtt_retained"])) == seen.retained
    assert int(float(numbers["millstream_mqtt_retained_bytes"])) == seen.retained_bytes
