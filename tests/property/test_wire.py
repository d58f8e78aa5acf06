"""TCP may cut our bytes anywhere; the codecs must not care where, and noise must never hurt."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import MillstreamError, PayloadTooLarge, ProtocolViolation, TopicNotFound
from millstream.wire import calls
from millstream.wire.connection import ServerConnection
from millstream.wire.frames import FrameReader, FrameType, encode_frame, frame_head
from millstream.wire.messages import (
    FetchRequest,
    Hello,
    decode_error,
    decode_fetch,
    decode_fetch_result,
    decode_json,
    decode_publish,
    decode_publish_result,
    encode_error,
    encode_fetch,
    encode_fetch_result_head,
    encode_publish_head,
    encode_publish_result,
    sole_publish_result,
)

FRAMES = st.tuples(st.sampled_from(list(FrameType)), st.binary(max_size=300), st.none() | st.integers(0, 2**32 - 1))
TOPICS = st.from_regex(r"[a-z]{1,8}(\.[a-z]{1,8}){0,2}", fullmatch=True)


def one_frame(data: bytes) -> memoryview:
    (frame,) = FrameReader(shared=bytearray(4096)).feed(data)
    return memoryview(bytes(frame.payload))


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 50), min_size=1), st.integers(13, 600))
def test_frames_survive_any_chunking(
    frames: list[tuple[FrameType, bytes, int | None]], cuts: list[int], shared_bytes: int
) -> None:
    stream = b"".join(encode_frame(kind, payload, correlation) for kind, payload, correlation in frames)
    reader = FrameReader(shared=bytearray(shared_bytes))
    seen = []
    at, sizes = 0, cycle(cuts)
    while at < len(stream):
        size = next(sizes)
        for kind, correlation, payload in reader.feed(stream[at : at + size]):
            seen.append((kind, bytes(payload), correlation))
        at += size
    assert seen == [(kind, payload, correlation) for kind, payload, correlation in frames]
    assert reader.owned_bytes == 0, "a reader without part of a frame holds no memory"


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), min_size=1))
def test_noise_gives_one_clear_error(noise: bytes, cuts: list[int]) -> None:
    reader = FrameReader(shared=bytearray(64))
    at, sizes = 0, cycle(cuts)
    try:
        while at < len(noise):
            size = next(sizes)
            list(reader.feed(noise[at : at + size]))
            at += size
    except MillstreamError as error:
        assert str(error)


@given(st.binary(max_size=120), st.sampled_from(list(FrameType)))
def test_any_payload_in_a_good_frame_is_answered_or_refused_never_a_crash(payload: bytes, kind: FrameType) -> None:
    wire = ServerConnection()
    hello = encode_frame(FrameType.HELLO, b'{"versions":[1]}', 1)
    try:
        for data in (hello, encode_frame(kind, payload, 2)):
            buffer = wire.reader.buffer()
            buffer[: len(data)] = data
            wire.reader.received(len(data))
            list(wire.requests())
    except MillstreamError as error:
        assert str(error)


def test_a_huge_claim_is_refused_before_anything_is_held() -> None:
    reader = FrameReader(payload_bytes_max=1000)
    with pytest.raises(PayloadTooLarge):
        list(reader.feed(frame_head(FrameType.PUBLISH, 1001)))


def test_a_claim_within_the_limit_does_not_take_its_memory_at_once() -> None:
    reader = FrameReader()
    list(reader.feed(frame_head(FrameType.PUBLISH, 10 * 1024 * 1024) + b"x"))
    assert reader.owned_bytes <= 64 * 1024


def test_the_first_frame_must_be_hello() -> None:
    wire = ServerConnection()
    data = encode_frame(FrameType.CALL, b"{}", 1)
    wire.reader.buffer()[: len(data)] = data
    wire.reader.received(len(data))
    with pytest.raises(ProtocolViolation, match="HELLO"):
        list(wire.requests())


@given(TOPICS, st.integers(0, 2**32 - 1), st.integers(0, 2), st.integers(0, 4), st.binary(max_size=50))
def test_publish_round_trips(topic: str, partition: int, acks: int, fsync: int, batch: bytes) -> None:
    head = encode_publish_head(topic.encode(), partition, acks=acks, fsync=fsync, batch_size=len(batch), correlation=7)
    request = decode_publish(one_frame(head + batch))
    assert request[:4] == (topic, partition, acks, fsync)
    assert bytes(request.batch) == batch


def _server_that_was_greeted(frame_bytes_max: int = 10_000) -> ServerConnection:
    wire = ServerConnection(frame_bytes_max=frame_bytes_max)
    hello = encode_frame(FrameType.HELLO, b'{"versions":[1],"client_id":"c"}', 1)
    wire.reader.buffer()[: len(hello)] = hello
    wire.reader.received(len(hello))
    assert len(list(wire.requests())) == 1
    return wire


@given(
    TOPICS,
    st.integers(0, 3),
    st.integers(0, 6),
    st.binary(max_size=50),
    st.none() | st.integers(0, 8 * 24 - 1),  # in what stands before the topic
    st.just(b"") | st.binary(max_size=20),
    st.integers(0, 90),
)
def test_a_publish_taken_from_the_buffer_is_the_one_the_reader_would_give(
    topic: str, acks: int, fsync: int, batch: bytes, bit: int | None, more: bytes, frame_bytes_max: int
) -> None:
    head = encode_publish_head(topic.encode(), 1, acks=acks, fsync=fsync, batch_size=len(batch), correlation=7)
    frame = bytearray(head + batch)
    if bit is not None:
        frame[bit // 8] ^= 1 << bit % 8
    data = bytes(frame) + more
    for limit in (frame_bytes_max, 10_000):
        wire = _server_that_was_greeted(200)
        wire.reader._payload_bytes_max, wire._sole_bytes_max = limit, 12 + limit
        wire.reader.buffer()[: len(data)] = data
        sole = wire.sole_publish(len(data))
        wire.reader.received(len(data))
        try:
            requests = list(wire.requests())
        except MillstreamError:
            assert sole is None, "what is refused otherwise is not taken here"
            continue
        if sole is not None:
            assert [sole] == requests
            assert wire.reader.owned_bytes == 0


def test_nothing_is_taken_from_the_buffer_before_the_greeting_or_in_the_middle_of_a_frame() -> None:
    frame = encode_publish_head(b"orders", 0, acks=1, fsync=0, batch_size=4, correlation=7) + b"1234"
    stranger = ServerConnection()
    stranger.reader.buffer()[: len(frame)] = frame
    assert stranger.sole_publish(len(frame)) is None
    wire = _server_that_was_greeted()
    for piece in (frame[:9], frame[9:], frame):
        wire.reader.buffer()[: len(piece)] = piece
        if piece is frame:
            assert wire.sole_publish(len(piece)) is not None
        else:
            assert wire.sole_publish(len(piece)) is None
            wire.reader.received(len(piece))
            list(wire.requests())


@given(st.integers(0, 4), st.integers(0, 2**48), st.integers(0, 2**62), st.booleans())
def test_publish_result_round_trips(label: int, base: int, time_us: int, duplicate: bool) -> None:
    result = decode_publish_result(one_frame(encode_publish_result(3, label, base, time_us, duplicate=duplicate)))
    assert (result.base_offset, result.append_time_us, result.duplicate) == (base, time_us, duplicate)


@given(st.integers(0, 9), st.integers(0, 2**48), st.booleans(), st.integers(0, 8 * 36 - 1), st.integers(-36, 9))
def test_a_result_taken_from_the_buffer_is_the_one_the_reader_would_give(
    label: int, base: int, duplicate: bool, bit: int, more: int
) -> None:
    frame = bytearray(encode_publish_result(3, label, base, 5, duplicate=duplicate))
    buffer = memoryview(frame + bytes(20))
    expected = decode_publish_result(one_frame(bytes(frame)))
    assert sole_publish_result(buffer, len(frame), 3) == (expected if label <= 4 else None)
    assert sole_publish_result(buffer, len(frame), 4) is None
    if more:
        assert sole_publish_result(buffer, len(frame) + more, 3) is None
    frame[bit // 8] ^= 1 << bit % 8
    try:
        (seen,) = FrameReader(shared=bytearray(64)).feed(bytes(frame))
        wanted = decode_publish_result(seen.payload) if seen[:2] == (FrameType.RESPONSE, 3) else None
    except (MillstreamError, ValueError):  # refused, or not a whole frame any more
        wanted = None
    assert sole_publish_result(memoryview(frame), len(frame), 3) in (wanted, None)


@given(TOPICS, st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_fetch_round_trips(topic: str, partition: int, offset: int, max_bytes: int, wait_ms: int) -> None:
    request = FetchRequest(topic, partition, offset, max_bytes, wait_ms)
    assert decode_fetch(one_frame(encode_fetch(request, 9))) == request


@given(st.integers(0, 2**48), st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)), st.binary(max_size=80))
def test_fetch_result_round_trips(offset: int, damaged: tuple[int, int] | None, batches: bytes) -> None:
    head = encode_fetch_result_head(
        1, size=len(batches), next_offset=offset, high_watermark=offset + 1, start_offset=0, damaged=damaged
    )
    result = decode_fetch_result(one_frame(head + batches))
    assert (result.next_offset, result.high_watermark, result.damaged) == (offset, offset + 1, damaged)
    assert bytes(result.batches) == batches


def test_errors_keep_their_kind_and_text() -> None:
    error = decode_error(one_frame(encode_error(TopicNotFound("no orders here"), 4)))
    assert isinstance(error, TopicNotFound)
    assert str(error) == "no orders here"
    with pytest.raises(TopicNotFound):
        decode_publish_result(one_frame(encode_error(TopicNotFound("x"), 4)))


def test_calls_ignore_fields_they_do_not_know_and_name_the_one_that_is_wrong() -> None:
    call: calls.Call = decode_json(b'{"op":"topic.describe","name":"a","from_the_future":1}', calls.Call)
    assert call == calls.DescribeTopic(name="a")
    with pytest.raises(MillstreamError, match="name"):
        decode_json(b'{"op":"topic.describe","name":5}', calls.Call)
    with pytest.raises(MillstreamError, match="JSON"):
        decode_json(b"{", Hello)
