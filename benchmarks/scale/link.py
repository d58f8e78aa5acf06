"""A connection made of the wire codecs and a socket: it costs next to nothing and sends exactly what is asked of it."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from millstream.errors import MillstreamError
from millstream.records import encode_parts
from millstream.wire.frames import FrameReader, FrameType, encode_frame
from millstream.wire.leases import (
    LeaseRequest,
    Scope,
    Settle,
    SettleEntry,
    decode_lease_result,
    encode_lease,
    encode_settle,
)
from millstream.wire.messages import (
    FSYNC_POLICIES,
    FetchRequest,
    decode_error,
    decode_fetch_result,
    decode_publish_result,
    encode_fetch,
    encode_publish_head,
    response_body,
)

__all__ = ["Link", "batch_of", "publish_frame"]

_TIMEOUT_SECONDS = 120.0
_CORRELATION = 1  # the same for all: answers are counted, not told apart


def batch_of(values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> bytes:
    return b"".join(encode_parts(values, base_timestamp_us=1, keys=keys))


def publish_frame(topic: str, partition: int, batch: bytes, *, fsync: str = "") -> bytes:
    """A publish that can be sent as often as one likes; `fsync` if not as the topic says."""
    policy, size = FSYNC_POLICIES.index(fsync), len(batch)
    head = encode_publish_head(
        topic.encode(), partition, acks=1, fsync=policy, batch_size=size, correlation=_CORRELATION
    )
    return head + batch


class Link:
    """One connection after its handshake."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader()  # all of them share the memory that they read into
        self._answers: deque[memoryview] = deque()
        self._json(FrameType.HELLO, {"versions": [1]})

    def close(self) -> None:
        self.socket.close()

    def call(self, op: str, **fields: Any) -> Any:
        return self._json(FrameType.CALL, {"op": op, **fields})

    def calls(self, op: str, many: Sequence[dict[str, Any]], *, window: int = 100) -> list[Any]:
        """Many calls, so many under way at a time."""
        frames = [_json_frame(FrameType.CALL, {"op": op, **fields}) for fields in many]
        return [json.loads(bytes(response_body(answer))) for answer in self._exchange(frames, window)]

    def publish(self, frames: Sequence[bytes], *, window: int = 64) -> None:
        """Send publishes, so many under way at a time, until all are confirmed."""
        for answer in self._exchange(frames, window):
            decode_publish_result(answer)

    def send_fetch(self, topic: str, offset: int, *, max_bytes: int = 1 << 20, wait_ms: int = 0) -> None:
        request = FetchRequest(topic, 0, offset, max_bytes, wait_ms)
        self.socket.sendall(encode_fetch(request, _CORRELATION))

    def fetch(self, topic: str, offset: int, *, max_bytes: int = 1 << 20) -> tuple[int, int]:
        """What one fetch brings: the next offset, and how many bytes."""
        self.send_fetch(topic, offset, max_bytes=max_bytes)
        answer = self.answer()
        return decode_fetch_result(answer).next_offset, len(answer)

    def lease(self, consumer: int, most: int) -> int:
        """Lease messages and acknowledge all of them; returns how many."""
        self.socket.sendall(encode_lease(LeaseRequest(consumer, most, 1 << 20, 0), _CORRELATION))
        parts = decode_lease_result(self.answer())
        entries = [SettleEntry(Settle.ACK, part.nonce, Scope.REST) for part in parts]
        if entries:
            self.socket.sendall(encode_settle(entries, _CORRELATION))
            self.answer()
        return sum(part.granted.bit_count() for part in parts)

    def answer(self) -> memoryview:
        """The next answer, whatever it answers."""
        while not self._answers:
            self.receive()
        return self._answers.popleft()

    def receive(self) -> int:
        """Take in what has come; returns how many answers are there."""
        size = self.socket.recv_into(self._reader.buffer())
        if not size:
            raise EOFError("the broker has closed the connection")
        self._reader.received(size)
        for kind, correlation, payload in self._reader.frames():
            if kind == FrameType.RESPONSE:
                if correlation is None:
                    raise decode_error(payload) or MillstreamError("the broker has refused the connection")
                self._answers.append(memoryview(bytes(payload)))
        return len(self._answers)

    def _exchange(self, frames: Sequence[bytes], window: int) -> Iterator[memoryview]:
        sent = received = 0
        step = max(1, window // 2)
        while received < len(frames):
            while sent < len(frames) and sent - received <= window - step:
                self.socket.sendall(b"".join(frames[sent : sent + step]))
                sent = min(sent + step, len(frames))
            yield self.answer()
            received += 1

    def _json(self, kind: FrameType, fields: dict[str, Any]) -> Any:
        self.socket.sendall(_json_frame(kind, fields))
        return json.loads(bytes(response_body(self.answer())))


def _json_frame(kind: FrameType, fields: dict[str, Any]) -> bytes:
    return encode_frame(kind, json.dumps(fields).encode(), _CORRELATION)
