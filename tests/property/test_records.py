"""The batch survives every round trip, and nothing that is not a batch passes for one."""

from __future__ import annotations

from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from millstream.compression import compress
from millstream.errors import BatchDamaged, MillstreamError
from millstream.records import (
    HEADER_BYTES,
    PRODUCED_MAX,
    Batch,
    BatchHeader,
    batch_next_offset,
    check_batch,
    decode_headers,
    encode_batch,
    encode_headers,
    encode_parts,
    largest_message_bytes,
    read_header,
    stamp,
    verify_batch,
)
from millstream.single import encode_single

TIMES = st.integers(0, 2**62)


@st.composite
def batches(draw: st.DrawFn, *, codecs: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    count = draw(st.integers(1, 20))

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(items, min_size=count, max_size=count))

    values = draw(st.lists(st.none() | st.binary(max_size=40), min_size=count, max_size=count))
    if draw(st.booleans()):
        size = draw(st.integers(0, 30))
        values = [bytes(size)] * count
    return {
        "values": values,
        "keys": column(st.none() | st.binary(max_size=10)),
        "headers": column(st.dictionaries(st.text(max_size=5), st.text(max_size=5)).map(encode_headers)),
        "priorities": column(st.integers(0, 4)),
        "deliver_at_us": column(TIMES),
        "expiry_us": column(TIMES),
        "timestamps_us": column(TIMES),
        "base_timestamp_us": draw(TIMES),
        "producer": draw(st.integers(0, 2**64 - 1)),
        "first_sequence": draw(st.integers(0, 2**32 - 1)),
        "codec": draw(st.sampled_from(codecs)),
    }


@given(batches(), st.integers(0, 2**48 - 1), TIMES, st.integers(0, 2**32 - 1))
def test_any_batch_round_trips(made: dict[str, Any], base: int, time_us: int, epoch: int) -> None:
    data = encode_batch(**made)
    assert len(data) % 8 == 0
    check_batch(data, 0, len(data))
    stamp(memoryview(data), 0, base_offset=base, append_time_us=time_us, leader_epoch=epoch)
    batch = Batch.parse(bytes(data))
    assert batch.values() == made["values"]
    assert batch.keys() == made["keys"]
    assert batch.raw_headers() == made["headers"]
    assert batch.priorities() == made["priorities"]
    assert batch.deliver_at_us() == made["deliver_at_us"]
    assert batch.expiry_us() == made["expiry_us"]
    assert batch.timestamps_us() == made["timestamps_us"]
    header = batch.header
    assert (header.base_offset, header.append_time_us, header.leader_epoch) == (base, time_us, epoch)
    assert header.producer == made["producer"]
    assert header.producer_id << 16 | header.producer_epoch == made["producer"]
    assert list(batch.offsets()) == list(range(base, base + len(made["values"])))
    assert batch_next_offset(data, 0, header) == batch.next_offset == base + len(made["values"])
    lanes = set(made["priorities"] or [2])
    assert header.priorities == sum(1 << lane for lane in lanes)


@given(st.binary(max_size=100), TIMES, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_a_single_value_has_the_bytes_of_any_batch(value: bytes, time_us: int, producer: int, sequence: int) -> None:
    options = {"base_timestamp_us": time_us, "producer": producer, "first_sequence": sequence}
    assert encode_single(value, **options) == encode_parts([value], **options)


@given(batches(), st.data())
def test_a_compacted_batch_keeps_its_offsets(made: dict[str, Any], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(1, 9), min_size=len(made["values"]), max_size=len(made["values"])))
    offsets = [sum(steps[:i]) for i in range(len(steps))]
    raw = encode_batch(**made, offsets=offsets)
    stamp(memoryview(raw), 0, base_offset=100, append_time_us=0, leader_epoch=0)
    batch = Batch.parse(raw)
    assert list(batch.offsets()) == [100 + offset for offset in offsets]
    assert batch.values() == made["values"]
    assert batch_next_offset(raw, 0, read_header(raw)) == batch.next_offset == 100 + offsets[-1] + 1


@given(batches(codecs=(0,)), st.data())
def test_every_flipped_bit_of_a_stored_batch_is_noticed(made: dict[str, Any], data: st.DataObject) -> None:
    raw = encode_batch(**made)
    stamp(memoryview(raw), 0, base_offset=7, append_time_us=8, leader_epoch=9)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BatchDamaged):
        verify_batch(raw, 0, read_header(raw))


@given(st.binary(max_size=200))
def test_noise_is_refused_with_our_own_error(noise: bytes) -> None:
    for attempt in (lambda: check_batch(noise, 0, len(noise)), lambda: Batch.parse(noise), lambda: read_header(noise)):
        with pytest.raises(MillstreamError):
            attempt()


