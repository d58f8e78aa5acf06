"""From Arrow to batches: what Spark writes.

A record batch is divided by topic and partition, each part is cut into batches of at most a megabyte, and each batch is
put together from slices of Arrow's own buffers.  Only keys are looked at one by one, for their partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import repeat
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from millstream.compression import compress
from millstream.entries import PRIORITIES
from millstream.errors import InvalidArgument
from millstream.ids import SCHEDULES
from millstream.names import check_topic
from millstream.records import CRC_FROM, MAGIC, PRIORITY_DEFAULT, VERSION, Columns
from millstream.spark.columns import COLUMNS, WRITTEN, suggestion
from millstream.spark.header_columns import headers_to_rows

__all__ = ["BATCH_BYTES", "BatchEncoder", "EncodedBatch", "check_columns"]

Longs: TypeAlias = npt.NDArray[np.int64]

#: What a batch holds at most, unless a single message is larger.
BATCH_BYTES: Final = 1024 * 1024
#: Messages without a key change to the next partition after so many: smaller batches cost more than they spread.
_RUN_MIN: Final = 1_000
_MESSAGE_BYTES: Final = 16  # about what a message takes in the columns beside its bytes
#: What comes with rows that were read, and what the broker gives anew: no mistake to write, and not written.
_NOT_WRITTEN: Final = frozenset(COLUMNS).difference(WRITTEN)
_PRIORITY, _DELIVER_AT, _TIMESTAMPS = int(Columns.PRIORITY), int(Columns.DELIVER_AT), int(Columns.TIMESTAMPS)
_KEYS, _KEY_NULLS, _HEADERS = int(Columns.KEYS), int(Columns.KEY_NULLS), int(Columns.HEADERS)
_VALUE_NULLS, _FIXED_VALUES = int(Columns.VALUE_NULLS), int(Columns.FIXED_VALUES)
_HEAD: Final = Struct("<HBBIIIQqI")
_TAIL: Final = Struct("<IQqIHBB")
_I64: Final = Struct("<q")
_PADDING: Final = tuple(bytes(n) for n in range(8))
_TIME: Final = pa.timestamp("us", tz="UTC")


class EncodedBatch(NamedTuple):
    """A batch and where it goes: a partition, or with SCHEDULES added the log of what is scheduled for it."""

    topic: str
    partition: int
    messages: int
    batch: bytearray


class BatchEncoder:
    """Turns record batches into batches for the broker.

    `partitions` tells how many partitions a topic has.  `topic` is for rows that name none, `partition` for all rows.
    Rows with a key go where any producer would send them, rows without one in turn to each partition, from `start` on.
    """

    def __init__(
        self,
        *,
        partitions: Callable[[str], int],
        topic: str | None = None,
        partition: int | None = None,
        codec: int = 0,
        start: int = 0,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._partitions = partitions
        self._topic = topic
        self._partition = partition
        self._codec = codec
        self._next = start
        self._batch_bytes = batch_bytes
        #: As far as is known: where keys are all different, to look for equal ones takes longer than to hash them.
        self._keys_repeat = True

    def encode(self, rows: pa.RecordBatch, *, now_us: int) -> Iterator[EncodedBatch]:
        """The rows as batches; those of one partition stay in their order.  Raises InvalidArgument for bad columns."""
        check_columns(rows.schema, topic=self._topic)
        if not rows.num_rows:
            return
        known = _Rows.of(rows, now_us)
        for topic, those in known.by_topic() if self._topic is None else ((check_topic(self._topic), known),):
            numbers, ordered = self._by_partition(topic, those)
            for first, last in ordered.runs(numbers, self._batch_bytes):
                batch = ordered.encode(first, last, now_us=now_us, codec=self._codec)
                yield EncodedBatch(topic, int(numbers[first]), last - first, batch)

    def _by_partition(self, topic: str, those: _Rows) -> tuple[Longs, _Rows]:
        """The rows ordered by partition, and the partition of each."""
        numbers = self._numbers(topic, those, self._partitions(topic))
        if those.deliver_at is not None:
            numbers = numbers + np.where(those.deliver_at != 0, SCHEDULES, 0)
        if (numbers[1:] >= numbers[:-1]).all():
            return numbers, those
        order = np.argsort(numbers, kind="stable")
        return numbers[order], those.take(order)

    def _numbers(self, topic: str, those: _Rows, count: int) -> Longs:
        """The partition of every row."""
        rows = those.count
        if self._partition is not None:
            numbers = np.full(rows, self._partition, np.int64)
        elif those.partition is None:
            numbers = self._spread(those.key, rows, count)
        else:
            named = those.partition
            numbers = pc.fill_null(named, -1).to_numpy(zero_copy_only=False).astype(np.int64)
            if named.null_count:
                unnamed = named.is_null().to_numpy(zero_copy_only=False)
                keys = None if those.key is None else those.key.filter(pa.array(unnamed))
                numbers[unnamed] = self._spread(keys, int(unnamed.sum()), count)
        wrong = (numbers < 0) | (numbers >= count)
        if wrong.any():
            number = int(numbers[wrong.argmax()])
            raise InvalidArgument(f"topic {topic!r} has no partition {number}: it has {count}, counted from 0")
        return numbers

    def _spread(self, keys: pa.BinaryArray | None, rows: int, count: int) -> Longs:
        if count == 1:
            return np.zeros(rows, np.int64)
        if keys is None or keys.null_count == rows:
            return self._in_turn(rows, count)
        of_keys = self._of_keys(keys.drop_null() if keys.null_count else keys, count)
        if not keys.null_count:
            return of_keys
        valid = keys.is_valid().to_numpy(zero_copy_only=False)
        numbers = np.empty(rows, np.int64)
        numbers[valid] = of_keys
        numbers[~valid] = self._in_turn(keys.null_count, count)
        return numbers

    def _of_keys(self, keys: pa.BinaryArray, count: int) -> Longs:
        """As partitioning.key_partition does, once for every different key as long as that is less work."""
        if not self._keys_repeat:
            return _hashed(keys, count)
        encoded = keys.dictionary_encode()
        self._keys_repeat = 2 * len(encoded.dictionary) < len(keys)
        of_keys: Longs = _hashed(encoded.dictionary, count)[encoded.indices.to_numpy()]
        return of_keys

    def _in_turn(self, rows: int, count: int) -> Longs:
        run = max(_RUN_MIN, -(-rows // count))
        numbers = (self._next + np.arange(rows) // run) % count
        self._next = (int(numbers[-1]) + 1) % count
        return numbers


def _hashed(keys: pa.BinaryArray, count: int) -> Longs:
    hashes = map(mmh3.hash, keys.to_pylist(), repeat(0), repeat(False))
    return np.fromiter(hashes, np.int64, len(keys)) % count


def check_columns(schema: pa.Schema, *, topic: str | None) -> None:
    """Raises InvalidArgument unless rows of this schema can be written."""
    for name in schema.names:
        if name not in WRITTEN and name not in _NOT_WRITTEN:
            raise InvalidArgument(f"column {name!r} cannot be written{suggestion(name, WRITTEN)}")
        if schema.names.count(name) > 1:
            raise InvalidArgument(f"there are two columns {name!r}")
    if "value" not in schema.names:
        raise InvalidArgument("there is no column 'value'; a message may have a null value, but it has one")
    if topic is None and "topic" not in schema.names:
        raise InvalidArgument("where to? There is neither a column 'topic' nor an option of that name")
    for field in schema:
        accepts = _ACCEPTED.get(field.name)
        if accepts is not None and not accepts[0](field.type):
            raise InvalidArgument(f"column {field.name!r} is {field.type}, but must be {accepts[1]}")


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def _is_bytes(kind: pa.DataType) -> bool:
    return _is_text(kind) or kind in (pa.binary(), pa.large_binary())


def _is_headers(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) and pa.types.is_struct(kind.value_type)):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return set(fields) == {"key", "value"} and _is_text(fields["key"]) and _is_bytes(fields["value"])


def _is_lane(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(pa.types.is_integer(kind))


_ACCEPTED: Final[dict[str, tuple[Callable[[pa.DataType], bool], str]]] = {
    "key": (_is_bytes, "binary or string"),
    "value": (_is_bytes, "binary or string; to_json, to_csv and cast make one of it"),
    "headers": (_is_headers, "array<struct<key:string,value:binary>>"),
    "topic": (_is_text, "string"),
    "partition": (pa.types.is_integer, "int"),
    "priority": (_is_lane, "int or string"),
    "deliverAt": (pa.types.is_timestamp, "timestamp"),
    "timestamp": (pa.types.is_timestamp, "timestamp"),
}


@dataclass(slots=True)
class _Rows:
    """Rows that can be written, each column as a batch wants it; None = no row has any."""

    count: int
    value: pa.BinaryArray
    key: pa.BinaryArray | None
    headers: pa.BinaryArray | None
    topic: pa.StringArray | None
    partition: pa.Array | None
    priority: npt.NDArray[np.uint8] | None
    deliver_at: Longs | None  # 0 = at once
    timestamp: Longs | None

    @classmethod
    def of(cls, rows: pa.RecordBatch, now_us: int) -> _Rows:
        given = {name: rows.column(name) for name in rows.schema.names}

        def column(name: str, read: Callable[[pa.Array], Any]) -> Any:
            return read(given[name]) if name in given and given[name].null_count < rows.num_rows else None

        return cls(
            rows.num_rows,
            given["value"].cast(pa.binary()),
            column("key", lambda keys: keys.cast(pa.binary())),
            column("headers", headers_to_rows),
            given.get("topic"),
            column("partition", lambda numbers: numbers),
            column("priority", _lanes),
            column("deliverAt", lambda times: np.maximum(_times(times, 0), 0)),
            column("timestamp", lambda times: _times(times, now_us)),
        )

    def by_topic(self) -> Iterator[tuple[str, _Rows]]:
        """The topics that rows name, and the rows of each."""
        if self.topic is None or self.topic.null_count:
            raise InvalidArgument("column 'topic' has a null, so it is not known where that row goes")
        encoded = self.topic.dictionary_encode()
        codes = encoded.indices.to_numpy()
        names = [check_topic(name) for name in encoded.dictionary.to_pylist()]
        for number, name in enumerate(names):
            yield name, self if len(names) == 1 else self.take(np.flatnonzero(codes == number))

    def take(self, chosen: Longs) -> _Rows:
        """Some of the rows."""
        index = pa.array(chosen)
        taken = {
            field.name: column.take(index) if isinstance(column, pa.Array) else column[chosen]
            for field in fields(self)
            if field.name not in ("count", "topic") and (column := getattr(self, field.name)) is not None
        }
        return replace(_NOTHING, count=len(chosen), **taken)

    def runs(self, numbers: Longs, size: int) -> Iterator[tuple[int, int]]:
        """Where to cut so that a batch is of one partition, and not larger than `size` unless a single message is."""
        ends = np.arange(0, _MESSAGE_BYTES * (self.count + 1), _MESSAGE_BYTES, dtype=np.int64)
        for column in (self.value, self.key, self.headers):
            if column is not None:
                ends += _ends(column)
        first = 0
        for border in (*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), self.count):
            while first < border:
                last = int(np.searchsorted(ends, ends[first] + size, "right")) - 1
                last = min(max(last, first + 1), border)
                yield first, last
                first = last

    def encode(self, first: int, last: int, *, now_us: int, codec: int) -> bytearray:
        """The rows from `first` to before `last` as a batch; see records.py for what stands where."""
        count = last - first
        flags, lanes = 0, 1 << PRIORITY_DEFAULT
        prelude = b""
        block: list[Any] = []
        heaps: list[Any] = []
        if self.priority is not None:
            part = self.priority[first:last]
            if (part != PRIORITY_DEFAULT).any():
                flags |= _PRIORITY
                lanes = sum(1 << lane for lane in np.unique(part).tolist())
                block += (part.tobytes(), _PADDING[-count & 7])
        if self.deliver_at is not None:
            due = self.deliver_at[first:last]
            if due[0]:  # scheduled messages have a partition of their own, so all of these are or none is
                flags |= _DELIVER_AT
                prelude = _I64.pack(int(due.min()))
                block.append(due.tobytes())
        base_us = now_us
        if self.timestamp is not None:
            times = self.timestamp[first:last]
            base_us = int(times[0])
            if (times != base_us).any():
                flags |= _TIMESTAMPS
                block.append(times.tobytes())
        if self.key is not None and (keys := self.key[first:last]).null_count < count:
            flags |= _KEYS | (_KEY_NULLS if keys.null_count else 0)
            _add_column(block, heaps, keys)
        if self.headers is not None:
            rows = self.headers[first:last]
            if _size(rows):
                flags |= _HEADERS
                _add_column(block, heaps, rows)
        values = self.value[first:last]
        if values.null_count:
            flags |= _VALUE_NULLS
        elif _have_one_size(values):
            flags |= _FIXED_VALUES
        _add_column(block, heaps, values)
        fixed = _TAIL.pack(count, 0, base_us, 0, flags, lanes, 0)
        parts = [fixed, prelude, *block, *heaps]
        if codec:
            packed = compress(codec, b"".join((*block, *heaps)))
            parts = [fixed, prelude, packed, _PADDING[-len(packed) & 7]]
        crc, length = 0, CRC_FROM
        for piece in parts:
            crc = crc32c(piece, crc)
            length += len(piece)
        head = _HEAD.pack(MAGIC, VERSION, codec, length, crc, 0, 0, 0, 0)
        return bytearray().join((head, *parts))


_NOTHING: Final = _Rows(0, pa.array([], pa.binary()), *repeat(None, 7))


def _lanes(column: pa.Array) -> npt.NDArray[np.uint8]:
    if not pa.types.is_integer(column.type):
        found = pc.index_in(column.cast(pa.string()), pa.array(PRIORITIES))
        if found.null_count > column.null_count:
            wrong = column.filter(pc.and_(found.is_null(), column.is_valid()))[0]
            raise InvalidArgument(f"priority is one of {', '.join(PRIORITIES)} or 0 to 4, not {wrong.as_py()!r}")
        column = found
    lanes = pc.fill_null(column, PRIORITY_DEFAULT).to_numpy(zero_copy_only=False)
    wrong = (lanes < 0) | (lanes >= len(PRIORITIES))
    if wrong.any():
        raise InvalidArgument(f"priority is one of {', '.join(PRIORITIES)} or 0 to 4, not {lanes[wrong.argmax()]}")
    narrow: npt.NDArray[np.uint8] = lanes.astype(np.uint8)
    return narrow


def _times(column: pa.Array, missing: int) -> Longs:
    """Microseconds since 1970."""
    times: Longs = pc.fill_null(column.cast(_TIME, safe=False).cast(pa.int64()), missing).to_numpy(zero_copy_only=False)
    return times


def _ends(column: pa.BinaryArray) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)


def _size(column: pa.BinaryArray) -> int:
    ends = _ends(column)
    return int(ends[-1] - ends[0])


def _have_one_size(column: pa.BinaryArray) -> bool:
    ends = _ends(column)
    size = ends[1] - ends[0]
    return bool(size) and bool((np.diff(ends) == size).all())


def _add_column(block: list[Any], heaps: list[Any], column: pa.BinaryArray) -> None:
    """Validity and ends of a column to the block, its bytes to the heaps."""
    count = len(column)
    if column.null_count:
        bits = np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
        block += (bits.tobytes(), _PADDING[-len(bits) & 7])
        column = column.fill_null(b"")
    ends = _ends(column)
    start, stop = int(ends[0]), int(ends[-1])
    block.append((ends - ends[0]).tobytes() if start else ends.tobytes())
    if not count & 1:
        block.append(_PADDING[4])
    heap = column.buffers()[2]
    if heap is not None:
        heaps.append(memoryview(heap)[start:stop])
    heaps.append(_PADDING[start - stop & 7])
