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
from weakref import WeakValueDictionary

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
#: What one read asks for: a fast sender fills it rarely, and it stays in the processor's cache.
_READ_BYTES: Final = 512 * 1024
SHARED_BUFFER_BYTES: Final = 2 * _READ_BYTES
_KEPT_MAX: Final = 8

_PARTIAL_BYTES_MIN: Final = 64 * 1024
_HEADER_ONLY_BYTES: Final = 4096

_HEADER: Final = Struct(">IBBBBI")
_HEADER_AND_CORRELATION: Final = Struct(">IBBBBII")
_U32: Final = Struct(">I")


class FrameType(IntEnum):
    DELIVERY = 10
    RESPONSE = 11
    FETCH = 12
    LEASE = 13
    PUBLISH = 15
    SETTLE = 16
    REBALANCE = 17
    FLOW = 20
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


class ReceiveBuffers:
    """Large buffers for the readers of one thread, which take turns with a single one while frames arrive whole.

    A reader that is left with much of a frame keeps the buffer in which it lies until the frame is complete, and the
    others go on with another: large frames are not copied, and no fresh memory is zeroed for them.  Few buffers are
    kept at a time and none for little, so memory follows what has really arrived.
    """

    def __init__(self, first: bytearray | memoryview, *, read_bytes: int, kept_max: int, kept_rest_min: int) -> None:
        self.size = len(first)
        #: How far a buffer is filled; behind that is room for the end of a frame that began before.
        self.read_bytes = read_bytes
        self._kept_max = kept_max
        self._kept_rest_min = kept_rest_min
        self._free = [memoryview(first)]
        # Weak: a connection that dies in the middle of a frame gives up its buffer by that.
        self._kept: WeakValueDictionary[int, memoryview] = WeakValueDictionary()

    def next(self) -> memoryview:
        """The buffer to receive into now, which is whoever's turn it is."""
        if not self._free:
            self._free.append(memoryview(bytearray(self.size)))
        return self._free[-1]

    def keep(self, rest: int) -> memoryview | None:
        """Take over the `next` buffer for the beginning of a frame; None if that is not worth it or too many are."""
        if rest < self._kept_rest_min or len(self._kept) >= self._kept_max:
            return None
        view = self.next()
        self._kept[id(view)] = self._free.pop()
        return view

    def give_back(self, view: memoryview) -> None:
        """Let others use a buffer again; other memory is none of our business."""
        if self._kept.pop(id(view), None) is not None:
            self._free.append(view)


_shared_buffers: Final = ReceiveBuffers(
    bytearray(SHARED_BUFFER_BYTES), read_bytes=_READ_BYTES, kept_max=_KEPT_MAX, kept_rest_min=_PARTIAL_BYTES_MIN
)


class FrameReader:
    """Turns bytes, in whatever pieces they arrive, into frames.

    Use: receive into `buffer()`, say how much with `received(n)`, then take all of `frames()`.
    """

    def __init__(
        self, *, payload_bytes_max: int = FRAME_BYTES_MAX, shared: bytearray | memoryview | None = None
    ) -> None:
        """`shared` replaces the buffer of all readers of the main thread, for those who read in another."""
        self._payload_bytes_max = payload_bytes_max
        self._buffers = _shared_buffers
        if shared is not None:
            self._buffers = ReceiveBuffers(shared, read_bytes=len(shared), kept_max=1, kept_rest_min=0)
        self._view = self._buffers.next()
        self._start = 0  # of what is not handed out yet
        self._end = 0
        self._needed = 0  # the size of the incomplete frame at `start`, as far as it is known; 0 if there is none

    @property
    def owned_bytes(self) -> int:
        """Memory this reader holds for itself because a frame is incomplete."""
        return len(self._view) if self._needed else 0

    def buffer(self) -> memoryview:
        """Where the next bytes belong.  Views handed out by earlier `frames` are overwritten from here on."""
        view = self._view
        if not self._needed:
            view = self._view = self._buffers.next()
        elif self._start and self._start + self._needed > len(view):
            rest = self._end - self._start
            view[:rest] = view[self._start : self._end]
            self._start, self._end = 0, rest
        return view[self._end : max(self._start + self._needed, self._buffers.read_bytes)]

    def fresh(self) -> memoryview | None:
        """Where the next bytes were received, unless they belong to a frame that began before.

        Who finds all of them to be what he expected need not tell the reader that they came.
        """
        return None if self._needed else self._view

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
        view, start, end = self._view, self._start, self._end
        needed = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            magic, version, kind, flags, zero, length = _HEADER.unpack_from(view, start)
            if magic != MAGIC:
                raise ProtocolViolation(_no_frame(view[start : start + HEADER_BYTES]))
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
        """Hold on to the beginning of an incomplete frame; until now it lies in a buffer that others will use."""
        view, rest, ours = self._view, self._end - start, bool(self._needed)
        if not rest:
            self._start = self._end = self._needed = 0
        elif (needed <= len(view) or (not start and rest < len(view))) and (ours or self._buffers.keep(rest) is view):
            self._start, self._needed = start, needed
            return
        else:
            own = self._buffers.keep(rest) if needed <= self._buffers.size else None
            if own is None:
                # Room grows with what has really arrived, so that claiming 10 MiB does not take 10 MiB.
                size = min(needed, max(_PARTIAL_BYTES_MIN, 4 * rest)) if needed > HEADER_BYTES else _HEADER_ONLY_BYTES
                own = memoryview(bytearray(max(size, rest + 1)))
            own[:rest] = view[start : self._end]
            self._view, self._start, self._end, self._needed = own, 0, rest, needed
        if ours:
            self._buffers.give_back(view)


def _no_frame(received: memoryview) -> str:
    if bytes(received[:5]) == b"HTTP/":  # who has seen the dashboard takes its port for the broker's
        return "it speaks HTTP; take the port of the native protocol, 9092 unless set otherwise"
    return "these bytes are not a frame of the native protocol"


def frame_head(kind: int, size: int, correlation: int | None = None) -> bytes:
    """The bytes in front of a payload of this size."""
    if correlation is None:
        return _HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, 0, 0, size)
    return _HEADER_AND_CORRELATION.pack(MAGIC, PROTOCOL_VERSION, kind, CORRELATED, 0, size + 4, correlation)


def encode_frame(kind: int, payload: bytes, correlation: int | None = None) -> bytes:
    return frame_head(kind, len(payload), correlation) + payload
