"""A message as MQTT sees it, and how the same message is stored: topic, value and headers."""

from __future__ import annotations

import msgspec

from millstream.mqtt.packets import NO_PROPERTIES, Properties

__all__ = ["Message", "expires_us", "size_of", "with_payload"]


class Message(msgspec.Struct):
    """One application message on its way to subscribers, whichever door it came through."""

    #: The MQTT topic name: `sensors/7/temperature`.
    topic: str
    payload: bytes
    #: As published; 2 if it came through another door, so that every subscription gets the QoS it asked for.
    qos: int = 2
    retain: bool = False
    #: payload_format, content_type, response_topic, correlation_data, user; nothing that belongs to one packet only.
    properties: Properties = NO_PROPERTIES
    #: Who published it through MQTT; empty otherwise.
    client_id: str = ""
    #: When it must no longer be delivered; 0 = never.
    expiry_us: int = 0


def size_of(message: Message) -> int:
    """About how many bytes of memory it holds: a message may have no payload and a megabyte of properties."""
    size = len(message.topic) + len(message.payload)
    told = message.properties
    if told is not NO_PROPERTIES:
        size += len(told.content_type or "") + len(told.response_topic or "") + len(told.correlation_data or b"")
        size += sum(len(name) + len(value) for name, value in told.user)
    return size


def expires_us(expiry_s: int | None, now_us: int) -> int:
    """When a message is to be gone; 0 is never.  One whose life is 0 has a moment, to be stored and passed on."""
    return 0 if expiry_s is None else now_us + max(expiry_s, 1) * 1_000_000


def with_payload(message: Message, payload: bytes) -> Message:
    """The same message with another payload."""
    return Message(
        message.topic,
        payload,
        message.qos,
        message.retain,
        message.properties,
        message.client_id,
        message.expiry_us,
    )
