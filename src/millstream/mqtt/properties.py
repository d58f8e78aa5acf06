"""The properties of version 5: which there are, which packet may carry which, and their bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec

from millstream.mqtt.fields import NUMBER_MAX, Fields, malformed, not_allowed
from millstream.mqtt.packets import NO_PROPERTIES, Properties
from millstream.mqtt.reasons import MqttViolation, Reason

__all__ = [
    "IN_ANSWER",
    "IN_AUTH",
    "IN_CONNACK",
    "IN_CONNECT",
    "IN_DISCONNECT_OF_CLIENT",
    "IN_DISCONNECT_OF_SERVER",
    "IN_PUBLISH",
    "IN_SUBSCRIBE",
    "IN_UNSUBSCRIBE",
    "IN_WILL",
    "Allowed",
    "add_topic_alias",
    "decode_properties",
    "decode_publish_properties",
    "encode_binary",
    "encode_number",
    "encode_properties",
    "encode_text",
]

TEXT_BYTES_MAX: Final = 65_535
_U16: Final = Struct(">H")
_U32: Final = Struct(">I")


def encode_number(value: int) -> bytes:
    """A variable byte integer."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))


def encode_text(text: str) -> bytes | None:
    """With its length in front; None for what no MQTT client would accept: too long, U+0000, half a surrogate pair."""
    if "\0" in text:
        return None
    try:
        return encode_binary(text.encode())
    except UnicodeEncodeError:
        return None


def encode_binary(data: bytes) -> bytes | None:
    """With its length in front; None if it is too long to have one."""
    return _U16.pack(len(data)) + data if len(data) <= TEXT_BYTES_MAX else None


def _encode_pair(pair: tuple[str, str]) -> bytes | None:
    name, value = encode_text(pair[0]), encode_text(pair[1])
    return None if name is None or value is None else name + value


def _encode_byte(value: int) -> bytes:
    return bytes((value,))


class _Shape(NamedTuple):
    """How a value is read, and how it is written; written as None if it cannot be."""

    read: Callable[[Fields], Any]
    write: Callable[[Any], bytes | None]


_FLAG: Final = _Shape(Fields.flag, _encode_byte)
_SHORT: Final = _Shape(Fields.u16, _U16.pack)
_LONG: Final = _Shape(Fields.u32, _U32.pack)
_NUMBER: Final = _Shape(Fields.number, encode_number)
_TEXT: Final = _Shape(Fields.text, encode_text)
_BINARY: Final = _Shape(Fields.binary, encode_binary)
_PAIR: Final = _Shape(Fields.pair, _encode_pair)

#: Identifier and shape by name.
_PROPERTIES: Final = {
    "payload_format": (0x01, _FLAG),
    "message_expiry_s": (0x02, _LONG),
    "content_type": (0x03, _TEXT),
    "response_topic": (0x08, _TEXT),
    "correlation_data": (0x09, _BINARY),
    "subscription_ids": (0x0B, _NUMBER),
    "session_expiry_s": (0x11, _LONG),
    "assigned_client_id": (0x12, _TEXT),
    "server_keep_alive_s": (0x13, _SHORT),
    "authentication_method": (0x15, _TEXT),
    "authentication_data": (0x16, _BINARY),
    "request_problem_information": (0x17, _FLAG),
    "will_delay_s": (0x18, _LONG),
    "request_response_information": (0x19, _FLAG),
    "response_information": (0x1A, _TEXT),
    "server_reference": (0x1C, _TEXT),
    "reason_string": (0x1F, _TEXT),
    "receive_maximum": (0x21, _SHORT),
    "topic_alias_maximum": (0x22, _SHORT),
    "topic_alias": (0x23, _SHORT),
    "maximum_qos": (0x24, _FLAG),
    "retain_available": (0x25, _FLAG),
    "user": (0x26, _PAIR),
    "maximum_packet_bytes": (0x27, _LONG),
    "wildcards_available": (0x28, _FLAG),
    "subscription_ids_available": (0x29, _FLAG),
    "shared_available": (0x2A, _FLAG),
}
_TOPIC_ALIAS: Final = bytes((_PROPERTIES["topic_alias"][0],))
#: May stand more than once.
_REPEATED: Final = frozenset({"subscription_ids", "user"})
#: Of each: there is room for two hundred thousand in a packet, and the first is read before anybody knows whose it is.
REPEATED_MAX: Final = 1_000
_NOT_ZERO: Final = frozenset({"subscription_ids", "receive_maximum", "maximum_packet_bytes", "topic_alias"})

#: What one kind of packet may carry: name and reading by identifier.
Allowed = Mapping[int, tuple[str, Callable[[Fields], Any]]]


def _allowed(*names: str) -> Allowed:
    """User properties are welcome everywhere."""
    return {_PROPERTIES[name][0]: (name, _PROPERTIES[name][1].read) for name in (*names, "user")}


