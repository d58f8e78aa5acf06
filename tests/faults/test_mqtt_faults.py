"""MQTT on a disk that fails: what is in doubt is never answered as if it were certain."""

from __future__ import annotations

from contextlib import suppress

import httpx
import pytest

from millstream.config import Settings
from millstream.errors import StorageFailed
from millstream.mqtt.packets import V4, V5, Connect, Disconnect, Properties, Puback, Pubcomp, Publish, Pubrec, Pubrel
from millstream.testing.broker import BrokerForTests
from millstream.testing.storage import Fault, Operation, PowerCut, SimulatedStorage
from tests.e2e.mqtt.support import Address, Wire


def _sync_of_sessions(operation: Operation) -> bool:
    return operation.kind == "sync" and operation.path.startswith("state/mqtt")


def _connect(broker: BrokerForTests, version: int) -> Wire:
    wire = Wire(Address("127.0.0.1", broker.mqtt_port), version)
    lasting = Properties(session_expiry_s=3600) if version == V5 else Properties()
    assert wire.connect(Connect(version, "sensor", False, 0, None, None, None, lasting)).reason == 0
    return wire


def _finish(wire: Wire, packet: Publish) -> None:
    """The whole handshake of QoS 2."""
    wire.send(packet)
    assert wire.receive(Pubrec).reason == 0
    wire.send(Pubrel(packet.packet_id))
    assert wire.receive(Pubcomp).reason == 0


@pytest.mark.parametrize("version", [V4, V5], ids=["3.1.1", "5.0"])
def test_a_packet_id_of_qos_2_whose_sync_failed_stays_the_clients_until_the_broker_knows(version: int) -> None:
    """Found by the soak: refused, the id was free for the client, which used it for another message.

    But the restart found it on disk: it stored the first message, which the client had sent again meanwhile, and took
    the other one for a repetition of it.
    """
    storage = SimulatedStorage(7)
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        broker.connect().create_topic("readings")
        wire = _connect(broker, version)
        _finish(wire, Publish("readings", b"0", 2, packet_id=1))
        storage.inject(Fault.SYNC_ERROR, when=_sync_of_sessions)
        wire.send(Publish("readings", b"1", 2, packet_id=2))
        said = wire.end()
        assert all(isinstance(packet, Disconnect) for packet in said), f"in doubt, and answered: {said}"
    storage.kill()
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        wire = _connect(broker, version)
        _finish(wire, Publish("readings", b"1", 2, dup=True, packet_id=2))
        _finish(wire, Publish("readings", b"2", 2, packet_id=2))
        with broker.connect() as client:
            stored = [message.value for message in client.stream("readings", start="earliest", timeout_s=0.2)]
        assert stored == [b"0", b"1", b"2"]


@pytest.mark.parametrize("version", [V4, V5], ids=["3.1.1", "5.0"])
def test_a_packet_id_of_qos_2_whose_release_could_not_be_recorded_is_not_free(version: int) -> None:
    """Found by the soak: the client came back, repeated its PUBREL, and was told that the id was free.

    A restart had never heard of that.  It took the next message under this id for a repetition: confirmed, and lost.
    """
    storage = SimulatedStorage(9)
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        broker.connect().create_topic("readings")
        wire = _connect(broker, version)
        for packet_id in (1, 2):
            wire.send(Publish("readings", b"%d" % packet_id, 2, packet_id=packet_id))
            assert wire.receive(Pubrec).reason == 0
        storage.inject(Fault.SYNC_ERROR, when=_sync_of_sessions)
        for packet_id in (1, 2, 2):  # of the first nobody knows whether it is on disk; the others are not
            wire.send(Pubrel(packet_id))
            said = wire.end()
            assert not any(isinstance(packet, Pubcomp) for packet in said), f"not recorded, and confirmed: {said}"
            wire = _connect(broker, version)
    storage.kill()
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        wire = _connect(broker, version)
        wire.send(Pubrel(2))
        assert wire.receive(Pubcomp).reason == 0
        _finish(wire, Publish("readings", b"3", 2, packet_id=2))
        with broker.connect() as client:
            stored = [message.value for message in client.stream("readings", start="earliest", timeout_s=0.2)]
        assert stored == [b"1", b"2", b"3"]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_gets_what_is_stored_at_offsets_that_a_power_cut_gave_back(qos: int) -> None:
    """What it knew of their old messages was on disk, and they were not: the new ones were taken for sent."""
    storage = SimulatedStorage(7)
    with suppress(PowerCut, OSError), BrokerForTests(storage=storage, mqtt=True) as broker:
        with broker.connect() as client:
            client.create_topic("others")
            client.create_topic("readings", config={"fsync": "never"})
            wire = _connect(broker, V5)
            wire.subscribe("readings", qos=qos)
            for _ in range(5):
                client.publish("readings", b"lost")
        first, *_ = [wire.receive(Publish) for _ in range(5)]
        if qos == 1:
            wire.send(Puback(first.packet_id))  # the others stay in flight
        _finish(wire, Publish("others", b"", 2, packet_id=1))  # on disk, with everything before it
        storage.go_down()
    storage.restart(lose_everything=True)
    for start in range(2):  # the second one finds what the first one has written down
        with BrokerForTests(storage=storage, mqtt=True) as broker:
            with broker.connect() as client:
                client.publish("readings", b"new%d" % start)
            wire = _connect(broker, V5)
            got = [wire.receive(Publish).payload for _ in range(start + 1)]
            assert got == [b"new0", b"new1"][: start + 1], "it confirms none, so they come again"
            wire.nothing()
            wire.close()
        storage.kill()


