"""DELIVERY: messages for a subscription, sent without having been asked for.

The batches inside are the stored ones, the same bytes for every subscriber; only the few bytes in front differ.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from millstream.errors import ProtocolViolation
from millstream.wire.frames import FrameType, frame_head

__all__ = ["DELIVERY_BYTES", "Delivered", "Delivery", "decode_delivery", "encode_delivery_head"]

_DELIVERY: Final = Struct(">IQIIH")  # subscription, missed, partition, partition uid, topic size
#: What a frame holds besides the batches, at most: a topic's name has 255 bytes.
DELIVERY_BYTES: Final = _DELIVERY.size + 255


class Delivery(NamedTuple):
    """What the broker hands to a door: whole batches of one partition, none when it only says what was missed."""

    subscription: int
    #: Messages that this subscription did not get since the last delivery, because its client was too slow.
    missed: int
    topic: str
    partition: int
    uid: int
    buffers: Sequence[bytes]


class Delivered(NamedTuple):
    """What the client makes of it; the batches are a view of the frame."""

    subscription: int
    missed: int
    topic: str
    partition: int
    uid: int
    batches: memoryview


def encode_delivery_head(delivery: Delivery, size: int) -> bytes:
    """Everything that stands before `size` bytes of batches."""
    subscription, missed, name, partition, uid, _ = delivery
    topic = name.encode()
    packed = _DELIVERY.pack(subscription, missed, partition, uid, len(topic))
    return frame_head(FrameType.DELIVERY, len(packed) + len(topic) + size) + packed + topic


def decode_delivery(payload: memoryview) -> Delivered:
    try:
        subscription, missed, partition, uid, size = _DELIVERY.unpack_from(payload)
        topic = str(payload[_DELIVERY.size : _DELIVERY.size + size], "utf-8")
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("a DELIVERY frame is too short or has a damaged topic") from None
    if len(payload) < _DELIVERY.size + size:
        raise ProtocolViolation("a DELIVERY frame ends inside its topic")
    return Delivered(subscription, missed, topic, partition, uid, payload[_DELIVERY.size + size :])
