"""MQTT packets as bytes, in both versions."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import msgspec

from millstream.errors import InvalidArgument
from millstream.mqtt.fields import NUMBER_MAX
from millstream.mqtt.packets import (
    NO_PROPERTIES,
    V5,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from millstream.mqtt.properties import encode_binary, encode_number, encode_properties, encode_text
from millstream.mqtt.reasons import CONNACK_OF_V4, Reason

__all__ = ["encode", "encode_properties", "encode_publish"]

_Encoder = Callable[[Any, int], bytes]

#: First byte, length and a number: all of a short answer, and the beginning of a PUBLISH.
_SHORT: Final = Struct(">BBH")
_MIDDLE: Final = Struct(">BBBH")
_U16: Final = Struct(">H")
_NONE: Final = b"\0"  # properties
_CODES_OF_V4: Final = {int(reason): code for reason, code in CONNACK_OF_V4.items()}
_UNAVAILABLE: Final = CONNACK_OF_V4[Reason.SERVER_UNAVAILABLE]


def encode(packet: Packet, version: int, bytes_max: int | None = None) -> bytes:
    """The bytes of a packet; none if it does not exist in this version or would be longer than `bytes_max`.

    Rather than not to be sent, an answer goes without its user properties, and then without its reason string too.
    """
    encoder = _ENCODERS[type(packet)]
    data = encoder(packet, version)
    limit = NUMBER_MAX if bytes_max is None else bytes_max
    if len(data) <= limit:
        return data
    if version == V5 and isinstance(packet, _SHORTENED):
        for less in ({"user": ()}, {"user": (), "reason_string": None}):
            properties = msgspec.structs.replace(packet.properties, **less)
            data = encoder(msgspec.structs.replace(packet, properties=properties), version)
            if len(data) <= limit:
                return data
    return b""


def encode_publish(
    topic: bytes,
    payload: bytes | memoryview,
    *,
    version: int,
    qos: int = 0,
    retain: bool = False,
    dup: bool = False,
    packet_id: int = 0,
    properties: bytes = _NONE,
) -> bytes:
    """A PUBLISH of parts that are encoded already; `properties` with their length in front, ignored by 3.1.1."""
    if version != V5:
        properties = b""
    topic_size = len(topic)
    length = 2 + topic_size + len(properties) + len(payload)
    first = 0x30
    if qos:
        first = 0x38 | qos << 1 if dup else 0x30 | qos << 1
        length += 2
        properties = _U16.pack(packet_id) + properties
    if retain:
        first |= 1
    if length < 0x80:
        head = _SHORT.pack(first, length, topic_size)
    elif length < 0x4000:
        head = _MIDDLE.pack(first, length & 0x7F | 0x80, length >> 7, topic_size)
    elif length <= NUMBER_MAX:
        head = bytes((first,)) + encode_number(length) + _U16.pack(topic_size)
    else:
        return b""
    return b"".join((head, topic, properties, payload))


def _framed(first: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    # What is longer than the longest has no length; `encode` does not let it out.
    return bytes((first,)) + encode_number(min(len(body), NUMBER_MAX)) + body


def _text(text: str) -> bytes:
    data = encode_text(text)
    if data is None:
        raise InvalidArgument(f"MQTT cannot carry the text {text[:40]!r}: it is too long or has U+0000 in it")
    return data


def _binary(value: bytes) -> bytes:
    data = encode_binary(value)
    if data is None:
        raise InvalidArgument(f"MQTT cannot carry {len(value)} bytes as a password or a will")
    return data


def _connect(packet: Connect, version: int) -> bytes:
    will = packet.will
    is_v5 = version == V5
    flags = packet.clean_start << 1 | (packet.password is not None) << 6 | (packet.username is not None) << 7
    parts = [_U16.pack(packet.keep_alive_s)]
    if is_v5:
        parts.append(encode_properties(packet.properties))
    parts.append(_text(packet.client_id))
    if will is not None:
        flags |= 4 | will.qos << 3 | will.retain << 5
        if is_v5:
            parts.append(encode_properties(will.properties))
        parts += (_text(will.topic), _binary(will.payload))
    if packet.username is not None:
        parts.append(_text(packet.username))
    if packet.password is not None:
        parts.append(_binary(packet.password))
    return _framed(0x10, b"\0\4MQTT", bytes((version, flags)), *parts)


def _connack(packet: Connack, version: int) -> bytes:
    reason = packet.reason
    session_present = packet.session_present and not reason
    if version == V5:
        return _framed(0x20, bytes((session_present, reason)), encode_properties(packet.properties))
    return bytes((0x20, 2, session_present, _CODES_OF_V4.get(reason, _UNAVAILABLE)))


def _publish(packet: Publish, version: int) -> bytes:
    topic = packet.topic.encode()
    return encode_publish(
        topic,
        packet.payload,
        version=version,
        qos=packet.qos,
        retain=packet.retain,
        dup=packet.dup,
        packet_id=packet.packet_id,
        properties=_NONE if packet.properties is NO_PROPERTIES else encode_properties(packet.properties),
    )


def _answer(first: int) -> _Encoder:
    def encode_answer(packet: Puback | Pubrec | Pubrel | Pubcomp, version: int) -> bytes:
        # 3.1.1 knows success only; whether that may be said is for the caller to decide.
        if version != V5 or (not packet.reason and packet.properties == NO_PROPERTIES):
            return _SHORT.pack(first, 2, packet.packet_id)
        body = _U16.pack(packet.packet_id) + bytes((packet.reason,))
        return _framed(first, body, b"" if packet.properties == NO_PROPERTIES else encode_properties(packet.properties))

    return encode_answer


def _subscribe(packet: Subscribe, version: int) -> bytes:
    parts = [_U16.pack(packet.packet_id)]
    if version == V5:
        parts.append(encode_properties(packet.properties))
    for line in packet.filters:
        options = line.qos
        if version == V5:
            options |= line.no_local << 2 | line.retain_as_published << 3 | line.retain_handling << 4
        parts += (_text(line.filter), bytes((options,)))
    return _framed(0x82, *parts)


def _suback(packet: Suback, version: int) -> bytes:
    packet_id = _U16.pack(packet.packet_id)
    if version == V5:
        return _framed(0x90, packet_id, encode_properties(packet.properties), bytes(packet.reasons))
    return _framed(0x90, packet_id, bytes(min(reason, 0x80) for reason in packet.reasons))


def _unsubscribe(packet: Unsubscribe, version: int) -> bytes:
    properties = encode_properties(packet.properties) if version == V5 else b""
    return _framed(0xA2, _U16.pack(packet.packet_id), properties, *map(_text, packet.filters))


def _unsuback(packet: Unsuback, version: int) -> bytes:
    if version != V5:
        return _SHORT.pack(0xB0, 2, packet.packet_id)
    return _framed(0xB0, _U16.pack(packet.packet_id), encode_properties(packet.properties), bytes(packet.reasons))


def _ping(first: int) -> _Encoder:
    data = bytes((first, 0))
    return lambda _packet, _version: data


def _farewell(first: int) -> _Encoder:
    def encode_farewell(packet: Disconnect | Auth, version: int) -> bytes:
        if version != V5:
            return b""  # a server of 3.1.1 closes the connection without a word
        if packet.properties == NO_PROPERTIES:
            return bytes((first, 1, packet.reason)) if packet.reason else bytes((first, 0))
        return _framed(first, bytes((packet.reason,)), encode_properties(packet.properties))

    return encode_farewell


_ENCODERS: Final[dict[type, _Encoder]] = {
    Connect: _connect,
    Connack: _connack,
    Publish: _publish,
    Puback: _answer(0x40),
    Pubrec: _answer(0x50),
    Pubrel: _answer(0x62),
    Pubcomp: _answer(0x70),
    Subscribe: _subscribe,
    Suback: _suback,
    Unsubscribe: _unsubscribe,
    Unsuback: _unsuback,
    Pingreq: _ping(0xC0),
    Pingresp: _ping(0xD0),
    Disconnect: _farewell(0xE0),
    Auth: _farewell(0xF0),
}
#: Their properties are our own words and not a message.
_SHORTENED: Final = (Connack, Puback, Pubrec, Pubrel, Pubcomp, Suback, Unsuback, Disconnect, Auth)
