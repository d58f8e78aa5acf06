"""What a queue is like that MQTT clients bring into being by using it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millstream.entries import Entry, message_bytes
from millstream.errors import PayloadTooLarge, TopicNotFound
from millstream.wire import calls

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.broker.broker import Session as BrokerSession

__all__ = ["CONFIG", "PARTITIONS", "check_first", "make_letters", "make_queue"]

_DAY_MS: Final = 24 * 3_600_000

PARTITIONS: Final = 10
CONFIG: Final[dict[str, Any]] = {
    "max_message_bytes": 1024 * 1024,
    "max_depth": 100_000,
    "message_ttl_ms": 7 * _DAY_MS,
    "lease_ms": 30_000,
    "retry": "durable",
    # Publishers may give ids of their own to recognise repetitions by.
    "dedup_window_ms": 300_000,
}
#: As long as those that the broker makes for itself.
_LETTERS_CONFIG: Final[dict[str, Any]] = {"retention_ms": 14 * _DAY_MS}


def check_first(name: str, entry: Entry) -> None:
    """Raises PayloadTooLarge when the message for which a queue would be made were refused by it."""
    size, limit = message_bytes(entry), CONFIG["max_message_bytes"]
    if size > limit:
        raise PayloadTooLarge(f"a message has {size} bytes, queue {name!r} would allow {limit}")


async def make_queue(broker: Broker, own: BrokerSession, name: str) -> None:
    """Raises MillstreamError when there can be no such queue."""
    if not broker.settings.topics.auto_create:
        raise TopicNotFound(f"there is no queue {name!r}, and this broker makes none by itself")
    await broker.call(own, calls.CreateTopic(name=name, partitions=PARTITIONS, config=CONFIG, if_missing=True))


async def make_letters(broker: Broker, namespace: str, name: str, letters: str) -> None:
    """The topic of a queue's dead letters, if there is none yet."""
    registry = broker.topics.registry
    if registry.find(namespace, letters) is None:
        partitions = len(registry.get(namespace, name).partitions)
        call = calls.CreateTopic(name=letters, partitions=partitions, config=_LETTERS_CONFIG, if_missing=True)
        await broker.topics.create(namespace, call, own=True)
