"""Publishes that are refused together: none of them may hang afterwards."""

from __future__ import annotations

from pathlib import Path

from millstream.mqtt.packets import V4, Connect, Publish, Pubrec
from millstream.testing.broker import BrokerForTests
from tests.e2e.mqtt.support import Address, Wire


def _connect(broker: BrokerForTests) -> Wire:
    wire = Wire(Address("127.0.0.1", broker.mqtt_port), V4)
    assert wire.connect(Connect(V4, "sensor", False, 0, None, None, None)).reason == 0
    return wire


def test_what_was_refused_behind_the_message_that_ended_the_connection_is_answered_when_it_comes_again(
    tmp_path: Path,
) -> None:
    """Found by the soak: the last one counted as on its way to the disk for ever, and its publisher stood still."""
    with BrokerForTests(tmp_path / "data", mqtt=True) as broker, broker.connect() as client:
        client.create_topic("readings", config={"max_message_bytes": 200})
        wire = _connect(broker)
        large = b"x" * 1000
        # The first waits for the disk, and the answers of the others behind it: all of them are known at once.
        small = Publish("readings", b"ok", 2, packet_id=1)
        wire.send(small, *(Publish("readings", large, 2, packet_id=packet_id) for packet_id in (2, 3)))
        assert [type(packet) for packet in wire.end()] == [Pubrec]
        wire = _connect(broker)
        client.alter_topic("readings", {"max_message_bytes": 2000})
        wire.send(Publish("readings", large, 2, dup=True, packet_id=3))
        assert wire.receive(Pubrec).packet_id == 3
