"""Stored batches become the rows that they hold, whatever columns, codecs and sizes they have."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BatchDamaged, InvalidArgument
from millstream.records import CRC_FROM, Batch, Columns, encode_headers, stamp
from millstream.spark import stored as stored_module
from millstream.spark.columns import COLUMNS, STANDARD, columns_of
from millstream.spark.decoding import BatchDecoder
from tests.spark.stored_rows import UID, arrow_rows, rows_of, stored_batch, stored_batches

EVERYTHING = columns_of(headers=True, priority=True, ids=True)
ALL = {"first": 0, "until": 2**62}


def decoder(columns: Any = EVERYTHING, **options: Any) -> BatchDecoder:
    return BatchDecoder(columns, topic="orders", partition=7, uid=UID, **options)


def decode(*feeds: bytes, columns: Any = EVERYTHING, rows_per_batch: int = 65_536, **span: Any) -> list[dict[str, Any]]:
    reader = decoder(columns, rows_per_batch=rows_per_batch)
    found = [batch for feed in feeds for batch in reader.feed(feed, **{**ALL, **span})]
    return arrow_rows([*found, *reader.finish()], columns)


#: Whether batches are joined one by one, as long ones are, or message by message.
both_ways_of_joining = pytest.mark.parametrize("long_rows", [1, 10_000], ids=["long", "short"])


@contextmanager
def long_from(rows: int) -> Iterator[None]:
    with patch.object(stored_module, "_LONG_ROWS", rows):
        yield


@both_ways_of_joining
@given(stored=stored_batches())
def test_any_batches_become_the_rows_they_hold(stored: list[bytes], long_rows: int) -> None:
    with long_from(long_rows):
        assert decode(b"".join(stored)) == rows_of(stored, EVERYTHING)


@given(stored_batches(), st.data())
def test_a_range_of_offsets_is_cut_out_exactly(stored: list[bytes], data: st.DataObject) -> None:
    start, end = Batch.parse(stored[0]).base_offset, Batch.parse(stored[-1]).next_offset
    first = data.draw(st.integers(start - 2, end + 2))
    until = data.draw(st.integers(first, end + 2))
    assert decode(b"".join(stored), first=first, until=until) == rows_of(stored, EVERYTHING, first=first, until=until)


@given(stored_batches(), st.data())
def test_it_does_not_matter_how_batches_are_fed(stored: list[bytes], data: st.DataObject) -> None:
    feeds: list[bytes] = [b""]
    for batch in stored:
        if data.draw(st.booleans()):
            feeds.append(b"")
        feeds[-1] += batch
    rows_per_batch = data.draw(st.integers(1, 20))
    assert decode(*feeds, rows_per_batch=rows_per_batch) == rows_of(stored, EVERYTHING)


@given(stored_batches(), st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, unique=True))
def test_columns_come_in_the_order_they_were_named(stored: list[bytes], names: list[str]) -> None:
    columns = columns_of(names)
    rows = decode(b"".join(stored), columns=columns)
    assert rows == rows_of(stored, columns)
    assert list(rows[0]) == names


@given(stored_batches(), st.integers(1, 7))
def test_a_buffer_may_start_at_any_address(stored: list[bytes], shift: int) -> None:
    data = memoryview(bytes(shift) + b"".join(stored))[shift:]
    assert decode(data) == rows_of(stored, EVERYTHING)


def test_a_large_batch_is_handed_out_as_it_lies_in_memory() -> None:
    batch = stored_batch(10, values=[b"%5d" % i for i in range(5_000)])
    (rows,) = decoder(columns_of(["value"])).feed(batch, **ALL)
    heap = rows.column(0).buffers()[2]
    assert pa.py_buffer(batch).address <= heap.address < pa.py_buffer(batch).address + len(batch)
    assert rows.num_rows == 5_000


def test_many_small_batches_become_few_record_batches() -> None:
    stored = [stored_batch(i, values=[b"x"], keys=[b"k"]) for i in range(10_000)]
    reader = decoder(columns_of())
    batches = [*reader.feed(b"".join(stored), **ALL), *reader.finish()]
    assert [batch.num_rows for batch in batches] == [10_000]
    # Fed one by one they are still joined.
    batches = [rows for batch in stored[:500] for rows in reader.feed(batch, **ALL)]
    assert not batches
    assert [batch.num_rows for batch in reader.finish()] == [500]


def test_a_batch_larger_than_a_record_batch_is_cut() -> None:
    batch = stored_batch(0, values=[b"%d" % i for i in range(2_500)])
    reader = decoder(columns_of(["value", "topic", "offset"]), rows_per_batch=1_000)
    assert [rows.num_rows for rows in reader.feed(batch, **ALL)] == [834, 834, 832]


def test_batches_for_the_broker_alone_are_no_rows() -> None:
    control = bytearray(stored_batch(5, values=[b"not for users"]))
    flags = struct.unpack_from("<H", control, 60)[0] | int(Columns.CONTROL)
    stored = [stored_batch(4, values=[b"a"]), _with_flags(control, flags), stored_batch(6, values=[b"b"])]
    assert [row["value"] for row in decode(b"".join(stored))] == [b"a", b"b"]
    assert decode(stored[1]) == []


def test_headers_that_are_none_are_shown_as_bytes() -> None:
    good = encode_headers({"a": "b"})
    rows = decode(stored_batch(0, values=[b"x", b"y", b"z"], headers=[good, b"\xff\xff rubbish", b""]))
    assert rows[0]["headers"] == [{"key": "a", "value": b"b"}]
    assert rows[1]["headers"] == [{"key": "millstream-unreadable-headers", "value": b"\xff\xff rubbish"}]
    assert rows[2]["headers"] is None


@pytest.mark.parametrize(
    "raw", [b"\x01", b"\x01\x00a\x01\x00", b"\x01\x00a\x09\x00\x00\x00v", b"\x00\x00\xff\xff\xff\xff"]
)
def test_headers_that_end_too_early_do_not_reach_into_those_of_others(raw: bytes) -> None:
    others = encode_headers({"other": "message"})
    rows = decode(stored_batch(0, values=[b"x", b"y"], headers=[raw, others]))
    assert rows[0]["headers"] == [{"key": "millstream-unreadable-headers", "value": raw}]
    assert rows[1]["headers"] == [{"key": "other", "value": b"message"}]


def test_header_names_that_are_no_text_are_made_readable() -> None:
    raw = b"\x02\x00\xff!\x01\x00\x00\x00v"
    (row,) = decode(stored_batch(0, values=[b"x"], headers=[raw]))
    assert row["headers"] == [{"key": "\ufffd!", "value": b"v"}]


@given(stored_batches(codecs=(0,), batches_max=3), st.data())
def test_every_flipped_bit_is_noticed_and_what_stands_before_is_kept(stored: list[bytes], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(stored) - 1))
    bit = data.draw(st.integers(0, 8 * len(stored[number]) - 1))
    bad = bytearray(stored[number])
    bad[bit // 8] ^= 1 << bit % 8
    reader = decoder()
    found: list[pa.RecordBatch] = []
    with pytest.raises(BatchDamaged, match=r"orders/7: the batch with offset.* cannot be read: "):
        found.extend(reader.feed(b"".join([*stored[:number], bad, *stored[number + 1 :]]), **ALL))
    assert arrow_rows([*found, *reader.finish()], EVERYTHING) == rows_of(stored[:number], EVERYTHING)


def test_damage_names_the_offsets_that_are_lost() -> None:
    stored = [stored_batch(0, values=[b"a"] * 10), stored_batch(10, values=[b"b"] * 10)]
    data = bytearray(b"".join(stored))
    data[-1] ^= 1
    with pytest.raises(BatchDamaged, match="orders/7: the batch with offsets 10 to 19 cannot be read: it does not"):
        list(decoder().feed(bytes(data), **ALL))
    data[-len(stored[1]) + 16] ^= 1
    with pytest.raises(BatchDamaged, match="the batch with offset 10 and behind it cannot be read: its header"):
        list(decoder().feed(bytes(data), **ALL))


def test_damage_behind_the_range_is_nobodys_concern() -> None:
    stored = [stored_batch(0, values=[b"a"] * 10), stored_batch(10, values=[b"b"] * 10)]
    data = b"".join(stored)[:-1] + b"\xff"
    assert len(decode(data, until=10)) == 10


@given(stored_batches(batches_max=3), st.data())
def test_a_torn_end_is_noticed(stored: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(stored[:-1])
    cut = data.draw(st.integers(1, len(stored[-1]) - 1))
    reader = decoder()
    with pytest.raises(BatchDamaged):
        list(reader.feed(whole + stored[-1][:cut], **ALL))


@both_ways_of_joining
@given(stored=stored_batches(batches_max=3), data=st.data())
def test_a_lie_with_valid_checksums_crashes_nobody(stored: list[bytes], data: st.DataObject, long_rows: int) -> None:
    """A producer may compute any checksum it likes; a reader answers with rows that hold or with our own error."""
    number = data.draw(st.integers(0, len(stored) - 1))
    lie = bytearray(stored[number])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(CRC_FROM, len(lie) - 1))
        lie[place] = data.draw(st.integers(0, 255))
    _stamp_again(lie)
    feed = b"".join([*stored[:number], lie, *stored[number + 1 :]])
    reader = decoder()
    try:
        with long_from(long_rows):
            found = list(reader.feed(feed, **ALL))
    except BatchDamaged:
        return
    for batch in [*found, *reader.finish()]:
        batch.validate(full=True)


@both_ways_of_joining
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("number", "end"), [(0, 1), (1, 9), (2, 1), (3, 80), (3, 2), (2, 2**31), (2, 2**32 - 1)])
def test_ends_that_do_not_hold_are_damage(alone: bool, number: int, end: int, long_rows: int) -> None:
    """Ends are given to Arrow as they are, which would read whatever lies in memory there."""
    good, lie = stored_batch(0, values=[b"good"]), bytearray(stored_batch(1, values=[b"ab", b"cd", b"ef"]))
    struct.pack_into("<I", lie, 64 + 4 * number, end)
    _stamp_again(lie)
    with long_from(long_rows), pytest.raises(BatchDamaged, match="the batch with offsets 1 to 3 cannot be read"):
        list(decoder().feed(lie if alone else good + lie, **ALL))


def test_offsets_out_of_order_are_damage() -> None:
    stored = stored_batch(10, values=[b"a"] * 10) + stored_batch(15, values=[b"b"])
    with pytest.raises(BatchDamaged, match="offsets 15 to 15 cannot be read: its offsets are not in order"):
        list(decoder().feed(stored, **ALL))


def test_nothing_fed_is_nothing_read() -> None:
    assert decode(b"") == []
    assert decode() == []


def test_columns_are_those_of_the_kafka_source() -> None:
    assert columns_of().names == STANDARD
    assert columns_of().ddl == (
        "key binary, value binary, topic string not null, partition int not null, offset bigint not null, "
        "timestamp timestamp not null, timestampType int not null"
    )
    assert columns_of(headers=True).names[-1] == "headers"
    assert columns_of(["offset"], nullable=["offset"]).ddl == "offset bigint"
    assert columns_of(["headers"]).arrow_schema.field(0).type.value_field.name == "element"
    with pytest.raises(InvalidArgument, match=r"there is no column 'timestamp_type'; did you mean 'timestampType'\?"):
        columns_of(["timestamp_type"])
    with pytest.raises(InvalidArgument, match="column 'key' is named twice"):
        columns_of(["key", "key"])


def _with_flags(batch: bytearray, flags: int) -> bytes:
    struct.pack_into("<H", batch, 60, flags)
    _stamp_again(batch)
    return bytes(batch)


def _stamp_again(batch: bytearray) -> None:
    struct.pack_into("<I", batch, 8, crc32c(memoryview(batch)[CRC_FROM:]))
    (epoch, base, time_us) = struct.unpack_from("<IQq", batch, 12)
    stamp(memoryview(batch), 0, base_offset=base, append_time_us=time_us, leader_epoch=epoch)