_MESSAGE: Final = ("payload_format", "message_expiry_s", "content_type", "response_topic", "correlation_data")
_BOTH_GREETINGS: Final = (
    "session_expiry_s",
    "authentication_method",
    "authentication_data",
    "receive_maximum",
    "topic_alias_maximum",
    "maximum_packet_bytes",
)
IN_PUBLISH: Final = _allowed(*_MESSAGE, "subscription_ids", "topic_alias")
IN_WILL: Final = _allowed(*_MESSAGE, "will_delay_s")
IN_CONNECT: Final = _allowed(*_BOTH_GREETINGS, "request_problem_information", "request_response_information")
IN_CONNACK: Final = _allowed(
    *_BOTH_GREETINGS,
    "assigned_client_id",
    "server_keep_alive_s",
    "response_information",
    "server_reference",
    "reason_string",
    "maximum_qos",
    "retain_available",
    "wildcards_available",
    "subscription_ids_available",
    "shared_available",
)
IN_SUBSCRIBE: Final = _allowed("subscription_ids")
IN_UNSUBSCRIBE: Final = _allowed()
#: PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK and UNSUBACK.
IN_ANSWER: Final = _allowed("reason_string")
IN_DISCONNECT_OF_CLIENT: Final = _allowed("session_expiry_s", "reason_string")
IN_DISCONNECT_OF_SERVER: Final = _allowed("server_reference", "reason_string")
IN_AUTH: Final = _allowed("authentication_method", "authentication_data", "reason_string")


def decode_properties(fields: Fields, allowed: Allowed) -> Properties:
    """The properties at the cursor, their length first."""
    size = fields.number()
    if not size:
        return NO_PROPERTIES
    return _decode(Fields(fields.data, fields.take(size), fields.at, fields.packet), allowed)


@functools.lru_cache(1024)
def decode_publish_properties(data: bytes) -> Properties:
    """The properties of a PUBLISH, without their length.  Cached: a client mostly sends the same with every message.

    For less than 128 bytes, so that what is remembered stays small.
    """
    return _decode(Fields(data, 0, len(data), "a PUBLISH"), IN_PUBLISH)


def _decode(part: Fields, allowed: Allowed) -> Properties:
    found: dict[str, Any] = {}
    while part.at < part.end:
        identifier = part.byte()
        reading = allowed.get(identifier)
        if reading is None:
            raise malformed(f"{part.packet} has no property {identifier:#04x}")
        name, read = reading
        value = read(part)
        if not value and name in _NOT_ZERO:
            reason = Reason.TOPIC_ALIAS_INVALID if name == "topic_alias" else Reason.PROTOCOL_ERROR
            raise MqttViolation(reason, f"{part.packet} has the property {name} with the value 0")
        if name in _REPEATED:
            several = found.setdefault(name, [])
            several.append(value)
            if len(several) > REPEATED_MAX:
                text = f"{part.packet} has more than {REPEATED_MAX} properties of one kind ({name}); send fewer"
                raise MqttViolation(Reason.QUOTA_EXCEEDED, text)
        elif name in found:
            raise not_allowed(f"{part.packet} has the property {name} twice")
        else:
            found[name] = value
    for name in _REPEATED & found.keys():
        found[name] = tuple(found[name])
    properties = Properties(**found)
    _check(properties, part.packet)
    return properties


def _check(properties: Properties, packet: str) -> None:
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise not_allowed(f"{packet} has authentication data without a method")
    topic = properties.response_topic
    if topic is not None and (not topic or "+" in topic or "#" in topic):
        raise not_allowed(f"{packet} has a response topic that is empty or has a wildcard")


_WRITING: Final = tuple(
    (bytes((_PROPERTIES[name][0],)), _PROPERTIES[name][1].write, name in _REPEATED)
    for name in Properties.__struct_fields__
)


def encode_properties(properties: Properties) -> bytes:
    """With their length in front.

    A text that MQTT cannot carry (messages of other doors may have some as headers) is left out: a message without one
    of its headers is better than none.
    """
    if properties is NO_PROPERTIES:
        return b"\0"
    parts: list[bytes] = []
    for value, writing in zip(msgspec.structs.astuple(properties), _WRITING, strict=True):
        if value is None:
            continue
        identifier, write, is_repeated = writing
        for single in value if is_repeated else (value,):
            written = write(single)
            if written is not None:
                parts += (identifier, written)
    data = b"".join(parts)
    # What is longer has no length; it makes a packet that cannot be sent anyway.
    return encode_number(min(len(data), NUMBER_MAX)) + data


def add_topic_alias(encoded: bytes, alias: int) -> bytes:
    """Properties that are encoded already, with an alias behind them: many get the same, each with its own number."""
    at = next(at for at, byte in enumerate(encoded, 1) if byte < 0x80)  # behind their length
    size = len(encoded) - at + len(_TOPIC_ALIAS) + _U16.size
    return b"".join((encode_number(min(size, NUMBER_MAX)), encoded[at:], _TOPIC_ALIAS, _U16.pack(alias)))
