"""What was confirmed to its publisher reaches a member of a share whose session lasts, wherever it was meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.mqtt.packets import Puback, Publish
from tests.e2e.mqtt.support import REFERENCE, Millstream, Wire, Wires, session_of
from tests.e2e.mqtt.test_mqtt_remembered import Runs, hold_next_write
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(bool(REFERENCE), reason=f"{REFERENCE} has bugs of its own")

#: A topic that was created, one that is made because a member's session lasts, and a name that is none.
NAMES = ["stored", "made", "/no topic"]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    running = Runs(tmp_path)
    with running.server.broker.connect() as client:
        client.create_topic("stored")
    yield running
    running.stop()


def gone(runs: Runs, wire: Wire, how: str) -> None:
    """The connection of a client ends."""
    if how == "restart":
        runs.restart()
    elif how == "disconnected":
        wire.disconnect()
    elif how == "lost":
        wire.drop()
    if how in ("disconnected", "lost"):
        eventually(lambda: session_of(runs.server, wire.client_id).client is None)


def publish(runs: Runs, name: str, count: int, qos: int = 1) -> list[bytes]:
    """Returns what was published, in its order."""
    writer, sent = runs.wires.connect(), [b"%d" % number for number in range(count)]
    for payload in sent:
        assert writer.publish(name, payload, qos) == 0
    return sent


@pytest.mark.parametrize("how", ["lost", "disconnected", "taken over", "restart"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("qos", [1, 2])
def test_what_waits_for_the_only_member_of_a_share_is_there_when_it_is_back(
    runs: Runs, name: str, how: str, qos: int
) -> None:
    member = runs.wires.durable(client_id="member", receive_maximum=1)
    member.subscribe(f"$share/work/{name}", qos=qos)
    sent = publish(runs, name, 10, qos)
    assert member.receive(Publish).payload == b"0"
    gone(runs, member, how)
    again = runs.wires.durable(client_id="member")
    assert again.connack.session_present
    found = again.messages(10)
    assert [message.payload for message in found] == sent
    if how != "restart":
        assert [message.dup for message in found] == [True] + 9 * [False]
    again.nothing()
    assert publish(runs, name, 3, qos) == again.payloads(3)


@pytest.mark.parametrize("how", ["lost", "restart"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("qos", [1, 2])
def test_what_a_member_of_a_share_has_not_confirmed_is_sent_again_and_once(
    runs: Runs, name: str, how: str, qos: int
) -> None:
    member = runs.wires.durable(client_id="member")
    member.subscribe(f"$share/work/{name}", qos=qos)
    publish(runs, name, 1, qos)
    first = member.receive(Publish)
    gone(runs, member, how)
    again = runs.wires.durable(client_id="member")
    found = again.message()
    assert (found.payload, found.packet_id, found.dup) == (b"0", first.packet_id, True)
    gone(runs, again, how)
    runs.wires.durable(client_id="member").nothing()


def test_a_message_is_sent_to_a_member_of_a_share_when_the_broker_cannot_forget_it_any_more(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No position says that it is the member's: what a crash took from the journal was nobody's."""
    member = runs.wires.durable(client_id="member")
    member.subscribe("$share/work/stored", qos=1)
    go_on = hold_next_write(runs.server, monkeypatch)
    publish(runs, "stored", 1)
    member.nothing()
    go_on()
    assert member.message().payload == b"0"


@pytest.mark.parametrize("lasts", [False, True])
def test_what_a_member_of_a_share_was_not_sent_is_for_those_who_are_there(runs: Runs, lasts: bool) -> None:
    leaving = runs.wires.durable(client_id="leaving", receive_maximum=1)
    leaving.subscribe("$share/work/jobs", qos=1)
    sent = publish(runs, "jobs", 5)
    assert leaving.receive(Publish).payload == b"0"
    staying = runs.wires.durable(client_id="staying") if lasts else runs.wires.connect()
    staying.subscribe("$share/work/jobs", qos=1)
    gone(runs, leaving, "lost")
    assert staying.payloads(4) == sent[1:]
    again = runs.wires.durable(client_id="leaving")
    assert again.message().payload == b"0"
    again.nothing()


