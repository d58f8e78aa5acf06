"""From the bytes of one whole packet to its value, for every kind but PUBLISH and the first bytes of CONNECT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from millstream.mqtt.fields import Fields, malformed, not_allowed
from millstream.mqtt.packets import (
    NO_PROPERTIES,
    V5,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Filter,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from millstream.mqtt.properties import (
    IN_ANSWER,
    IN_AUTH,
    IN_CONNACK,
    IN_CONNECT,
    IN_DISCONNECT_OF_CLIENT,
    IN_DISCONNECT_OF_SERVER,
    IN_SUBSCRIBE,
    IN_UNSUBSCRIBE,
    IN_WILL,
    Allowed,
    decode_properties,
)
from millstream.mqtt.reasons import CONNACK_OF_V4, MqttViolation, Reason

__all__ = ["DECODERS", "NAMES", "Peer", "decode_connect"]

#: Who sends what is read.
Peer = Literal["client", "server"]

#: By the upper four bits of the first byte, as sentences begin.
NAMES: Final = (
    "a reserved packet", "a CONNECT", "a CONNACK", "a PUBLISH", "a PUBACK", "a PUBREC", "a PUBREL", "a PUBCOMP",
    "a SUBSCRIBE", "a SUBACK", "an UNSUBSCRIBE", "an UNSUBACK", "a PINGREQ", "a PINGRESP", "a DISCONNECT", "an AUTH",
)  # fmt: skip

# Which reason codes a packet may have.
_OF_CONNACK: Final = frozenset({0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F})
_OF_PUBACK: Final = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
_OF_PUBREL: Final = frozenset({0x00, 0x92})
_OF_SUBACK: Final = frozenset({0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2})
_OF_SUBACK_V4: Final = frozenset({0x00, 0x01, 0x02, 0x80})
_OF_UNSUBACK: Final = frozenset({0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91})
_OF_DISCONNECT_OF_CLIENT: Final = frozenset({0x00, 0x04, *range(0x80, 0x84), 0x90, *range(0x93, 0x9A)})
_OF_DISCONNECT_OF_SERVER: Final = frozenset(
    {0x00, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3)}
)
_OF_AUTH_OF_CLIENT: Final = frozenset({0x18, 0x19})
_OF_AUTH_OF_SERVER: Final = frozenset({0x00, 0x18})
_REASON_OF_V4: Final = {code: reason for reason, code in CONNACK_OF_V4.items()}

Decoder = Callable[[Fields, int], Packet]


def _reason(fields: Fields, allowed: frozenset[int]) -> int:
    value = fields.byte()
    if value not in allowed:
        raise not_allowed(f"{fields.packet} has the reason code {value:#04x}, which it may not have")
    return value


# CONNECT


def decode_connect(fields: Fields, version: int) -> Connect:
    """What follows the protocol level."""
    flags = fields.byte()
    will_qos = flags >> 3 & 3
    if flags & 1:
        raise malformed("a CONNECT has its reserved flag set")
    if flags & 4:
        if will_qos == 3:
            raise malformed("a CONNECT has a will with QoS 3")
    elif flags & 0x38:
        raise malformed("a CONNECT has a QoS or retain flag for a will, but no will")
    if version != V5 and flags & 0xC0 == 0x40:
        raise malformed("a CONNECT of MQTT 3.1.1 has a password without a user name")
    keep_alive_s = fields.u16()
    properties = decode_properties(fields, IN_CONNECT) if version == V5 else NO_PROPERTIES
    client_id = fields.text()
    will = None
    if flags & 4:
        about = decode_properties(fields, IN_WILL) if version == V5 else NO_PROPERTIES
        topic = fields.text()
        if not topic or "+" in topic or "#" in topic:
            raise MqttViolation(Reason.TOPIC_NAME_INVALID, "a CONNECT has a will topic that is empty or has a wildcard")
        will = Will(topic, fields.binary(), will_qos, flags & 0x20 != 0, about)
    username = fields.text() if flags & 0x80 else None
    password = fields.binary() if flags & 0x40 else None
    fields.finish()
    clean_start = flags & 2 != 0
    if version != V5 and not client_id and not clean_start:
        text = "a CONNECT of MQTT 3.1.1 without a client identifier must ask for a clean session"
        raise MqttViolation(Reason.CLIENT_IDENTIFIER_NOT_VALID, text)
    return Connect(version, client_id, clean_start, keep_alive_s, username, password, will, properties)


def _connack(fields: Fields, version: int) -> Packet:
    flags = fields.byte()
    if flags > 1:
        raise malformed("a CONNACK has reserved flags set")
    if version == V5:
        reason = _reason(fields, _OF_CONNACK)
        properties = decode_properties(fields, IN_CONNACK)
    else:
        code = fields.byte()
        if code not in _REASON_OF_V4:
            raise not_allowed(f"a CONNACK has the return code {code}, which is reserved")
        reason, properties = _REASON_OF_V4[code], NO_PROPERTIES
    fields.finish()
    if flags and reason:
        raise not_allowed("a CONNACK refuses the connection and says that there is a session")
    return Connack(reason, flags == 1, properties)


# The four answers of QoS 1 and 2


def _answer(make: Callable[[int, int, Properties], Packet], allowed: frozenset[int]) -> Decoder:
    def decode(fields: Fields, version: int) -> Packet:
        packet_id = fields.packet_id()
        reason, properties = 0, NO_PROPERTIES
        if version == V5 and fields.at < fields.end:
            reason = _reason(fields, allowed)
            if fields.at < fields.end:
                properties = decode_properties(fields, IN_ANSWER)
        fields.finish()
        return make(packet_id, reason, properties)

    return decode


# Subscriptions


def _subscribe(fields: Fields, version: int) -> Packet:
    packet_id = fields.packet_id()
    properties = decode_properties(fields, IN_SUBSCRIBE) if version == V5 else NO_PROPERTIES
    if len(properties.subscription_ids) > 1:
        raise not_allowed("a SUBSCRIBE has more than one subscription identifier")
    filters = []
    while fields.at < fields.end:
        name = _filter(fields)
        options = fields.byte()
        filters.append(_filter_of_v5(name, options) if version == V5 else _filter_of_v4(name, options))
    if not filters:
        raise not_allowed("a SUBSCRIBE has no topic filter")
    return Subscribe(packet_id, tuple(filters), properties)


def _filter(fields: Fields) -> str:
    name = fields.text()
    if not name:
        raise not_allowed(f"{fields.packet} has an empty topic filter")
    return name


def _filter_of_v4(name: str, qos: int) -> Filter:
    if qos > 2:
        raise malformed("a SUBSCRIBE has a QoS above 2, or reserved bits set beside it")
    return Filter(name, qos)


def _filter_of_v5(name: str, options: int) -> Filter:
    if options & 0xC0:
        raise malformed("a SUBSCRIBE has reserved bits set in its options")
    qos, retain_handling, no_local = options & 3, options >> 4, options & 4 != 0
    if qos == 3:
        raise not_allowed("a SUBSCRIBE asks for QoS 3")
    if retain_handling == 3:
        raise not_allowed("a SUBSCRIBE asks for retain handling 3")
    if no_local and name.startswith("$share/"):
        raise not_allowed("a SUBSCRIBE asks for no local messages in a shared subscription")
    return Filter(name, qos, no_local, options & 8 != 0, retain_handling)


def _suback(fields: Fields, version: int) -> Packet:
    packet_id = fields.packet_id()
    properties = decode_properties(fields, IN_ANSWER) if version == V5 else NO_PROPERTIES
    return Suback(packet_id, _reasons(fields, _OF_SUBACK if version == V5 else _OF_SUBACK_V4), properties)


def _reasons(fields: Fields, allowed: frozenset[int]) -> tuple[int, ...]:
    if fields.at == fields.end:
        raise not_allowed(f"{fields.packet} has no reason code")
    reasons = []
    while fields.at < fields.end:
        reasons.append(_reason(fields, allowed))
    return tuple(reasons)


def _unsubscribe(fields: Fields, version: int) -> Packet:
    packet_id = fields.packet_id()
    properties = decode_properties(fields, IN_UNSUBSCRIBE) if version == V5 else NO_PROPERTIES
    filters = []
    while fields.at < fields.end:
        filters.append(_filter(fields))
    if not filters:
        raise not_allowed("an UNSUBSCRIBE has no topic filter")
    return Unsubscribe(packet_id, tuple(filters), properties)


def _unsuback(fields: Fields, version: int) -> Packet:
    packet_id = fields.packet_id()
    if version != V5:
        fields.finish()
        return Unsuback(packet_id)
    properties = decode_properties(fields, IN_ANSWER)
    return Unsuback(packet_id, _reasons(fields, _OF_UNSUBACK), properties)


# The rest


def _bare(packet: Packet) -> Decoder:
    def decode(fields: Fields, _version: int) -> Packet:
        fields.finish()
        return packet

    return decode


def _disconnect_of_client(fields: Fields, version: int) -> Packet:
    if version != V5:
        fields.finish()
    return _disconnect(fields, _OF_DISCONNECT_OF_CLIENT, IN_DISCONNECT_OF_CLIENT)


def _disconnect_of_server(fields: Fields, version: int) -> Packet:
    if version != V5:
        raise not_allowed("a server of MQTT 3.1.1 sends no DISCONNECT")
    return _disconnect(fields, _OF_DISCONNECT_OF_SERVER, IN_DISCONNECT_OF_SERVER)


def _disconnect(fields: Fields, reasons: frozenset[int], allowed: Allowed) -> Packet:
    reason, properties = 0, NO_PROPERTIES
    if fields.at < fields.end:
        reason = _reason(fields, reasons)
        if fields.at < fields.end:
            properties = decode_properties(fields, allowed)
    fields.finish()
    return Disconnect(reason, properties)


def _auth(reasons: frozenset[int]) -> Decoder:
    def decode(fields: Fields, version: int) -> Packet:
        if version != V5:
            raise malformed("MQTT 3.1.1 has no AUTH")
        reason, properties = 0, NO_PROPERTIES
        if fields.at < fields.end:
            reason = fields.byte()
            if fields.at < fields.end:
                properties = decode_properties(fields, IN_AUTH)
        fields.finish()
        if reason not in reasons:
            raise not_allowed(f"an AUTH has the reason code {reason:#04x}, which its sender may not give")
        if reason and properties.authentication_method is None:
            raise not_allowed("an AUTH does not say by which method")
        return Auth(reason, properties)

    return decode


_OF_BOTH: Final[Mapping[int, Decoder]] = {
    0x40: _answer(Puback, _OF_PUBACK),
    0x50: _answer(Pubrec, _OF_PUBACK),
    0x62: _answer(Pubrel, _OF_PUBREL),
    0x70: _answer(Pubcomp, _OF_PUBREL),
}
#: By the first byte, the flags within it.
DECODERS: Final[Mapping[Peer, Mapping[int, Decoder]]] = {
    "client": {
        **_OF_BOTH,
        0x82: _subscribe,
        0xA2: _unsubscribe,
        0xC0: _bare(Pingreq()),
        0xE0: _disconnect_of_client,
        0xF0: _auth(_OF_AUTH_OF_CLIENT),
    },
    "server": {
        **_OF_BOTH,
        0x20: _connack,
        0x90: _suback,
        0xB0: _unsuback,
        0xD0: _bare(Pingresp()),
        0xE0: _disconnect_of_server,
        0xF0: _auth(_OF_AUTH_OF_SERVER),
    },
}
