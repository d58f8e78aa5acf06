"""MQTT packets by hand, right and wrong, for tests of the codec."""

from __future__ import annotations

from millstream.mqtt.decoders import Peer
from millstream.mqtt.packets import Packet
from millstream.mqtt.reader import PacketReader
from millstream.mqtt.reasons import MqttViolation

PACKET_BYTES_MAX = 1024 * 1024


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return len(data).to_bytes(2, "big") + data


def packet(first: int, *parts: bytes) -> bytes:
    """A packet of less than 128 bytes."""
    body = b"".join(parts)
    assert len(body) < 128
    return bytes((first, len(body))) + body


def properties(*parts: bytes) -> bytes:
    body = b"".join(parts)
    assert len(body) < 128
    return bytes((len(body),)) + body


def reader(version: int, peer: Peer = "client", bytes_max: int = PACKET_BYTES_MAX) -> PacketReader:
    return PacketReader(bytes_max=bytes_max, peer=peer, version=version)


def read(data: bytes, version: int = 5, peer: Peer = "client") -> Packet:
    """The one packet in these bytes; a CONNECT is read by version 0."""
    reading = reader(version, peer)
    reading.feed(data)
    (found,) = reading.packets()
    return found


def refusal(data: bytes, version: int = 5, peer: Peer = "client") -> MqttViolation:
    """How these bytes are refused."""
    reading = reader(version, peer)
    reading.feed(data)
    try:
        found = list(reading.packets())
    except MqttViolation as violation:
        assert "\n" not in str(violation)
        assert not str(violation).endswith(".")
        return violation
    raise AssertionError(f"nothing is wrong with {found}")
