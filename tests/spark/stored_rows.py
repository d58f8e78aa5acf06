"""What tests of the Spark formats share: any stored batches, and the rows that `records.Batch` finds in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from millstream.headers import encode_headers, readable_headers
from millstream.ids import message_id
from millstream.records import PRIORITY_DEFAULT, Batch, encode_batch, stamp
from millstream.spark.columns import Columns

TIMES = st.integers(0, 2**62)
UID = 0xCAFE_F00D


@st.composite
def batch_columns(draw: st.DrawFn, *, codecs: Sequence[int] = (0, 1, 2), messages_max: int = 12) -> dict[str, Any]:
    """The arguments of `encode_batch` for any batch."""
    count = draw(st.integers(1, messages_max))

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(items, min_size=count, max_size=count))

    values = draw(st.lists(st.none() | st.binary(max_size=40), min_size=count, max_size=count))
    if draw(st.booleans()):
        values = [bytes(draw(st.integers(0, 30)))] * count
    headers = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3).map(encode_headers)
    steps = column(st.integers(1, 9))
    return {
        "values": values,
        "keys": column(st.none() | st.binary(max_size=10)),
        "headers": column(headers),
        "priorities": column(st.integers(0, 4)),
        "deliver_at_us": column(TIMES),
        "expiry_us": column(TIMES),
        "timestamps_us": column(TIMES),
        "offsets": steps and [sum(steps[:i]) for i in range(count)],
        "base_timestamp_us": draw(TIMES),
        "codec": draw(st.sampled_from(codecs)),
    }


@st.composite
def stored_batches(draw: st.DrawFn, *, batches_max: int = 6, **limits: Any) -> list[bytes]:
    """Batches as they lie behind each other in a segment, with gaps where compaction took some out."""
    offset = draw(st.integers(0, 2**47) | st.just(2**40 - 5))
    stored = []
    for columns in draw(st.lists(batch_columns(**limits), min_size=1, max_size=batches_max)):
        offset += draw(st.integers(0, 3))
        stored.append(stored_batch(offset, append_time_us=draw(TIMES), **columns))
        offset = Batch.parse(stored[-1]).next_offset
    return stored


def stored_batch(base_offset: int, *, append_time_us: int = 0, **columns: Any) -> bytes:
    batch = encode_batch(**{"base_timestamp_us": 0, **columns})
    stamp(memoryview(batch), 0, base_offset=base_offset, append_time_us=append_time_us, leader_epoch=3)
    return bytes(batch)


def rows_of(stored: Iterable[bytes], columns: Columns, *, first: int = 0, until: int = 2**62) -> list[dict[str, Any]]:
    """The rows as plain Python finds them."""
    return [
        {name: row[name] for name in columns.names}
        for data in stored
        for row in _rows(Batch.parse(data))
        if first <= row["offset"] < until
    ]


def _rows(batch: Batch) -> Iterable[dict[str, Any]]:
    nothing = [None] * batch.count
    for offset, key, value, headers, time_us, priority in zip(
        batch.offsets(),
        batch.keys() or nothing,
        batch.values(),
        batch.raw_headers() or nothing,
        batch.timestamps_us() or [batch.header.base_timestamp_us] * batch.count,
        batch.priorities() or [PRIORITY_DEFAULT] * batch.count,
        strict=True,
    ):
        yield {
            "key": key,
            "value": value,
            "topic": "orders",
            "partition": 7,
            "offset": offset,
            "timestamp": time_us,
            "timestampType": 0,
            "headers": [{"key": name, "value": item} for name, item in readable_headers(headers)] or None,
            "priority": priority,
            "id": message_id(batch.append_time_us, UID, offset),
        }


def arrow_rows(batches: Iterable[pa.RecordBatch], columns: Columns) -> list[dict[str, Any]]:
    """The rows of record batches, which are checked for being what they claim.  Times are numbers."""
    found: list[dict[str, Any]] = []
    for batch in batches:
        assert batch.schema.equals(columns.arrow_schema, check_metadata=True)
        batch.validate(full=True)
        assert batch.num_rows, "an empty record batch says nothing"
        if "timestamp" in batch.schema.names:
            place = batch.schema.get_field_index("timestamp")
            batch = batch.set_column(place, "timestamp", batch.column(place).cast(pa.int64()))
        found += batch.to_pylist()
    return found
