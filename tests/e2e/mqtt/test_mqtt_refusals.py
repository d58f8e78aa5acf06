"""Publishes that are refused: none of them may hang afterwards, or leave something behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.mqtt.packets import V4, Connect, Publish, Pubrec
from millstream.mqtt.reasons import Reason
from millstream.testing.broker import BrokerForTests
from tests.e2e.mqtt.support import Address, Millstream, Wire, Wires


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


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("address", ["readings", "$queue/readings"])
def test_a_message_that_is_refused_makes_no_topic(tmp_path: Path, address: str, qos: int) -> None:
    sections: dict[str, Any] = {"mqtt": {"max_packet_bytes": 2 * 1024 * 1024}}
    server = Millstream(tmp_path / "data", **sections)
    wires = Wires(server)
    try:
        with server.broker.connect() as client:
            wires.durable().subscribe("readings", qos=1)
            writer = wires.durable()
            assert writer.publish(address, b"x" * (1024 * 1024 + 1), qos) == Reason.QUOTA_EXCEEDED
            client.set_mode("maintenance", "new disk")
            assert writer.publish(address, b"x", qos) >= 0x80
            client.set_mode("normal")
            assert client.topics() == []
            assert writer.publish(address, b"x", qos) == Reason.SUCCESS
            assert [topic.name for topic in client.topics()] == ["readings"]
    finally:
        wires.close()
        server.stop()
