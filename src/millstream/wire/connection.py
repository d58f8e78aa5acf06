"""The server's side of a native connection, without the socket: bytes in, requests out.

The rules are few: the first frame is HELLO, every request carries a correlation id, and a client never sends what only
a broker may say.  A broken rule is an error that ends the connection and concerns nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from millstream.errors import InvalidArgument, ProtocolViolation, UnsupportedVersion
from millstream.wire.calls import Call
from millstream.wire.frames import FRAME_BYTES_MAX, HEADER_BYTES, PROTOCOL_VERSION, Frame, FrameReader, FrameType
from millstream.wire.leases import LeaseRequest, SettleEntry, decode_lease, decode_settle
from millstream.wire.messages import (
    FetchRequest,
    Hello,
    PublishRequest,
    decode_fetch,
    decode_json,
    decode_publish,
    sole_publish,
)

__all__ = ["Body", "Heartbeat", "Refused", "Request", "ServerConnection", "SettleRequest"]


class _State(Enum):
    CONNECTED = auto()  # waiting for HELLO
    READY = auto()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The client is alive."""


@dataclass(frozen=True, slots=True)
class SettleRequest:
    entries: list[SettleEntry]


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that says something impossible; the connection is fine, and the error is its answer."""

    error: InvalidArgument


Body: TypeAlias = Hello | PublishRequest | FetchRequest | LeaseRequest | SettleRequest | Call | Heartbeat | Refused
#: The correlation id to answer with (0 for a heartbeat, which has no answer), and what is asked.
Request: TypeAlias = tuple[int, Body]

_HEARTBEAT = Heartbeat()
_PUBLISH = int(FrameType.PUBLISH)


class ServerConnection:
    """One client's bytes, as requests."""

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.reader = FrameReader(payload_bytes_max=frame_bytes_max)
        self._state = _State.CONNECTED
        self._sole_bytes_max = HEADER_BYTES + frame_bytes_max

    def sole_publish(self, size: int) -> tuple[int, PublishRequest] | None:
        """The request, if what was just received is one PUBLISH and nothing else, as it nearly always is.

        Otherwise None: tell the reader and take `requests`.  Its view is borrowed as theirs are.
        """
        received = self.reader.fresh()
        if received is None or size > self._sole_bytes_max or self._state is not _State.READY:
            return None
        return sole_publish(received, size)

    def requests(self) -> Iterator[Request]:
        """Every request received so far; must be exhausted before more bytes are received.

        Views in requests are borrowed: they are valid until the reader's buffer is asked for again.  Raises
        MillstreamError for bytes that break the protocol, after which the connection must be closed.
        """
        for frame in self.reader.frames():
            kind, correlation, payload = frame
            if kind == _PUBLISH and correlation is not None and self._state is _State.READY:
                yield correlation, decode_publish(payload)  # by far the most frequent: one call less
            else:
                yield self._request(frame)

    def _request(self, frame: Frame) -> Request:
        kind, correlation, payload = frame
        if self._state is _State.CONNECTED:
            if kind != FrameType.HELLO:
                raise ProtocolViolation("the first frame of a connection must be HELLO")
            if correlation is None:
                raise ProtocolViolation("HELLO needs a correlation id")
            hello: Hello = decode_json(payload, Hello)
            if PROTOCOL_VERSION not in hello.versions:
                raise UnsupportedVersion(f"the client speaks {hello.versions}, this broker speaks {PROTOCOL_VERSION}")
            self._state = _State.READY
            return correlation, hello
        if kind == FrameType.HEARTBEAT:
            return 0, _HEARTBEAT
        if correlation is None:
            raise ProtocolViolation("a request needs a correlation id")
        if kind == FrameType.FETCH:
            return correlation, decode_fetch(payload)
        if kind == FrameType.LEASE:
            return correlation, decode_lease(payload)
        if kind == FrameType.SETTLE:
            return correlation, SettleRequest(decode_settle(payload))
        if kind == FrameType.CALL:
            try:
                call: Call = decode_json(payload, Call)
            except InvalidArgument as error:
                return correlation, Refused(error)
            return correlation, call
        raise ProtocolViolation(f"a client may not send {FrameType(kind).name}")
