"""A message through MQTT and back, by a client that others wrote."""

from __future__ import annotations

import queue
from typing import Any, Literal

import pytest

__all__ = ["round_trip"]


def round_trip(port: int, transport: Literal["tcp", "websockets"], *, ca: str = "", size: int = 300_000) -> None:
    """Publish something larger than a frame or a read, and get it back."""
    paho: Any = pytest.importorskip("paho.mqtt.client")
    for version in (paho.MQTTv311, paho.MQTTv5):
        found: queue.Queue[bytes] = queue.Queue()
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=version, transport=transport)
        if ca:
            client.tls_set(ca)
        client.on_message = lambda _client, _data, message, found=found: found.put(message.payload)
        subscribed: queue.Queue[bool] = queue.Queue()
        client.on_subscribe = lambda *_, subscribed=subscribed: subscribed.put(True)
        client.connect("127.0.0.1", port)
        client.loop_start()
        client.subscribe("ways/in", 1)
        assert subscribed.get(timeout=10)
        client.publish("ways/in", bytes(size), 1)
        assert found.get(timeout=10) == bytes(size)
        client.disconnect()
        client.loop_stop()
