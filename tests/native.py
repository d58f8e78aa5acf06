"""A client made of nothing but the wire codecs and a socket, for tests that need to say exactly what is sent."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream.records import Batch, encode_parts
from millstream.wire.frames import FrameReader, FrameType, encode_frame
from millstream.wire.leases import (
    LeasePart,
    LeaseRequest,
    Scope,
    Settle,
    SettleEntry,
    decode_lease_result,
    decode_settle_result,
    encode_lease,
    encode_settle,
)
from millstream.wire.messages import (
    FetchRequest,
    FetchResult,
    PublishResult,
    decode_error,
    decode_fetch_result,
    decode_publish_result,
    encode_fetch,
    encode_publish_head,
    response_body,
)


class Delivered(NamedTuple):
    """One message of a lease."""

    part: LeasePart
    offset: int
    value: bytes | None
    key: bytes | None


def delivered(parts: Sequence[LeasePart]) -> list[Delivered]:
    """The messages that are leased, and not the others that travelled with them."""
    found = []
    for part in parts:
        data, at = b"".join(part.batches), 0
        while at < len(data):
            batch = Batch.parse(data, at)
            at += batch.header.length
            keys = batch.keys() or [None] * batch.count
            for offset, value, key in zip(batch.offsets(), batch.values(), keys, strict=True):
                if part.granted >> max(offset - part.start, 0) & (offset >= part.start):
                    found.append(Delivered(part, offset, value, key))
    return found


class NativeClient:
    """One connection.  `send_*` only sends, `receive` takes the next frame, everything else does both."""

    def __init__(
        self, address: str, *, hello: bool = True, namespace: str = "default", client_id: str = "test"
    ) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(shared=bytearray(1 << 20))
        self._frames: deque[tuple[int, int | None, memoryview]] = deque()
        self._correlation = 0
        if hello:
            self.welcome = self.hello(namespace=namespace, client_id=client_id)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> NativeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_correlation(self) -> int:
        self._correlation += 1
        return self._correlation

    def receive(self) -> tuple[int, int | None, memoryview]:
        """The next frame; raises EOFError when the broker has closed the connection."""
        while not self._frames:
            size = self.socket.recv_into(self._reader.buffer())
            if not size:
                raise EOFError
            self._reader.received(size)
            for kind, correlation, payload in self._reader.frames():
                self._frames.append((kind, correlation, memoryview(bytes(payload))))
        return self._frames.popleft()

    def answer(self, correlation: int) -> memoryview:
        """The answer to a request; frames that the broker pushes are left out."""
        while True:
            kind, found, payload = self.receive()
            if kind == FrameType.RESPONSE:
                assert found == correlation, f"expected the answer to {correlation}, got {found}: {bytes(payload)!r}"
                return payload

    def closing_error(self) -> Exception | None:
        """What the broker says before it closes; the connection must be closed after it."""
        error = None
        try:
            while True:
                kind, correlation, payload = self.receive()
                if kind == FrameType.RESPONSE and correlation is None:
                    error = decode_error(payload)
        except (EOFError, ConnectionResetError):
            return error

    def hello(self, **fields: Any) -> Any:
        return self._json(FrameType.HELLO, {"versions": [1], **fields})

    def call(self, op: str, **fields: Any) -> Any:
        return self._json(FrameType.CALL, {"op": op, **fields})

    def _json(self, kind: FrameType, fields: dict[str, Any]) -> Any:
        correlation = self.next_correlation()
        self.socket.sendall(encode_frame(kind, json.dumps(fields).encode(), correlation))
        return json.loads(bytes(response_body(self.answer(correlation))))

    def send_publish(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        partition: int = 0,
        acks: int = 1,
        fsync: int = 0,
        producer: int = 0,
        sequence: int = 0,
        **columns: Any,
    ) -> int:
        head, tail = encode_parts(
            values, base_timestamp_us=1, producer=producer << 16, first_sequence=sequence, **columns
        )
        return self.send_batch(topic, head + tail, partition=partition, acks=acks, fsync=fsync)

    def send_batch(self, topic: str, batch: bytes, *, partition: int = 0, acks: int = 1, fsync: int = 0) -> int:
        correlation = self.next_correlation()
        start = encode_publish_head(
            topic.encode(), partition, acks=acks, fsync=fsync, batch_size=len(batch), correlation=correlation
        )
        self.socket.sendall(start + batch)
        return correlation

    def publish(self, topic: str, values: Sequence[bytes | None], **options: Any) -> PublishResult:
        return decode_publish_result(self.answer(self.send_publish(topic, values, **options)))

    def send_fetch(
        self, topic: str, offset: int, *, partition: int = 0, max_bytes: int = 1 << 20, wait_ms: int = 0
    ) -> int:
        correlation = self.next_correlation()
        self.socket.sendall(encode_fetch(FetchRequest(topic, partition, offset, max_bytes, wait_ms), correlation))
        return correlation

    def fetch(self, topic: str, offset: int, **options: Any) -> FetchResult:
        return decode_fetch_result(self.answer(self.send_fetch(topic, offset, **options)))

    def open_queue(self, topic: str, **fields: Any) -> int:
        """The number of a new consumer."""
        return int(self.call("queue.open", topic=topic, **fields)["consumer"])

    def send_lease(self, consumer: int, most: int = 100, *, max_bytes: int = 1 << 20, wait_ms: int = 0) -> int:
        correlation = self.next_correlation()
        self.socket.sendall(encode_lease(LeaseRequest(consumer, most, max_bytes, wait_ms), correlation))
        return correlation

    def lease(self, consumer: int, most: int = 100, **options: Any) -> list[Delivered]:
        return delivered(decode_lease_result(self.answer(self.send_lease(consumer, most, **options))))

    def send_settle(self, *entries: SettleEntry) -> int:
        correlation = self.next_correlation()
        self.socket.sendall(encode_settle(entries, correlation))
        return correlation

    def settle(self, *entries: SettleEntry) -> list[int]:
        return list(decode_settle_result(self.answer(self.send_settle(*entries)), len(entries)))

    def settle_one(self, kind: Settle, message: Delivered, value: int = -1, reason: str = "") -> int:
        value = value if kind in (Settle.NACK, Settle.EXTEND) else 0
        entry = SettleEntry(kind, message.part.nonce, Scope.ONE, message.offset, value, reason=reason)
        return self.settle(entry)[0]

    def ack(self, *messages: Delivered) -> list[int]:
        return self.settle(*(SettleEntry(Settle.ACK, m.part.nonce, Scope.ONE, m.offset) for m in messages))
