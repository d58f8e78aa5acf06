"""A message on its way to many: whatever several subscribers get as the same bytes is written once."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from millstream.mqtt.messages import Message
from millstream.mqtt.packets import NO_PROPERTIES, V5, Properties
from millstream.mqtt.properties import add_topic_alias
from millstream.mqtt.writer import encode_properties, encode_publish

__all__ = ["Grant", "Parcel"]

#: More cannot be said.
_EXPIRY_S_MAX: Final = 0xFFFF_FFFF
_NO_PROPERTIES: bytes = encode_properties(NO_PROPERTIES)


class Grant(NamedTuple):
    """What the subscriptions of one client that match a topic come to, taken together."""

    qos: int
    #: Some of them leave out what the client has published itself.
    no_local: bool
    retain_as_published: bool
    identifiers: tuple[int, ...]
    #: What the others come to, if there are any: that is what counts for such a message.
    of_own: Grant | None = None


class Parcel:
    """One message at one moment; expired messages make no parcel."""

    __slots__ = ("_at_most_once", "_now_us", "_properties", "_topic", "message")

    def __init__(self, message: Message, now_us: int) -> None:
        self.message = message
        self._now_us = now_us
        self._topic = message.topic.encode()
        self._properties: dict[tuple[int, ...], bytes] = {}
        self._at_most_once: dict[tuple[int, bool, tuple[int, ...]], bytes] = {}

    @property
    def is_expired(self) -> bool:
        return 0 < self.message.expiry_us <= self._now_us

    def properties(self, identifiers: tuple[int, ...] = (), alias: int | None = None) -> bytes:
        """As version 5 sends them: what is left of the message's life, and the subscriptions it is for."""
        encoded = self._properties.get(identifiers)
        if encoded is None:
            told = self._told(identifiers)
            encoded = _NO_PROPERTIES if told is NO_PROPERTIES else encode_properties(told)
            self._properties[identifiers] = encoded
        return encoded if alias is None else add_topic_alias(encoded, alias)

    def _told(self, identifiers: tuple[int, ...]) -> Properties:
        message = self.message
        told = message.properties
        if identifiers or message.expiry_us:
            left_s = None
            if message.expiry_us:
                left_s = min(-(-(message.expiry_us - self._now_us) // 1_000_000), _EXPIRY_S_MAX)
            told = msgspec.structs.replace(told, subscription_ids=identifiers, message_expiry_s=left_s)
        return told

    def packet(
        self,
        version: int,
        *,
        qos: int,
        retain: bool,
        identifiers: tuple[int, ...] = (),
        packet_id: int = 0,
        dup: bool = False,
        topic: bytes | None = None,
        alias: int | None = None,
    ) -> bytes:
        """The PUBLISH for one subscriber; `topic` and `alias` if it has agreed on short names."""
        if qos == 0 and alias is None:
            place = (version, retain, identifiers)
            packet = self._at_most_once.get(place)
            if packet is None:
                packet = self._at_most_once[place] = self._encode(version, 0, retain, identifiers, 0, False, None, None)
            return packet
        return self._encode(version, qos, retain, identifiers, packet_id, dup, topic, alias)

    def _encode(
        self,
        version: int,
        qos: int,
        retain: bool,
        identifiers: tuple[int, ...],
        packet_id: int,
        dup: bool,
        topic: bytes | None,
        alias: int | None,
    ) -> bytes:
        return encode_publish(
            self._topic if topic is None else topic,
            self.message.payload,
            qos=qos,
            retain=retain,
            dup=dup,
            packet_id=packet_id,
            version=version,
            properties=self.properties(identifiers, alias) if version == V5 else b"",
        )
