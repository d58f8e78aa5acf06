"""The batch survives every round trip, and nothing that is not a batch passes for one."""

from __future__ import annotations

import tracemalloc
from array import array
from contextlib import suppress
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.incoming import check_storable, largest_message_bytes
from millstream.columns import check_ascending
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
    read_header,
    stamp,
    verify_batch,
)
from millstream.single import encode_single
from millstream.slicing import select_messages, slice_batch

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
    raw = encode_batch(**made)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(36, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    raw[8:12] = crc32c(memoryview(raw)[36:]).to_bytes(4, "little")
    stamp(memoryview(raw), 0, base_offset=0, append_time_us=0, leader_epoch=0)
    try:
        check_batch(raw, 0, len(raw))
    except BatchDamaged:
        with suppress(BatchDamaged):  # and nothing else
            read_all(raw, data)
    else:
        read_all(raw, data)


def read_all(raw: bytearray, data: st.DataObject) -> None:
    """Everything that is done with a batch after it was stored."""
    batch = Batch.parse(raw)
    columns = [batch.values(), batch.keys(), batch.raw_headers()]
    assert all(column is None or len(column) == batch.count for column in columns)
    heaps = sum(len(item or b"") for column in columns for item in column or ())
    assert heaps <= len(batch.block), "no byte belongs to two messages"
    numbers = (batch.timestamps_us(), batch.priorities(), batch.deliver_at_us(), batch.expiry_us())
    assert all(column is None or len(column) == batch.count for column in numbers)
    for headers in batch.raw_headers() or ():
        with suppress(BatchDamaged):
            decode_headers(headers)
    first = data.draw(st.integers(0, batch.count - 1))
    last = data.draw(st.integers(first + 1, batch.count))
    chosen = data.draw(st.integers(1, (1 << batch.count) - 1))
    for part in (slice_batch(bytes(raw), first, last), select_messages(bytes(raw), chosen)):
        assert len(Batch.parse(part).values()) == Batch.parse(part).count


def with_ends(batch: bytearray, ends: list[int], *, flags: int | None = None) -> bytearray:
    """A batch that is not packed, with other ends of its values, as somebody would send it who means harm."""
    at = Batch.parse(batch, verify=False).sections.value_ends
    batch[at : at + 4 * len(ends)] = array("I", ends).tobytes()
    if flags is not None:
        batch[60:62] = flags.to_bytes(2, "little")
    batch[8:12] = crc32c(memoryview(batch)[36:]).to_bytes(4, "little")
    return batch


@pytest.mark.parametrize("keys", [None, [b"k"] * 4], ids=["plain", "keys"])
@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([b"a", b"bb", b"c", b"d"], [0, 1, 5, 4, 5]),
        ([b"a", b"bb", b"c", b"d"], [0, 5, 1, 5, 5]),
        ([b"a", b"bb", b"c", b"d"], [1, 1, 3, 4, 5]),
        ([b"a", b"bb", b"c", b"d"], [0, 1, 3, 2**32 - 1, 5]),
        ([b"aa", b"bb", b"cc", b"dd"], [0, 1, 4, 6, 8]),
        ([b"a", b"b", b"c", b"d"], [0, 0, 0, 0, 3]),
        ([b"aa", b"bb", b"cc", b"dd"], [0, 2, 4, 6, 7]),
    ],
    ids=["descend", "alternate", "not from 0", "negative", "one size, uneven", "one size, too few", "one size, a rest"],
)
def test_a_batch_that_cannot_be_cut_is_refused_before_it_is_stored(
    values: list[bytes], ends: list[int], keys: list[bytes | None] | None
) -> None:
    wrong = with_ends(encode_batch(values, base_timestamp_us=0, keys=keys), ends)
    for batch in (wrong, repacked(wrong, bytes(wrong[HEADER_BYTES:]), codec=1)):
        with pytest.raises(BatchDamaged, match=r"ends|one size"):
            check_batch(batch, 0, len(batch))


def test_a_priority_that_no_header_can_name_is_refused_before_it_is_stored() -> None:
    batch = encode_batch([b"x"] * 8, base_timestamp_us=0, priorities=[7] * 8)
    check_batch(batch, 0, len(batch))
    batch[HEADER_BYTES + 3] = 8
    batch[8:12] = crc32c(memoryview(batch)[36:]).to_bytes(4, "little")
    with pytest.raises(BatchDamaged, match="they are 0 to 7"):
        check_batch(batch, 0, len(batch))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_few_bytes_cannot_become_gigabytes(packed: bool) -> None:
    """Ends that go back and forth would give nearly all of the heap to every second message."""
    heap, count = 1_000_000, 400
    wrong = encode_batch([bytes(heap - count), *[b"x"] * count], base_timestamp_us=0)
    wrong = with_ends(wrong, [0, *[1, heap] * (count // 2), heap])
    batch = repacked(wrong, bytes(wrong[HEADER_BYTES:]), codec=2) if packed else wrong
    assert len(batch) < (1000 if packed else 2 * heap)
    tracemalloc.start()
    try:
        with pytest.raises(BatchDamaged):
            check_storable(memoryview(batch), 100_000, 0)
        with pytest.raises(BatchDamaged):
            Batch.parse(batch, verify=False).values()
        with pytest.raises(BatchDamaged):
            select_messages(bytes(batch), int("10" * (count // 2), 2))
        assert tracemalloc.get_traced_memory()[1] < 10 * heap
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(0, 9000), st.booleans())
def test_many_ends_are_compared_as_one_by_one(some: list[int], more: int, in_order: bool) -> None:
    ends = [0] * more + (sorted(some) if in_order else some)
    column = memoryview(array("I", ends).tobytes())
    if ends == sorted(ends):
        check_ascending(column)
    else:
        with pytest.raises(BatchDamaged):
            check_ascending(column)


def test_a_null_among_values_of_one_size_stays_one() -> None:
    """No encoder of ours says both, but another one may: the bytes of a null are there and mean nothing."""
    raw = encode_batch([b"aa", None, b"cc"], base_timestamp_us=0)
    at = Batch.parse(raw, verify=False).sections.values
    raw[at : at + 8] = b"aabbcc\0\0"
    raw = with_ends(raw, [0, 2, 4, 6], flags=128 | 512)
    check_batch(raw, 0, len(raw))
    assert Batch.parse(raw, verify=False).values() == [b"aa", None, b"cc"]


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
