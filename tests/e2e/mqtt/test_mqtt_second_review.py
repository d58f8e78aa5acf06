"""What a second reading has found: names that are no topics, refusals, limits, and what is sent again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from millstream.broker.journal import EntityFact
from millstream.broker.metrics import Metrics
from millstream.broker.mqtt.retained import Kept, Retained
from millstream.broker.mqtt.subscription import Subscription
from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import (
    V4,
    V5,
    Connect,
    Filter,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Will,
)
from millstream.mqtt.reasons import Reason
from millstream.mqtt.writer import encode
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wire, Wires, session_of, unique
from tests.logged import logged
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has bugs of its own")


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream(mqtt={"retained_max": 60_000})
    yield running
    running.stop()


# --- names that are no topics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, b"\xff\xfe", b"a\0b", b"every/+"])
def test_what_another_door_puts_among_names_that_are_no_topics_stops_nobody(
    mqtt: Wires, server: Millstream, topic: str, key: bytes | None
) -> None:
    name = f"{topic}/größe"
    reader, everything, writer = mqtt.durable(), mqtt.durable(), mqtt.connect()
    reader.subscribe(name, qos=1)
    everything.subscribe(Filter("#", 1, retain_handling=2))
    writer.publish(name, b"before", 1)
    assert reader.message().payload == everything.message().payload == b"before"
    with server.broker.connect() as client:
        client.publish("_mqtt", b"no message of MQTT", key=key)
    writer.publish(name, b"there", 1)
    assert reader.message().payload == everything.message().payload == b"there"
    for wire in (reader, everything):
        wire.drop()
    with server.broker.connect() as client:
        client.publish("_mqtt", b"no message of MQTT", key=key)
    writer.publish(name, b"away", 1)
    for wire in (reader, everything):
        assert mqtt.durable(client_id=wire.client_id).message().payload == b"away"


def test_a_session_gets_what_is_published_under_a_name_that_begins_with_a_dollar(mqtt: Wires) -> None:
    name = f"${unique('device')}/state"
    writer, other, reader = mqtt.connect(), mqtt.durable(), mqtt.durable()
    other.subscribe("größe", qos=1)
    writer.publish("größe", b"something before", 1)
    assert other.message().payload == b"something before"
    assert reader.subscribe(name, qos=1) == (1,)
    assert [writer.publish(name, payload, 1) for payload in (b"first", b"second")] == [0, 0]
    assert reader.payloads(2) == [b"first", b"second"]
    reader.drop()
    writer.publish(name, b"away", 1)
    again = mqtt.durable(client_id=reader.client_id)
    assert again.message().payload == b"away"
    again.nothing()


# --- what is looked for while subscriptions change -------------------------------------------------------------------


def far_behind(mqtt: Wires, topic: str) -> tuple[Wire, Publish, list[str]]:
    """A reader of `topic/#` that has got one message and must confirm it to get others, and the names of its topics."""
    reader, writer = mqtt.durable(receive_maximum=1), mqtt.connect()
    names = [f"{topic}/{number}" for number in range(5)]
    reader.subscribe(f"{topic}/#", qos=1)
    for name in names:
        writer.publish(name, b"old", 1)
        writer.publish(name, b"old", 1)
    return reader, reader.receive(Publish), names


def assert_gets_new_ones(mqtt: Wires, reader: Wire, names: list[str]) -> None:
    writer = mqtt.connect()
    for name in names:
        writer.publish(name, b"new", 1)
    missing = set(names)
    while missing:
        message = reader.message()
        if message.payload == b"new":
            missing.remove(message.topic)


def test_who_subscribes_again_while_it_is_behind_gets_what_comes_next(mqtt: Wires, topic: str) -> None:
    reader, first, names = far_behind(mqtt, topic)
    reader.subscribe(f"{topic}/#", qos=0)
    reader.subscribe(f"{topic}/#", qos=1)
    reader.send(Puback(first.packet_id))
    assert_gets_new_ones(mqtt, reader, names)


def test_who_unsubscribes_while_its_topics_are_looked_through_is_not_deaf_to_them(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.mqtt.world._LOOKED_AT_A_TIME", 1)
    reader, first, names = far_behind(mqtt, topic)
    session = session_of(server, reader.client_id)

    async def change() -> None:
        session.catch_up()
        await asyncio.sleep(0)
        session.world.unsubscribe(session, [f"{topic}/#"])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not session.positions
        assert not session.behind
        list(session.world.subscribe(session, [Subscription(f"{topic}/#", 1)]))

    server.broker.run(change())
    reader.send(Puback(first.packet_id))
    assert_gets_new_ones(mqtt, reader, names)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_a_retained_message_that_its_topic_refuses_is_not_kept(
    mqtt: Wires, server: Millstream, topic: str, qos: int
) -> None:
    writer, lasting = mqtt.connect(), mqtt.durable()
    with server.broker.connect() as client:
        client.create_topic(topic.replace("/", "."), config={"max_message_bytes": 1024})
        assert lasting.publish(topic, b"good", qos, retain=True) == 0
        assert writer.publish(topic, b"x" * 3000, qos, retain=True) == Reason.QUOTA_EXCEEDED
        assert lasting.publish(topic, b"x" * 3000, qos, retain=True) == Reason.QUOTA_EXCEEDED
        client.set_mode("maintenance", "new disk")
        try:
            assert writer.publish(topic, b"late", qos, retain=True) >= 0x80
            assert lasting.publish(topic, b"late", qos, retain=True) >= 0x80
        finally:
            client.set_mode("normal")
    reader = mqtt.connect()
    reader.subscribe(topic)
    assert reader.message().payload == b"good"


def test_a_retained_message_beyond_a_quota_is_not_kept_where_its_topic_is_stored(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    writer, lasting = mqtt.connect(), mqtt.durable()
    with server.broker.connect() as client:
        client.create_topic(topic.replace("/", "."))
        writer.publish(topic, b"good", 1, retain=True)
        for quota in ({"publish_messages_per_s": 1}, {"storage_bytes": 1}):
            client.set_quota("default", **quota)
            try:
                writer.publish(topic, b"x", 1)
                refused = [at.publish(topic, b"late", qos, retain=True) for at in (writer, lasting) for qos in (1, 2)]
            finally:
                client.set_quota("default")
            assert set(refused) == {Reason.QUOTA_EXCEEDED}
    reader = mqtt.connect()
    reader.subscribe(topic)
    assert reader.message().payload == b"good"


@pytest.mark.parametrize("name", ["{}", "{}/no topic"])
def test_of_retained_messages_that_come_together_the_last_one_is_kept(
    mqtt: Wires, server: Millstream, topic: str, name: str
) -> None:
    """Each kind has its own way to the disk, and one is longer than the other."""
    name = name.format(topic)
    mqtt.durable().subscribe(name, qos=1)
    writer = mqtt.durable()
    writer.send(Publish(name, b"old", 2, True, packet_id=1), Publish(name, b"new", 1, True, packet_id=2))
    assert (writer.receive(Pubrec).reason, writer.receive(Puback).reason) == (0, 0)
    assert [kept.message.payload for kept in server.broker.broker.mqtt.kept("default", name) if kept] == [b"new"]


@pytest.mark.parametrize("name", ["kept/{}", "kept/no topic/{}"])
def test_retained_messages_that_come_together_are_no_more_than_there_may_be(name: str) -> None:
    server = Millstream(mqtt={"retained_max": 5, "receive_maximum": 100})
    wires = Wires(server)
    try:
        wires.durable().subscribe("kept/#", qos=1)
        writer = wires.connect()
        writer.send(*(Publish(name.format(number), b"x", 1, True, packet_id=1 + number) for number in range(50)))
        reasons = [writer.receive(Puback).reason for _ in range(50)]
        assert reasons == [0] * 5 + [Reason.QUOTA_EXCEEDED] * 45
        assert server.broker.broker.mqtt.retained.count == 5
    finally:
        wires.close()
        server.stop()


def test_while_the_broker_takes_no_messages_none_is_retained_or_passed_on(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    """Retained ones are on the disk, which may be what is full."""
    writer, reader = mqtt.connect(), mqtt.connect()
    reader.subscribe(f"{topic}/#", "$queue/responses/mine")
    with server.broker.connect() as client:
        client.set_mode("maintenance", "new disk")
        try:
            for name in (topic, f"{topic}/größe", "$queue/responses/mine"):
                assert writer.publish(name, b"late", 1, retain=name == topic) >= 0x80
        finally:
            client.set_mode("normal")
    assert not list(server.broker.broker.mqtt.retained.matching("default", topic))
    writer.publish(topic, b"in time")
    assert reader.message().payload == b"in time"


def test_how_fast_a_namespace_may_publish_counts_what_is_not_stored(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    writer = mqtt.connect()
    with server.broker.connect() as client:
        client.set_quota("default", publish_messages_per_s=5)
        try:
            live = [writer.publish(topic, b"x", 1) for _ in range(10)]
            kept = [writer.publish(topic, b"x", 1, retain=True) for _ in range(10)]
        finally:
            client.set_quota("default")
    assert live[0] < 0x80
    assert live[-1] == Reason.QUOTA_EXCEEDED
    assert set(kept) == {Reason.QUOTA_EXCEEDED}


def test_a_will_that_is_refused_leaves_a_line_in_the_log(mqtt: Wires, server: Millstream, topic: str) -> None:
    with logged() as log, server.broker.connect() as client:
        leaving = mqtt.connect(will=Will(topic, b"gone", 1, False))
        client.set_mode("maintenance", "new disk")
        try:
            leaving.drop()
            eventually(lambda: log.all("a will was not published", client=leaving.client_id))
        finally:
            client.set_mode("normal")


# --- limits ----------------------------------------------------------------------------------------------------------


def test_properties_and_topics_count_for_what_is_kept_in_memory() -> None:
    """A message may have no payload at all, and a megabyte of user properties."""
    server = Millstream(mqtt={"retained_bytes_max": 50_000, "queued_bytes_max": 50_000})
    wires = Wires(server)
    large = Properties(user=(("x", "y" * 20_000),))
    writer, reader = wires.connect(), wires.connect(receive_maximum=1)
    try:
        kept = [writer.publish(f"kept/{number}", b"-", 1, retain=True, properties=large) for number in range(3)]
        assert [reason >= 0x80 for reason in kept] == [False, False, True]
        assert writer.publish("long/" + "x" * 30_000, b"-", 1, retain=True) == Reason.QUOTA_EXCEEDED
        reader.subscribe("live", qos=1)
        for number in range(4):  # one is on its way, and there is room for two behind it
            writer.publish("live", bytes((number,)), 1, properties=large)
        assert reader.payloads(3) == [b"\0", b"\1", b"\2"]
        reader.nothing()
        writer.publish("live", b"next", 1, properties=large)
        assert reader.message().payload == b"next"
    finally:
        wires.close()
        server.stop()


def test_where_there_are_several_namespaces_none_takes_the_room_of_all() -> None:
    server = Millstream(mqtt={"sessions_max": 10, "retained_max": 10, "retained_bytes_max": 10_000})
    wires = Wires(server)

    def come(username: str | None = None) -> tuple[Wire, int]:
        wire = wires.open()
        return wire, wire.connect(Connect(V5, unique("c"), True, 60, username)).reason

    try:
        alone = [come() for _ in range(10)]
        assert [reason for _, reason in alone] == [0] * 10
        assert come()[1] == Reason.QUOTA_EXCEEDED
        for wire, _ in alone:
            wire.disconnect()
        eventually(lambda: server.broker.broker.mqtt.session_count == 0)
        with server.broker.connect() as client:
            client.create_namespace("other")
        mine = [come() for _ in range(10)]
        assert [reason for _, reason in mine] == [0] * 9 + [Reason.QUOTA_EXCEEDED]
        theirs, reason = come("other:device")
        assert reason == 0
        first = mine[0][0]
        kept = [first.publish(f"a/{number}", b"x", 1, retain=True) for number in range(10)]
        assert kept[9] == Reason.QUOTA_EXCEEDED
        assert max(kept[:9]) < 0x80
        assert first.publish("a/0", b"newer", 1, retain=True) < 0x80
        assert first.publish("a/0", bytes(9_000), 1, retain=True) == Reason.QUOTA_EXCEEDED
        assert theirs.publish("a/0", b"x", 1, retain=True) < 0x80
    finally:
        wires.close()
        server.stop()


def test_a_session_that_opens_many_partitions_after_a_start_lets_others_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"room{number}/light" for number in range(20)]
    server = Millstream(tmp_path)
    wires = Wires(server)
    reader, writer = wires.durable(client_id="everything"), wires.connect()
    reader.subscribe("+/light", qos=1)
    reader.disconnect()
    for name in names:
        writer.publish(name, name.encode(), 1)
    wires.close()
    server.stop()
    server = Millstream(tmp_path)
    broker, wires = server.broker.broker, Wires(server)
    turns, open_partition = 0, broker.topics._open
    opened: list[int] = []

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(opened) < len(names):
            asyncio.get_running_loop().call_soon(turn)

    def note(topic: Topic, number: int) -> Partition:
        opened.append(turns)
        return open_partition(topic, number)

    async def count() -> None:
        turn()

    monkeypatch.setattr(broker.topics, "_open", note)
    server.broker.run(count())
    try:
        assert sorted(wires.durable(client_id="everything").payloads(20)) == sorted(map(str.encode, names))
        assert len(set(opened)) == len(opened) == 20, "some were opened in the same turn"
    finally:
        wires.close()
        server.stop()


def test_filters_beyond_what_a_session_can_have_are_refused_without_being_looked_at(
    mqtt: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0

    def look(_: object, __: str) -> None:
        nonlocal looked_at
        looked_at += 1

    monkeypatch.setattr("millstream.broker.mqtt.subscribing.require_filter", look)
    reader = mqtt.durable()
    reasons = reader.subscribe(*(f"{number}" for number in range(10_000)), qos=1)
    assert list(reasons) == [1] * 1_000 + [Reason.QUOTA_EXCEEDED] * 9_000
    assert looked_at == 2_000
    assert reader.subscribe("0", "a", qos=0) == (0, Reason.QUOTA_EXCEEDED)


def test_the_filters_of_a_session_have_so_many_levels_and_no_more(mqtt: Wires) -> None:
    reader = mqtt.durable()
    deep = [f"{number}" + "/+" * 199 for number in range(60)]
    assert reader.subscribe(*deep, qos=1) == (1,) * 50 + (Reason.QUOTA_EXCEEDED,) * 10
    assert reader.subscribe("a", deep[0], qos=1) == (Reason.QUOTA_EXCEEDED, 1), "those that it has do not count twice"
    reader.unsubscribe(deep[1])
    assert reader.subscribe(*(f"a/{number}" for number in range(101)), qos=0) == (0,) * 100 + (Reason.QUOTA_EXCEEDED,)


def test_who_subscribes_faster_than_the_disk_is_not_read_from(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = server.broker.broker.mqtt
    reader, other = mqtt.durable(), mqtt.connect()
    works, record_durably = asyncio.Event(), room.store.journal.record_durably

    async def wait(*facts: EntityFact, holds: bool = False) -> None:
        await works.wait()
        await record_durably(*facts, holds=holds)

    async def work() -> None:
        works.set()

    monkeypatch.setattr(room.store.journal, "record_durably", wait)
    count = 2_000
    again = encode(Subscribe(1, (Filter(topic + "x" * 5_000, 1),)), V5) * count
    sending = threading.Thread(target=reader.send_bytes, args=(again,))
    sending.start()
    eventually(lambda: len(room._tasks) >= 100)
    for _ in range(100):
        other.ping()
    assert len(room._tasks) < count // 4
    server.broker.run(work())
    sending.join()
    for _ in range(count):
        reader.receive(Suback)


def test_a_retained_message_that_a_client_has_no_room_for_waits_once(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    reader, writer = mqtt.connect(receive_maximum=1), mqtt.connect()
    for number in range(4):
        writer.publish(f"{topic}/{number}", bytes((number,)), 1, retain=True)
    reader.subscribe(f"{topic}/+", qos=1)
    first = reader.receive(Publish)
    session = session_of(server, reader.client_id)

    async def go_on() -> int:
        for _ in range(100):
            session.go_on()
        assert session._keepsakes is not None
        return len(session._keepsakes)

    assert server.broker.run(go_on()) == 1
    reader.send(Puback(first.packet_id))
    assert sorted((first.payload, *reader.payloads(3))) == [b"\0", b"\1", b"\2", b"\3"]
    eventually(lambda: not session._keepsakes)


def test_filters_that_find_nothing_among_many_retained_messages_do_not_stop_the_others(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    retained = server.broker.broker.mqtt.retained

    async def fill() -> None:
        for number in range(20_000):
            retained._keep("default", Kept(Message(f"{topic}/{number}/state", b"on", 1, True), number))

    server.broker.run(fill())
    reader, other = mqtt.connect(), mqtt.connect()
    reader.subscribe(*(f"{topic}/+/nothing{number}" for number in range(200)))
    other.ping()
    session = session_of(server, reader.client_id)
    assert session._keepsakes, "it is still being looked for"
    reader.drop()
    eventually(lambda: not session._keepsakes)
    other.ping()


# --- what is sent again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_message_of_a_share_is_sent_again_with_its_identifier_and_retain_flag(tmp_path: Path, restarts: int) -> None:
    """Whoever looks for its handler by the subscription identifier would drop it."""
    server = Millstream(tmp_path)
    wires = Wires(server)
    with server.broker.connect() as client:
        client.create_topic("jobs")
    reader = wires.durable(client_id="reader")
    shared = Filter("$share/work/jobs", 1, retain_as_published=True)
    reader.subscribe(shared, properties=Properties(subscription_ids=(7,)))
    wires.connect().publish("jobs", b"x", 1, retain=True)
    first = reader.receive(Publish)
    reader.drop()
    for _ in range(restarts):
        wires.close()
        server.stop()
        server = Millstream(tmp_path)
        wires = Wires(server)
        server.broker.run(server.broker.broker.mqtt.store.journal.checkpoint())
    again = wires.durable(client_id="reader").receive(Publish)
    assert (first.retain, first.properties.subscription_ids) == (True, (7,))
    assert (again.dup, again.retain, again.properties.subscription_ids) == (True, True, (7,))
    assert not session_of(server, "reader").positions, "it reads no log"
    wires.close()
    server.stop()


def test_a_message_that_came_by_two_shares_is_sent_again_with_the_identifier_of_each(mqtt: Wires, topic: str) -> None:
    reader = mqtt.durable()
    for number, shared in enumerate((f"$share/one/{topic}", f"$share/two/{topic}"), 1):
        reader.subscribe(shared, qos=1, properties=Properties(subscription_ids=(number,)))

    def received(wire: Wire) -> list[tuple[int, tuple[int, ...]]]:
        found = [wire.receive(Publish), wire.receive(Publish)]
        return sorted((message.packet_id, message.properties.subscription_ids) for message in found)

    mqtt.connect().publish(topic, b"x", 1)
    first = received(reader)
    assert sorted(identifiers for _, identifiers in first) == [(1,), (2,)]
    reader.drop()
    assert received(mqtt.durable(client_id=reader.client_id)) == first


# --- packet ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["$queue/jobs", "live/jobs"])
@pytest.mark.parametrize("received", [False, True])
def test_packet_ids_of_qos_2_in_a_share_are_known_after_a_restart(tmp_path: Path, place: str, received: bool) -> None:
    """Otherwise the next message under such an id is a repetition to its client, and is confirmed and dropped."""
    server = Millstream(tmp_path)
    wires = Wires(server)
    worker = wires.durable(V4, "worker")
    worker.subscribe(f"$share/work/{place}", qos=2)
    wires.connect().publish(place, b"first", 2)
    before = worker.receive(Publish)
    if received:
        worker.send(Pubrec(before.packet_id))
        worker.receive(Pubrel)
    worker.drop()
    wires.close()
    server.stop()
    server = Millstream(tmp_path)
    wires = Wires(server)
    try:
        again = wires.durable(V4, "worker")
        if place == "live/jobs" and not received:
            assert again.message() == structs.replace(before, dup=True)
        else:
            assert again.next() == Pubrel(before.packet_id)
            again.send(Pubcomp(before.packet_id))
        wires.connect().publish(place, b"second", 2)
        if place == "$queue/jobs" and not received:
            assert again.message().payload == b"first"
        after = again.receive(Publish)
        assert (after.payload, after.packet_id != before.packet_id) == (b"second", True)
    finally:
        wires.close()
        server.stop()


@pytest.mark.parametrize("version", [V4, V5])
def test_a_client_that_loses_its_connection_is_told_to_forget_the_packet_id_of_a_queue_message(
    mqtt: Wires, version: int
) -> None:
    queue = f"$share/work/$queue/{unique('q')}"
    worker = mqtt.durable(version)
    worker.subscribe(queue, qos=2)
    mqtt.connect().publish(queue.removeprefix("$share/work/"), b"x", 1)
    before = worker.receive(Publish)
    worker.drop()
    again = mqtt.durable(version, worker.client_id)
    assert again.next() == Pubrel(before.packet_id)
    again.send(Pubcomp(before.packet_id))
    after = again.message()
    assert (after.payload, after.dup, after.packet_id != before.packet_id) == (b"x", False, True)


def test_a_pubrec_that_is_said_twice_is_answered_when_it_is_on_disk(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is released its client may forget the packet id: after a crash the message must not go out under it."""
    journal = server.broker.broker.mqtt.store.journal
    reader = mqtt.durable()
    reader.subscribe(topic, qos=2)
    mqtt.connect().publish(topic, b"x", 2)
    packet_id = reader.receive(Publish).packet_id
    works, record_durably = asyncio.Event(), journal.record_durably

    async def wait(*facts: EntityFact, holds: bool = False) -> None:
        await works.wait()
        await record_durably(*facts, holds=holds)

    async def work() -> None:
        works.set()

    monkeypatch.setattr(journal, "record_durably", wait)
    reader.send(Pubrec(packet_id), Pubrec(packet_id))
    reader.nothing(Pubrel)
    server.broker.run(work())
    assert reader.receive(Pubrel).packet_id == packet_id
    reader.send(Pubcomp(packet_id))


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("before", [[b"before"], []])
def test_a_retained_message_that_only_its_storing_refuses_gives_way_to_the_one_before(
    mqtt: Wires, server: Millstream, topic: str, qos: int, before: list[bytes]
) -> None:
    with server.broker.connect() as client:
        client.create_topic(topic.replace("/", "."), config={"max_depth": 2})
    writer = mqtt.durable()
    for payload in before:
        assert writer.publish(topic, payload, 1, retain=True) < 0x80
    for _ in range(2 - len(before)):
        assert writer.publish(topic, b"fills it", 1) < 0x80
    for payload in (b"refused", b""):
        assert writer.publish(topic, payload, qos, retain=True) == Reason.QUOTA_EXCEEDED
    together = [Publish(topic, b"refused %d" % number, qos, True, packet_id=number) for number in (101, 102, 103)]
    writer.send(*together)
    for _ in together:
        answer = writer.receive(Puback if qos == 1 else Pubrec)
        assert answer.reason == Reason.QUOTA_EXCEEDED
    kept = server.broker.broker.mqtt.retained

    def found(retained: Retained) -> list[bytes]:
        return [each.message.payload for each in retained.matching("default", topic) if each]

    def on_disk() -> list[bytes]:
        clock = server.broker.clock
        return found(Retained(kept.log, server.broker.broker.settings.mqtt, clock=clock, metrics=Metrics()))

    assert found(kept) == before
    eventually(lambda: on_disk() == before)
