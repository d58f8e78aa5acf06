"""LEASE and SETTLE: the two hot requests of queues, as packed fields (big-endian).

A lease covers offsets of one partition: `span` offsets from `start` on, or those of them whose bit is set in `mask`.
Batches travel as they are stored, or cut at the edges; messages outside the lease are not the reader's.  A settle names
its lease by nonce, so that an answer to a delivery that has ended can never touch the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from millstream.errors import ProtocolViolation
from millstream.names import NAME_BYTES_MAX
from millstream.wire.frames import FrameType, frame_head
from millstream.wire.messages import response_body

__all__ = [
    "PART_BYTES_MAX",
    "REASON_BYTES_MAX",
    "LeasePart",
    "LeaseRequest",
    "Scope",
    "Settle",
    "SettleEntry",
    "SettleResults",
    "Settled",
    "bytes_in",
    "decode_lease",
    "decode_lease_result",
    "decode_settle",
    "decode_settle_result",
    "encode_lease",
    "encode_lease_result",
    "encode_settle",
    "encode_settle_result",
    "lasting_ms",
    "messages_in",
    "waited_ms",
]

#: Long enough for the last line of a traceback; a reason is kept with every failed message.
REASON_BYTES_MAX: Final = 1024

_LEASE: Final = Struct(">IIII")  # consumer, max messages, max bytes, wait ms
_LEASE_RESULT: Final = Struct(">HHI")  # status, parts, waited ms
# topic size, partition, nonce, lease ms, delivery, failures, start, span, mask size, batches size
_PART: Final = Struct(">HIQIIIQIII")
#: What a part adds to its batches and its mask: the fields, and the name of its topic.
PART_BYTES_MAX: Final = _PART.size + NAME_BYTES_MAX
_SETTLE: Final = Struct(">I")  # entries
_ENTRY: Final = Struct(">BBHQQi")  # kind, scope, detail size, nonce, offset, value
_SETTLE_RESULT: Final = Struct(">HI")  # status, result bytes
_LASTING_MS_MAX: Final = 0xFFFF_FFFF


class Settle(IntEnum):
    """What to do with leased messages."""

    ACK = 1
    NACK = 2
    REJECT = 3
    EXTEND = 4
    #: Give back what was not started, without counting anything.
    RELEASE = 5


class Scope(IntEnum):
    """Which messages of the lease are meant."""

    REST = 0  # everything of the lease that is not settled yet
    ONE = 1
    BITMAP = 2  # bit i = `offset` + i


class Settled(IntEnum):
    """The result of a settle."""

    DONE = 0
    RETRIED = 1
    DEAD = 2
    #: The lease ended, is somebody else's or never was; nothing was changed.
    INVALID = 40
    #: Refused as INVALID is, and the message is not in the log any more: it is not delivered again.
    GONE = 57


class LeaseRequest(NamedTuple):
    consumer: int
    max_messages: int
    max_bytes: int
    wait_ms: int


class LeasePart(NamedTuple):
    topic: str
    partition: int
    nonce: int
    #: How long the lease lasts from the moment of the answer: clocks need not agree, they only have to tick.
    lease_ms: int
    delivery: int
    failures: int
    start: int
    span: int
    mask: bytes
    batches: Sequence[bytes | memoryview]

    @property
    def granted(self) -> int:
        """The bits of the offsets that are leased, counted from `start`."""
        return int.from_bytes(self.mask, "little") if self.mask else (1 << self.span) - 1


def messages_in(parts: Sequence[LeasePart]) -> int:
    return sum(part.granted.bit_count() if part.mask else part.span for part in parts)


def bytes_in(parts: Sequence[LeasePart]) -> int:
    """What parts take in an answer, at most."""
    return sum(PART_BYTES_MAX + len(part.mask) + sum(map(len, part.batches)) for part in parts)


class SettleEntry(NamedTuple):
    kind: int
    nonce: int
    scope: int = Scope.REST
    offset: int = 0
    #: nack: ms until the next try, -1 = by the retry policy; extend: ms from now.
    value: int = 0
    bits: int = 0
    reason: str = ""
    #: reject: what the message died of, if it was not that; never on the wire.
    cause: str = ""


class SettleResults(list[int]):
    """One for each entry; and how long the leases of those that were extended last from then on, in their order."""

    __slots__ = ("lasting_ms",)

    def __init__(self) -> None:
        super().__init__()
        self.lasting_ms: list[int] = []


# --- LEASE -------------------------------------------------------------------------------------------------------


def encode_lease(request: LeaseRequest, correlation: int) -> bytes:
    return frame_head(FrameType.LEASE, _LEASE.size, correlation) + _LEASE.pack(*request)


def decode_lease(payload: memoryview) -> LeaseRequest:
    if len(payload) != _LEASE.size:
        raise ProtocolViolation(f"a LEASE frame has {_LEASE.size} bytes, not {len(payload)}")
    return LeaseRequest(*_LEASE.unpack(payload))


def encode_lease_result(correlation: int, parts: Sequence[LeasePart], waited_ms: int = 0) -> list[bytes | memoryview]:
    """The answer as buffers for one gathering write: batches are not copied."""
    buffers: list[bytes | memoryview] = []
    size = _LEASE_RESULT.size
    for topic_name, partition, nonce, lease_ms, delivery, failures, start, span, mask, batches in parts:
        topic = topic_name.encode()
        batches_size = sum(map(len, batches))
        packed = _PART.pack(
            len(topic), partition, nonce, lease_ms, delivery, failures, start, span, len(mask), batches_size
        )
        size += len(packed) + len(topic) + len(mask) + batches_size
        buffers.append(packed + topic + mask)
        buffers += batches
    head = frame_head(FrameType.RESPONSE, size, correlation) + _LEASE_RESULT.pack(0, len(parts), waited_ms)
    return [head, *buffers]


def decode_lease_result(payload: memoryview) -> list[LeasePart]:
    """The parts, their batches as views of the payload; or the error it carries, raised."""
    response_body(payload)
    try:
        _, count, _ = _LEASE_RESULT.unpack_from(payload)
        parts = []
        at = _LEASE_RESULT.size
        for _ in range(count):
            size, partition, nonce, lease_ms, delivery, failures, start, span, mask_size, batches_size = (
                _PART.unpack_from(payload, at)
            )
            topic_at = at + _PART.size
            mask_at = topic_at + size
            batches_at = mask_at + mask_size
            at = batches_at + batches_size
            if mask_size and mask_size != span + 7 >> 3:
                raise ProtocolViolation(f"a lease of {span} offsets has a mask of {mask_size} bytes")
            topic = str(payload[topic_at:mask_at], "utf-8")
            mask = bytes(payload[mask_at:batches_at])
            batches = (payload[batches_at:at],)
            parts.append(LeasePart(topic, partition, nonce, lease_ms, delivery, failures, start, span, mask, batches))
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("the answer to a LEASE is too short or has a damaged topic") from None
    if at != len(payload):
        raise ProtocolViolation("the answer to a LEASE has another size than its parts")
    return parts


def waited_ms(payload: memoryview) -> int:
    """How long the broker let a LEASE wait, of an answer that could be decoded.

    Everything else that has passed since the request was sent may have passed since the lease was granted.
    """
    waited: int = _LEASE_RESULT.unpack_from(payload)[2]
    return waited


# --- SETTLE ------------------------------------------------------------------------------------------------------


def encode_settle(entries: Sequence[SettleEntry], correlation: int) -> bytes:
    packed = [_SETTLE.pack(len(entries))]
    for kind, nonce, scope, offset, value, bits, reason, _ in entries:
        detail = bits.to_bytes(bits.bit_length() + 7 >> 3, "little") if scope == Scope.BITMAP else _shortened(reason)
        packed += (_ENTRY.pack(kind, scope, len(detail), nonce, offset, value), detail)
    payload = b"".join(packed)
    return frame_head(FrameType.SETTLE, len(payload), correlation) + payload


def _shortened(reason: str) -> bytes:
    """As much of a reason as fits, without half a letter at its end."""
    raw = reason.encode("utf-8", "replace")
    return raw if len(raw) <= REASON_BYTES_MAX else raw[:REASON_BYTES_MAX].decode("utf-8", "ignore").encode()


def decode_settle(payload: memoryview) -> list[SettleEntry]:
    try:
        (count,) = _SETTLE.unpack_from(payload)
        entries = []
        at = _SETTLE.size
        for _ in range(count):
            kind, scope, size, nonce, offset, value = _ENTRY.unpack_from(payload, at)
            detail_at = at + _ENTRY.size
            at = detail_at + size
            if not Settle.ACK <= kind <= Settle.RELEASE or scope > Scope.BITMAP or at > len(payload):
                raise ProtocolViolation("a SETTLE frame has fields that are not allowed")
            bits, reason = 0, ""
            if size:
                detail = payload[detail_at:at]
                if scope == Scope.BITMAP:
                    bits = int.from_bytes(detail, "little")
                elif kind in (Settle.NACK, Settle.REJECT) and size <= REASON_BYTES_MAX:
                    reason = str(detail, "utf-8")
                else:
                    raise ProtocolViolation(f"a SETTLE frame has {size} bytes of detail where none are allowed")
            entries.append(SettleEntry(kind, nonce, scope, offset, value, bits, reason))
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("a SETTLE frame ends early or has a reason that is not UTF-8") from None
    if at != len(payload):
        raise ProtocolViolation("a SETTLE frame has another size than its entries")
    return entries


def encode_settle_result(correlation: int, results: Sequence[int], lasting_ms: Sequence[int] = ()) -> bytes:
    """One byte per entry; none at all when every entry is simply done, which is nearly always so.

    `lasting_ms` is for clients that have asked for it (see Hello): others take more bytes for a mistake.
    """
    packed = bytes(results) if any(results) else b""
    lasting = struct.pack(f">{len(lasting_ms)}I", *(min(ms, _LASTING_MS_MAX) for ms in lasting_ms))
    head = frame_head(FrameType.RESPONSE, _SETTLE_RESULT.size + len(packed) + len(lasting), correlation)
    return head + _SETTLE_RESULT.pack(0, len(packed)) + packed + lasting


def decode_settle_result(payload: memoryview, entries: int) -> bytes:
    """One byte (see Settled) for each of the entries that were sent; or the error, raised."""
    response_body(payload)
    if len(payload) < _SETTLE_RESULT.size:
        raise ProtocolViolation("the answer to a SETTLE is too short")
    _, count = _SETTLE_RESULT.unpack_from(payload)
    results = bytes(payload[_SETTLE_RESULT.size : _SETTLE_RESULT.size + count])
    if len(results) != count or count not in (0, entries) or (len(payload) - _SETTLE_RESULT.size - count) % 4:
        raise ProtocolViolation(f"the answer to a SETTLE of {entries} entries has {len(results)} results")
    return results or bytes(entries)


def lasting_ms(payload: memoryview) -> Sequence[int]:
    """How long the leases that were extended last, of an answer that could be decoded; none if it does not say so."""
    _, count = _SETTLE_RESULT.unpack_from(payload)
    rest = payload[_SETTLE_RESULT.size + count :]
    return struct.unpack(f">{len(rest) // 4}I", rest)
