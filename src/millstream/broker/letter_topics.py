"""The topics that dead letters go to: made by the broker when the first letter needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.errors import TopicNotFound
from millstream.queues.letters import dead_letter_topic, died_in
from millstream.records import Batch
from millstream.wire.calls import CreateTopic

if TYPE_CHECKING:
    from millstream.broker.registry import Topic
    from millstream.broker.topics import Topics
    from millstream.broker.transfer import Target

__all__ = ["letter_topic_of", "remake_letter_topic"]

#: Dead letters are kept for two weeks, unless somebody says otherwise.
_RETENTION_MS: Final = 14 * 24 * 3_600_000


async def letter_topic_of(topics: Topics, topic: Topic) -> Topic:
    """Where the dead letters of a topic go, made now if need be."""
    return await _made(topics, topic, dead_letter_topic(topic.name, topic.config.dead_letter_topic))


async def _made(topics: Topics, topic: Topic, name: str) -> Topic:
    if topics.registry.find(topic.namespace, name) is None:
        call = CreateTopic(
            name=name,
            partitions=len(topic.partitions),
            config={"retention_ms": _RETENTION_MS},
            if_missing=True,
        )
        await topics.create(topic.namespace, call, own=True)
    return topics.registry.get(topic.namespace, name)


async def remake_letter_topic(topics: Topics, topic: Topic, target: Target, batch: bytes | bytearray) -> None:
    """Letters were on their way from a topic when theirs was deleted: these came after it, so there is one again.

    Also when letters go elsewhere by now: these are numbered for this one, where each of them arrives once.

    Raises TopicNotFound when it is something else that was to be moved, or the topic they come from is gone, too.
    """
    if topic.deleting or not died_in(Batch.parse(batch, verify=False), topic.name):  # nobody has stamped it yet
        raise TopicNotFound(f"topic {target.topic!r} was deleted")
    await _made(topics, topic, target.topic)
