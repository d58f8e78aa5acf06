"""What an MQTT client says to queues and hears of them."""

from __future__ import annotations

from millstream.mqtt.packets import Properties, Puback, Publish
from tests.e2e.mqtt.support import Millstream, Wire

__all__ = ["depth", "join", "settle", "told", "user"]


def told(message: Publish) -> dict[str, str]:
    return dict(message.properties.user)


def user(**properties: object) -> Properties:
    return Properties(user=tuple((name.replace("_", "-"), str(value)) for name, value in properties.items()))


def join(wire: Wire, queue: str, group: str = "workers", qos: int = 1) -> int:
    (reason,) = wire.subscribe(f"$queue/{queue}", qos=qos, properties=user(consumer_group=group))
    return reason


def settle(wire: Wire, queue: str, how: str, **properties: object) -> Puback:
    packet_id = wire.packet_id()
    wire.send(Publish(f"$queue/{queue}/${how}", b"", 1, packet_id=packet_id, properties=user(**properties)))
    return wire.receive(Puback)


def depth(server: Millstream, queue: str, group: str = "workers") -> int:
    with server.broker.connect() as client:
        return int(client.queues.describe(queue.replace("/", "."), group).depth)
