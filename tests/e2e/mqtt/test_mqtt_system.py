"""`$SYS`: the broker's own figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.mqtt.packets import V5, Connect, Publish
from millstream.mqtt.reasons import Reason
from tests.e2e.access_world import key_for
from tests.e2e.mqtt.support import Millstream, Wire, Wires, both_versions, not_in_reference, unique

pytestmark = not_in_reference("says it at other times")


@pytest.fixture
def server() -> Iterator[Millstream]:
    running = Millstream()
    yield running
    running.stop()


def figures(wire: Wire, topic_filter: str = "$SYS/#") -> dict[str, str]:
    """What comes to whoever subscribes."""
    wire.subscribe(topic_filter)
    return drain(wire)


def drain(wire: Wire) -> dict[str, str]:
    wire.ping()
    found = [packet for packet in wire.inbox if isinstance(packet, Publish)]
    wire.inbox.clear()
    assert all(packet.topic.startswith("$SYS/broker/") for packet in found)
    return {packet.topic.removeprefix("$SYS/broker/"): packet.payload.decode() for packet in found}


@both_versions
def test_whoever_subscribes_gets_the_figures_at_once_as_retained_messages(mqtt: Wires, version: int) -> None:
    mqtt.durable(version).disconnect()
    sender = mqtt.connect(version)
    sender.publish("some/topic", b"kept", 1, retain=True)
    sender.publish("some/topic", b"not", 1)
    wire = mqtt.connect(version)
    wire.subscribe("$SYS/broker/version")
    assert wire.receive(Publish).retain
    found = figures(wire)
    assert found["version"].startswith("millstream ")
    assert found["uptime"].endswith(" seconds")
    assert (found["clients/connected"], found["clients/total"], found["clients/disconnected"]) == ("2", "3", "1")
    assert found["clients/maximum"] == "2"
    assert found["publish/messages/received"] == "2"
    assert found["retained messages/count"] == "1"
    assert found["subscriptions/count"] == "2"
    assert int(found["bytes/received"]) > 0
    assert int(found["messages/received"]) > int(found["publish/messages/received"])


def test_a_filter_chooses_among_them(mqtt: Wires) -> None:
    assert set(figures(mqtt.connect(), "$SYS/broker/bytes/+")) == {"bytes/received", "bytes/sent"}


def test_wildcards_of_ordinary_topics_do_not_find_them(mqtt: Wires) -> None:
    wire = mqtt.connect()
    wire.subscribe("#", "+/broker/uptime")
    mqtt.skip(11)
    wire.nothing()


def test_what_has_changed_comes_again_after_a_while(mqtt: Wires) -> None:
    wire = mqtt.connect()
    before = figures(wire)
    mqtt.skip(11)
    assert wire.message().topic.startswith("$SYS/broker/")
    drain(wire)
    mqtt.connect()
    mqtt.skip(11)
    wire.message()
    later = drain(wire)
    assert later["clients/connected"] == "2" != before["clients/connected"]
    assert "version" not in later
    assert float(later["load/sockets/1min"]) > 0


def test_nobody_may_write_there(mqtt: Wires) -> None:
    wire = mqtt.connect()
    assert wire.publish("$SYS/broker/version", b"9", 1) == Reason.NOT_AUTHORIZED


def test_they_need_the_right_to_read_everything(tmp_path: Path) -> None:
    server = Millstream(tmp_path, access={"mode": "keys"})
    wires = Wires(server)
    try:
        for role, scope, reason in (
            ("read", "default:#", 0),
            ("produce", "default:#", Reason.NOT_AUTHORIZED),
            ("read", "default:a.#", Reason.NOT_AUTHORIZED),
        ):
            wire = wires.open()
            key = key_for(server.broker, role, scopes=[scope])
            assert wire.connect(Connect(V5, unique("c"), password=key.encode())).reason == Reason.SUCCESS
            assert wire.subscribe("$SYS/broker/uptime", qos=0) == (reason,)
    finally:
        wires.close()
        server.stop()


@pytest.mark.parametrize("name", ["$SYSTEM/x", "$SYS"])
def test_what_is_retained_under_a_name_that_only_begins_alike_is_found(mqtt: Wires, name: str) -> None:
    assert mqtt.connect().publish(name, b"kept", 1, retain=True) < 0x80
    late = mqtt.connect()
    late.subscribe(name)
    assert late.message().payload == b"kept"
