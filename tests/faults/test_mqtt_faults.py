"""MQTT on a disk that fails: what is in doubt is never answered as if it were certain."""

from __future__ import annotations

import httpx
import pytest

from millstream.mqtt.packets import V4, V5, Connect, Disconnect, Properties, Pubcomp, Publish, Pubrec, Pubrel
from millstream.testing.broker import BrokerForTests
from millstream.testing.storage import Fault, Operation, SimulatedStorage
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