def test_what_comes_while_no_member_is_there_waits_for_those_whose_sessions_last_in_turn(runs: Runs) -> None:
    wires = [runs.wires.durable(client_id=name) for name in ("one", "two")]
    for wire in wires:
        wire.subscribe("$share/work/jobs", qos=1)
        gone(runs, wire, "disconnected")
    sent = publish(runs, "jobs", 10)
    mqtt = runs.restart()
    halves = [mqtt.durable(client_id=name).payloads(5) for name in ("one", "two")]
    assert sorted(halves[0] + halves[1]) == sent
    assert halves[0] in (sent[::2], sent[1::2])


def test_what_a_member_without_a_session_was_not_sent_waits_for_one_with_a_session(runs: Runs) -> None:
    away = runs.wires.durable(client_id="away")
    away.subscribe("$share/work/jobs", qos=1)
    gone(runs, away, "lost")
    passing = runs.wires.connect(receive_maximum=1)
    passing.subscribe("$share/work/jobs", qos=1)
    sent = publish(runs, "jobs", 3)
    assert passing.receive(Publish).payload == b"0"
    passing.drop()
    assert sorted(runs.wires.durable(client_id="away").payloads(3)) == sent


def test_what_goes_from_member_to_member_while_all_of_them_leave_stays_with_the_one_that_lasts(runs: Runs) -> None:
    lasting, passing = runs.wires.durable(client_id="lasting", receive_maximum=1), runs.wires.connect(receive_maximum=1)
    lasting.subscribe("$share/work/jobs", qos=1)
    sent = publish(runs, "jobs", 5)
    passing.subscribe("$share/work/jobs", qos=1)
    runs.restart()
    assert sorted(runs.wires.durable(client_id="lasting").payloads(5)) == sent


@pytest.mark.parametrize("is_there", [False, True])
def test_no_more_waits_for_a_member_of_a_share_than_the_limit_says(tmp_path: Path, is_there: bool) -> None:
    server = Millstream(tmp_path, mqtt={"queued_messages_max": 5})
    wires = Wires(server)
    try:
        member, writer = wires.durable(client_id="member", receive_maximum=1), wires.connect()
        member.subscribe("$share/work/jobs", qos=1)
        if not is_there:
            member.drop()
            eventually(lambda: session_of(server, "member").client is None)
        for number in range(10):
            writer.publish("jobs", b"%d" % number, 1)
        kept = 6 if is_there else 5
        assert session_of(server, "member").dropped == 10 - kept
        again = wires.durable(client_id="member")
        assert again.payloads(kept) == [b"%d" % number for number in range(kept)]
        again.nothing()
    finally:
        wires.close()
        server.stop()


def test_only_a_member_whose_session_lasts_makes_messages_stay(runs: Runs) -> None:
    def topics() -> set[str]:
        with runs.server.broker.connect() as client:
            return {topic.name for topic in client.topics()}

    for number, (wire, qos) in enumerate(((runs.wires.connect(), 1), (runs.wires.durable(client_id="member"), 0))):
        wire.subscribe(f"$share/work/live/{number}", qos=qos)
        publish(runs, f"live/{number}", 1)
        assert wire.message().payload == b"0"
    assert topics() == {"stored"}
    member = runs.wires.durable(client_id="member")
    member.subscribe("$share/work/live/+", qos=1)
    publish(runs, "live/0", 1)
    assert topics() == {"stored", "live.0"}
    member.unsubscribe("$share/work/live/+")
    publish(runs, "live/1", 1)
    assert topics() == {"stored", "live.0"}


def test_a_client_that_confirms_what_it_was_not_sent_gets_it_all_the_same(runs: Runs) -> None:
    member = runs.wires.durable(client_id="member", receive_maximum=1)
    member.subscribe("$share/work/stored", qos=1)
    sent = publish(runs, "stored", 3)
    assert member.receive(Publish).packet_id == 1
    member.send(Puback(2), Puback(3), Puback(1))
    assert member.payloads(2) == sent[1:]
