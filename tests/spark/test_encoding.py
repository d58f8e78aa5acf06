"""What Spark writes is what any reader of a batch reads, in the partition where any producer would have put it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvalidArgument, InvalidName, PayloadTooLarge
from millstream.ids import SCHEDULES
from millstream.partitioning import key_partition
from millstream.records import PRIORITY_DEFAULT, Batch, Columns, check_batch, decode_headers
from millstream.spark.columns import COLUMNS, columns_of
from millstream.spark.decoding import BatchDecoder
from millstream.spark.encoding import BatchEncoder, EncodedBatch
from tests.spark.stored_rows import stored_batch

NOW = 1_700_000_000_000_000
TIMES = st.integers(1, 4_000_000_000_000_000)
TYPES = {name: COLUMNS[name][1] for name in ("key", "value", "headers", "topic", "partition", "priority", "timestamp")}
TYPES["deliverAt"] = TYPES["timestamp"]
HEADERS = st.lists(
    st.fixed_dictionaries({"key": st.text(max_size=5), "value": st.none() | st.binary(max_size=5)}), max_size=3
)
CELLS: dict[str, st.SearchStrategy[Any]] = {
    "value": st.none() | st.binary(max_size=30),
    "key": st.none() | st.binary(max_size=10),
    "headers": st.none() | HEADERS,
    "topic": st.sampled_from(["orders", "orders.eu", "payments"]),
    "partition": st.none() | st.integers(0, 2),
    "priority": st.none() | st.integers(0, 4),
    "timestamp": st.none() | TIMES,
    "deliverAt": st.none() | TIMES,
}


@st.composite
def tables(draw: st.DrawFn, *always: str) -> pa.RecordBatch:
    names = {"value", *always, *draw(st.sets(st.sampled_from(sorted(CELLS))))}
    count = draw(st.integers(1, 15))
    columns = {name: draw(st.lists(CELLS[name], min_size=count, max_size=count)) for name in sorted(names)}
    batch = pa.record_batch({name: pa.array(cells, TYPES[name]) for name, cells in columns.items()})
    start = draw(st.integers(0, count - 1))
    return batch.slice(start) if draw(st.booleans()) else batch


def encode(rows: pa.RecordBatch, *, partitions: int = 3, **options: Any) -> list[EncodedBatch]:
    encoder = BatchEncoder(partitions=lambda _: partitions, **{"topic": "orders", **options})
    return list(encoder.encode(rows, now_us=NOW))


def read(batches: list[EncodedBatch]) -> Iterator[dict[str, Any]]:
    """The rows as plain Python finds them; batches are checked as the broker checks them."""
    for topic, partition, messages, data in batches:
        check_batch(data, 0, len(data))
        batch = Batch.parse(data, verify=False)
        assert batch.count == messages
        nothing = [None] * messages
        raw = batch.raw_headers() or nothing
        times = batch.timestamps_us() or [batch.header.base_timestamp_us] * messages
        lanes = batch.priorities() or [PRIORITY_DEFAULT] * messages
        assert batch.header.priorities == sum(1 << lane for lane in set(lanes))
        if batch.deliver_at_us() is not None:
            assert struct.unpack_from("<q", data, 64) == (batch.earliest_deliver_at_us,)
        cells = zip(
            batch.keys() or nothing, batch.values(), raw, times, lanes, batch.deliver_at_us() or nothing, strict=True
        )
        for key, value, headers, time_us, priority, due in cells:
            yield {
                "topic": topic,
                "partition": partition,
                "key": key,
                "value": value,
                "headers": decode_headers(headers),
                "timestamp": time_us,
                "priority": priority,
                "deliverAt": due,
            }


def expected(rows: pa.RecordBatch, topic: str | None = "orders") -> list[dict[str, Any]]:
    for name in {"timestamp", "deliverAt"}.intersection(rows.schema.names):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, name, rows.column(place).cast(pa.int64()))
    return [
        {
            "topic": topic or row["topic"],
            "key": row.get("key"),
            "value": row["value"],
            "headers": [(item["key"], item["value"] or b"") for item in row.get("headers") or ()],
            "timestamp": NOW if row.get("timestamp") is None else row["timestamp"],
            "priority": PRIORITY_DEFAULT if row.get("priority") is None else row["priority"],
            "deliverAt": row.get("deliverAt"),
        }
        for row in rows.to_pylist()
    ]


def in_any_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(str(sorted(row.items(), key=lambda item: item[0])) for row in rows)


@given(tables(), st.sampled_from((0, 1, 2)), st.integers(50, 2_000))
def test_any_rows_are_read_back_by_any_reader(rows: pa.RecordBatch, codec: int, batch_bytes: int) -> None:
    batches = encode(rows, codec=codec, batch_bytes=batch_bytes)
    found = [{name: cell for name, cell in row.items() if name != "partition"} for row in read(batches)]
    assert in_any_order(found) == in_any_order(expected(rows))


@given(tables("topic"))
def test_each_row_goes_to_the_topic_it_names(rows: pa.RecordBatch) -> None:
    batches = encode(rows, topic=None)
    found = [{name: cell for name, cell in row.items() if name != "partition"} for row in read(batches)]
    assert in_any_order(found) == in_any_order(expected(rows, None))


@given(tables("key"), st.integers(1, 7))
def test_a_row_goes_where_it_says_or_where_its_key_belongs(rows: pa.RecordBatch, partitions: int) -> None:
    named = rows.schema.get_field_index("partition")
    if named >= 0:
        rows = rows.set_column(named, "partition", pa.array([0] * rows.num_rows, pa.int32()))
    for row in read(encode(rows, partitions=partitions)):
        partition = row["partition"]
        assert (partition >= SCHEDULES) == (row["deliverAt"] is not None)
        if named >= 0:
            assert partition % SCHEDULES == 0
        elif row["key"] is not None:
            assert partition % SCHEDULES == key_partition(row["key"], partitions)
        else:
            assert 0 <= partition % SCHEDULES < partitions


def test_rows_of_one_key_stay_in_their_order() -> None:
    keys = [b"%d" % (i % 17) for i in range(5_000)]
    rows = pa.record_batch({"key": pa.array(keys), "value": pa.array([b"%d" % i for i in range(5_000)])})
    seen: dict[bytes, int] = {}
    for row in read(encode(rows, batch_bytes=1_000)):
        assert seen.get(row["key"], -1) < int(row["value"])
        seen[row["key"]] = int(row["value"])
    assert len(seen) == 17


@pytest.mark.parametrize("different", [3, 1_000])
def test_keys_find_their_partition_whether_they_come_again_or_not(different: int) -> None:
    encoder = BatchEncoder(partitions=lambda _: 7, topic="orders")
    for first in (0, 1_000):  # the second time it is known which of the two it is
        keys = [b"%d" % (first + i % different) for i in range(1_000)]
        rows = pa.record_batch({"key": pa.array(keys), "value": pa.array(keys)})
        for row in read(list(encoder.encode(rows, now_us=NOW))):
            assert row["partition"] == key_partition(row["key"], 7)


def test_rows_without_a_key_take_turns() -> None:
    rows = pa.record_batch({"value": pa.array([b"x"] * 6_000)})
    assert [(batch.partition, batch.messages) for batch in encode(rows)] == [(0, 2_000), (1, 2_000), (2, 2_000)]
    encoder = BatchEncoder(partitions=lambda _: 3, topic="orders", start=2)
    few = rows.slice(0, 10)
    turns = [batch.partition for _ in range(5) for batch in encoder.encode(few, now_us=NOW)]
    assert turns == [2, 0, 1, 2, 0]


def test_batches_are_a_megabyte_at_most_unless_one_message_is_larger() -> None:
    values = [bytes(100_000)] * 25 + [bytes(1_500_000)] + [bytes(100_000)] * 3
    batches = encode(pa.record_batch({"value": pa.array(values)}), partitions=1)
    assert [batch.messages for batch in batches] == [10, 10, 5, 1, 3]
    assert [len(batch.batch) <= 1024 * 1024 for batch in batches] == [True, True, True, False, True]


def test_a_partition_for_everything_leaves_keys_alone() -> None:
    rows = pa.record_batch({"key": pa.array([b"a", b"b", b"c"]), "value": pa.array([b"1", b"2", b"3"])})
    (batch,) = encode(rows, partition=2)
    assert (batch.partition, batch.messages) == (2, 3)


def test_bytes_under_a_null_are_not_published() -> None:
    secret = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(b"\0\0\0\0\6\0\0\0\7\0\0\0"), pa.py_buffer(b"secretx")]
    )
    assert secret.to_pylist() == [None, b"x"]
    (batch,) = encode(pa.record_batch({"key": secret, "value": secret}), partition=0)
    assert b"secret" not in batch.batch
    assert [row["value"] for row in read([batch])] == [None, b"x"]


def test_text_is_written_as_it_is_and_values_of_one_size_say_so() -> None:
    rows = pa.record_batch({"key": pa.array(["k", None]), "value": pa.array(["grün", "blau!"], pa.large_string())})
    (batch,) = encode(rows, partition=0)
    assert [(row["key"], row["value"]) for row in read([batch])] == [(b"k", "grün".encode()), (None, b"blau!")]
    assert Batch.parse(batch.batch, verify=False).header.flags & int(Columns.FIXED_VALUES)


def test_priorities_have_names_too() -> None:
    rows = pa.record_batch({"value": pa.array(["a", "b", "c"]), "priority": pa.array(["critical", None, "low"])})
    assert [row["priority"] for row in read(encode(rows, partition=0))] == [0, 2, 3]


def test_times_of_any_unit_and_zone_are_the_same_moment() -> None:
    moment = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    for kind in (pa.timestamp("s", "Asia/Tokyo"), pa.timestamp("ns", "UTC"), pa.timestamp("ms")):
        given = moment.replace(tzinfo=None) if kind.tz is None else moment
        rows = pa.record_batch({"value": pa.array([b"x"]), "timestamp": pa.array([given], kind)})
        (row,) = read(encode(rows))
        assert row["timestamp"] == int(moment.timestamp()) * 1_000_000


def test_a_time_of_delivery_in_1970_is_now() -> None:
    rows = pa.record_batch({"value": pa.array([b"x", b"y"]), "deliverAt": pa.array([0, -5], TYPES["deliverAt"])})
    assert [(row["partition"], row["deliverAt"]) for row in read(encode(rows, partition=1))] == [(1, None)] * 2


def test_what_was_read_can_be_written() -> None:
    stored = stored_batch(5, values=[b"a", None, b"c"], keys=[b"k", None, b"m"], timestamps_us=[1, 2, 3])
    reader = BatchDecoder(columns_of(headers=True, priority=True, ids=True), topic="orders", partition=0)
    rows = [*reader.feed(stored, first=0, until=99), *reader.finish()]
    (batch,) = encode(rows[0])
    assert [(row["key"], row["value"], row["timestamp"]) for row in read([batch])] == [
        (b"k", b"a", 1),
        (None, None, 2),
        (b"m", b"c", 3),
    ]


VALUE = pa.array([b"x"])


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"value": VALUE, "Priority": pa.array([1])}, "column 'Priority' cannot be written; did you mean 'priority'?"),
        ({"value": VALUE, "deliver_at": VALUE}, "column 'deliver_at' cannot be written; did you mean 'deliverAt'?"),
        ({"value": VALUE, "x": VALUE}, "column 'x' cannot be written; there are key, value, headers, topic"),
        ({"key": VALUE}, "there is no column 'value'"),
        ({"value": pa.array([1])}, "column 'value' is int64, but must be binary or string"),
        ({"value": VALUE, "headers": pa.array([["a"]])}, "column 'headers' is list<.*>, but must be array<struct"),
        ({"value": VALUE, "priority": pa.array([5])}, "priority is one of critical, high, .* or 0 to 4, not 5"),
        ({"value": VALUE, "priority": pa.array(["urgent"])}, "or 0 to 4, not 'urgent'"),
        ({"value": VALUE, "partition": pa.array([3])}, "topic 'orders' has no partition 3: it has 3, counted from 0"),
        ({"value": VALUE, "headers": pa.array([[None]], TYPES["headers"])}, "has a header that is null"),
        ({"value": VALUE, "headers": pa.array([[{"key": None}]], TYPES["headers"])}, "has a header without a key"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_sentence(columns: dict[str, pa.Array], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence.replace("?", r"\?")):
        encode(pa.record_batch(columns))


def test_a_row_must_say_where_it_goes() -> None:
    with pytest.raises(InvalidArgument, match="neither a column 'topic' nor an option"):
        encode(pa.record_batch({"value": VALUE}), topic=None)
    with pytest.raises(InvalidArgument, match="column 'topic' has a null"):
        encode(pa.record_batch({"value": VALUE, "topic": pa.array([None], pa.string())}), topic=None)
    with pytest.raises(InvalidName, match="topic 'no such!' is not valid"):
        encode(pa.record_batch({"value": VALUE, "topic": pa.array(["no such!"])}), topic=None)


def test_a_header_name_has_its_limit() -> None:
    headers = pa.array([[{"key": "n" * 65_536, "value": b""}]], TYPES["headers"])
    with pytest.raises(PayloadTooLarge, match="a header name has 65535 bytes at most"):
        encode(pa.record_batch({"value": VALUE, "headers": headers}))


def test_no_rows_are_no_batches_but_their_columns_are_checked() -> None:
    assert encode(pa.record_batch({"value": pa.array([], pa.binary())})) == []
    with pytest.raises(InvalidArgument, match="cannot be written"):
        encode(pa.record_batch({"value": pa.array([], pa.binary()), "valeu": VALUE.slice(1)}))