def test_a_topic_that_cannot_be_opened_after_a_power_cut_takes_nothing_that_sessions_would_miss() -> None:
    storage = SimulatedStorage(7)
    with suppress(PowerCut, OSError), BrokerForTests(storage=storage, mqtt=True) as broker:
        with broker.connect() as client:
            client.create_topic("others")
            client.create_topic("readings", config={"fsync": "never"})
            client.publish("readings", bytes(300_000), fsync="always")
            wire = _connect(broker, V5)
            wire.subscribe("readings", qos=1)
            for _ in range(5):
                client.publish("readings", b"lost")
        for _ in range(5):
            wire.send(Puback(wire.receive(Publish).packet_id))
        _finish(wire, Publish("others", b"", 2, packet_id=1))  # on disk, with everything before it
        storage.go_down()
    storage.restart(lose_everything=True)
    storage.inject(Fault.NO_SPACE, times=100, when=lambda operation: operation.path.startswith("topics/default/r"))
    with BrokerForTests(storage=storage, mqtt=True) as broker, broker.connect(timeout_s=1) as client:
        storage.heal()
        with pytest.raises(StorageFailed, match="restart the broker"):
            client.publish("readings", b"would be taken for sent")
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        with broker.connect() as client:
            assert client.publish("readings", b"new").offset == 1
        assert _connect(broker, V5).receive(Publish).payload == b"new"


@pytest.mark.parametrize("acked", [5, 0])
def test_a_session_gets_what_comes_to_a_topic_in_memory_after_a_restart(acked: int) -> None:
    """Such a topic begins anew at every start, an orderly one too; the session stood where the old one had ended."""
    storage = SimulatedStorage(7)
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        with broker.connect() as client:
            client.create_topic("readings", config={"mode": "ephemeral"})
            wire = _connect(broker, V5)
            wire.subscribe("readings", qos=1)
            for _ in range(5):
                client.publish("readings", b"old")
        for _ in range(acked):
            wire.send(Puback(wire.receive(Publish).packet_id))
        wire.ping()
        wire.close()
    storage.kill()
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        with broker.connect() as client:
            client.publish("readings", b"new")
        wire = _connect(broker, V5)
        received = wire.receive(Publish)
        assert (received.payload, received.dup) == (b"new", False)
        wire.ping()


def test_a_broker_that_cannot_remember_sessions_says_that_it_is_not_well_and_takes_other_messages() -> None:
    """Found by the soak: nobody could have known that a restart was due, and MQTT stood still until one was made."""
    storage = SimulatedStorage(8)
    with BrokerForTests(storage=storage, mqtt=True, http=True) as broker, broker.connect() as client:
        client.create_topic("readings")
        wire = _connect(broker, V5)
        assert httpx.get(f"{broker.url}/health/ready").status_code == 200
        storage.inject(Fault.SYNC_ERROR, when=_sync_of_sessions)
        wire.send(Publish("readings", b"1", 2, packet_id=2))
        wire.end()
        answer = httpx.get(f"{broker.url}/health/ready")
        assert answer.status_code == 503
        assert "the disk failed to sync" in answer.text
        client.publish("readings", b"by another way")


def test_a_client_whose_subscription_was_confirmed_gets_what_is_retained_after_a_crash() -> None:
    """That it was on its way came to the disk a moment behind the subscription; and nobody subscribes again."""
    storage = SimulatedStorage(9)
    late = Settings.model_validate({"storage": {"ack_flush_interval_ms": 1_000}})
    with BrokerForTests(storage=storage, settings=late, mqtt=True) as broker:
        wire = _connect(broker, V5)
        for number in range(5):
            wire.publish(f"state/{number}", b"kept", 1, retain=True)
        assert wire.subscribe("state/#", qos=1) == (1,)
        storage.go_down()
    storage.restart(lose_everything=True)
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        wire = _connect(broker, V5)
        assert wire.connack.session_present
        assert [wire.message().topic for _ in range(5)] == [f"state/{number}" for number in range(5)]
        wire.nothing()
        wire.disconnect()
    with BrokerForTests(storage=storage, mqtt=True) as broker:
        _connect(broker, V5).nothing()
