"""What a reading of the room with suspicious eyes has found: each of these once lost, repeated or stopped something."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from millstream.broker.mqtt.parcel import Parcel
from millstream.broker.mqtt.queue_topics import QueueTopics
from millstream.broker.mqtt.reading import Position
from millstream.broker.mqtt.subscribing import Unsubscribing
from millstream.broker.mqtt.subscription import QueueSubscription, Subscription
from millstream.broker.registry import Topic
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import (
    V5,
    Connect,
    Disconnect,
    Filter,
    Properties,
    Puback,
    Publish,
    Pubrel,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from millstream.mqtt.reasons import Reason
from millstream.topics import TopicConfig
from tests.e2e.access_world import key_for
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wire, Wires, session_of, unique
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has bugs of its own")


@pytest.fixture(scope="module")
def server() -> Iterator[Millstream]:
    running = Millstream(mqtt={"retained_max": 60_000})
    yield running
    running.stop()


def expires_in(seconds: int) -> Properties:
    return Properties(message_expiry_s=seconds)


# --- messages that expire --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_goes_on_after_an_unconfirmed_message_has_expired(mqtt: Wires, topic: str, qos: int) -> None:
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(topic)
    writer.publish(topic, b"short", qos, properties=expires_in(5))
    reader.receive(Publish)
    reader.drop()
    mqtt.skip(60)
    again = mqtt.durable(client_id=reader.client_id)
    if qos == 2:
        # The client may have it: only PUBREL makes it forget the packet id.
        again.receive(Pubrel)
    writer.publish(topic, b"next", qos)
    assert again.receive(Publish).payload == b"next"


def test_what_expires_while_it_waits_for_room_is_not_sent(mqtt: Wires, topic: str) -> None:
    reader, writer = mqtt.connect(receive_maximum=1), mqtt.connect()
    reader.subscribe(topic)
    writer.publish(topic, b"first", 1)
    writer.publish(topic, b"short", 1, properties=expires_in(5))
    first = reader.receive(Publish)
    mqtt.skip(60)
    writer.publish(topic, b"last", 1)
    reader.send(Puback(first.packet_id))
    assert reader.message().payload == b"last"


def test_a_message_of_another_door_that_expires_in_a_thousand_years_is_delivered(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    reader = mqtt.connect()
    reader.subscribe(topic)
    room = server.broker.broker.mqtt
    message = Message(topic, b"x", qos=1, expiry_us=room.clock.now_us() + 1000 * 365 * 86_400 * 1_000_000)

    async def publish() -> None:
        room.world("default").dispatch(Parcel(message, room.clock.now_us()), None)

    server.broker.run(publish())
    assert reader.message().properties.message_expiry_s == 0xFFFF_FFFF


# --- QoS 2 -----------------------------------------------------------------------------------------------------------


def test_a_packet_id_whose_message_is_gone_is_released_and_not_used_for_another(
    mqtt: Wires, server: Millstream, topic: str
) -> None:
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(topic)
    writer.publish(topic, b"x", 2)
    found = reader.receive(Publish)
    reader.drop()
    server.broker.run(server.broker.broker.topics.delete("default", topic.replace("/", ".")))
    again = mqtt.durable(client_id=reader.client_id)
    assert again.receive(Pubrel).packet_id == found.packet_id


@pytest.fixture
def in_time() -> Iterator[Millstream]:
    """A broker whose time nobody has skipped."""
    running = Millstream()
    yield running
    running.stop()


def test_an_answer_of_qos_2_from_a_session_that_lasts_reaches_an_inbox(in_time: Millstream) -> None:
    mqtt, client = Wires(in_time), in_time.broker.connect()
    name = unique("asked")
    client.create_topic(name)
    worker = mqtt.durable()
    worker.subscribe(name)
    answers: list[object] = []

    def ask() -> None:
        answers.append(client.request(name, b"question", timeout=5))

    asking = threading.Thread(target=ask)
    asking.start()
    question = worker.message()
    assert question.properties.response_topic is not None
    told = Properties(correlation_data=question.properties.correlation_data)
    assert worker.publish(question.properties.response_topic, b"answer", 2, properties=told) < 0x80
    asking.join()
    assert [answer.value for answer in answers] == [b"answer"]  # type: ignore[attr-defined]
    mqtt.close()


def test_a_takeover_while_packet_ids_are_recorded_sends_each_message_once(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(topic)
    journal = server.broker.broker.mqtt.store.journal
    gate = asyncio.Event()
    wait, sync = journal.record_durably, journal.sync

    async def slow_record(*facts: object, holds: bool = False) -> None:
        await gate.wait()
        await wait(*facts, holds=holds)  # type: ignore[arg-type]

    async def slow_sync() -> None:
        await gate.wait()
        await sync()

    monkeypatch.setattr(journal, "record_durably", slow_record)
    monkeypatch.setattr(journal, "sync", slow_sync)
    writer.send(Publish(topic, b"x", 2, packet_id=9))
    session = session_of(server, reader.client_id)
    eventually(lambda: len(session.outgoing) == 1)
    again = mqtt.durable(client_id=reader.client_id)
    server.broker.run(_set(gate))
    again.receive(Publish)
    again.nothing()


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_nothing_that_is_written_down_overtakes_a_packet_id_that_is_not(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position behind a message that the journal does not know would be a message that nobody gets."""
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(topic)
    facts: list[list[object]] = []
    store = server.broker.broker.mqtt.store
    session = session_of(server, reader.client_id)
    record, record_durably, journal_durably = store.record, store.record_durably, store.journal.record_durably
    gate = asyncio.Event()

    def noted(entity: str, fact: object) -> None:
        if entity == session.entity:
            facts.append(fact)  # type: ignore[arg-type]
        record(entity, fact)

    async def durably(entity: str, *more: object) -> None:
        await gate.wait()
        for fact in more:
            noted(entity, fact)
        await record_durably(entity)

    async def slowly(*more: object, holds: bool = False) -> None:
        await gate.wait()
        await journal_durably(*more, holds=holds)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "record", noted)
    monkeypatch.setattr(store, "record_durably", durably)
    monkeypatch.setattr(store.journal, "record_durably", slowly)
    other = mqtt.connect()
    writer.send(Publish(topic, b"exactly once", 2, packet_id=9))
    eventually(lambda: len(session.outgoing) == 1)
    other.publish(topic, b"at least once", 1)
    assert reader.receive(Publish).payload == b"at least once"
    sent = [fact for fact in facts if fact[0] == "sent"]
    server.broker.run(_set(gate))
    assert [fact[-1] for fact in sent] == [0, 1]
    assert reader.receive(Publish).payload == b"exactly once"


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_will_that_cannot_be_retained_keeps_no_session_alive(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = mqtt.connect()
    watcher.subscribe(topic)
    wire = mqtt.connect(will=Will(topic, b"gone", 1, retain=True))
    retained = server.broker.broker.mqtt.retained
    monkeypatch.setattr(retained, "_settings", retained._settings.model_copy(update={"retained_max": 0}))
    wire.drop()
    sessions = server.broker.broker.mqtt.worlds["default"].sessions
    eventually(lambda: wire.client_id not in sessions)
    assert watcher.message().payload == b"gone"


def test_a_will_comes_after_what_was_published_before_it(mqtt: Wires, topic: str) -> None:
    watcher = mqtt.connect()
    watcher.subscribe(topic)
    wire = mqtt.connect(will=Will(topic, b"will", 0))
    mqtt.durable().subscribe(topic)  # so that it is stored
    wire.send(Publish(topic, b"last words", 0), Disconnect(Reason.DISCONNECT_WITH_WILL))
    assert watcher.payloads(2) == [b"last words", b"will"]


def test_positions_in_topics_that_are_gone_are_forgotten(mqtt: Wires, server: Millstream) -> None:
    name = unique("short-lived")
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(f"{name}/+")
    for number in range(5):
        writer.publish(f"{name}/{number}", b"x", 1)
        reader.message()
        server.broker.run(server.broker.broker.topics.delete("default", f"{name}.{number}"))
    reader.disconnect()
    again = mqtt.durable(client_id=reader.client_id)
    again.ping()
    assert not [p for p in session_of(server, reader.client_id).positions.values() if p.topic.startswith(name)]


def test_a_new_filter_does_not_bring_old_messages_of_names_that_are_no_topics(mqtt: Wires, topic: str) -> None:
    name = f"with space/{unique('t')}"
    mqtt.durable().subscribe(name)  # messages are kept for it
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(topic)
    writer.publish(name, b"old", 1)
    reader.subscribe(name)
    writer.publish(name, b"new", 1)
    assert reader.message().payload == b"new"
    reader.nothing()


def test_messages_that_the_line_of_deliveries_did_not_take_are_read_from_the_log(
    mqtt: Wires, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(topic)
    writer.publish(topic, b"1", 1)
    assert reader.message().payload == b"1"
    monkeypatch.setattr("millstream.broker.traffic.subscriptions._WAITING_BYTES_MAX", 0)
    writer.publish(topic, b"2", 1)
    assert reader.message().payload == b"2"


def test_what_waits_for_a_member_of_a_share_that_leaves_goes_to_the_others(mqtt: Wires, topic: str) -> None:
    slow, other, writer = mqtt.connect(receive_maximum=1), mqtt.connect(), mqtt.connect()
    slow.subscribe(f"$share/g/{topic}", qos=1)
    other.subscribe(f"$share/g/{topic}", qos=1)
    for number in range(10):
        writer.publish(topic, b"%d" % number, 1)
    slow.receive(Publish)
    first = other.payloads(5)
    slow.drop()
    assert sorted([*first, *other.payloads(5)]) == [b"%d" % number for number in range(10)]


def test_a_member_of_a_share_that_was_away_gets_its_turn_again(mqtt: Wires, topic: str) -> None:
    shared = f"$share/{unique('g')}/{topic}"
    first, second, writer = mqtt.durable(), mqtt.durable(), mqtt.connect()
    for wire in (first, second):
        wire.subscribe(shared, qos=1)
    first.disconnect()
    for number in range(4):
        writer.publish(topic, b"%d" % number, 1)
    assert second.payloads(4) == [b"0", b"1", b"2", b"3"]
    first = mqtt.durable(client_id=first.client_id)
    for number in range(4):
        writer.publish(topic, b"%d" % number, 1)
    assert len(first.payloads(2)) == len(second.payloads(2)) == 2


# --- retained messages -----------------------------------------------------------------------------------------------


def test_a_retained_message_published_while_others_expire_stays(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained = server.broker.broker.mqtt.retained
    partition = retained.log.partition
    append = partition.append_durably
    is_first = True

    async def meanwhile(batch: bytearray) -> int:
        nonlocal is_first
        if is_first:
            is_first = False
            for number in range(3):
                await retained.put("default", Message(f"{topic}/{number}", b"fresh", 1, True))
        return await append(batch)

    async def expire() -> None:
        for number in range(3):
            await retained.put("default", Message(f"{topic}/{number}", b"old", 1, True, expiry_us=1))
        monkeypatch.setattr(partition, "append_durably", meanwhile)
        await retained.expire(server.broker.broker.now_us())

    server.broker.run(expire())
    reader = mqtt.connect()
    reader.subscribe(f"{topic}/+")
    assert reader.payloads(3) == [b"fresh"] * 3


# --- how long it takes -----------------------------------------------------------------------------------------------


def test_a_thousand_subscriptions_are_made_and_ended_in_no_time(mqtt: Wires, server: Millstream) -> None:
    root = unique("many")
    reader = mqtt.durable()
    filters = [f"{root}/{number}/x" for number in range(1000)]
    world = server.broker.broker.mqtt.world("default")
    session = session_of(server, reader.client_id)
    topics = server.broker.broker.topics.registry.namespaces["default"]
    made = {f"{root}.{n}.x": Topic("default", f"{root}.{n}.x", TopicConfig(), [], 0) for n in range(10_000)}

    async def pretend() -> float:
        topics.update(made)
        before = time.thread_time()
        for topic_filter in filters:
            list(world.subscribe(session, [Subscription(topic_filter, 1)]))
        for number in range(1000):
            session.positions[number + 10**9] = Position(f"{root}.{number}.x", 0, number + 10**9, 0)
        list(world.reading.behind(session))
        for topic_filter in filters:
            world.unsubscribe(session, [topic_filter])
        for name in made:
            del topics[name]
        return time.thread_time() - before

    assert server.broker.run(pretend()) < 2
    assert not session.positions


def test_a_thousand_wildcards_and_ten_thousand_topics_are_a_matter_of_a_moment(mqtt: Wires, server: Millstream) -> None:
    root = unique("many")
    reader = mqtt.durable()
    filters = [f"{root}/+/{number}" for number in range(1000)]
    world = server.broker.broker.mqtt.world("default")
    session = session_of(server, reader.client_id)
    topics = server.broker.broker.topics.registry.namespaces["default"]
    made = {f"{root}.{n}.x": Topic("default", f"{root}.{n}.x", TopicConfig(), [], 0) for n in range(10_000)}

    async def pretend() -> float:
        topics.update(made)
        before = time.thread_time()
        list(world.subscribe(session, [Subscription(topic_filter, 1) for topic_filter in filters]))
        list(world.reading.behind(session))
        assert world.unsubscribe(session, filters) == filters
        for name in made:
            del topics[name]
        return time.thread_time() - before

    assert server.broker.run(pretend()) < 2, "each with each takes twenty seconds"


def test_an_unsubscribe_of_very_many_filters_is_a_matter_of_a_moment(mqtt: Wires, server: Millstream) -> None:
    reader = mqtt.connect()
    mine = [f"{number}" for number in range(1000)]
    reader.subscribe(*mine, qos=0)
    session = session_of(server, reader.client_id)
    client = session.client
    assert client is not None
    packet = Unsubscribe(1, (*mine, *(f"x{number}" for number in range(200_000)), "0"))

    async def unsubscribe() -> float:
        before = time.thread_time()
        unsubscribing = Unsubscribing(client, session, packet)
        list(unsubscribing.begin())
        await unsubscribing.finish()
        return time.thread_time() - before

    assert server.broker.run(unsubscribe()) < 1, "each with each takes seconds"
    none = Reason.NO_SUBSCRIPTION_EXISTED
    assert list(reader.receive(Unsuback).reasons) == [0] * 1000 + [none] * 200_000 + [0]


def test_what_is_remembered_of_receivers_has_a_limit(server: Millstream, mqtt: Wires) -> None:
    world = server.broker.broker.mqtt.world("default")
    wires = [mqtt.connect() for _ in range(30)]
    for wire in wires:
        wire.subscribe("#", qos=0)

    async def look() -> int:
        for number in range(9_999):
            world.receivers(f"some/{number}")
        return sum(len(found) for found in world._receivers.values())

    assert server.broker.run(look()) <= 200_000


def test_long_names_under_which_somebody_publishes_count_for_more(server: Millstream, mqtt: Wires) -> None:
    long = unique("long") + "x" * 40_000
    reader, writer = mqtt.durable(), mqtt.connect()
    reader.subscribe(f"{long}/0", qos=1)
    for number in range(20):
        for qos in (0, 1):
            writer.publish(f"{long}/{number}", b"x", qos)
    assert len(reader.messages(2)) == 2
    world = server.broker.broker.mqtt.world("default")
    assert f"{long}/0" in world._receivers

    async def look() -> int:
        for number in range(1_000):
            world.has_durable_reader(f"{long}/{number}")
        return sum(map(len, (*world._receivers, *world._durable)))

    assert server.broker.run(look()) <= 2 * 64 * 200_000


def test_a_world_that_nobody_is_in_is_forgotten(mqtt: Wires, server: Millstream) -> None:
    room = server.broker.broker.mqtt
    namespace = unique("ns").lower()
    wire = mqtt.open()
    assert wire.connect(Connect(V5, unique("c"), True, 60, f"{namespace}:me")).reason == 0
    assert namespace in room.worlds
    wire.disconnect()
    server.broker.run(room.sweep())
    assert namespace not in room.worlds


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[Millstream]:
    running = Millstream(access={"mode": "keys"})
    yield running
    running.stop()


def log_in(mqtt: Wires, client_id: str, key: str, *, expiry_s: int = 3600) -> Wire:
    wire = mqtt.open()
    told = Properties(session_expiry_s=expiry_s)
    assert wire.connect(Connect(V5, client_id, False, 60, "device", key.encode(), properties=told)).reason == 0
    return wire


def test_who_goes_on_with_a_session_gets_only_what_its_own_key_may_see(guarded: Millstream, topic: str) -> None:
    mqtt = Wires(guarded)
    client_id = unique("c")
    theirs = log_in(mqtt, client_id, key_for(guarded.broker, "produce", "consume"))
    theirs.subscribe(f"{topic}/secret", f"{topic}/open", qos=1)
    writer = log_in(mqtt, unique("c"), key_for(guarded.broker, "produce"))
    writer.publish(f"{topic}/secret", b"in flight", 1)
    theirs.receive(Publish)
    theirs.drop()
    writer.publish(f"{topic}/secret", b"waiting", 1)
    scope = f"{topic}/open".replace("/", ".")
    mine = log_in(mqtt, client_id, key_for(guarded.broker, "consume", scopes=[scope]))
    assert mine.connack.session_present
    writer.publish(f"{topic}/secret", b"live", 1)
    writer.publish(f"{topic}/open", b"yes", 1)
    assert mine.message().payload == b"yes"
    mine.nothing()
    mqtt.close()


def test_a_scoped_key_publishes_with_qos_2_what_waits_in_no_topic_of_its_own(topic: str) -> None:
    server = Millstream(access={"mode": "keys"}, topics={"auto_create": False})
    try:
        mqtt = Wires(server)
        reader = log_in(mqtt, unique("c"), key_for(server.broker, "consume"))
        reader.subscribe(topic)
        scope = topic.replace("/", ".")
        writer = log_in(mqtt, unique("c"), key_for(server.broker, "produce", scopes=[scope]))
        assert writer.publish(topic, b"1", 1) < 0x80
        assert writer.publish(topic, b"2", 2) < 0x80
        assert sorted(reader.payloads(2)) == [b"1", b"2"]
        mqtt.close()
    finally:
        server.stop()


# --- what is left behind ---------------------------------------------------------------------------------------------


def test_retained_messages_go_once_to_a_connection_that_takes_the_place_of_the_one_that_asked(
    mqtt: Wires, server: Millstream, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is subscribed, so it need not ask; what the first one is answered by then is nothing to it."""
    mqtt.connect().publish(topic, b"kept", 1, retain=True)
    asking = mqtt.durable()
    store = server.broker.broker.mqtt.store
    gate = asyncio.Event()
    durably = store.journal.record_durably

    async def slowly(*facts: object, holds: bool = False) -> None:
        await gate.wait()
        await durably(*facts, holds=holds)  # type: ignore[arg-type]

    monkeypatch.setattr(store.journal, "record_durably", slowly)
    asking.send(Subscribe(7, (Filter(topic, 1),)))
    eventually(lambda: topic in session_of(server, asking.client_id).subscriptions)
    again = mqtt.durable(client_id=asking.client_id)
    server.broker.run(_set(gate))
    assert again.message().payload == b"kept"
    again.nothing()


def test_statistics_that_were_asked_for_in_vain_are_not_made_for_ever(mqtt: Wires, server: Millstream) -> None:
    name = unique("q")
    wire = mqtt.connect()
    wire.publish(f"$queue/{name}", b"x", 1)
    client = session_of(server, wire.client_id).client
    assert client is not None
    queues: QueueTopics = client.queue_topics()
    wire.disconnect()

    async def late() -> None:
        await queues._take_up(QueueSubscription(f"$admin/queue/{name}/stats", "", 0))

    server.broker.run(late())
    assert not queues._joined
