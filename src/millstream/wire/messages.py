"""What travels inside frames: the hot requests as packed fields, everything else as JSON.

PUBLISH and FETCH carry batches and run at full speed, so their fields are packed (big-endian), as are those of LEASE
and SETTLE (leases.py).  All other requests are rare; they are CALL frames whose payload is a JSON object with an `op`,
which any language can write, a person can read, and a newer version can extend: unknown fields are ignored, missing
ones take their default.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from millstream.errors import InvalidArgument, MillstreamError, ProtocolViolation, error_from_wire
from millstream.wire.frames import HEADER_BYTES, FrameType, frame_head
from millstream.wording import in_words

__all__ = [
    "FetchRequest",
    "FetchResult",
    "Hello",
    "PublishRequest",
    "PublishResult",
    "Welcome",
    "decode_answer",
    "decode_error",
    "decode_fetch",
    "decode_fetch_result",
    "decode_json",
    "decode_publish",
    "decode_publish_result",
    "encode_error",
    "encode_fetch",
    "encode_fetch_result_head",
    "encode_json_response",
    "encode_publish_head",
    "encode_publish_result",
    "response_body",
    "sole_publish",
    "sole_publish_result",
]

#: How long the producer wants its answer to wait.
ACKS: Final = ("none", "leader", "all")
#: What a confirmed message survives: a label's position is its number on the wire.
LABELS: Final = ("none", "memory", "os", "disk", "replicated")
#: Which fsync policy a publish asks for; 0 leaves it to the topic.
FSYNC_POLICIES: Final = ("", "group", "interval", "always", "never")

_PUBLISH: Final = Struct(">BBIH")  # acks, fsync, partition, topic size
_PUBLISH_RESULT: Final = Struct(">HBBQq")  # status, label, duplicate, base offset, append time
# The same two with the frame around them, so that one call does it all; what never changes is packed beforehand.
_PUBLISH_HEAD: Final = Struct(">8sIIBBIH")
_PUBLISH_START: Final = frame_head(FrameType.PUBLISH, 0, 0)[:8]
_RESULT_FRAME: Final = Struct(f">{HEADER_BYTES}sIHBBQq")
_RESULT_START: Final = frame_head(FrameType.RESPONSE, _PUBLISH_RESULT.size, 0)[:HEADER_BYTES]
_FETCH: Final = Struct(">IQIIH")  # partition, offset, max bytes, wait ms, topic size
_FETCH_RESULT: Final = Struct(">HHQQQQQ")  # status, flags, next offset, high watermark, start offset, damaged from, to
_STATUS: Final = Struct(">H")
_DAMAGED: Final = 1
FETCH_RESULT_BYTES: Final = _FETCH_RESULT.size

T = TypeVar("T")


class PublishRequest(NamedTuple):
    topic: str
    partition: int
    acks: int
    fsync: int
    batch: memoryview


class PublishResult(msgspec.Struct, gc=False, frozen=True):
    """A struct because one is made per publish: a named tuple takes four times as long."""

    label: str
    base_offset: int
    append_time_us: int
    duplicate: bool


class FetchRequest(NamedTuple):
    topic: str
    partition: int
    offset: int
    max_bytes: int
    wait_ms: int


class FetchResult(NamedTuple):
    next_offset: int
    high_watermark: int
    start_offset: int
    damaged: tuple[int, int] | None
    batches: memoryview


class Hello(msgspec.Struct, kw_only=True):
    """The first frame of a connection."""

    versions: list[int]
    client_id: str = ""
    namespace: str = "default"
    token: str | None = None
    software: str = ""
    #: The client reads how long leases last that it has extended: answers to SETTLE have it at their end.
    extensions: bool = False


class Welcome(msgspec.Struct, kw_only=True):
    """The answer to Hello: what was agreed, and the limits that hold."""

    version: int
    node_id: str
    software: str
    heartbeat_ms: int
    frame_bytes_max: int
    #: Of this run of the broker, larger than that of any before.  None from brokers that do not tell.
    epoch: int | None = None


def encode_publish_head(
    topic: bytes, partition: int, *, acks: int, fsync: int, batch_size: int, correlation: int
) -> bytes:
    """Everything that stands before the batch."""
    size = len(topic)
    length = 4 + _PUBLISH.size + size + batch_size
    return _PUBLISH_HEAD.pack(_PUBLISH_START, length, correlation, acks, fsync, partition, size) + topic


def decode_publish(payload: memoryview) -> PublishRequest:
    try:
        acks, fsync, partition, size = _PUBLISH.unpack_from(payload)
        batch_at = _PUBLISH.size + size
        topic = str(payload[_PUBLISH.size : batch_at], "utf-8")
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("a PUBLISH frame ends before its batch or has a damaged topic") from None
    if acks >= len(ACKS) or fsync >= len(FSYNC_POLICIES) or batch_at > len(payload):
        raise ProtocolViolation("a PUBLISH frame has fields that are not allowed")
    return tuple.__new__(PublishRequest, (topic, partition, acks, fsync, payload[batch_at:]))


def sole_publish(received: memoryview, size: int) -> tuple[int, PublishRequest] | None:
    """Correlation id and request, if the `size` bytes received are exactly one frame of PUBLISH, and it is in order.

    None if they are anything else, which is for FrameReader to sort out.
    """
    if size < _PUBLISH_HEAD.size:
        return None
    start, length, correlation, acks, fsync, partition, topic_size = _PUBLISH_HEAD.unpack_from(received)
    batch_at = _PUBLISH_HEAD.size + topic_size
    if start != _PUBLISH_START or length + HEADER_BYTES != size or batch_at > size:
        return None
    if acks >= len(ACKS) or fsync >= len(FSYNC_POLICIES):
        return None
    try:
        topic = str(received[_PUBLISH_HEAD.size : batch_at], "utf-8")
    except UnicodeDecodeError:
        return None
    return correlation, tuple.__new__(PublishRequest, (topic, partition, acks, fsync, received[batch_at:size]))


def encode_publish_result(
    correlation: int, label: int, base_offset: int, append_time_us: int, *, duplicate: bool = False
) -> bytes:
    return _RESULT_FRAME.pack(_RESULT_START, correlation, 0, label, duplicate, base_offset, append_time_us)


def decode_publish_result(payload: memoryview) -> PublishResult:
    """The result, or the error it carries, raised."""
    response_body(payload)
    if len(payload) < _PUBLISH_RESULT.size:
        raise ProtocolViolation("the answer to a PUBLISH is too short")
    _, label, duplicate, base_offset, append_time_us = _PUBLISH_RESULT.unpack_from(payload)
    return PublishResult(LABELS[label] if label < len(LABELS) else "none", base_offset, append_time_us, bool(duplicate))


def sole_publish_result(received: memoryview, size: int, correlation: int) -> PublishResult | None:
    """The result, if the `size` bytes received are exactly the frame of this one, and it is a success.

    None if they are anything else, which is for FrameReader to sort out.
    """
    if size != _RESULT_FRAME.size:
        return None
    start, answered, status, label, duplicate, base_offset, append_time_us = _RESULT_FRAME.unpack_from(received)
    if start != _RESULT_START or answered != correlation or status or label >= len(LABELS):
        return None
    return PublishResult(LABELS[label], base_offset, append_time_us, duplicate != 0)


def encode_fetch(request: FetchRequest, correlation: int) -> bytes:
    topic = request.topic.encode()
    packed = _FETCH.pack(request.partition, request.offset, request.max_bytes, request.wait_ms, len(topic))
    return frame_head(FrameType.FETCH, len(packed) + len(topic), correlation) + packed + topic


def decode_fetch(payload: memoryview) -> FetchRequest:
    try:
        partition, offset, max_bytes, wait_ms, size = _FETCH.unpack_from(payload)
        topic = str(payload[_FETCH.size :], "utf-8")
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("a FETCH frame is too short or has a damaged topic") from None
    if len(payload) != _FETCH.size + size:
        raise ProtocolViolation("a FETCH frame has a topic of another size than it says")
    return FetchRequest(topic, partition, offset, max_bytes, wait_ms)


def encode_fetch_result_head(
    correlation: int,
    *,
    size: int,
    next_offset: int,
    high_watermark: int,
    start_offset: int,
    damaged: tuple[int, int] | None = None,
) -> bytes:
    """Everything that stands before `size` bytes of batches."""
    first, last = damaged or (0, 0)
    flags = _DAMAGED if damaged else 0
    return frame_head(FrameType.RESPONSE, _FETCH_RESULT.size + size, correlation) + _FETCH_RESULT.pack(
        0, flags, next_offset, high_watermark, start_offset, first, last
    )


def decode_fetch_result(payload: memoryview) -> FetchResult:
    response_body(payload)
    if len(payload) < _FETCH_RESULT.size:
        raise ProtocolViolation("the answer to a FETCH is too short")
    _, flags, next_offset, high_watermark, start_offset, first, last = _FETCH_RESULT.unpack_from(payload)
    damaged = (first, last) if flags & _DAMAGED else None
    return FetchResult(next_offset, high_watermark, start_offset, damaged, payload[_FETCH_RESULT.size :])


def encode_json_response(value: object, correlation: int) -> bytes:
    body = msgspec.json.encode(value)
    return frame_head(FrameType.RESPONSE, _STATUS.size + len(body), correlation) + _STATUS.pack(0) + body


def encode_error(error: MillstreamError, correlation: int | None) -> bytes:
    """An error as the answer to a request; without a correlation id it speaks of the connection itself."""
    text = str(error).encode()[:4096]
    return frame_head(FrameType.RESPONSE, _STATUS.size + len(text), correlation) + _STATUS.pack(error.number) + text


def decode_error(payload: memoryview) -> MillstreamError | None:
    """The error in an answer, or None when the answer is a success."""
    if len(payload) < _STATUS.size:
        return ProtocolViolation("an answer is too short to hold its status")
    (status,) = _STATUS.unpack_from(payload)
    return error_from_wire(status, str(payload[_STATUS.size :], "utf-8", "replace")) if status else None


def response_body(payload: memoryview) -> memoryview:
    """What follows the status of a successful answer; raises the error of any other."""
    error = decode_error(payload)
    if error is not None:
        raise error
    return payload[_STATUS.size :]


def decode_answer(payload: memoryview, kind: type[T] | Any) -> T:
    """The JSON of a successful answer; raises the error of any other, or ProtocolViolation if it is none of ours."""
    body = response_body(payload)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ProtocolViolation(f"the broker's answer does not fit: {problem}; is its version another one?") from None


def decode_json(body: memoryview | bytes, kind: type[T] | Any) -> T:
    """A JSON payload as the given type; raises InvalidArgument with the path of the first field that does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as problem:
        raise InvalidArgument(f"the request does not fit: {in_words(problem, kind=kind)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ProtocolViolation(f"the request is not JSON: {in_words(problem)}") from None
