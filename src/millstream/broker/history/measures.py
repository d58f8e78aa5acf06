"""What is measured every few seconds, by name, and in which unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millstream.errors import InvalidArgument

__all__ = ["BROKER", "GROUP", "TOPIC", "unit_of"]

#: Of the whole broker.
BROKER: Final[Mapping[str, str]] = {
    "published_rate": "messages/s",
    "published_bytes_rate": "bytes/s",
    "consumed_rate": "messages/s",
    "acked_rate": "messages/s",
    "failed_rate": "messages/s",
    "dead_lettered_rate": "messages/s",
    "throttled_rate": "publishes/s",
    "depth": "messages",
    "leased": "messages",
    "waiting": "messages",
    "scheduled": "messages",
    "dead_letters": "messages",
    "oldest_ms": "ms",
    "connections": "",
    "consumers": "",
    "memory_bytes": "bytes",
    "disk_free_bytes": "bytes",
    "log_bytes": "bytes",
    "publish_p99_ms": "ms",
    "end_to_end_p99_ms": "ms",
    "fsync_p99_ms": "ms",
}
#: Of a topic, for those with most traffic.
TOPIC: Final[Mapping[str, str]] = {"published_rate": "messages/s", "consumed_rate": "messages/s", "depth": "messages"}
#: Of a queue group or a stream group on a topic, for those that are furthest behind.
GROUP: Final[Mapping[str, str]] = {"lag": "messages", "oldest_ms": "ms"}


def unit_of(metric: str, *, topic: str, group: str) -> str:
    """The unit of a measure; raises InvalidArgument when there is no such measure of this kind of thing."""
    if group and not topic:
        raise InvalidArgument("a group is on a topic: name it too")
    measures, of = (GROUP, "a group") if group else (TOPIC, "a topic") if topic else (BROKER, "the broker")
    unit = measures.get(metric)
    if unit is None:
        raise InvalidArgument(f"there is no history of {metric[:100]!r} for {of}; use one of {', '.join(measures)}")
    return unit
