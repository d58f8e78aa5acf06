"""`$SYS/broker/...`: the broker's own figures, under the names that Mosquitto has made common.

They are not kept anywhere: whoever subscribes gets them as they are, and then, as long as it stays, what has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from millstream.broker.mqtt.parcel import Parcel
from millstream.broker.mqtt.retained import Kept
from millstream.mqtt.messages import Message
from millstream.mqtt.topics import SYSTEM_PREFIX, filter_matches

if TYPE_CHECKING:
    from millstream.broker.mqtt.mqtt import Mqtt

__all__ = ["SystemTopics"]

_ROOT: Final = f"{SYSTEM_PREFIX}broker/"
#: What grows, by what it is called as a load; and the counter behind it.
_LOADS: Final = {
    "messages/received": "mqtt_packets_received",
    "messages/sent": "mqtt_packets_sent",
    "publish/received": "mqtt_received",
    "publish/sent": "mqtt_sent",
    "publish/dropped": "mqtt_dropped",
    "bytes/received": "mqtt_bytes_received",
    "bytes/sent": "mqtt_bytes_sent",
    "sockets": "mqtt_connections",
}
_WINDOWS_MIN: Final = (1, 5, 15)
_US_PER_MIN: Final = 60_000_000


class SystemTopics:
    """See the module."""

    def __init__(self, room: Mqtt) -> None:
        self._room = room
        self._started_us = room.clock.now_us()
        #: By load and window: how much per minute, over about so many minutes.
        self._loads: dict[tuple[str, int], float] = {}
        self._counted: dict[str, int] = {}
        self._counted_us = self._started_us
        self._said: dict[str, str] = {}

    def matching(self, topic_filter: str) -> Iterator[Kept]:
        """What whoever subscribes gets first."""
        for topic, figure in self._figures().items():
            if filter_matches(topic_filter, topic):
                yield Kept(_message(topic, figure), -1)

    def tick(self) -> None:
        """Called about once a second."""
        interval_us = self._room.settings.system_interval_ms * 1000
        if interval_us and self._room.clock.now_us() - self._counted_us >= interval_us:
            self._publish()

    def _publish(self) -> None:
        """Say what has changed since the last time, to whoever is there."""
        self._count()
        before, self._said = self._said, self._figures()
        now_us = self._room.clock.now_us()
        for topic, figure in self._said.items():
            if before.get(topic) != figure:
                for world in self._room.worlds.values():
                    if world.receivers(topic):
                        world.dispatch(Parcel(_message(topic, figure), now_us), None)

    def _count(self) -> None:
        """Loads are moving averages: every round moves them towards what has come since the last one."""
        metrics = self._room.broker.metrics
        now_us = self._room.clock.now_us()
        passed_min = (now_us - self._counted_us) / _US_PER_MIN
        self._counted_us = now_us
        for load, counter in _LOADS.items():
            total: int = getattr(metrics, counter)
            rate = (total - self._counted.get(load, 0)) / passed_min
            self._counted[load] = total
            for window in _WINDOWS_MIN:
                weight = math.exp(-passed_min / window)
                self._loads[load, window] = self._loads.get((load, window), 0.0) * weight + rate * (1 - weight)

    def _figures(self) -> dict[str, str]:
        room = self._room
        metrics = room.broker.metrics
        sessions = sum(len(world.sessions) for world in room.worlds.values())
        connected = metrics.mqtt_connected
        uptime_s = (room.clock.now_us() - self._started_us) // 1_000_000
        figures: dict[str, object] = {
            "version": room.broker.software,
            "uptime": f"{uptime_s} seconds",
            "clients/connected": connected,
            "clients/active": connected,
            "clients/disconnected": sessions - connected,
            "clients/inactive": sessions - connected,
            "clients/total": sessions,
            "clients/maximum": metrics.mqtt_connected_max,
            "messages/received": metrics.mqtt_packets_received,
            "messages/sent": metrics.mqtt_packets_sent,
            "publish/messages/received": metrics.mqtt_received,
            "publish/messages/sent": metrics.mqtt_sent,
            "publish/messages/dropped": metrics.mqtt_dropped,
            "bytes/received": metrics.mqtt_bytes_received,
            "bytes/sent": metrics.mqtt_bytes_sent,
            "subscriptions/count": metrics.mqtt_subscriptions,
            "retained messages/count": room.retained.count,
            "store/messages/bytes": room.retained.bytes,
            "heap/current": metrics.memory_bytes,
        }
        for (load, window), rate in self._loads.items():
            figures[f"load/{load}/{window}min"] = f"{rate:.2f}"
        return {_ROOT + name: str(figure) for name, figure in figures.items()}


def _message(topic: str, figure: str) -> Message:
    return Message(topic, figure.encode(), qos=0, retain=True)
