"""What a session remembers when its client goes, when others take its place, and when the broker is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.journal import EntityFact
from millstream.broker.partition import Partition
from millstream.broker.registry import Topic
from millstream.broker.traffic.subscriptions import Subscriptions
from millstream.errors import StorageFailed
from millstream.mqtt.packets import (
    Filter,
    Properties,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from millstream.records import Batch
from millstream.slicing import batches_of
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wire, Wires, session_of
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has bugs of its own")


class Runs:
    """A broker that is started again on the same data, and connections to it."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self.server = Millstream(data)
        self.wires = Wires(self.server)

    def restart(self) -> Wires:
        self.stop()
        self.server = Millstream(self._data)
        self.wires = Wires(self.server)
        return self.wires

    def stop(self) -> None:
        self.wires.close()
        self.server.stop()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    running = Runs(tmp_path)
    yield running
    running.stop()


def hold_next_write(server: Millstream, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The next who waits for the journal of sessions waits until what is returned is called; others do not."""
    journal = server.broker.broker.mqtt.store.journal
    gate, held = asyncio.Event(), False
    record_durably = journal.record_durably

    async def slowly(*facts: EntityFact, holds: bool = False) -> None:
        nonlocal held
        if not held:
            held = True
            await gate.wait()
        await record_durably(*facts, holds=holds)

    async def go_on() -> None:
        gate.set()

    monkeypatch.setattr(journal, "record_durably", slowly)
    return lambda: server.broker.run(go_on())


# --- subscriptions ---------------------------------------------------------------------------------------------------


def test_a_message_that_comes_before_its_suback_is_not_sent_again_after_a_restart(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the subscription began was written down behind how far it had come."""
    mqtt = runs.wires
    writer, reader = mqtt.connect(), mqtt.durable(client_id="reader")
    with runs.server.broker.connect() as client:
        client.create_topic("a")
        client.create_topic("b")
    writer.publish("b", b"before", 1)
    go_on = hold_next_write(runs.server, monkeypatch)
    reader.send(Subscribe(1, (Filter("a", 2),)), Subscribe(2, (Filter("b", 2),)))
    reader.ping()
    writer.publish("b", b"once", 2)
    assert reader.message().payload == b"once"
    reader.nothing(Suback)
    go_on()
    assert [reader.receive(Suback).packet_id for _ in range(2)] == [1, 2]
    reader.disconnect()
    again = runs.restart().durable(client_id="reader")
    assert again.connack.session_present
    again.nothing()
    runs.wires.connect().publish("b", b"next", 2)
    assert again.message().payload == b"next"


def test_what_is_said_last_of_a_filter_holds_after_a_restart(runs: Runs) -> None:
    reader = runs.wires.durable(client_id="reader")
    reader.subscribe("ended", "again", qos=1)
    reader.send(
        Unsubscribe(1, ("again",)),
        Subscribe(2, (Filter("again", 1), Filter("ended", 1))),
        Unsubscribe(3, ("ended",)),
    )
    assert (reader.receive(Suback).packet_id, reader.receive(Unsuback).packet_id) == (2, 1)
    reader.receive(Unsuback)
    mqtt = runs.restart()
    again, writer = mqtt.durable(client_id="reader"), mqtt.connect()
    writer.publish("ended", b"no", 1)
    writer.publish("again", b"yes", 1)
    assert again.message().payload == b"yes"
    again.nothing()


def waits_behind_another(runs: Runs, *names: str) -> tuple[Wire, Wire]:
    """A writer, and a reader of `#` with QoS 2 that has one message of the first name and takes no other before.

    It has said since that QoS 0 is enough.
    """
    writer, reader = runs.wires.connect(), runs.wires.durable(client_id="reader", receive_maximum=1)
    reader.subscribe("#", qos=2)
    for name in names:
        for payload in (b"1", b"2", b"3"):
            writer.publish(name, payload, 2)
    assert reader.subscribe("#", qos=0) == (0,)
    return writer, reader


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("name", ["one", "two/levels", "no topic"])
def test_what_waits_for_a_filter_that_gets_a_lower_qos_comes_after_a_restart(
    runs: Runs, name: str, snapshot: bool
) -> None:
    writer, _ = waits_behind_another(runs, name, "another")
    writer.publish(name, b"with QoS 0", 2)
    with runs.server.broker.connect() as client:
        assert client.mqtt.session("reader").waiting in (5, 6), "behind the one that it has got"
    if snapshot:
        runs.server.broker.run(runs.server.broker.broker.mqtt.store.journal.checkpoint())
    mqtt = runs.restart()
    again, writer = mqtt.durable(client_id="reader"), mqtt.connect()
    got = again.messages(6)
    assert sorted((it.topic, it.payload) for it in got) == sorted(
        (topic, payload) for topic in (name, "another") for payload in (b"1", b"2", b"3")
    )
    assert {it.qos for it in got} == {2}
    again.nothing()
    writer.publish(name, b"new", 2)
    message = again.message()
    assert (message.payload, message.qos) == (b"new", 0)
    mqtt = runs.restart()
    mqtt.durable(client_id="reader").nothing()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("name", ["one", "no topic"])
def test_what_waits_for_a_filter_whose_qos_falls_and_rises_again_comes_once(
    runs: Runs, name: str, restarts: bool
) -> None:
    writer, reader = waits_behind_another(runs, name)
    writer.publish(name, b"with QoS 0", 2)
    assert reader.receive(Publish).payload == b"1"  # and is not confirmed
    assert reader.receive(Publish).payload == b"with QoS 0"
    assert reader.subscribe("#", qos=1) == (1,)
    writer.publish(name, b"with QoS 1", 2)
    if restarts:
        runs.server.broker.run(runs.server.broker.broker.mqtt.store.journal.checkpoint())
        runs.restart()
    else:
        reader.drop()
    again = runs.wires.durable(client_id="reader")
    assert sorted((it.payload, it.qos) for it in again.messages(4)) == [
        (b"1", 2),
        (b"2", 2),
        (b"3", 2),
        (b"with QoS 1", 1),
    ]
    again.nothing()


def test_what_waits_for_a_filter_that_gets_a_lower_qos_ends_with_its_subscription(runs: Runs) -> None:
    _, reader = waits_behind_another(runs, "one")
    reader.unsubscribe("#")
    reader.send(Pubrec(reader.receive(Publish).packet_id))
    reader.nothing()
    runs.restart().durable(client_id="reader").nothing()


def test_what_is_on_its_way_when_a_filter_gets_a_lower_qos_comes_once_and_as_it_was(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the log, and subscribers have not been told of it yet."""
    reader, writer = runs.wires.durable(client_id="reader"), runs.wires.connect()
    reader.subscribe("#", qos=1)
    work, held = Subscriptions._work, []
    monkeypatch.setattr(Subscriptions, "_work", lambda subscriptions: held.append(subscriptions))
    writer.publish("one", b"old", 1)
    assert reader.subscribe("#", qos=0) == (0,)
    monkeypatch.setattr(Subscriptions, "_work", work)

    async def go_on() -> None:
        for subscriptions in held:
            work(subscriptions)

    runs.server.broker.run(go_on())
    message = reader.message()
    assert (message.payload, message.qos) == (b"old", 1)
    reader.nothing()


# --- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("end", ["its time is over", "it begins anew"])
def test_what_a_member_of_a_share_had_when_its_session_ended_is_for_the_others(
    runs: Runs, restarts: int, end: str
) -> None:
    """It was forgotten while the member was away, as if somebody would read it from the log again."""
    with runs.server.broker.connect() as client:
        client.create_topic("jobs.today")
    mqtt = runs.wires
    leaving = mqtt.durable(client_id="leaving", expiry_s=60)
    leaving.subscribe("$share/work/jobs/+", qos=1)
    mqtt.connect().publish("jobs/today", b"job", 1)
    assert leaving.receive(Publish).payload == b"job"
    leaving.drop()
    eventually(lambda: session_of(runs.server, "leaving").client is None)
    for _ in range(restarts):
        mqtt = runs.restart()
    staying = mqtt.durable(client_id="staying")
    staying.subscribe("$share/work/jobs/+", qos=1)
    if end == "its time is over":
        runs.server.skip(100)
    else:
        mqtt.durable(client_id="leaving", clean=True)
    assert staying.message().payload == b"job"
    staying.nothing()


def test_what_has_expired_when_a_member_of_a_share_leaves_does_not_keep_the_rest_from_the_others(runs: Runs) -> None:
    mqtt = runs.wires
    leaving, staying, writer = mqtt.connect(), mqtt.connect(), mqtt.connect()
    leaving.subscribe("$share/work/jobs", qos=1)
    writer.publish("jobs", b"old", 1, properties=Properties(message_expiry_s=10))
    writer.publish("jobs", b"good", 1)
    assert [leaving.receive(Publish).payload for _ in range(2)] == [b"old", b"good"]
    staying.subscribe("$share/work/jobs", qos=1)
    runs.server.skip(20)
    leaving.drop()
    assert staying.message().payload == b"good"
    staying.nothing()


def test_what_a_member_of_a_share_had_is_for_those_who_begin_it_anew(runs: Runs) -> None:
    """It had left the share, which ended by that; the next member's was another."""
    mqtt = runs.wires
    leaving = mqtt.durable(client_id="leaving", expiry_s=60)
    leaving.subscribe("$share/work/jobs", qos=1)
    mqtt.connect().publish("jobs", b"job", 1)
    assert leaving.receive(Publish).payload == b"job"
    leaving.unsubscribe("$share/work/jobs")
    staying = mqtt.durable(client_id="staying")
    staying.subscribe("$share/work/jobs", qos=1)
    leaving.drop()
    mqtt.durable(client_id="leaving", clean=True)
    assert staying.message().payload == b"job"
    staying.nothing()


def test_what_waited_for_a_member_that_left_is_for_those_who_begin_its_share_anew(runs: Runs) -> None:
    mqtt = runs.wires
    leaving, writer = mqtt.connect(receive_maximum=1), mqtt.connect()
    leaving.subscribe("$share/work/jobs", qos=1)
    for job in (b"first", b"second"):
        writer.publish("jobs", job, 1)
    assert leaving.receive(Publish).payload == b"first"
    leaving.unsubscribe("$share/work/jobs")
    staying = mqtt.connect()
    staying.subscribe("$share/work/jobs", qos=1)
    leaving.drop()
    assert sorted(staying.payloads(2)) == [b"first", b"second"]
    staying.nothing()


@pytest.mark.parametrize("share", ["$share/work/live", "$share/work/$queue/jobs"])
def test_mqtt_4_6_0_4_pubrels_come_in_the_order_of_the_pubrecs_whatever_is_stored(runs: Runs, share: str) -> None:
    reader, writer = runs.wires.durable(client_id="reader"), runs.wires.connect()
    reader.subscribe("mine", share)
    writer.publish("mine", b"mine", 2)
    first = reader.receive(Publish).packet_id
    writer.publish(share.removeprefix("$share/work/"), b"ours", 2)
    second = reader.receive(Publish).packet_id
    for ids in ((first, second), (second, first)):
        reader.send(*map(Pubrec, ids))
        assert [reader.receive(Pubrel).packet_id for _ in ids] == list(ids)


class Decoding:
    """What the broker's loop does while batches of the log are decoded for sessions."""

    def __init__(self, server: Millstream, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = server.broker.broker.mqtt.loop
        self.turns: list[str] = []
        monkeypatch.setattr("millstream.broker.mqtt.reading.batches_of", self._decode)

    def _decode(self, buffers: Sequence[bytes]) -> Iterator[Batch]:
        for batch in batches_of(buffers):
            self.turns.append("a batch")
            self._loop.call_soon(self.turns.append, "others")
            yield batch


def leave_jobs(runs: Runs, members: int, each: int) -> None:
    """Members of a share go, and each of them has so many jobs in flight; all jobs are in one batch."""
    wires = [runs.wires.durable(client_id=f"leaving{number}", expiry_s=60) for number in range(members)]
    for wire in wires:
        wire.subscribe("$share/work/jobs", qos=1)
    with runs.server.broker.connect() as client:
        client.create_topic("jobs")
        client.publish_many("jobs", [b"%d" % number for number in range(members * each)])
    for number, wire in enumerate(wires):
        for _ in range(each):
            wire.receive(Publish)
        wire.drop()
        eventually(lambda number=number: session_of(runs.server, f"leaving{number}").client is None)  # type: ignore[misc]


def test_sessions_of_a_share_that_end_together_let_others_have_their_turn(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker stood still for seconds: the whole batch was decoded for each message, and nobody else was asked."""
    leave_jobs(runs, members=5, each=20)
    staying = runs.wires.durable(client_id="staying")
    staying.subscribe("$share/work/jobs", qos=1)
    decoding = Decoding(runs.server, monkeypatch)
    runs.server.skip(100)
    assert sorted(map(int, staying.payloads(100))) == list(range(100))
    staying.nothing()
    assert decoding.turns == 5 * ["a batch", "others"], "once for each session, and not all at once"


def test_what_is_in_flight_is_read_with_its_batch_when_a_client_comes_back(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_jobs(runs, members=1, each=20)
    decoding = Decoding(runs.server, monkeypatch)
    again = runs.wires.durable(client_id="leaving0")
    assert [int(payload) for payload in again.payloads(20)] == list(range(20))
    assert decoding.turns == ["a batch", "others"]


# --- partitions that cannot be read ----------------------------------------------------------------------------------


def cannot_open(server: Millstream, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topics = server.broker.broker.topics
    opens = topics._open

    def fails(topic: Topic, number: int) -> Partition:
        if topic.name == name:
            raise StorageFailed("a bad block")
        return opens(topic, number)

    monkeypatch.setattr(topics, "_open", fails)
    topic = topics.registry.get("default", name)
    assert topic.partitions == [None], "nobody has opened it yet"


def test_a_partition_that_cannot_be_read_keeps_nothing_else_from_the_other_members_of_a_share(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runs.server.broker.connect() as client:
        for name in ("jobs.broken", "jobs.good"):
            client.create_topic(name)
    leaving, writer = runs.wires.durable(client_id="leaving", expiry_s=60), runs.wires.connect()
    leaving.subscribe("$share/work/jobs/+", qos=1)
    for name in ("jobs/broken", "jobs/good"):
        writer.publish(name, b"job", 1)
        assert leaving.receive(Publish).topic == name
    mqtt = runs.restart()
    cannot_open(runs.server, "jobs.broken", monkeypatch)
    staying = mqtt.durable(client_id="staying")
    staying.subscribe("$share/work/jobs/+", qos=1)
    runs.server.skip(100)
    assert staying.message().topic == "jobs/good"
    staying.nothing()


def test_a_partition_that_cannot_be_read_keeps_no_client_out_and_loses_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runs.server.broker.connect() as client:
        for name in ("broken", "good"):
            client.create_topic(name)
    reader, writer = runs.wires.durable(client_id="reader"), runs.wires.connect()
    reader.subscribe("broken", "good", qos=1)
    for name in ("broken", "good"):
        writer.publish(name, b"in flight", 1)
        assert reader.receive(Publish).topic == name
    mqtt = runs.restart()
    cannot_open(runs.server, "broken", monkeypatch)
    again = mqtt.durable(client_id="reader")
    assert again.message().topic == "good"
    mqtt.connect().publish("good", b"new", 1)
    assert again.message().payload == b"new"
    again.nothing()
    again.drop()
    monkeypatch.undo()
    healed = mqtt.durable(client_id="reader").receive(Publish)
    assert (healed.topic, healed.payload, healed.dup) == ("broken", b"in flight", True)


# --- retained messages -----------------------------------------------------------------------------------------------


def retain(mqtt: Wires, count: int, qos: int = 1) -> set[str]:
    """Their topics."""
    writer, names = mqtt.connect(), [f"state/{number}" for number in range(count)]
    for name in names:
        writer.publish(name, b"kept", qos, retain=True)
    return set(names)


def topics(wire: Wire, count: int) -> list[str]:
    return [message.topic for message in wire.messages(count)]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_client_that_loses_its_connection_gets_the_rest_of_what_is_retained(
    runs: Runs, qos: int, restarts: int
) -> None:
    """Nobody asks again who is told that its session is still there."""
    mqtt = runs.wires
    names = retain(mqtt, 50, qos)
    reader = mqtt.durable(client_id="reader", receive_maximum=5)
    reader.subscribe("state/#", "state/1/#", qos=qos)
    found = topics(reader, 20)
    reader.drop()
    eventually(lambda: session_of(runs.server, "reader").client is None)
    for _ in range(restarts):
        mqtt = runs.restart()
        runs.server.broker.run(runs.server.broker.broker.mqtt.store.journal.checkpoint())
    again = mqtt.durable(client_id="reader", receive_maximum=5)
    assert again.connack.session_present
    found += topics(again, 31)
    assert set(found) == names
    assert sorted(found) == sorted([*names, "state/1"]), "that one came by two filters, and nothing else came twice"
    again.nothing()
    again.disconnect()
    mqtt = runs.restart()
    mqtt.durable(client_id="reader").nothing()


def test_what_is_retained_for_a_filter_ends_with_its_subscription(runs: Runs) -> None:
    retain(runs.wires, 10)
    reader = runs.wires.durable(client_id="reader", receive_maximum=1)
    reader.subscribe("state/#", qos=1)
    first = reader.receive(Publish)
    reader.unsubscribe("state/#")
    reader.send(Puback(first.packet_id))
    reader.nothing()
    reader.send(Subscribe(1, (Filter("state/#", 1),)), Unsubscribe(2, ("state/#",)))
    reader.receive(Unsuback)
    reader.nothing()
    reader.drop()
    runs.restart().durable(client_id="reader").nothing()


def test_who_subscribes_again_and_again_and_confirms_nothing_makes_nothing_grow(runs: Runs) -> None:
    names = retain(runs.wires, 10)
    reader = runs.wires.durable(client_id="reader", receive_maximum=1)
    for _ in range(100):
        reader.subscribe("state/+", "state/#", qos=1)
    keepsakes = session_of(runs.server, "reader")._keepsakes
    assert keepsakes is not None
    assert len(keepsakes) == 2
    found = topics(reader, 21)
    assert {name: found.count(name) for name in names} == {name: 2 + (name == found[0]) for name in names}
    reader.nothing()


def test_a_client_is_let_in_although_the_fact_of_a_subscription_was_lost(runs: Runs) -> None:
    """A disk that refuses for long costs the oldest facts; those behind them are about something that is not there."""
    runs.wires.durable(client_id="reader").disconnect()
    session = session_of(runs.server, "reader")

    async def replay() -> None:
        session.replay([["kept", "state/#", ""]])

    runs.server.broker.run(replay())
    again = runs.wires.durable(client_id="reader")
    again.subscribe("readings", qos=1)
    runs.wires.connect().publish("readings", b"x", 1)
    assert again.message().payload == b"x"


# --- packet ids ------------------------------------------------------------------------------------------------------


def test_a_packet_id_of_a_session_that_has_ended_is_not_one_of_the_next(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message was still waiting to be stored.  After a restart the next one under the id was taken for the same."""
    with runs.server.broker.connect() as client:
        client.create_topic("readings")
    transfer = runs.server.broker.broker.mqtt.store.transfer
    move, moves, moved = transfer.move, asyncio.Event(), 0

    async def slowly(*what: Any, **more: Any) -> int:
        nonlocal moved
        await moves.wait()
        offset = await move(*what, **more)
        moved += 1
        return offset

    async def go_on() -> None:
        moves.set()

    monkeypatch.setattr(transfer, "move", slowly)
    before = runs.wires.durable(client_id="sensor")
    before.send(Publish("readings", b"before", 2, packet_id=7))
    before.ping()
    after = runs.wires.durable(client_id="sensor", clean=True)
    runs.server.broker.run(go_on())
    eventually(lambda: moved)
    after.disconnect()
    again = runs.restart().durable(client_id="sensor")
    assert again.connack.session_present
    again.send(Publish("readings", b"after", 2, packet_id=7))
    assert again.receive(Pubrec).reason == 0
    with runs.server.broker.connect() as client, client.stream("readings", start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(2)]
    assert [message.value for message in found if message is not None] == [b"before", b"after"]


@pytest.mark.parametrize("place", ["readings", "live"])
def test_a_packet_id_that_waits_for_a_snapshot_ends_with_its_session(runs: Runs, place: str) -> None:
    """It was looked whether the session was still there, then the snapshot was waited for, then it was written."""
    with runs.server.broker.connect() as client:
        client.create_topic("readings")
    journal = runs.server.broker.broker.mqtt.store.journal

    async def snapshot_is_due() -> None:
        journal._snapped.clear()

    async def snapshot_is_made() -> None:
        journal._snapshot()

    before = runs.wires.durable(client_id="sensor")
    before.publish("readings", b"first", 2)  # so that there is a producer of moves
    runs.server.broker.run(snapshot_is_due())
    before.send(Publish(place, b"before", 2, packet_id=7))
    before.ping()
    after = runs.wires.durable(client_id="sensor", clean=True)
    runs.server.broker.run(snapshot_is_made())
    after.ping()
    after.disconnect()
    again = runs.restart().durable(client_id="sensor")
    assert again.connack.session_present
    again.send(Publish("readings", b"after", 2, packet_id=7))
    assert again.receive(Pubrec).reason == 0
    with runs.server.broker.connect() as client:
        found = [message.value for message in client.stream("readings", start="earliest", timeout_s=0.3)]
    assert found == [b"first", *([b"before"] if place == "readings" else []), b"after"]
