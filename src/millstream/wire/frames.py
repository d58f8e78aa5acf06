"""Frames of the native protocol: bytes in, frames out, no sockets.

A frame is a 12-byte header, big-endian so that "MQUE" can be read in a hex dump, and a payload::

    0 u32 magic "MQUE"   4 u8 version   5 u8 type   6 u8 flags   7 u8 zero   8 u32 payload length

With flag CORRELATED the payload begins with a u32 correlation id; every request has one, and its answer repeats it.

FrameReader hands out the buffer to receive into, so that a socket writes straight to where frames are parsed.  While
frames arrive whole all readers share one large buffer; a connection owns memory only while it holds part of a frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from millstream.errors import PayloadTooLarge, ProtocolViolation, UnsupportedVersion

__all__ = [
    "CORRELATED",
    "FRAME_BYTES_MAX",
    "HEADER_BYTES",
    "PROTOCOL_VERSION",
    "Frame",
    "FrameReader",
    "FrameType",
    "encode_frame",
    "frame_head",
]

MAGIC: Final = 0x4D515545
PROTOCOL_VERSION: Final = 1
HEADER_BYTES: Final = 12
FRAME_BYTES_MAX: Final = 10 * 1024 * 1024
CORRELATED: Final = 4
_KNOWN_FLAGS: Final = CORRELATED
#: Large enough that a fast sender fills it rarely, small enough to stay in the processor's cache.
SHARED_BUFFER_BYTES: Final = 512 * 1024

_PARTIAL_BYTES_MIN: Final = 64 * 1024
_HEADER_ONLY_BYTES: Final = 4096

_HEADER: Final = Struct(">IBBBBI")
_HEADER_AND_CORRELATION: Final = Struct(">IBBBBII")
_U32: Final = Struct(">I")


class FrameType(IntEnum):
    RESPONSE = 11
    FETCH = 12
    PUBLISH = 15
    REBALANCE = 17
    HELLO = 22
    CALL = 30
    GOAWAY = 98
    HEARTBEAT = 99


_tuple: Final = tuple.__new__  # makes a named tuple without the detour through its constructor
_TYPES: Final = frozenset(int(kind) for kind in FrameType)


class Frame(NamedTuple):
    """One frame.  The payload is a view that is valid until the reader's next `buffer` call."""

    type: int
    correlation: int | None
    payload: memoryview


_shared_buffer: Final = bytearray(SHARED_BUFFER_BYTES)


class FrameReader:
    """Turns bytes, in whatever pieces they arrive, into frames.

    Use: receive into `buffer()`, say how much with `received(n)`, then take all of `frames()`.
    """

    def __init__(self, *, payload_bytes_max: int = FRAME_BYTES_MAX, shared: bytearray | None = None) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._shared = memoryview(_shared_buffer if shared is None else shared)
        self._view = self._shared
        self._end = 0

    @property
    def owned_bytes(self) -> int:
        """Memory this reader holds for itself because a frame is incomplete."""
        return 0 if self._view is self._shared else len(self._view)

    def buffer(self) -> memoryview:
        """Where the next bytes belong.  Views handed out by earlier `frames` are overwritten from here on."""
        return self._view[self._end :]

    def received(self, size: int) -> None:
        self._end += size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames of bytes that were received elsewhere."""
        rest = memoryview(data)
        while rest:
            room = self.buffer()
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            self.received(size)
            rest = rest[size:]
            yield from self.frames()

    def frames(self) -> Iterator[Frame]:
        """Every whole frame received so far; must be exhausted before more is received.

        Raises ProtocolViolation, UnsupportedVersion or PayloadTooLarge.  The stream has no point to pick up again, so
        the caller must then close the connection.
        """
        view, start, end = self._view, 0, self._end
        needed = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            magic, version, kind, flags, zero, length = _HEADER.unpack_from(view, start)
            if magic != MAGIC:
                raise ProtocolViolation("these bytes are not a frame of the native protocol")
            if version != PROTOCOL_VERSION:
                raise UnsupportedVersion(f"frame version {version} is unknown; supported: {PROTOCOL_VERSION}")
            # Checked before the payload arrives: a four-byte lie must not make us hold gigabytes.
            if length > self._payload_bytes_max:
                raise PayloadTooLarge(f"a frame carries {self._payload_bytes_max} bytes at most, not {length}")
            if flags & ~_KNOWN_FLAGS or zero:
                raise ProtocolViolation(f"frame flags {flags:#x} are unknown")
            if kind not in _TYPES:
                raise UnsupportedVersion(f"frame type {kind} is unknown")
            payload_at = start + HEADER_BYTES
            stop = payload_at + length
            if stop > end:
                needed = HEADER_BYTES + length
                break
            correlation = None
            if flags & CORRELATED:
                if length < 4:
                    raise ProtocolViolation("a frame ends inside its correlation id")
                (correlation,) = _U32.unpack_from(view, payload_at)
                payload_at += 4
            yield _tuple(Frame, (kind, correlation, view[payload_at:stop]))
            start = stop
        self._keep(start, needed)

    def _keep(self, start: int, needed: int) -> None:
        """Move the beginning of an incomplete frame to memory of this reader's own."""
        rest = self._end - start
        if not rest:
            self._view, self._end = self._shared, 0
        elif self._view is self._shared or start or self._end == len(self._view):
            # Room grows with what has really arrived, so that claiming 10 MiB does not take 10 MiB.
            size = min(needed, max(_PARTIAL_BYTES_MIN, 4 * rest)) if needed > HEADER_BYTES else _HEADER_ONLY_BYTES
            own = bytearray(max(size, rest + 1))
            own[:rest] = self._view[start : self._end]
            self._view, self._end = memoryview(own), rest


def frame_head(kind: int, size: int, correlation: int | None = None) -> bytes:
    """The bytes in front of a payload of this size."""
    if correlation is None:
        return _HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, 0, 0, size)
    return _HEADER_AND_CORRELATION.pack(MAGIC, PROTOCOL_VERSION, kind, CORRELATED, 0, size + 4, correlation)


def encode_frame(kind: int, payload: bytes, correlation: int | None = None) -> bytes:
    return frame_head(kind, len(payload), correlation) + payload
