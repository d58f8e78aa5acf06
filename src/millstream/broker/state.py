"""State logs: what the broker must remember beside messages, as facts in a log like any other.

A state log is a partition log that is compacted by key.  A fact is a key and a JSON document that replaces what the key
said before; None removes it.  A fact is durable before anybody acts on it, and a restart replays the same facts onto
nothing: there is no second way of loading state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import structlog

from millstream.broker.answers import PublishReply
from millstream.broker.logs import details
from millstream.broker.partition import Partition
from millstream.broker.vocabulary import check_document
from millstream.errors import MillstreamError
from millstream.log.partition import PartitionLog
from millstream.records import Batch, encode_batch

__all__ = ["StateLog", "all_batches", "hand_over"]

_log = structlog.get_logger("millstream.recovery")

_READ_BYTES: Final = 1024 * 1024
_MESSAGE_BYTES_MAX: Final = 1 << 30


def all_batches(log: PartitionLog) -> Iterator[Batch]:
    """Everything in a log, from its beginning; for logs that are read once, at start."""
    offset = log.start_offset
    while offset < log.next_offset:
        while (cold := log.cold_segment(offset)) is not None:
            log.accept(cold.verify())
        chunk = log.read(offset, _READ_BYTES, before=log.next_offset)
        data = b"".join(chunk.buffers)
        at = 0
        while at < len(data):
            batch = Batch.parse(data, at)
            yield batch
            at += batch.header.length
        offset = chunk.next_offset


def hand_over(partition: Partition, batch: bytearray) -> None:
    """Give a batch of the broker's own to the operating system, for whoever does not wait for the disk.

    Raises MillstreamError when it is refused.
    """
    answers: list[MillstreamError | None] = []
    reply: PublishReply = lambda error, *_: answers.append(error)  # noqa: E731
    partition.publish(memoryview(batch), fsync="never", max_message_bytes=_MESSAGE_BYTES_MAX, reply=reply, flushes=True)
    partition.flush()
    for error in answers:
        if error is not None:
            raise error


class StateLog:
    """Writes facts, and reads all of them back once at start."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def replay(self) -> dict[str, Any]:
        """The newest document of every key, in the order the keys were last written.

        Raises NewerData when one of them says something that only a newer version understands.
        """
        documents: dict[str, Any] = {}
        for batch in all_batches(self.partition.log):
            for key, value in zip(batch.keys() or (), batch.values(), strict=True):
                assert key is not None
                name = key.decode()
                documents.pop(name, None)
                if value is not None:
                    documents[name] = msgspec.json.decode(value)
        for name, document in documents.items():
            check_document(self.partition.log.directory, name, document)
        if details.on:
            _log.debug("state read", directory=self.partition.log.directory, facts=len(documents))
        return documents

    async def record(self, facts: Mapping[str, Any], *, now_us: int) -> None:
        """Make facts durable, in one write; raises StorageFailed, and then none of them counts."""
        batch = encode_batch(
            [None if document is None else msgspec.json.encode(document) for document in facts.values()],
            keys=[key.encode() for key in facts],
            base_timestamp_us=now_us,
        )
        await self.partition.append_durably(batch)
