"""Readers share buffers and keep parts of frames in them; nobody's bytes may change under anybody's hands."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from millstream.wire.frames import HEADER_BYTES, SHARED_BUFFER_BYTES, FrameReader, FrameType, encode_frame, frame_head

KIB = 1024


def receive(reader: FrameReader, data: bytes) -> int:
    """What a socket does: write as much as fits, say how much."""
    room = reader.buffer()
    size = min(len(room), len(data))
    room[:size] = data[:size]
    reader.received(size)
    return size


def begin_frame(reader: FrameReader, size: int, arrived: int) -> None:
    assert receive(reader, (frame_head(FrameType.PUBLISH, size) + bytes(arrived))[:arrived]) == arrived
    assert not list(reader.frames())


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from((0, 1, 100, 70 * KIB, 260 * KIB, 600 * KIB, 1100 * KIB)), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_readers_that_take_turns_never_touch_each_others_frames(seed: int, sizes: list[int], count: int) -> None:
    random = Random(seed)
    sent = [
        [bytes([random.randrange(256)]) * max(0, size - random.randrange(40)) for size in sizes] for _ in range(count)
    ]
    streams = [b"".join(encode_frame(FrameType.PUBLISH, payload) for payload in payloads) for payloads in sent]
    readers = [FrameReader() for _ in streams]
    seen: list[list[bytes]] = [[] for _ in streams]
    positions = [0] * count
    while open_streams := [n for n in range(count) if positions[n] < len(streams[n])]:
        n = random.choice(open_streams)
        most = random.choice((5, 1000, 64 * KIB, 300 * KIB, 2000 * KIB))
        positions[n] += receive(readers[n], memoryview(streams[n])[positions[n] : positions[n] + most])
        # Looked at only when the reader has put away the rest, as the broker does when it appends.
        frames = list(readers[n].frames())
        seen[n] += [bytes(frame.payload) for frame in frames]
    assert seen == sent
    assert not any(reader.owned_bytes for reader in readers)


def test_a_large_frame_is_parsed_where_it_was_received_and_others_go_on_elsewhere() -> None:
    reader, other = FrameReader(), FrameReader()
    place = reader.buffer().obj
    begin_frame(reader, 300 * KIB, 100 * KIB)
    assert reader.buffer().obj is place
    assert other.buffer().obj is not place
    receive(reader, bytes(300 * KIB + HEADER_BYTES - 100 * KIB))
    (frame,) = reader.frames()
    assert frame.payload.obj is place
    assert other.buffer().obj is place, "the buffer is everybody's again"


def test_many_readers_in_the_middle_of_frames_hold_no_more_than_what_has_arrived_explains() -> None:
    readers = [FrameReader() for _ in range(100)]
    for reader in readers:
        begin_frame(reader, 900 * KIB, 70 * KIB)
    assert sum(reader.owned_bytes for reader in readers) <= 100 * 4 * 70 * KIB + 8 * SHARED_BUFFER_BYTES


def test_a_connection_that_dies_in_the_middle_of_a_frame_takes_no_buffer_with_it() -> None:
    for _ in range(20):
        lost = FrameReader()
        begin_frame(lost, 300 * KIB, 100 * KIB)
        assert lost.owned_bytes == SHARED_BUFFER_BYTES, "kept as it was"
        del lost
