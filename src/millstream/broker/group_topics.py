"""What stream groups need to know about topics: how many partitions, how far they reach, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millstream.broker.lost_ends import recovered_end
from millstream.broker.topics import Topics
from millstream.groups.offsets import Bounds
from millstream.groups.records import TopicPartition
from millstream.records import read_header

__all__ = ["GroupTopics"]

_SEARCH_BYTES: Final = 4096


class GroupTopics:
    """Topics, as groups see them."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    @property
    def epoch(self) -> int:
        return self._topics.epoch

    def partition_counts(self, namespace: str) -> Mapping[str, int]:
        return self._topics.registry.partition_counts(namespace)

    def in_memory(self, namespace: str, topic: str) -> bool:
        """Whether its messages end with the broker."""
        return self._topics.registry.get(namespace, topic).config.mode == "ephemeral"

    def bounds(self, namespace: str, partition: TopicPartition) -> Bounds:
        topic = self._topics.registry.get(namespace, partition.topic)
        if partition.partition < len(topic.partitions) and self._topics.is_untouched(topic, partition.partition):
            return Bounds(0, 0)
        running = self._topics.partition_of(topic, partition.partition)
        return Bounds(running.log.start_offset, running.high_watermark)

    def recovered_end(self, namespace: str, partition: TopicPartition, position: int) -> int | None:
        """Where a log ends after a start, for a group that has a position in it; None when nobody can tell."""
        topic = self._topics.registry.get(namespace, partition.topic)
        return recovered_end(self._topics, topic, partition.partition, position)

    def end_of_epoch(self, namespace: str, partition: TopicPartition, epoch: int) -> int:
        """Where that ends which was stored up to an epoch: what was read of it behind that end is lost."""
        return self._topics.partition(namespace, partition.topic, partition.partition).log.end_of_epoch(epoch)

    def offset_at_time(self, namespace: str, partition: TopicPartition, time_us: int) -> int:
        running = self._topics.partition(namespace, partition.topic, partition.partition)
        return min(running.log.offset_at_time(time_us), running.high_watermark)

    async def append_time_us(self, namespace: str, partition: TopicPartition, offset: int) -> int | None:
        """When the message at an offset was stored, or None when it is not there."""
        running = self._topics.partition(namespace, partition.topic, partition.partition)
        await running.warm(offset)
        if not running.log.start_offset <= offset < running.high_watermark:
            return None
        chunk = running.log.read(offset, _SEARCH_BYTES, before=running.high_watermark)
        return read_header(chunk.buffers[0]).append_time_us if chunk.buffers else None
