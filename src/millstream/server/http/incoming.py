"""Messages as a client gets to see them in JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from millstream.headers import readable_headers
from millstream.ids import message_id
from millstream.records import PRIORITY_DEFAULT, Batch, Buffer
from millstream.slicing import parts_of
from millstream.values import Encoding, to_headers, to_json, to_json_start
from millstream.wire.message_calls import MessageInfo

__all__ = ["ShownMessage", "shown", "shown_messages"]


class ShownMessage(msgspec.Struct, kw_only=True, gc=False):
    """One message."""

    id: str
    topic: str
    partition: int
    #: Of a message that is not due yet: among what is scheduled.
    offset: int
    key: str | None
    #: `text` or `base64`.
    key_encoding: str
    value: Any
    #: Of the value: `text`, `json` or `base64`.
    encoding: str
    #: Bytes of the value, also of one that is not shown as a whole.
    size: int
    #: A list stands for a name that occurs several times; what is not text, or begins so, is base64 behind `base64:`.
    headers: dict[str, str | list[str]]
    #: When it was made, by its producer's clock, and when it was stored.
    timestamp_ms: int
    append_time_ms: int
    priority: int
    #: 0 = none.
    expiry_ms: int
    #: When a scheduled message will be delivered; 0 = it is there.
    deliver_at_ms: int


def shown(message: MessageInfo, encoding: Encoding) -> ShownMessage:
    whole = message.value is None or len(message.value) == message.size
    value, how = (to_json if whole else to_json_start)(message.value, encoding)
    key, key_encoding = to_json(message.key, "text")
    return ShownMessage(
        id=message.id,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=key,
        key_encoding=key_encoding,
        value=value,
        encoding=how,
        size=message.size,
        headers=to_headers(message.headers),
        timestamp_ms=message.timestamp_ms,
        append_time_ms=message.append_time_ms,
        priority=message.priority,
        expiry_ms=message.expiry_ms,
        deliver_at_ms=message.deliver_at_ms,
    )


def shown_messages(
    buffers: Iterable[Buffer], topic: str, partition: int, uid: int, first: int, encoding: Encoding
) -> Iterator[ShownMessage]:
    """The messages of stored batches, from an offset on; one at a time, because a batch may hold a million."""
    for part in parts_of(buffers, first):
        yield from _shown_part(part, topic, partition, uid, first, encoding)


def _shown_part(
    batch: Batch, topic: str, partition: int, uid: int, first: int, encoding: Encoding
) -> Iterator[ShownMessage]:
    header, offsets = batch.header, batch.offsets()
    append_us = header.append_time_us
    values, keys, raw_headers = batch.values(), batch.keys(), batch.raw_headers()
    timestamps, priorities, expiry = batch.timestamps_us(), batch.priorities(), batch.expiry_us()
    for place in range(bisect_left(offsets, first), len(offsets)):
        offset, data = offsets[place], values[place]
        value, how = to_json(data, encoding)
        key, key_encoding = to_json(keys[place], "text") if keys else (None, "text")
        yield ShownMessage(
            id=message_id(append_us, uid, offset),
            topic=topic,
            partition=partition,
            offset=offset,
            key=key,
            key_encoding=key_encoding,
            value=value,
            encoding=how,
            size=len(data or b""),
            headers=to_headers(readable_headers(raw_headers[place])) if raw_headers else {},
            timestamp_ms=(timestamps[place] if timestamps else header.base_timestamp_us) // 1000,
            append_time_ms=append_us // 1000,
            priority=priorities[place] if priorities else PRIORITY_DEFAULT,
            expiry_ms=expiry[place] // 1000 if expiry else 0,
            deliver_at_ms=0,
        )