@given(batches(), st.data())
def test_a_lie_with_a_valid_checksum_cannot_crash_a_reader(made: dict[str, Any], data: st.DataObject) -> None:
    """A client may compute any checksum it likes; what passes the broker must be harmless to consumers."""
    from crc32c import crc32c

    raw = encode_batch(**made)
    at = data.draw(st.integers(36, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    raw[8:12] = crc32c(memoryview(raw)[36:]).to_bytes(4, "little")
    try:
        check_batch(raw, 0, len(raw))
        stamp(memoryview(raw), 0, base_offset=0, append_time_us=0, leader_epoch=0)
        batch = Batch.parse(raw)
        for column in (batch.values(), batch.keys(), batch.raw_headers(), batch.timestamps_us()):
            assert column is None or len(column) == batch.count
        for headers in batch.raw_headers() or ():
            decode_headers(headers)
    except BatchDamaged:
        pass


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=5))
def test_headers_keep_order_and_repetitions(pairs: list[tuple[str, str]]) -> None:
    assert decode_headers(encode_headers(pairs)) == [(name, value.encode()) for name, value in pairs]


@given(batches())
def test_the_largest_message_is_found(made: dict[str, Any]) -> None:
    raw = encode_batch(**made)
    sizes = [
        len(value or b"") + len(key or b"") + len(headers or b"")
        for value, key, headers in zip(
            made["values"],
            made["keys"] or [b""] * len(made["values"]),
            made["headers"] or [b""] * len(made["values"]),
            strict=True,
        )
    ]
    assert largest_message_bytes(raw, BatchHeader(raw), limit=0) == max(sizes)


def test_a_decompression_bomb_is_refused_before_it_unpacks() -> None:
    raw = encode_batch([b"x" * 1000], base_timestamp_us=0, codec=1)
    raw[HEADER_BYTES : HEADER_BYTES + 4] = (2**31).to_bytes(4, "little")
    raw[8:12] = crc32c(memoryview(raw)[36:]).to_bytes(4, "little")
    with pytest.raises(BatchDamaged, match="unpacks to"):
        check_batch(raw, 0, len(raw))


def repacked(batch: bytearray, block: bytes, *, codec: int, claims: int | None = None) -> bytearray:
    """The batch with another packed block, as somebody would send it who means harm: all checksums are right."""
    packed = compress(codec, block)
    made = bytearray(batch[:HEADER_BYTES]) + (claims or len(block)).to_bytes(4, "little") + packed[4:]
    made += bytes(-len(made) % 8)
    made[3:8] = bytes([codec]) + len(made).to_bytes(4, "little")
    made[8:12] = crc32c(memoryview(made)[36:]).to_bytes(4, "little")
    return made


@pytest.mark.parametrize("codec", [1, 2])
def test_a_packed_batch_that_nobody_could_unpack_is_refused_before_it_is_stored(codec: int) -> None:
    plain = encode_batch([b"x" * 100], base_timestamp_us=0)
    block = bytes(plain[HEADER_BYTES:])
    check_batch(repacked(plain, block, codec=codec), 0, len(repacked(plain, block, codec=codec)))
    for wrong in (repacked(plain, block + bytes(8), codec=codec), repacked(plain, block, codec=codec, claims=120)):
        with pytest.raises(BatchDamaged):
            check_batch(wrong, 0, len(wrong))


def test_a_few_bytes_cannot_hold_millions_of_messages() -> None:
    few = encode_batch([b""] * PRODUCED_MAX, base_timestamp_us=0, codec=2)
    check_batch(few, 0, len(few))
    many = encode_batch([b""] * (PRODUCED_MAX + 1), base_timestamp_us=0, codec=2)
    with pytest.raises(BatchDamaged, match="may have 1 to 100000"):
        check_batch(many, 0, len(many))


def test_a_few_bytes_cannot_unpack_to_megabytes() -> None:
    small = encode_batch([bytes(1_000_000)], base_timestamp_us=0, codec=2)
    check_batch(small, 0, len(small))
    large = encode_batch([bytes(1_000_000)] * 10, base_timestamp_us=0, codec=2)
    with pytest.raises(BatchDamaged, match="255 times its size"):
        check_batch(large, 0, len(large))


def test_many_small_messages_are_not_measured_one_by_one() -> None:
    raw = encode_batch([b"x"] * 50_000, base_timestamp_us=0)
    assert largest_message_bytes(raw, BatchHeader(raw), limit=100_000) == 50_000
    assert largest_message_bytes(raw, BatchHeader(raw), limit=49_999) == 1
