"""The fields a packet is made of, read one after the other, each within the packet's end."""

from __future__ import annotations

from typing import Final

from millstream.mqtt.reasons import MqttViolation, Reason

__all__ = ["NUMBER_MAX", "Fields", "malformed", "not_allowed"]

#: The largest variable byte integer, and so the longest packet.
NUMBER_MAX: Final = 268_435_455


def malformed(text: str) -> MqttViolation:
    """These bytes cannot be read as what they claim to be."""
    return MqttViolation(Reason.MALFORMED_PACKET, text)


def not_allowed(text: str) -> MqttViolation:
    """They can be read, but say what the protocol does not allow."""
    return MqttViolation(Reason.PROTOCOL_ERROR, text)


class Fields:
    """A cursor over one packet, or over a part of it."""

    __slots__ = ("at", "data", "end", "packet")

    def __init__(self, data: bytes, at: int, end: int, packet: str) -> None:
        self.data = data
        self.at = at
        self.end = end
        #: Its name with an article, for sentences.
        self.packet = packet

    def take(self, size: int) -> int:
        """Where the next `size` bytes begin."""
        at = self.at
        if at + size > self.end:
            raise malformed(f"{self.packet} ends in the middle of a field")
        self.at = at + size
        return at

    def byte(self) -> int:
        return self.data[self.take(1)]

    def flag(self) -> int:
        value = self.data[self.take(1)]
        if value > 1:
            raise not_allowed(f"{self.packet} has a property of {value} where only 0 and 1 are allowed")
        return value

    def u16(self) -> int:
        at = self.take(2)
        return self.data[at] << 8 | self.data[at + 1]

    def u32(self) -> int:
        at = self.take(4)
        return int.from_bytes(self.data[at : at + 4], "big")

    def number(self) -> int:
        """A variable byte integer: seven bits a byte, lowest first, in as few bytes as possible."""
        value = 0
        for shift in (0, 7, 14, 21):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if not byte and shift:
                    raise malformed(f"{self.packet} has a number in more bytes than it needs")
                return value
        raise malformed(f"{self.packet} has a number of more than four bytes")

    def binary(self) -> bytes:
        size = self.u16()
        at = self.take(size)
        return self.data[at : at + size]

    def text(self) -> str:
        size = self.u16()
        at = self.take(size)
        try:
            text = self.data[at : at + size].decode()
        except UnicodeDecodeError:
            raise malformed(f"{self.packet} has a text that is not UTF-8") from None
        if "\0" in text:
            raise malformed(f"{self.packet} has a text with the character U+0000")
        return text

    def pair(self) -> tuple[str, str]:
        return self.text(), self.text()

    def packet_id(self) -> int:
        value = self.u16()
        if not value:
            raise not_allowed(f"{self.packet} has the packet identifier 0")
        return value

    def finish(self) -> None:
        """Nothing may follow."""
        if self.at != self.end:
            raise malformed(f"{self.packet} is longer than its fields")
