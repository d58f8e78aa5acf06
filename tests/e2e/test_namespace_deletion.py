"""A namespace that is deleted is gone: whoever has its name later finds nothing of it, and no trap either."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.config import Settings
from millstream.errors import MillstreamError
from millstream.mqtt.packets import V5, Connect, Disconnect, Properties, Will
from millstream.mqtt.reasons import Reason
from millstream.testing.broker import BrokerForTests
from tests.e2e.mqtt.support import Borrowed, Wire, Wires

SETTINGS = Settings.model_validate({"server": {"heartbeat_ms": 3_600_000, "heartbeat_misses": 100}})


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerForTests]:
    with BrokerForTests(tmp_path / "data", settings=SETTINGS, mqtt=True) as running:
        running.connect().create_namespace("acme")
        yield running


@contextlib.contextmanager
def device(broker: BrokerForTests, *, clean: bool = False, will: Will | None = None) -> Iterator[tuple[Wire, bool]]:
    """A device of the namespace, and whether it was known before."""
    wires = Wires(Borrowed(broker))
    wire = wires.open(V5)
    packet = Connect(V5, "device", clean, 60, "acme:device", None, will, Properties(session_expiry_s=3600))
    yield wire, wire.connect(packet).session_present
    wires.close()


def delete_and_make_anew(broker: BrokerForTests) -> None:
    admin = broker.connect()
    admin.delete_namespace("acme", force=True)
    admin.create_namespace("acme")


def test_retained_messages_and_sessions_do_not_come_back(broker: BrokerForTests) -> None:
    with device(broker) as (wire, _):
        wire.subscribe("rooms/#", qos=1)
        wire.publish("rooms/1", b"secret", 1, retain=True)
        wire.publish("$private/1", b"secret", 0, retain=True)
    delete_and_make_anew(broker)
    assert list(broker.connect(namespace="acme").mqtt.sessions()) == []
    with device(broker) as (wire, known):
        assert not known
        wire.subscribe("#", qos=1)
        wire.publish("last", b"nothing before this", 1)
        assert wire.message().payload == b"nothing before this"


def test_nor_do_they_after_a_restart(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path, settings=SETTINGS, mqtt=True) as broker:
        broker.connect().create_namespace("acme")
        with device(broker) as (wire, _):
            wire.publish("rooms/1", b"secret", 1, retain=True)
        delete_and_make_anew(broker)
    with BrokerForTests(tmp_path, settings=SETTINGS, mqtt=True) as broker, device(broker) as (wire, known):
        assert not known
        wire.subscribe("#", qos=1)
        wire.publish("last", b"nothing before this", 1)
        assert wire.message().payload == b"nothing before this"


def test_who_is_connected_is_told_and_its_will_is_not_published(broker: BrokerForTests) -> None:
    with device(broker, will=Will("rooms/lost", b"secret", retain=True)) as (wire, _):
        delete_and_make_anew(broker)
        told = wire.end()
        assert isinstance(told[-1], Disconnect)
        assert told[-1].reason == Reason.ADMINISTRATIVE_ACTION
    client = broker.connect(namespace="acme")
    assert client.topics() == []
    assert list(client.mqtt.retained()) == []


def test_groups_and_recurring_schedules_do_not_come_back(broker: BrokerForTests) -> None:
    client = broker.connect(namespace="acme")
    client.create_topic("orders")
    client.publish("orders", b"x")
    with client.stream("orders", group="readers") as stream:
        stream.commit(next(iter(stream)))
    client.schedules.repeat("nightly", "orders", "* * * * *", b"secret")
    delete_and_make_anew(broker)
    client.create_topic("orders")
    assert client.groups() == []
    assert client.schedules.repeating() == []
    broker.clock.advance("3m")
    assert client.browse("orders") == []


def test_a_namespace_that_is_not_deleted_loses_nothing(broker: BrokerForTests) -> None:
    client = broker.connect(namespace="acme")
    client.create_topic("orders")
    with device(broker) as (wire, _):
        wire.publish("rooms/1", b"kept", 1, retain=True)
    client.schedules.repeat("nightly", "orders", "0 3 * * *", b"x")
    with pytest.raises(MillstreamError, match="holds 1 topics"):
        broker.connect().delete_namespace("acme")
    assert [entry.name for entry in client.schedules.repeating()] == ["nightly"]
    assert [message.topic for message in client.mqtt.retained()] == ["rooms/1"]
