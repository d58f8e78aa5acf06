"""Bytes in, MQTT packets out: any version, in whatever pieces the bytes arrive.  No sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from millstream.mqtt.decoders import DECODERS, NAMES, Peer, decode_connect
from millstream.mqtt.fields import Fields, malformed, not_allowed
from millstream.mqtt.packets import NO_PROPERTIES, V4, V5, Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from millstream.mqtt.properties import IN_PUBLISH, decode_properties, decode_publish_properties
from millstream.mqtt.reasons import MqttViolation, Reason

__all__ = ["PacketReader"]

_CONNECT: Final = 0x10
_PUBLISH: Final = 3
#: With nothing but a packet identifier in them, which is how they come.
_ANSWERS: Final[dict[int, Callable[[int], Packet]]] = {0x40: Puback, 0x50: Pubrec, 0x62: Pubrel, 0x70: Pubcomp}


class PacketReader:
    """Turns what a peer sends into packets, and what is none into a MqttViolation.

    It owns memory only while part of a packet has arrived.  There is no point behind a violation where reading could
    go on: it is raised again from then on, and whatever comes is dropped.
    """

    __slots__ = ("_at", "_data", "_needed", "_partial", "_violation", "bytes_max", "peer", "version")

    def __init__(self, *, bytes_max: int, peer: Peer = "client", version: int = 0) -> None:
        #: The longest packet, its first byte and its length included.
        self.bytes_max = bytes_max
        #: Who sends what is read here.
        self.peer: Peer = peer
        #: 0 until CONNECT has named it.  A CONNECT of a version that we do not speak leaves the one to refuse it in.
        self.version = version
        self._data = b""
        self._at = 0  # of what is not handed out yet
        self._partial: bytearray | None = None  # the beginning of a packet, while `data` is empty
        self._needed = 0  # how long `partial` must be before looking at it again
        self._violation: tuple[Reason, str] | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """More bytes; those of `bytes` objects are not copied."""
        partial = self._partial
        if partial is not None:
            partial += data
            if len(partial) < self._needed:
                return
            self._data, self._partial = bytes(partial), None
        elif self._violation is not None:
            return
        elif self._data:
            self._data = self._data[self._at :] + data
        else:
            self._data = data if type(data) is bytes else bytes(data)
        self._at = 0

    @property
    def has_more(self) -> bool:
        """Whether there is something that was not handed out when somebody stopped early."""
        return self._at < len(self._data)

    def packets(self) -> Iterator[Packet]:
        """Every whole packet so far.  Who stops early gets the others from the next call; feed only between calls."""
        if self._violation is not None:
            raise MqttViolation(*self._violation)
        data, at, needed = self._data, self._at, 0
        size = len(data)
        try:
            while size - at >= 2:
                first, length, start = data[at], data[at + 1], at + 2
                if length > 0x7F:
                    length, start = self._long_length(data, first, start)
                    if not start:
                        break
                end = start + length
                if end - at > self.bytes_max:
                    self._check_first(first)
                    text = f"{NAMES[first >> 4]} of {end - at} bytes is longer than the {self.bytes_max} allowed"
                    raise MqttViolation(Reason.PACKET_TOO_LARGE, text)
                if end > size:
                    needed = end - at
                    break
                if first >> 4 == _PUBLISH and self.version:
                    packet: Packet = self._publish(data, first, start, end)
                elif length == 2 and self.version and first in _ANSWERS and data[start:end] != b"\0\0":
                    packet = _ANSWERS[first](data[start] << 8 | data[start + 1])
                else:
                    packet = self._decode(data, first, start, end)
                self._at = at = end
                yield packet
            if at < size:
                self._check_first(data[at])  # who speaks another protocol need not be waited for
                self._partial, self._needed = bytearray(data[at:]), needed or size - at + 1
        except MqttViolation as violation:
            self._violation = (violation.reason, violation.message)
            self._data, self._at = b"", 0
            raise
        self._data, self._at = b"", 0

    def _long_length(self, data: bytes, first: int, at: int) -> tuple[int, int]:
        """The length of which the first byte stands before `at`, and where it ends; 0 if it has not arrived yet."""
        length, shift = data[at - 1] & 0x7F, 7
        for byte in data[at : at + 3]:
            length |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if byte < 0x80:
                # 3.1.1 leaves it open, and there are small devices that always write the same number of bytes.
                if not byte and self.version == V5:
                    self._check_first(first)
                    raise malformed("a packet has its length in more bytes than it needs")
                return length, at
        if shift == 28:
            self._check_first(first)
            raise malformed("a packet has a length of more than four bytes")
        return 0, 0

    def _publish(self, data: bytes, first: int, start: int, end: int) -> Publish:
        # Written out, because there are as many of these as of all others together.
        at = start + 2
        if at > end:
            raise malformed("a PUBLISH ends before its topic")
        at += data[start] << 8 | data[start + 1]
        if at > end:
            raise malformed("a PUBLISH ends in the middle of its topic")
        try:
            topic = data[start + 2 : at].decode()
        except UnicodeDecodeError:
            raise malformed("a PUBLISH has a topic that is not UTF-8") from None
        if "\0" in topic:
            raise malformed("a PUBLISH has a topic with the character U+0000")
        qos = first >> 1 & 3
        packet_id = 0
        if qos:
            if qos == 3:
                raise malformed("a PUBLISH has QoS 3")
            if at + 2 > end:
                raise malformed("a PUBLISH ends before its packet identifier")
            packet_id = data[at] << 8 | data[at + 1]
            if not packet_id:
                raise not_allowed("a PUBLISH has the packet identifier 0")
            at += 2
        elif first & 8:
            raise malformed("a PUBLISH with QoS 0 says that it is a repetition")
        properties = NO_PROPERTIES
        if self.version == V5:
            if at < end and (size := data[at]) < 0x80 and at + size < end:
                at += 1
                if size:
                    properties = decode_publish_properties(data[at : at + size])
                    at += size
            else:
                fields = Fields(data, at, end, "a PUBLISH")
                properties = decode_properties(fields, IN_PUBLISH)
                at = fields.at
            if properties.subscription_ids and self.peer == "client":
                raise not_allowed("a PUBLISH of a client has a subscription identifier")
        if not topic and properties.topic_alias is None:
            raise not_allowed("a PUBLISH has no topic")
        return Publish(topic, data[at:end], qos, first & 1 == 1, first & 8 == 8, packet_id, properties)

    def _decode(self, data: bytes, first: int, start: int, end: int) -> Packet:
        self._check_first(first)
        fields = Fields(data, start, end, NAMES[first >> 4])
        if first == _CONNECT:
            return self._connect(fields)
        return DECODERS[self.peer][first](fields, self.version)

    def _connect(self, fields: Fields) -> Packet:
        is_padded = not fields.data[fields.at - 1]
        name, level = fields.text(), fields.byte()
        if name == "MQTT" or (name == "MQIsdp" and level == 3):
            # Bridges set the highest bit of the level and take it back when they are refused.
            self.version = V4 if level & 0x7F < V5 else V5
        if name != "MQTT" or level not in (V4, V5):
            text = f"the protocol is {name[:20]!r} of level {level}; MQTT 3.1.1 and 5 are spoken here"
            raise MqttViolation(Reason.UNSUPPORTED_PROTOCOL_VERSION, text)
        if is_padded and level == V5:
            raise malformed("a packet has its length in more bytes than it needs")
        return decode_connect(fields, level)

    def _check_first(self, first: int) -> None:
        """Refuse a packet by its first byte: its kind, the flags beside it, and whether its time has come."""
        if self.version and first in DECODERS[self.peer]:
            return
        kind, flags = first >> 4, first & 0x0F
        name = NAMES[kind]
        if not kind:
            raise malformed("packet type 0 is reserved")
        if not self.version and kind != _CONNECT >> 4:
            raise not_allowed(f"the first packet of a connection must be a CONNECT, not {name}")
        if kind == _PUBLISH:
            return
        known = DECODERS[self.peer].keys() | ({_CONNECT} if self.peer == "client" else set())
        if first not in known:
            if any(byte >> 4 == kind for byte in known):
                raise malformed(f"{name} has the flags {flags:#x}, which it may not have")
            raise not_allowed(f"{name} is not for a {self.peer} to send")
        if first == _CONNECT and self.version:
            raise not_allowed("a client sends one CONNECT only")
