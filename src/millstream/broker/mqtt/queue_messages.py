"""Messages of queues: what MQTT publishes there as it is stored, and what was leased as MQTT delivers it.

What a publisher asks for is in user properties, and so is what a consumer must know to settle a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from millstream.durations import DURATION_MS_MAX
from millstream.entries import Entry, lane_of
from millstream.errors import InvalidArgument
from millstream.headers import encode_headers, readable_headers
from millstream.ids import message_id
from millstream.mqtt.messages import Message
from millstream.mqtt.packets import Properties
from millstream.mqtt.stored import entry_of, message_of
from millstream.mqtt.topics import QueueAddress
from millstream.options import BROKER_OPTIONS, DEDUP_ID
from millstream.receipts import ReceiptHandle
from millstream.slicing import batches_of
from millstream.wire.leases import LeasePart

__all__ = [
    "MESSAGE_ID",
    "RECEIPT_HANDLE",
    "Leased",
    "entry_for_queue",
    "is_reply_address",
    "leased_messages",
    "whole_number",
]

MESSAGE_ID: Final = "message-id"
RECEIPT_HANDLE: Final = "receipt-handle"
_DELIVERY_COUNT: Final = "delivery-count"
_PARTITION: Final = "partition"
_PARTITION_KEY: Final = "partition-key"
_PRIORITY: Final = "priority"
_DELAY_MS: Final = "delay-ms"
_DELIVER_AT: Final = "deliver-at"

#: What speaks to the broker and is not kept with the message.
_ASKED: Final = frozenset((_PARTITION_KEY, _PRIORITY, _DELAY_MS, _DELIVER_AT))
#: What the broker says of a delivery, whatever the publisher has called so.
_TOLD: Final = BROKER_OPTIONS | {MESSAGE_ID, RECEIPT_HANDLE, _DELIVERY_COUNT, _PARTITION}


#: `$queue/responses/ID` is where somebody waits for one answer, and no queue.
_REPLIES: Final = "responses."


def is_reply_address(address: QueueAddress) -> bool:
    return address.topic.startswith(_REPLIES) and not address.action and not address.dead_letters


class Leased(NamedTuple):
    """A message in the hands of a client."""

    #: What its publisher has called it, or its id.
    id: str
    receipt: ReceiptHandle
    message: Message


def entry_for_queue(message: Message, now_us: int, *, recognised: bool) -> Entry:
    """A message on its way into a queue.  Raises InvalidArgument.

    `recognised`: an id of the publisher's tells repetitions; otherwise it is a name and no more.
    """
    told = message.properties.user
    asked = {name: value for name, value in reversed(told) if name in _ASKED or name == MESSAGE_ID}
    key = asked.get(_PARTITION_KEY)
    priority = asked.get(_PRIORITY)
    entry = _full(message, key.encode() if key else None, now_us)
    if priority is not None:
        entry = entry._replace(priority=_lane(priority))
    due_us = _due_us(asked, now_us)
    if due_us > now_us:
        entry = entry._replace(deliver_at_us=due_us)
    own_id = asked.get(MESSAGE_ID)
    if own_id:
        entry = entry._replace(dedup_id=own_id.encode())  # which also chooses its partition
    if own_id and recognised:
        entry = entry._replace(headers=entry.headers + encode_headers([(DEDUP_ID, own_id)]), options=True)
    return entry


def _lane(text: str) -> int:
    """Longer numbers than one digit are no priority, and Python does not even read very long ones."""
    return lane_of(int(text) if len(text) == 1 and text.isdecimal() else text[:80])


def _full(message: Message, key: bytes | None, now_us: int) -> Entry:
    properties = message.properties
    kept = tuple(one for one in properties.user if one[0] not in _ASKED)
    message.properties = msgspec.structs.replace(properties, user=kept)
    entry = entry_of(message, key=key, now_us=now_us)
    assert isinstance(entry, Entry)  # it says at least which client has published it
    return entry


def _due_us(asked: dict[str, str], now_us: int) -> int:
    if _DELAY_MS in asked and _DELIVER_AT in asked:
        raise InvalidArgument(f"use {_DELAY_MS} or {_DELIVER_AT}, not both")
    delay_ms, deliver_at = asked.get(_DELAY_MS), asked.get(_DELIVER_AT)
    if delay_ms is not None:
        return now_us + whole_number(_DELAY_MS, delay_ms) * 1000
    if deliver_at is None:
        return 0
    if deliver_at.isdecimal():
        return whole_number(_DELIVER_AT, deliver_at) * 1000
    try:
        moment = datetime.fromisoformat(deliver_at)
    except ValueError:
        raise InvalidArgument(
            f"{_DELIVER_AT} is a time such as '2026-01-31T12:00:00Z', or milliseconds since 1970, not {deliver_at!r}"
        ) from None
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1e6)


def whole_number(name: str, text: str) -> int:
    """Milliseconds that somebody has written into a user property."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 15 or int(text) > DURATION_MS_MAX:
        raise InvalidArgument(f"{name} is a whole number of milliseconds up to {DURATION_MS_MAX}, not {text[:40]!r}")
    return int(text)


def leased_messages(part: LeasePart, uid: int, topic: str) -> Iterator[Leased]:
    """The messages of a lease, as they are delivered under an MQTT topic name."""
    granted, start = part.granted, part.start
    for batch in batches_of(part.batches):
        headers, expiry = batch.raw_headers(), batch.expiry_us()
        for place, (offset, value) in enumerate(zip(batch.offsets(), batch.values(), strict=True)):
            if offset >= start and granted >> offset - start & 1:
                told = readable_headers(headers[place]) if headers else []
                message = message_of(topic, value, told, expiry[place] if expiry else 0)
                receipt = ReceiptHandle(part.topic, part.partition, offset, part.delivery, part.nonce)
                yield _leased(message, receipt, message_id(batch.append_time_us, uid, offset))


def _leased(message: Message, receipt: ReceiptHandle, given_id: str) -> Leased:
    properties: Properties = message.properties
    own_id = next((value for name, value in properties.user if name == MESSAGE_ID and value), given_id)
    message.retain = False
    message.properties = msgspec.structs.replace(
        properties,
        user=(
            (MESSAGE_ID, own_id),
            (RECEIPT_HANDLE, str(receipt)),
            (_DELIVERY_COUNT, str(receipt.delivery)),
            (_PARTITION, str(receipt.partition)),
            *(one for one in properties.user if one[0] not in _TOLD),
        ),
    )
    return Leased(own_id, receipt, message)
