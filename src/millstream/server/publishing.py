"""Publishing for doors that speak text: entries in, batches to the broker, receipts out.

What one request publishes to one partition is one batch, stored as a whole or not at all.  Messages with a dedup id are
batches of their own, so that each is recognised by itself, and what is larger than a few megabytes is cut.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from millstream.broker.broker import Broker, Session
from millstream.broker.registry import Topic
from millstream.broker.traffic.duplicates import no_window
from millstream.entries import (
    AnyEntry,
    encode_entries,
    has_dedup_id,
    is_delayed,
    message_bytes,
    routing_key,
    split_entries,
)
from millstream.errors import MillstreamError, PartitionNotFound, PayloadTooLarge
from millstream.ids import SCHEDULES, message_id, schedule_uid
from millstream.partitioning import key_partition
from millstream.wire import calls
from millstream.wire.lookups import metadata_for
from millstream.wire.messages import LABELS, PublishRequest

__all__ = ["Receipt", "publish"]

_BATCH_BYTES: Final = 4 * 1024 * 1024
#: As many as a request may hold; then keys decide about batches and nothing else.
_BATCH_MESSAGES: Final = 10_000
_LEADER: Final = 1
#: Batches that are made before others have their turn; with more messages than this others go first, too.
_AT_A_TIME: Final = 256


class Receipt(msgspec.Struct, gc=False):
    """Proof of a publish."""

    id: str
    topic: str
    partition: int
    #: Of a message that is delivered later: among what is scheduled.
    offset: int
    #: What the message survives: memory, os (a crash of the process) or disk (a power cut).
    durability: str
    #: It was stored before, by a publish with the same dedup id.
    duplicate: bool
    #: It is delivered later.
    scheduled: bool


async def publish(
    broker: Broker,
    session: Session,
    topic: str,
    entries: Sequence[AnyEntry],
    *,
    partitions: Sequence[int | None] | None = None,
    fsync: int = 0,
    now_us: int,
) -> list[Receipt | MillstreamError]:
    """A receipt for each message, or why it was not stored.  A missing topic is made if the broker may.

    `partitions` are those that messages ask for.  Raises MillstreamError when nothing was stored because of what can be
    known beforehand.
    """
    metadata = _known(broker, session, topic)
    if metadata is None:
        broker.check_publish(session, topic)  # before a topic is made
        found: Any = await broker.call(session, metadata_for(topic, entries, partitions))
        metadata = found[0]
    assert metadata is not None
    _check_sizes(entries, metadata)
    stored_in = broker.topics.registry.find(session.namespace, topic)
    if stored_in is not None:
        _check_ids(entries, stored_in.config.dedup_window_ms)
    results: list[Receipt | MillstreamError | None] = [None] * len(entries)
    loop = broker.queues.loop
    done: asyncio.Future[None] = loop.create_future()
    left = 1  # batches that are not answered, and one for those that are to come

    def send(number: int, batch: bytearray, places: Sequence[int]) -> None:
        def reply(
            error: MillstreamError | None, label: int, base_offset: int, append_time_us: int, duplicate: bool
        ) -> None:
            nonlocal left
            if error is None:
                scheduled = number >= SCHEDULES
                partition = number & ~SCHEDULES
                uid = metadata.partition_uids[partition]
                uid = schedule_uid(uid) if scheduled else uid
                for offset, place in enumerate(places, base_offset):
                    results[place] = Receipt(
                        message_id(append_time_us, uid, offset),
                        topic,
                        partition,
                        offset,
                        LABELS[label],
                        duplicate,
                        scheduled,
                    )
            else:
                for place in places:
                    results[place] = error
            left -= 1
            if not left and not done.done():
                done.set_result(None)

        try:
            broker.publish(session, PublishRequest(topic, number, _LEADER, fsync, memoryview(batch)), reply)
        except MillstreamError as error:
            reply(error, 0, 0, 0, False)

    piles = _piles(metadata, entries, partitions)
    if stored_in is not None and stored_in.config.dedup_window_ms:
        await _know_ids(broker, stored_in, piles, entries)
    if len(entries) > _AT_A_TIME:
        await asyncio.sleep(0)
    for count, (number, batch, places) in enumerate(_batches(piles, entries, now_us), 1):
        left += 1
        send(number, batch, places)
        if not count % _AT_A_TIME:
            broker.flush()
            await asyncio.sleep(0)
    left -= 1
    if left:
        # Requests that arrive together are written together.
        loop.call_soon(broker.flush)
        await done
    return results  # type: ignore[return-value]


def _known(broker: Broker, session: Session, topic: str) -> calls.TopicMetadata | None:
    """What a topic says of itself, without a call: if it is there, for those who may publish to it."""
    found = broker.topics.registry.find(session.namespace, topic)
    if found is None or not session.access.may("produce", session.namespace, topic):
        return None
    return calls.TopicMetadata(
        name=topic, partition_uids=found.partition_uids, max_message_bytes=found.config.max_message_bytes
    )


def _batches(
    piles: Mapping[int, Sequence[int]], entries: Sequence[AnyEntry], now_us: int
) -> Iterator[tuple[int, bytearray, Sequence[int]]]:
    """Partition (with SCHEDULES added if it is delayed), batch, and the places of its messages among the entries."""
    if len(entries) == 1:
        [number] = piles
        yield number, _batch(entries, now_us), range(1)
        return
    for number, places in piles.items():
        pile = entries if len(places) == len(entries) else [entries[place] for place in places]
        for first, last in split_entries(pile, bytes_max=_BATCH_BYTES, messages_max=_BATCH_MESSAGES):
            part = pile if last - first == len(pile) else pile[first:last]
            yield number, _batch(part, now_us), places[first:last]


def _batch(entries: Sequence[AnyEntry], now_us: int) -> bytearray:
    head, tail = encode_entries(entries, base_timestamp_us=now_us)
    batch = bytearray(head)
    batch += tail
    return batch


def _piles(
    topic: calls.TopicMetadata, entries: Sequence[AnyEntry], partitions: Sequence[int | None] | None
) -> dict[int, Sequence[int]]:
    """Which messages go to which partition.  Those without a key stay together, in order."""
    count = len(topic.partition_uids)
    keyless = random.randrange(count) if count > 1 else 0
    if partitions is None and set(map(type, entries)) == {bytes}:
        return {keyless: range(len(entries))}
    piles: dict[int, list[int]] = {}
    for place, entry in enumerate(entries):
        wanted = partitions[place] if partitions is not None else None
        if wanted is not None:
            if not 0 <= wanted < count:
                raise PartitionNotFound(f"topic {topic.name!r} has partitions 0 to {count - 1}, not {wanted}")
            number = wanted
        else:
            key = routing_key(entry)
            number = keyless if key is None else key_partition(key, count)
        if is_delayed(entry):
            number |= SCHEDULES
        piles.setdefault(number, []).append(place)
    return piles  # type: ignore[return-value]


def _check_sizes(entries: Sequence[AnyEntry], topic: calls.TopicMetadata) -> None:
    for place, entry in enumerate(entries):
        size = message_bytes(entry)
        if size > topic.max_message_bytes:
            raise PayloadTooLarge(
                f"message {place} has {size} bytes, topic {topic.name!r} allows {topic.max_message_bytes}"
            )


async def _know_ids(
    broker: Broker, topic: Topic, piles: Mapping[int, Sequence[int]], entries: Sequence[AnyEntry]
) -> None:
    """Wait while the broker reads which dedup ids it has seen, as it does for the first one after a start."""
    for number, places in piles.items():
        if any(has_dedup_id(entries[place]) for place in places):
            partition = broker.topics.partition_of(topic, number)
            await partition.duplicates(topic.config.dedup_window_ms).known()


def _check_ids(entries: Sequence[AnyEntry], window_ms: int) -> None:
    """The broker refuses ids as well, but then others of the same request would be stored."""
    if not window_ms and any(map(has_dedup_id, entries)):
        raise no_window()
